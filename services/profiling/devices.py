"""The device that torch is to time kernels on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CUDA = "cuda"
CPU = "cpu"
DEVICES = ("auto", CUDA, CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device, what it is called, how torch drives it, and its memory; None where models share it with all else."""

    torch: torch.device
    name: str
    driven_by: str
    memory_bytes: int | None


def device_named(name: str) -> Device:
    """Find a device: `auto` is the accelerator where there is one; ValueError where what is asked for is not there."""
    if name not in DEVICES:
        raise ValueError(f"device: {name!r} is none of {', '.join(DEVICES)}")
    there = torch.cuda.is_available()
    if name == CUDA and not there:
        raise ValueError("device: torch sees no CUDA device here; --device cpu goes without")
    if name == CPU or not there:
        threads = f"{torch.get_num_threads()} threads"
        return Device(
            torch=torch.device(CPU), name="CPU", driven_by=f"torch {torch.__version__}, {threads}", memory_bytes=None
        )
    properties = torch.cuda.get_device_properties(0)
    return Device(
        torch=torch.device(CUDA, 0),
        name=str(properties.name),
        driven_by=f"torch {torch.__version__}, CUDA graphs",
        memory_bytes=int(properties.total_memory),
    )
