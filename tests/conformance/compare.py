"""Compares two runs of one workload field by field at every step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any


def first_difference(
    workload: dict[str, Any], theirs: Iterable[dict[str, Any]], ours: Iterable[dict[str, Any]]
) -> str | None:
    """Return a message about the first difference of two runs, empty without one; scheduled tokens compare in order."""
    for index, (their, our) in enumerate(zip_longest(theirs, ours)):
        where = f"seed {workload['seed']}, step {index}"
        settings = f"\n  with {workload['engine']}"
        if their is None or our is None:
            return f"{where}: {'vLLM' if their is None else 'our engine'} ended before it{settings}"
        for name in their:
            if their[name] != our[name] or (name == "scheduled" and list(their[name]) != list(our[name])):
                return f"{where}, {name}:\n  vLLM has {their[name]}\n  we have  {our[name]}{settings}"
    return None
