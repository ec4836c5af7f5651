"""Long loops that report how far they are to whoever runs them, such as a command that shows a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
# Gets what a loop does, how much of it is done, and the whole; 0 where that is not known.
Follower = Callable[[str, int, int], None]

EVERY = 512  # items between two reports

_follower: ContextVar[Follower | None] = ContextVar("follower", default=None)


@contextmanager
def followed_by(follower: Follower) -> Iterator[None]:
    """Have all loops in the block report to a follower."""
    token = _follower.set(follower)
    try:
        yield
    finally:
        _follower.reset(token)


def followed(
    items: Iterable[T], doing: str, total: int = 0, *, size: Callable[[Any], int] | None = None
) -> Iterable[T]:
    """Return items that report as they are used, each as one or by its size; without a follower, just the items."""
    follower = _follower.get()
    return items if follower is None else _reported(items, follower, doing, total, size)


def _reported(
    items: Iterable[T], follower: Follower, doing: str, total: int, size: Callable[[Any], int] | None
) -> Iterator[T]:
    done = 0
    for number, item in enumerate(items):
        if number % EVERY == 0:
            follower(doing, done, total)
        yield item
        done += 1 if size is None else size(item)
    follower(doing, done, done)
