"""`block profile measure`, but for its flags: an engine that runs or is started, measured, and its profile fitted."""

from __future__ import annotations

import re
import subprocess
from contextlib import AsyncExitStack
from dataclasses import dataclass

from predictor.profile import Profile
from services.http.client import origin_of
from services.profiling.measuring import Measured, MeasurementPlan, Progress, measure
from services.profiling.profile_fit import profile_of
from services.profiling.starting import started

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
ASK_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Which engine to measure, for how long, and what to call the profile; '' where that is to be found out."""

    engine_url: str = ""
    state_file: str = ""
    start: str = ""  # a command
    start_s: float = 600.0
    budget_s: float = 180.0
    seed: int = 0
    api_key: str | None = None
    name: str = ""
    gpu: str = ""
    dtype: str = "auto"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        """Refuse what names no engine, or two."""
        if bool(self.engine_url) == bool(self.start):
            raise ValueError("engine_url: say where the engine runs, or how to --start one; not both")
        if self.engine_url and not self.state_file:
            raise ValueError("state_file: is missing; an engine shows its state where BLOCK_STATE_FILE told it to")


async def measured_profile(orders: MeasureOptions, progress: Progress) -> tuple[Profile, Measured]:
    """Carry the orders out."""
    async with AsyncExitStack() as stack:
        url, state_file = orders.engine_url, orders.state_file
        if orders.start:
            engine = await stack.enter_async_context(started(orders.start, state_file, orders.start_s))
            url, state_file = engine.url, engine.state_file
        wish = MeasurementPlan(
            origin=origin_of(url.rstrip("/").removesuffix("/v1")),
            state_file=state_file,
            budget_s=orders.budget_s,
            seed=orders.seed,
            api_key=orders.api_key,
        )
        measured = await measure(wish, progress)
    gpu = orders.gpu or _gpu()
    profile = profile_of(
        measured,
        name=orders.name or named_after(measured.model, gpu),
        gpu=gpu,
        tensor_parallel=orders.tensor_parallel,
        dtype=orders.dtype,
    )
    return profile, measured


def seconds_of(text: str, field: str) -> float:
    """Read a time such as 90, 90s, 3m or 1h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None:
        raise ValueError(f"{field}: {text!r} is no time such as 90s or 3m")
    return float(found[1]) * UNITS[found[2]]


def _gpu() -> str:
    """Ask what accelerator is in this machine; CPU where there is none."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],  # noqa: S607 - wherever it is
            capture_output=True, text=True, check=False, timeout=ASK_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "CPU"
    return (asked.stdout.splitlines() or ["CPU"])[0].strip() or "CPU"


def named_after(model: str, gpu: str) -> str:
    """Make a profile's name of what it is a profile of."""
    words = f"{model.rstrip('/').rpartition('/')[2]}-{gpu}".lower()
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-") or "measured"
