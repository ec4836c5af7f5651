"""`block warm`: compile ahead, so that no request waits for a compiler."""

from __future__ import annotations

import click

from services.warmup import warm_up


@click.command()
def warm() -> None:
    """Compile the engine model's kernels into the cache (about a minute, once per version)."""
    click.echo("compiling the engine model: about a minute the first time, then it is kept", err=True)
    click.echo(f"kernels ready in {warm_up():.1f} s")
