"""The interface by which searches and experiments run many simulations, here one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """Applies a function to many tasks; yields each result with the index of its task, as results become available."""

    def __call__(self, measure: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[tuple[int, R]]:
        """Run all tasks."""


def one_by_one(measure: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[tuple[int, R]]:
    """Run tasks in this process, one after the other."""
    for index, task in enumerate(tasks):
        yield index, measure(task)
