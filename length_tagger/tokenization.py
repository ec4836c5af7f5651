"""The input of encoders: token ids of a prompt's head and tail, in padded batches of similar length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Ids = npt.NDArray[np.int64]

CHARACTERS_PER_TOKEN = 12  # about three times the usual number in English: enough text to fill max_tokens
MAX_RATIO = 1.5  # prompts that differ by a smaller factor in length are batched together


def encoded(tokenizer: Tokenizer, prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Tokenise prompts; of a longer prompt, the head and the tail are kept."""
    max_characters = max_tokens * CHARACTERS_PER_TOKEN
    cut = [
        prompt if len(prompt) <= 2 * max_characters else prompt[:max_characters] + prompt[-max_characters:]
        for prompt in prompts
    ]
    plain = [text.encode("utf-8", "replace").decode("utf-8") for text in cut]
    ids = [one.ids for one in tokenizer.encode_batch_fast(plain)]
    head = max_tokens * 2 // 3
    return [one if len(one) <= max_tokens else one[:head] + one[head - max_tokens :] for one in ids]


def padded(ids: Sequence[Sequence[int]], padding: int) -> tuple[Ids, Ids]:
    """Return token ids as a padded batch, and its mask; an empty prompt is one padding token with mask 1."""
    longest = max(1, max(map(len, ids), default=1))
    batch = np.full((len(ids), longest), padding, np.int64)
    mask = np.zeros((len(ids), longest), np.int64)
    for row, one in enumerate(ids):
        batch[row, : len(one)] = one
        mask[row, : max(1, len(one))] = 1
    return batch, mask


def groups_of_similar_length(ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group prompts of similar length, by index, so that little is padded."""
    groups: list[list[int]] = []
    shortest = 0.0
    for index in sorted(range(len(ids)), key=lambda index: len(ids[index])):
        if not groups or len(ids[index]) > MAX_RATIO * shortest + 8:
            groups.append([])
            shortest = len(ids[index])
        groups[-1].append(index)
    return groups
