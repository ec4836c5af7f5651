"""What is learned from the steps of a followed engine: its pace, and how long it takes to load adapters."""

from __future__ import annotations

import time

from predictor.adapter_times import AdapterTimes
from predictor.config import EngineConfig
from predictor.correction import RegionCorrection
from predictor.engine_replica import EngineReplica
from predictor.profile import Profile
from predictor.profile_check import StepCheck
from predictor.step_time import region_of
from services.engine_state.reader import Reader
from services.engine_state.view import CORRUPT, UnreadableError
from services.predictor_server.followed_engine import FollowedEngine
from services.predictor_server.pass_records import RankSteps, RecordedStep

# the properties of a step that its duration depends on
STEP_SUMS = (
    "num_tokens", "num_sampled", "num_decodes", "decode_context", "num_prefills", "prefill_qq", "prefill_qkv",
    "decode_longest",
)  # fmt: skip

ADAPTER_LOADS = ("adapter_loads", "adapter_activations")


class StepCorrections:
    """Compares the steps of an engine with its profile, and corrects forecasts by that.

    A pace that was learned longer than `forget_s` ago is forgotten.
    """

    def __init__(self, reader: Reader, rank_steps: RankSteps, forget_s: float) -> None:
        """Know nothing of the engine yet."""
        self._reader = reader
        self._rank_steps = rank_steps
        self._forget_s = forget_s
        self._check: StepCheck | None = None  # of a configured profile; one that the engine names needs none
        self._correction = RegionCorrection()
        self._corrected_s = 0.0
        self._adapter_times = AdapterTimes()
        self._num_steps = 0  # that have been read

    @property
    def factor(self) -> float:
        """Return how much slower than by the profile all steps are."""
        return self._correction.every.factor

    def restart(self, profile: Profile | None, config: EngineConfig) -> None:
        """Forget an engine that has ended; `profile` is the configured one of the new engine, if there is one."""
        self._num_steps = 0
        self._correction = RegionCorrection()
        self._adapter_times = AdapterTimes(load_s=config.lora_load_s, activate_s=config.lora_activate_s)
        self._check = None if profile is None else StepCheck(profile)

    def observe(self, followed: FollowedEngine) -> None:
        """Compare the steps that have ended with their duration by the profile."""
        num_steps = int(followed.view.state["num_steps"])
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._corrected_s = time.monotonic()
            steps = self._recorded_steps(followed.replica)
            for step in self._rank_steps.slowest(steps):
                self._correction = self._correction.observe(
                    step.region, predicted_s=step.predicted_s, real_s=step.real_s
                )
                if self._check is not None:
                    self._check.observe(predicted_s=step.predicted_s, real_s=step.real_s)
        elif self._check is not None and time.monotonic() - self._corrected_s > self._forget_s:
            self._check.forget()  # as in `forget_old`
        if self._check is not None:
            try:
                self._check.require_close()
            except ValueError as error:
                raise UnreadableError(CORRUPT, str(error)) from None
        followed.replica.engine.set_region_paces(self._correction.every.factor, self._correction.factors)
        if followed.replica.engine.config.max_loras:
            followed.replica.engine.set_adapter_times(self._adapter_times.load_s, self._adapter_times.activate_s)

    def forget_old(self, followed: FollowedEngine, now_s: float) -> bool:
        """Return to the profile's pace after a while, and whether that was now.

        An engine that was slow gets no requests to show that it has recovered.
        """
        if not self._correction.every.ratios or now_s - self._corrected_s <= self._forget_s:
            return False
        self._correction = RegionCorrection()
        followed.replica.engine.set_pace(1.0)
        return True

    def _learn_adapter_times(self, extra_s: float, num_loads: int, num_activations: int) -> None:
        """Learn from a step that loaded adapters; its duration says nothing about the pace of others."""
        self._adapter_times = self._adapter_times.observe(
            num_loads=num_loads, num_activations=num_activations, extra_s=extra_s
        )

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
