"""Write Grafana's dashboards as JSON, into deploy/grafana/dashboards, which the Helm chart links to.

`--check` writes nothing. It fails if a file is not what would be written, if a folder has a JSON file that is not
written here, or if a query names a metric or a label that no part of Block and no vLLM engine has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scripts.dashboards import DASHBOARDS
from scripts.dashboards.known_metrics import faults_of, known_series

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "grafana" / "dashboards"


def main() -> None:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file or a query is wrong")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="one more folder for the dashboards")
    arguments = parser.parse_args()
    files = dict(written(arguments.folder))
    if not arguments.check:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return
    faults = [*faults_of_files(files), *faults_of_queries()]
    if faults:
        sys.exit("\n".join(faults))


def written(folders: Sequence[Path] = ()) -> Iterator[tuple[Path, str]]:
    """Return the files and their contents."""
    dashboards = {dashboard.file: json_text(dashboard.json()) for dashboard in DASHBOARDS}
    for folder in (FOLDER, *folders):
        yield from ((folder / name, text) for name, text in dashboards.items())


def json_text(dashboard: Mapping[str, object]) -> str:
    """Write JSON that changes by as few lines as possible."""
    return json.dumps(dashboard, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def faults_of_files(files: Mapping[Path, str]) -> Iterator[str]:
    """Say which files are not what would be written, and which are not written here."""
    remedy = f"run scripts/{Path(__file__).name}"
    for path, text in files.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield f"{shown(path)} is out of date; {remedy}"
    for folder in sorted({path.parent for path in files if path.suffix == ".json"}):
        for path in sorted(folder.glob("*.json")):
            if path not in files:
                yield f"{shown(path)} is not written by scripts/{Path(__file__).name}; remove it"


def faults_of_queries() -> Iterator[str]:
    """Say which queries name what does not exist."""
    known = known_series()
    for dashboard in DASHBOARDS:
        for row in dashboard.rows:
            for panel in row.panels:
                for query in panel.queries:
                    for fault in faults_of(query.expression, known):
                        yield f"{dashboard.title}, {panel.title}: {fault}"


def shown(path: Path) -> str:
    """Name a file as seen from the repository, if it is in it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    main()
