"""One simulated engine, used from Python: requests enter by id, the clock advances, outcomes come back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from predictor import adapters, blocks, loop, queues, remote_kv, steps
from predictor.batching import batcher_named, is_compiled, number_of, settled
from predictor.compiled import direct
from predictor.config import FETCHING_ROLES, HOLDING_ROLES, EngineConfig
from predictor.encoder_inputs import ABSENT
from predictor.lengths import DEFAULT_RESIDUAL
from predictor.loop import ANY_NUMBER, FOREVER
from predictor.outcome import Outcome, StepRecord, happened
from predictor.request import (
    DECODE,
    LEGS,
    NO_ADAPTER,
    NO_TENANT,
    PREFILL,
    REAL_TIME,
    EncoderInput,
    RequestFacts,
    adapter_number,
    identity_number,
    tenant_number,
)
from predictor.snapshot import LoadedAdapter, Memory
from predictor.speculation import ExpectedDrafts
from predictor.state import FETCHING, FINISHED, HELD, NO_TRANSFER, NONE, TO_FETCH, State, new_request
from predictor.state_allocation import allocate, expect_drafts, widen
from predictor.step_time import REGIONS, StepTime
from predictor.tabulated_costs import tabulate

ROLES_OF_LEG = {PREFILL: HOLDING_ROLES, DECODE: FETCHING_ROLES}

drive = direct(loop.drive)
announce = direct(queues.announce)
end_fetch = direct(remote_kv.end_fetch)
fetch_end_s = direct(remote_kv.fetch_end_s)
set_end = direct(remote_kv.set_end)
bring_adapter = direct(adapters.bring)


class Engine:
    """A simulated engine: add requests, advance its clock, read its state."""

    def __init__(
        self,
        config: EngineConfig,
        step_time: StepTime,
        residual: str = DEFAULT_RESIDUAL,
        *,
        track_blocks: bool = True,
    ) -> None:
        """Initialise an idle engine; refuse limits that its local scheduler cannot work with.

        Without `track_blocks` blocks are only counted, and there are no prefix hits: for engines whose blocks' contents
        are unknown.
        """
        self.config = settled(config)
        self.batcher = batcher_named(config.batcher)
        # the loop is interpreted where the local scheduler is no kernel
        self.drive = drive if is_compiled(self.batcher) else loop.loop_with(self.batcher.schedule)
        self.num_blocks = config.num_gpu_blocks - self.batcher.null_blocks
        largest_step = max(config.max_num_batched_tokens, config.max_model_len) + config.max_num_seqs
        costs = tabulate(step_time, largest_step, config.max_num_seqs)
        self.tracks_blocks = track_blocks and bool(self.config.enable_prefix_caching)
        self.state: State = allocate(
            self.config,
            costs,
            num_blocks=self.num_blocks,
            tracked=self.tracks_blocks,
            max_clients=self.batcher.max_clients,
        )
        self.state.engine[0].batcher = number_of(config.batcher)
        self.state.engine[0].decode_reserve = self.batcher.decode_reserve
        self.state.engine[0].orders_queue = self.batcher.orders_queue or self.batcher.requeues
        self.state.engine[0].is_sglang = self.batcher.is_sglang
        self.state.engine[0].drops_stale |= self.batcher.is_sglang
        options = [self.config.batcher_options[option.name] for option in self.batcher.options]
        self.state.engine[0].options[: len(options)] = options
        if not self.batcher.sorts_arrivals:
            self.state.engine[0].queue_by_priority = 0
        self.residual = residual
        self.expected_drafts = self.config.configured_drafts
        self.slots: dict[str, int] = {}
        self.contents: dict[int | str, int] = {}  # shared contents by hash, numbered
        self._requests: list[RequestFacts | None] = [None] * len(self.state.requests)
        self._free_slots = list(range(len(self.state.requests) - 1, -1, -1))
        self._num_added = 0

    def knows_hits(self, *, is_named: bool) -> bool:
        """Return whether it is known how much of a prompt is cached, whose blocks are named or not."""
        return not self.config.enable_prefix_caching or (is_named and self.tracks_blocks)

    @property
    def now_s(self) -> float:
        """The end of the last step whose outputs the engine has processed."""
        return float(self.state.engine[0].now_s)

    def add(self, request: RequestFacts, *, tie_break: int | None = None) -> int:
        """Add a request that arrives at its `arrival_s`, or now where that is past; return its slot."""
        slot = self.insert(request, tie_break=tie_break)
        announce(self.state, slot)
        return slot

    def insert(
        self,
        request: RequestFacts,
        *,
        arrival_s: float | None = None,
        tie_break: int | None = None,
        tokens_on_time: int = 0,
        **progress: float,
    ) -> int:
        """Give a request a slot, without adding it to a queue; `progress` are fields of `new_request`."""
        if request.request_id in self.slots:
            raise ValueError(f"request_id: {request.request_id!r} is already on this engine")
        final_tokens, max_tokens = self.lengths(request, int(progress.get("output_tokens", 0)))
        self._require_possible(request, final_tokens)
        slot = self._take_slot(request, final_tokens)
        num_hashes = 0
        if request.prefix_hashes and self.tracks_blocks:
            hashes = request.prefix_hashes[: (request.prompt_tokens + final_tokens) // self.config.block_size]
            num_hashes = len(hashes)
            self.state.hashes[slot, :num_hashes] = [self.contents[value] for value in hashes]
        facts = _facts_row(request, self.config)
        if request.leg == DECODE:
            progress.setdefault("stage", TO_FETCH)
        self.state.requests[slot] = new_request(
            prompt_tokens=request.prompt_tokens,
            final_tokens=final_tokens,
            max_tokens=max_tokens,
            priority=request.priority,
            tie_break=self._num_added if tie_break is None else tie_break,
            arrival_s=request.arrival_s if arrival_s is None else arrival_s,
            num_hashes=num_hashes,
            serial=self._num_added,
            tokens_on_time=NONE if math.isnan(facts[0]) else tokens_on_time,
            leg=LEGS.index(request.leg),
            transfer_s=self._transfer_s(request),
            **progress,  # type: ignore[arg-type]  # all fields are numbers
        )
        self.state.facts[slot] = facts
        if request.encoder_inputs and self.config.max_num_encoder_input_tokens:
            self._set_inputs(slot, request.encoder_inputs)
        self._num_added += 1
        return slot

    def _set_inputs(self, slot: int, inputs: Sequence[EncoderInput]) -> None:
        """Enter the encoder inputs of a request."""
        # no engine has a larger one than its encoder can compute: the count is an estimate
        largest = min(self.config.max_num_encoder_input_tokens, self.config.encoder_cache_size)
        for index, one in enumerate(inputs):
            # without an identity it is equal to no other
            identity = -1 - (self._num_added << 16) - index if one.identity is None else identity_number(one.identity)
            self.state.encoder_inputs[slot, index] = (identity, one.position, min(one.tokens, largest), ABSENT, NONE)

    def remove(self, request_id: str) -> None:
        """Free the slot of a request that has ended, or was never added to a queue."""
        slot = self.slots.pop(request_id)
        self._requests[slot] = None
        self._free_slots.append(slot)

    def exclude_slots(self, num_slots: int) -> None:
        """Leave the first slots to a caller that fills them in the state itself; the engine must have no requests."""
        assert not self.slots
        self.state = widen(self.state, num_slots=num_slots + 1, blocks_per_request=0, num_contents=0)
        self._requests = [None] * len(self.state.requests)
        self._free_slots = list(range(len(self.state.requests) - 1, num_slots - 1, -1))
        self._num_added = num_slots  # their serials are their slots

    def lengths(self, request: RequestFacts, produced_tokens: int = 0) -> tuple[int, int]:
        """Return the response's known or predicted length, and the length at which the engine cuts it."""
        if request.leg == PREFILL:
            return 1, 1
        if self.batcher.longest_response is not None:
            room = self.batcher.longest_response(self.config, request.prompt_tokens)
        else:
            room = self.config.max_model_len - request.prompt_tokens
        max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        length = request.length(produced_tokens, self.residual)
        return (max_tokens if length is None else min(length, max_tokens)), max_tokens

    def abort(self, request_id: str, *, at_s: float | None = None) -> None:
        """Abort a request whose client has disconnected, now or at a later time."""
        self._wait_until(at_s)
        steps.abort(self.state, self.slots[request_id])

    # Transfers of KV blocks. What happens to one at `at_s` (now by default), the engine knows before its next step.

    def is_held(self, request_id: str) -> bool:
        """Return whether the blocks of a finished prefill are held."""
        return bool(self.state.requests[self.slots[request_id]].stage == HELD)

    def is_fetching(self, request_id: str) -> bool:
        """Return whether blocks of a request are being fetched."""
        return bool(self.state.requests[self.slots[request_id]].stage == FETCHING)

    def hold_until(self, request_id: str, until_s: float) -> None:
        """Change the time until which the blocks of a finished prefill are held; no effect where they are not."""
        if self.is_held(request_id):
            set_end(self.state, self.slots[request_id], float(until_s))

    def release_held(self, request_id: str, *, at_s: float | None = None) -> None:
        """Free the blocks of a finished prefill; no effect where they are not held."""
        self.hold_until(request_id, self._happens_s(at_s))

    def fetch_end_s(self, request_id: str) -> float | None:
        """Return when the fetch of a request's blocks ends, if no other one starts; None before and after it."""
        slot = self.slots[request_id]
        under_way = remote_kv.is_under_way(self.state.requests[slot].stage)
        return float(fetch_end_s(self.state, slot)) if under_way else None

    def end_fetch(self, request_id: str, *, ok: bool = True, valid_tokens: int = 0, at_s: float | None = None) -> None:
        """End the fetch of a request's blocks; no effect where it has ended.

        After a failure `valid_tokens` of the request, in whole blocks, are there. It computes the others, or is
        aborted, as `kv_load_failure_policy` says.
        """
        slot, size = self.slots[request_id], self.config.block_size
        if not self.is_fetching(request_id):
            return
        if not 0 <= valid_tokens <= self.request_in(slot).prompt_tokens or valid_tokens % size:
            raise ValueError(f"valid_tokens: must be whole blocks of {size} tokens of the prompt, not {valid_tokens}")
        end_fetch(self.state, slot, self._happens_s(at_s), bool(ok), int(valid_tokens))
        if not ok and not self.state.engine[0].recomputes:
            self.abort(request_id)

    def set_transfer_pace(self, pace: float) -> None:
        """Multiply the durations of transfers that the configuration predicts, from the next one on."""
        if not (math.isfinite(pace) and pace > 0):
            raise ValueError(f"transfer pace: must be above 0, not {pace}")
        self.state.engine[0].transfer_pace = pace

    def _happens_s(self, at_s: float | None) -> float:
        self._wait_until(at_s)
        return max(self.now_s, 0.0 if at_s is None else at_s)

    def _wait_until(self, at_s: float | None) -> None:
        """Advance the clock of an engine without a step in flight, to a time at which something happens."""
        engine = self.state.engine[0]
        if at_s is not None and engine.num_in_flight == 0:
            engine.now_s = max(engine.now_s, at_s)

    def _transfer_s(self, request: RequestFacts) -> float:
        """Return the seconds of a request's transfer, as its row has them before it begins."""
        if request.leg == PREFILL:
            return self.config.kv_lease_s if request.held_s is None else request.held_s
        return math.nan if request.transfer_s is None else request.transfer_s

    def set_pace(self, pace: float) -> None:
        """Multiply the step times of the profile: by noise, for a slow engine, or by an online correction."""
        if not (math.isfinite(pace) and pace > 0):
            raise ValueError(f"pace: must be above 0, not {pace}")
        self.state.engine[0].pace = pace
        self.state.engine[0].region_pace = 1.0

    def set_region_paces(self, pace: float, by_region: Sequence[float]) -> None:
        """Multiply the step times of each batch region by its own pace; `pace` is that of all steps."""
        for region, value in zip(REGIONS, by_region, strict=True):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"by_region.{region}: must be above 0, not {value}")
        self.set_pace(pace)
        self.state.engine[0].region_pace = np.divide(by_region, pace)

    def expect_drafts(self, drafts: ExpectedDrafts) -> None:
        """Set what is expected of draft tokens, from the next step that ends on."""
        expect_drafts(self.state, drafts)
        self.expected_drafts = drafts

    def remember(self, memory: Memory) -> None:
        """Set what the local scheduler remembers."""
        head, clients = self.state.engine[0], self.state.clients
        if len(memory.numbers) > len(head.memory):
            raise ValueError(f"numbers: {len(memory.numbers)} are more than {len(head.memory)}")
        if len(memory.clients) > len(clients):
            raise ValueError(f"clients: {len(memory.clients)} are more than {self.config.batcher} counts")
        head.num_steps, head.correction = memory.num_steps, memory.correction
        head.memory = 0.0
        head.memory[: len(memory.numbers)] = memory.numbers
        head.num_clients = len(memory.clients)
        for row, client in zip(clients, memory.clients, strict=False):
            row.tenant, row.weight = client.tenant, client.weight
            row.tokens, row.waits = client.tokens, client.waits

    def set_adapters(self, loaded: Sequence[LoadedAdapter]) -> None:
        """Set which LoRA adapters are in host memory, the least recently used one first, and which in GPU slots."""
        head, rows = self.state.engine[0], self.state.adapters
        if len(loaded) > self.config.num_cpu_loras:
            raise ValueError(f"adapters: {len(loaded)} are more than max_cpu_loras {self.config.num_cpu_loras}")
        if sum(adapter.is_active for adapter in loaded) > self.config.max_loras:
            raise ValueError(f"adapters: more are active than max_loras {self.config.max_loras}")
        head.num_adapters = len(loaded)
        for row, adapter in zip(rows, loaded, strict=False):
            row.number, row.is_active = adapter.number, adapter.is_active

    def set_adapter_times(self, load_s: float, activate_s: float) -> None:
        """Set how long LoRA adapters take to load, from the next step on."""
        for name, value in (("load_s", load_s), ("activate_s", activate_s)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: must be at least 0, not {value}")
        self.state.engine[0].lora_load_s, self.state.engine[0].lora_activate_s = load_s, activate_s

    def load_adapter(self, name: str) -> float:
        """Bring a LoRA adapter into memory, as the most recently used one; return the seconds that this takes."""
        if not self.config.max_loras:
            raise ValueError("max_loras: must be above 0 for an engine that loads adapters")
        return float(bring_adapter(self.state, adapter_number(name)))

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the LoRA adapters in host memory, the least recently used one first."""
        rows = self.state.adapters[: self.state.engine[0].num_adapters]
        return tuple(LoadedAdapter(number=int(row.number), is_active=bool(row.is_active)) for row in rows)

    def advance(self, until_s: float = FOREVER) -> None:
        """Run the engine until no event is left before `until_s`."""
        self.drive(self.state, float(until_s), ANY_NUMBER, NONE)

    def next_step(self, until_s: float = FOREVER) -> StepRecord | None:
        """Run the engine until it has planned one more step; None where it plans none before `until_s`."""
        self.state.engine[0].steady = 0  # repeated steps have no records
        engine = self.state.engine[0]
        num_steps = int(engine.num_steps)
        self.drive(self.state, float(until_s), num_steps + 1, NONE)
        if engine.num_steps == num_steps:
            return None
        index = (engine.oldest + engine.num_in_flight - 1) % 2
        step = self.state.steps[index]
        entries = self.state.batch[index, : step.num_scheduled]
        return StepRecord(
            step=int(engine.num_steps) - 1,
            start_s=float(step.start_s),
            end_s=float(step.end_s),
            scheduled={self.id_of(entry.slot): int(entry.tokens) for entry in entries},
            running=self.running(),
            waiting=self.waiting(),
            free_blocks=int(engine.num_free_blocks),
            preempted=[self.id_of(slot) for slot in self.state.preempted[: step.num_preempted]],
        )

    def running(self) -> list[str]:
        """Ids of the running requests, in the engine's order."""
        return [self.id_of(slot) for slot in self.state.running[: self.state.engine[0].num_running]]

    def waiting(self) -> list[str]:
        """Ids of the waiting requests, the next one first."""
        engine = self.state.engine[0]
        return [self.id_of(queues.waiting_at(self.state, position)) for position in range(engine.num_waiting)]

    def request_in(self, slot: int) -> RequestFacts:
        """Return the facts of the request in a slot."""
        request = self._requests[slot]
        assert request is not None
        return request

    def id_of(self, slot: int) -> str:
        """Return the id of the request in a slot."""
        return self.request_in(slot).request_id

    def outcome(self, request_id: str) -> Outcome:
        """Return what a request has experienced so far."""
        row = self.state.requests[self.slots[request_id]]
        return Outcome(
            request_id=request_id,
            arrival_s=float(row.arrival_s),
            prompt_tokens=int(row.prompt_tokens),
            output_tokens=int(row.output_tokens),
            prefix_hit_tokens=int(row.hit_tokens),
            num_preemptions=int(row.num_preemptions),
            scheduled_s=happened(row.scheduled_s),
            first_token_s=happened(row.first_token_s),
            finished_s=happened(row.finished_s),
            tokens_on_time=int(row.tokens_on_time) if row.tokens_on_time >= 0 else None,
        )

    def forget_finished(self) -> list[Outcome]:
        """Return the outcomes of requests that have ended, and free their slots."""
        rows = self.state.requests
        ended = [
            name
            for name, slot in self.slots.items()
            if rows[slot].status == FINISHED and rows[slot].in_flight_tokens == 0 and rows[slot].stage == NO_TRANSFER
        ]
        outcomes = [self.outcome(name) for name in ended]
        for name in ended:
            self.remove(name)
        return outcomes

    def know_contents(self, hashes: Iterable[int | str]) -> None:
        """Number the shared contents that blocks can have."""
        for value in hashes:
            self.contents.setdefault(value, len(self.contents))
        self.state = widen(self.state, num_slots=0, blocks_per_request=0, num_contents=len(self.contents))

    def cache_contents(self, contents: Mapping[int, int | str]) -> None:
        """Set the shared contents of blocks; of blocks with the same content, the first one is hit."""
        self.know_contents(contents.values())
        numbers = np.fromiter((self.contents[value] for value in contents.values()), np.int64, len(contents))
        blocks.chain_all(self.state, np.fromiter(contents, np.int64, len(contents)), numbers)

    def widen_table(self, num_blocks: int) -> None:
        """Make room for requests that hold `num_blocks` blocks."""
        self.state = widen(self.state, num_slots=0, blocks_per_request=num_blocks, num_contents=0)

    def _require_possible(self, request: RequestFacts, final_tokens: int) -> None:
        """Refuse a request that this engine can never finish."""
        config, leg = self.config, request.leg
        if (roles := ROLES_OF_LEG.get(leg)) is not None and config.kv_role not in roles:
            raise ValueError(f"leg: {leg} needs an engine with kv_role {' or '.join(roles)}")
        if request.prompt_tokens >= config.max_model_len:
            raise ValueError(
                f"prompt_tokens: {request.prompt_tokens} leave no room for a response within max_model_len "
                f"{config.max_model_len}"
            )
        tokens = min(request.prompt_tokens + final_tokens + config.num_lookahead_tokens, config.max_model_len)
        needed = -(-tokens // config.block_size)
        if needed > self.num_blocks:
            raise ValueError(
                f"prompt_tokens: {tokens} tokens need {needed} KV blocks, the engine has {self.num_blocks}"
            )

    def _take_slot(self, request: RequestFacts, final_tokens: int) -> int:
        if self.tracks_blocks and request.prefix_hashes:
            self.know_contents(request.prefix_hashes)
        old = len(self._requests)
        most_tokens = request.prompt_tokens + final_tokens + self.config.most_draft_tokens
        self.state = widen(
            self.state,
            num_slots=old if self._free_slots else old + 1,
            blocks_per_request=-(-most_tokens // self.config.block_size) if self.tracks_blocks else 1,
            num_contents=0,
            num_encoder_inputs=len(request.encoder_inputs) if self.config.max_num_encoder_input_tokens else 0,
        )
        grown = len(self.state.requests)
        if grown > old:
            self._free_slots[:0] = range(grown - 1, old - 1, -1)
            self._requests.extend([None] * (grown - old))
        slot = self._free_slots.pop()
        self._requests[slot] = request
        self.slots[request.request_id] = slot
        return slot


def _facts_row(request: RequestFacts, config: EngineConfig) -> tuple[float, ...]:
    """Return a request's row of `state.facts`."""
    ttft_s = tpot_s = None
    if request.slo is not None:
        ttft_s, tpot_s = request.slo.ttft_s, request.slo.tpot_s
    return (
        math.nan if ttft_s is None else ttft_s - request.waited_s,
        math.nan if tpot_s is None else tpot_s,
        request.weight,
        tenant_number(request.client_id) if request.client_id else NO_TENANT,
        0 if request.request_class == REAL_TIME else 1,
        adapter_number(request.adapter) if request.adapter else NO_ADAPTER,
        len(request.encoder_inputs) if config.max_num_encoder_input_tokens else 0,
    )
