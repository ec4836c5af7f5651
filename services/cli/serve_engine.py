"""`block serve engine`: an emulated engine behind vLLM's HTTP surface."""

from __future__ import annotations

from typing import Any

import click

from services.cli.engine_options import engine_config, engine_options, profile_named
from services.cli.server_options import server_flag, use_file
from services.logs import FORMATS, LEVELS, configure

PORT = 8000
STATE_FOLDER = "/dev/shm/block"  # noqa: S108 - where processes of one machine share memory


@click.command()
@click.option(
    "--config",
    metavar="TOML",
    envvar=["BLOCK_ENGINE_CONFIG", "BLOCK_CONFIG"],
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, path: use_file(context, path, "engine") if path else None,
    help="Settings: flags' names as keys, in a table [engine]. Flags and environment go first.",
)
@server_flag("engine", "--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 is everywhere.")
@server_flag("engine", "--port", type=int, default=PORT, help="Port to listen on; 0 is any free one.")
@server_flag("engine", "--served-model-name", default=None, help="Name of the model; the profile's if not given.")
@server_flag(
    "engine", "--name", default=None, help=f"State is told in {STATE_FOLDER}/NAME.state; engine-PORT if not given."
)
@server_flag("engine", "--state-file", default=None, help="Path of the state file; 'none' tells nothing.")
@server_flag(
    "engine",
    "--export-contents/--no-export-contents",
    default=True,
    help="Also tell what KV blocks hold, so that sidecars foresee prefix hits.",
)
@server_flag("engine", "--speed", type=float, default=1.0, help="Engine seconds per second.")
@server_flag("engine", "--noise", type=float, default=0.0, help="Relative standard deviation of step times.")
@server_flag("engine", "--seed", type=int, default=0, help="Of the noise, and of the lengths of answers.")
@server_flag(
    "engine", "--output-median", type=float, default=200.0, help="Median length of answers, unless asked for another."
)
@server_flag("engine", "--output-spread", type=float, default=0.8, help="Standard deviation of its logarithm.")
@server_flag(
    "engine", "--max-num-queued-reqs", type=int, default=10_000, help="Most unfinished requests; more get a 503."
)
@server_flag("engine", "--max-body-bytes", type=int, default=32 << 20, help="Largest request body; more gets a 413.")
@server_flag("engine", "--drain-s", type=float, default=30.0, help="Longest wait for requests under way at the end.")
@server_flag("engine", "--log-level", type=click.Choice(LEVELS), default="info")
@server_flag("engine", "--log-format", type=click.Choice(FORMATS), default="text")
@engine_options
def engine(
    profile_name: str,
    engine_file: str | None,
    *,
    host: str,
    port: int,
    served_model_name: str | None,
    name: str | None,
    state_file: str | None,
    export_contents: bool,
    speed: float,
    noise: float,
    seed: int,
    output_median: float,
    output_spread: float,
    max_num_queued_reqs: int,
    max_body_bytes: int,
    drain_s: float,
    log_level: str,
    log_format: str,
    **flags: Any,
) -> None:
    """Emulate an engine: the profile's step times, the local scheduler's rules, vLLM's HTTP surface.

    An answer is as long as its request says (max_tokens with ignore_eos, or the header x-block-output-tokens), else
    as a seeded distribution has it. POST /admin/fault, from this machine only, takes {"slow": FACTOR}, {"hang": true},
    {"refuse": true}, {"crash": true}, and {} to be well again.
    """
    from services.emulator.server import EmulatorSettings, serve

    configure(log_level, log_format)
    profile = profile_named(profile_name)
    config = engine_config(profile, engine_file, flags)
    path = f"{STATE_FOLDER}/{name or f'engine-{port}'}.state" if state_file is None else state_file
    settings = EmulatorSettings(
        host=host,
        port=port,
        model=served_model_name or profile.model,
        state_file="" if path == "none" else path,
        export_contents=export_contents,
        speed=speed,
        noise=noise,
        seed=seed,
        output_median=output_median,
        output_spread=output_spread,
        max_num_queued_reqs=max_num_queued_reqs,
        max_body_bytes=max_body_bytes,
        drain_s=drain_s,
    )
    serve(settings, config, profile)
