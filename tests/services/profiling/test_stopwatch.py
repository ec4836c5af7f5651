"""Stopwatches on fake devices with fake clocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch

from services.profiling.torch_device import MAX_RUNS, MIN_SAMPLES, CpuStopwatch, CudaStopwatch

RUN_S = 2e-3


class Accelerator:
    """A GPU whose kernels all take the same time: when they are launched, or when a captured graph is replayed."""

    def __init__(self) -> None:
        """Start the clock at 0."""
        self.now_s = 0.0
        self.is_capturing = False
        self.num_captured = 0
        self.turns: list[int] = []
        self.replays = 0

    def run(self, turn: int) -> None:
        """Launch a kernel."""
        if self.is_capturing:
            self.num_captured += 1
            self.turns.append(turn)
        else:
            self.now_s += RUN_S

    @contextmanager
    def capture(self, _: object) -> Iterator[None]:
        """Record kernels instead of running them."""
        self.is_capturing = True
        yield
        self.is_capturing = False

    def replay(self) -> None:
        """Run what was captured."""
        self.replays += 1
        self.now_s += self.num_captured * RUN_S


class Event:
    """A CUDA event."""

    def __init__(self, gpu: Accelerator) -> None:
        """Create an event that is not recorded."""
        self.gpu = gpu
        self.at_s = float("nan")

    def record(self) -> None:
        """Record the current time."""
        self.at_s = self.gpu.now_s

    def synchronize(self) -> None:
        """Check that the event was recorded."""
        assert self.at_s == self.at_s

    def elapsed_time(self, later: Event) -> float:
        """Return milliseconds, as torch does."""
        return (later.at_s - self.at_s) * 1e3


class Stream:
    """A stream that is always idle."""

    def wait_stream(self, _: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class Graph:
    """A captured graph."""

    def __init__(self, gpu: Accelerator) -> None:
        """Replay on this GPU."""
        self.replay = gpu.replay


@pytest.fixture
def gpu() -> Iterator[Accelerator]:
    """Patch torch to use a fake GPU."""
    made = Accelerator()
    fakes = {
        "Event": lambda **_: Event(made),
        "CUDAGraph": lambda: Graph(made),
        "graph": made.capture,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda _: nullcontext(),
    }
    with ExitStack() as stack:
        for name, value in fakes.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch("services.profiling.torch_device.time.perf_counter", lambda: made.now_s))
        yield made


@pytest.mark.parametrize(("sample_s", "runs"), [(1e-3, 1), (3 * RUN_S * 10.5, 10), (100.0, MAX_RUNS)])
def test_a_gpu_is_timed_by_its_own_clock_in_graphs(gpu: Accelerator, sample_s: float, runs: int) -> None:
    """A graph has as many runs as the sample time allows, and is replayed a few times; the result is the time of one run."""
    assert CudaStopwatch(sample_s).seconds(gpu.run) == pytest.approx(RUN_S)
    assert gpu.turns == list(range(runs))
    assert gpu.replays >= 1 + MIN_SAMPLES


def test_an_outlier_does_not_count() -> None:
    """One sample that takes a thousand times as long does not change the median."""
    now_s, calls = 0.0, 0

    def run(_: int) -> None:
        nonlocal now_s, calls
        calls += 1
        now_s += RUN_S * (1000 if calls == 4 else 1)

    assert CpuStopwatch(RUN_S, clock=lambda: now_s).seconds(run) == pytest.approx(RUN_S)
