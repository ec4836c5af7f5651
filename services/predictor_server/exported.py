"""An engine that shows its state in shared memory, followed step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from predictor.correction import Correction
from predictor.forecast import Forecaster
from predictor.lengths import Tag
from predictor.profile import NO_TRANSIT, Profile, load_profile
from predictor.profile_check import StepCheck, require_possible
from predictor.request import Request
from predictor.reserved_requests import LengthLimits, ReservedRequest
from predictor.snapshot import Snapshot
from predictor.twin import Twin
from protos.block.v1 import common_pb2
from services.engine_state.identity import client_id
from services.engine_state.layout import REASONS
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of, shown_from_view, snapshot_from_view
from services.engine_state.view import BUSY, CORRUPT, MISSING, UnreadableError, View
from services.logs import log_event
from services.predictor_server.counters import Counters
from services.predictor_server.engine_view import DownError, Ended, EngineView

log = logging.getLogger(__name__)

# of a step, what its seconds depend on
SUMS = (
    "num_tokens", "num_sampled", "num_decodes", "decode_context", "num_prefills", "prefill_qq", "prefill_qkv",
    "decode_longest",
)  # fmt: skip

LOOK_CLOSELY_S = 0.25  # how often a file that does not change is looked at for signs of its engine's end
COMPLETED = {REASONS.index("stop"), REASONS.index("length")}


@dataclass(slots=True)
class Met:
    """An engine in one of its lives, with one size of its file, and the model that stands as it does.

    By slot, `serials` tells whose it was when last looked at, and the others how long that one's answer will be.
    """

    view: View
    twin: Twin
    forecaster: Forecaster
    serials: np.ndarray
    known_tokens: np.ndarray
    tag_median: np.ndarray
    tag_spread: np.ndarray

    @classmethod
    def with_twin(cls, view: View, twin: Twin) -> Met:
        """Know nothing of its requests yet."""
        num_slots = len(view.live)
        return cls(
            view=view,
            twin=twin,
            forecaster=Forecaster(twin.engine),
            serials=np.zeros(num_slots, np.uint64),
            known_tokens=np.zeros(num_slots, np.int64),
            tag_median=np.full(num_slots, np.nan),
            tag_spread=np.zeros(num_slots),
        )

    def is_of(self, view: View) -> bool:
        """Tell whether a view is of the same engine and the same size of its file."""
        return (view.life, view.generation) == (self.view.life, self.view.generation)


class ExportedEngine:
    """Reads an engine's state file whenever it has changed, and has an engine model stand as it shows."""

    kind = common_pb2.STATE_SOURCE_EXPORTED

    def __init__(self, path: str, profile: Profile | None, residual: str, forget_s: float) -> None:
        """Follow the engine at a path; without a profile, forecast with the one that the engine names."""
        self.lengths = LengthLimits()
        self._reader = Reader(path)
        self._profile = profile
        self._residual = residual
        self._forget_s = forget_s
        self._met: Met | None = None
        self._picture: EngineView | None = None
        self._life = 0
        self._serial = 0
        self._transit = NO_TRANSIT
        self._check: StepCheck | None = None  # of a profile that somebody has named, for an engine that names none
        self._correction = Correction()
        self._corrected_s = 0.0
        self._counters = Counters()
        self._num_steps = self._num_outcomes = 0  # that have been looked at
        self._looked_closely_s = 0.0
        self._promised = ReservedRequest()
        self._shown: list[str] = []

    def look(self) -> EngineView:
        """Bring the picture up to date."""
        monotonic_s = time.monotonic()
        try:
            closely = monotonic_s - self._looked_closely_s >= LOOK_CLOSELY_S
            if self._met is None or self._picture is None or closely or self._reader.has_news():
                self._looked_closely_s = monotonic_s
                self._met = self._read(self._met)
            return self._waited(self._met, monotonic_s)
        except UnreadableError as error:
            if error.reason == BUSY and self._met is not None:
                return self._waited(self._met, monotonic_s)  # what was known will do until the next time
            self._met = self._picture = None
            state = common_pb2.INSTANCE_STATE_STARTING if error.reason == MISSING else common_pb2.INSTANCE_STATE_DOWN
            raise DownError(str(error), state) from None

    def snapshot(self) -> Snapshot:
        """Write down what the file shows; times are on the engine's clock."""
        self.look()
        assert self._met is not None
        view = snapshot_from_view(self._met.view, self.lengths.as_tags())
        return replace(view, reserved=self._promised.as_reserved())

    def promise(self, request: Request) -> None:
        """Let a request stand in the picture behind those that the engine shows."""
        picture = self._picture or self.look()
        if self._promised.add(request, picture.engine, picture.comes_s):
            self._changed()

    def withdraw(self, request_id: str) -> None:
        """Take a promised request out of the picture."""
        if self._met is None:
            self._promised.drop(request_id)
        elif self._promised.withdraw(request_id, self._met.twin.engine):
            self._changed()

    def newly_shown(self) -> Sequence[str]:
        """Which requests the engine has shown for the first time."""
        shown, self._shown = self._shown, []
        return shown

    def newly_ended(self) -> Sequence[Ended]:
        """Which requests have ended."""
        if self._met is None:
            return ()
        view = self._met.view
        num_outcomes = int(view.state["num_outcomes"])
        if num_outcomes == self._num_outcomes:
            return ()
        try:
            rows = self._reader.new_outcomes()
        except UnreadableError:
            return ()  # until the file can be read again
        self._num_outcomes = num_outcomes
        return [_ended(row, view.clock_rate) for row in rows]

    def close(self) -> None:
        """Let the file go."""
        self._reader.close()

    # Reading.

    def _read(self, met: Met | None) -> Met:
        """Read what is new, and have the model stand so; if needs be, without what the blocks hold."""
        view = self._reader.read(contents=met is None or met.twin.engine.tracks_blocks)
        try:
            return self._follow(met, view)
        except UnreadableError:
            raise
        except ValueError as error:
            complaint = f"{self._reader.path}: contradicts itself: {error}"
        if view.contents is not None:
            with suppress(ValueError):
                met = self._follow(None, replace(view, contents=None))
                log_event(log, logging.WARNING, "prefix hits are not foreseen", reason=complaint)
                return met
        raise UnreadableError(CORRUPT, complaint)

    def _follow(self, met: Met | None, view: View) -> Met:
        """Have the model stand as a view shows; a ValueError says what in the view cannot be."""
        if met is None or not met.is_of(view) or met.twin.is_worn:
            met = self._meet(view)
        elif self._picture is not None and view.sequence == met.view.sequence:
            return met
        met.view = view
        self._note_news(met)
        self._correct(met)
        met.twin.follow(
            shown_from_view(view, known_tokens=met.known_tokens, tag_median=met.tag_median, tag_spread=met.tag_spread)
        )
        self._counters.take(view.state, time.monotonic())
        self._picture = EngineView(
            engine=met.twin.engine,
            forecaster=met.forecaster,
            now_s=view.now_s,
            clock_rate=view.clock_rate,
            age_s=view.age_s,
            late_s=0.0,
            serial=0,
            transit=self._transit,
            counters=self._counters.values(view.clock_rate) | {"pace": self._correction.factor},
        )
        return met

    def _meet(self, view: View) -> Met:
        """Make a model for an engine that is new, or has changed the size of its file."""
        config = config_of(view)
        profile = self._profile or _named_by(view)
        if self._profile is not None:
            _require(require_possible, profile, config)
        self._transit = profile.transit
        if view.life != self._life:
            log_event(log, logging.INFO, "engine found", source=view.settings.get("source"), profile=profile.name)
            self._life = view.life
            self._num_steps = self._num_outcomes = 0
            self._correction = Correction()
            self._check = StepCheck(profile) if self._profile is not None else None
            self._counters = Counters()
        twin = Twin(
            config,
            profile.step_time,
            self._residual,
            num_slots=len(view.live),
            track_blocks=view.contents is not None,
        )
        self._promised.move_to(twin.engine)
        return Met.with_twin(view, twin)

    def _waited(self, met: Met, monotonic_s: float) -> EngineView:
        """Let the time that has passed since the last publication show in the picture."""
        picture, view = self._picture, met.view
        if picture is None:
            raise UnreadableError(CORRUPT, f"{self._reader.path}: has not been understood yet")
        picture.now_s = max(picture.now_s, (monotonic_s - float(view.state["clock_origin_s"])) * view.clock_rate)
        picture.late_s = met.twin.late_s(picture.now_s) / view.clock_rate
        met.twin.let_time_pass(picture.now_s)
        self._changed()
        if self._correction.ratios and monotonic_s - self._corrected_s > self._forget_s:
            self._forget_pace(met, picture)
        # an engine that does nothing publishes nothing, and stands as it did
        picture.age_s = max(0.0, monotonic_s - int(view.state["written_ns"]) / 1e9) if view.steps else 0.0
        return picture

    def _changed(self) -> None:
        self._serial += 1
        if self._picture is not None:
            self._picture.serial = self._serial

    def _note_news(self, met: Met) -> None:
        """Learn of requests that are shown for the first time: their names, and how long their answers will be."""
        view = met.view
        slots = view.slots.astype(np.int64)
        serials = view.live["serial"][slots]
        new = slots[met.serials[slots] != serials]
        met.serials[slots] = serials
        for slot in new.tolist():
            row = view.requests[slot]
            name = _client_id(row)
            tokens, tag = self.lengths.of(name) or (0, None)
            met.known_tokens[slot] = tokens
            met.tag_median[slot], met.tag_spread[slot] = _tag_of(row, tag)
            self._shown.append(name)
            self.withdraw(name)
        self._counters.arrived(len(new), time.monotonic())

    def _correct(self, met: Met) -> None:
        """Compare the steps that have ended with what the profile says of them."""
        num_steps = int(met.view.state["num_steps"])
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._corrected_s = time.monotonic()
            records = self._reader.new_steps()
            for real_s, sums in zip(records["seconds"].tolist(), records[list(SUMS)].tolist(), strict=True):
                predicted_s = met.twin.step_seconds(**dict(zip(SUMS, sums, strict=True)))
                if predicted_s is not None:
                    self._correction = self._correction.observe(predicted_s=predicted_s, real_s=real_s)
                    if self._check is not None:
                        self._check.observe(predicted_s=predicted_s, real_s=real_s)
        elif self._check is not None and time.monotonic() - self._corrected_s > self._forget_s:
            self._check.forget()  # as in `_forget_pace`
        if self._check is not None:
            _require(self._check.require_close)
        met.twin.engine.set_pace(self._correction.factor)

    def _forget_pace(self, met: Met, picture: EngineView) -> None:
        """Trust the profile again: an engine that was slow gets nothing to do, and could not show that it is well."""
        self._correction = Correction()
        met.twin.engine.set_pace(self._correction.factor)
        picture.counters["pace"] = self._correction.factor


def _require(check: Callable[..., None], *arguments: Any) -> None:
    """Have an engine count as one that cannot be foretold where a check of its profile says so."""
    try:
        check(*arguments)
    except ValueError as error:
        raise UnreadableError(CORRUPT, str(error)) from None


def _named_by(view: View) -> Profile:
    """The profile that an engine names, as an emulated one does."""
    name = view.settings.get("profile")
    if not isinstance(name, str):
        raise UnreadableError(CORRUPT, "profile: the engine names none, so the sidecar must be told: --profile")
    try:
        return load_profile(name)
    except ValueError as error:
        raise UnreadableError(CORRUPT, f"{error}; the sidecar can be told another: --profile") from None


def _client_id(row: np.void) -> str:
    return client_id(bytes(row["request_id"]).decode(errors="replace"))


def _tag_of(row: np.void, told: Tag | None) -> tuple[float, float]:
    """The tag that a scheduler told beforehand, or the one that the request carries, if it makes sense."""
    if told is not None:
        return told.median_tokens, told.spread
    try:
        tag = Tag(median_tokens=float(row["tag_tokens"]), spread=float(row["tag_spread"]))
    except ValueError:
        return float("nan"), 0.0
    return tag.median_tokens, tag.spread


def _ended(row: np.void, clock_rate: float) -> Ended:
    arrival_s = float(row["arrival_s"])

    def since(moment: np.floating) -> float | None:
        return (float(moment) - arrival_s) / clock_rate if moment >= arrival_s else None

    return Ended(
        request_id=_client_id(row),
        output_tokens=int(row["output_tokens"]),
        ttft_s=since(row["first_token_s"]),
        e2e_s=since(row["finished_s"]),
        completed=int(row["reason"]) in COMPLETED,
    )
