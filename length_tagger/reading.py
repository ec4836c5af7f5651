"""How encoders read prompts: token ids of head and tail, laid out in batches of about the same length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Ids = npt.NDArray[np.int64]

CHARACTERS_PER_TOKEN = 12  # about three times what there are in English; no tokenizer need see more to fill its places
NEARLY = 1.5  # prompts that differ by less in length are read together


def encoded(tokenizer: Tokenizer, prompts: Sequence[str], most_tokens: int) -> list[list[int]]:
    """Turn prompts into token ids; of a longer prompt head and tail are kept, the middle is not read."""
    most_characters = most_tokens * CHARACTERS_PER_TOKEN
    cut = [
        prompt if len(prompt) <= 2 * most_characters else prompt[:most_characters] + prompt[-most_characters:]
        for prompt in prompts
    ]
    plain = [text.encode("utf-8", "replace").decode("utf-8") for text in cut]
    ids = [one.ids for one in tokenizer.encode_batch_fast(plain)]
    head = most_tokens * 2 // 3
    return [one if len(one) <= most_tokens else one[:head] + one[head - most_tokens :] for one in ids]


def laid_out(ids: Sequence[Sequence[int]], padding: int) -> tuple[Ids, Ids]:
    """Lay token ids out as a batch, and where there are any; a prompt without tokens is one padding that is read."""
    longest = max(1, max(map(len, ids), default=1))
    laid = np.full((len(ids), longest), padding, np.int64)
    mask = np.zeros((len(ids), longest), np.int64)
    for row, one in enumerate(ids):
        laid[row, : len(one)] = one
        mask[row, : max(1, len(one))] = 1
    return laid, mask


def alike(ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Part prompts into groups of about the same length, by their places: what is padded is read in vain."""
    groups: list[list[int]] = []
    shortest = 0.0
    for place in sorted(range(len(ids)), key=lambda place: len(ids[place])):
        if not groups or len(ids[place]) > NEARLY * shortest + 8:
            groups.append([])
            shortest = len(ids[place])
        groups[-1].append(place)
    return groups
