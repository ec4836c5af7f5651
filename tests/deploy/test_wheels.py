"""Wheels build reproducibly: the same sources give the same bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (
    "pyproject.toml", "README.md", "length_tagger", "predictor", "protos", "scheduler", "services", "simulator", "deploy",
)  # fmt: skip
EPOCH = "1700000000"


def copied(to: Path) -> Path:
    """Copy the sources of both wheels; their times are new."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy)
        else:
            shutil.copy(source, to / name)
    return to


def digest_of_wheel(project: Path, out: Path) -> tuple[str, str]:
    """Build a wheel; return its name and the digest of its bytes."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = out.glob("*.whl")
    return wheel.name, hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.mark.parametrize("project", [".", "deploy/vllm_plugin"])
def test_a_wheel_is_the_same_from_another_folder_and_at_another_time(project: str, tmp_path: Path) -> None:
    """Built twice, from two copies with other times and other permissions of new files."""
    wheels = []
    for name, mask in (("one", 0o022), ("two", 0o077)):
        (folder := tmp_path / name).mkdir()
        before = os.umask(mask)
        try:
            sources = copied(folder)
        finally:
            os.umask(before)
        wheels.append(digest_of_wheel(sources / project, tmp_path / f"{name}-wheels"))
    assert wheels[0] == wheels[1]
