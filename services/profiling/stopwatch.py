"""How long a kernel runs: the median of a few runs, by the GPU's own clock or the processor's."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch

Run = Callable[[int], object]  # called with 0, 1, 2, …, so that it may take other memory each time

FEWEST_SAMPLES, MOST_SAMPLES = 3, 9
MOST_RUNS = 64  # a sample


class Stopwatch(Protocol):
    """Times kernels of one device."""

    def seconds(self, run: Run) -> float:
        """Give the seconds of one run."""
        ...


def stopwatch_for(device: torch.device, sample_s: float) -> Stopwatch:
    """Choose by the device; a kernel is looked at for so many seconds, or a little more."""
    return CudaStopwatch(sample_s) if device.type == "cuda" else CpuStopwatch(sample_s)


class CpuStopwatch:
    """Times kernels that are done when their call returns."""

    def __init__(self, sample_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Look at each kernel for so long."""
        self._sample_s = sample_s
        self._clock = clock

    def seconds(self, run: Run) -> float:
        """Give the median over samples of some runs each."""
        run(0)
        begin_s = self._clock()
        run(1)
        runs = _runs_of(self._clock() - begin_s, self._sample_s)

        def sample() -> float:
            begin_s = self._clock()
            for turn in range(runs):
                run(turn)
            return self._clock() - begin_s

        return _median_of(sample, self._sample_s) / runs


class CudaStopwatch:
    """Times kernels in CUDA graphs, as engines run them: what it takes to launch each is not in it."""

    def __init__(self, sample_s: float) -> None:
        """Look at each kernel for so long."""
        self._sample_s = sample_s

    def seconds(self, run: Run) -> float:
        """Give the median over replays of a graph of some runs."""
        runs = self._warmed_up(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(runs):
                run(turn)
        graph.replay()

        def sample() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return _median_of(sample, self._sample_s) / runs

    def _warmed_up(self, run: Run) -> int:
        """Run outside of a graph first, as libraries set themselves up then; tell how many runs make a sample."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(0)
            stream.synchronize()
            begin_s = time.perf_counter()
            run(1)
            stream.synchronize()
            took_s = time.perf_counter() - begin_s
        torch.cuda.current_stream().wait_stream(stream)
        return _runs_of(took_s, self._sample_s)


def _runs_of(one_s: float, sample_s: float) -> int:
    """So many runs that a few samples of them take the time that there is."""
    return max(1, min(MOST_RUNS, int(sample_s / FEWEST_SAMPLES / max(one_s, 1e-9))))


def _median_of(sample: Callable[[], float], sample_s: float) -> float:
    taken: list[float] = []
    while len(taken) < FEWEST_SAMPLES or (sum(taken) < sample_s and len(taken) < MOST_SAMPLES):
        taken.append(sample())
    return median(taken)
