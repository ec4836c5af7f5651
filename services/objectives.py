"""The objectives that a gateway or a scheduler knows by name, from a file that is read again when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated

from scheduler.objectives import NO_OBJECTIVES, Objective, Objectives, objective_named, objectives_in
from services.logs import log_event
from services.settings import Option
from services.supervised_task import supervised
from services.watched_file import WatchedFile
from simulator.codec import read_text

log = logging.getLogger(__name__)

POLL_S = 1.0  # between two looks at the file

ObjectivesFile = Annotated[
    str,
    Option(
        "TOML file with a table [[objective]] for each name that requests may ask for; it is read again when it "
        "changes.",
        metavar="FILE",
    ),
]

PassObjectivePriority = Annotated[
    bool,
    "Write the priority of an objective into the requests for engines, for engines that order by priority: vLLM with "
    "--scheduling-policy priority, or the rule sarathi_priority. A priority that the client states itself is always "
    "passed.",
]


def objectives_from_file(path: str) -> Objectives:
    """Read a table of objectives."""
    return objectives_in(read_text(path), path)


def no_objectives() -> Objectives:
    """Return an empty table."""
    return NO_OBJECTIVES


class ObjectiveTable:
    """The table of a file; without a file, it is empty. An invalid change is refused, and the last valid one stays.

    `also` gives the names of another source, such as the list of instances; those of the file have precedence.
    """

    def __init__(
        self, path: str = "", required: Collection[str] = (), *, also: Callable[[], Objectives] = no_objectives
    ) -> None:
        """Read the file; ValueError where it is invalid, or lacks a name that is required."""
        self._also = also
        self._required = tuple(required) if path else ()
        self._file = WatchedFile(path, self._read) if path else None
        self._own = NO_OBJECTIVES if self._file is None else self._file.read_if_changed() or NO_OBJECTIVES

    def __bool__(self) -> bool:
        """Return whether there is a file."""
        return self._file is not None

    @property
    def objectives(self) -> Objectives:
        """All objectives by name."""
        others = self._also()
        return {**others, **self._own} if others else self._own

    def named(self, name: str, field: str) -> Objective:
        """Return an objective; the error for an unknown name starts with the field or header that had it."""
        return objective_named(name, self.objectives, field=field)

    def _read(self, path: str) -> Objectives:
        objectives = objectives_from_file(path)
        for name in self._required:
            if name not in objectives:
                raise ValueError(f"{path}: objective: {name!r} is missing, which is the objective of an API key")
        return objectives

    async def follow(self, every_s: float = POLL_S) -> None:
        """Take changes of the file until cancelled."""
        if self._file is None:
            return
        reason = ""
        while True:
            try:
                objectives = await self._file.poll()
            except ValueError as error:
                if str(error) != reason:
                    reason = str(error)
                    log_event(log, logging.WARNING, "objectives are invalid, keeping the last ones", reason=reason)
            else:
                if objectives is not None:
                    self._own, reason = objectives, ""
                    log_event(log, logging.INFO, "objectives changed", num=len(objectives), file=self._file.path)
            await asyncio.sleep(every_s)


@asynccontextmanager
async def following(table: ObjectiveTable, every_s: float = POLL_S) -> AsyncIterator[None]:
    """Take changes of a table's file while the block runs."""
    task = asyncio.create_task(supervised("objectives", partial(table.follow, every_s)))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
