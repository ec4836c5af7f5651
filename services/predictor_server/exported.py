"""An engine that exports its state in shared memory, followed step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from predictor.adapter_times import AdapterTimes
from predictor.approximations import UNKNOWN_PREFIXES, UNKNOWN_RANKS
from predictor.batching import is_compiled
from predictor.correction import Correction, CorrectionRule, RegionCorrection
from predictor.data_parallel import DataParallelRank
from predictor.engine import Engine
from predictor.engine_replica import EngineReplica
from predictor.engine_view import EndedRequest, EngineView
from predictor.forecast import Forecaster
from predictor.indicators import EngineCounters
from predictor.lengths import Tag
from predictor.lockstep_forecast import LockstepForecaster
from predictor.profile import NO_TRANSIT, Profile, load_profile
from predictor.profile_check import StepCheck, require_possible
from predictor.request_group import Placeable
from predictor.reserved_requests import ReportedLengths, ReservedRequests
from predictor.snapshot import Snapshot
from predictor.speculation import NO_DRAFTS, AcceptanceLearner, DraftTotals, approximations_of
from predictor.step_time import region_of
from predictor.vllm_versions import approximations_of as approximations_of_version
from predictor.vllm_versions import rules_for
from protos.block.v1 import common_pb2
from services.engine_state.identity import client_id, parts_of
from services.engine_state.layout import REASONS
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of, reported_state, snapshot_from_view
from services.engine_state.view import BUSY, CORRUPT, MISSING, UnreadableError, View
from services.logs import log_event
from services.predictor_server.engine_source import DownError
from services.predictor_server.pass_records import PassRecords, RecordedStep, slowest_of

log = logging.getLogger(__name__)

# the properties of a step that its duration depends on
STEP_SUMS = (
    "num_tokens", "num_sampled", "num_decodes", "decode_context", "num_prefills", "prefill_qq", "prefill_qkv",
    "decode_longest",
)  # fmt: skip

ADAPTER_LOADS = ("adapter_loads", "adapter_activations")
OF_TRANSFERS = CorrectionRule(momentum=0.8, lowest=0.05, highest=50.0)  # a link's bandwidth is configured by guess
FULL_READ_S = 0.25  # how often a file that does not change is read to learn whether its engine has ended
COMPLETED = {REASONS.index("stop"), REASONS.index("length")}


@dataclass(slots=True)
class FollowedEngine:
    """One engine process, with one size of its state file, and the replica that follows it.

    By slot, `serials` has the request that was there at the last read; the other arrays have what is known about it.
    """

    view: View
    replica: EngineReplica
    forecaster: Forecaster
    serials: np.ndarray
    known_tokens: np.ndarray
    tag_median: np.ndarray
    tag_spread: np.ndarray
    held_s: np.ndarray  # for which the blocks of a prefill leg are expected to be held; NaN: for the lease
    learned: np.ndarray  # by slot, the request whose fetch has ended, and has been compared with its prediction

    @classmethod
    def with_replica(cls, view: View, replica: EngineReplica, forecaster: Forecaster) -> FollowedEngine:
        """Start without knowledge of the requests."""
        num_slots = len(view.live)
        return cls(
            view=view,
            replica=replica,
            forecaster=forecaster,
            serials=np.zeros(num_slots, np.uint64),
            known_tokens=np.zeros(num_slots, np.int64),
            tag_median=np.full(num_slots, np.nan),
            tag_spread=np.zeros(num_slots),
            held_s=np.full(num_slots, np.nan),
            learned=np.zeros(num_slots, np.uint64),
        )

    def is_of(self, view: View) -> bool:
        """Return whether a view is of the same process and the same size of its file."""
        return (view.life, view.generation) == (self.view.life, self.view.generation)


class ExportedEngine:
    """An engine source that reads a state file whenever it has changed, and lets an engine replica follow it."""

    kind = common_pb2.STATE_SOURCE_EXPORTED

    def __init__(self, path: str, profile: Profile | None, residual: str, forget_s: float) -> None:
        """Follow the engine whose state file is at a path; without a profile, use the one that the engine names."""
        self.lengths = ReportedLengths()
        self._reader = Reader(path)
        self._profile = profile
        self._residual = residual
        self._forget_s = forget_s
        self._followed: FollowedEngine | None = None
        self._view: EngineView | None = None
        self.rank: DataParallelRank | None = None
        self.passes = PassRecords()
        self.beside: Callable[[], Sequence[PassRecords]] = tuple  # of the other ranks in lockstep
        self._unmatched: list[RecordedStep] = []
        self._life = 0
        self._serial = 0  # of views
        self._transit = NO_TRANSIT
        self._check: StepCheck | None = None  # of a configured profile; one that the engine names needs none
        self._correction = RegionCorrection()
        self._corrected_s = 0.0
        self._transfers = Correction(rule=OF_TRANSFERS)
        self._adapter_times = AdapterTimes()
        self._num_fetched = 0
        self._counters = EngineCounters()
        self._drafts = AcceptanceLearner(NO_DRAFTS)
        self._num_steps = self._num_outcomes = 0  # that have been read
        self._read_s = 0.0
        self._reserved = ReservedRequests()
        self._shown: list[str] = []

    def refresh(self) -> EngineView:
        """Return the engine's state now; DownError where it is not known."""
        now_s = time.monotonic()
        try:
            is_due = now_s - self._read_s >= FULL_READ_S
            if self._followed is None or self._view is None or is_due or self._reader.has_news():
                self._read_s = now_s
                self._followed = self._read(self._followed)
            return self._advance(self._followed, now_s)
        except UnreadableError as error:
            if error.reason == BUSY and self._followed is not None:
                return self._advance(self._followed, now_s)  # the last state is good enough until the next refresh
            self._followed = self._view = None
            state = common_pb2.INSTANCE_STATE_STARTING if error.reason == MISSING else common_pb2.INSTANCE_STATE_DOWN
            raise DownError(str(error), state) from None

    def snapshot(self) -> Snapshot:
        """Return the engine's state as a snapshot; its times are on the engine's clock."""
        self.refresh()
        assert self._followed is not None
        snapshot = snapshot_from_view(self._followed.view, self.lengths.as_tags())
        return replace(snapshot, reserved=self._reserved.as_reserved())

    def reserve(self, request: Placeable) -> None:
        """Add a request to the view that has not arrived yet; ValueError where the engine could never serve it."""
        view = self._view or self.refresh()
        if self._reserved.add(request, view.engine, view.arrival_s):
            self._mark_changed()

    def release(self, request_id: str) -> None:
        """Remove a reserved request from the view."""
        if self._followed is None:
            self._reserved.drop(request_id)
        elif self._reserved.withdraw(request_id, self._followed.replica.engine):
            self._mark_changed()

    def take_shown(self) -> Sequence[str]:
        """Return the ids of requests that reached the engine since this was last called."""
        shown, self._shown = self._shown, []
        return shown

    def take_ended(self) -> Sequence[EndedRequest]:
        """Return the requests that ended since this was last called."""
        if self._followed is None:
            return ()
        view = self._followed.view
        num_outcomes = int(view.state["num_outcomes"])
        if num_outcomes == self._num_outcomes:
            return ()
        try:
            rows = self._reader.new_outcomes()
        except UnreadableError:
            return ()  # until the file can be read again
        self._num_outcomes = num_outcomes
        return [_ended_request(row, view.clock_rate) for row in rows]

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    # Reading.

    def _read(self, followed: FollowedEngine | None) -> FollowedEngine:
        """Read the file and follow it; if what the blocks hold is inconsistent, without that."""
        view = self._reader.read(contents=followed is None or followed.replica.engine.tracks_blocks)
        try:
            return self._follow(followed, view)
        except UnreadableError:
            raise
        except ValueError as error:
            reason = f"{self._reader.path}: is inconsistent: {error}"
        if view.contents is not None:
            with suppress(ValueError):
                followed = self._follow(None, replace(view, contents=None))
                log_event(log, logging.WARNING, "prefix hits are not forecast", reason=reason)
                return followed
        raise UnreadableError(CORRUPT, reason)

    def _follow(self, followed: FollowedEngine | None, view: View) -> FollowedEngine:
        """Bring the replica to the state of a view; ValueError where the view is inconsistent."""
        if followed is None or not followed.is_of(view) or followed.replica.needs_replacement:
            followed = self._start(view)
        elif self._view is not None and view.sequence == followed.view.sequence:
            return followed
        followed.view = view
        self._note_arrivals(followed)
        self._correct_pace(followed)
        self._correct_transfers(followed)
        self._learn_acceptance(followed)
        followed.replica.update(
            reported_state(
                view,
                known_tokens=followed.known_tokens,
                tag_median=followed.tag_median,
                tag_spread=followed.tag_spread,
                remembers=followed.replica.engine.batcher.estimates,
                held_s=followed.held_s,
            )
        )
        self._counters.update(view.state, time.monotonic())
        self._view = EngineView(
            engine=followed.replica.engine,
            forecaster=followed.forecaster,
            now_s=view.now_s,
            clock_rate=view.clock_rate,
            age_s=view.age_s,
            overdue_s=0.0,
            serial=0,
            transit=self._transit,
            counters=self._counters.values(view.clock_rate) | {"pace": self._correction.every.factor},
            approximations=self._approximations(followed.replica.engine),
        )
        return followed

    def _start(self, view: View) -> FollowedEngine:
        """Make a replica for an engine that is new, or has changed the size of its file."""
        profile = self._profile or _profile_of(view)
        config = config_of(view, profile.transfer_settings)
        if self._profile is not None:
            _require(require_possible, profile, config)
        self._transit = profile.transit
        if view.life != self._life:
            log_event(log, logging.INFO, "engine found", source=view.settings.get("source"), profile=profile.name)
            if not (rules := rules_for(config.vllm_version)).is_exact:
                log_event(
                    log, logging.WARNING, "engine's version is not known: the nearest rules are used",
                    version=config.vllm_version, rules=rules.name,
                )  # fmt: skip
            self._life = view.life
            self._num_steps = self._num_outcomes = 0
            self._unmatched = []
            self._correction = RegionCorrection()
            self._transfers, self._num_fetched = Correction(rule=OF_TRANSFERS), 0
            self._adapter_times = AdapterTimes(load_s=config.lora_load_s, activate_s=config.lora_activate_s)
            self._check = StepCheck(profile) if self._profile is not None else None
            self._counters = EngineCounters()
            self._drafts = AcceptanceLearner(config.configured_drafts)
        replica = EngineReplica(
            config,
            profile.step_time,
            self._residual,
            num_slots=len(view.live),
            track_blocks=view.contents is not None,
        )
        self._reserved.move_to(replica.engine)
        self.rank = _rank_of(view)
        return FollowedEngine.with_replica(view, replica, self._forecaster_for(replica.engine))

    def _forecaster_for(self, engine: Engine) -> Forecaster:
        """Make a forecaster; that of a rank in lockstep heeds the other ranks."""
        if self.rank is not None and self.rank.lockstep is not None and is_compiled(engine.batcher):
            return LockstepForecaster(engine)
        return Forecaster(engine)

    def current(self) -> EngineView | None:
        """Return the view as of the last refresh; None where the state is not known."""
        return self._view

    def _advance(self, followed: FollowedEngine, now_s: float) -> EngineView:
        """Let the time since the last publication pass in the view."""
        engine_view, view = self._view, followed.view
        if engine_view is None:
            raise UnreadableError(CORRUPT, f"{self._reader.path}: has not been followed yet")
        engine_s = (now_s - float(view.state["clock_origin_s"])) * view.clock_rate
        engine_view.now_s = max(engine_view.now_s, engine_s)
        self._shown += self._reserved.drop_unshown(followed.replica.engine, now_s)
        engine_view.overdue_s = followed.replica.late_s(engine_view.now_s) / view.clock_rate
        followed.replica.wait_until(engine_view.now_s)
        self._mark_changed()
        if self._correction.every.ratios and now_s - self._corrected_s > self._forget_s:
            self._forget_pace(followed, engine_view)
        # an idle engine publishes nothing, and its last state stays true
        engine_view.age_s = max(0.0, now_s - int(view.state["written_ns"]) / 1e9) if view.steps else 0.0
        return engine_view

    def _mark_changed(self) -> None:
        self._serial += 1
        if self._view is not None:
            self._view.serial = self._serial

    def _note_arrivals(self, followed: FollowedEngine) -> None:
        """Take the names of new requests, and the lengths of their answers."""
        view = followed.view
        slots = view.slots.astype(np.int64)
        serials = view.live["serial"][slots]
        new = slots[followed.serials[slots] != serials]
        followed.serials[slots] = serials
        for slot in new.tolist():
            row = view.requests[slot]
            name, prompt, sequence = parts_of(_engine_id(row))
            tokens, tag = self.lengths.of(name) or (0, None)
            followed.known_tokens[slot] = tokens
            followed.tag_median[slot], followed.tag_spread[slot] = _tag_of(row, tag)
            held_s = self._reserved.held_s(name)
            followed.held_s[slot] = np.nan if held_s is None else held_s
            if self._reserved.show(name, prompt, sequence, followed.replica.engine, time.monotonic()):
                self._shown.append(name)
            self._mark_changed()
        self._counters.count_arrivals(len(new), time.monotonic())

    def _correct_pace(self, followed: FollowedEngine) -> None:
        """Compare the steps that have ended with their duration by the profile."""
        num_steps = int(followed.view.state["num_steps"])
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._corrected_s = time.monotonic()
            steps = self._recorded_steps(followed.replica)
            if self._is_in_lockstep:  # by the next time, the other ranks' steps of the same passes have been read
                for step in steps:
                    self.passes.add(step)
                steps, self._unmatched = [slowest_of(one, self.beside()) for one in self._unmatched], steps
            for step in steps:
                self._correction = self._correction.observe(
                    step.region, predicted_s=step.predicted_s, real_s=step.real_s
                )
                if self._check is not None:
                    self._check.observe(predicted_s=step.predicted_s, real_s=step.real_s)
        elif self._check is not None and time.monotonic() - self._corrected_s > self._forget_s:
            self._check.forget()  # as in `_forget_pace`
        if self._check is not None:
            _require(self._check.require_close)
        followed.replica.engine.set_region_paces(self._correction.every.factor, self._correction.factors)
        if followed.replica.engine.config.max_loras:
            followed.replica.engine.set_adapter_times(self._adapter_times.load_s, self._adapter_times.activate_s)

    def _learn_adapter_times(self, extra_s: float, num_loads: int, num_activations: int) -> None:
        """Learn from a step that loaded adapters; its duration says nothing about the pace of others."""
        self._adapter_times = self._adapter_times.observe(
            num_loads=num_loads, num_activations=num_activations, extra_s=extra_s
        )

    @property
    def _is_in_lockstep(self) -> bool:
        return self.rank is not None and self.rank.lockstep is not None

    def _recorded_steps(self, replica: EngineReplica) -> list[RecordedStep]:
        """Read the steps that have ended, with their durations by the profile; without those that loaded adapters."""
        records = self._reader.new_steps()
        steps = []
        for start_s, real_s, sums, loads in zip(
            records["start_s"].tolist(),
            records["seconds"].tolist(),
            records[list(STEP_SUMS)].tolist(),
            records[list(ADAPTER_LOADS)].tolist(),
            strict=True,
        ):
            step = dict(zip(STEP_SUMS, sums, strict=True))
            predicted_s = replica.step_seconds(**step)
            if predicted_s is not None and any(loads):
                self._learn_adapter_times(real_s - predicted_s * self._correction.every.factor, *loads)
            elif predicted_s is not None:
                region = region_of(step["num_tokens"], step["num_decodes"], step["num_prefills"])
                steps.append(RecordedStep(start_s, real_s, predicted_s, region))
        return steps

    def _approximations(self, engine: Engine) -> tuple[str, ...]:
        """Return what all forecasts of an engine approximate."""
        named = _approximations_of_model(engine)
        knows_ranks = not self._is_in_lockstep or self.rank is None or len(self.beside()) + 1 >= self.rank.size
        return named if knows_ranks else (*named, UNKNOWN_RANKS)

    def _correct_transfers(self, followed: FollowedEngine) -> None:
        """Compare the fetches that have ended with their duration by the engine's configuration."""
        view, num_fetched = followed.view, int(followed.view.state["num_fetched"])
        if num_fetched != self._num_fetched:
            self._num_fetched = num_fetched
            config = followed.replica.engine.config
            alone = set(alone_on_the_link(view.live, view.slots))
            for slot in view.slots[view.live["fetch_ended_s"][view.slots] >= 0].tolist():
                live = view.live[slot]
                if followed.learned[slot] == live["serial"]:
                    continue
                followed.learned[slot] = live["serial"]  # only now are all known that were fetched at the same time
                if slot in alone:
                    num_tokens = int(view.requests["prompt_tokens"][slot] - live["hit_tokens"])
                    self._transfers = self._transfers.observe(
                        predicted_s=config.transfer_s(num_tokens, -(-num_tokens // config.block_size)),
                        real_s=float(live["fetch_ended_s"] - live["fetch_started_s"]),
                    )
        followed.replica.engine.set_transfer_pace(self._transfers.factor)

    def _learn_acceptance(self, followed: FollowedEngine) -> None:
        """Learn how many draft tokens the engine proposes and accepts."""
        engine, state = followed.replica.engine, followed.view.state
        if engine.config.speculative_method:
            totals = DraftTotals(
                num_drafts=int(state["num_drafts"]),
                num_draft_tokens=int(state["num_draft_tokens"]),
                num_chances=int(state["num_draft_chances"]),
                accepted=tuple(state["num_accepted"].tolist()[: engine.config.num_speculative_tokens]),
            )
            if self._drafts.observe(totals) or engine.expected_drafts is not self._drafts.expected:
                engine.expect_drafts(self._drafts.expected)

    def _forget_pace(self, followed: FollowedEngine, view: EngineView) -> None:
        """Return to the profile's pace: an engine that was slow gets no requests to show that it has recovered."""
        self._correction = RegionCorrection()
        followed.replica.engine.set_pace(1.0)
        view.counters["pace"] = 1.0


def _require(check: Callable[..., None], *arguments: Any) -> None:
    """Make an engine unreadable if a check of its profile fails."""
    try:
        check(*arguments)
    except ValueError as error:
        raise UnreadableError(CORRUPT, str(error)) from None


def _rank_of(view: View) -> DataParallelRank | None:
    """Return which data-parallel rank an engine is; None where its engine has no others."""
    table = view.settings.get("data_parallel")
    return None if table is None else DataParallelRank.from_table(table)


def _profile_of(view: View) -> Profile:
    """Load the profile that an engine names, as an emulated one does."""
    name = view.settings.get("profile")
    if not isinstance(name, str):
        raise UnreadableError(CORRUPT, "profile: the engine names none; set --profile of the sidecar")
    try:
        return load_profile(name)
    except ValueError as error:
        raise UnreadableError(CORRUPT, f"{error}; or set --profile of the sidecar") from None


def alone_on_the_link(live: np.ndarray, slots: np.ndarray) -> list[int]:
    """Return the slots of requests whose blocks were fetched while no others were, so that one can predict the time."""
    started_s, ended_s = live["fetch_started_s"][slots], live["fetch_ended_s"][slots]
    has_started = started_s >= 0
    slots, started_s, ended_s = slots[has_started], started_s[has_started], ended_s[has_started]
    until_s = np.where(ended_s >= 0, ended_s, np.inf)
    return [
        int(slot)
        for slot, start_s, end_s in zip(slots, started_s, ended_s, strict=True)
        if end_s >= 0 and np.count_nonzero((started_s < end_s) & (until_s > start_s)) == 1
    ]


def _approximations_of_model(engine: Engine) -> tuple[str, ...]:
    """Return what the engine model approximates: without the contents of its blocks, hits are unknown."""
    knows_hits = engine.tracks_blocks or not engine.config.enable_prefix_caching
    drafts = approximations_of(engine.config.speculative_method, engine.expected_drafts)
    config = engine.config
    version = approximations_of_version(config.vllm_version, speculates=bool(config.speculative_method))
    return (*version, *drafts, *(() if knows_hits else (UNKNOWN_PREFIXES,)))


def _engine_id(row: np.void) -> str:
    return bytes(row["request_id"]).decode(errors="replace")


def _tag_of(row: np.void, reported: Tag | None) -> tuple[float, float]:
    """Return the tag that a scheduler reported, or a valid one that the request carries, or NaN."""
    if reported is not None:
        return reported.median_tokens, reported.spread
    try:
        tag = Tag(median_tokens=float(row["tag_tokens"]), spread=float(row["tag_spread"]))
    except ValueError:
        return float("nan"), 0.0
    return tag.median_tokens, tag.spread


def _ended_request(row: np.void, clock_rate: float) -> EndedRequest:
    arrival_s = float(row["arrival_s"])

    def since_arrival_s(time_s: np.floating) -> float | None:
        return (float(time_s) - arrival_s) / clock_rate if time_s >= arrival_s else None

    return EndedRequest(
        request_id=client_id(_engine_id(row)),
        output_tokens=int(row["output_tokens"]),
        ttft_s=since_arrival_s(row["first_token_s"]),
        e2e_s=since_arrival_s(row["finished_s"]),
        completed=int(row["reason"]) in COMPLETED,
    )
