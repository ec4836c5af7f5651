"""An engine that exports its state in shared memory, followed step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from predictor.approximations import UNKNOWN_PREFIXES, UNKNOWN_RANKS, not_modelled
from predictor.batching import is_compiled
from predictor.data_parallel import DataParallelRank
from predictor.engine import Engine
from predictor.engine_replica import EngineReplica
from predictor.engine_view import EndedRequest, EngineView
from predictor.forecast import Forecaster
from predictor.indicators import EngineCounters
from predictor.lengths import Tag
from predictor.lockstep_forecast import LockstepForecaster
from predictor.profile import NO_TRANSIT, Profile, load_profile
from predictor.profile_check import require_possible
from predictor.request_group import Placeable
from predictor.reserved_requests import ReportedLengths, ReservedRequests
from predictor.snapshot import Snapshot
from predictor.speculation import NO_DRAFTS, AcceptanceLearner, DraftTotals, approximations_of
from predictor.vllm_versions import approximations_of as approximations_of_version
from predictor.vllm_versions import rules_for
from protos.block.v1 import common_pb2
from services.engine_state.identity import client_id, parts_of
from services.engine_state.layout import REASONS
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of, not_modelled_by, reported_state, snapshot_from_view
from services.engine_state.view import BUSY, CORRUPT, MISSING, UnreadableError, View
from services.logs import log_event
from services.predictor_server.engine_source import DownError
from services.predictor_server.followed_engine import FollowedEngine
from services.predictor_server.pass_records import RankSteps
from services.predictor_server.step_corrections import StepCorrections
from services.predictor_server.transfer_corrections import TransferCorrections

log = logging.getLogger(__name__)

FULL_READ_S = 0.25  # how often a file that does not change is read to learn whether its engine has ended
COMPLETED = {REASONS.index("stop"), REASONS.index("length")}


class ExportedEngine:
    """An engine source that reads a state file whenever it has changed, and lets an engine replica follow it."""

    kind = common_pb2.STATE_SOURCE_EXPORTED

    def __init__(self, path: str, profile: Profile | None, residual: str, forget_s: float) -> None:
        """Follow the engine whose state file is at a path; without a profile, use the one that the engine names."""
        self.lengths = ReportedLengths()
        self._reader = Reader(path)
        self._profile = profile
        self._residual = residual
        self._followed: FollowedEngine | None = None
        self._view: EngineView | None = None
        self.rank_steps = RankSteps()
        self._life = 0
        self._serial = 0  # of views
        self._transit = NO_TRANSIT
        self._steps = StepCorrections(self._reader, self.rank_steps, forget_s)
        self._transfers = TransferCorrections()
        self._counters = EngineCounters()
        self._drafts = AcceptanceLearner(NO_DRAFTS)
        self._num_outcomes = 0  # that have been read
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
        self._steps.observe(followed)
        self._transfers.observe(followed)
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
            counters=self._counters.values(view.clock_rate) | {"pace": self._steps.factor},
            approximations=self._approximations(followed),
        )
        return followed

    def _start(self, view: View) -> FollowedEngine:
        """Make a replica for an engine that is new, or has changed the size of its file."""
        profile = self._profile or _profile_of(view)
        config = config_of(view, profile.transfer_settings)
        if self._profile is not None:
            try:
                require_possible(profile, config)
            except ValueError as error:
                raise UnreadableError(CORRUPT, str(error)) from None
        self._transit = profile.transit
        if view.life != self._life:
            log_event(log, logging.INFO, "engine found", source=view.settings.get("source"), profile=profile.name)
            if not (rules := rules_for(config.vllm_version)).is_exact:
                log_event(
                    log, logging.WARNING, "engine's version is not known: the nearest rules are used",
                    version=config.vllm_version, rules=rules.name,
                )  # fmt: skip
            self._life = view.life
            self._num_outcomes = 0
            self.rank_steps.restart()
            self._steps.restart(self._profile, config)
            self._transfers.restart()
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
        self.rank_steps.rank = _rank_of(view)
        return FollowedEngine.with_replica(view, replica, self._forecaster_for(replica.engine))

    def _forecaster_for(self, engine: Engine) -> Forecaster:
        """Make a forecaster; that of a rank in lockstep takes the other ranks into account."""
        if self.rank_steps.is_in_lockstep and is_compiled(engine.batcher):
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
        if self._steps.forget_old(followed, now_s):
            engine_view.counters["pace"] = 1.0
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

    def _approximations(self, followed: FollowedEngine) -> tuple[str, ...]:
        """Return what all forecasts of an engine approximate."""
        settings = map(not_modelled, not_modelled_by(followed.view))
        named = (*_approximations_of_model(followed.replica.engine), *settings)
        return named if self.rank_steps.knows_all_ranks else (*named, UNKNOWN_RANKS)

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


def _approximations_of_model(engine: Engine) -> tuple[str, ...]:
    """Return what the engine model approximates: without the contents of its blocks, hits are unknown."""
    drafts = approximations_of(engine.config.speculative_method, engine.expected_drafts)
    config = engine.config
    version = approximations_of_version(
        config.vllm_version,
        speculates=bool(config.speculative_method),
        overlaps_fetches=config.overlaps_fetches,
    )
    return (*version, *drafts, *(() if engine.knows_hits(is_named=True) else (UNKNOWN_PREFIXES,)))


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
