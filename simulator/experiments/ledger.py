"""What has been measured already, so that what was interrupted goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from simulator.parallel import Runner

T = TypeVar("T")

LONGEST_NOTE = 200
SOURCES = ("predictor", "scheduler", "simulator")
NO_PART = (  # in what a run measures
    "provisioning", "placement_bound", "charts", "claims", "experiment", "findings", "ledger", "paper_tables",
    "sizing", "report", "metric_titles", "autoscaling_comparison",
)  # fmt: skip


def source_digest() -> str:
    """Name the code that results depend on: after an edit they are measured anew."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            named = {*path.relative_to(root).with_suffix("").parts}
            if path.suffix in (".py", ".json") and not named & {*NO_PART}:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def digest_of(*places: str, without: Sequence[str] = ()) -> str:
    """Name the code of some folders and files of the source, for results that depend on what is no part elsewhere."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for place in places:
        for path in sorted((root / place).rglob("*.py")) or [root / place]:
            if path.stem not in without:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Ledger:
    """A file of JSON lines, a result each, found by what was measured with which code."""

    def __init__(self, path: Path) -> None:
        """Read what there is; a line that was cut off counts for nothing."""
        self._path = path
        self._code = source_digest()
        self._known: dict[str, Any] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    self._known[entry["key"]] = entry["value"]
                except (ValueError, KeyError, TypeError):
                    continue

    def __len__(self) -> int:
        """How many results there are."""
        return len(self._known)

    def over(self, runner: Runner) -> Runner:
        """Have a runner do only what is not known, and remember what it finds; results must be JSON."""

        def remembering(measure: Callable[[T], Any], tasks: Sequence[T], /) -> Iterator[tuple[int, Any]]:
            keys = [self._key(measure, task) for task in tasks]
            known = [place for place, key in enumerate(keys) if key in self._known]
            for place in known:
                yield place, self._known[keys[place]]
            missing = [place for place, key in enumerate(keys) if key not in self._known]
            if not missing:
                return
            with self._path.open("a", encoding="utf-8") as out:
                for place, value in runner(measure, [tasks[place] for place in missing]):
                    key = keys[missing[place]]
                    self._known[key] = value
                    what = repr(tasks[missing[place]])[-LONGEST_NOTE:]  # for people
                    out.write(json.dumps({"key": key, "value": value, "what": what}) + "\n")
                    out.flush()
                    yield missing[place], value

        return remembering

    def _key(self, measure: Callable[[Any], Any], task: object) -> str:
        text = f"{self._code} {measure.__qualname__} {task!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]
