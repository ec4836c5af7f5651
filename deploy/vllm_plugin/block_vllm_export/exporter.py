"""Copies a vLLM scheduler's state into its state file at every step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import numpy as np

from . import layout
from .adapters import AdapterMemory
from .blocks import BlockContents
from .drafts import count_drafts
from .exported_request import ExportedRequest
from .identity import short_hash
from .scheduler_names import names_for
from .settings import require_supported, settings_of
from .transfer_stages import TransferStages
from .vllm_version import chosen_rules
from .writer import Writer
from .xargs import facts_in

SPARE_SLOTS = 64
REASON_OF = {"FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length", "FINISHED_ABORTED": "abort"}
COMPLETED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


@dataclass(slots=True)
class StepInFlight:
    """A step in flight: of each request whether it samples, its draft tokens, its tokens; and the step's sums."""

    output: Any
    start_s: float
    entries: list[tuple[ExportedRequest, int, int, int]]
    sums: tuple[float, ...]
    loads: tuple[int, int] = (0, 0)  # adapters loaded, and brought to GPU slots


class Exporter:
    """Exports a scheduler's requests, queues, blocks and steps; its caller handles all exceptions."""

    def __init__(self, path: str, scheduler: Any) -> None:
        """Create the file of an idle scheduler."""
        require_supported(scheduler)
        settings = settings_of(scheduler)
        self._queues = names_for(chosen_rules().release).queues
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._blocks_of, self._num_cached = managers[0].req_to_blocks, managers[0].num_cached_block
        self._size = settings["engine"]["block_size"]
        has_contents = (
            settings["engine"]["enable_prefix_caching"]
            and len(managers) == 1
            and type(managers[0].kv_cache_spec).__name__ == "FullAttentionSpec"
            and scheduler.hash_block_size == self._size == managers[0].block_size
        )
        num_blocks = int(self._pool.num_gpu_blocks) - 1
        planner = getattr(scheduler, "block_planner", None)
        self._writer = Writer(
            path,
            settings,
            num_slots=settings["engine"]["max_num_seqs"] + SPARE_SLOTS,
            num_blocks=num_blocks if has_contents else 0,
            blocks_per_request=-(-settings["engine"]["max_model_len"] // self._size) if has_contents else 0,
            num_clients=planner.max_clients if planner else 0,
            num_adapters=settings["engine"].get("max_cpu_loras", 0),
        )
        limits = [settings["engine"].get(name, 0) for name in ("max_loras", "max_cpu_loras")]
        self._adapters = AdapterMemory(*limits) if limits[0] else None
        self._writer.state["num_blocks"] = num_blocks
        self._contents = BlockContents(self._pool, self._writer.blocks) if has_contents else None
        self._exported: dict[str, ExportedRequest] = {}
        self._free_slots = list(range(self._writer.num_slots - 1, -1, -1))
        has_connector = getattr(scheduler, "connector", None) is not None
        self._transfers = TransferStages(scheduler, self._writer) if has_connector else None
        self._lease_s = settings["engine"].get("kv_lease_s", 0.0)
        self._held: list[ExportedRequest] = []  # that have ended while their blocks are held, or still written to
        self._serial = self._num_planned = self._num_preemptions = 0
        self._steps: deque[StepInFlight] = deque()
        self._last_end_s = 0.0
        self._busy = False
        try:
            self.publish()
        except Exception:
            self._writer.close()
            raise

    @property
    def failure(self) -> Exception | None:
        """The exception that a wrapped method of the block pool did not raise."""
        return self._contents.failure if self._contents else None

    def planned(self, output: Any, start_s: float) -> None:
        """Publish the state after a step was planned."""
        self._update_slots()
        entries, sums = [], [0, 0, 0, 0, 0, 0, 0, 0]
        drafted = output.scheduled_spec_decode_tokens
        for name, tokens in output.num_scheduled_tokens.items():
            entry = self._exported[name]
            sampled = 0 if entry.request.is_prefill_chunk else 1
            drafts = len(drafted[name]) if name in drafted else 0
            entries.append((entry, sampled, drafts, tokens))
            _add(sums, tokens, sampled, drafts, entry.request.num_computed_tokens - tokens)
        if entries:
            loads = self._adapters.use(_adapters_of(entries)) if self._adapters else (0, 0)
            self._num_planned += 1
            start_s = max(start_s, self._last_end_s) if not self._busy else self._last_end_s
            self._steps.append(StepInFlight(output, start_s, entries, tuple(sums), loads))
            self._note_admissions(entries, start_s)
        self._publish()

    def retired(self, output: Any, results: Any = None) -> None:
        """Record that a step's outputs were processed; the next planned step publishes it, or this call without one.

        `results` are those that the worker returned for the step.
        """
        now_s = time.monotonic()
        if self._transfers:
            self._transfers.note_fetched(results, now_s)
        while any(step.output is output for step in self._steps):
            step = self._steps.popleft()
            if step.output is not output:
                continue  # a dropped step: its outputs never arrive
            start_s = max(step.start_s, self._last_end_s)
            self._last_end_s = now_s
            done = int(self._writer.state["num_steps"][0])
            self._writer.add_step((done, start_s, now_s - start_s, *step.sums), step.loads)
            if self._scheduler.num_spec_tokens:
                count_drafts(self._writer.state, step.entries, output, results)
            for entry, sampled, *_ in step.entries:
                if sampled and entry.first_token_s < 0 and entry.request.num_output_tokens > 0:
                    entry.first_token_s = now_s
                    state = self._writer.state
                    state["prefix_queries"] += entry.request.num_prompt_tokens
                    state["prefix_hits"] += entry.hit_tokens
        self._update_slots()
        self._busy = bool(self._scheduler.running)
        if not self._scheduler.has_unfinished_requests():
            self._publish()

    def publish(self) -> None:
        """Publish the current state."""
        self._update_slots()
        self._publish()

    def close(self) -> None:
        """Remove the file."""
        self._writer.close()

    def _update_slots(self) -> None:
        """Give new requests a slot, and free the slots of those that have ended."""
        requests = self._scheduler.requests
        for name in [name for name, entry in self._exported.items() if requests.get(name) is not entry.request]:
            self._release_slot(self._exported.pop(name))
        if self._transfers:
            self._update_held()
        for name, request in requests.items():
            if name not in self._exported and not request.is_finished():
                self._exported[name] = self._take_slot(request)

    def _update_held(self) -> None:
        """Note requests that have ended while their blocks are not free yet: the scheduler keeps them until then."""
        now_s = time.monotonic()
        for entry in self._exported.values():
            if entry.held_until_s < 0 and entry.request.is_finished():
                is_held = entry.request.status.name in COMPLETED  # otherwise its blocks are still written to
                entry.held_until_s = now_s + self._lease_s if is_held else now_s
                entry.stage = layout.BLOCKS_HELD if is_held else layout.FETCHING
                self._add_outcome(entry)
                self._held.append(entry)

    def _take_slot(self, request: Any) -> ExportedRequest:
        if not self._free_slots:
            num_slots = self._writer.num_slots
            self._writer.grow(2 * num_slots)
            self._free_slots = list(range(2 * num_slots - 1, num_slots - 1, -1))
        self._serial += 1
        now_s = time.monotonic()
        arrival_s = now_s - max(0.0, time.time() - request.arrival_time)
        entry = ExportedRequest(request, self._free_slots.pop(), self._serial, arrival_s)
        facts, _ = facts_in(getattr(request.sampling_params, "extra_args", None) or {})
        prompt_tokens = int(request.num_prompt_tokens)
        self._writer.put_request(
            entry.slot,
            serial=entry.serial,
            request_id=request.request_id,
            arrival_s=max(0.0, entry.arrival_s),
            prompt_tokens=prompt_tokens,
            max_tokens=min(int(request.max_tokens), self._scheduler.max_model_len - prompt_tokens),
            min_tokens=int(getattr(request.sampling_params, "min_tokens", 0) or 0),
            priority=int(request.priority),
            leg=self._transfers.leg(request) if self._transfers else layout.SERVE,
            adapter=_adapter_of(request),
            **facts,
        )
        return entry

    def _release_slot(self, entry: ExportedRequest) -> None:
        self._writer.free_slot(entry.slot)
        self._free_slots.append(entry.slot)
        self._num_preemptions += entry.request.num_preemptions
        if entry.held_until_s >= 0:
            self._held.remove(entry)
        else:
            self._add_outcome(entry)

    def _add_outcome(self, entry: ExportedRequest) -> None:
        request = entry.request
        self._writer.add_outcome(
            serial=entry.serial,
            request_id=request.request_id,
            arrival_s=max(0.0, entry.arrival_s),
            scheduled_s=entry.scheduled_s,
            first_token_s=entry.first_token_s,
            finished_s=time.monotonic(),
            prompt_tokens=int(request.num_prompt_tokens),
            output_tokens=int(request.num_output_tokens),
            hit_tokens=entry.hit_tokens,
            num_preemptions=int(request.num_preemptions),
            reason=REASON_OF.get(request.status.name, "error"),
        )

    def _note_admissions(self, entries: Iterable[tuple[ExportedRequest, int, int, int]], start_s: float) -> None:
        for entry, *_, tokens in entries:
            if entry.runs:
                continue
            entry.runs = True
            entry.prefill_tokens = entry.request.num_tokens
            if entry.scheduled_s < 0:
                entry.scheduled_s = start_s
                if entry.fetch_started_s < 0:
                    entry.hit_tokens = max(0, entry.request.num_computed_tokens - tokens)

    def _publish(self) -> None:
        writer, scheduler = self._writer, self._scheduler
        exported = self._exported
        running = [exported[one.request_id] for one in scheduler.running]
        in_order, with_blocks = self._queues(scheduler)
        queue = [exported[one.request_id] for one in in_order]
        holding = [exported[one.request_id] for one in with_blocks]
        slots = {entry.slot for entry in holding}
        waiting = [entry for entry in queue if entry.slot not in slots] if slots else queue
        if self._transfers:
            self._transfers.update(running, holding, waiting)
        rows, size, write = memoryview(writer.live.view(np.uint8)), layout.LIVE.itemsize, layout.LIVE_ROW.pack_into
        for group, runs, holds in (
            (running, True, True), (holding, False, True), (waiting, False, False), (self._held, True, True),
        ):  # fmt: skip
            for entry in group:
                row = self._row(entry, runs, holds)
                if row != entry.row:
                    entry.row = row
                    write(rows, entry.slot * size, *row)
        writer.running[: len(running)] = [entry.slot for entry in running]
        writer.waiting[: len(queue)] = [entry.slot for entry in queue]
        writer.held[: len(self._held)] = [entry.slot for entry in self._held]
        state = writer.state
        state["num_running"], state["num_waiting"], state["num_held"] = len(running), len(queue), len(self._held)
        state["num_free_blocks"] = self._pool.get_num_free_blocks()
        state["num_planned"] = self._num_planned
        state["num_preemptions"] = self._num_preemptions + sum(
            [entry.request.num_preemptions for entry in exported.values()]
        )
        if self._adapters is not None:
            state["num_adapters"] = self._adapters.write(writer.adapters)
        self._write_steps()
        self._write_memory()
        if self._contents is None:
            writer.publish()
        else:
            self._contents.refresh()
            writer.publish(self._contents.take_changed())

    def _write_steps(self) -> None:
        state, batch = self._writer.state, self._writer.batch
        state["num_in_flight"] = len(self._steps)
        for ahead, step in enumerate(self._steps):
            state["start_s"][0, ahead] = step.start_s
            rows = [(entry.slot, *part) for entry, *part in step.entries if self._is_live(entry)]
            state["num_scheduled"][0, ahead] = len(rows)
            batch[ahead, : len(rows)] = np.frombuffer(
                b"".join(starmap(layout.SCHEDULED_ROW.pack, rows)), layout.SCHEDULED
            )

    def _write_memory(self) -> None:
        """Write what the scheduler's batching rule remembers, where it has one."""
        planner = getattr(self._scheduler, "block_planner", None)
        if planner is None:
            return
        state, clients = self._writer.state, planner.clients
        state["memory"] = planner.memory
        state["num_clients"] = len(clients)
        if len(clients):
            for name in layout.CLIENT.names or ():
                self._writer.clients[name][: len(clients)] = clients[name]

    def _is_live(self, entry: ExportedRequest) -> bool:
        return self._exported.get(entry.request.request_id) is entry and entry.held_until_s < 0

    def _row(self, entry: ExportedRequest, runs: bool, holds: bool) -> tuple[Any, ...]:
        """Return a request's row of `live`; new blocks and hashes are written too."""
        request = entry.request
        if not runs:
            entry.runs = False
        if not holds:
            entry.num_tabled = 0
        held = self._blocks_of.get(request.request_id, ()) if holds else ()
        # of the former blocks of a request that holds none, what is left is found by its hashes
        full = min(self._num_cached.get(request.request_id, 0), len(held))
        has_new_blocks = len(held) > entry.num_tabled or len(request.block_hashes) > entry.num_hashes
        if self._contents is not None and has_new_blocks:
            self._put_blocks(entry, held)
        return (
            entry.serial, request.num_output_tokens, request.num_computed_tokens, request.num_output_placeholders,
            request.num_in_flight_tokens, request.num_stale_output_tokens, len(held), full, entry.num_hashes,
            request.num_preemptions, entry.hit_tokens, entry.prefill_tokens, entry.stage,
            len(request.spec_token_ids), 0, entry.scheduled_s, entry.first_token_s, entry.fetch_started_s,
            entry.fetch_ended_s, entry.held_until_s,
        )  # fmt: skip

    def _put_blocks(self, entry: ExportedRequest, held: Any) -> None:
        hashes = entry.request.block_hashes
        if len(hashes) > entry.num_hashes:
            new = np.array([short_hash(one) for one in hashes[entry.num_hashes :]], layout.HASH)
            self._writer.put_hashes(entry.slot, new, entry.num_hashes)
            entry.num_hashes = len(hashes)
        if len(held) > entry.num_tabled:
            ids = np.array([block.block_id - 1 for block in held[entry.num_tabled :]], layout.TABLE_ENTRY)
            self._writer.put_blocks(entry.slot, ids, entry.num_tabled)
            entry.num_tabled = len(held)


def _adapter_of(request: Any) -> str:
    """Return the name of a request's LoRA adapter; empty for the base model."""
    lora = getattr(request, "lora_request", None)
    return "" if lora is None else str(lora.lora_name)


def _adapters_of(entries: Iterable[tuple[ExportedRequest, int, int, int]]) -> list[str]:
    """Return the adapters of a step's requests, each once, in the order of the step."""
    return [name for name in dict.fromkeys(_adapter_of(entry.request) for entry, *_ in entries) if name]


def _add(sums: list[int], tokens: int, sampled: int, drafts: int, before: int) -> None:
    """Count one request's part in a step: in the order of `layout.STEP`, from `num_tokens` on."""
    sums[0] += tokens
    sums[1] += sampled
    if tokens == 1 + drafts:
        sums[2] += 1
        sums[4] += before + tokens
        sums[5] = max(sums[5], before + tokens)
    else:
        sums[3] += 1
        sums[6] += tokens * tokens
        sums[7] += tokens * before
