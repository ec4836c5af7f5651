"""Files that servers watch, changed by tests."""

from __future__ import annotations

from pathlib import Path


def replace_file(path: str | Path, text: str) -> None:
    """Replace a file as a whole, so that no reader sees a part of it."""
    new = Path(f"{path}.new")
    new.write_text(text)
    new.rename(path)
