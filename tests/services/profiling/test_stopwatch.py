"""What a stopwatch makes of a device's clock, where the device and its clock are made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch

from services.profiling.stopwatch import FEWEST_SAMPLES, MOST_RUNS, CpuStopwatch, CudaStopwatch

RUN_S = 2e-3


class Accelerator:
    """A GPU whose every kernel takes as long: launched kernels take their time, captured ones when they are replayed."""

    def __init__(self) -> None:
        """Begin at nothing."""
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
        """Take kernels down instead of running them."""
        self.is_capturing = True
        yield
        self.is_capturing = False

    def replay(self) -> None:
        """Run what was captured."""
        self.replays += 1
        self.now_s += self.num_captured * RUN_S


class Event:
    """A moment of that GPU's."""

    def __init__(self, gpu: Accelerator) -> None:
        """Be no moment yet."""
        self.gpu = gpu
        self.at_s = float("nan")

    def record(self) -> None:
        """Be now."""
        self.at_s = self.gpu.now_s

    def synchronize(self) -> None:
        """Wait for it; a moment that was never recorded never comes."""
        assert self.at_s == self.at_s

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds, as torch has it."""
        return (later.at_s - self.at_s) * 1e3


class Stream:
    """A stream that is always done."""

    def wait_stream(self, _: object) -> None:
        """Wait for none."""

    def synchronize(self) -> None:
        """Wait for none."""


class Graph:
    """What was captured on that GPU."""

    def __init__(self, gpu: Accelerator) -> None:
        """Hold nothing yet."""
        self.replay = gpu.replay


@pytest.fixture
def gpu() -> Iterator[Accelerator]:
    """Have torch drive it."""
    made = Accelerator()
    stands_in = {
        "Event": lambda **_: Event(made),
        "CUDAGraph": lambda: Graph(made),
        "graph": made.capture,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda _: nullcontext(),
    }
    with ExitStack() as stack:
        for name, value in stands_in.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch("services.profiling.stopwatch.time.perf_counter", lambda: made.now_s))
        yield made


@pytest.mark.parametrize(("sample_s", "runs"), [(1e-3, 1), (3 * RUN_S * 10.5, 10), (100.0, MOST_RUNS)])
def test_a_gpu_is_timed_by_its_own_clock_in_graphs(gpu: Accelerator, sample_s: float, runs: int) -> None:
    """A graph of as many runs as there is time for, one after another, replayed a few times: the time of one."""
    assert CudaStopwatch(sample_s).seconds(gpu.run) == pytest.approx(RUN_S)
    assert gpu.turns == list(range(runs))
    assert gpu.replays >= 1 + FEWEST_SAMPLES


def test_a_hiccup_does_not_count() -> None:
    """One sample that took a thousand times as long leaves the median where it is."""
    now_s, calls = 0.0, 0

    def run(_: int) -> None:
        nonlocal now_s, calls
        calls += 1
        now_s += RUN_S * (1000 if calls == 4 else 1)

    assert CpuStopwatch(RUN_S, clock=lambda: now_s).seconds(run) == pytest.approx(RUN_S)
