"""`block warm`: compiles the kernels ahead of time."""

from __future__ import annotations

import os
import time
from itertools import count

import click


@click.command()
@click.option("--servers", is_flag=True, help="Compile only what servers need; the simulator has many more kernels.")
def warm(*, servers: bool) -> None:
    """Compile all kernels into the cache: a few minutes, once per version."""
    from predictor.indicators import warm_indicators

    start_s = time.monotonic()
    warmed(simulator=not servers)
    warm_indicators()
    click.echo(f"kernels ready in {time.monotonic() - start_s:.1f} s")


def warmed(*, simulator: bool = False) -> None:
    """Compile the engine model's kernels or load them from the cache; those of the simulator only if so wanted."""
    from predictor.batching import BATCHERS
    from services.cli.progress_bars import bar
    from services.compilation import NUM_PROCESSES, SIMULATOR, compile_rules, compiling_beside
    from services.warmup import warm_up

    click.echo("compiling the engine model: this takes a few minutes the first time", err=True)
    with bar(2 * len(BATCHERS), "kernels") as at:
        done = count(1)

        def on_step() -> None:
            at(next(done))

        # the first one shows whether there is anything to compile, and compiles what all others share
        is_cached = compile_rules(0, len(BATCHERS), on_step)
        num_processes = 1 if is_cached else min(NUM_PROCESSES, os.cpu_count() or 1)
        with compiling_beside([f"{part}/{num_processes}" for part in range(1, num_processes)]):
            compile_rules(0, num_processes, on_step)
        with compiling_beside([SIMULATOR] if simulator and num_processes > 1 else []):
            warm_up(on_step)
    if simulator:
        from simulator.warmup import warm_simulator

        click.echo("compiling the simulator", err=True)
        warm_simulator()
