"""`block serve provisioner`: sizes the pool of instances."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from services.cli.settings_options import SettingValues, server_of, settings_options
from services.logs import LogSettings
from services.provisioner_server.settings import HookSettings, ProvisionerSettings
from services.rpc.settings import ServerSettings
from services.security.settings import EngineAccessSettings, TlsSettings
from services.settings import PORTS, CommandSettings, SettingsPart

SETTINGS = CommandSettings(
    "provisioner",
    SettingsPart(ServerSettings, defaults={"port": PORTS["provisioner"]}),
    LogSettings,
    TlsSettings,
    SettingsPart(EngineAccessSettings, without=("engine_ca", "engine_api_key_file")),
    ProvisionerSettings,
    HookSettings,
)


@click.command()
@settings_options(SETTINGS)
def provisioner(given: SettingValues) -> None:
    """Serve the provisioner, which sizes the pool of instances (gRPC service block.v1.Provisioner).

    Of several provisioners of a pool one acts: the one that holds the lease.
    """
    from services.provisioner_server.server import serve

    server = server_of(given)
    settings, hooks = given.make(ProvisionerSettings), given.make(HookSettings)
    serve(settings, server, hook_from(hooks, Path(settings.folder)), lease_from(hooks.lease))


def hook_from(hooks: HookSettings, folder: Path) -> Callable[[], Any]:
    """Check the settings of the hook, and return how it is made."""
    if hooks.hook == "exec":
        from services.provisioner_server.hooks.command import Command

        made = Command(shlex.split(hooks.command), hooks.hook_timeout_s)
        return lambda: made
    if hooks.hook == "webhook":
        from services.provisioner_server.hooks.webhook import Webhook

        webhook = Webhook(hooks.webhook, hooks.webhook_secret, timeout_s=hooks.hook_timeout_s)
        return lambda: webhook
    if hooks.hook == "kubernetes":
        from services.provisioner_server.hooks.kubernetes import Scale, cluster_configuration

        namespace, resource, name = parts_of("kubernetes", hooks.kubernetes, 3, "NAMESPACE/deployment/NAME")
        return partial(
            Scale,
            cluster_configuration(),
            namespace=namespace,
            kind=resource,
            name=name,
            engine_port=hooks.engine_port,
            sidecar_port=hooks.sidecar_port,
        )
    from services.provisioner_server.hooks.process import Processes

    return partial(
        Processes,
        folder / "instances",
        keep=hooks.keep_instances,
        engine_command=hooks.engine_command,
        engine_flags=hooks.engine_flags,
        sidecar_flags=hooks.sidecar_flags,
    )


def lease_from(text: str) -> Callable[[str], Any] | None:
    """Make a Kubernetes Lease, if one is named."""
    if not text:
        return None
    from services.provisioner_server.hooks.kubernetes import cluster_configuration
    from services.provisioner_server.lease import KubernetesLease

    namespace, name = parts_of("lease", text, 2, "NAMESPACE/NAME")
    configuration = cluster_configuration()
    return lambda own_id: KubernetesLease(configuration, namespace=namespace, name=name, own_id=own_id)


def parts_of(field: str, text: str, num: int, form: str) -> list[str]:
    """Split a text at its slashes into exactly this number of parts."""
    parts = text.split("/")
    if len(parts) != num or not all(parts):
        raise ValueError(f"{field}: {text!r} must be {form}")
    return parts
