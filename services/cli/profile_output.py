"""How the commands of `block profile` describe and write a profile."""

from __future__ import annotations

import click

from predictor.profile import ROOFLINE, Profile, profile_to_json
from services.cli.output_files import save_profile

OUTPUT = click.option("--output", "-o", metavar="FILE", help="File of the profile.  [default: standard output]")


def profile_line(chosen: Profile) -> str:
    """Describe a profile in one line."""
    error = (
        "exact by definition"
        if chosen.error is None
        else f"{chosen.error.mape:.1%} off on {chosen.error.n} held-out rows"
    )
    if chosen.kind == ROOFLINE:
        error = "estimated, not measured"
    if (found := chosen.estimate) is not None:
        error += (
            f": on {found.n} published benchmarks, {found.gpu} GPU and {found.family} model family, TPOT is"
            f" {found.tpot_p50:.0%} off in the median and {found.tpot_p90:.0%} in the 90th percentile, TTFT"
            f" {found.ttft_p50:.0%} and {found.ttft_p90:.0%}"
        )
    engine = f"{chosen.model} on {chosen.tensor_parallel} x {chosen.gpu}, {chosen.dtype}"
    return f"{chosen.name:32} {engine}: {chosen.kind}, {error}"


def put_profile(made: Profile, output: str | None) -> None:
    """Print a profile, or write it to a file."""
    if output is None:
        click.echo(profile_to_json(made), nl=False)
        return
    save_profile(made, output)
    click.echo(profile_line(made))
