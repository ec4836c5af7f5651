"""KV blocks that an emulated engine fetches from others and holds for them, followed in its engine model."""

from __future__ import annotations

import math
from collections.abc import Callable

from predictor.engine import Engine
from predictor.remote_kv import is_under_way
from predictor.state import FETCHING, FINISHED, TO_FETCH
from services.emulator.clock import EngineClock
from services.emulator.errors import not_fetched
from services.emulator.exporter import EngineStateExporter
from services.emulator.job_table import JobTable
from services.emulator.jobs import Job
from services.emulator.kv_transfers import EmulatedConnector, Fetch
from services.emulator.metrics import ERROR, EngineMetrics
from services.emulator.state_arrays import StateArrays


class TransferProgress:
    """Passes what happens to fetches and leases between a connector and an engine model."""

    def __init__(  # noqa: PLR0913 - these are its parts
        self,
        engine: Engine,
        arrays: StateArrays,
        clock: EngineClock,
        connector: EmulatedConnector,
        *,
        jobs: JobTable,
        metrics: EngineMetrics,
        exporter: EngineStateExporter | None,
        wake: Callable[[], None],
    ) -> None:
        """Follow a connector; `wake` has the engine updated."""
        self._engine = engine
        self._arrays = arrays
        self._clock = clock
        self._connector = connector
        self._jobs = jobs
        self._metrics = metrics
        self._exporter = exporter
        self._wake = wake
        connector.leases.on_extended, connector.leases.on_released = self._extend_lease, self._release_held
        connector.fetches.on_lost = lambda _: wake()

    def follow(self) -> None:
        """Note fetches that have started, ended or failed."""
        rows, fetches = self._arrays.rows, self._connector.fetches
        for request_id, fetch in fetches.all():
            slot = self._engine.slots[request_id]
            stage, has_ended = int(rows["stage"][slot]), bool(rows["status"][slot] == FINISHED)
            if stage == FETCHING and fetch.started_s is None:
                fetch.started_s = self._arrays.now_s
                if self._arrays.num_in_flight > 1:  # it starts with the younger step
                    fetch.started_s = max(fetch.started_s, self._arrays.end_of_oldest_s)
            if fetch.is_lost and (stage == FETCHING or (stage == TO_FETCH and not self._connector.recomputes)):
                self._fail_fetch(self._jobs.by_slot[slot])
                fetches.fail(request_id)
            elif self._fetch_end_s(request_id, fetch) <= self._clock.now_s():
                fetches.discard(fetch)  # the engine knows it with its next step
            elif not is_under_way(stage) and (stage != TO_FETCH or has_ended):
                self._measure(slot, fetch.started_s)
                fetches.end(request_id)

    def _measure(self, slot: int, started_s: float | None) -> None:
        """Measure a fetch that has ended; its start is not known where it was not followed before its end."""
        rows, config = self._arrays.rows, self._engine.config
        ended_s = float(rows["transfer_s"][slot])
        if math.isnan(ended_s):  # all blocks were cached, or the request ended before
            return
        num_tokens = int(rows["prompt_tokens"][slot] - rows["hit_tokens"][slot])
        num_blocks = -(-num_tokens // config.block_size)
        seconds = config.transfer_s(num_tokens, num_blocks) if started_s is None else max(0.0, ended_s - started_s)
        self._metrics.fetched(seconds / self._clock.speed, num_tokens * config.kv_bytes_per_token, num_blocks)
        if self._exporter is not None:
            self._exporter.fetched()

    def next_end_s(self) -> float:
        """Return when the next fetch ends that the other engine does not know yet; infinity without one."""
        ends_s = (self._fetch_end_s(name, fetch) for name, fetch in self._connector.fetches.all())
        return min(ends_s, default=math.inf)

    def hold(self, job: Job) -> None:
        """Hold the blocks of a finished prefill, and say in its reply where they are."""
        job.kv_transfer_params = self._connector.reply_params(
            job.engine_id,
            block_ids=self._block_ids(job.slot),
            num_tokens=int(self._arrays.rows["computed_tokens"][job.slot]),
            cached_tokens=job.cached_tokens,
        )

    def _fetch_end_s(self, request_id: str, fetch: Fetch) -> float:
        """Return when a fetch under way ends; infinity where the other engine knows it already."""
        if fetch.is_freed or not self._engine.is_fetching(request_id):
            return math.inf
        end_s = self._engine.fetch_end_s(request_id)
        return math.inf if end_s is None else end_s

    def _fail_fetch(self, job: Job) -> None:
        """End the fetch of a request whose blocks are lost: it fails, or computes its prompt here."""
        self._engine.end_fetch(job.engine_id, ok=False, at_s=self._clock.now_s())
        self._wake()  # it may be scheduled now, or others in its place
        if self._connector.recomputes or job.is_over:
            return
        self._engine.abort(job.engine_id)
        job.is_over, job.failure = True, not_fetched()
        job.changed.set()
        self._jobs.end(job, ERROR)

    def _extend_lease(self, request_id: str) -> None:
        """Hold blocks for longer, as the other engine still needs them."""
        until_s = self._clock.now_s() + self._connector.extension_s * self._clock.speed
        self._engine.hold_until(
            request_id, max(until_s, float(self._arrays.rows["transfer_s"][self._engine.slots[request_id]]))
        )

    def _release_held(self, request_id: str) -> None:
        """Free blocks that the other engine has fetched."""
        self._engine.release_held(request_id, at_s=self._clock.now_s())
        self._wake()

    def _block_ids(self, slot: int) -> list[int]:
        """Return the blocks of a request, as vLLM numbers them: its null block is 0."""
        num_blocks = int(self._arrays.rows["num_blocks"][slot])
        if not self._engine.tracks_blocks:
            return list(range(1, num_blocks + 1))
        return [block + 1 for block in self._engine.state.tables[slot, :num_blocks].tolist()]
