"""Plans the batches that an engine runs while its step times are measured.

A batch is a set of streams that are sent at the same time; the requests of a stream are sent one after the other.
Randomness comes from a generator that is passed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from predictor.config import EngineConfig
from predictor.request import DECODE, PREFILL

DECODE_STEPS = 12  # approximate number of steps in which all requests of a batch decode
STEPS_PER_ARRIVAL = 0.5  # requests arrive one by one, and the first must not end before the last has arrived
REPEATED = 3  # how often a single prompt is sent
SHORTEST, LONGEST_ANSWER = 8, 96  # tokens, in mixed batches
MAX_STREAM_ITEMS = 4  # requests per stream of a mixed batch
MAX_KV_USAGE = 0.9  # share of the KV blocks: no request should be preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """A request of a batch."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Streams of requests that are sent at the same time."""

    kind: str  # alone, together, mixed
    streams: tuple[tuple[BatchItem, ...], ...]

    @property
    def items(self) -> Iterator[BatchItem]:
        """All requests of the batch."""
        return (item for stream in self.streams for item in stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The limits of an engine for a batch."""

    sequences: int
    blocks: int
    block_size: int
    longest: int  # tokens of one request, including the response
    step_tokens: int

    @classmethod
    def of(cls, config: EngineConfig) -> BatchLimits:
        """Return the limits of an engine's configuration."""
        return cls(
            sequences=config.max_num_seqs,
            blocks=max(1, int(MAX_KV_USAGE * (config.num_gpu_blocks - 1))),
            block_size=config.block_size,
            longest=config.max_model_len - 1,  # no request may reach max_model_len itself
            step_tokens=config.max_num_batched_tokens,
        )

    def longest_of(self, num: int) -> int:
        """Return the maximum tokens of each of `num` requests."""
        return min(self.longest, self.blocks // num * self.block_size)

    def holds(self, batch: Batch) -> bool:
        """Return whether the batch fits at once, whichever requests of its streams run together."""
        largest = [max(item.prompt_tokens + item.output_tokens for item in stream) for stream in batch.streams]
        blocks = sum(-(-tokens // self.block_size) for tokens in largest)
        return len(largest) <= self.sequences and blocks <= self.blocks and max(largest) <= self.longest


def structured(limits: BatchLimits) -> list[Batch]:
    """Return batches of single prompts by length, and of decodes by number and context; extremes come first."""
    longest = min(limits.longest_of(1) - 1, 4 * limits.step_tokens)
    if longest < 1:
        return []
    alone = [
        Batch(kind="alone", streams=((BatchItem(prompt_tokens=size, output_tokens=1),) * REPEATED,))
        for size in extremes_first(doubled(min(16, longest), longest))
    ]
    together = [
        Batch(
            kind="together",
            streams=((BatchItem(prompt_tokens=context, output_tokens=answer_of(limits, num, context)),),) * num,
        )
        for num in extremes_first(doubled(1, limits.sequences))
        for context in contexts(limits, num)
    ]
    merged = [batch for pair in zip_longest(together, alone) for batch in pair if batch is not None]
    return [batch for batch in merged if limits.holds(batch)]


def answer_of(limits: BatchLimits, num: int, context: int) -> int:
    """Return the output tokens that `num` requests need to decode together for `DECODE_STEPS`."""
    return DECODE_STEPS + int(STEPS_PER_ARRIVAL * (num - 1)) + num * context // limits.step_tokens


def contexts(limits: BatchLimits, num: int) -> list[int]:
    """Return prompt lengths for `num` requests that decode together: the shortest, the longest, and one between."""
    longest = limits.longest_of(num)
    while longest > 0 and longest + answer_of(limits, num, longest) > limits.longest_of(num):
        longest -= max(1, longest // 64)
    if longest < 1:
        return []
    shortest = min(SHORTEST, longest)
    return sorted({shortest, round((shortest * longest) ** 0.5), longest})


def mixed(limits: BatchLimits, generator: np.random.Generator) -> Batch:
    """Draw requests of all lengths, in streams, so that prompts arrive while other requests decode."""
    num = max(1, round(float(np.exp(generator.uniform(0.0, np.log(limits.sequences))))))
    while num > 1 and limits.longest_of(num) < SHORTEST + 2:
        num //= 2
    longest = limits.longest_of(num)
    answers = max(1, min(LONGEST_ANSWER, longest // 2))
    prompts = longest - answers

    def lengths(largest: int, count: int) -> list[int]:
        shortest = min(SHORTEST, largest)
        return [int(length) for length in np.exp(generator.uniform(np.log(shortest), np.log(largest + 0.99), count))]

    return Batch(
        kind="mixed",
        streams=tuple(
            tuple(
                BatchItem(prompt_tokens=prompt, output_tokens=output)
                for prompt, output in zip(lengths(prompts, count), lengths(answers, count), strict=True)
            )
            for count in generator.integers(1, MAX_STREAM_ITEMS + 1, num).tolist()
        ),
    )


def doubled(smallest: int, largest: int) -> list[int]:
    """Return counts from the smallest to the largest, each about twice the last."""
    counts = [smallest]
    while counts[-1] * 2 < largest:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] >= largest else [*counts, largest]


def of_leg(batches: Sequence[Batch], leg: str) -> list[Batch]:
    """Return what an engine runs that serves only one leg.

    One that only prefills gets every prompt for one token. One that only decodes gets no prompt alone: its KV connector
    provides the prompts, and it computes one token of each.
    """
    if leg == PREFILL:
        return [replace(batch, streams=tuple(map(_for_one_token, batch.streams))) for batch in batches]
    return [batch for batch in batches if leg != DECODE or batch.kind != "alone"]


def _for_one_token(stream: tuple[BatchItem, ...]) -> tuple[BatchItem, ...]:
    return tuple(replace(item, output_tokens=1) for item in stream)


def extremes_first(items: Sequence[int]) -> list[int]:
    """Return both ends, then the middles of the gaps, and so on: also a plan that is cut short covers the range."""
    if len(items) < 3:
        return list(items)
    taken, gaps = [items[0], items[-1]], [(0, len(items) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            taken.append(items[middle])
            gaps += [(low, middle), (middle, high)]
    return taken
