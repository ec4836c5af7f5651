"""Emulated engines with traffic, to observe."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from predictor.config import EngineConfig
from predictor.profile import Profile
from services.http.origin import origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from simulator.accuracy.recalibration import slowed
from simulator.load_plan import Planned, Timing, planned, synthetic
from tests.services.emulator.running import A30, MODEL, Emulated, emulated

SPEED = 20.0
CONFIG = EngineConfig(
    max_num_seqs=16, max_num_batched_tokens=512, num_gpu_blocks=257, max_model_len=1024, block_size=16
)


def plan_of(num: int, rate: float = 4.0) -> list[Planned]:
    """Draw requests that arrive as a Poisson process."""
    generator = np.random.default_rng(1)
    drawn = synthetic(num, "uniform:20:400", "lognormal:60:0.6", generator)
    return planned(drawn, Timing(kind="poisson", rate=rate), generator)


def send(url: str, plan: list[Planned]) -> set[str | None]:
    """Send requests when they are due, wait for the answers, and return the failures; None is none."""
    form = RequestFormat(model=MODEL, time_scale=SPEED)
    results = asyncio.run(run_plan(plan, origin_of(url), form, LoadLimits(), lambda _: None))
    return {result.failure for result in results}


def send_all(url: str, plan: list[Planned]) -> None:
    """Send requests, none of which may fail."""
    assert send(url, plan) == {None}


@contextmanager
def sending(url: str, plan: list[Planned]) -> Iterator[threading.Thread]:
    """Send requests beside the block."""
    thread = threading.Thread(target=send_all, args=(url, plan))
    thread.start()
    try:
        yield thread
    finally:
        thread.join()


@contextmanager
def sending_on(url: str) -> Iterator[None]:
    """Send requests until the block ends; one that fails, on a machine that stalls for example, is not sent again."""
    has_ended = threading.Event()

    def send_on() -> None:
        while not has_ended.is_set():
            send(url, plan_of(60))

    thread = threading.Thread(target=send_on)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@contextmanager
def engine_at(folder: Path, factor: float) -> Iterator[tuple[Emulated, str]]:
    """Run an emulated engine whose steps take a multiple of the A30's; return it with its URL."""
    profile: Profile = replace(A30, step_time=slowed(A30.step_time, factor))
    with emulated(folder, CONFIG, profile, speed=SPEED) as engine:
        yield engine, str(engine.client.base_url).rstrip("/")
