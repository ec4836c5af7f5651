"""`block accuracy`: how far the engine model is off on a window, and what a recalibration would change."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from predictor.config import EngineConfig
from services.cli.engine_options import ENGINE, profile_named, settings_in
from services.cli.observe import DURATION, STATE_FILE, observed_by_state_file, profile_in
from services.cli.output_files import require_folder, save_profile, save_text
from services.cli.settings_options import SettingValues, settings_options
from services.predictor_server.profile_watch_settings import ProfileWatchSettings
from services.settings import default_of, seconds_of

if TYPE_CHECKING:
    from predictor.profile import Profile
    from simulator.accuracy.window import ObservedWindow

DOES_NOT_HOLD = 1


@click.command()
@click.argument("window_file", metavar="[WINDOW]", required=False)
@STATE_FILE
@DURATION
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    default=default_of(ProfileWatchSettings, "tolerance"),
    show_default=True,
    help="Relative bias up to which a profile holds.",
)
@click.option("--recalibrate/--no-recalibrate", default=True, show_default=True, help="Show what that would change.")
@click.option("--output", "-o", metavar="FILE", default=None, help="File of the recalibrated profile.")
@click.option("--html", metavar="FILE", default=None, help="File of a report with charts.")
@click.option("--check", is_flag=True, help="Exit with status 1 if the profile does not hold.")
@settings_options(ENGINE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def accuracy(
    given: SettingValues,
    *,
    window_file: str | None,
    state_file: str | None,
    duration: str,
    tolerance: float,
    output: str | None,
    html: str | None,
    recalibrate: bool,
    check: bool,
    as_json: bool,
) -> int:
    """Replay WINDOW, which `block observe` has recorded, with the engine model, and show how far off it is.

    Errors are those of each request, of means and percentiles, by phase, and, where steps were observed, by batch. The
    profile and the engine's settings are the window's, unless they are given. With --state-file an engine is observed
    first.
    """  # fmt: skip
    from simulator.accuracy.accuracy import accuracy_of
    from simulator.accuracy.accuracy_report import as_html, as_text
    from simulator.accuracy.accuracy_report import as_json as report_of
    from simulator.accuracy.window_file import read_window

    if (window_file is None) == (state_file is None):
        raise ValueError("window: name a file that `block observe` has written, or the --state-file of an engine")
    if output is not None and not recalibrate:
        raise ValueError("output: goes without --no-recalibrate")
    for file in (output, html):
        require_folder(file)
    named = profile_in(given)
    if window_file is not None:
        window = read_window(window_file)
    else:
        assert state_file is not None
        window = observed_by_state_file(state_file, seconds_of(duration, "duration"), named)
    if settings := settings_in(given):
        window = window.with_engine(EngineConfig(**{**asdict(window.header.engine), **settings}))
    found = accuracy_of(window, profile_of(window, named), recalibrates=recalibrate)
    if output is not None and found.recalibration is not None:
        save_profile(found.recalibration.profile, output)
    if html is not None:
        save_text(as_html(found, tolerance), html)
    if as_json:
        click.echo(json.dumps(report_of(found, tolerance)))
    else:
        for line in as_text(found, tolerance):
            click.echo(line)
    return DOES_NOT_HOLD if check and found.holds(tolerance) is False else 0


def profile_of(window: ObservedWindow, named: Profile | None) -> Profile:
    """Return the profile that was named, or else the window's."""
    if named is not None:
        return named
    if window.profile is not None:
        return window.profile
    if not window.header.profile:
        raise ValueError("profile: is missing; the window names none")
    return profile_named(window.header.profile)
