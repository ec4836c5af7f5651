"""The features of a prompt: hashed words and pairs of words, and a few counts."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

HEAD_CHARACTERS, TAIL_CHARACTERS = 2000, 1000  # the middle of a longer prompt is not read
NUM_BUCKETS = 2**14

_WORDS = re.compile(r"\w+|[^\w\s]")
_SPREAD = np.uint64(0x9E3779B1)  # golden ratio in 32 bits: spreads pairs of words over all buckets
_LOW_BITS = np.uint64(0xFFFFFFFF)
_CLASSES = (
    b"\n",
    b"?",
    b"0123456789",
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    b"`",
    b"(){}[]=;<>_",
    b".,:",
    bytes(range(128, 256)),
    b" ",
)
_COUNTED = np.zeros((256, len(_CLASSES)))
for _number, _characters in enumerate(_CLASSES):
    _COUNTED[list(_characters), _number] = 1.0
NUM_COUNTS = len(_CLASSES) + 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """One row per prompt: a sparse matrix of buckets (as scipy's CSR), and a dense matrix of counts."""

    starts: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    counts: npt.NDArray[np.float32]


def features(prompts: Sequence[str]) -> Features:
    """Compute the features of prompts."""
    hashes: list[npt.NDArray[np.uint64]] = []
    counts = np.zeros((len(prompts), NUM_COUNTS), np.float32)
    for row, prompt in enumerate(prompts):
        text = prompt
        if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
            text = text[:HEAD_CHARACTERS] + text[-TAIL_CHARACTERS:]
        text = text.encode("utf-8", "replace").decode()  # lone surrogates have no encoding
        words = _WORDS.findall(text.lower())
        hashes.append(_hashes(words))
        counts[row] = _counts(prompt, text, words)
    sizes = np.fromiter((len(one) for one in hashes), np.int64, len(hashes))
    rows = np.repeat(np.arange(len(prompts)), sizes)
    buckets = np.concatenate(hashes).astype(np.int64) if hashes else np.zeros(0, np.int64)
    cells, counts_in_cells = np.unique(rows * NUM_BUCKETS + buckets, return_counts=True)
    starts = np.searchsorted(cells, np.arange(len(prompts) + 1) * NUM_BUCKETS)
    return Features(
        starts=starts,
        buckets=cells % NUM_BUCKETS,
        weights=(1.0 + np.log(counts_in_cells)).astype(np.float32),
        counts=counts,
    )


def _hashes(words: list[str]) -> npt.NDArray[np.uint64]:
    """Hash words and pairs of adjacent words to buckets."""
    one = np.fromiter(map(_hash, words), np.uint64, len(words))
    two = ((one[:-1] * _SPREAD & _LOW_BITS) + one[1:]) * _SPREAD & _LOW_BITS
    return np.concatenate((one, two >> np.uint64(7))) % np.uint64(NUM_BUCKETS)


@lru_cache(maxsize=1 << 14)
def _hash(word: str) -> int:
    return zlib.crc32(word.encode())


def _counts(prompt: str, text: str, words: list[str]) -> list[float]:
    """Count size, lines, questions, digits, code and other scripts."""
    data = text.encode()
    num = max(1, len(data))
    num_of_class = np.bincount(np.frombuffer(data, np.uint8), minlength=256) @ _COUNTED
    num_words = len(words)
    return [
        *np.log1p(num_of_class).tolist(),
        float(np.log1p(len(prompt))),
        float(np.log1p(num_words)),
        len(set(words)) / max(1, num_words),
        float(num_of_class[3]) / num,
        float(num_of_class[7]) / num,
        1.0 if text.rstrip().endswith("?") else 0.0,
        1.0 if "```" in text else 0.0,
    ]
