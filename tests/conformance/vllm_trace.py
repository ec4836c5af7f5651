"""Runs vLLM's real v1 scheduler over workloads, without a model, and records its decisions at every step.

Runs under the interpreter that has vLLM and imports nothing of this project. Reads one workload a line on standard
input, `{"engine": {...}, "requests": [...], "max_steps": n}`, and writes one line for each,
`{"steps": [...], "coverage": {...}}`.
"""

from __future__ import annotations

import copy
import heapq
import json
import os
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# vLLM reads its environment when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

from vllm.config import CacheConfig, KVTransferConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

EOS = 0
STAND_IN = "StandIn"  # a KV connector that `legs_trace.py` registers
LONGEST_MODEL = 1 << 20
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 256,
    "max_position_embeddings": LONGEST_MODEL, "torch_dtype": "float32",
}  # fmt: skip


def base_config() -> VllmConfig:
    """Configure vLLM for a model that is never run; this is slow, so it is done once and copied for every workload."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(TINY_MODEL), encoding="utf-8")
        model = ModelConfig(model=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST_MODEL)
        scheduler = SchedulerConfig(max_model_len=LONGEST_MODEL, is_encoder_decoder=False)
        return VllmConfig(model_config=model, scheduler_config=scheduler)


def build_scheduler(base: VllmConfig, engine: dict[str, Any], scheduler_class: type | None = None) -> Scheduler:
    """Construct the scheduler class that an engine with these settings would run, or another one."""
    config = copy.copy(base)
    config.model_config = copy.copy(base.model_config)
    config.model_config.max_model_len = engine["max_model_len"]
    config.scheduler_config = SchedulerConfig(
        max_model_len=engine["max_model_len"],
        is_encoder_decoder=False,
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        enable_chunked_prefill=engine["enable_chunked_prefill"],
        long_prefill_token_threshold=engine["long_prefill_token_threshold"],
        policy=engine["scheduling_policy"],
        watermark=engine["watermark"],
        scheduler_reserve_full_isl=engine["scheduler_reserve_full_isl"],
        async_scheduling=engine["async_scheduling"],
        scheduler_cls=scheduler_class,
        # vLLM has the first from 0.31 on
        **{
            name: engine[name]
            for name in ("long_prefill_token_threshold_adaptive", "prefill_schedule_interval")
            if engine.get(name)
        },
    )
    config.cache_config = CacheConfig(
        block_size=engine["block_size"], enable_prefix_caching=engine["enable_prefix_caching"]
    )
    config.cache_config.num_gpu_blocks = engine["num_gpu_blocks"]
    if engine.get("kv_role"):
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=STAND_IN,
            kv_role=engine["kv_role"],
            kv_load_failure_policy=engine["kv_load_failure_policy"],
        )
    if engine.get("max_loras"):
        config.lora_config = LoRAConfig(max_loras=engine["max_loras"])
    spec = FullAttentionSpec(
        block_size=engine["block_size"], num_kv_heads=1, head_size=1, dtype=config.model_config.dtype
    )
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=engine["num_gpu_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=engine["block_size"],
    )
    if engine.get("max_num_encoder_input_tokens"):  # as a model with an encoder would set it
        scheduler.max_num_encoder_input_tokens = engine["max_num_encoder_input_tokens"]
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=engine["encoder_cache_size"])
        scheduler.scheduler_config.disable_chunked_mm_input = engine["disable_chunked_mm_input"]
    return scheduler


def lora_request(name: str) -> LoRARequest | None:
    """Return vLLM's form of an adapter a0, a1, …; None for the base model."""
    return LoRARequest(lora_name=name, lora_int_id=1 + int(name[1:]), lora_path=f"/{name}") if name else None


def mm_features(spec: dict[str, Any]) -> list[MultiModalFeatureSpec]:
    """Return the images of a request, without their data."""
    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=image["identity"],
            mm_position=PlaceholderRange(offset=image["position"], length=image["tokens"]),
        )
        for image in spec.get("encoder_inputs", ())
    ]


def request_in(spec: dict[str, Any], prompt: list[int], params: SamplingParams, **more: Any) -> Request:
    """Make vLLM's request of a workload's."""
    params.update_from_generation_config({}, EOS)
    return Request(
        request_id=spec["id"],
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        arrival_time=spec["arrival_s"],
        priority=spec["priority"],
        **more,
    )


def waiting_in_order(scheduler: Scheduler) -> list[Request]:
    """Return the waiting requests as the scheduler tries them; a priority queue iterates in the order of its pops."""
    if hasattr(scheduler, "kv_holding_waiting"):
        return [*scheduler.kv_holding_waiting, *scheduler.waiting]
    if scheduler.scheduler_config.policy == "priority":  # until 0.30
        return list(heapq.merge(scheduler.skipped_waiting, scheduler.waiting))
    return [*scheduler.skipped_waiting, *scheduler.waiting]


class TokenSource:
    """Token ids such that two blocks are equal exactly where the workload has equal hashes."""

    def __init__(self) -> None:
        self.last_unique = 0

    def fresh(self, count: int) -> list[int]:
        """Return unused ids; negative, so that they equal neither EOS nor those of a shared block."""
        ids = list(range(self.last_unique - 1, self.last_unique - 1 - count, -1))
        self.last_unique -= count
        return ids

    def prompt(self, spec: dict[str, Any], block_size: int) -> list[int]:
        """Return the ids of a prompt: a shared block's ids follow from its hash, the others are unique."""
        shared = [1 + value * block_size + i for value in spec["prefix_hashes"] or () for i in range(block_size)]
        assert len(shared) <= spec["prompt_tokens"]
        return shared + self.fresh(spec["prompt_tokens"] - len(shared))


@dataclass
class Launched:
    """A step in flight: its scheduler output, the requests that sample a token, and its end."""

    output: SchedulerOutput
    sampled: set[str]
    end_s: float


class Trace:
    """One engine, one workload: vLLM's scheduler on a virtual clock where every step takes a second."""

    def __init__(self, base: VllmConfig, workload: dict[str, Any]) -> None:
        engine = workload["engine"]
        self.workload, self.engine = workload, engine
        self.max_steps = workload["max_steps"]
        self.now_s = 0.0
        self.scheduler = self.build(base)
        assert isinstance(self.scheduler, AsyncScheduler) == engine["async_scheduling"]
        self.tokens = TokenSource()
        self.specs = {spec["id"]: spec for spec in workload["requests"]}
        self.arrivals = deque(sorted(workload["requests"], key=lambda spec: spec["arrival_s"]))
        self.steps: list[dict[str, Any]] = []
        self.coverage: Counter[str] = Counter()
        self.preempted: list[str] = []
        caching = engine["enable_prefix_caching"]
        self.hasher = get_request_block_hasher(engine["block_size"], sha256) if caching else None
        self.probe()

    def build(self, base: VllmConfig) -> Scheduler:
        """Construct the scheduler."""
        return build_scheduler(base, self.engine)

    def seconds_of(self, output: SchedulerOutput) -> float:
        """Return how long a step takes."""
        del output
        return 1.0

    def params_of(self, spec: dict[str, Any]) -> SamplingParams:
        """Return a request's parameters."""
        return SamplingParams(max_tokens=spec["max_tokens"])

    def probe(self) -> None:
        """Wrap the methods that show which rule decided; the wrappers change no result."""
        scheduler, manager, coverage = self.scheduler, self.scheduler.kv_cache_manager, self.coverage
        preempt, allocate = scheduler._preempt_request, manager.allocate_slots
        pop, evict = scheduler.waiting.pop_request, manager.block_pool._maybe_evict_cached_block
        cache, cached = manager.cache_blocks, manager.coordinator.single_type_managers[0].num_cached_block
        self.allocated: dict[str, int] = {}
        self.refunded = 0
        self.refused_admission = False
        self.num_popped = 0
        asking: list[Request] = []

        def watched_preempt(request: Request, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(request.request_id)
            coverage["preemptions"] += 1
            coverage["preempted_itself"] += request is asking[0]
            coverage["preempted_after_scheduled"] += request.request_id in self.allocated
            self.refunded += self.allocated.get(request.request_id, 0)
            coverage["preempted_with_output_in_flight"] += request.num_in_flight_tokens > 0
            preempt(request, *args, **kwargs)

        def watched_allocate(request: Request, num_new_tokens: int, **kwargs: Any) -> Any:
            asking[:] = [request]
            hits = kwargs["new_computed_blocks"].blocks[0] if "new_computed_blocks" in kwargs else None
            free, size = manager.block_pool.get_num_free_blocks(), self.engine["block_size"]
            idle_hits = sum(block.ref_cnt == 0 for block in hits or ())
            blocks = allocate(request, num_new_tokens, **kwargs)
            if blocks is not None:
                self.allocated[request.request_id] = num_new_tokens
            if hits is None:
                return blocks
            first = -(-(len(hits) * size + num_new_tokens) // size) - len(hits) + idle_hits
            whole = -(-request.num_tokens // size) - len(hits) + idle_hits
            reserve = self.engine["scheduler_reserve_full_isl"]
            needed = whole if reserve else first
            if blocks is not None:
                coverage["watermark_waivers"] += needed + manager.watermark_blocks > free
                coverage["prefix_hits"] += bool(hits)
                coverage["prefix_hits_on_held_blocks"] += idle_hits < len(hits)
                coverage["resumed_with_hits"] += bool(hits) and request.num_preemptions > 0
                coverage["resumed_after_output"] += request.num_preemptions > 0 and request.num_output_tokens > 0
                return blocks
            self.refused_admission = True
            mark = manager.watermark_blocks if kwargs["has_scheduled_reqs"] else 0
            coverage["admission_stops"] += 1
            coverage["watermark_stops"] += needed <= free
            coverage["reserve_full_isl_stops"] += reserve and first + mark <= free
            return blocks

        def watched_pop() -> Request:
            self.num_popped += 1
            return pop()

        encoder = scheduler.encoder_cache_manager
        can_allocate, refer = encoder.can_allocate, encoder.check_and_update_cache

        def watched_can_allocate(request: Request, place: int, budget: int, planned: int) -> bool:
            num_before = len(encoder.freed)
            fits = can_allocate(request, place, budget, planned)
            coverage["encoder_evictions"] += len(encoder.freed) > num_before
            over_budget = request.get_num_encoder_embeds(place) > budget
            coverage["encoder_budget_stops"] += over_budget
            coverage["encoder_cache_stops"] += not fits and not over_budget
            return fits

        def watched_refer(request: Request, place: int) -> bool:
            known = refer(request, place)
            coverage["encoder_hits"] += known
            return known

        encoder.can_allocate, encoder.check_and_update_cache = watched_can_allocate, watched_refer

        def watched_evict(block: Any) -> bool:
            evicted = evict(block)
            coverage["evictions"] += evicted
            return evicted

        def watched_cache(request: Request, num_computed_tokens: int) -> None:
            num_before = cached.get(request.request_id)
            cache(request, num_computed_tokens)
            coverage["cached_on_update"] += cached.get(request.request_id) != num_before

        scheduler._preempt_request = watched_preempt
        manager.allocate_slots = watched_allocate
        scheduler.waiting.pop_request = watched_pop
        manager.block_pool._maybe_evict_cached_block = watched_evict
        manager.cache_blocks = watched_cache

    def absorb(self, now_s: float) -> None:
        """Add every request that has arrived, as EngineCore does before each step."""
        while self.arrivals and self.arrivals[0]["arrival_s"] <= now_s:
            self.scheduler.add_request(self.request_of(self.arrivals.popleft()))

    def request_of(self, spec: dict[str, Any]) -> Request:
        """Make vLLM's request."""
        return request_in(
            spec,
            self.tokens.prompt(spec, self.engine["block_size"]),
            self.params_of(spec),
            block_hasher=self.hasher,
            resumable=spec.get("resumable", False),
            lora_request=lora_request(spec.get("adapter", "")),
            mm_features=mm_features(spec),
        )

    def schedule(self, start_s: float) -> Launched:
        """Let vLLM plan one step, and record the state after it."""
        scheduler = self.scheduler
        self.preempted.clear()
        self.allocated.clear()
        self.refused_admission, self.num_popped, self.refunded = False, 0, 0
        held_before = list(scheduler.running)
        output = scheduler.schedule()
        end_s = start_s + self.seconds_of(output)
        waiting = waiting_in_order(scheduler)
        self.steps.append(
            {
                "step": len(self.steps),
                "start_s": start_s,
                "end_s": end_s,
                "scheduled": dict(output.num_scheduled_tokens),
                "running": [request.request_id for request in scheduler.running],
                "waiting": [request.request_id for request in waiting],
                "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                "preempted": list(self.preempted),
            }
        )
        # Like the model runner, which discards what it sampled from an unfinished prefill chunk.
        sampled = {name for name in output.num_scheduled_tokens if not scheduler.requests[name].is_prefill_chunk}
        self.count_step(output, held_before, waiting)
        return Launched(output, sampled, end_s)

    def count_step(self, output: SchedulerOutput, held_before: list[Request], waiting: list[Request]) -> None:
        """Count the limits that applied to this step, as far as its output shows them."""
        scheduler, engine, coverage = self.scheduler, self.engine, self.coverage
        scheduled = output.num_scheduled_tokens
        admitted = sum(request not in held_before for request in scheduler.running)
        coverage["steps"] += 1
        coverage["empty_steps"] += not scheduled
        skipped = self.num_popped - admitted
        by_adapter = self.num_passed_over(waiting, scheduled) if skipped else 0
        coverage["adapter_skips"] += by_adapter
        coverage["admitted_after_adapter_skip"] += by_adapter > 0 and admitted > 0
        coverage["stale_skips"] += max(0, skipped - by_adapter)
        for name, count in scheduled.items():
            if scheduler.requests[name].is_prefill_chunk:
                limit = "threshold" if count == engine["long_prefill_token_threshold"] else "budget"
                coverage[f"{limit}_cuts"] += 1
        coverage["refunds_spent"] += sum(scheduled.values()) + self.refunded > engine["max_num_batched_tokens"]
        coverage["running_left_out"] += any(request.request_id not in scheduled for request in scheduler.running)
        if not waiting or self.preempted:
            return
        full = len(scheduler.running) >= engine["max_num_seqs"]
        left = engine["max_num_batched_tokens"] - sum(scheduled.values())
        coverage["max_num_seqs_stops"] += full
        coverage["unchunked_stops"] += (
            not engine["enable_chunked_prefill"] and not full and left > 0 and not self.refused_admission
        ) and any(not request.num_stale_output_tokens for request in waiting)

    def num_passed_over(self, waiting: list[Request], scheduled: dict[str, int]) -> int:
        """Return how many waiting requests have an adapter that the step has no place for."""
        requests = self.scheduler.requests
        used = {requests[name].lora_request for name in scheduled} - {None}
        if not self.scheduler.lora_config or len(used) < self.scheduler.lora_config.max_loras:
            return 0
        return sum(bool(request.lora_request) and request.lora_request not in used for request in waiting)

    def update(self, launched: Launched) -> None:
        """Return one new token for every request that sampled, or EOS where its response ends early."""
        scheduler = self.scheduler
        names = list(launched.output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        before = {name: scheduler.requests.get(name) for name in names}
        outside = {name for name in names if before[name] is not None and before[name] not in scheduler.running}
        for name in names:
            request = before[name]
            self.coverage["wasted_slots"] += request is None
            if name not in launched.sampled:
                sampled.append([])
            elif request is not None and self.ends_here(request):
                sampled.append([EOS])
            else:
                sampled.append(self.tokens.fresh(1))
        scheduler.update_from_output(
            launched.output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=self.transfers_ended(),
            ),
        )
        for name, request in before.items():
            if request is not None and request.is_finished():
                self.coverage["finished"] += 1
                self.coverage["finished_while_preempted"] += name in outside
                self.coverage["ended_by_eos"] += request.output_token_ids[-1] == EOS
                self.coverage["ended_by_model_len"] += request.num_output_tokens < request.max_tokens and (
                    request.num_tokens >= self.engine["max_model_len"]
                )

    def transfers_ended(self) -> Any:
        """Return what a KV connector reports; there is none."""
        return None

    def ends_here(self, request: Request) -> bool:
        """Whether the next token of this request is its last, before max_tokens would end it."""
        spec = self.specs[request.request_id]
        return spec["output_tokens"] < spec["max_tokens"] and request.num_output_tokens + 1 == spec["output_tokens"]

    def run(self) -> dict[str, Any]:
        """Run to the end: EngineCore.step, or EngineCore.step_with_batch_queue with two steps in flight."""
        depth = 2 if self.engine["async_scheduling"] else 1
        in_flight: deque[Launched] = deque()
        self.now_s = last_end_s = 0.0
        while len(self.steps) < self.max_steps:
            self.absorb(self.now_s)
            if len(in_flight) < depth and self.scheduler.get_num_unfinished_requests():
                launched = self.schedule(max(self.now_s, last_end_s))
                last_end_s = launched.end_s
                in_flight.append(launched)
                idle = not launched.output.num_scheduled_tokens and not self.preempted
                if not (idle and not any(step.output.num_scheduled_tokens for step in in_flight)):
                    continue
                # No step in flight can change this result, only a new request can.
                self.coverage["stuck"] += 1
                while in_flight:
                    self.now_s = max(self.now_s, in_flight[0].end_s)
                    self.update(in_flight.popleft())
            elif in_flight:
                oldest = in_flight.popleft()
                self.now_s = max(self.now_s, oldest.end_s)
                self.update(oldest)
                continue
            if not self.arrivals:
                break
            self.now_s = max(self.now_s, self.arrivals[0]["arrival_s"])
        self.coverage["cut_off"] += self.scheduler.get_num_unfinished_requests() > 0
        return {"steps": self.steps, "coverage": {name: count for name, count in self.coverage.items() if count}}


def answer_all(traced: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
    """Trace every workload on standard input; vLLM's output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    init_none_hash(sha256)
    base = base_config()
    for line in sys.stdin:
        answers.write(json.dumps(traced(base, json.loads(line)), separators=(",", ":")) + "\n")
        answers.flush()


def main() -> None:
    """Trace the workloads of one engine."""
    answer_all(lambda base, workload: Trace(base, workload).run())


if __name__ == "__main__":
    main()
