"""What a command says where its kernels have not been compiled yet, which takes a minute without any output."""

from __future__ import annotations

import sys
from pathlib import Path

import click


def say_if_compiling() -> None:
    """Say on a terminal why the first command takes long."""
    from numba.core import config

    if sys.stderr.isatty() and not Path(config.CACHE_DIR).is_dir():  # type: ignore[attr-defined]  # numba defines it
        click.echo("compiling the engine model: this takes about a minute the first time", err=True)
