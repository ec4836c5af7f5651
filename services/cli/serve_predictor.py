"""`block serve predictor`: the sidecar of one engine."""

from __future__ import annotations

import socket
from typing import Any

import click

from predictor.lengths import DEFAULT_RESIDUAL, RESIDUALS
from services.cli.engine_options import profile_named
from services.cli.server_options import server_flag, server_options, server_settings

PORT = 50052
STATE_FOLDER = "/dev/shm/block"  # noqa: S108 - where processes of one machine share memory


@click.command()
@server_options("predictor", port=PORT)
@server_flag("predictor", "--instance-id", default="", help="What this instance is called: this machine's name.")
@server_flag(
    "predictor",
    "--state-file",
    default=f"{STATE_FOLDER}/engine.state",
    help="Where the engine shows its state, or will.",
)
@server_flag(
    "predictor", "--engine-url", default="", help="The engine's HTTP server, to ask whether it is well; optional."
)
@server_flag(
    "predictor", "--profile", default="", help="Latency profile, by name or JSON file: the one that the engine names."
)
@server_flag(
    "predictor",
    "--residual",
    type=click.Choice(tuple(RESIDUALS)),
    default=DEFAULT_RESIDUAL,
    help="What is thought to be left of an answer.",
)
@server_flag("predictor", "--poll-ms", type=float, default=100.0, help="How often the engine is looked at unasked.")
@server_flag("predictor", "--health-s", type=float, default=1.0, help="How often it is asked whether it is well.")
@server_flag(
    "predictor", "--stall-s", type=float, default=10.0, help="A step so much too late is taken for the engine's end."
)
@server_flag(
    "predictor", "--forget-s", type=float, default=30.0, help="After so long without a step, its pace is learnt anew."
)
def predictor(instance_id: str, profile: str, poll_ms: float, **flags: Any) -> None:
    """Tell what requests would experience on one engine: gRPC, block.v1.Predictor."""
    from services.predictor_server import SidecarSettings, serve
    from services.warmup import warm_up

    server = server_settings(flags)
    settings = SidecarSettings(instance_id=instance_id or socket.gethostname(), poll_s=poll_ms / 1e3, **flags)
    known = profile_named(profile) if profile else None
    warm_up()
    serve(settings, server, known)
