"""The data-parallel ranks of an engine, and the rules by which those of a model with experts step together; values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from predictor.config import require_count

MAX_RANKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepRules:
    """After which steps the ranks compare whether any has requests: the first of a wave, and every `sync_interval`th.

    vLLM 0.30 and later: --dp-sync-interval, and the first step. 0.28 and 0.29: every 32nd step, and not the first.
    """

    sync_interval: int = 16
    syncs_first_step: bool = True

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        require_count("sync_interval", self.sync_interval)
        if self.syncs_first_step not in (True, False):
            raise ValueError(f"syncs_first_step: must be true or false, not {self.syncs_first_step!r}")

    def compares_after(self, step_counter: int) -> bool:
        """Return whether the ranks compare after a step of a wave; steps count from 1."""
        return step_counter % self.sync_interval == 0 or (self.syncs_first_step and step_counter == 1)


DEFAULT_RULES = LockstepRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelRank:
    """Which rank of an engine a state file, an emulated engine or an engine model is.

    `group` names the engine: ranks with the same one belong together. `lockstep` are the rules of ranks that step
    together; None where each steps for itself.
    """

    rank: int
    size: int
    group: str = ""
    lockstep: LockstepRules | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        require_count("data_parallel_size", self.size)
        if self.size > MAX_RANKS:
            raise ValueError(f"data_parallel_size: must be at most {MAX_RANKS}, not {self.size}")
        require_count("data_parallel_rank", self.rank, at_least=0)
        if self.rank >= self.size:
            raise ValueError(f"data_parallel_rank: must be below data_parallel_size {self.size}, not {self.rank}")

    def table(self) -> dict[str, Any]:
        """Write it as a state file has it."""
        table: dict[str, Any] = {"rank": self.rank, "size": self.size, "group": self.group}
        if self.lockstep is not None:
            table["sync_interval"] = self.lockstep.sync_interval
            table["syncs_first_step"] = self.lockstep.syncs_first_step
        return table

    @classmethod
    def from_table(cls, table: Any) -> DataParallelRank:
        """Read what a state file has; ValueError names the field."""
        if not isinstance(table, dict) or not {"rank", "size"} <= table.keys():
            raise ValueError(f"data_parallel: must be an object with rank and size, not {table!r:.40}")
        lockstep = None
        if "sync_interval" in table:
            lockstep = LockstepRules(
                sync_interval=table["sync_interval"], syncs_first_step=table.get("syncs_first_step", True)
            )
        return cls(rank=table["rank"], size=table["size"], group=str(table.get("group", "")), lockstep=lockstep)
