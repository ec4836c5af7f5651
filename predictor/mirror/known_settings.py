"""What a mirror knows of its engine: the kind, the settings that it reports, and those that its requests show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor.config import EngineConfig
from predictor.generic_estimate import GenericEstimator, is_generic
from predictor.mirror.engine_kinds import (
    ADAPTER_BATCHERS,
    AUTO,
    GENERIC,
    NO_POOL_SIZE,
    OTHER_TIMES,
    SGLANG,
    UNKNOWN_KIND,
    UNKNOWN_MODEL_LENGTH,
    UNKNOWN_POOL,
    VLLM,
    learnt_times,
)
from predictor.mirror.events import EngineIdentified, ModelLengthRead, VersionRead
from predictor.profile import Profile
from predictor.step_time import StepTime

DEFAULT_BATCHER = EngineConfig().batcher
RELEARN_S = 2.0  # between two changes of learnt step times
RELEARN_SHARE = 0.1  # by which they must have changed


class KnownSettings:
    """Makes an engine's configuration from all that is known; what the operator gives goes first."""

    def __init__(self, profile: Profile, given: Mapping[str, Any], engine_kind: str, now_s: float) -> None:
        """Know what is given; an engine of kind `auto` is taken for vLLM until it is identified."""
        self.kind = VLLM if engine_kind == AUTO else engine_kind
        self.reported: dict[str, Any] = {}
        self._scraped: set[str] = set()  # of these, what the metrics have reported
        self.estimator = GenericEstimator() if is_generic(profile) else None
        self._profile, self._given = profile, given
        self._notes: tuple[str, ...] = ()
        self._learnt = self.estimator.parameters() if self.estimator else None  # that the models have
        self._learnt_at_s = now_s

    def take(self, event: EngineIdentified | ModelLengthRead | VersionRead) -> None:
        """Take what the engine reports of itself."""
        match event:
            case ModelLengthRead(max_model_len=max_model_len):
                self.reported["max_model_len"] = max_model_len
            case VersionRead(version=version):
                self.reported["vllm_version"] = version
            case EngineIdentified():
                self._identify(event)

    def take_scraped(self, settings: Mapping[str, Any], *, restarted: bool) -> None:
        """Take what the metrics report; after a restart, forget what they reported before and do not report now."""
        if restarted:
            for name in self._scraped - settings.keys():
                self.reported.pop(name, None)
            self._scraped.clear()
        self.reported.update(settings)
        self._scraped |= settings.keys()

    def _identify(self, event: EngineIdentified) -> None:
        """Take the engine's kind, and the settings that it reports."""
        if event.kind != self.kind:
            self.reported.clear()
        self.kind, self._notes = event.kind, event.approximations
        self.reported.update(event.settings)

    @property
    def step_time(self) -> StepTime:
        """The profile's step time, or the one that is learnt."""
        return self._profile.step_time if self._learnt is None else self._learnt.step_time

    def relearn(self, at_s: float) -> bool:
        """Return whether what is learnt has changed much since it was last taken."""
        if self.estimator is None or self._learnt is None or at_s - self._learnt_at_s < RELEARN_S:
            return False
        learnt, self._learnt_at_s = self.estimator.parameters(), at_s
        if not learnt.differs_from(self._learnt, RELEARN_SHARE):
            return False
        self._learnt = learnt
        return True

    def config(self) -> EngineConfig:
        """Return the engine's settings."""
        defaults: dict[str, Any] = dict(self._profile.suggested_settings)
        learnt: dict[str, Any] = {}
        if self.kind == SGLANG:
            defaults |= {**UNKNOWN_POOL, "batcher": "sglang"}
        elif self.kind == GENERIC:
            defaults |= {**UNKNOWN_POOL, "max_model_len": UNKNOWN_MODEL_LENGTH, "batcher": "generic"}
            if self._learnt is not None:
                learnt = self._learnt.settings
        config = {**defaults, **self.reported, **learnt, **self._given}
        if config.get("batcher", DEFAULT_BATCHER) not in ADAPTER_BATCHERS:
            config.pop("max_loras", None)  # it may have adapters, whose limits this local scheduler ignores
        return EngineConfig(**config)

    def approximations(self, config: EngineConfig) -> tuple[str, ...]:
        """Return what all forecasts approximate, a sentence for each."""
        notes = [*self._notes]
        if self.kind == GENERIC:
            notes.append(UNKNOWN_KIND)
        elif self.kind == SGLANG and config.num_gpu_blocks == UNKNOWN_POOL["num_gpu_blocks"]:
            notes.append(NO_POOL_SIZE)
        if self.estimator is None and self.kind != VLLM:
            notes.append(OTHER_TIMES)
        if self.estimator is not None:
            learnt = self.estimator.parameters()
            notes.append(learnt_times(learnt.error, learnt.num_requests))
        return tuple(notes)
