"""A vLLM scheduler's state, copied into its state file at every step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, starmap
from typing import Any

import numpy as np

from . import layout
from .blocks import BlockContents, short_hash
from .settings import require_supported, settings_of
from .writer import NEVER, UNKNOWN, Writer
from .xargs import facts_in

SPARE_SLOTS = 64
REASON_OF = {"FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length", "FINISHED_ABORTED": "abort"}


@dataclass(slots=True)
class Seat:
    """A request in its slot, and what the file has of it."""

    request: Any
    slot: int
    serial: int
    arrival_s: float
    runs: bool = False
    scheduled_s: float = NEVER
    first_token_s: float = NEVER
    hit_tokens: int = 0
    prefill_tokens: int = UNKNOWN
    num_hashes: int = 0
    num_tabled: int = 0
    row: tuple[Any, ...] = field(default=())


@dataclass(slots=True)
class Step:
    """A step under way: who has how many tokens in it, who gets one from it, and what its time depends on."""

    output: Any
    start_s: float
    entries: list[tuple[Seat, int, int]]
    sums: tuple[float, ...]


class Exporter:
    """Shows a scheduler's requests, queues, blocks and steps; any error is its caller's to bear."""

    def __init__(self, path: str, scheduler: Any) -> None:
        """Put the file of an idle scheduler in place."""
        require_supported(scheduler)
        settings = settings_of(scheduler)
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._blocks_of, self._num_cached = managers[0].req_to_blocks, managers[0].num_cached_block
        self._size = settings["engine"]["block_size"]
        tells_contents = (
            settings["engine"]["enable_prefix_caching"]
            and len(managers) == 1
            and type(managers[0].kv_cache_spec).__name__ == "FullAttentionSpec"
            and scheduler.hash_block_size == self._size == managers[0].block_size
        )
        num_blocks = int(self._pool.num_gpu_blocks) - 1
        self._writer = Writer(
            path,
            settings,
            num_slots=settings["engine"]["max_num_seqs"] + SPARE_SLOTS,
            num_blocks=num_blocks if tells_contents else 0,
            blocks_per_request=-(-settings["engine"]["max_model_len"] // self._size) if tells_contents else 0,
        )
        self._writer.state["num_blocks"] = num_blocks
        self._contents = BlockContents(self._pool, self._writer.blocks) if tells_contents else None
        self._seats: dict[str, Seat] = {}
        self._free_slots = list(range(self._writer.num_slots - 1, -1, -1))
        self._serial = self._num_planned = self._num_preemptions = 0
        self._steps: deque[Step] = deque()
        self._last_end_s = 0.0
        self._busy = False
        self.publish()

    @property
    def failure(self) -> Exception | None:
        """What went wrong where it could not be raised."""
        return self._contents.failure if self._contents else None

    def planned(self, output: Any, start_s: float) -> None:
        """Show the state after a step was planned."""
        self._follow()
        entries, sums = [], [0, 0, 0, 0, 0, 0, 0, 0]
        for name, tokens in output.num_scheduled_tokens.items():
            seat = self._seats[name]
            sampled = 0 if seat.request.is_prefill_chunk else 1
            entries.append((seat, sampled, tokens))
            _add(sums, tokens, sampled, seat.request.num_computed_tokens - tokens)
        if entries:
            self._num_planned += 1
            start_s = max(start_s, self._last_end_s) if not self._busy else self._last_end_s
            self._steps.append(Step(output, start_s, entries, tuple(sums)))
            self._note_admissions(entries, start_s)
        self._publish()

    def taken(self, output: Any) -> None:
        """Note that a step's outputs were taken; it is shown with the step that is planned next, at once if any is."""
        now_s = time.monotonic()
        while any(step.output is output for step in self._steps):
            step = self._steps.popleft()
            if step.output is not output:
                continue  # it was given up: its outputs will not come any more
            start_s = max(step.start_s, self._last_end_s)
            self._last_end_s = now_s
            done = int(self._writer.state["num_steps"][0])
            self._writer.add_step((done, start_s, now_s - start_s, *step.sums))
            for seat, sampled, _ in step.entries:
                if sampled and seat.first_token_s < 0 and seat.request.num_output_tokens > 0:
                    seat.first_token_s = now_s
                    state = self._writer.state
                    state["prefix_queries"] += seat.request.num_prompt_tokens
                    state["prefix_hits"] += seat.hit_tokens
        self._follow()
        self._busy = bool(self._scheduler.running)
        if not self._scheduler.has_unfinished_requests():
            self._publish()

    def publish(self) -> None:
        """Show the state as it is."""
        self._follow()
        self._publish()

    def close(self) -> None:
        """Take the file away."""
        self._writer.close()

    def _follow(self) -> None:
        """Give new requests a slot, and let go of those that are gone."""
        requests = self._scheduler.requests
        for name in [name for name, seat in self._seats.items() if requests.get(name) is not seat.request]:
            self._leave(self._seats.pop(name))
        for name, request in requests.items():
            if name not in self._seats and not request.is_finished():
                self._seats[name] = self._enter(request)

    def _enter(self, request: Any) -> Seat:
        if not self._free_slots:
            num_slots = self._writer.num_slots
            self._writer.grow(2 * num_slots)
            self._free_slots = list(range(2 * num_slots - 1, num_slots - 1, -1))
        self._serial += 1
        now_s = time.monotonic()
        seat = Seat(request, self._free_slots.pop(), self._serial, now_s - max(0.0, time.time() - request.arrival_time))
        facts, _ = facts_in(getattr(request.sampling_params, "extra_args", None) or {})
        prompt_tokens = int(request.num_prompt_tokens)
        self._writer.put_request(
            seat.slot,
            serial=seat.serial,
            request_id=request.request_id,
            arrival_s=max(0.0, seat.arrival_s),
            prompt_tokens=prompt_tokens,
            max_tokens=min(int(request.max_tokens), self._scheduler.max_model_len - prompt_tokens),
            min_tokens=int(getattr(request.sampling_params, "min_tokens", 0) or 0),
            priority=int(request.priority),
            **facts,
        )
        return seat

    def _leave(self, seat: Seat) -> None:
        request = seat.request
        self._writer.free_slot(seat.slot)
        self._free_slots.append(seat.slot)
        self._num_preemptions += request.num_preemptions
        self._writer.add_outcome(
            serial=seat.serial,
            request_id=request.request_id,
            arrival_s=max(0.0, seat.arrival_s),
            scheduled_s=seat.scheduled_s,
            first_token_s=seat.first_token_s,
            finished_s=time.monotonic(),
            prompt_tokens=int(request.num_prompt_tokens),
            output_tokens=int(request.num_output_tokens),
            hit_tokens=seat.hit_tokens,
            num_preemptions=int(request.num_preemptions),
            reason=REASON_OF.get(request.status.name, "error"),
        )

    def _note_admissions(self, entries: Iterable[tuple[Seat, int, int]], start_s: float) -> None:
        for seat, _, tokens in entries:
            if seat.runs:
                continue
            seat.runs = True
            seat.prefill_tokens = seat.request.num_tokens
            if seat.scheduled_s < 0:
                seat.scheduled_s = start_s
                seat.hit_tokens = max(0, seat.request.num_computed_tokens - tokens)

    def _publish(self) -> None:
        writer, scheduler = self._writer, self._scheduler
        seats = self._seats
        running = [seats[one.request_id] for one in scheduler.running]
        # vLLM lets those that hold blocks go first; a priority queue iterates in the order in which it would be popped
        queues = chain(getattr(scheduler, "kv_holding_waiting", ()), scheduler.waiting)
        waiting = [seats[one.request_id] for one in queues]
        rows, size, write = memoryview(writer.live.view(np.uint8)), layout.LIVE.itemsize, layout.LIVE_ROW.pack_into
        for group, runs in ((running, True), (waiting, False)):
            for seat in group:
                row = self._row(seat, runs)
                if row != seat.row:
                    seat.row = row
                    write(rows, seat.slot * size, *row)
        writer.running[: len(running)] = [seat.slot for seat in running]
        writer.waiting[: len(waiting)] = [seat.slot for seat in waiting]
        state = writer.state
        state["num_running"], state["num_waiting"] = len(running), len(waiting)
        state["num_free_blocks"] = self._pool.get_num_free_blocks()
        state["num_planned"] = self._num_planned
        state["num_preemptions"] = self._num_preemptions + sum(
            [seat.request.num_preemptions for seat in seats.values()]
        )
        self._show_steps()
        if self._contents is None:
            writer.publish()
        else:
            self._contents.refresh()
            writer.publish(self._contents.taken())

    def _show_steps(self) -> None:
        state, batch = self._writer.state, self._writer.batch
        state["num_in_flight"] = len(self._steps)
        for place, step in enumerate(self._steps):
            state["start_s"][0, place] = step.start_s
            here = [(seat.slot, sampled, tokens) for seat, sampled, tokens in step.entries if self._is_seated(seat)]
            state["num_scheduled"][0, place] = len(here)
            batch[place, : len(here)] = np.frombuffer(
                b"".join(starmap(layout.SCHEDULED_ROW.pack, here)), layout.SCHEDULED
            )

    def _is_seated(self, seat: Seat) -> bool:
        return self._seats.get(seat.request.request_id) is seat

    def _row(self, seat: Seat, runs: bool) -> tuple[Any, ...]:
        """What is shown of a request; what is new of its blocks is put into the file on the way."""
        request = seat.request
        if not runs:
            seat.runs, seat.num_tabled = False, 0
        held = self._blocks_of.get(request.request_id, ()) if runs else ()
        # of a waiting request's blocks none is promised: what is left of them is found again by its hash
        full = min(self._num_cached.get(request.request_id, 0), len(held))
        if self._contents is not None and (len(held) > seat.num_tabled or len(request.block_hashes) > seat.num_hashes):
            self._put_blocks(seat, held)
        return (
            seat.serial, request.num_output_tokens, request.num_computed_tokens, request.num_output_placeholders,
            request.num_in_flight_tokens, request.num_stale_output_tokens, len(held), full, seat.num_hashes,
            request.num_preemptions, seat.hit_tokens, seat.prefill_tokens, 0, seat.scheduled_s, seat.first_token_s,
        )  # fmt: skip

    def _put_blocks(self, seat: Seat, held: Any) -> None:
        hashes = seat.request.block_hashes
        if len(hashes) > seat.num_hashes:
            new = np.array([short_hash(one) for one in hashes[seat.num_hashes :]], layout.HASH)
            self._writer.put_hashes(seat.slot, new, seat.num_hashes)
            seat.num_hashes = len(hashes)
        if len(held) > seat.num_tabled:
            ids = np.array([block.block_id - 1 for block in held[seat.num_tabled :]], layout.TABLE_ENTRY)
            self._writer.put_blocks(seat.slot, ids, seat.num_tabled)
            seat.num_tabled = len(held)


def _add(sums: list[int], tokens: int, sampled: int, before: int) -> None:
    """Count one request's part in a step: in the order of `layout.STEP`, from `num_tokens` on."""
    sums[0] += tokens
    sums[1] += sampled
    if tokens == 1:
        sums[2] += 1
        sums[4] += before + 1
        sums[5] = max(sums[5], before + 1)
    else:
        sums[3] += 1
        sums[6] += tokens * tokens
        sums[7] += tokens * before
