"""Checks whether a latency profile fits the engine that it is used for."""

from __future__ import annotations

from collections import deque
from statistics import median

from predictor.config import EngineConfig
from predictor.profile import Profile

OTHER_ENGINES = ("sglang", "generic")  # by their local schedulers
WHAT_TO_DO = "measure this engine (block profile measure), or name another --profile"
# An 8-bit KV cache holds twice the tokens; no other setting increases the number of blocks of a model and GPU as much.
MAX_BLOCK_RATIO = 2.5
FAR_OFF = 10.0  # times slower or faster: more than noise, or another load on the machine, causes for long
JUDGED_STEPS = 48


def require_possible(profile: Profile, config: EngineConfig) -> None:
    """Refuse a profile that was made for another kind of engine; ValueError names the difference and the remedy.

    Profiles are made of vLLM: the blocks of other engines have other sizes.
    """
    made_for = profile.engine
    if config.batcher in OTHER_ENGINES:
        return
    if made_for.block_size is not None and made_for.block_size != config.block_size:
        raise ValueError(
            f"profile: {profile.name} is for blocks of {made_for.block_size} tokens, this engine has blocks of"
            f" {config.block_size}: {WHAT_TO_DO}"
        )
    if made_for.block_size is None or made_for.num_gpu_blocks is None:
        return
    if config.num_gpu_blocks > MAX_BLOCK_RATIO * made_for.num_gpu_blocks:
        raise ValueError(
            f"profile: {profile.name} is for an engine with {made_for.num_gpu_blocks} KV blocks, this engine has"
            f" {config.num_gpu_blocks}, which its model and GPU cannot have: {WHAT_TO_DO}"
        )


class StepCheck:
    """Compares a profile with the last steps of an engine."""

    def __init__(self, profile: Profile) -> None:
        """Initialise it without steps."""
        self._profile = profile
        self._ratios: deque[float] = deque(maxlen=JUDGED_STEPS)

    def observe(self, *, predicted_s: float, real_s: float) -> None:
        """Add one step."""
        if predicted_s > 0 and real_s > 0:
            self._ratios.append(real_s / predicted_s)

    def forget(self) -> None:
        """Drop all steps."""
        self._ratios.clear()

    def require_close(self) -> None:
        """Refuse the profile where the steps are far off; ValueError has the ratio and the remedy."""
        if len(self._ratios) < JUDGED_STEPS:
            return
        usual = median(self._ratios)
        if 1 / FAR_OFF <= usual <= FAR_OFF:
            return
        times = f"{usual:.3g}" if usual > 1 else f"{usual:.2g}"
        raise ValueError(f"profile: steps take {times} times as long as in {self._profile.name}: {WHAT_TO_DO}")
