"""`block warm`: compile ahead, so that no request waits for a compiler."""

from __future__ import annotations

import time

import click

from services.warmup import warm_up


@click.command()
def warm() -> None:
    """Compile the engine model's kernels into the cache (about a minute, once per version)."""
    from predictor.indicators import warm_indicators
    from simulator.warmup import warm_simulator

    start_s = time.monotonic()
    warmed()
    warm_indicators()
    warm_simulator()
    click.echo(f"kernels ready in {time.monotonic() - start_s:.1f} s")


def warmed() -> float:
    """Compile, or load from the cache, and say beforehand that it may take a while; return the seconds it took."""
    click.echo("compiling the engine model: about a minute the first time, then it is kept", err=True)
    return warm_up()
