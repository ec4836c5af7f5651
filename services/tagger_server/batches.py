"""A slow estimator, run in small batches on a thread of its own; each request waits at most for its deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram

from length_tagger.estimate import Estimate, Query
from length_tagger.linear import SHIPPED
from length_tagger.onnx_form import AUTO

SMALL = "small"
GATHER_S = 0.002
MAX_QUEUED = 256
MAX_BATCH = 16
WARM_UP = ("Hello", "Explain how rivers come to be. " * 5, "x " * 20_000)


class Batched(Protocol):
    """An estimator that takes several prompts at once."""

    def estimate_many(self, queries: Sequence[Query]) -> list[Estimate | None]:
        """Estimate the lengths of the responses."""


def encoder_from(given: str, *, threads: int = 1, runtime: str = AUTO) -> Batched:
    """Load a checkpoint of `roberta`."""
    try:
        from length_tagger.roberta import RobertaTagger
    except ImportError:
        raise ValueError("encoder: needs tokenizers: pip install 'block-serving[encoder]'") from None
    return RobertaTagger.load(encoder_folder(given), runtime=runtime, threads=threads)


def encoder_folder(given: str) -> Path:
    """Return a checkpoint's folder; `small` is the package's own."""
    return SHIPPED.parent / "encoder" if given == SMALL else Path(given)


class Batches:
    """Batches requests that arrive within two milliseconds; None where the queue is full or the estimate is late."""

    def __init__(
        self,
        estimator: Batched,
        registry: CollectorRegistry,
        *,
        deadline_s: float,
        gather_s: float = GATHER_S,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """Start with an empty queue."""
        self._estimator = estimator
        self._deadline_s = deadline_s
        self._gather_s = gather_s
        self._max_queued = max_queued
        self._waiting: deque[tuple[Query, asyncio.Future[Estimate | None]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._working: asyncio.Task[None] | None = None
        self._missed = Counter(
            "block_tagger_encoder_missed",
            "Requests without its estimate.",
            ("why",),
            registry=registry,
        )
        self._sizes = Histogram(
            "block_tagger_encoder_batch", "Prompts in a batch.", buckets=(1, 2, 4, 8, 16), registry=registry
        )

    def warm_up(self) -> None:
        """Run prompts of several lengths, as the first run of each is slow."""
        for num in (1, 4, MAX_BATCH):
            for prompt in WARM_UP:
                self._estimator.estimate_many([Query(prompt=prompt)] * num)

    def use(self, estimator: Batched) -> None:
        """Use another estimator from the next batch on."""
        self._estimator = estimator

    async def estimate(self, query: Query) -> Estimate | None:
        """Estimate a prompt's response length in a batch."""
        if len(self._waiting) >= self._max_queued:
            self._missed.labels("full").inc()
            return None
        result: asyncio.Future[Estimate | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, result))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        try:
            return await asyncio.wait_for(result, self._deadline_s)
        except TimeoutError:
            self._missed.labels("late").inc()
        except ValueError:
            self._missed.labels("failed").inc()
        return None

    async def _work(self) -> None:
        await asyncio.sleep(self._gather_s)
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            batch = [(query, result) for query, result in batch if not result.done()]  # the others are too late
            if batch:
                await self._run(batch)

    async def _run(self, batch: list[tuple[Query, asyncio.Future[Estimate | None]]]) -> None:
        loop = asyncio.get_running_loop()
        self._sizes.observe(len(batch))
        try:
            estimates = await loop.run_in_executor(
                self._thread, self._estimator.estimate_many, [query for query, _ in batch]
            )
        except (ValueError, RuntimeError, MemoryError) as error:
            for _, result in batch:
                if not result.done():
                    result.set_exception(ValueError(str(error)))
            return
        for (_, result), estimate in zip(batch, estimates, strict=True):
            if not result.done():
                result.set_result(estimate)
