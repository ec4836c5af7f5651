"""One mirrored engine: events in, a view of the engine and reports out; without a clock, a log or a socket."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from predictor.approximations import REBUILT_STATE
from predictor.config import FETCHING_ROLES, EngineConfig
from predictor.engine_view import EndedRequest, EngineView
from predictor.indicators import EngineCounters
from predictor.kv_events.stream import KvEventStream
from predictor.mirror.engine_kinds import VLLM
from predictor.mirror.event_backlog import EventBacklog
from predictor.mirror.events import (
    AdaptersRead,
    EngineIdentified,
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
    VersionRead,
)
from predictor.mirror.known_settings import KnownSettings
from predictor.mirror.models import EngineModels, MirrorOptions
from predictor.mirror.request_correction import RequestCorrection
from predictor.mirror.scraped_metrics import ScrapedMetrics
from predictor.mirror.tracker import Tracker
from predictor.request import DECODE, SERVE, RequestFacts
from predictor.request_group import Placeable
from predictor.reserved_requests import Length, ReportedLengths, ReservedRequests
from predictor.snapshot import Snapshot
from predictor.speculation import approximations_of
from predictor.vllm_versions import approximations_of as approximations_of_version


class NoModelError(Exception):
    """There is no engine model: the engine's settings are not known yet, or are invalid."""


class InconsistentModelError(NoModelError):
    """The engine model became inconsistent and was discarded; the next view starts with an idle engine."""


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

    def __init__(
        self,
        options: MirrorOptions,
        lengths: ReportedLengths,
        now_s: float,
        kv_events: KvEventStream | None = None,
    ) -> None:
        """Start without a model; `lengths` are those that schedulers reported for requests.

        With `kv_events`, another part of the process lets them follow the engine's prefix cache.
        """
        self._options = options
        self._lengths = lengths
        self._kv_events = kv_events
        self._origin_s = now_s
        self._serial = 0  # of views
        self._events = EventBacklog()
        self._reports: list[MirrorReport] = []
        self._models: EngineModels | None = None
        self._view: EngineView | None = None
        self._settings = KnownSettings(options.profile, options.engine, options.engine_kind, now_s)
        self._adapters: frozenset[str] = frozenset()  # that the engine lists
        self._metrics: ScrapedMetrics | None = None
        self._correction = RequestCorrection(options.speed)
        self._in_flight: dict[str, InFlightRequest] = {}
        self._reserved = ReservedRequests()
        self._num_ended = 0
        self._counters = EngineCounters()
        self._last_event_s = self._last_progress_s = now_s

    def record(self, event: MirrorEvent, at_s: float) -> None:
        """Keep an event for the next view."""
        if self._kv_events is not None and isinstance(event, RequestArrived):
            event = replace(event, cached_at=self._kv_events.index.moment())
        self._events.add(event, at_s)

    def take_reports(self) -> list[MirrorReport]:
        """Return what happened since this was last called."""
        reports, self._reports = self._reports, []
        return reports

    def view(self, at_s: float) -> EngineView:
        """Apply all events until `at_s` and return the engine's state then; NoModelError where there is none."""
        try:
            models = self._relearnt(self._apply_events(at_s), at_s)
            now_s = self._engine_s(at_s)
            models.tracker.advance(now_s)
            if not models.tracker.requests and at_s - self._last_progress_s > self._options.forget_s:
                models.tracker.reset_pace()
            models.update_twin(self._options, self._predicted_lengths(models), self._reserved, now_s)
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
            offloaded_hits=None if models.blocks is None else models.blocks.offloaded_hits,
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

    @property
    def num_unknown(self) -> int:
        """The number of requests that bypass the proxy."""
        return self._correction.num_unknown

    def close(self) -> None:
        """Drop all events."""
        self._events.clear()

    # Events.

    def _apply_events(self, until_s: float) -> EngineModels:
        """Apply the events until `until_s` in order; without a model, those with the engine's settings first."""
        if self._models is None:
            for at_s, event in self._events.take_settings():
                self._apply(event, at_s)
        if self._models is None:
            try:
                self._start()
            except NoModelError:
                self._events.drop_ended()
                raise
        while (first := self._events.first(until_s)) is not None:
            at_s, event = first
            if self._models is None and isinstance(event, RequestArrived):  # new settings have discarded the model
                self._start()
            self._events.drop_first()
            self._apply(event, at_s)
        return self._models or self._start()

    def _apply(self, event: MirrorEvent, at_s: float) -> None:
        match event:
            case RequestArrived():
                self._apply_arrival(event, at_s)
            case PromptCounted():
                if (learning := self._settings.estimator) is not None:
                    learning.correct_prompt(event.name, event.prompt_tokens)
                self._apply_count(event)
            case TokensReceived():
                self._apply_tokens(event, at_s)
            case RequestEnded():
                self._apply_end(event, at_s)
            case ModelLengthRead() | VersionRead() | EngineIdentified():
                self._settings.take(event)
                self._discard_outdated_models()
            case AdaptersRead():
                self._adapters = event.adapters
            case MetricsScraped():
                self._apply_metrics(event.metrics, at_s)

    def _apply_arrival(self, arrival: RequestArrived, at_s: float) -> None:
        assert self._models is not None
        config, tracker, now_s = self._models.config, self._models.tracker, self._engine_s(at_s)
        room = self._room(self._models, arrival)
        engine = self._models.twin.engine
        if self._reserved.show(arrival.request_id, arrival.prompt, arrival.sequence, engine, at_s):
            self._reports.append(RequestShown(request_id=arrival.request_id))
        self._mark_changed()
        self._counters.count_arrivals(1, at_s)
        if not tracker.requests:
            self._last_progress_s = at_s
        self._last_event_s = at_s
        if (learning := self._settings.estimator) is not None:
            learning.arrive(arrival.name, arrival.prompt_tokens, now_s, streamed=arrival.streamed)
        if room < 1 or len(tracker.requests) >= self._options.max_requests:
            return  # the engine will refuse it, or it counts among the unknown ones
        self._in_flight[arrival.name] = InFlightRequest(arrival=arrival, arrived_s=at_s)
        if (blocks := self._models.blocks) is not None:
            blocks.arrive(arrival.name, blocks.moment() if arrival.cached_at is None else arrival.cached_at)
            blocks.read_prompt(arrival.name, arrival.token_ids, config.block_size)
        tracker.add(self._facts_of(arrival, config, room, now_s), streamed=arrival.streamed)

    def _apply_count(self, event: PromptCounted) -> None:
        if self._models is None or (tracker := self._tracker_of(event.name)) is None:
            return
        tracker.correct_prompt(event.name, event.prompt_tokens)
        if (blocks := self._models.blocks) is not None and event.token_ids:
            blocks.read_prompt(event.name, event.token_ids, self._models.config.block_size)
            if tracker.engine.is_running(event.name):
                tracker.set_hits(event.name, blocks.hit_tokens(event.name, tracker.engine))

    def _apply_tokens(self, event: TokensReceived, at_s: float) -> None:
        if (request := self._in_flight.get(event.name)) is not None and request.first_token_s is None:
            request.first_token_s = at_s
        self._last_event_s = self._last_progress_s = at_s
        if (learning := self._settings.estimator) is not None:
            learning.receive(event.name, event.num_tokens, self._engine_s(at_s))
        if (tracker := self._tracker_of(event.name)) is not None:
            tracker.receive(event.name, event.num_tokens, self._engine_s(at_s), exact=event.exact)

    def _apply_end(self, event: RequestEnded, at_s: float) -> None:
        self._last_event_s = at_s
        request, tracker = self._in_flight.pop(event.name, None), self._tracker_of(event.name)
        if (learning := self._settings.estimator) is not None:
            learning.end(event.name, event.num_tokens, self._engine_s(at_s), completed=event.completed)
        if tracker is not None:
            now_s = self._engine_s(at_s)
            self._return_blocks(event, tracker)
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

    def _return_blocks(self, event: RequestEnded, tracker: Tracker) -> None:
        """Note that the blocks of a request that has ended are free, and were used now."""
        models = self._models
        if models is not None and models.blocks is not None:
            num_tokens = tracker.engine.num_known_tokens(event.name) - tracker.engine.output_tokens(event.name)
            models.blocks.end(event.name, max(0, num_tokens + event.num_tokens - 1) // models.config.block_size)

    def _apply_metrics(self, metrics: ScrapedMetrics, at_s: float) -> None:
        self._last_event_s = at_s
        before, self._metrics = self._metrics, metrics
        restarted = before is not None and metrics.shows_restart_since(before)
        self._settings.take_scraped(metrics.settings, restarted=restarted)
        if restarted:
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
        if before is None or not metrics.repeats(before):
            models.reconciliation.reconcile(metrics, now_s)
            arrived_s = {name: self._engine_s(request.arrived_s) for name, request in self._in_flight.items()}
            change = self._correction.correct(models, metrics, arrived_s, now_s)
            if change is not None:
                self._reports.append(change)
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

    # The models.

    def _relearnt(self, models: EngineModels, at_s: float) -> EngineModels:
        """Return the models; made again, with the present requests, where learnt step times have changed much."""
        if not self._settings.relearn(at_s):
            return models
        in_flight, before = dict(self._in_flight), models.tracker.requests
        received = {name: before[name].num_received for name in in_flight if name in before}
        self._models = None
        models, now_s = self._start(is_update=True), self._engine_s(at_s)
        self._in_flight.update(in_flight)
        for name, num_tokens in received.items():
            arrival = in_flight[name].arrival
            room = self._room(models, arrival)
            if room < 1:
                continue
            models.tracker.add(self._facts_of(arrival, models.config, room, now_s), streamed=arrival.streamed)
            if num_tokens:
                models.tracker.set_running(name, num_tokens)
                models.tracker.requests[name].num_received = num_tokens
        return models

    def _facts_of(self, arrival: RequestArrived, config: EngineConfig, room: int, now_s: float) -> RequestFacts:
        """Return the facts of a request as the engine model takes them."""
        return RequestFacts(
            request_id=arrival.name,
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=max(1, min(room, arrival.max_tokens or room)),
            priority=arrival.priority,
            arrival_s=now_s,
            adapter=arrival.model if arrival.model in self._adapters else "",
            # the metrics show how many blocks are held after a prefill leg
            leg=DECODE if arrival.leg == DECODE and config.kv_role in FETCHING_ROLES else SERVE,
        )

    @staticmethod
    def _room(models: EngineModels, arrival: RequestArrived) -> int:
        """Return how many tokens the response to a request can have."""
        config = models.config
        return min(config.max_model_len, models.tracker.engine.num_blocks * config.block_size) - arrival.prompt_tokens

    def _discard_outdated_models(self) -> None:
        """Discard the models if the engine's settings have changed."""
        if self._models is not None and self._models.config != self._settings.config():
            self._models = None

    def _start(self, *, is_update: bool = False) -> EngineModels:
        """Make the models of an idle engine."""
        options = self._options
        if self._settings.kind == VLLM and self._metrics is None and "num_gpu_blocks" not in options.engine:
            raise NoModelError("the engine's settings are not known yet: its /metrics have not been read")
        try:
            self._models = EngineModels.of_idle_engine(
                self._settings.config(),
                options,
                self._settings.step_time,
                self._kv_events,
                max(0.0, self._engine_s(self._origin_s)),
            )
        except ValueError as error:
            raise NoModelError(f"engine settings: {error}") from None
        self._reports.append(MirrorStarted(config=self._models.config, is_update=is_update))
        self._view = None
        self._in_flight.clear()
        self._reserved.move_to(self._models.twin.engine)
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
        config = models.config
        notes = [REBUILT_STATE, *self._settings.approximations(config), *drafts]
        if self._settings.kind == VLLM:
            notes += approximations_of_version(
                config.vllm_version,
                speculates=bool(config.speculative_method),
                overlaps_fetches=config.overlaps_fetches,
            )
        return (*notes, *models.approximations)

    def _counter_values(self, models: EngineModels) -> dict[str, float]:
        values = self._counters.values(self._options.speed)
        values["pace"] = models.tracker.correction.factor
        if models.tracker.last_step_s > 0:
            values["step_s"] = models.tracker.last_step_s / self._options.speed
        values["num_unknown"] = float(self._correction.num_unknown)
        if models.blocks is not None:
            values["num_offloaded_blocks"] = float(models.blocks.num_offloaded)
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
