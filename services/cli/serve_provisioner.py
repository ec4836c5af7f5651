"""`block serve provisioner`: looks after the number of instances."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from scheduler.provisioning import RULE_NAMES
from scheduler.provisioning.limits import AIM_NAMES, LIMIT_NAMES, Aims, ScalingLimits
from services.cli.server_options import F, server_flag, server_options, server_settings

PORT = 50054
HOOKS = ("process", "exec", "webhook", "kubernetes")
AIMS, LIMITS = Aims(), ScalingLimits()


def flag(name: str, **attributes: Any) -> Callable[[F], F]:
    """Make one of this server's flags."""
    return server_flag("provisioner", name, **attributes)


@click.command()
@server_options("provisioner", port=PORT)
@flag("--folder", default="", metavar="DIR", help="Where journal, lease and the list of instances are kept.")
@flag("--pool", default="default", help="What the instances are called together.")
@flag("--model", default="", help="That they serve; empty: whatever they are asked for.")
@flag("--rule", default="headroom", help=f"One of {', '.join(RULE_NAMES)}, or several joined by +.")
@flag("--schedule", default="", help="For the rule schedule, UTC: 'mon-fri 07:30-19:00=8; 00:00-07:30=2'.")
@flag("--threshold-s", type=float, default=AIMS.threshold_s, help="e2e latency that must not be reached.")
@flag("--quantile", type=float, default=AIMS.quantile, help="Of forecasts, that headroom keeps below it.")
@flag(
    "--low-share", type=float, default=AIMS.low_share, help="Of the threshold, below which preempt and relief shrink."
)
@flag("--horizon-s", type=float, default=AIMS.horizon_s, help="How far ahead to look at most.")
@flag("--cold-start-s", type=float, default=AIMS.cold_start_s, help="Of an instance, until one was measured.")
@flag("--target-share", type=float, default=AIMS.target_share, help="Of the threshold that headroom may plan for.")
@flag("--seats", type=int, default=AIMS.seats, help="An engine's max-num-seqs; 0: not known.")
@flag("--kv-tokens", type=int, default=AIMS.kv_tokens, help="An engine's KV cache in tokens; 0: not known.")
@flag("--min-instances", type=int, default=LIMITS.min_instances)
@flag("--max-instances", type=int, default=LIMITS.max_instances)
@flag("--step", type=int, default=LIMITS.step, help="Most that start, or leave, at a time.")
@flag("--cooldown-s", type=float, default=LIMITS.cooldown_s, help="Between a change and a start.")
@flag("--calm-s", type=float, default=LIMITS.calm_s, help="How long fewer must have been enough before one leaves.")
@flag("--starts-per-h", type=int, default=LIMITS.starts_per_h, help="Most starts within any hour.")
@flag("--shrink/--no-shrink", default=LIMITS.shrink, help="Whether instances ever leave.")
@flag("--provisioner-id", default="", help="What this one is called: host/process.")
@flag("--tick-s", type=float, default=1.0, help="How often to look.")
@flag("--leave-s", type=float, default=300.0, help="Longest wait for a leaving instance's requests.")
@flag("--settle-s", type=float, default=3.0, help="For schedulers to hear that an instance is leaving.")
@flag("--attempts", type=int, default=8, help="At one action.")
@flag("--dry-run/--no-dry-run", default=False, help="Only say what would be done.")
@flag("--hook", type=click.Choice(HOOKS), default="process", help="What carries actions out.")
@flag("--engine-command", default="", help="process: with {port}, {name}, {state}; an emulated engine if empty.")
@flag("--engine-flags", default="", help="process: of the emulated engine.")
@flag("--sidecar-flags", default="", help="process: of the sidecars.")
@flag("--keep-instances/--end-instances", default=True, help="process: whether they go on without the provisioner.")
@flag("--exec", default="", help="exec: the command; it gets the action as JSON on standard input.")
@flag("--webhook", default="", help="webhook: the URL.")
@flag("--webhook-secret", default="", help="webhook: what actions are signed with.")
@flag("--hook-timeout-s", type=float, default=60.0, help="exec, webhook: longest wait for an answer.")
@flag("--kubernetes", default="", help="kubernetes: NAMESPACE/deployment/NAME or NAMESPACE/statefulset/NAME.")
@flag("--engine-port", type=int, default=8000, help="kubernetes: of each pod.")
@flag("--sidecar-port", type=int, default=50052, help="kubernetes: of each pod.")
@flag("--lease", default="", metavar="NAMESPACE/NAME", help="A Kubernetes Lease; a lock in the folder if empty.")
def provisioner(**flags: Any) -> None:
    """Look after the number of instances: gRPC, block.v1.Provisioner. One of several acts, whoever has the lease."""
    from services.provisioner_server import ProvisionerSettings, serve

    server = server_settings(flags)
    flags["drain_s"] = flags.pop("leave_s")
    limits = ScalingLimits(**{name: flags.pop(name) for name in LIMIT_NAMES})
    aims = Aims(**{name: flags.pop(name) for name in AIM_NAMES})
    hook = hook_from(flags, Path(flags["folder"]))
    lease = lease_from(flags.pop("lease"))
    serve(ProvisionerSettings(aims=aims, limits=limits, **flags), server, hook, lease)


def hook_from(flags: dict[str, Any], folder: Path) -> Callable[[], Any]:
    """Take the hook's settings out of the flags, and refuse what it could not do."""
    engine = {name: flags.pop(name) for name in ("engine_command", "engine_flags", "sidecar_flags")}
    keep = flags.pop("keep_instances")
    command, url, secret = (flags.pop(name) for name in ("exec", "webhook", "webhook_secret"))
    timeout_s, target = flags.pop("hook_timeout_s"), flags.pop("kubernetes")
    ports = {name: flags.pop(name) for name in ("engine_port", "sidecar_port")}
    kind = flags.pop("hook")
    if not 0 < timeout_s < 1e6:
        raise ValueError(f"hook_timeout_s: must be a time above 0, not {timeout_s}")
    if kind == "exec":
        from services.provisioner_server.hooks.command import Command

        made = Command(shlex.split(command), timeout_s)
        return lambda: made
    if kind == "webhook":
        from services.provisioner_server.hooks.webhook import Webhook

        hook = Webhook(url, secret, timeout_s=timeout_s)
        return lambda: hook
    if kind == "kubernetes":
        from services.provisioner_server.hooks.kubernetes import Scale, cluster_configuration

        namespace, resource, name = parts_of("kubernetes", target, 3, "NAMESPACE/deployment/NAME")
        return partial(Scale, cluster_configuration(), namespace=namespace, kind=resource, name=name, **ports)
    from services.provisioner_server.hooks.process import Processes

    return partial(Processes, folder / "instances", keep=keep, **engine)


def lease_from(text: str) -> Callable[[str], Any] | None:
    """Make a Kubernetes Lease, where one is named."""
    if not text:
        return None
    from services.provisioner_server.hooks.kubernetes import cluster_configuration
    from services.provisioner_server.lease import KubernetesLease

    namespace, name = parts_of("lease", text, 2, "NAMESPACE/NAME")
    configuration = cluster_configuration()
    return lambda own_id: KubernetesLease(configuration, namespace=namespace, name=name, own_id=own_id)


def parts_of(field: str, text: str, num: int, form: str) -> list[str]:
    """Split what is set apart by slashes."""
    parts = text.split("/")
    if len(parts) != num or not all(parts):
        raise ValueError(f"{field}: {text!r} must be {form}")
    return parts
