"""A plain engine for the local schedulers that order all requests, with the memory of vLLM v1.

A rule returns a `Plan`: the order, and the limits of the step; `Engine.fill` does the rest. The rules are in
`tests.oracle.ordered_rules`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from predictor.step_time import StepTime
from tests.oracle import vllm_v1
from tests.oracle.engine import EngineSettings, Part, Seconds, Step
from tests.strategies import straight_lines

INFINITY = math.inf


@dataclass(eq=False)
class Request(vllm_v1.Request):
    """A request with its targets and the weight of its tokens."""

    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    weight: float = 1.0
    first_token_s: float = INFINITY
    request_class: str = ""

    @property
    def left(self) -> int:
        """Known tokens that are not computed."""
        return self.num_tokens - self.computed

    @property
    def decodes(self) -> bool:
        """Whether it needs the last token of its response computed, and nothing else."""
        return self.running and self.num_output > 0 and self.left == 1

    def due_s(self, from_first_token: bool) -> float:
        """When its next token is due; never without targets."""
        if self.ttft_slo_s is None or (self.num_output > 0 and self.tpot_slo_s is None):
            return INFINITY
        first_due_s = self.arrival_s + self.ttft_slo_s
        if from_first_token:
            first_due_s = min(first_due_s, self.first_token_s)
        return first_due_s + self.num_output * (self.tpot_slo_s or 0.0)


@dataclass
class Plan:
    """In which order requests are served, and how far."""

    order: list[Request]
    num_tokens: int
    decode_limit_s: float = INFINITY
    prefill_limit_s: float = INFINITY


Rule = Callable[["Engine"], Plan]


@dataclass
class Engine:
    """The queues, the blocks, and the step being planned."""

    settings: EngineSettings
    seconds: Seconds
    step_time: StepTime
    now_s: float = 0.0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    scheduled: dict[str, int] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Free all blocks."""
        self.pool = vllm_v1.BlockPool(self.settings["num_gpu_blocks"])
        self.block_size = self.settings["block_size"]
        self.by_priority = self.settings["scheduling_policy"] == "priority"

    # What rules read.

    def due_s(self, request: Request) -> float:
        """When a request's next token is due."""
        return request.due_s(self.settings["batcher_options"].get("from_first_token", 0) > 0)

    @property
    def requests(self) -> list[Request]:
        """All requests."""
        return self.running + self.waiting

    @property
    def shortest_tpot_s(self) -> float:
        """The shortest target of all requests."""
        return min((one.tpot_slo_s for one in self.requests if one.tpot_slo_s is not None), default=INFINITY)

    def option(self, name: str) -> float:
        """Return an option of the rule."""
        return float(self.settings["batcher_options"][name])

    def ordered(self, key: Callable[[Request], tuple[float, ...]]) -> list[Request]:
        """Sort all requests by a key, then by due time, then as the engine sorts its queue."""
        return sorted(
            self.requests,
            key=lambda one: (
                *key(one),
                self.due_s(one),
                one.priority if self.by_priority else 0,
                one.arrival_s,
                one.id,
            ),
        )

    def cost_s(self, request: Request) -> float:
        """Estimate the time that a request adds to a full step."""
        most_tokens, most_sequences = self.settings["max_num_batched_tokens"], self.settings["max_num_seqs"]
        model, count, before = self.step_time, float(request.left), request.computed
        token_s = (self._tokens_s(most_tokens) - self._tokens_s(1)) / max(1, most_tokens - 1)
        sampled_s = straight_lines(model.by_sequences, most_sequences) - straight_lines(model.by_sequences, 0)
        sequence_s = sampled_s / most_sequences
        if request.decodes:
            decode_s = straight_lines(model.decode_base, most_sequences) / most_sequences
            return token_s + sequence_s + decode_s + straight_lines(model.decode_slope, most_sequences) * (before + 1)
        attention_s = model.prefill_token_s * count + model.prefill_qq_s * count * count
        attention_s = attention_s + model.prefill_qkv_s * count * before + model.prefill_kv_s * before
        return token_s * count + sequence_s + attention_s

    @property
    def constant_s(self) -> float:
        """The part of each step that no request causes."""
        return self.step_time.constant_s + self._tokens_s(1) + straight_lines(self.step_time.by_sequences, 0)

    def _tokens_s(self, count: int) -> float:
        return straight_lines(self.step_time.by_tokens, count) + self.step_time.token_s * count

    # Planning.

    def plan(self, rule: Rule) -> None:
        """Plan a step."""
        self.scheduled, self.parts, self.preempted = {}, [], []
        plan = rule(self)
        if self.can_decode_all(plan):
            for request in self.running:
                self.give(request, 1)
        else:
            self.fill(plan)

    def can_decode_all(self, plan: Plan) -> bool:
        """Whether nobody can join and a decode of all fits, so that they are served in the order of their admission."""
        has_seat = len(self.running) < self.settings["max_num_seqs"]
        if (self.waiting and has_seat) or not all(request.decodes for request in self.running):
            return False
        lacking = sum(self.blocks_for(one.computed + 1) - len(one.blocks) for one in self.running)
        took_s = self.seconds([(1, one.computed, True) for one in self.running])
        fits = len(self.running) <= plan.num_tokens and lacking <= len(self.pool.free)
        return fits and took_s <= plan.decode_limit_s

    def fill(self, plan: Plan) -> None:
        """Serve in order until a request gets less than it could take."""
        threshold = self.settings["long_prefill_token_threshold"] if len(plan.order) > 1 else 0
        admits = True
        for position, request in enumerate(plan.order):
            budget = plan.num_tokens - sum(self.scheduled.values())
            if budget == 0:
                return
            has_seat = len(self.running) < self.settings["max_num_seqs"]
            if not request.running and (not admits or self.preempted or not has_seat):
                continue
            hits: list[int] = []
            if not request.running and self.settings["enable_prefix_caching"]:
                hits = self.pool.hits(request, self.block_size)
            before = request.computed if request.running else len(hits) * self.block_size
            most = min(request.num_tokens - before, budget, threshold or budget)
            limit_s = plan.decode_limit_s if request.decodes else plan.prefill_limit_s
            chunk = self.largest_chunk(request, before, most, limit_s)
            if chunk == 0 and self.scheduled:
                return
            chunk = max(chunk, 1)
            if request.running:
                if not self.make_room(request, before + chunk, plan.order[position + 1 :]):
                    continue
            else:
                admits = self.has_room_to_admit(request, hits, before + chunk)
                if not admits:
                    continue
                self.waiting.remove(request)
                self.running.append(request)
                self.pool.hold(hits)
                request.running, request.computed = True, before
                request.blocks, request.num_cached = hits, len(hits)
            self.give(request, chunk)
            if chunk < most:
                return

    def largest_chunk(self, request: Request, before: int, most: int, limit_s: float) -> int:
        """Try all chunks; one of a single token comes last, because it is computed in another way."""
        for chunk in (most, *range(most - 1, 1, -1), 1):
            part = (chunk, before, before + chunk == request.num_tokens)
            if limit_s == INFINITY or self.seconds([*self.parts, part]) <= limit_s:
                return chunk
        return 0

    def make_room(self, request: Request, num_tokens: int, later: list[Request]) -> bool:
        """Preempt later requests, the last one first."""
        while self.blocks_for(num_tokens) - len(request.blocks) > len(self.pool.free):
            victims = [one for one in later if one.running]
            if not victims:
                return False
            self.preempt(victims[-1])
        return True

    def preempt(self, victim: Request) -> None:
        """Free a request's blocks; it keeps its output, and moves to the front of the queue."""
        self.pool.release(victim.blocks)
        victim.blocks, victim.num_cached, victim.computed, victim.running = [], 0, 0, False
        self.running.remove(victim)
        self.waiting.insert(0, victim)
        self.sort_waiting()
        self.preempted.append(victim.id)

    def has_room_to_admit(self, request: Request, hits: list[int], num_tokens: int) -> bool:
        """Whether blocks suffice for its chunk, or for its whole prompt where configured, above the watermark."""
        if self.settings["scheduler_reserve_full_isl"]:
            num_tokens = max(num_tokens, request.num_tokens)
        needed = self.blocks_for(num_tokens) - len(hits) + sum(self.pool.refs[block] == 0 for block in hits)
        kept = int(self.settings["watermark"] * self.settings["num_gpu_blocks"]) if self.running else 0
        return needed + kept <= len(self.pool.free)

    def give(self, request: Request, count: int) -> None:
        """Put tokens into the step, with blocks for them."""
        request.blocks = request.blocks + self.pool.take(
            max(0, self.blocks_for(request.computed + count) - len(request.blocks))
        )
        if self.settings["enable_prefix_caching"]:
            for index in range(request.num_cached, (request.computed + count) // self.block_size):
                self.pool.cache(request.blocks[index], request.block_key(index))
                request.num_cached += 1
        self.scheduled[request.id] = count
        self.parts.append((count, request.computed, count == request.left))

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens."""
        return int(-(-num_tokens // self.block_size))

    def sort_waiting(self) -> None:
        """Sort the queue by priority, then arrival, then id, where configured."""
        if self.by_priority:
            self.waiting.sort(key=lambda request: (request.priority, request.arrival_s, request.id))

    def update(self) -> None:
        """Process the finished step: a request that has computed all its tokens gets one more."""
        for request in list(self.running):
            request.computed += self.scheduled.get(request.id, 0)
            if request.id in self.scheduled and request.left == 0:
                request.num_output += 1
                request.token_s.append(self.now_s)
                request.first_token_s = min(request.first_token_s, self.now_s)
                last = min(request.output_tokens, request.max_tokens)
                if request.num_output == last or request.num_tokens == self.settings["max_model_len"]:
                    self.pool.release(request.blocks)
                    self.running.remove(request)


def replay(
    rule: Rule,
    settings: EngineSettings,
    requests: Iterable[Mapping[str, Any]],
    seconds: Seconds,
    step_time: StepTime,
) -> Iterator[Step]:
    """Run an engine with a rule, and yield each step right after its planning; `step_time` is what the rule knows."""
    engine = Engine(settings, seconds, step_time)
    arrivals = deque(sorted((Request(**request) for request in requests), key=lambda request: request.arrival_s))
    num_steps = 0
    while arrivals or engine.requests:
        while arrivals and arrivals[0].arrival_s <= engine.now_s:
            engine.waiting.append(arrivals.popleft())
            engine.sort_waiting()
        if not engine.requests:
            engine.now_s = arrivals[0].arrival_s
            continue
        engine.plan(rule)
        assert engine.scheduled, "an empty step"
        end_s = engine.now_s + seconds(engine.parts)
        yield {
            "step": num_steps,
            "start_s": engine.now_s,
            "end_s": end_s,
            "scheduled": engine.scheduled,
            "running": [request.id for request in engine.running],
            "waiting": [request.id for request in engine.waiting],
            "free_blocks": len(engine.pool.free),
            "preempted": engine.preempted,
        }
        num_steps += 1
        engine.now_s = end_s
        engine.update()
