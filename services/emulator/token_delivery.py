"""The tokens of an emulated engine: handed out to their requests when the steps that make them end."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from predictor.state import FINISHED
from services.emulator.exporter import EngineStateExporter
from services.emulator.jobs import Job
from services.emulator.metrics import EngineMetrics
from services.emulator.speculation import DraftDraws
from services.emulator.state_arrays import StateArrays


class TokenDelivery:
    """Hands out tokens, and measures when they come."""

    def __init__(
        self,
        arrays: StateArrays,
        jobs: Mapping[int, Job],
        metrics: EngineMetrics,
        *,
        draws: DraftDraws | None,
        exporter: EngineStateExporter | None,
    ) -> None:
        """Deliver to jobs by slot."""
        self._arrays = arrays
        self._jobs = jobs
        self._metrics = metrics
        self._draws = draws
        self._exporter = exporter
        self._seen = np.zeros(len(arrays.rows), np.int64)  # tokens that were handed out, by slot
        self._last_s = np.zeros(len(arrays.rows))  # when the last of them were

    def start(self, slot: int) -> None:
        """Expect the first tokens of a new request."""
        grown = len(self._arrays.rows) - len(self._seen)
        if grown:
            self._seen = np.concatenate((self._seen, np.zeros(grown, np.int64)))
            self._last_s = np.concatenate((self._last_s, np.zeros(grown)))
        self._seen[slot] = 0

    def deliver(self) -> list[Job]:
        """Hand out the tokens that are ready since the last call; return the requests that have finished."""
        rows, seen = self._arrays.rows, self._seen
        changed = np.flatnonzero(rows["output_tokens"] != seen)
        if not len(changed):
            return []
        now_s = self._arrays.now_s
        if self._draws is not None:
            self._metrics.generated(int((rows["output_tokens"][changed] - seen[changed]).sum()))
        for slot, num_ready in zip(changed.tolist(), rows["output_tokens"][changed].tolist(), strict=True):
            self._jobs[slot].set_ready(num_ready)
        first = changed[seen[changed] == 0]
        if len(first):
            self._note_first(first)
        later = changed[seen[changed] > 0]
        self._metrics.more_tokens(now_s - self._last_s[later])
        self._last_s[changed] = now_s
        seen[changed] = rows["output_tokens"][changed]
        return [self._jobs[slot] for slot in changed[rows["status"][changed] == FINISHED].tolist()]

    def _note_first(self, slots: np.ndarray) -> None:
        rows = self._arrays.rows[slots]
        arrived_s = np.array([self._jobs[slot].arrived_s for slot in slots.tolist()])
        num_fetched_tokens = 0
        for slot, num_hits, num_prompt in zip(
            slots.tolist(), rows["hit_tokens"].tolist(), rows["prompt_tokens"].tolist(), strict=True
        ):
            job = self._jobs[slot]
            job.cached_tokens = num_hits
            if (remote := job.request.remote) is not None:
                job.cached_tokens = num_prompt if remote.cached_tokens is None else remote.cached_tokens
                num_fetched_tokens += num_prompt - num_hits
        num_prompt_tokens, num_hit_tokens = int(rows["prompt_tokens"].sum()), int(rows["hit_tokens"].sum())
        self._metrics.first_tokens(
            rows["first_token_s"] - arrived_s, num_prompt_tokens, num_hit_tokens, num_fetched_tokens
        )
        if self._exporter is not None:
            self._exporter.started(num_prompt_tokens, num_hit_tokens)
