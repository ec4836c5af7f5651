"""`block profile`: latency profiles; what there is, fitted from data, or estimated from a data sheet."""

from __future__ import annotations

import click

from predictor.profile import Profile, load_profile, profile_names, profile_to_json
from services.cli.engine_options import profile_named


@click.group()
def profile() -> None:
    """Latency profiles: how long an engine's steps take."""


@profile.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="The whole profile as JSON.")
def show(name: str | None, *, as_json: bool) -> None:
    """List the shipped profiles, or show one (by name or JSON file)."""
    if name is None:
        for known in profile_names():
            click.echo(_line(load_profile(known)))
        return
    chosen = profile_named(name)
    if as_json:
        click.echo(profile_to_json(chosen), nl=False)
        return
    click.echo(_line(chosen))
    click.echo(f"valid to {chosen.valid.max_tokens} tokens, {chosen.valid.max_sequences} sequences,", nl=False)
    click.echo(f" {chosen.valid.max_context_tokens} tokens of context")
    click.echo(f"source: {chosen.source}")


def _line(chosen: Profile) -> str:
    error = (
        "exact by definition"
        if chosen.error is None
        else f"{chosen.error.mape:.1%} off on {chosen.error.n} held-out rows"
    )
    if chosen.kind == "roofline":
        error = "estimated from data sheets, not measured"
    engine = f"{chosen.model} on {chosen.tensor_parallel} x {chosen.gpu}, {chosen.dtype}"
    return f"{chosen.name:32} {engine}: {chosen.kind}, {error}"
