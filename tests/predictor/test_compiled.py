"""The cache of compiled kernels is named after all sources that their machine code depends on."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from predictor.compiled import FOLDERS, cache_name, kernel_sources

ROOT = Path(__file__).parents[2]
IS_KERNEL = re.compile(r"^@(small_|inner_)?kernel$|= (small_|inner_)?kernel\(", re.MULTILINE)
PACKAGES = ("length_tagger", "predictor", "scheduler", "services", "simulator")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a folder with the parts of Block that contain kernels, and no other, as where it is installed."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_every_file_with_a_kernel_is_covered() -> None:
    """Also one in a package that has none today."""
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    with_kernels = {path for path in sources if IS_KERNEL.search(path.read_text(encoding="utf-8"))}
    assert len(with_kernels) > 40
    assert with_kernels <= {*kernel_sources(ROOT)}


def test_equal_sources_share_a_cache(copied: Path) -> None:
    """Wherever they are."""
    assert cache_name(copied) == cache_name(ROOT)


@pytest.mark.parametrize(
    "edited",
    [
        "predictor/blocks.py",
        "simulator/request_slots.py",
        "services/emulator/state_export.py",
        "predictor/state.py",  # it has no kernel: its constants are a part of the machine code
    ],
)
def test_an_edit_starts_a_new_cache(copied: Path, edited: str) -> None:
    """Of any file that machine code depends on."""
    with (copied / edited).open("a") as file:
        file.write("# edited\n")
    assert cache_name(copied) != cache_name(ROOT)


def test_an_edit_of_other_code_keeps_the_cache(copied: Path) -> None:
    """Compiling takes minutes."""
    with (copied / "simulator" / "report_page.py").open("a") as file:
        file.write("# edited\n")
    assert cache_name(copied) == cache_name(ROOT)
