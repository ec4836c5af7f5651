"""`block serve scheduler`: decides where requests go."""

from __future__ import annotations

from typing import Any

import click

from length_tagger.settings import TaggerSettings
from scheduler.policies import POLICIES
from scheduler.prefix.kv_block_hash import SEED
from services.cli.server_options import server_flag, server_options, server_settings
from services.instances import FromFile, InstanceSource, Listed, instance_from_flag, source_from_name

DEFAULTS = TaggerSettings()
PORT = 50051


@click.command()
@server_options("scheduler", port=PORT)
@server_flag(
    "scheduler",
    "--instance",
    multiple=True,
    metavar="ID=ENGINE_URL,SIDECAR",
    help="One engine and its sidecar's host:port; names of models may follow after further commas. Repeatable; in the "
    "environment, several are set apart by spaces.",
)
@server_flag(
    "scheduler", "--instances-file", metavar="FILE", help="TOML or JSON with a list `instances`; watched for changes."
)
@server_flag(
    "scheduler",
    "--instances-dns",
    metavar="NAME:ENGINE_PORT:SIDECAR_PORT",
    help="A DNS name; each of its addresses is an instance, whose sidecar calls it ADDRESS:ENGINE_PORT.",
)
@server_flag("scheduler", "--poll-s", type=float, default=1.0, help="How often the file or the name is looked at.")
@server_flag(
    "scheduler",
    "--policy",
    default="block",
    help=f"By which rule to decide, with its parameters: 'linear: lambda = 0.3', 'block: k = 8', 'expr: p_tokens * "
    f"batch_size'. There are {', '.join(POLICIES)}; block policies tells more.",
)
@server_flag(
    "scheduler",
    "--watch-s",
    type=float,
    default=0.1,
    help="How often sidecars tell of themselves, if a policy reads it.",
)
@server_flag("scheduler", "--seed", type=int, default=None, help="Of policies that draw; another for each process.")
@server_flag("scheduler", "--scheduler-id", default="", help="What this one is called in decisions: host/process.")
@server_flag(
    "scheduler",
    "--forecast-always/--no-forecast-always",
    default=False,
    help="Have the chosen instance forecast also for policies that need no forecast.",
)
@server_flag("scheduler", "--sidecar-deadline-ms", type=float, default=50.0, help="Longest wait for a sidecar.")
@server_flag(
    "scheduler", "--reservation-s", type=float, default=10.0, help="How long a promise lasts that no engine shows."
)
@server_flag(
    "scheduler",
    "--most-conflicts",
    type=int,
    default=10,
    help="Times that a request yields to those decided elsewhere at the same time.",
)
@server_flag("scheduler", "--most-held", type=int, default=1000, help="Most requests of a model that a policy holds.")
@server_flag("scheduler", "--max-deciding", type=int, default=8, help="Most fan-outs at once; more requests wait.")
@server_flag(
    "scheduler",
    "--provisioner",
    multiple=True,
    metavar="ADDRESS",
    help="host:port of a provisioner, which is told of forecasts and outcomes. Repeatable: all that may lead.",
)
@server_flag("scheduler", "--tagger", metavar="ADDRESS", default="", help="host:port of the length tagger.")
@server_flag("scheduler", "--tagger-deadline-ms", type=float, default=10.0, help="Longest wait for it.")
@server_flag(
    "scheduler",
    "--constant-tokens",
    type=float,
    default=DEFAULTS.constant_tokens,
    help="Length of answers while no tagger tells.",
)
@server_flag("scheduler", "--constant-spread", type=float, default=DEFAULTS.constant_spread, help="Its spread.")
@server_flag("scheduler", "--record", metavar="FILE", default="", help="Decisions and outcomes as JSON lines.")
@server_flag("scheduler", "--record-share", type=float, default=1.0, help="Of requests, drawn by their ids.")
@server_flag("scheduler", "--record-mib", type=float, default=256.0, help="Most mebibytes of FILE and FILE.1 together.")
@server_flag(
    "scheduler",
    "--record-candidates/--no-record-candidates",
    default=False,
    help="Also all candidates of each decision.",
)
@server_flag(
    "scheduler",
    "--tokenizer",
    metavar="FILE",
    default="",
    help="The model's tokenizer.json: sizes Generate's prompts, and finds their blocks in engines' prefix caches.",
)
@server_flag(
    "scheduler",
    "--chat-template",
    metavar="FILE",
    default="",
    help="Of conversations, as engines were told; without, the one beside the tokenizer.",
)
@server_flag("scheduler", "--block-tokens", type=int, default=16, help="Of the engines' KV blocks.")
@server_flag("scheduler", "--hash-seed", default=SEED, help="The engines' PYTHONHASHSEED, where they have one.")
@server_flag("scheduler", "--attempts", type=int, default=3, help="Engines that Generate tries for one request.")
@server_flag(
    "scheduler", "--first-token-s", type=float, default=120.0, help="Generate's longest wait for a first token."
)
@server_flag("scheduler", "--idle-s", type=float, default=60.0, help="Generate's longest wait for any other.")
def scheduler(  # noqa: PLR0917 - click names them all
    instance: tuple[str, ...],
    instances_file: str | None,
    instances_dns: str | None,
    poll_s: float,
    sidecar_deadline_ms: float,
    tagger_deadline_ms: float,
    provisioner: tuple[str, ...],
    constant_tokens: float,
    constant_spread: float,
    **flags: Any,
) -> None:
    """Decide where requests go: gRPC, block.v1.Scheduler."""
    from services.scheduler_server import SchedulerSettings, serve

    server = server_settings(flags)
    source = source_from(instance, instances_file, instances_dns)
    if not 0 < poll_s < 1e6:
        raise ValueError(f"poll_s: must be a time above 0, not {poll_s}")
    settings = SchedulerSettings(
        sidecar_deadline_s=seconds("sidecar_deadline_ms", sidecar_deadline_ms),
        tagger_deadline_s=seconds("tagger_deadline_ms", tagger_deadline_ms),
        without_tagger=TaggerSettings(constant_tokens=constant_tokens, constant_spread=constant_spread),
        provisioners=provisioner,
        **flags,
    )
    serve(settings, server, source, poll_s)


def seconds(name: str, milliseconds: float) -> float:
    """Read a deadline."""
    if not 0 < milliseconds < 1e9:
        raise ValueError(f"{name}: must be a time above 0, not {milliseconds}")
    return milliseconds / 1e3


def source_from(listed: tuple[str, ...], file: str | None, name: str | None) -> InstanceSource:
    """Find out where the list of instances is; there is one place."""
    given = [bool(listed), bool(file), bool(name)]
    if sum(given) != 1:
        raise ValueError("instances: give one of --instance, --instances-file and --instances-dns")
    if file:
        return FromFile(file)
    return source_from_name(name) if name else Listed([instance_from_flag(text) for text in listed])
