"""`block serve predictor`: the sidecar of an engine, or of all engines of a node."""

from __future__ import annotations

import socket
from dataclasses import fields
from typing import Any

import click

from predictor.config import FIELD_NAMES, EngineConfig
from predictor.lengths import DEFAULT_RESIDUAL, RESIDUALS
from services.cli.engine_options import CHOICES, HELP, profile_named
from services.cli.server_options import server_flag, server_options, server_settings

PORT = 50052
PROXY_PORT = 8001
MEBIBYTE = 2**20


def engine_flags(command: Any) -> Any:
    """Give the command every engine setting, for an engine that cannot be asked."""
    for spec in reversed(fields(EngineConfig)):
        flag, kind = spec.name.replace("_", "-"), str(spec.type)
        is_flag = "bool" in kind
        value: Any = click.Choice(CHOICES[spec.name]) if spec.name in CHOICES else int if "int" in kind else float
        command = server_flag(
            "predictor",
            f"--{flag}/--no-{flag}" if is_flag else f"--{flag}",
            type=None if is_flag else value,
            default=None,
            help=f"Of a mirrored engine. {HELP.get(spec.name, 'As in vLLM.')}",
        )(command)
    return command


@click.command()
@server_options("predictor", port=PORT)
@server_flag("predictor", "--instance-id", default="", help="What this instance is called: this machine's name.")
@server_flag(
    "predictor",
    "--state-file",
    default="",
    help="Where the engine shows its state, or will. Without it the engine is mirrored from its traffic.",
)
@server_flag(
    "predictor",
    "--engine",
    multiple=True,
    metavar="ID=STATE_FILE[,ENGINE_URL]",
    help="One of several engines on this node, instead of --instance-id, --state-file and --engine-url. Repeatable.",
)
@server_flag(
    "predictor",
    "--engine-url",
    default="",
    help="The engine's HTTP server, to ask whether it is well; to mirror an engine it must be told.",
)
@server_flag(
    "predictor", "--proxy-host", default="", help="Address for the clients of a mirrored engine; --host if not given."
)
@server_flag(
    "predictor", "--proxy-port", type=int, default=PROXY_PORT, help="Port for the clients of a mirrored engine."
)
@server_flag(
    "predictor", "--engine-speed", type=float, default=1.0, help="Engine seconds per second of a mirrored emulator."
)
@server_flag(
    "predictor",
    "--count-prompts/--no-count-prompts",
    default=True,
    help="Have a mirrored engine count prompts (its /tokenize); else they are estimated.",
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
@engine_flags
def predictor(
    instance_id: str,
    engine: tuple[str, ...],
    profile: str,
    *,
    poll_ms: float,
    state_file: str,
    engine_url: str,
    proxy_host: str,
    proxy_port: int,
    engine_speed: float,
    count_prompts: bool,
    **flags: Any,
) -> None:
    """Tell what requests would experience on an engine, or on several: gRPC, block.v1.Predictor.

    An engine that exports its state is read (--state-file). Any other is mirrored: with --engine-url alone the sidecar
    stands as a proxy before the engine, and needs a --profile; clients, and so the schedulers' list of instances, are
    to use the proxy's address.

    Engines of one node are best read by one process (--engine, for each): a scheduler then asks for all of them at
    once.
    """
    from predictor.indicators import warm_indicators
    from services.predictor_server.server import serve
    from services.predictor_server.settings import MirrorSettings, SidecarSettings
    from services.warmup import warm_up

    server = server_settings(flags)
    told = {name: flags.pop(name) for name in FIELD_NAMES}
    closely = {"poll_s": poll_ms / 1e3, **flags}
    if engine:
        if instance_id or state_file or engine_url:
            raise ValueError("engine: goes without instance_id, state_file and engine_url")
        engines = [SidecarSettings(**{**_engine_from_flag(text), **closely}) for text in engine]
    else:
        if not state_file and not engine_url:
            raise ValueError("state_file: is missing, and so is engine_url: an engine is read, or mirrored, or neither")
        mirror = None
        if not state_file:
            if not profile:
                raise ValueError("profile: is missing, and an engine that exports nothing names none")
            mirror = MirrorSettings(
                engine_url=engine_url,
                host=proxy_host or server.host,
                port=proxy_port,
                engine={name: value for name, value in told.items() if value is not None},
                speed=engine_speed,
                counts_prompts=count_prompts,
                max_concurrency=server.max_concurrency,
                max_body_bytes=server.max_message_mib * MEBIBYTE,
                drain_s=server.drain_s,
            )
        named = {"instance_id": instance_id or socket.gethostname(), "state_file": state_file, "engine_url": engine_url}
        engines = [SidecarSettings(**{**named, "mirror": mirror, **closely})]
    known = profile_named(profile) if profile else None
    warm_up()
    warm_indicators()
    serve(engines, server, known)


def _engine_from_flag(text: str) -> dict[str, str]:
    """Read ID=STATE_FILE[,ENGINE_URL]."""
    instance_id, equals, rest = text.partition("=")
    state_file, _, engine_url = rest.partition(",")
    if not (equals and instance_id.strip() and state_file.strip()):
        raise ValueError(f"engine: {text!r} must be ID=STATE_FILE or ID=STATE_FILE,ENGINE_URL")
    return {"instance_id": instance_id.strip(), "state_file": state_file.strip(), "engine_url": engine_url.strip()}
