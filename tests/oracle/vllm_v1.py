"""vLLM's v1 scheduler (0.28 to 0.33) in plain Python, one step at a time: slow, short, and obviously correct."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from predictor.vllm_versions import rules_for
from tests.oracle.block_pool import BlockPool
from tests.oracle.encoder_cache import EncoderCache, Image
from tests.oracle.engine import EngineSettings, OfferedRequest, Seconds, Step, one_second


@dataclass(eq=False)
class Request(OfferedRequest):
    """A request as the scheduler sees it."""

    num_output: int = 0
    computed: int = 0  # tokens scheduled so far, including those of steps in flight
    placeholders: int = 0  # sampled by a step in flight, not yet known (async)
    in_flight: int = 0  # tokens scheduled by steps in flight
    stale: int = 0  # of these, tokens scheduled before the last preemption
    running: bool = False
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0  # how many of its blocks are in the prefix cache
    adapter: str = ""
    encoder_inputs: list[Image] = field(default_factory=list)
    planned_images: list[int] = field(default_factory=list)  # that the planned step computes
    drafts: int = 0  # tokens proposed for its next step
    in_prefill: bool = False  # its last step was a chunk of its prompt
    num_sampled: int = 0  # steps so far that sample a token
    expected: float = 0.5  # accepted tokens that are due, and drafts
    proposals: float = 0.5

    @property
    def num_tokens(self) -> int:
        """The number of tokens known so far."""
        return self.prompt_tokens + self.num_output

    def block_key(self, index: int) -> Hashable:
        """Return the content of a full block: shared where the prompt has a hash, else this request's own."""
        return self.prefix_hashes[index] if index < len(self.prefix_hashes) else (self.id, index)


class Draft(NamedTuple):
    """The draft tokens that a step verifies for a request; number counts the request's steps that sample, from 1."""

    tokens: int
    number: int
    padded: bool


class Engine:
    """The scheduler's state, with its methods schedule and update."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.now_s = self.start_s = 0.0  # of the clock, and of the step that is planned
        self.is_async: bool = settings["async_scheduling"]
        self.by_priority: bool = settings["scheduling_policy"] == "priority"
        self.rules = rules_for(settings.get("vllm_version", "")).rules  # recorded traces have no version
        self.block_size: int = settings["block_size"]
        self.watermark_blocks = int(settings["watermark"] * settings["num_gpu_blocks"])
        self.pool = BlockPool(settings["num_gpu_blocks"])
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.unfinished: dict[str, Request] = {}
        self.swaps: bool = settings.get("kv_layout") == "swap"  # recorded traces have no layout
        self.swapped = 0  # tokens that the planned step copies to host memory, or back
        self.max_loras: int = settings.get("max_loras", 0)
        self.encoder = EncoderCache(settings.get("encoder_cache_size", 0))
        self.encoder_budget = 0
        self.num_drafts: int = settings.get("num_speculative_tokens", 0)
        method = settings.get("speculative_method", "")
        self.lookahead = self.num_drafts if method in ("draft_model", "eagle", "mtp") else 0
        self.draft_slots = 1 if method == "draft_model" else 0
        self.drops_last_hit = method in ("eagle", "mtp")
        self.prefill_lookahead: int = settings.get("num_prefill_lookahead_tokens", 0)
        self.padded: set[str] = set()  # requests of the planned step that are filled up with draft tokens

    def add(self, request: Request) -> None:
        """Add a request that has just arrived to the queue."""
        self.unfinished[request.id] = request
        self.waiting.append(request)
        self.sort_waiting()

    @property
    def num_free_blocks(self) -> int:
        """The blocks that no request uses."""
        return len(self.pool.free)

    def sort_waiting(self) -> None:
        """With priorities the queue is a heap on these three (Request.__lt__); fcfs keeps its order."""
        if self.by_priority:
            self.waiting.sort(key=lambda request: (request.priority, request.arrival_s, request.id))

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def schedule(self) -> tuple[dict[str, int], list[str]]:
        """Plan one step (Scheduler.schedule): tokens by request, in order, and the preempted requests."""
        self.budget: int = self.settings["max_num_batched_tokens"]
        self.threshold: int = self.settings["long_prefill_token_threshold"]
        num_requests = len(self.running) + len(self.waiting)
        if self.threshold and self.settings.get("long_prefill_token_threshold_adaptive"):
            self.threshold = max(self.threshold, self.budget // num_requests)
        if num_requests <= 1 and self.rules.spares_lone_prefill:
            self.threshold = 0  # no other request that could starve
        self.encoder_budget = self.settings.get("max_num_encoder_input_tokens", 0)
        for request in self.unfinished.values():
            request.planned_images = []
        scheduled: dict[str, int] = {}
        preempted: list[str] = []
        self.swapped = 0
        self.padded = set()
        self.schedule_running(scheduled, preempted)
        if not preempted:
            self.schedule_waiting(scheduled)
        for name, count in scheduled.items():
            request = self.unfinished[name]
            request.computed += count
            request.in_flight += count
        return scheduled, preempted

    def schedule_running(self, scheduled: dict[str, int], preempted: list[str]) -> None:
        """Continue the running requests, oldest admission first, preempting where blocks run out."""
        index = 0
        while index < len(self.running) and self.budget > self.draft_slots:
            request = self.running[index]
            index += 1
            if self.surely_done(request):
                continue
            count = request.num_tokens + request.drafts + request.placeholders - request.computed
            if self.threshold:
                count = min(count, self.threshold)
            room = self.settings["max_model_len"] - request.computed - 1
            count = self.shortened(request, request.computed, min(count, self.budget - self.draft_slots, room))
            count, images, again, encoder_budget = self.images_of(request, request.computed, count)
            if count <= 0:
                continue
            need = self.blocks_with_lookahead(request.computed + count) - len(request.blocks)
            while need > len(self.pool.free):
                victim = self.running[-1]
                if self.by_priority:
                    victim = max(self.running, key=lambda other: (other.priority, other.arrival_s))
                if self.running.index(victim) < index:
                    index -= 1
                self.running.remove(victim)
                if victim.id in scheduled:
                    self.encoder_budget += sum(
                        victim.encoder_inputs[place]["tokens"] for place in victim.planned_images
                    )
                    self.budget += scheduled.pop(victim.id) + self.draft_slots
                self.preempt(victim)
                preempted.append(victim.id)
                if victim is request:
                    if self.by_priority and self.rules.goes_on_after_self_preemption:
                        break
                    return
            if not request.running:
                continue
            request.blocks += self.pool.take(max(need, 0))
            self.cache_full_blocks(request, request.computed + count)
            scheduled[request.id] = count
            self.budget -= count + self.draft_slots
            self.compute_images(request, images, again, encoder_budget)

    def shortened(self, request: Request, computed: int, count: int) -> int:
        """Let a chunk not end shortly before the end of a prompt (_reserve_prefill_lookahead)."""
        rest = request.num_tokens - computed - count
        return count - (self.prefill_lookahead - rest) if 0 < rest < self.prefill_lookahead else count

    def blocks_with_lookahead(self, num_tokens: int) -> int:
        """Return the number of blocks for tokens and for those that a drafter writes after them."""
        return self.blocks_for(min(num_tokens + self.lookahead, self.settings["max_model_len"]))

    def images_of(self, request: Request, computed: int, count: int) -> tuple[int, list[int], list[int], int]:
        """Return how many tokens can be computed, their images to compute, those that repeat one, and the budget left.

        (Scheduler._try_schedule_encoder_inputs)
        """
        budget, images, again = self.encoder_budget, [], []
        end = computed + count
        for place, image in enumerate(request.encoder_inputs):
            start, stop = image["position"], image["position"] + image["tokens"]
            if count <= 0 or stop <= computed or start >= end:
                continue
            whole = self.settings["disable_chunked_mm_input"]
            if whole and computed < start and computed + count < stop:
                return max(0, start - computed), images, again, budget
            if image["identity"] in [request.encoder_inputs[other]["identity"] for other in images]:
                again.append(place)
                continue
            if self.encoder.refer(request.id, place, image):
                continue
            planned = sum(request.encoder_inputs[other]["tokens"] for other in images)
            if image["tokens"] > budget or not self.encoder.make_room(planned + image["tokens"]):
                return max(0, start - computed), images, again, budget
            images.append(place)
            budget -= image["tokens"]
        return count, images, again, budget

    def compute_images(self, request: Request, images: list[int], again: list[int], budget: int) -> None:
        """Compute images in the planned step."""
        for place in images:
            self.encoder.add(request.id, place, request.encoder_inputs[place])
        for place in again:
            self.encoder.refer(request.id, place, request.encoder_inputs[place])
        if images:
            self.encoder_budget = budget
            request.planned_images = images

    def release_images(self, request: Request, computed: int | None = None) -> None:
        """Let a request refer to no image any more, or to those only that are not computed."""
        places = [
            place
            for place in sorted(self.encoder.inputs.get(request.id, ()))
            if computed is None
            or request.encoder_inputs[place]["position"] + request.encoder_inputs[place]["tokens"] <= computed
        ]
        self.encoder.release(request.id, request.encoder_inputs, places)

    def surely_done(self, request: Request) -> bool:
        """Whether the steps in flight will produce its last token (async)."""
        last = request.prompt_tokens + request.max_tokens
        return request.placeholders > 0 and request.computed + 2 - request.placeholders >= last

    def preempt(self, victim: Request) -> None:
        """Drop everything computed (Scheduler._preempt_request), or copy it; the output is kept."""
        self.free(victim)
        victim.running = False
        if self.swaps:
            self.swapped += victim.computed
        else:
            victim.computed = 0
        victim.placeholders = victim.drafts = 0
        victim.stale = victim.in_flight
        self.waiting.insert(0, victim)
        self.sort_waiting()

    def free(self, request: Request) -> None:
        """Free all its blocks."""
        self.release_images(request)
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_cached = 0

    def schedule_waiting(self, scheduled: dict[str, int]) -> None:
        """Admit from the head of the queue until something does not fit; a request is passed over for its adapter."""
        adapters = {self.unfinished[name].adapter for name in scheduled} - {""}
        runs = bool(scheduled)
        pads = self.num_drafts > 0 and not any(self.unfinished[name].in_prefill for name in scheduled)
        for request in list(self.waiting):
            if self.budget <= self.draft_slots or len(self.running) >= self.settings["max_num_seqs"]:
                return
            if request.stale:
                continue  # its output from before the preemption is still in flight
            if request.adapter and request.adapter not in adapters and len(adapters) == self.max_loras > 0:
                continue
            hits = self.pool.hits(request, self.block_size) if self.settings["enable_prefix_caching"] else []
            if self.drops_last_hit:
                hits = hits[:-1]
            computed = request.computed if self.swaps else len(hits) * self.block_size
            fits_model = computed + 2 + self.num_drafts <= self.settings["max_model_len"]
            is_padded = pads and request.num_tokens - computed == 1 and (runs or computed > 0) and fits_model
            count = self.tokens_to_admit(request, computed, self.num_drafts if is_padded else 0)
            if count <= 0:
                return
            count, images, again, encoder_budget = self.images_of(request, computed, count)
            if count <= 0:
                return
            need = self.blocks_with_lookahead(computed + count) - len(hits)
            must_fit = need
            if self.settings["scheduler_reserve_full_isl"]:
                must_fit = max(must_fit, self.blocks_for(request.num_tokens) - len(hits))
            idle_hits = sum(self.pool.refs[block] == 0 for block in hits)
            kept_free = self.watermark_blocks if self.running else 0
            if must_fit + idle_hits + kept_free > len(self.pool.free):
                self.release_images(request)
                return
            self.pool.hold(hits)
            request.blocks = hits + self.pool.take(need)
            request.num_cached = len(hits)
            request.computed = computed
            request.running = True
            self.swapped += computed if self.swaps else 0
            self.cache_full_blocks(request, computed + count)
            self.waiting.remove(request)
            self.running.append(request)
            if is_padded:
                request.drafts = self.num_drafts
                self.padded.add(request.id)
            scheduled[request.id] = count
            self.budget -= count + self.draft_slots
            self.compute_images(request, images, again, encoder_budget)
            if request.adapter:
                adapters.add(request.adapter)

    def tokens_to_admit(self, request: Request, computed: int, padding: int) -> int:
        """Return the tokens of a waiting request in this step; 0 or less where it has to wait."""
        count, budget = request.num_tokens - computed + padding, self.budget - self.draft_slots
        if padding and count > budget:
            return 0
        if self.threshold:
            count = min(count, self.threshold)
        if count > budget and not self.settings["enable_chunked_prefill"]:
            return 0
        return self.shortened(request, computed, min(count, budget))

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Put blocks full of known tokens into the prefix cache, as soon as they are scheduled (allocate_slots)."""
        if not self.settings["enable_prefix_caching"]:
            return
        kept_back = max(0, self.prefill_lookahead - 1)  # these tokens may be computed again
        num_full = max(0, min(num_tokens, request.num_tokens) - kept_back) // self.block_size
        for index in range(request.num_cached, num_full):
            self.pool.cache(request.blocks[index], request.block_key(index))
        request.num_cached = max(request.num_cached, num_full)

    def samples(self, scheduled: dict[str, int]) -> dict[str, Draft]:
        """Return the requests that the planned step samples, and count placeholders (AsyncScheduler._update_after_schedule)."""
        sampled = {}
        for name in scheduled:
            request = self.unfinished[name]
            drafts = max(0, min(request.drafts, request.computed - request.num_tokens - request.placeholders))
            request.drafts = 0
            request.in_prefill = request.computed < request.num_tokens + request.placeholders
            if request.in_prefill:
                continue
            request.num_sampled += 1
            sampled[name] = Draft(drafts, request.num_sampled, name in self.padded)
            if self.is_async:
                request.placeholders += 1 + drafts
                request.drafts = self.num_drafts
        return sampled

    def accepted(self, request: Request, draft: Draft) -> int:
        """Return how many draft tokens are accepted: the whole ones of all that were expected so far."""
        if draft.padded:
            return 0
        acceptance = self.settings["speculative_acceptance"]
        request.expected += sum(acceptance**position for position in range(1, draft.tokens + 1))
        count = int(request.expected)
        request.expected -= count
        return count

    def proposed(self, request: Request, draft: Draft) -> int:
        """Return how many draft tokens are proposed for a request's next step."""
        del draft
        request.proposals += self.settings["speculative_proposals"] if not self.lookahead else 1
        if request.proposals < 1:
            return 0
        request.proposals -= 1
        return self.num_drafts

    def update(self, scheduled: dict[str, int], sampled: dict[str, Draft], now_s: float) -> None:
        """Process a step that ends now (Scheduler.update_from_output)."""
        for name, count in scheduled.items():
            request = self.unfinished.get(name)
            if request is None:
                continue  # ended while this step was in flight
            request.in_flight -= count
            is_stale = request.stale > 0
            if is_stale:
                request.stale -= count
            self.release_images(request, request.computed - request.placeholders)
            if name not in sampled:
                continue
            self.take_output(request, sampled[name], is_stale=is_stale, now_s=now_s)
            if self.is_async and request.running:
                self.cache_full_blocks(request, request.computed - request.placeholders)
            if self.is_finished(request):
                self.free(request)
                del self.unfinished[name]
            elif self.num_drafts > 0 and not self.is_async:
                request.drafts = self.proposed(request, sampled[name])
        self.running = [request for request in self.running if request.id in self.unfinished]
        self.waiting = [request for request in self.waiting if request.id in self.unfinished]

    def take_output(self, request: Request, draft: Draft, *, is_stale: bool, now_s: float) -> None:
        """Add the accepted draft tokens and one more, up to the end; the others were not computed after all."""
        accepted = self.accepted(request, draft) if draft.tokens else 0
        if not is_stale:
            request.computed -= draft.tokens - accepted
            if request.placeholders > 0:
                request.placeholders -= draft.tokens - accepted
        for _ in range(1 + accepted):
            request.num_output += 1
            request.token_s.append(now_s)
            if self.is_async and not is_stale:
                request.placeholders -= 1
            if self.is_finished(request):
                break

    def is_finished(self, request: Request) -> bool:
        """Whether it has ended by itself or at a limit (check_stop)."""
        last = min(request.output_tokens, request.max_tokens)
        return request.num_output >= last or request.num_tokens >= self.settings["max_model_len"]


def replay_steps(
    settings: EngineSettings, requests: Iterable[Mapping[str, Any]], seconds: Seconds = one_second
) -> Iterator[Step]:
    """Run an engine whose steps take a second by default, and yield each step right after its planning.

    Endless where vLLM is: with priorities, two requests with equal priority and arrival can preempt each other forever.
    """
    return run(Engine(settings), (Request(**request) for request in requests), seconds)


def run(engine: Engine, requests: Iterable[Request], seconds: Seconds) -> Iterator[Step]:
    """Serve requests, and yield each step right after its planning."""
    arrivals = deque(sorted(requests, key=lambda request: request.arrival_s))
    depth = 2 if engine.is_async else 1  # EngineCore.step_with_batch_queue, EngineCore.step
    under_way: deque[tuple[dict[str, int], dict[str, Draft], float]] = deque()
    num_steps = 0
    now_s = last_end_s = 0.0
    while True:
        while arrivals and arrivals[0].arrival_s <= now_s:
            engine.add(arrivals.popleft())
        if len(under_way) < depth and engine.unfinished:
            engine.start_s = max(now_s, last_end_s)
            scheduled, preempted = engine.schedule()
            sampled = engine.samples(scheduled)
            last_end_s = engine.start_s + seconds(
                [
                    (count, engine.unfinished[name].computed - count, name in sampled)
                    for name, count in scheduled.items()
                ]
            )
            if engine.swapped > 0:
                token_s = engine.settings["kv_bytes_per_token"] / engine.settings["host_link_bytes_per_s"]
                last_end_s = max(last_end_s, engine.start_s + engine.swapped * token_s)
            under_way.append((scheduled, sampled, last_end_s))
            yield {
                "step": num_steps,
                "start_s": engine.start_s,
                "end_s": last_end_s,
                "scheduled": scheduled,
                "running": [request.id for request in engine.running],
                "waiting": [request.id for request in engine.waiting],
                "free_blocks": engine.num_free_blocks,
                "preempted": preempted,
                **({"drafts": {n: d.tokens for n, d in sampled.items() if d.tokens}} if engine.num_drafts else {}),
            }
            num_steps += 1
            assert preempted or any(step[0] for step in under_way), "a request that can never run"
        elif under_way:
            scheduled, sampled, end_s = under_way.popleft()
            engine.now_s = now_s = max(now_s, end_s)
            engine.update(scheduled, sampled, now_s)
        elif arrivals:
            now_s = max(now_s, arrivals[0].arrival_s)
        else:
            return
