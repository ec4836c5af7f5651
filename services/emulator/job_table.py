"""The requests in an emulated engine, from their slots to their removal."""

from __future__ import annotations

from dataclasses import replace

from predictor.engine import Engine
from services.emulator.exporter import EngineStateExporter
from services.emulator.jobs import Job
from services.emulator.kv_transfers import Leases
from services.emulator.metrics import EngineMetrics
from services.emulator.state_arrays import StateArrays


class JobTable:
    """All jobs by slot; those that have ended leave once no step contains them, and no other engine needs their blocks.

    `leases` are those of an engine that holds blocks for others.
    """

    def __init__(
        self,
        engine: Engine,
        arrays: StateArrays,
        metrics: EngineMetrics,
        *,
        exporter: EngineStateExporter | None,
        leases: Leases | None,
    ) -> None:
        """Start without jobs."""
        self.by_slot: dict[int, Job] = {}
        self._engine = engine
        self._arrays = arrays
        self._metrics = metrics
        self._exporter = exporter
        self._leases = leases
        self._ending: list[tuple[Job, str]] = []  # removed once no step under way contains them
        self._held: list[Job] = []  # finished prefills whose blocks are held

    def __len__(self) -> int:
        """Return the number of requests that have not ended; another thread may ask while some are removed."""
        return len(self.by_slot) - sum(job.slot in self.by_slot for job, _ in self._ending)

    def end(self, job: Job, reason: str) -> None:
        """Note that a request has ended, and why."""
        self._ending.append((job, reason))

    def remove_released(self) -> None:
        """Remove requests whose blocks are held no more."""
        for job in [one for one in self._held if not self._engine.is_held(one.engine_id)]:
            self._held.remove(job)
            self._remove(job)

    def remove_ended(self) -> None:
        """Remove requests that have ended, once no step under way contains them."""
        if not self._ending:
            return
        still = []
        for job, reason in self._ending:
            if (
                self._arrays.rows["in_flight_tokens"][job.slot] > 0
                or self._engine.fetch_end_s(job.engine_id) is not None
            ):
                still.append((job, reason))
                continue
            facts = self._engine.request_in(job.slot)
            outcome = replace(self._engine.outcome(job.engine_id), arrival_s=job.arrived_s)
            del self.by_slot[job.slot]
            self._metrics.ended(facts, outcome, reason, job.request.max_tokens)
            if self._exporter is not None:
                self._exporter.ended(job, outcome, reason)
            if self._engine.is_held(job.engine_id):
                self._held.append(job)
            else:
                self._remove(job)
        self._ending = still

    def _remove(self, job: Job) -> None:
        """Free the slot of a request that has ended, and whose blocks are free."""
        if self._leases is not None and job.engine_id in self._leases:
            self._leases.expire(job.engine_id)  # or the other engine would have ended it
        self._engine.remove(job.engine_id)
        if self._exporter is not None:
            self._exporter.removed(job)
