"""One engine's sidecar: its picture of the engine, the promises it has made, and how good its forecasts were."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from predictor.forecast_result import Forecast
from predictor.profile import NO_TRANSIT, Transit
from predictor.request import Request
from predictor.snapshot import Snapshot
from protos.block.v1 import common_pb2
from scheduler.circuit import CircuitState
from scheduler.reservations import Promise, Reservations
from services.engine_state.identity import short_hash
from services.logs import log_event
from services.predictor_server.engine_view import DownError, Ended, EngineSource, EngineView
from services.predictor_server.forecast_errors import ForecastErrors
from services.predictor_server.health import EngineHealth
from services.predictor_server.indicators import indicators_of
from services.predictor_server.metrics import InstanceMetrics
from services.predictor_server.settings import SidecarSettings

log = logging.getLogger(__name__)

# An engine that shows none of so many promised requests in a row may hang; then one at a time shows whether it does.
UNSHOWN = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0

DOWN, DRAINING, READY = (
    common_pb2.INSTANCE_STATE_DOWN,
    common_pb2.INSTANCE_STATE_DRAINING,
    common_pb2.INSTANCE_STATE_READY,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why a request could never be served here: which field of it, and what is wrong with that."""

    field: str
    reason: str


class Sidecar:
    """Answers for one engine; whoever uses it holds `lock` meanwhile, as simulations may run in a thread."""

    def __init__(self, settings: SidecarSettings, source: EngineSource, measures: InstanceMetrics) -> None:
        """Stand beside an engine."""
        self.settings = settings
        self.source = source
        self.measures = measures
        self.lock = asyncio.Lock()
        self.health = EngineHealth(settings.engine_url, settings.health_s)
        self.reservations = Reservations(most=settings.most_reservations)
        self.errors = ForecastErrors(measures)
        self.is_draining = False
        self._shows = CircuitState(
            failures_to_open=UNSHOWN, first_pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S
        )
        self._forecast_s = 0.0  # what the last one took
        self._was_asked = False  # since the last look
        self._silent_since: tuple[int, float] | None = None
        self._was_down = ""
        self._seen: EngineView | None = None
        self._seen_s = self._seen_engine_s = self._seen_age_s = 0.0  # when, and what the picture said then
        measures.reservations.set_function(lambda: len(self.reservations))

    def picture(self) -> EngineView:
        """Give a picture that is fresh enough: the engine model runs from it to now; DownError as in `look`."""
        picture, since_s = self._seen, time.monotonic() - self._seen_s
        if picture is None or since_s > self.settings.fresh_s:
            return self.look()
        picture.now_s = self._seen_engine_s + since_s * picture.clock_rate
        picture.age_s = self._seen_age_s + since_s
        return picture

    def look(self) -> EngineView:
        """Bring everything up to date; DownError where the engine is not seen to run."""
        now_s = time.monotonic()
        self._seen = None
        try:
            picture = self.source.look()
            self._take_shown(self.source.newly_shown())
            self._require_alive(picture, now_s)
        except DownError as error:
            self._note_down(str(error))
            self._expire(now_s)
            raise
        self._note_down("")
        self._expire(now_s)
        self._seen, self._seen_s = picture, now_s
        self._seen_engine_s, self._seen_age_s = picture.now_s, picture.age_s
        return picture

    def _take_shown(self, shown: Sequence[str]) -> None:
        """End promises that the engine has taken over."""
        if shown:
            self._shows.succeeded()
            promises = self.reservations.shown(shown)
            self.errors.expect(promises)
            self.measures.ended("shown", len(promises))

    def _take_unseen(self, ended: Sequence[Ended]) -> None:
        """End promises of requests that came and went between two looks."""
        unseen = [one.request_id for one in ended if one.request_id in self.reservations]
        for request_id in unseen:
            self.source.withdraw(request_id)
        self._take_shown(unseen)

    def catch_up(self) -> None:
        """Look, and learn from what has ended; where somebody asks, make ready what all forecasts share."""
        try:
            picture = self.look()
        except DownError:
            return
        if self._was_asked and self.simulates_here(1):
            picture.forecaster.prepare(picture.comes_s, picture.serial)
            self._was_asked = False
        self.measures.pace.set(picture.counters.get("pace", 1.0))
        if ended := self.source.newly_ended():
            self._take_unseen(ended)
            self.errors.compare(ended)
            self.source.lengths.forget(one.request_id for one in ended)

    def snapshot(self) -> Snapshot:
        """Write everything down; what is kept of the last look is not that any more."""
        self._seen = None
        return self.source.snapshot()

    def state_of(self, error: DownError | None = None) -> common_pb2.InstanceState.ValueType:
        """Tell how the instance stands."""
        if error is not None:
            return error.state
        return DRAINING if self.is_draining else READY

    def indicators(self, picture: EngineView) -> dict[str, float]:
        """Sum the picture up."""
        return indicators_of(picture, len(self.reservations))

    # Forecasts.

    async def forecast(
        self, picture: EngineView, requests: Sequence[Request], *, delays: bool
    ) -> list[Forecast | Refused]:
        """Forecast each request as if it alone came now; those that could never be served are told why.

        No request may have the name of one that is on the engine.
        """
        here = [_hashed(request) for request in requests]
        try:
            forecasts: Sequence[Forecast | Refused] = await self._simulated(picture, here, delays=delays)
        except ValueError:  # one of them does not fit, so each by itself
            forecasts = [await self._forecast_or_refusal(picture, one, delays=delays) for one in here]
        rate, transit = picture.clock_rate, picture.transit
        return [one if isinstance(one, Refused) else on_the_wall(one, rate, transit) for one in forecasts]

    async def _forecast_or_refusal(self, picture: EngineView, request: Request, *, delays: bool) -> Forecast | Refused:
        try:
            (forecast,) = await self._simulated(picture, [request], delays=delays)
        except ValueError as error:
            field, _, reason = str(error).partition(": ")
            return Refused(field=field, reason=reason)
        return forecast

    def simulates_here(self, num_requests: int) -> bool:
        """Tell whether forecasts are so quick, by the last one, that they need no thread."""
        return self._forecast_s * num_requests < self.settings.thread_from_s

    async def _simulated(self, picture: EngineView, requests: Sequence[Request], *, delays: bool) -> list[Forecast]:
        """Simulate here and now if that is quick, else in a thread: it needs no interpreter lock."""
        if not requests:
            return []
        self._was_asked = True
        simulate = partial(_timed, picture, requests, delays=delays)
        if self.simulates_here(len(requests)):
            forecasts, took_s = simulate()
        else:
            forecasts, took_s = await asyncio.to_thread(simulate)
        self._forecast_s = took_s / len(requests)
        return forecasts

    # Promises.

    def reserve(self, promise: Promise) -> bool:
        """Promise a place; tell whether it is a new promise. ValueError where the engine could never serve it."""
        request = promise.request
        if request.request_id not in self.reservations:
            self.source.promise(_hashed(request))
            tag = request.tag if not isinstance(request.tag, float | int) else None
            self.source.lengths.expect(request.request_id, tokens=request.output_tokens, tag=tag)
            self._shows.allows(time.monotonic())
        return self.reservations.reserve(promise)

    def release(self, request_id: str) -> bool:
        """Take a promise back; tell whether there was one."""
        if self.reservations.release(request_id) is None:
            return False
        self.source.withdraw(request_id)
        self.source.lengths.forget([request_id])
        self.measures.ended("released")
        return True

    def _expire(self, now_s: float) -> None:
        for promise in self.reservations.expire(now_s):
            self.source.withdraw(promise.request.request_id)
            self.measures.ended("expired")
            self._shows.failed(now_s)
            log_event(
                log, logging.DEBUG, "reservation expired", request_id=promise.request.request_id, holder=promise.holder
            )

    # Signs of life.

    def _require_alive(self, picture: EngineView, now_s: float) -> None:
        if not self.health.is_well:
            raise DownError(self.health.complaint, DOWN)
        if picture.late_s > self.settings.stall_s:
            raise DownError(f"a step is {picture.late_s:.1f} s late", DOWN)
        if not self._shows.may_try(now_s):  # or nobody sent what was promised, so it is still good as a last resort
            raise DownError("it shows none of the requests that it was promised", DRAINING)

    def _note_down(self, complaint: str) -> None:
        if bool(complaint) == bool(self._was_down):
            return
        self._was_down = complaint
        self.measures.up.set(not complaint)
        if complaint:
            log_event(log, logging.WARNING, "engine is down", reason=complaint)
        else:
            log_event(log, logging.INFO, "engine is up")


def _timed(picture: EngineView, requests: Sequence[Request], *, delays: bool) -> tuple[list[Forecast], float]:
    """Forecast, and tell what processor time that took: a busy machine does not make it a long simulation."""
    start_s = time.thread_time()
    forecasts = picture.forecaster.forecast(requests, picture.comes_s, delays=delays, serial=picture.serial)
    return forecasts, time.thread_time() - start_s


def _hashed(request: Request) -> Request:
    """Name a request's prefix as the engine's blocks are named."""
    if not request.prefix_hashes:
        return request
    hashes = tuple(short_hash(bytes.fromhex(str(name))) for name in request.prefix_hashes)
    return replace(request, prefix_hashes=hashes)


def on_the_wall(forecast: Forecast, clock_rate: float, transit: Transit = NO_TRANSIT) -> Forecast:
    """Put a forecast's times, which are the engine's, as a client will see them on the wall clock."""
    if clock_rate == 1.0 and transit == NO_TRANSIT:
        return forecast
    on_the_way_s = transit.inward_s + transit.outward_s
    delay_sum_s, delay_worst_s = forecast.delay_sum_s, forecast.delay_worst_s
    return replace(
        forecast,
        ttft_s=forecast.ttft_s / clock_rate + on_the_way_s,
        e2e_s=forecast.e2e_s / clock_rate + on_the_way_s,
        tpot_s=forecast.tpot_s / clock_rate,
        queue_s=forecast.queue_s / clock_rate + transit.inward_s,
        delay_sum_s=None if delay_sum_s is None else delay_sum_s / clock_rate,
        delay_worst_s=None if delay_worst_s is None else delay_worst_s / clock_rate,
    )
