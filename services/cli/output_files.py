"""Files that commands write, and the bar that they show on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from predictor.profile import Profile

BAR = 100


@contextmanager
def share_bar(label: str = "measuring") -> Iterator[Callable[[float], None]]:
    """Show on a terminal how much of the time has passed."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    shown = 0
    with click.progressbar(length=BAR, label=label, show_pos=False, file=sys.stderr) as bar:

        def show(share: float) -> None:
            nonlocal shown
            if (reached := int(share * BAR)) > shown:
                bar.update(reached - shown)
                shown = reached

        yield show


def require_folder(output: str | None) -> None:
    """Refuse an output file that cannot be written, before minutes of work."""
    if output is not None and not Path(output).absolute().parent.is_dir():
        raise ValueError(f"output: {output} cannot be written: there is no such folder")


def save_profile(made: Profile, output: str) -> None:
    """Write a profile to a file."""
    from predictor.profile import profile_to_json

    save_text(profile_to_json(made), output)


def save_text(text: str, output: str) -> None:
    """Write a text to a file."""
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{output}: cannot be written: {error.strerror}") from None
