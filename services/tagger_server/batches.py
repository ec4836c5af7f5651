"""A slow estimator, asked in small batches on a thread of its own; nobody waits for it longer than they can."""

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
MOST_QUEUED = 256
MOST_TOGETHER = 16
WARM_UP = ("Hello", "Explain how rivers come to be. " * 5, "x " * 20_000)


class Batched(Protocol):
    """An estimator that is asked about several prompts at once."""

    def estimate_many(self, queries: Sequence[Query]) -> list[Estimate | None]:
        """Say how long the answers will be."""


def encoder_from(given: str, *, threads: int = 1, runtime: str = AUTO) -> Batched:
    """Load a checkpoint of `roberta`."""
    try:
        from length_tagger.roberta import RobertaTagger
    except ImportError:
        raise ValueError("encoder: needs tokenizers: pip install 'block-serving[encoder]'") from None
    return RobertaTagger.load(encoder_folder(given), runtime=runtime, threads=threads)


def encoder_folder(given: str) -> Path:
    """Find a checkpoint's folder; `small` is the one that comes with the package."""
    return SHIPPED.parent / "encoder" if given == SMALL else Path(given)


class Batches:
    """Gathers what is asked within two milliseconds; where too many wait already, or the answer is late: None."""

    def __init__(
        self,
        estimator: Batched,
        registry: CollectorRegistry,
        *,
        deadline_s: float,
        gather_s: float = GATHER_S,
        most_queued: int = MOST_QUEUED,
    ) -> None:
        """Ask nothing yet."""
        self._estimator = estimator
        self._deadline_s = deadline_s
        self._gather_s = gather_s
        self._most_queued = most_queued
        self._waiting: deque[tuple[Query, asyncio.Future[Estimate | None]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._working: asyncio.Task[None] | None = None
        self._missed = Counter(
            "block_tagger_encoder_missed", "Requests that did not wait for the encoder.", ("why",), registry=registry
        )
        self._sizes = Histogram(
            "block_tagger_encoder_batch", "Prompts read together.", buckets=(1, 2, 4, 8, 16), registry=registry
        )

    def warm_up(self) -> None:
        """Read prompts of some lengths, as the first reading of each is slow."""
        for num in (1, 4, MOST_TOGETHER):
            for prompt in WARM_UP:
                self._estimator.estimate_many([Query(prompt=prompt)] * num)

    def take(self, estimator: Batched) -> None:
        """Use another estimator from the next batch on."""
        self._estimator = estimator

    async def ask(self, query: Query) -> Estimate | None:
        """Have a prompt read together with others that come now."""
        if len(self._waiting) >= self._most_queued:
            self._missed.labels("full").inc()
            return None
        answer: asyncio.Future[Estimate | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, answer))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        try:
            return await asyncio.wait_for(answer, self._deadline_s)
        except TimeoutError:
            self._missed.labels("late").inc()
        except ValueError:
            self._missed.labels("failed").inc()
        return None

    async def _work(self) -> None:
        await asyncio.sleep(self._gather_s)
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(MOST_TOGETHER, len(self._waiting)))]
            some = [(query, answer) for query, answer in some if not answer.done()]  # nobody waits for the others
            if some:
                await self._read(some)

    async def _read(self, some: list[tuple[Query, asyncio.Future[Estimate | None]]]) -> None:
        loop = asyncio.get_running_loop()
        self._sizes.observe(len(some))
        try:
            estimates = await loop.run_in_executor(
                self._thread, self._estimator.estimate_many, [query for query, _ in some]
            )
        except (ValueError, RuntimeError, MemoryError) as error:
            for _, answer in some:
                if not answer.done():
                    answer.set_exception(ValueError(str(error)))
            return
        for (_, answer), estimate in zip(some, estimates, strict=True):
            if not answer.done():
                answer.set_result(estimate)
