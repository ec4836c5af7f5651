"""Whether a latency profile can be that of the engine that it is used for."""

from __future__ import annotations

from collections import deque
from statistics import median

from predictor.config import EngineConfig
from predictor.profile import Profile

WHAT_TO_DO = "measure this engine (block profile measure), or name another --profile"
# A KV cache in half the bytes holds twice the tokens; no other setting makes a model's memory hold so many more.
MOST_TIMES_THE_TOKENS = 2.5
FAR_OFF = 10.0  # times as slow or as fast: no noise, and no neighbour on the machine, does that for long
JUDGED_STEPS = 48


def require_possible(profile: Profile, config: EngineConfig) -> None:
    """Refuse a profile of an engine that cannot be this one; ValueError says what is wrong and what to do."""
    made_for = profile.engine
    if made_for.block_size is not None and made_for.block_size != config.block_size:
        raise ValueError(
            f"profile: {profile.name} is of an engine with blocks of {made_for.block_size} tokens, and this one's have"
            f" {config.block_size}: {WHAT_TO_DO}"
        )
    if made_for.block_size is None or made_for.num_gpu_blocks is None:
        return
    if config.num_gpu_blocks > MOST_TIMES_THE_TOKENS * made_for.num_gpu_blocks:
        raise ValueError(
            f"profile: {profile.name} is of an engine with {made_for.num_gpu_blocks} KV blocks, and where that model"
            f" runs there cannot be {config.num_gpu_blocks}: {WHAT_TO_DO}"
        )


class StepCheck:
    """Compares a profile with the last steps that an engine took."""

    def __init__(self, profile: Profile) -> None:
        """Know no steps yet."""
        self._profile = profile
        self._ratios: deque[float] = deque(maxlen=JUDGED_STEPS)

    def observe(self, *, predicted_s: float, real_s: float) -> None:
        """Take in one step."""
        if predicted_s > 0 and real_s > 0:
            self._ratios.append(real_s / predicted_s)

    def forget(self) -> None:
        """Give the profile another chance."""
        self._ratios.clear()

    def require_close(self) -> None:
        """Refuse the profile where the steps are far off; ValueError says by how much, and what to do."""
        if len(self._ratios) < JUDGED_STEPS:
            return
        usual = median(self._ratios)
        if 1 / FAR_OFF <= usual <= FAR_OFF:
            return
        how = f"{usual:.3g} times as long" if usual > 1 else f"{usual:.2g} of the time"
        raise ValueError(f"profile: steps take {how} as {self._profile.name} says: {WHAT_TO_DO}")
