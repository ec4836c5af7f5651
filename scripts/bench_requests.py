"""The requests of benches: prompts of random words, at the pace that the stub of an engine reads from them."""

from __future__ import annotations

import json
import random
from typing import Any

PLACE = "127.0.0.1"
MODEL = "bench"
NUM_EVENTS = 16
PROMPT_BYTES = 2048
FIRST_MS, GAPS_MS = 40, (8, 9, 10, 11, 12)  # an engine's pace


def text_of(rng: random.Random, length: int) -> str:
    """Return random words with a total length; none of them is a pace."""
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(length // 3 + 1)]
    return " ".join(words)[:length]


def request_body(prompt: str, first_ms: int = 0, gap_ms: int = 0, *, has_targets: bool = False) -> bytes:
    """Return a request; the engine reads its pace from it, and responds at once if that is 0."""
    fields: dict[str, Any] = {
        "model": MODEL, "prompt": prompt, "max_tokens": NUM_EVENTS, "ignore_eos": True, "stream": True
    }  # fmt: skip
    if has_targets:
        fields["vllm_xargs"] = {"block_ttft_s": 0.1, "block_tpot_s": 0.02}
    return json.dumps({**fields, "user": f"pace {first_ms} {gap_ms} end"}).encode()
