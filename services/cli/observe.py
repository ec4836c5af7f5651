"""`block observe`: records what one engine serves for a while."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from predictor.config import EngineConfig
from services.cli.engine_options import ENGINE, EngineModelSettings, engine_config, profile_named, settings_in
from services.cli.output_files import require_folder
from services.cli.progress_bars import share_bar
from services.cli.settings_options import SettingValues, settings_options
from services.load.request_format import RequestFormat
from services.settings import PORTS, default_of, seconds_of

if TYPE_CHECKING:
    from predictor.profile import Profile
    from services.predictor_server.settings import MirrorSettings
    from simulator.accuracy.window import ObservedWindow

DURATION = click.option(
    "--duration", default="60s", metavar="TIME", show_default=True, help="How long to observe; Ctrl-C ends it early."
)
STATE_FILE = click.option("--state-file", metavar="FILE", default=None, help="State file that the engine exports.")


@click.command()
@STATE_FILE
@click.option("--engine-url", metavar="URL", default=None, help="OpenAI endpoint: a proxy in front of it observes.")
@click.option("--proxy-port", type=int, default=PORTS["engine_proxy"], show_default=True, help="Port of that proxy.")
@click.option("--record", metavar="FILE", default=None, help="Recording of schedulers or gateways (their --record).")
@click.option("--instance", default="", help="Name of the instance; of a recording, the one to take.")
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0, min_open=True),
    default=default_of(RequestFormat, "time_scale"),
    show_default=True,
    help="Endpoint seconds per second, of an emulated engine behind the proxy.",
)
@DURATION
@click.option("--output", "-o", metavar="FILE", default="-", help="File of the window.  [default: standard output]")
@settings_options(ENGINE)
@click.option("--json", "as_json", is_flag=True, help="Print what was observed as one JSON object.")
def observe(
    given: SettingValues,
    *,
    state_file: str | None,
    engine_url: str | None,
    proxy_port: int,
    record: str | None,
    instance: str,
    time_scale: float,
    duration: str,
    output: str,
    as_json: bool,
) -> None:
    """Record a window of what one engine serves: requests, when their tokens came, and steps.

    Name one source. An engine with the plug-in, or an emulated one, is observed by its --state-file: with its steps,
    its settings, and its state at the beginning. Any other OpenAI endpoint is observed by a proxy in front of it
    (--engine-url): clients use the proxy's address meanwhile. A --record of schedulers or gateways is converted.
    `block bench --window` observes its own load.

    `block accuracy` compares a window with the engine model.
    """
    duration_s = seconds_of(duration, "duration")
    if sum(source is not None for source in (state_file, engine_url, record)) != 1:
        raise ValueError("state_file: name one source: --state-file, --engine-url or --record")
    if as_json and output == "-":
        raise ValueError("output: name a file when --json has standard output")
    require_folder(output)
    profile = profile_in(given)
    if state_file is not None:
        window = observed_by_state_file(state_file, duration_s, profile, instance)
    elif record is not None:
        from services.observing.recordings import window_of_recording

        window = window_of_recording(record, instance, _config(given, profile), profile=profile or "")
    else:
        from services.predictor_server import settings

        assert engine_url is not None
        window = _observed_by_proxy(
            given,
            settings.MirrorSettings(engine_url=engine_url.rstrip("/").removesuffix("/v1"), port=proxy_port),
            duration_s,
            profile=profile,
            instance=instance,
            clock_rate=time_scale,
        )
    _write(window, output)
    about = {
        "instance": window.header.instance,
        "duration_s": window.header.end_s - window.header.begin_s,
        "num_requests": len(window.requests),
        "num_complete": window.num_complete,
        "num_steps": len(window.steps),
        "num_lost_steps": window.steps.num_lost,
    }
    if as_json:
        click.echo(json.dumps(about))
        return
    click.echo(
        f"{about['num_requests']} requests ({about['num_complete']} came to their end) and {about['num_steps']} steps "
        f"in {about['duration_s']:.1f} s",
        err=True,
    )


def profile_in(given: SettingValues) -> Profile | None:
    """Load the profile that was named; None where none was."""
    name = given.make(EngineModelSettings).profile
    return profile_named(name) if given.was_set("profile") else None


def _config(given: SettingValues, profile: Profile | None) -> EngineConfig:
    if profile is None:
        raise ValueError("profile: is missing; a recording does not name the engine's settings")
    return engine_config(profile, settings_in(given))


def observed_by_state_file(
    state_file: str, duration_s: float, profile: Profile | None, instance: str = ""
) -> ObservedWindow:
    """Observe an engine by its state file, with a bar on a terminal."""
    from services.observing.observing import observe_state_file

    with share_bar("observing") as progress:
        return observe_state_file(state_file, duration_s, profile=profile or "", instance=instance, progress=progress)


def _observed_by_proxy(
    given: SettingValues, settings: MirrorSettings, duration_s: float, **about: Any
) -> ObservedWindow:
    import asyncio

    from services.observing.observing import observe_proxy

    known = settings_in(given)

    def serving(own_port: int) -> None:
        click.echo(f"send requests to http://{settings.host}:{own_port}", err=True)

    with share_bar("observing") as progress:
        return asyncio.run(observe_proxy(settings, duration_s, known, serving=serving, progress=progress, **about))


def _write(window: ObservedWindow, output: str) -> None:
    from services.observing.window_writing import write_window
    from simulator.accuracy.window_file import window_lines

    if output == "-":
        for line in window_lines(window):
            click.echo(line)
        return
    write_window(window, Path(output))
