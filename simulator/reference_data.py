"""The folder of reference data, which is not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_FOLDER = Path(__file__).parents[2] / "shared" / "data"


def data_folder() -> Path:
    """Return the folder that BLOCK_DATA names."""
    folder = Path(os.environ.get("BLOCK_DATA", DEFAULT_FOLDER))
    if not folder.is_dir():
        raise ValueError(f"BLOCK_DATA: {folder} is not a directory")
    return folder
