"""What an engine model has done: one request's times, and one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a request has experienced; the times of events that have not happened are None."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_hit_tokens: int
    num_preemptions: int
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float | None
    tokens_on_time: int | None = None  # None where no token has a deadline

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Time from arrival to the last token."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.finished_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One planned step: the engine's queues and blocks just after planning it."""

    step: int
    start_s: float
    end_s: float
    scheduled: dict[str, int]
    running: list[str]
    waiting: list[str]
    free_blocks: int
    preempted: list[str]


def happened(time_s: float) -> float | None:
    """Return a time of the engine model, or None for what has not happened."""
    return None if time_s < 0 else float(time_s)
