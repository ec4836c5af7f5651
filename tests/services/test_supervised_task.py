"""Supervised tasks are restarted after unexpected exceptions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

import pytest

from services.supervised_task import supervised
from tests.services.waiting import PATIENCE_S


def failing(*failures: BaseException) -> tuple[Callable[[], Coroutine[None, None, None]], list[int]]:
    """A task that fails with these exceptions, one after the other, and then ends; it counts its starts."""
    started: list[int] = []

    async def work() -> None:
        started.append(len(started))
        if len(started) <= len(failures):
            raise failures[len(started) - 1]

    return work, started


def test_failures_are_logged_and_the_task_is_restarted(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure is logged with its traceback; a task that returns is not restarted."""
    work, started = failing(KeyError("b"), asyncio.CancelledError(), ZeroDivisionError())
    asyncio.run(supervised("counting", work, pause_s=0))
    assert started == [0, 1, 2, 3]
    assert [(one.levelno, one.fields["work"]) for one in caplog.records] == [(logging.ERROR, "counting")] * 3  # type: ignore[attr-defined]
    assert all(one.exc_info for one in caplog.records)


def test_a_cancelled_task_is_not_restarted() -> None:
    """Neither within the pause nor after a failure while it ends."""

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

        failed, started = failing(KeyError("a"))
        tasks = [
            asyncio.create_task(supervised("waiting", work)), asyncio.create_task(supervised("pausing", failed, pause_s=PATIENCE_S)),
            asyncio.create_task(supervised("failing in the end", clumsy, pause_s=0)),
        ]  # fmt: skip
        await working.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.cancelled() for task in tasks)
        assert (ended, started) == ([True], [0])

    asyncio.run(test())
