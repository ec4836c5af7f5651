"""Random numbers of draft tokens that are proposed and accepted; read on both sides, so it imports nothing else."""

from __future__ import annotations

from random import Random
from typing import Any


def accepted(load: dict[str, Any], name: str, number: int) -> int:
    """Return how many draft tokens of a request are accepted at most, in its step with this number that samples."""
    rng = Random(f"accepted {load['seed']} {name} {number}")
    most, count = load["engine"]["num_speculative_tokens"], 0
    while count < most and rng.random() < load["acceptance"]:
        count += 1
    return count


def proposed(load: dict[str, Any], name: str, number: int) -> int:
    """Return how many draft tokens are proposed after a request's step with this number that samples."""
    rng = Random(f"proposed {load['seed']} {name} {number}")
    most: int = load["engine"]["num_speculative_tokens"]
    return most if rng.random() < load["proposals"] else rng.randint(0, most)
