"""One mirrored engine: events in, a view of the engine and reports out; without a clock, a log or a socket."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from predictor.approximations import REBUILT_STATE, UNKNOWN_PREFIXES
from predictor.batching import batcher_named
from predictor.config import FETCHING_ROLES, EngineConfig
from predictor.editable_engine import ShownRecords
from predictor.engine_replica import EngineReplica
from predictor.engine_view import EndedRequest, EngineView
from predictor.forecast import Forecaster
from predictor.indicators import EngineCounters
from predictor.mirror.events import (
    SETTINGS_EVENTS,
    AdaptersRead,
    EngineRestarted,
    MetricsScraped,
    MirrorEvent,
    MirrorReport,
    MirrorStarted,
    ModelLengthRead,
    PromptCounted,
    RequestArrived,
    RequestEnded,
    RequestShown,
    TokensReceived,
    UnknownRequestsChanged,
    VersionRead,
)
from predictor.mirror.scraped_metrics import ScrapedMetrics
from predictor.mirror.token_reconciliation import TokenReconciliation
from predictor.mirror.tracker import Tracker
from predictor.mirror.unknown_requests import UnknownRequests
from predictor.profile import Profile
from predictor.profile_check import require_possible
from predictor.request import DECODE, SERVE, RequestFacts
from predictor.request_group import Placeable
from predictor.reserved_requests import Length, ReportedLengths, ReservedRequests
from predictor.snapshot import Snapshot
from predictor.speculation import AcceptanceLearner, approximations_of

MAX_EVENTS = 1 << 20  # that wait for the next view
SKEW_S = 0.01  # between the tokens and the metrics of a moment: they come by different connections
DEFAULT_BATCHER = EngineConfig().batcher
SILENT_S = 1.0  # after which a request whose tokens are overdue is assumed to wait
SURPLUS_SCRAPES = 8  # in a row that count fewer requests than are known: the most silent ones have left the engine


class NoModelError(Exception):
    """There is no engine model: the engine's settings are not known yet, or are invalid."""


class InconsistentModelError(NoModelError):
    """The engine model became inconsistent and was discarded; the next view starts with an idle engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    """How to mirror an engine; `engine` are settings that override those of the engine and of the profile."""

    profile: Profile
    records: ShownRecords
    engine: Mapping[str, int | float | bool | str | None]
    residual: str
    speed: float  # engine seconds per second
    forget_s: float  # without progress for so long, an idle engine's pace is forgotten
    max_requests: int


@dataclass(slots=True, kw_only=True)
class EngineModels:
    """The models of one engine process: the tracker's follows the engine, the twin's makes forecasts."""

    config: EngineConfig
    tracker: Tracker
    twin: EngineReplica
    forecaster: Forecaster
    unknown: UnknownRequests
    reconciliation: TokenReconciliation
    drafts: AcceptanceLearner


@dataclass(slots=True, kw_only=True)
class InFlightRequest:
    """A request between its arrival and its end at the proxy; times are the events'."""

    arrival: RequestArrived
    arrived_s: float
    first_token_s: float | None = None


class EngineMirror:
    """Follows an engine by what passes its proxy, and corrects the model by the engine's own metrics.

    Times are seconds of the wall clock, from any origin. `record` only keeps an event, as a forecast may be under way
    in a thread; `view` applies all events.
    """

    def __init__(self, options: MirrorOptions, lengths: ReportedLengths, now_s: float) -> None:
        """Start without a model; `lengths` are those that schedulers reported for requests."""
        self._options = options
        self._lengths = lengths
        self._origin_s = now_s
        self._serial = 0  # of views
        self._events: deque[tuple[float, MirrorEvent]] = deque(maxlen=MAX_EVENTS)
        self._reports: list[MirrorReport] = []
        self._models: EngineModels | None = None
        self._view: EngineView | None = None
        self._engine_settings: dict[str, int | bool | str] = {}  # that the engine reported
        self._adapters: frozenset[str] = frozenset()  # that the engine lists
        self._metrics: ScrapedMetrics | None = None
        self._num_surplus_scrapes = 0
        self._in_flight: dict[str, InFlightRequest] = {}
        self._reserved = ReservedRequests()
        self._num_ended = 0
        self._counters = EngineCounters()
        self._last_event_s = self._last_progress_s = now_s
        self.num_unknown = 0  # requests that bypass the proxy

    def record(self, event: MirrorEvent, at_s: float) -> None:
        """Keep an event for the next view."""
        self._events.append((at_s, event))

    def take_reports(self) -> list[MirrorReport]:
        """Return what happened since this was last called."""
        reports, self._reports = self._reports, []
        return reports

    def view(self, at_s: float) -> EngineView:
        """Apply all events until `at_s` and return the engine's state then; NoModelError where there is none."""
        try:
            models = self._apply_events(at_s)
            now_s = self._engine_s(at_s)
            models.tracker.advance(now_s)
            if not models.tracker.requests and at_s - self._last_progress_s > self._options.forget_s:
                models.tracker.reset_pace()
            models.twin.engine.set_pace(models.tracker.correction.factor)
            models.twin.update(
                models.tracker.engine.shown(
                    self._options.records, self._predicted_lengths(models), now_s, models.twin.num_slots
                )
            )
        except ValueError as error:
            self._models = self._view = None
            raise InconsistentModelError(str(error)) from None
        self._serial += 1
        self._view = EngineView(
            engine=models.twin.engine,
            forecaster=models.forecaster,
            now_s=now_s,
            clock_rate=self._options.speed,
            age_s=max(0.0, at_s - self._last_event_s) if models.tracker.requests else 0.0,
            overdue_s=self._overdue_s(models, now_s, at_s),
            serial=self._serial,
            transit=replace(self._options.profile.transit, outward_s=0.0),  # a step ends when its tokens are received
            counters=self._counter_values(models),
            approximations=self._approximations(models),
        )
        return self._view

    def snapshot(self, at_s: float) -> Snapshot:
        """Return the engine's state as a snapshot; its times start with this mirror."""
        view = self.view(at_s)
        assert self._models is not None
        lengths, reserved = self._predicted_lengths(self._models), self._reserved.as_reserved()
        return self._models.tracker.engine.snapshot(lengths, reserved, view.now_s)

    def reserve(self, request: Placeable, at_s: float) -> None:
        """Add a request to the view that has not arrived yet; ValueError where the engine could never serve it."""
        view = self._view or self.view(at_s)
        if self._reserved.add(request, view.engine, view.arrival_s):
            self._mark_changed()

    def release(self, request_id: str) -> None:
        """Remove a reserved request from the view."""
        if self._models is None:
            self._reserved.drop(request_id)
        elif self._reserved.withdraw(request_id, self._models.twin.engine):
            self._mark_changed()

    def close(self) -> None:
        """Drop all events."""
        self._events.clear()

    # Events.

    def _apply_events(self, until_s: float) -> EngineModels:
        """Apply the events until `until_s` in order; without a model, those with the engine's settings first."""
        if self._models is None:
            settings = [one for one in self._events if isinstance(one[1], SETTINGS_EVENTS)]
            for one in settings:
                self._events.remove(one)
            for at_s, event in settings:
                self._apply(event, at_s)
        if self._models is None:
            self._start()
        while self._events and self._events[0][0] <= until_s:
            at_s, event = self._events[0]
            if self._models is None and isinstance(event, RequestArrived):  # new settings have discarded the model
                self._start()
            self._events.popleft()
            self._apply(event, at_s)
        return self._models or self._start()

    def _apply(self, event: MirrorEvent, at_s: float) -> None:
        match event:
            case RequestArrived():
                self._apply_arrival(event, at_s)
            case PromptCounted():
                if (tracker := self._tracker_of(event.name)) is not None:
                    tracker.correct_prompt(event.name, event.prompt_tokens)
            case TokensReceived():
                self._apply_tokens(event, at_s)
            case RequestEnded():
                self._apply_end(event, at_s)
            case ModelLengthRead():
                if self._engine_settings.get("max_model_len") != event.max_model_len:
                    self._engine_settings["max_model_len"] = event.max_model_len
                    self._discard_outdated_models()
            case AdaptersRead():
                self._adapters = event.adapters
            case VersionRead():
                if self._engine_settings.get("vllm_version") != event.version:
                    self._engine_settings["vllm_version"] = event.version
                    self._discard_outdated_models()
            case MetricsScraped():
                self._apply_metrics(event.metrics, at_s)

    def _apply_arrival(self, arrival: RequestArrived, at_s: float) -> None:
        assert self._models is not None
        config, tracker, now_s = self._models.config, self._models.tracker, self._engine_s(at_s)
        room = min(config.max_model_len, tracker.engine.num_blocks * config.block_size) - arrival.prompt_tokens
        engine = self._models.twin.engine
        if self._reserved.show(arrival.request_id, arrival.prompt, arrival.sequence, engine, at_s):
            self._reports.append(RequestShown(request_id=arrival.request_id))
        self._mark_changed()
        self._counters.count_arrivals(1, at_s)
        if not tracker.requests:
            self._last_progress_s = at_s
        self._last_event_s = at_s
        if room < 1 or len(tracker.requests) >= self._options.max_requests:
            return  # the engine will refuse it, or it counts among the unknown ones
        self._in_flight[arrival.name] = InFlightRequest(arrival=arrival, arrived_s=at_s)
        request = RequestFacts(
            request_id=arrival.name,
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=max(1, min(room, arrival.max_tokens or room)),
            priority=arrival.priority,
            arrival_s=now_s,
            adapter=arrival.model if arrival.model in self._adapters else "",
            # the metrics show how many blocks are held after a prefill leg
            leg=DECODE if arrival.leg == DECODE and config.kv_role in FETCHING_ROLES else SERVE,
        )
        tracker.add(request, streamed=arrival.streamed)

    def _apply_tokens(self, event: TokensReceived, at_s: float) -> None:
        if (request := self._in_flight.get(event.name)) is not None and request.first_token_s is None:
            request.first_token_s = at_s
        self._last_event_s = self._last_progress_s = at_s
        if (tracker := self._tracker_of(event.name)) is not None:
            tracker.receive(event.name, event.num_tokens, self._engine_s(at_s), exact=event.exact)

    def _apply_end(self, event: RequestEnded, at_s: float) -> None:
        self._last_event_s = at_s
        request, tracker = self._in_flight.pop(event.name, None), self._tracker_of(event.name)
        if tracker is not None:
            now_s = self._engine_s(at_s)
            if event.completed and event.num_tokens > 0:
                self._last_progress_s = at_s
                tracker.receive(event.name, event.num_tokens, now_s, ended=True, exact=event.exact)
            else:
                tracker.remove(event.name, now_s)
        if request is not None:
            self._num_ended += event.completed
            first_token_s = request.first_token_s
            self._reports.append(
                EndedRequest(
                    request_id=request.arrival.request_id,
                    output_tokens=event.num_tokens,
                    ttft_s=None if first_token_s is None else first_token_s - request.arrived_s,
                    e2e_s=at_s - request.arrived_s,
                    completed=event.completed,
                )
            )

    def _apply_metrics(self, metrics: ScrapedMetrics, at_s: float) -> None:
        self._last_event_s = at_s
        before, self._metrics = self._metrics, metrics
        self._engine_settings.update(metrics.settings)
        if before is not None and metrics.shows_restart_since(before):
            self._reports.append(EngineRestarted(num_requests=len(self._in_flight)))
            self._models = None
        self._discard_outdated_models()
        models = self._models or self._start()
        if before is None or metrics.shows_progress_since(before) or not (metrics.running or metrics.waiting):
            self._last_progress_s = at_s
        now_s = self._engine_s(at_s)
        models.tracker.advance(now_s)
        if metrics.drafts is not None and models.drafts.observe(metrics.drafts):
            models.tracker.engine.expect_drafts(models.drafts.expected)
            models.twin.engine.expect_drafts(models.drafts.expected)
        models.reconciliation.reconcile(metrics, now_s)
        self._correct_requests(models, metrics, now_s)
        self._counters.update(
            {
                "prefix_queries": metrics.prefix_queries or 0,
                "prefix_hits": metrics.prefix_hits or 0,
                "num_preemptions": metrics.preemptions or 0,
                "num_outcomes": self._num_ended,
                "last_step_s": 0.0,
            },
            at_s,
        )

    def _correct_requests(self, models: EngineModels, metrics: ScrapedMetrics, now_s: float) -> None:
        """Correct which requests run, wait and hold blocks, where the metrics differ from the model."""
        tracker, silent_s = models.tracker, SILENT_S * self._options.speed
        tracker.set_waiting(tracker.silent_since_first_token(now_s, silent_s))
        if metrics.running is not None and metrics.waiting is not None:
            num_requests = round(metrics.running + metrics.waiting)
            models.unknown.update(round(metrics.running), round(metrics.waiting), metrics.kv_usage, now_s)
            # a request that arrived just now may not be in the metrics yet
            num_settled = sum(
                self._engine_s(request.arrived_s) < now_s - silent_s for request in self._in_flight.values()
            )
            surplus = num_settled - num_requests
            self._num_surplus_scrapes = self._num_surplus_scrapes + 1 if surplus > 0 else 0
            if self._num_surplus_scrapes >= SURPLUS_SCRAPES:
                self._remove_silent(tracker, surplus, now_s)
        if metrics.kv_usage is not None:
            tracker.set_used_blocks(round(metrics.kv_usage * tracker.engine.num_blocks))
        if len(models.unknown) != self.num_unknown:
            self._reports.append(UnknownRequestsChanged(before=self.num_unknown, now=len(models.unknown)))
            self.num_unknown = len(models.unknown)

    def _remove_silent(self, tracker: Tracker, max_removed: int, now_s: float) -> None:
        """Remove requests that the engine does not have any more: those without an event for the longest time."""
        names = [name for name in tracker.requests if name in self._in_flight]
        names.sort(key=lambda name: tracker.requests[name].last_event_s)
        for name in names[:max_removed]:
            if now_s - tracker.requests[name].last_event_s < SILENT_S * self._options.speed:
                break
            tracker.remove(name, now_s)

    # The models.

    def _config(self) -> EngineConfig:
        suggested = self._options.profile.suggested_settings
        config = {**suggested, **self._engine_settings, **self._options.engine}
        if not batcher_named(config.get("batcher", DEFAULT_BATCHER)).has_inputs:
            config.pop("max_loras", None)  # it may have adapters, whose limits this local scheduler ignores
        return EngineConfig(**config)

    def _discard_outdated_models(self) -> None:
        """Discard the models if the engine's settings have changed."""
        if self._models is not None and self._models.config != self._config():
            self._models = None

    def _start(self) -> EngineModels:
        """Make the models of an idle engine."""
        options = self._options
        if self._metrics is None and "num_gpu_blocks" not in options.engine:
            raise NoModelError("the engine's settings are not known yet: its /metrics have not been read")
        try:
            config = self._config()
            require_possible(options.profile, config)
            tracker = Tracker(config, options.profile.step_time, max(0.0, self._engine_s(self._origin_s)))
        except ValueError as error:
            raise NoModelError(f"engine settings: {error}") from None
        twin = EngineReplica(
            config, options.profile.step_time, options.residual, num_slots=2 * options.max_requests, track_blocks=False
        )
        self._reports.append(MirrorStarted(config=config))
        self._models = EngineModels(
            config=config,
            tracker=tracker,
            twin=twin,
            forecaster=Forecaster(twin.engine),
            unknown=UnknownRequests(tracker),
            reconciliation=TokenReconciliation(tracker, SKEW_S * options.speed),
            drafts=AcceptanceLearner(config.configured_drafts),
        )
        self._view = None
        self._in_flight.clear()
        self._reserved.move_to(twin.engine)
        return self._models

    def _tracker_of(self, name: str) -> Tracker | None:
        """Return the tracker if it has a request of this name."""
        models = self._models
        return models.tracker if models is not None and name in models.tracker else None

    # The view.

    def _predicted_lengths(self, models: EngineModels) -> dict[str, Length]:
        lengths: dict[str, Length] = {}
        for name, request in self._in_flight.items():
            arrival = request.arrival
            lengths[name] = self._lengths.of(arrival.request_id) or (arrival.known_tokens or 0, arrival.tag)
        lengths.update(models.unknown.lengths())
        return lengths

    def _approximations(self, models: EngineModels) -> tuple[str, ...]:
        drafts = approximations_of(models.config.speculative_method, models.drafts.expected)
        return (REBUILT_STATE, *drafts, *((UNKNOWN_PREFIXES,) if models.config.enable_prefix_caching else ()))

    def _counter_values(self, models: EngineModels) -> dict[str, float]:
        values = self._counters.values(self._options.speed)
        values["pace"] = models.tracker.correction.factor
        if models.tracker.last_step_s > 0:
            values["step_s"] = models.tracker.last_step_s / self._options.speed
        values["num_unknown"] = float(self.num_unknown)
        if self._metrics is not None and self._metrics.fetching is not None:
            values["num_fetching"] = self._metrics.fetching
        return values

    def _overdue_s(self, models: EngineModels, now_s: float, at_s: float) -> float:
        """Return for how long progress is overdue; both clients' tokens and metrics show progress."""
        if not models.tracker.requests:
            return 0.0
        tracker, since_s = models.tracker, max(0.0, at_s - self._last_progress_s)
        return min(since_s, tracker.overdue_s(now_s) / self._options.speed if tracker.awaits_tokens() else math.inf)

    def _engine_s(self, at_s: float) -> float:
        return (at_s - self._origin_s) * self._options.speed

    def _mark_changed(self) -> None:
        self._serial += 1
        if self._view is not None:
            self._view.serial = self._serial
