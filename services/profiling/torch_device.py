"""The device on which torch times kernels, and its stopwatches: the median time of a few runs of a kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from predictor.suggestions import require_choice

CUDA = "cuda"
CPU = "cpu"
DEVICES = ("auto", CUDA, CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A torch device: its name, a description, and its memory; None if it is the machine's main memory."""

    torch: torch.device
    name: str
    description: str
    memory_bytes: int | None


def device_named(name: str) -> Device:
    """Return a device: `auto` is the GPU if there is one, else the CPU; ValueError if the device is missing."""
    require_choice("device", name, DEVICES)
    has_cuda = torch.cuda.is_available()
    if name == CUDA and not has_cuda:
        raise ValueError("device: torch sees no CUDA device; use --device cpu")
    if name == CPU or not has_cuda:
        threads = f"{torch.get_num_threads()} threads"
        return Device(
            torch=torch.device(CPU), name="CPU", description=f"torch {torch.__version__}, {threads}", memory_bytes=None
        )
    properties = torch.cuda.get_device_properties(0)
    return Device(
        torch=torch.device(CUDA, 0),
        name=str(properties.name),
        description=f"torch {torch.__version__}, CUDA graphs",
        memory_bytes=int(properties.total_memory),
    )


Run = Callable[[int], object]  # called with 0, 1, 2, …, so that it can use other memory each time

MIN_SAMPLES, MAX_SAMPLES = 3, 9
MAX_RUNS = 64  # per sample


class Stopwatch(Protocol):
    """Times the kernels of one device."""

    def seconds(self, run: Run) -> float:
        """Return the seconds of one run."""
        ...


def stopwatch_for(device: torch.device, sample_s: float) -> Stopwatch:
    """Return the stopwatch for a device; it times each kernel for about `sample_s`."""
    return CudaStopwatch(sample_s) if device.type == "cuda" else CpuStopwatch(sample_s)


class CpuStopwatch:
    """Times kernels that have finished when their call returns."""

    def __init__(self, sample_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Time each kernel for about `sample_s`."""
        self._sample_s = sample_s
        self._clock = clock

    def seconds(self, run: Run) -> float:
        """Return the median over samples of several runs each."""
        run(0)
        begin_s = self._clock()
        run(1)
        runs = _runs_of(self._clock() - begin_s, self._sample_s)

        def sample() -> float:
            begin_s = self._clock()
            for number in range(runs):
                run(number)
            return self._clock() - begin_s

        return _median_of(sample, self._sample_s) / runs


class CudaStopwatch:
    """Times kernels in CUDA graphs, as engines run them, so without launch overhead."""

    def __init__(self, sample_s: float) -> None:
        """Time each kernel for about `sample_s`."""
        self._sample_s = sample_s

    def seconds(self, run: Run) -> float:
        """Return the median over replays of a graph of several runs."""
        runs = self._warmed_up(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(runs):
                run(number)
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
        """Run outside of a graph first, so that libraries initialise; return the number of runs per sample."""
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
    """Return the number of runs such that MIN_SAMPLES samples take about `sample_s`."""
    return max(1, min(MAX_RUNS, int(sample_s / MIN_SAMPLES / max(one_s, 1e-9))))


def _median_of(sample: Callable[[], float], sample_s: float) -> float:
    samples: list[float] = []
    while len(samples) < MIN_SAMPLES or (sum(samples) < sample_s and len(samples) < MAX_SAMPLES):
        samples.append(sample())
    return median(samples)
