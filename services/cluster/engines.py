"""The engines of a cluster, of two kinds: emulated by our own engine model, or vLLM's."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from services.cluster.child import Child, StartError
from services.cluster.device_assignment import places_for
from services.cluster.programs import VllmServer
from services.cluster.settings import ClusterSettings, VllmSettings

QUIET = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}  # lines come when they are said


def engines_of(settings: ClusterSettings, common: Sequence[str], state_files: Sequence[Path]) -> list[Child]:
    """Make as many engines as there are state files, which they leave alone where they are mirrored."""
    if settings.vllm is None:
        return emulated(settings, common, state_files)
    return real(settings, settings.vllm, state_files)


def emulated(settings: ClusterSettings, common: Sequence[str], state_files: Sequence[Path]) -> list[Child]:
    """Emulate each in a process of its own."""
    return [
        Child(
            file.stem, "engine", *common, "--state-file", "none" if settings.mirror else str(file),
            "--seed", str(number), *settings.engine_flags,
        )
        for number, file in enumerate(state_files)
    ]  # fmt: skip


def real(settings: ClusterSettings, vllm: VllmSettings, state_files: Sequence[Path]) -> list[Child]:
    """Serve each by vLLM, with the plug-in, on devices or cores of its own."""
    arguments = (*vllm.arguments, *settings.engine_flags)
    engines = []
    for file, place in zip(state_files, places_for(len(state_files), arguments, vllm.devices), strict=True):
        shown = {"BLOCK_EXPORT": "0"} if settings.mirror else {"BLOCK_STATE_FILE": str(file)}
        program = VllmServer(
            command=vllm.command, model=vllm.model, host=settings.host, arguments=arguments,
            environment={**QUIET, **place, **shown},
        )  # fmt: skip
        engines.append(Child(file.stem, program=program, port=free_port(settings.host)))
    return engines


def require_shown(settings: ClusterSettings, state_files: Sequence[Path]) -> None:
    """See to it that engines that serve show their state; a vLLM does so by our plug-in only."""
    if settings.vllm is None or settings.mirror:
        return
    for file in state_files:
        if not file.exists():
            raise StartError(
                f"{file.stem} serves, but shows no state: install deploy/vllm_plugin beside {settings.vllm.command}, "
                "or set mirror = true in [cluster]"
            )


def free_port(host: str) -> int:
    """Choose a port that nobody has at this moment: vLLM does not tell of one that it chose itself."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        taken.bind((host, 0))
        return int(taken.getsockname()[1])
