"""`block profile`: shows latency profiles; the commands that make them are in other files."""

from __future__ import annotations

import click

from predictor.profile import load_profile, profile_names, profile_to_json
from services.cli.engine_options import profile_named
from services.cli.profile_fit import fit
from services.cli.profile_measurement import measure, timed_kernels, transfer
from services.cli.profile_output import profile_line


@click.group()
def profile() -> None:
    """Show, measure or fit latency profiles, which predict how long an engine's steps take."""


@profile.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the whole profile as JSON.")
def show(name: str | None, *, as_json: bool) -> None:
    """List the shipped profiles, or show one, by name or JSON file."""
    if name is None:
        for known in profile_names():
            click.echo(profile_line(load_profile(known)))
        return
    chosen = profile_named(name)
    if as_json:
        click.echo(profile_to_json(chosen), nl=False)
        return
    click.echo(profile_line(chosen))
    click.echo(f"valid to {chosen.valid.max_tokens} tokens, {chosen.valid.max_sequences} sequences,", nl=False)
    click.echo(f" {chosen.valid.max_context_tokens} tokens of context")
    click.echo(f"source: {chosen.source}")


for command in (measure, transfer, timed_kernels, fit):
    profile.add_command(command)
