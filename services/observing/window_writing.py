"""Writes windows to files."""

from __future__ import annotations

from pathlib import Path

from simulator.accuracy.window import ObservedWindow
from simulator.accuracy.window_file import window_lines


def write_window(window: ObservedWindow, path: Path) -> None:
    """Write a window to a file, completely or not at all."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("w", encoding="utf-8") as out:
            out.writelines(f"{line}\n" for line in window_lines(window))
        beside.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None
