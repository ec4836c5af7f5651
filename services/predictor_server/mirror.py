"""An engine that shows nothing of itself, followed by what passes on its way: arrivals, tokens, ends, and totals."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from predictor.config import EngineConfig
from predictor.forecast import Forecaster
from predictor.mirror.engine_totals import EngineTotals
from predictor.mirror.in_flight_request import Arrival, InFlightRequest
from predictor.mirror.token_reconciliation import TokenReconciliation
from predictor.mirror.tracker import Tracker
from predictor.mirror.unknown_requests import UnknownRequests
from predictor.profile import Profile
from predictor.profile_check import require_possible
from predictor.request import Request
from predictor.reserved_requests import Length, LengthLimits, ReservedRequest
from predictor.snapshot import Snapshot
from predictor.twin import Twin
from protos.block.v1 import common_pb2
from services.logs import log_event
from services.predictor_server.counters import Counters
from services.predictor_server.engine_view import DownError, Ended, EngineView
from services.predictor_server.settings import MirrorSettings
from services.predictor_server.tracked import shown_from, snapshot_from

log = logging.getLogger(__name__)

MOST_NOTES = 1 << 20
STARTING = common_pb2.INSTANCE_STATE_STARTING
SKEW_S = 0.01  # between the tokens and the totals of a moment: they come by different connections
SILENT_S = 1.0  # after which a request that should have shown a token is thought to wait
LOST_READINGS = 8  # in a row that count fewer requests than are known: the most silent ones are not there


@dataclass(slots=True, kw_only=True)
class Life:
    """One life of the engine: the model that tracks it, and the one that forecasts."""

    config: EngineConfig
    tracker: Tracker
    twin: Twin
    forecaster: Forecaster
    strangers: UnknownRequests
    reckoning: TokenReconciliation


class MirroredEngine:
    """Mirrors what passes the proxy into an engine model, and puts that right by the engine's own totals.

    What is noted is only kept, with its time, until somebody looks: a forecast may be under way in a thread.
    """

    kind = common_pb2.STATE_SOURCE_MIRRORED

    def __init__(self, settings: MirrorSettings, profile: Profile, residual: str, forget_s: float) -> None:
        """Know what is given of the engine's settings; others are its own to tell, or the profile's to suggest."""
        self.lengths = LengthLimits()
        self._profile = profile
        self._residual = residual
        self._given = dict(settings.engine)
        self._speed = settings.speed
        self._forget_s = forget_s
        self._most_requests = settings.max_concurrency
        self._origin_s = time.monotonic()
        self._serial = 0  # of pictures
        self._num_arrivals = 0
        self._notes: deque[tuple[float, Callable[[float], None]]] = deque(maxlen=MOST_NOTES)
        self._life: Life | None = None
        self._told: dict[str, int | bool] = {}  # by the engine, of its settings
        self._picture: EngineView | None = None
        self._totals: EngineTotals | None = None
        self._num_lost = 0
        self._guests: dict[str, InFlightRequest] = {}
        self._promised = ReservedRequest()
        self._shown: list[str] = []
        self._ended: list[Ended] = []
        self._num_ended = 0
        self._counters = Counters()
        self._heard_s = self._progress_s = time.monotonic()
        self.num_unknown = 0  # requests that came to the engine by another way

    # What the proxy and the reader of totals note; times are monotonic.

    def arrived(self, arrival: Arrival) -> str:
        """Note a request; give the name that it goes by from now on."""
        self._num_arrivals += 1
        name = f"{arrival.request_id}-{self._num_arrivals:08x}"
        self._note(partial(self._take_arrival, name, arrival))
        return name

    def counted(self, name: str, prompt_tokens: int) -> None:
        """Note how long its prompt really is."""
        self._note(partial(self._take_count, name, prompt_tokens))

    def produced(self, name: str, num_tokens: int, *, exact: bool = False) -> None:
        """Note that so many tokens of its answer have been seen."""
        self._note(partial(self._take_tokens, name, num_tokens, exact))

    def ended(self, name: str, num_tokens: int, *, completed: bool, exact: bool = True) -> None:
        """Note its end, and how many tokens it had; one that did not complete may have ended anywhere."""
        self._note(partial(self._take_end, name, num_tokens, completed, exact))

    def read(self, totals: EngineTotals) -> None:
        """Note what the engine's metrics tell."""
        self._note(partial(self._take_totals, totals))

    def model_length(self, max_model_len: int) -> None:
        """Note how long the engine lets a request be."""
        self._note(partial(self._take_setting, "max_model_len", max_model_len))

    def _note(self, take: Callable[[float], None]) -> None:
        self._notes.append((time.monotonic(), take))

    # What a sidecar asks.

    def look(self) -> EngineView:
        """Bring the picture up to date."""
        monotonic_s = time.monotonic()
        try:
            life = self._take_notes(monotonic_s)
            now_s = self._engine_s(monotonic_s)
            life.tracker.run_to(now_s)
            if not life.tracker.requests and monotonic_s - self._progress_s > self._forget_s:
                life.tracker.forget_pace()
            life.twin.engine.set_pace(life.tracker.correction.factor)
            life.twin.follow(shown_from(life.tracker, self._all_lengths(life), now_s, life.twin.num_slots))
        except ValueError as error:
            self._life = self._picture = None
            log_event(log, logging.WARNING, "the mirror begins anew, as it contradicts itself", reason=str(error))
            raise DownError(f"the mirror contradicts itself: {error}", STARTING) from None
        self._serial += 1
        self._picture = EngineView(
            engine=life.twin.engine,
            forecaster=life.forecaster,
            now_s=now_s,
            clock_rate=self._speed,
            age_s=max(0.0, monotonic_s - self._heard_s) if life.tracker.requests else 0.0,
            late_s=self._late_s(life, now_s, monotonic_s),
            serial=self._serial,
            transit=replace(self._profile.transit, outward_s=0.0),  # a step ends when its tokens are seen
            counters=self._counted(life),
        )
        return self._picture

    def snapshot(self) -> Snapshot:
        """Write down what is thought of the engine; times are on a clock of the sidecar's own."""
        picture = self.look()
        assert self._life is not None
        lengths, reserved = self._all_lengths(self._life), self._promised.as_reserved()
        return snapshot_from(self._life.tracker, lengths, reserved, picture.now_s)

    def promise(self, request: Request) -> None:
        """Let a request stand in the picture behind those that are there."""
        picture = self._picture or self.look()
        if self._promised.add(request, picture.engine, picture.comes_s):
            self._changed()

    def withdraw(self, request_id: str) -> None:
        """Take a promised request out of the picture."""
        if self._life is None:
            self._promised.drop(request_id)
        elif self._promised.withdraw(request_id, self._life.twin.engine):
            self._changed()

    def newly_shown(self) -> Sequence[str]:
        """Which requests have come to the engine."""
        shown, self._shown = self._shown, []
        return shown

    def newly_ended(self) -> Sequence[Ended]:
        """Which requests have ended."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Let go of everything."""
        self._notes.clear()

    # Taking what was noted.

    def _take_notes(self, until_s: float) -> Life:
        """Take everything in that was noted by then, in order."""
        if self._life is None:  # what tells the engine's settings goes first
            settings = [note for note in self._notes if self._is_setting(note[1])]
            for note in settings:
                self._notes.remove(note)
            for at_s, take in settings:
                take(at_s)
        if self._life is None:
            self._begin()
        while self._notes and self._notes[0][0] <= until_s:
            at_s, take = self._notes.popleft()
            take(at_s)
        return self._life or self._begin()

    def _take_arrival(self, name: str, arrival: Arrival, at_s: float) -> None:
        assert self._life is not None
        config, now_s = self._life.config, self._engine_s(at_s)
        capacity = self._life.tracker.engine.num_blocks * config.block_size
        room = min(config.max_model_len, capacity) - arrival.prompt_tokens
        self._shown.append(arrival.request_id)
        self.withdraw(arrival.request_id)
        self._counters.arrived(1, at_s)
        if not self._life.tracker.requests:
            self._progress_s = at_s
        self._heard_s = at_s
        if room < 1 or len(self._life.tracker.requests) >= self._most_requests:
            return  # the engine will refuse it, or it counts among those that nobody knows
        self._guests[name] = InFlightRequest(arrival=arrival, arrived_s=at_s)
        request = Request(
            request_id=name,
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=max(1, min(room, arrival.max_tokens or room)),
            priority=arrival.priority,
            arrival_s=now_s,
        )
        self._life.tracker.add(request, streamed=arrival.streamed)

    def _take_count(self, name: str, prompt_tokens: int, at_s: float) -> None:  # noqa: ARG002 - as all the others
        if (tracker := self._tracking(name)) is not None:
            tracker.counted(name, prompt_tokens)

    def _take_tokens(self, name: str, num_tokens: int, exact: bool, at_s: float) -> None:
        if (guest := self._guests.get(name)) is not None and guest.first_s is None:
            guest.first_s = at_s
        self._heard_s = self._progress_s = at_s
        if (tracker := self._tracking(name)) is not None:
            tracker.produced(name, num_tokens, self._engine_s(at_s), exact=exact)

    def _take_end(self, name: str, num_tokens: int, completed: bool, exact: bool, at_s: float) -> None:
        self._heard_s = at_s
        guest, tracker = self._guests.pop(name, None), self._tracking(name)
        if tracker is not None:
            now_s = self._engine_s(at_s)
            if completed and num_tokens > 0:
                self._progress_s = at_s
                tracker.produced(name, num_tokens, now_s, ended=True, exact=exact)
            else:
                tracker.drop(name, now_s)
        if guest is not None:
            self._num_ended += completed
            self._ended.append(
                Ended(
                    request_id=guest.arrival.request_id,
                    output_tokens=num_tokens,
                    ttft_s=None if guest.first_s is None else guest.first_s - guest.arrived_s,
                    e2e_s=at_s - guest.arrived_s,
                    completed=completed,
                )
            )

    def _take_setting(self, name: str, value: int, at_s: float) -> None:  # noqa: ARG002 - as all the others
        if self._told.get(name) != value:
            self._told[name] = value
            self._settle()

    def _take_totals(self, totals: EngineTotals, at_s: float) -> None:
        self._heard_s = at_s
        before, self._totals = self._totals, totals
        self._told.update(totals.settings)
        if before is not None and totals.began_anew(before):
            log_event(log, logging.WARNING, "engine has started anew", requests=len(self._guests))
            self._life = None
        self._settle()
        life = self._life or self._begin()
        if before is None or totals.shows_progress(before) or not (totals.running or totals.waiting):
            self._progress_s = at_s
        now_s = self._engine_s(at_s)
        life.tracker.run_to(now_s)
        life.reckoning.read(totals, now_s)
        self._balance(life, totals, now_s)
        self._counters.take(
            {
                "prefix_queries": totals.prefix_queries or 0,
                "prefix_hits": totals.prefix_hits or 0,
                "num_preemptions": totals.preemptions or 0,
                "num_outcomes": self._num_ended,
                "last_step_s": 0.0,
            },
            at_s,
        )

    def _balance(self, life: Life, totals: EngineTotals, now_s: float) -> None:
        """Put the model right where the engine's totals say otherwise."""
        tracker = life.tracker
        tracker.send_back(tracker.unconfirmed(now_s, SILENT_S * self._speed))
        if totals.running is not None and totals.waiting is not None:
            life.strangers.suppose(round(totals.running), round(totals.waiting), totals.kv_usage, now_s)
            # who came just now may be on the way still, and was not counted
            settled_s = now_s - SILENT_S * self._speed
            num_settled = sum(self._engine_s(one.arrived_s) < settled_s for one in self._guests.values())
            too_many = num_settled - round(totals.running + totals.waiting)
            self._num_lost = self._num_lost + 1 if too_many > 0 else 0
            if self._num_lost >= LOST_READINGS:
                self._drop_silent(tracker, too_many, now_s)
        if totals.kv_usage is not None:
            tracker.hold_elsewhere(round(totals.kv_usage * tracker.engine.num_blocks))
        if len(life.strangers) != self.num_unknown:
            if bool(life.strangers) != bool(self.num_unknown):
                event = "requests reach the engine by another way" if life.strangers else "all requests are known"
                log_event(log, logging.WARNING if life.strangers else logging.INFO, event, requests=len(life.strangers))
            self.num_unknown = len(life.strangers)

    def _drop_silent(self, tracker: Tracker, most: int, now_s: float) -> None:
        """Let go of requests that the engine does not have any more, the longest silent ones first."""
        names = [name for name in tracker.requests if name in self._guests]
        names.sort(key=lambda name: tracker.requests[name].heard_s)
        for name in names[:most]:
            if now_s - tracker.requests[name].heard_s < SILENT_S * self._speed:
                break
            tracker.drop(name, now_s)

    # The model.

    def _is_setting(self, take: Callable[[float], None]) -> bool:
        """Tell whether a note is about the engine, which may have to be known before any request."""
        return getattr(take, "func", None) in (self._take_setting, self._take_totals)

    def _config(self) -> EngineConfig:
        suggested = self._profile.engine
        settings = {
            name: value
            for name in ("num_gpu_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")
            if (value := getattr(suggested, name)) is not None
        }
        return EngineConfig(**{**settings, **self._told, **self._given})

    def _settle(self) -> None:
        """Take settings that have become known; a model made with others is made anew."""
        if self._life is not None and self._life.config != self._config():
            self._life = None

    def _begin(self) -> Life:
        """Make the models anew, for an engine that has nothing to do."""
        if self._totals is None and "num_gpu_blocks" not in self._given:
            raise DownError("the engine has told nothing of itself yet", STARTING)
        try:
            config = self._config()
            require_possible(self._profile, config)
            tracker = Tracker(config, self._profile.step_time, max(0.0, self._engine_s(self._origin_s)))
        except ValueError as error:
            raise DownError(f"engine settings: {error}", STARTING) from None
        twin = Twin(
            config, self._profile.step_time, self._residual, num_slots=2 * self._most_requests, track_blocks=False
        )
        log_event(
            log, logging.INFO, "engine is mirrored from its traffic", profile=self._profile.name,
            num_gpu_blocks=config.num_gpu_blocks, block_size=config.block_size, max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens, max_model_len=config.max_model_len,
        )  # fmt: skip
        self._life = Life(
            config=config,
            tracker=tracker,
            twin=twin,
            forecaster=Forecaster(twin.engine),
            strangers=UnknownRequests(tracker),
            reckoning=TokenReconciliation(tracker, SKEW_S * self._speed),
        )
        self._picture = None
        self._guests.clear()
        self._promised.move_to(twin.engine)
        return self._life

    def _all_lengths(self, life: Life) -> dict[str, Length]:
        lengths: dict[str, Length] = {}
        for name, guest in self._guests.items():
            told = self.lengths.of(guest.arrival.request_id)
            lengths[name] = told or (guest.arrival.known_tokens or 0, guest.arrival.tag)
        lengths.update(life.strangers.lengths())
        return lengths

    def _counted(self, life: Life) -> dict[str, float]:
        values = self._counters.values(self._speed)
        values["pace"] = life.tracker.correction.factor
        if life.tracker.last_step_s > 0:
            values["step_s"] = life.tracker.last_step_s / self._speed
        values["num_unknown"] = float(self.num_unknown)
        return values

    def _late_s(self, life: Life, now_s: float, monotonic_s: float) -> float:
        """How long ago a sign of life was due; both the engine's clients and its totals may give one."""
        since_s = max(0.0, monotonic_s - self._progress_s)
        if not life.tracker.requests:
            return 0.0
        return min(since_s, life.tracker.late_s(now_s) / self._speed if life.tracker.is_watched() else math.inf)

    def _tracking(self, name: str) -> Tracker | None:
        life = self._life
        return life.tracker if life is not None and name in life.tracker else None

    def _engine_s(self, monotonic_s: float) -> float:
        return (monotonic_s - self._origin_s) * self._speed

    def _changed(self) -> None:
        self._serial += 1
        if self._picture is not None:
            self._picture.serial = self._serial
