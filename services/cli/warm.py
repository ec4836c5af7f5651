"""`block warm`: compiles the kernels ahead of time."""

from __future__ import annotations

import time

import click


@click.command()
def warm() -> None:
    """Compile all kernels into the cache: about a minute, once per version."""
    from predictor.indicators import warm_indicators
    from simulator.warmup import warm_simulator

    start_s = time.monotonic()
    warmed()
    warm_indicators()
    warm_simulator()
    click.echo(f"kernels ready in {time.monotonic() - start_s:.1f} s")


def warmed() -> float:
    """Compile the engine model's kernels or load them from the cache; return the seconds it took."""
    from services.warmup import warm_up

    click.echo("compiling the engine model: this takes about a minute the first time", err=True)
    return warm_up()
