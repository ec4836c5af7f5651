"""A command whose kernels have not been compiled says so, on a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from numba.core import config

from services.cli.first_use import say_if_compiling


@pytest.mark.parametrize(("is_there", "is_terminal", "expected"), [
    (False, True, "compiling the engine model: this takes about a minute the first time\n"),
    (True, True, ""),
    (False, False, ""),
])  # fmt: skip
def test_the_first_use_is_announced(
    is_there: bool,
    is_terminal: bool,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And nothing is said where the cache is there, or where nobody reads it."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path if is_there else tmp_path / "none"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    say_if_compiling()
    assert capsys.readouterr().err == expected
