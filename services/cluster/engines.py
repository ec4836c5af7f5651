"""The engines of a cluster: emulated by the engine model, or vLLM."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from services.cluster.child import Child, StartError
from services.cluster.device_assignment import environments_of
from services.cluster.kv_events import following_flags, publishing_flags
from services.cluster.link_security import LinkSecurity
from services.cluster.pools import connector_environment, connector_flags, emulator_flags
from services.cluster.programs import VllmServer
from services.cluster.settings import ClusterSettings, VllmSettings

ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}  # output is not buffered


def engines_of(
    settings: ClusterSettings, common: Sequence[str], state_files: Sequence[Path], security: LinkSecurity | None
) -> list[Child]:
    """Make the engines, each with its state file; mirrored engines write none."""
    if settings.vllm is None:
        return emulated_engines(settings, common, state_files)
    return vllm_engines(settings, settings.vllm, state_files, security)


def emulated_engines(settings: ClusterSettings, common: Sequence[str], state_files: Sequence[Path]) -> list[Child]:
    """Make emulated engines, each a process."""
    return [
        Child(
            engine.name, "engine", *common, "--state-file", "none" if settings.mirror else str(file),
            "--seed", str(number), *emulator_flags(engine), *rank_flags(settings), *kv_event_flags(settings, file),
            *settings.engine_flags,
        )
        for number, (engine, file) in enumerate(zip(settings.engines, state_files, strict=True))
    ]  # fmt: skip


def rank_flags(settings: ClusterSettings) -> tuple[str, ...]:
    """Write the flags of an emulated engine with several data-parallel ranks."""
    if settings.data_parallel == 1:
        return ()
    together = ("--data-parallel-lockstep",) if settings.lockstep else ()
    return ("--data-parallel-size", str(settings.data_parallel), *together)


def vllm_engines(
    settings: ClusterSettings, vllm: VllmSettings, state_files: Sequence[Path], security: LinkSecurity | None = None
) -> list[Child]:
    """Make engines that run vLLM with the plug-in, each on its own devices or cores."""
    arguments = (*vllm.arguments, *settings.engine_flags)
    certificates = () if security is None else security.vllm_flags()
    tls = None if security is None else security.client().http_context
    devices = environments_of(len(state_files), arguments, vllm.devices)
    engines = []
    for engine, file, device in zip(settings.engines, state_files, devices, strict=True):
        on_cpu = "CUDA_VISIBLE_DEVICES" not in device
        export = {"BLOCK_EXPORT": "0"} if settings.mirror else {"BLOCK_STATE_FILE": str(file)}
        connector = connector_environment(engine, settings.host, free_port(settings.host), os.environ, on_cpu=on_cpu)
        program = VllmServer(
            command=vllm.command, model=vllm.model, host=settings.host,
            arguments=(
                *connector_flags(engine, arguments, on_cpu=on_cpu), *kv_event_flags(settings, file), *arguments,
                *certificates,
            ),
            environment={**ENVIRONMENT, **device, **connector, **export},
            tls=tls,
        )  # fmt: skip
        engines.append(Child(engine.name, program=program, port=free_port(settings.host)))
    return engines


def kv_event_flags(settings: ClusterSettings, state_file: Path, *, follows: bool = False) -> list[str]:
    """Write the flags by which a mirrored engine publishes its KV events, or by which its sidecar follows them."""
    if not settings.mirror:
        return []
    arguments = (*(settings.vllm.arguments if settings.vllm is not None else ()), *settings.engine_flags)
    return following_flags(state_file, arguments) if follows else publishing_flags(state_file, arguments)


def require_exported(settings: ClusterSettings, state_files: Sequence[Path]) -> None:
    """Refuse a vLLM that serves without exporting its state: its environment has no plug-in."""
    if settings.vllm is None or settings.mirror:
        return
    for file in state_files:
        if not file.exists():
            raise StartError(
                f"{file.stem} serves, but exports no state: install deploy/vllm_plugin beside {settings.vllm.command}, "
                "or set mirror = true in [cluster]"
            )


def free_port(host: str) -> int:
    """Find a free port: vLLM does not report a port that it selects itself."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        taken.bind((host, 0))
        return int(taken.getsockname()[1])
