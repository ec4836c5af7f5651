"""Applying a function to many tasks, one after the other or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """Applies a function to many tasks, and gives results as they come, each with its task's place."""

    def __call__(self, measure: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[tuple[int, R]]:
        """Run them."""


def one_by_one(measure: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[tuple[int, R]]:
    """Run tasks in this process."""
    for place, task in enumerate(tasks):
        yield place, measure(task)
