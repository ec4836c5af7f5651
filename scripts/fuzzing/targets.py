"""What every target of the fuzzer is, and what all oracles share."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from typing import Protocol

ROOT = Path(__file__).parents[2]
SEEDS = ROOT / "tests" / "fuzz" / "seeds"


class FoundError(AssertionError):
    """An input shows what must not happen."""


class FuzzTarget(Protocol):
    """Reads inputs; `name` is that of its folder of seeds."""

    async def drawn(self, draw: Random) -> bytes:
        """Draw an input by the grammar."""

    async def put(self, data: bytes) -> None:
        """Read an input; FoundError, or any exception that is not refused properly, is a finding."""

    async def audit(self) -> None:
        """Check that nothing is left of the inputs, and that a valid one is served."""


Opened = AbstractAsyncContextManager[FuzzTarget]
Open = Callable[[Path], Opened]  # with a folder for files


def seeds_of(name: str) -> list[bytes]:
    """Read the kept inputs of a target."""
    folder = SEEDS / name
    return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []


def kind_of(error: BaseException) -> str:
    """Name a finding by its type and the innermost line of this repository, so that it is reported once."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if str(ROOT) in frame.filename and "/scripts/fuzz" not in frame.filename]
    where = ours[-1] if ours else (frames[-1] if frames else None)
    text = str(error).partition("\n")[0][:60] if isinstance(error, FoundError) else ""
    place = f" at {Path(where.filename).relative_to(ROOT)}:{where.lineno}" if ours and where else ""
    return f"{type(error).__name__}{': ' + text if text else ''}{place}"


def require(condition: object, what: str) -> None:
    """Raise FoundError where a condition does not hold."""
    if not condition:
        raise FoundError(what)
