"""One engine's sidecar: its view of the engine, its reservations, and its forecasts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from predictor.engine_view import EndedRequest, EngineView
from predictor.forecast_result import Forecast, ForecastDetail
from predictor.grammar_times import GrammarTimes
from predictor.group_ends import GroupEnds
from predictor.indicators import indicators_of
from predictor.profile import NO_TRANSIT, Transit
from predictor.request import RequestFacts
from predictor.request_group import Placeable, RequestGroup, members_of, whole_of
from predictor.snapshot import Snapshot
from protos.block.v1 import common_pb2
from scheduler.reservations import Reservation, Reservations
from services.engine_state.identity import short_hash
from services.logs import log_event
from services.predictor_server.engine_source import DownError, EngineSource
from services.predictor_server.health import EngineHealth
from services.predictor_server.metrics import ForecastErrors, InstanceMetrics
from services.predictor_server.rank_group import RankGroup
from services.predictor_server.settings import SidecarSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why an engine could never serve a request: which field is wrong, and why."""

    field: str
    reason: str


class Sidecar:
    """Serves one engine; callers hold `lock` meanwhile, as simulations may run in a thread."""

    def __init__(self, settings: SidecarSettings, source: EngineSource, metrics: InstanceMetrics) -> None:
        """Follow the engine of a source."""
        self.settings = settings
        self.source = source
        self.metrics = metrics
        self.lock = asyncio.Lock()
        self.health = EngineHealth(settings.engine_url, interval_s=settings.health_s, stall_s=settings.stall_s)
        self.reservations = Reservations(most=settings.most_reservations)
        self.errors = ForecastErrors(metrics)
        self.grammars = GrammarTimes()
        self._ends = GroupEnds()
        self.is_draining = False
        self.ranks: RankGroup | None = None  # the other engines of the process
        self._simulation_s = 0.0  # per request, of the last forecast
        self._made_forecasts = False  # since the last `catch_up`
        self._down_reason = ""
        self._view: EngineView | None = None
        self._refreshed_s = self._engine_s = self._age_s = 0.0  # when `_view` was refreshed, and its times then
        metrics.reservations.set_function(lambda: len(self.reservations))

    def view(self) -> EngineView:
        """Return a view that is fresh enough to forecast from; DownError as in `refresh`."""
        view, since_s = self._view, time.monotonic() - self._refreshed_s
        if view is None or since_s > self.settings.fresh_s:
            return self.refresh()
        view.now_s = self._engine_s + since_s * view.clock_rate
        view.age_s = self._age_s + since_s
        return view

    def refresh(self) -> EngineView:
        """Refresh the view and the reservations; DownError if the engine does not run."""
        now_s = time.monotonic()
        self._view = None
        try:
            view = self.source.refresh()
            self._end_shown(self.source.take_shown())
            self.health.require_running(view, now_s)
        except DownError as error:
            self._set_down(str(error))
            self._expire(now_s)
            raise
        self._set_down("")
        self._expire(now_s)
        self._view, self._refreshed_s = view, now_s
        self._engine_s, self._age_s = view.now_s, view.age_s
        return view

    def catch_up(self) -> None:
        """Refresh, compare forecasts with ended requests, and prepare what the next forecasts share."""
        try:
            view = self.refresh()
        except DownError:
            return
        if self._made_forecasts and self.simulates_here(1):
            if self.ranks is not None:
                self.ranks.prepare(self)
            view.forecaster.prepare(view.arrival_s, view.serial)
            self._made_forecasts = False
        self.metrics.pace.set(view.counters.get("pace", 1.0))
        if ended := self.source.take_ended():
            self._end_unseen(ended)
            whole = self._ends.joined(ended)
            self.errors.compare(whole)
            for one in whole:
                self.grammars.observe(one.request_id, one.ttft_s)
            self.source.lengths.forget(one.request_id for one in whole)

    def snapshot(self) -> Snapshot:
        """Return the engine's state as a snapshot."""
        self._view = None  # the source refreshes its model
        return self.source.snapshot()

    def state(self) -> common_pb2.InstanceState.ValueType:
        """Return the state of an instance whose engine runs."""
        return common_pb2.INSTANCE_STATE_DRAINING if self.is_draining else common_pb2.INSTANCE_STATE_READY

    def indicators(self, view: EngineView) -> dict[str, float]:
        """Return the instance's indicators."""
        return indicators_of(view, self.reservations.num_requests)

    def _set_down(self, reason: str) -> None:
        """Report that the engine does not run, for a reason, or that it runs."""
        self.metrics.up.set(not reason)
        if bool(reason) == bool(self._down_reason):
            return
        self._down_reason = reason
        if reason:
            self.grammars.forget_engine()
            log_event(log, logging.WARNING, "engine is down", reason=reason)
        else:
            log_event(log, logging.INFO, "engine is up")

    # Forecasts.

    async def forecast(
        self, view: EngineView, requests: Sequence[Placeable], detail: ForecastDetail
    ) -> list[Forecast | Refusal]:
        """Forecast each request as if it alone arrived now, or return why it could never be served.

        No request may have the name of one that is on the engine.
        """
        hashed = [_with_short_hashes(request) for request in requests]
        try:
            forecasts: Sequence[Forecast | Refusal] = await self._simulate(view, hashed, detail)
        except ValueError:  # one of them does not fit, so each by itself
            forecasts = [await self._forecast_or_refuse(view, one, detail) for one in hashed]
        if (offloaded := view.offloaded_hits) is not None:
            forecasts = [_with_offloaded(*pair, offloaded, view) for pair in zip(forecasts, hashed, strict=True)]
        rate, transit = view.clock_rate, view.transit
        return [one if isinstance(one, Refusal) else to_wall_clock(one, rate, transit) for one in forecasts]

    def simulates_here(self, num_requests: int) -> bool:
        """Return whether forecasts need no thread, as the last one was quick enough."""
        return self._simulation_s * num_requests < self.settings.thread_from_s

    async def _forecast_or_refuse(
        self, view: EngineView, request: Placeable, detail: ForecastDetail
    ) -> Forecast | Refusal:
        try:
            (forecast,) = await self._simulate(view, [request], detail)
        except ValueError as error:
            field, _, reason = str(error).partition(": ")
            return Refusal(field=field, reason=reason)
        return forecast

    async def _simulate(
        self, view: EngineView, requests: Sequence[Placeable], detail: ForecastDetail
    ) -> list[Forecast]:
        """Simulate in this thread if that is quick, else in another: it needs no interpreter lock."""
        if not requests:
            return []
        self._made_forecasts = True
        if self.ranks is not None:
            self.ranks.prepare(self)
        simulate = partial(_simulate_timed, view, requests, detail)
        if self.simulates_here(len(requests)):
            forecasts, took_s = simulate()
        else:
            forecasts, took_s = await asyncio.to_thread(simulate)
        self._simulation_s = took_s / len(requests)
        if unmeasured := sum(forecast.unmeasured > 0 for forecast in forecasts):
            self.metrics.unmeasured.inc(unmeasured)
        return forecasts

    # Reservations.

    def reserve(self, reservation: Reservation) -> bool:
        """Make or extend a reservation; return whether it is new. ValueError if the engine could never serve it."""
        request = reservation.request
        if request.request_id not in self.reservations:
            self.source.reserve(_with_short_hashes(request))
            whole = whole_of(request)
            tag = whole.tag if not isinstance(whole.tag, float | int) else None
            self.source.lengths.add(request.request_id, tokens=whole.output_tokens, tag=tag)
            self._ends.expect(request.request_id, len(members_of(request)))
            self.health.on_reserved(time.monotonic())
        return self.reservations.reserve(reservation)

    def release(self, request_id: str) -> bool:
        """Release a reservation; return whether there was one."""
        if self.reservations.release(request_id) is None:
            return False
        self.source.release(request_id)
        self.source.lengths.forget([request_id])
        self._ends.forget(request_id)
        self.metrics.count_ended("released")
        return True

    def _end_shown(self, shown: Sequence[str]) -> None:
        """End the reservations of requests that reached the engine."""
        if shown and self.ranks is not None:
            self.ranks.shown(self, [name for name in shown if name not in self.reservations])
        if shown:
            self.health.on_shown()
            reservations = self.reservations.shown(shown)
            self.errors.add(reservations)
            self.metrics.count_ended("shown", len(reservations))

    def _end_unseen(self, ended: Sequence[EndedRequest]) -> None:
        """End the reservations of requests that arrived and ended between two refreshes."""
        unseen = [one.request_id for one in ended if one.request_id in self.reservations]
        if self.ranks is not None:
            others = [one.request_id for one in ended if one.completed and one.request_id not in self.reservations]
            self.ranks.shown(self, others)
        for request_id in unseen:
            self.source.release(request_id)
        self._end_shown(unseen)

    def _expire(self, now_s: float) -> None:
        for reservation in self.reservations.expire(now_s):
            request_id = reservation.request.request_id
            self.source.release(request_id)
            self.metrics.count_ended("expired")
            self.health.on_expired(now_s)
            log_event(log, logging.DEBUG, "reservation expired", request_id=request_id, holder=reservation.holder)


def _simulate_timed(
    view: EngineView, requests: Sequence[Placeable], detail: ForecastDetail
) -> tuple[list[Forecast], float]:
    """Forecast, and return the processor time: a busy machine does not make it a long simulation."""
    start_s = time.thread_time()
    forecasts = view.forecaster.forecast(
        requests,
        view.arrival_s,
        delays=detail.delays,
        only_deadlines=detail.only_deadlines,
        min_slack_s=detail.min_slack_s,
        serial=view.serial,
    )
    return forecasts, time.thread_time() - start_s


def _with_short_hashes(request: Placeable) -> Placeable:
    """Name a request's prefix as state files name the contents of blocks."""
    if isinstance(request, RequestGroup):
        return replace(request, members=tuple(map(_shortened, request.members)))
    return _shortened(request)


def _shortened(request: RequestFacts) -> RequestFacts:
    if not request.prefix_hashes:
        return request
    hashes = tuple(short_hash(bytes.fromhex(str(name))) for name in request.prefix_hashes)
    return replace(request, prefix_hashes=hashes)


def _with_offloaded(
    forecast: Forecast | Refusal, request: Placeable, offloaded: Callable[[Sequence[int]], int], view: EngineView
) -> Forecast | Refusal:
    """Add to a forecast how much of the prompt is on off-loading tiers."""
    if isinstance(forecast, Refusal):
        return forecast
    size = view.engine.config.block_size
    members = request.members if isinstance(request, RequestGroup) else (request,)
    num_blocks = sum(
        offloaded([int(name) for name in one.prefix_hashes[: (one.prompt_tokens - 1) // size]]) for one in members
    )
    return replace(forecast, offloaded_hit_tokens=num_blocks * size)


def to_wall_clock(forecast: Forecast, clock_rate: float, transit: Transit = NO_TRANSIT) -> Forecast:
    """Convert a forecast from the engine's clock to the wall clock, as a client sees it."""
    if clock_rate == 1.0 and transit == NO_TRANSIT:
        return forecast
    transit_s = transit.inward_s + transit.outward_s
    delay_sum_s, delay_worst_s = forecast.delay_sum_s, forecast.delay_worst_s
    fetched_s, least_slack_s = forecast.fetched_s, forecast.least_slack_s
    return replace(
        forecast,
        ttft_s=forecast.ttft_s / clock_rate + transit_s,
        e2e_s=forecast.e2e_s / clock_rate + transit_s,
        tpot_s=forecast.tpot_s / clock_rate,
        queue_s=forecast.queue_s / clock_rate + transit.inward_s,
        delay_sum_s=None if delay_sum_s is None else delay_sum_s / clock_rate,
        delay_worst_s=None if delay_worst_s is None else delay_worst_s / clock_rate,
        fetched_s=None if fetched_s is None else fetched_s / clock_rate + transit.inward_s,
        least_slack_s=None if least_slack_s is None else least_slack_s / clock_rate,
    )
