"""The locks of the image: every package has its version and hashes, and nothing names this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import generate_licences
from scripts.lock_dependencies import BUILD_LOCK, LOCK, WANTED, locked_in, problems_of, wanted_by_image

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("lock", [LOCK, BUILD_LOCK], ids=lambda path: path.name)
def test_a_lock_fits_the_project(lock: Path) -> None:
    """Every requirement is locked with hashes."""
    text = lock.read_text()
    assert problems_of(text, WANTED[lock]()) == []
    assert len(locked_in(text)) >= len(WANTED[lock]())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: re.sub(r"numpy==[\d.]+", "numpy==1.0", text), "numpy: 1.0 is locked, >=2.0 is wanted"),
        (lambda text: text.replace("\nhpack==", "\nother=="), "hpack: is missing"),
        (lambda text: text + "alone==1.0\n", "alone: has no hash"),
        (lambda text: "--index-url https://example.org/simple\n" + text, "line 1: names a place"),
        (lambda text: "--find-links /wheels\n" + text, "line 1: names a place"),
    ],
)
def test_a_lock_that_does_not_fit_is_found(change: Callable[[str], str], problem: str) -> None:
    """A version that is too old, a package that is missing, one without hashes, and a place."""
    assert problem in problems_of(change(LOCK.read_text()), wanted_by_image())


def test_the_image_is_installed_by_hashes() -> None:
    """Packages come from the locks, and Block's own wheels are built without others."""
    image = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    commands = re.findall(r"bin/pip (install|wheel) ([^&\n]*)", image)
    assert len(commands) == 6
    for name, arguments in commands:
        locked = "--require-hashes -r /locks/" in arguments
        assert locked or "--no-deps" in arguments
        assert locked or ("--no-build-isolation" if name == "wheel" else "--no-index") in arguments


def test_every_locked_package_has_its_licence_listed() -> None:
    """With the locked version."""
    page = (ROOT / "docs" / "reference" / "licences.md").read_text()
    listed = dict(re.findall(r"^\| ([\w-]+) \| (\d[\w.]*) \| \S", page, re.MULTILINE))
    assert listed == {name: package.version for name, package in locked_in(LOCK.read_text()).items()}


@pytest.mark.slow
def test_the_page_of_licences_is_up_to_date() -> None:
    """The generator would not change it."""
    command = [sys.executable, "scripts/generate_licences.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_licence_of_a_locked_version_stays_where_another_one_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page describes the image, whichever versions are installed where it is generated."""
    name, package = next(iter(sorted(locked_in(LOCK.read_text()).items())))
    listed = f"| {name} | {package.version} | Licence of the image's |\n"
    monkeypatch.setattr(generate_licences, "distribution", lambda _: SimpleNamespace(version="0", metadata=Message()))
    assert next(generate_licences.rows(listed)) == listed
    assert "see the package" in next(generate_licences.rows(""))
