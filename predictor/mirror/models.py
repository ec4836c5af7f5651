"""The models of a mirrored engine: one that follows it, and one that makes forecasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from predictor.approximations import UNKNOWN_PREFIXES
from predictor.config import EngineConfig
from predictor.editable_engine import ShownRecords
from predictor.engine_replica import EngineReplica
from predictor.forecast import Forecaster
from predictor.kv_events.stream import KvEventStream
from predictor.mirror.engine_kinds import VLLM
from predictor.mirror.known_blocks import KnownBlocks
from predictor.mirror.token_reconciliation import TokenReconciliation
from predictor.mirror.tracker import Tracker
from predictor.mirror.unknown_requests import UnknownRequests
from predictor.profile import Profile
from predictor.profile_check import require_possible
from predictor.reserved_requests import Length, ReservedRequests
from predictor.speculation import AcceptanceLearner
from predictor.step_time import StepTime

SKEW_S = 0.01  # between the tokens and the metrics of a moment: they come by different connections


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
    engine_kind: str = VLLM


@dataclass(slots=True, kw_only=True)
class EngineModels:
    """The models of one engine process: the tracker's follows the engine, the twin's makes forecasts."""

    config: EngineConfig
    step_time: StepTime
    tracker: Tracker
    twin: EngineReplica
    forecaster: Forecaster
    blocks: KnownBlocks | None
    unknown: UnknownRequests
    reconciliation: TokenReconciliation
    drafts: AcceptanceLearner

    @classmethod
    def of_idle_engine(
        cls,
        config: EngineConfig,
        options: MirrorOptions,
        step_time: StepTime,
        kv_events: KvEventStream | None,
        now_s: float,
    ) -> EngineModels:
        """Make the models of an idle engine; ValueError where it cannot have the profile.

        With KV events the contents of blocks are known, unless blocks go to other engines or come from them.
        """
        require_possible(options.profile, config)
        twin = _twin_of(config, options, step_time, tracks_blocks=kv_events is not None and not config.kv_role)
        blocks = KnownBlocks(kv_events) if kv_events is not None and twin.engine.tracks_blocks else None
        tracker = Tracker(config, step_time, now_s, None if blocks is None else blocks.hit_tokens)
        return cls(
            config=config,
            step_time=step_time,
            tracker=tracker,
            twin=twin,
            forecaster=Forecaster(twin.engine),
            blocks=blocks,
            unknown=UnknownRequests(tracker),
            reconciliation=TokenReconciliation(tracker, SKEW_S * options.speed),
            drafts=AcceptanceLearner(config.configured_drafts),
        )

    @property
    def approximations(self) -> tuple[str, ...]:
        """What forecasts of this engine do not know of its prefix cache."""
        if not self.tracker.engine.config.enable_prefix_caching:
            return ()
        return (UNKNOWN_PREFIXES,) if self.blocks is None else self.blocks.approximations

    def update_twin(
        self, options: MirrorOptions, lengths: Mapping[str, Length], reserved: ReservedRequests, now_s: float
    ) -> None:
        """Set the model for forecasts to the state of the one that follows the engine."""
        if self.twin.needs_replacement:
            self.twin = _twin_of(self.config, options, self.step_time, tracks_blocks=True)
            self.twin.engine.expect_drafts(self.drafts.expected)
            self.forecaster = Forecaster(self.twin.engine)
            reserved.move_to(self.twin.engine)
        twin, engine = self.twin, self.tracker.engine
        twin.engine.set_pace(self.tracker.correction.factor)
        shown = engine.shown(options.records, lengths, now_s, twin.num_slots)
        if self.blocks is not None:
            requests = engine.shown_requests(twin.num_slots)
            shown = self.blocks.complete(shown, requests, twin.engine.num_blocks, self.config.block_size)
        twin.update(shown)


def _twin_of(
    config: EngineConfig, options: MirrorOptions, step_time: StepTime, *, tracks_blocks: bool
) -> EngineReplica:
    return EngineReplica(
        config,
        step_time,
        options.residual,
        num_slots=2 * options.max_requests,
        track_blocks=tracks_blocks,
    )
