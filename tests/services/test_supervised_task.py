"""Background work is restarted after unforeseen failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

import pytest

from services.supervised_task import supervised
from tests.services.waiting import PATIENCE_S


def failing(*failures: BaseException) -> tuple[Callable[[], Coroutine[None, None, None]], list[int]]:
    """Work that fails in these ways, one per run, and then returns; and a list of its runs."""
    runs: list[int] = []

    async def work() -> None:
        runs.append(len(runs))
        if len(runs) <= len(failures):
            raise failures[len(runs) - 1]

    return work, runs


def test_failed_work_is_logged_and_restarted(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure is a log line with its traceback; work that returns is not restarted."""
    work, runs = failing(KeyError("b"), asyncio.CancelledError(), ZeroDivisionError())
    asyncio.run(supervised("counting", work, pause_s=0))
    assert runs == [0, 1, 2, 3]
    assert [(one.levelno, one.fields["work"]) for one in caplog.records] == [(logging.ERROR, "counting")] * 3  # type: ignore[attr-defined]
    assert all(one.exc_info for one in caplog.records)


def test_a_cancelled_task_ends() -> None:
    """Also within the pause between two runs, and where the work fails while it is cancelled."""

    async def test() -> None:
        working, ended, failed_once = asyncio.Event(), [], []

        async def work() -> None:
            working.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def failing_end() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if failed_once:
                    raise
                failed_once.append(True)
                raise KeyError("b") from None

        failed, runs = failing(KeyError("a"))
        tasks = [
            asyncio.create_task(supervised("waiting", work)), asyncio.create_task(supervised("pausing", failed)),
            asyncio.create_task(supervised("failing in the end", failing_end, pause_s=0)),
        ]  # fmt: skip
        await working.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.cancelled() for task in tasks)
        assert (ended, runs) == ([True], [0])

    asyncio.run(test())
