"""Runs Python in a process of its own, with compiled or with interpreted kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*arguments: str, interpreted: bool = False, text: str = "", **environment: str) -> str:
    """Run Python in the root of the repository with `text` as its input; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    if interpreted:
        environment["NUMBA_DISABLE_JIT"] = "1"
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
