"""The data-parallel ranks of one engine among the engines that a process follows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from predictor.engine import Engine
from predictor.lockstep_forecast import LockstepForecaster, RankPasses
from predictor.reserved_requests import ReportedLengths
from services.logs import log_event
from services.predictor_server.exported import ExportedEngine
from services.predictor_server.pass_records import PassRecords

if TYPE_CHECKING:
    from services.predictor_server.sidecar import Sidecar

log = logging.getLogger(__name__)

FollowedView = tuple[Engine, int]  # an engine model, and the serial number of its view


class RankGroup:
    """Knows which sidecars of a process follow ranks of the same engine.

    A forecast on a rank that steps together with others takes their steps into account. A reservation ends when any
    rank shows its request: vLLM's own balancing may choose another rank.
    """

    def __init__(self) -> None:
        """Know no sidecar yet."""
        self._sidecars: list[Sidecar] = []
        self._passes: dict[ExportedEngine, tuple[FollowedView, RankPasses]] = {}  # with the view that they are of
        self._beside: dict[ExportedEngine, object] = {}  # the views that a forecaster was set to
        self._lengths = ReportedLengths()
        self._moving: set[asyncio.Task[None]] = set()

    def add(self, sidecar: Sidecar) -> None:
        """Add a sidecar; those of the process share the lengths of responses, as any rank may show a request."""
        self._sidecars.append(sidecar)
        sidecar.ranks = self
        sidecar.source.lengths = self._lengths
        if isinstance(sidecar.source, ExportedEngine):
            sidecar.source.rank_steps.beside = partial(self._passes_beside, sidecar.source)

    def prepare(self, sidecar: Sidecar) -> None:
        """Set the forecaster of a rank in lockstep to the present steps of the others."""
        source = sidecar.source
        view = source.current() if isinstance(source, ExportedEngine) else None
        if view is None or not isinstance(view.forecaster, LockstepForecaster):
            return
        assert isinstance(source, ExportedEngine)
        followed = [(self._followed(one), one) for one in self._others(source)]
        known = [key for key, _ in followed if key is not None]
        if self._beside.get(source) != (view.forecaster, view.serial, known):
            view.forecaster.beside([self._passes[one][1] for key, one in followed if key is not None])
            self._beside[source] = (view.forecaster, view.serial, known)

    def shown(self, sidecar: Sidecar, names: Sequence[str]) -> None:
        """Release what is reserved at other ranks for requests that a rank shows."""
        if not names or not isinstance(sidecar.source, ExportedEngine):
            return
        url = sidecar.settings.engine_url
        others = self._others(sidecar.source)
        for other in self._sidecars:
            is_other = other is not sidecar and bool(url) and other.settings.engine_url == url
            if is_other or other.source in others:
                moved = [name for name in names if name in other.reservations]
                if moved:
                    task = asyncio.create_task(self._move(other, moved, sidecar.settings.instance_id))
                    self._moving.add(task)
                    task.add_done_callback(self._moving.discard)

    @staticmethod
    async def _move(sidecar: Sidecar, names: Sequence[str], shown_by: str) -> None:
        async with sidecar.lock:
            for name in names:
                if sidecar.release(name):
                    log_event(
                        log, logging.DEBUG, "reservation released: another rank shows the request", request_id=name,
                        reserved_at=sidecar.settings.instance_id, shown_by=shown_by,
                    )  # fmt: skip

    def _others(self, source: ExportedEngine) -> list[ExportedEngine]:
        """Return the engines that are other ranks of the same group."""
        rank = source.rank_steps.rank
        if rank is None:
            return []
        others = (one.source for one in self._sidecars)
        return [
            one
            for one in others
            if isinstance(one, ExportedEngine)
            and one is not source
            and one.rank_steps.rank is not None
            and one.rank_steps.rank.group == rank.group
        ]

    def _passes_beside(self, source: ExportedEngine) -> list[PassRecords]:
        """Return the recorded steps of the other ranks."""
        return [one.rank_steps.passes for one in self._others(source)]

    def _followed(self, source: ExportedEngine) -> FollowedView | None:
        """Bring the passes of a rank to its last view; None where its state is not known."""
        view = source.current()
        if view is None:
            return None
        key = (view.engine, view.serial)
        known = self._passes.get(source)
        if known is None or known[0] != key:
            passes = RankPasses() if known is None else known[1]
            passes.follow(view.engine)
            self._passes[source] = (key, passes)
        return key
