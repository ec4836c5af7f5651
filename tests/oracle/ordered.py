"""A plain engine for the local schedulers that order all requests, with the memory of vLLM v1.

A rule returns a `Plan`: the order, and the limits of the step; `Engine` does the rest. The rules are in
`tests.oracle.ordered_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from predictor.compiled import interpreted
from predictor.correction import Correction, CorrectionRule
from predictor.estimator import normal
from predictor.step_time import StepTime
from tests.oracle import vllm_v1
from tests.oracle.engine import EngineSettings, Part, Seconds, Step
from tests.oracle.two_ended_cells import TwoEndedCells
from tests.strategies import straight_lines

INFINITY = math.inf
noise = interpreted(normal)


@dataclass(eq=False)
class Request(vllm_v1.Request):
    """A request with its targets and the weight of its tokens."""

    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    weight: float = 1.0
    client_id: str = ""
    first_token_s: float = INFINITY
    request_class: str = ""

    @property
    def produced(self) -> int:
        """Tokens of the response, those in flight included."""
        return self.num_output + self.placeholders

    @property
    def left(self) -> int:
        """Tokens that are not computed."""
        return self.prompt_tokens + self.produced - self.computed

    @property
    def decodes(self) -> bool:
        """Whether it needs the last token of its response computed, and nothing else."""
        return self.running and self.produced > 0 and self.left == 1

    def due_s(self, from_first_token: bool) -> float:
        """When its next token is due; never without targets."""
        if self.ttft_slo_s is None or (self.produced > 0 and self.tpot_slo_s is None):
            return INFINITY
        first_due_s = self.arrival_s + self.ttft_slo_s
        if from_first_token:
            first_due_s = min(first_due_s, self.first_token_s)
        return first_due_s + self.produced * (self.tpot_slo_s or 0.0)


@dataclass
class Plan:
    """In which order requests are served, and how far."""

    order: list[Request]
    num_tokens: int
    decode_limit_s: float = INFINITY
    prefill_limit_s: float = INFINITY
    after: Callable[[dict[str, int]], None] | None = None  # called with the tokens of the step
    others: list[Request] = field(default_factory=list)  # they are not served, and preempted first


Planned = tuple[dict[str, int], list[str]]  # tokens by request, in order, and the preempted requests
Rule = Callable[["Engine"], Plan | Planned]


@dataclass(eq=False)
class Chunk:
    """What the plan gives a request; `before` of its tokens are computed."""

    request: Request
    tokens: int
    before: int
    num_blocks: int  # taken from the free ones

    @property
    def part(self) -> Part:
        """Return what the step's duration depends on."""
        return self.tokens, self.before, self.before + self.tokens == self.request.left + self.request.computed


class Engine(vllm_v1.Engine):
    """An engine that plans by a rule, and carries the plan out with the queues and blocks of vLLM v1."""

    running: list[Request]  # type: ignore[assignment]  # all its requests have targets
    waiting: list[Request]  # type: ignore[assignment]

    def __init__(self, settings: EngineSettings, rule: Rule, seconds: Seconds, step_time: StepTime) -> None:
        super().__init__(settings)
        self.rule, self.seconds, self.step_time = rule, seconds, step_time
        self.num_planned = self.num_ended = 0
        self.correction = Correction(rule=CorrectionRule(momentum=settings["estimator_momentum"], window=1))
        # of `weighted_vtc`, by tenant and weight
        self.counters: dict[tuple[str, float], float] = {}
        self.lift = 0.0
        self.clients_waiting: set[tuple[str, float]] = set()
        self.cells = TwoEndedCells(settings["num_gpu_blocks"] - 1, settings["block_size"])
        self.is_shared: bool = settings["kv_layout"] == "bidirectional"
        self.memory: dict[str, int] = {}  # what a rule remembers between steps

    # What rules read.

    def due_s(self, request: Request) -> float:
        """When a request's next token is due."""
        return request.due_s(self.settings["batcher_options"].get("from_first_token", 0) > 0)

    @property
    def requests(self) -> list[Request]:
        """All requests that a step could serve: they do not only wait for their output in flight."""
        running = [one for one in self.running if self.has_work(one)]
        return running + [one for one in self.waiting if not one.stale]

    def has_work(self, request: Request) -> bool:
        """Whether a running request has tokens to compute, and not only its last token in flight."""
        longest = self.settings["max_model_len"] - request.computed - 1
        return min(request.left, longest) > 0 and not self.surely_done(request)

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

    def error(self, number: int) -> float:
        """How much too long a step is estimated without correction."""
        sigma, seed = self.settings["estimator_noise"], self.settings["estimator_seed"]
        return float(self.settings["estimator_factor"] * math.exp(sigma * noise(number, seed)))

    @property
    def belief(self) -> float:
        """How much too long steps are estimated."""
        factor = self.correction.factor if self.settings["estimator_momentum"] > 0 else 1.0
        return factor * self.error(self.num_planned)

    def believed_s(self, parts: list[Part]) -> float:
        """Estimate the time of a step."""
        return self.belief * self.seconds(parts)

    def cost_s(self, request: Request) -> float:
        """Estimate the time that a request adds to a full step."""
        if request.decodes:
            return self.decode_cost_s(request.computed + 1)
        model, count, before = self.step_time, float(request.left), request.computed
        attention_s = model.prefill_token_s * count + model.prefill_qq_s * count * count
        attention_s = attention_s + model.prefill_qkv_s * count * before + model.prefill_kv_s * before
        return self.belief * (self._token_s * count + self._sequence_s + attention_s)

    def decode_cost_s(self, context: float) -> float:
        """Estimate the time that a decode with a context adds to a full step."""
        most = self.settings["max_num_seqs"]
        base_s = self._token_s + self._sequence_s + straight_lines(self.step_time.decode_base, most) / most
        return self.belief * (base_s + straight_lines(self.step_time.decode_slope, most) * context)

    @property
    def _token_s(self) -> float:
        most = self.settings["max_num_batched_tokens"]
        return (self._tokens_s(most) - self._tokens_s(1)) / max(1, most - 1)

    @property
    def _sequence_s(self) -> float:
        most, curve = self.settings["max_num_seqs"], self.step_time.by_sequences
        return (straight_lines(curve, most) - straight_lines(curve, 0)) / most

    @property
    def constant_s(self) -> float:
        """The part of each step that no request causes."""
        constant_s = self.step_time.constant_s + self._tokens_s(1) + straight_lines(self.step_time.by_sequences, 0)
        return self.belief * constant_s

    def _tokens_s(self, count: int) -> float:
        return straight_lines(self.step_time.by_tokens, count) + self.step_time.token_s * count

    # Planning.

    def schedule(self) -> Planned:
        """Plan a step, and carry it out."""
        self.swapped = 0
        plan = self.rule(self)
        if not isinstance(plan, Plan):
            self.num_planned += 1
            return plan
        if self.can_decode_all(plan):
            chunks, victims = [Chunk(one, 1, one.computed, 0) for one in self.running], []
        else:
            chunks, victims = self.choose(plan)
        scheduled, preempted = self.carry_out(chunks, victims)
        if plan.after is not None:
            plan.after(scheduled)
        self.num_planned += 1
        return scheduled, preempted

    def carry_out(self, chunks: list[Chunk], victims: list[Request]) -> Planned:
        """Preempt, serve running requests, and admit."""
        for victim in victims:
            self.running.remove(victim)
            self.preempt(victim)
        scheduled = {}
        for chunk in sorted(chunks, key=lambda chunk: not chunk.request.running):
            if not chunk.request.running and not self.admit(chunk.request, chunk.tokens):
                break
            scheduled[chunk.request.id] = self.give(chunk.request, chunk.tokens)
        return scheduled, [victim.id for victim in victims]

    def can_decode_all(self, plan: Plan) -> bool:
        """Whether nobody can join and a decode of all fits, so that they are served in the order of their admission."""
        has_seat = len(self.running) < self.settings["max_num_seqs"]
        can_join = bool(self.waiting) and has_seat
        if can_join or not all(request.decodes and self.has_work(request) for request in self.running):
            return False
        lacking = sum(self.blocks_for(one.computed + 1) - len(one.blocks) for one in self.running)
        took_s = self.believed_s([(1, one.computed, True) for one in self.running])
        fits = len(self.running) <= plan.num_tokens and lacking <= len(self.pool.free)
        return fits and took_s <= plan.decode_limit_s

    def choose(self, plan: Plan) -> tuple[list[Chunk], list[Request]]:
        """Serve in order until a request gets less than it could take; return the chunks, and whom to preempt."""
        others = len(self.running) + len(self.waiting) > 1
        threshold = self.settings["long_prefill_token_threshold"] if others else 0
        chunks: list[Chunk] = []
        victims: list[Request] = []
        admits = True
        for position, request in enumerate(plan.order):
            budget = plan.num_tokens - sum(chunk.tokens for chunk in chunks)
            if budget == 0:
                break
            num_admitted = sum(not chunk.request.running for chunk in chunks)
            has_seat = len(self.running) + num_admitted < self.settings["max_num_seqs"]
            if request in victims or (not request.running and (not admits or victims or not has_seat)):
                continue
            hits: list[int] = []
            if not request.running and self.settings["enable_prefix_caching"]:
                hits = self.pool.hits(request, self.block_size)
            before = self.known_before(request, hits)
            left = request.left + request.computed - before
            most = min(left, budget, threshold or budget)
            limit_s = plan.decode_limit_s if request.decodes else plan.prefill_limit_s
            count = self.largest_chunk([chunk.part for chunk in chunks], before, left, most, limit_s)
            if count == 0 and chunks:
                break
            count = max(count, 1)
            free = len(self.pool.free) + sum(self.own_blocks(victim) for victim in victims)
            free -= sum(chunk.num_blocks for chunk in chunks)
            if request.running:
                needed = max(0, self.blocks_for(before + count) - len(request.blocks))
                later = plan.order[position + 1 :] + plan.others
                later = [one for one in later if one.running and one not in victims]
                while needed > free and later:
                    victims.append(later.pop())
                    free += self.own_blocks(victims[-1])
                if needed > free:
                    continue
            else:
                needed, must_fit = self.blocks_to_admit(request, hits, before + count)
                kept = self.watermark_blocks if self.running or num_admitted else 0
                admits = must_fit + kept <= free
                if not admits:
                    continue
            chunks.append(Chunk(request, count, before, needed))
            if count < most:
                break
        return chunks, victims

    def own_blocks(self, request: Request) -> int:
        """Return the number of its blocks that no other request holds."""
        return sum(self.pool.refs[block] == 1 for block in request.blocks)

    def largest_chunk(self, parts: list[Part], before: int, left: int, most: int, limit_s: float) -> int:
        """Try all chunks; one of a single token comes last, because it is computed in another way."""
        for count in (most, *range(most - 1, 1, -1), 1):
            if limit_s == INFINITY or self.believed_s([*parts, (count, before, count == left)]) <= limit_s:
                return count
        return 0

    def blocks_to_admit(self, request: Request, hits: list[int], num_tokens: int) -> tuple[int, int]:
        """Return the free blocks that an admission takes, and those that must be there."""
        idle_hits = sum(self.pool.refs[block] == 0 for block in hits)
        needed = self.blocks_for(num_tokens) - len(hits) + idle_hits
        if not self.settings["scheduler_reserve_full_isl"]:
            return needed, needed
        return needed, max(needed, self.blocks_for(request.num_tokens) - len(hits) + idle_hits)

    def admit(self, request: Request, count: int) -> bool:
        """Admit a request with the hits of this moment, if blocks suffice."""
        hits = self.pool.hits(request, self.block_size) if self.settings["enable_prefix_caching"] else []
        computed = self.known_before(request, hits)
        _, must_fit = self.blocks_to_admit(request, hits, min(computed + count, request.num_tokens))
        if must_fit + (self.watermark_blocks if self.running else 0) > len(self.pool.free):
            return False
        self.let_run(request, hits)
        return True

    def give(self, request: Request, count: int) -> int:
        """Put up to this many tokens into the step, with blocks for them."""
        count = min(count, request.left)
        lacking = self.blocks_for(request.computed + count) - len(request.blocks)
        request.blocks = request.blocks + self.pool.take(max(0, lacking))
        self.cache_full_blocks(request, request.computed + count)
        request.computed += count
        request.in_flight += count
        return count

    def known_before(self, request: Request, hits: list[int]) -> int:
        """Return how many tokens need not be computed: they are on the GPU, in host memory, or in the cache."""
        if request.running or self.settings["kv_layout"] != "plain":
            return request.computed
        return len(hits) * self.block_size

    def let_run(self, request: Request, hits: list[int]) -> None:
        """Let a waiting request run."""
        request.computed = self.known_before(request, hits)
        self.swapped += request.computed if self.settings["kv_layout"] != "plain" else 0
        self.waiting.remove(request)
        self.running.append(request)
        self.pool.hold(hits)
        request.running, request.blocks, request.num_cached = True, hits, len(hits)

    def preempt(self, victim: vllm_v1.Request) -> None:
        """Preempt a request; of shared blocks, tokens that are in host memory already are not copied again."""
        computed = victim.computed
        self.swapped += computed - self.cells.checkpointed(victim.id) if self.is_shared else 0
        super().preempt(victim)
        if self.is_shared:
            victim.computed = computed

    def free(self, request: vllm_v1.Request) -> None:
        """Free all its blocks."""
        super().free(request)
        self.cells.remove(request.id)

    @property
    def num_free_blocks(self) -> int:
        """The blocks that no request uses."""
        return self.cells.num_free_blocks if self.is_shared else super().num_free_blocks

    def update(self, scheduled: dict[str, int], sampled: dict[str, vllm_v1.Draft], now_s: float) -> None:
        """Process a finished step, and note first tokens."""
        requests = [self.unfinished[name] for name in sampled if name in self.unfinished]
        super().update(scheduled, sampled, now_s)
        self.correction = self.correction.observe(predicted_s=self.error(self.num_ended), real_s=1.0)
        self.num_ended += 1
        for request in requests:
            assert isinstance(request, Request)
            request.first_token_s = min(request.first_token_s, now_s)


def replay(
    rule: Rule,
    settings: EngineSettings,
    requests: Iterable[Mapping[str, Any]],
    seconds: Seconds,
    step_time: StepTime,
) -> Iterator[Step]:
    """Run an engine with a rule, and yield each step right after its planning; `step_time` is what the rule knows."""
    engine = Engine(settings, rule, seconds, step_time)
    return vllm_v1.run(engine, (Request(**request) for request in requests), seconds)
