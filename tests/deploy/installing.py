"""Installs the vLLM plug-in from this checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "deploy" / "vllm_plugin"


def pip_install(source: Path, target: Path) -> None:
    """Install a folder or an archive, built with what this environment has."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(target), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
