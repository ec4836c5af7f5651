"""Dynamo's rule: the decode instance by load alone; whole if what is not cached there is short, and a small share.

The prefill instance is that of Dynamo's KV router, the policy `dynamo`.
"""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def lightest(candidates: Candidates) -> Column:
    """Score = total tokens; two legs = tokens not cached >= a threshold, or their share of the prompt >= another."""
    return candidates["total_tokens"]
