"""Files that commands write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from predictor.profile import Profile


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
