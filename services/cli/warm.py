"""`block warm`: compiles the kernels ahead of time."""

from __future__ import annotations

import time
from itertools import count

import click


@click.command()
@click.option("--servers", is_flag=True, help="Compile only what servers need; the simulator has many more kernels.")
def warm(*, servers: bool) -> None:
    """Compile all kernels into the cache: about a minute, once per version."""
    from predictor.indicators import warm_indicators

    start_s = time.monotonic()
    warmed()
    warm_indicators()
    if not servers:
        from simulator.warmup import warm_simulator

        click.echo("compiling the simulator", err=True)
        warm_simulator()
    click.echo(f"kernels ready in {time.monotonic() - start_s:.1f} s")


def warmed() -> float:
    """Compile the engine model's kernels or load them from the cache; return the seconds it took."""
    from predictor.batching import BATCHERS
    from services.cli.progress_bars import bar
    from services.warmup import warm_up

    click.echo("compiling the engine model: this takes about a minute the first time", err=True)
    with bar(len(BATCHERS), "kernels") as at:
        done = count(1)
        return warm_up(lambda: at(next(done)))
