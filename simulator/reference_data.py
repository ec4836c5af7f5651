"""Where the data lies that is not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

BESIDE_THE_CHECKOUT = Path(__file__).parents[2] / "shared" / "data"


def data_folder() -> Path:
    """Find the folder that BLOCK_DATA names."""
    folder = Path(os.environ.get("BLOCK_DATA", BESIDE_THE_CHECKOUT))
    if not folder.is_dir():
        raise ValueError(f"BLOCK_DATA: {folder} is no directory")
    return folder
