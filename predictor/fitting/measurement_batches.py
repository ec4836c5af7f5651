"""What an engine is made to run so that its steps tell how long steps take. Pure but for the generator handed in.

A batch is a set of streams that are sent at the same time; a stream's requests are sent one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from predictor.config import EngineConfig

DECODE_STEPS = 12  # that all requests of a batch decode together, or about
STEPS_TO_COME = 0.5  # for each request: they come one by one, and the first must not end before the last is there
REPEATED = 3  # a prompt alone, as often
SHORTEST, LONGEST_ANSWER = 8, 96  # tokens, of mixes
MOST_PIECES = 4  # requests of one stream of a mix
MOST_FULL = 0.9  # of the KV blocks: nobody is to be preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """One request to be."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests to be sent together, stream by stream."""

    kind: str  # alone, together, mixed
    streams: tuple[tuple[BatchItem, ...], ...]

    @property
    def pieces(self) -> Iterator[BatchItem]:
        """All its requests."""
        return (piece for stream in self.streams for piece in stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What fits into an engine at the same time."""

    sequences: int
    blocks: int
    block_size: int
    longest: int  # tokens of one request, answer included
    step_tokens: int

    @classmethod
    def of(cls, config: EngineConfig) -> BatchLimits:
        """Read it off the engine's settings."""
        return cls(
            sequences=config.max_num_seqs,
            blocks=max(1, int(MOST_FULL * (config.num_gpu_blocks - 1))),
            block_size=config.block_size,
            longest=config.max_model_len - 1,  # a request may not fill the model to the last token
            step_tokens=config.max_num_batched_tokens,
        )

    def longest_of(self, num: int) -> int:
        """Tokens that each of so many requests may have."""
        return min(self.longest, self.blocks // num * self.block_size)

    def holds(self, batch: Batch) -> bool:
        """Tell whether all of it fits at once, however its streams fall together."""
        largest = [max(piece.prompt_tokens + piece.output_tokens for piece in stream) for stream in batch.streams]
        blocks = sum(-(-tokens // self.block_size) for tokens in largest)
        return len(largest) <= self.sequences and blocks <= self.blocks and max(largest) <= self.longest


def structured(room: BatchLimits) -> list[Batch]:
    """Prompts alone by length, and decodes by number and context: the corners first, then what lies between."""
    most = min(room.longest_of(1) - 1, 4 * room.step_tokens)
    if most < 1:
        return []
    alone = [
        Batch(kind="alone", streams=((BatchItem(prompt_tokens=size, output_tokens=1),) * REPEATED,))
        for size in corners_first(doubled(min(16, most), most))
    ]
    together = [
        Batch(
            kind="together",
            streams=((BatchItem(prompt_tokens=context, output_tokens=answer_of(room, num, context)),),) * num,
        )
        for num in corners_first(doubled(1, room.sequences))
        for context in contexts(room, num)
    ]
    merged = [batch for pair in zip_longest(together, alone) for batch in pair if batch is not None]
    return [batch for batch in merged if room.holds(batch)]


def answer_of(room: BatchLimits, num: int, context: int) -> int:
    """How many tokens so many requests must get to be there together for a while."""
    return DECODE_STEPS + int(STEPS_TO_COME * (num - 1)) + num * context // room.step_tokens


def contexts(room: BatchLimits, num: int) -> list[int]:
    """Prompts that so many requests may have that are to decode together: the shortest, the longest, one between."""
    most = room.longest_of(num)
    while most > 0 and most + answer_of(room, num, most) > room.longest_of(num):
        most -= max(1, most // 64)
    if most < 1:
        return []
    least = min(SHORTEST, most)
    return sorted({least, round((least * most) ** 0.5), most})


def mixed(room: BatchLimits, generator: np.random.Generator) -> Batch:
    """Draw requests of all lengths, so many at a time, so that prompts come while others decode."""
    num = max(1, round(float(np.exp(generator.uniform(0.0, np.log(room.sequences))))))
    while num > 1 and room.longest_of(num) < SHORTEST + 2:
        num //= 2
    most = room.longest_of(num)
    answers = max(1, min(LONGEST_ANSWER, most // 2))
    prompts = most - answers

    def lengths(largest: int, count: int) -> list[int]:
        least = min(SHORTEST, largest)
        return [int(length) for length in np.exp(generator.uniform(np.log(least), np.log(largest + 0.99), count))]

    return Batch(
        kind="mixed",
        streams=tuple(
            tuple(
                BatchItem(prompt_tokens=prompt, output_tokens=output)
                for prompt, output in zip(lengths(prompts, count), lengths(answers, count), strict=True)
            )
            for count in generator.integers(1, MOST_PIECES + 1, num).tolist()
        ),
    )


def doubled(least: int, most: int) -> list[int]:
    """Count from the least to the most, each about twice the last."""
    counts = [least]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] >= most else [*counts, most]


def corners_first(items: Sequence[int]) -> list[int]:
    """Take both ends, then the middle of what is left, and so on: a plan cut short still spans the whole."""
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
