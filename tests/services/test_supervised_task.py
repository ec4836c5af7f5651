"""Work in the background outlasts what nobody has foreseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

import pytest

from services.supervised_task import supervised
from tests.services.waiting import PATIENCE_S


def failing(*failures: BaseException) -> tuple[Callable[[], Coroutine[None, None, None]], list[int]]:
    """Work that fails so, one time after the other, and then ends; and how often it has been begun."""
    begun: list[int] = []

    async def work() -> None:
        begun.append(len(begun))
        if len(begun) <= len(failures):
            raise failures[len(begun) - 1]

    return work, begun


def test_it_is_told_and_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure is a line with its traceback; work that ends by itself has ended."""
    work, begun = failing(KeyError("b"), asyncio.CancelledError(), ZeroDivisionError())
    asyncio.run(supervised("counting", work, pause_s=0))
    assert begun == [0, 1, 2, 3]
    assert [(one.levelno, one.fields["work"]) for one in caplog.records] == [(logging.ERROR, "counting")] * 3  # type: ignore[attr-defined]
    assert all(one.exc_info for one in caplog.records)


def test_who_cancels_it_ends_it() -> None:
    """Not even within the pause does it go on, nor where it fails while it ends."""

    async def test() -> None:
        working, ended, clumsily = asyncio.Event(), [], []

        async def work() -> None:
            working.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def clumsy() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if clumsily:
                    raise
                clumsily.append(True)
                raise KeyError("b") from None

        failed, begun = failing(KeyError("a"))
        tasks = [
            asyncio.create_task(supervised("waiting", work)), asyncio.create_task(supervised("pausing", failed)),
            asyncio.create_task(supervised("failing in the end", clumsy, pause_s=0)),
        ]  # fmt: skip
        await working.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.cancelled() for task in tasks)
        assert (ended, begun) == ([True], [0])

    asyncio.run(test())
