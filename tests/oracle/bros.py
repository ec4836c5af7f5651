"""BROS's Algorithm 1 and its round robin in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracle.engine import Part
from tests.oracle.ordered import INFINITY, Engine, Plan, Planned, Request

REAL_TIME = "real-time"


def round_robin(engine: Engine) -> Plan | Planned:
    """One class in a step, then the other, each in order of arrival."""
    by_arrival = engine.ordered(lambda one: (one.arrival_s,))
    most_tokens = engine.settings["max_num_batched_tokens"]
    classes = [[one for one in by_arrival if is_real_time(one) == wanted] for wanted in (True, False)]
    if not all(classes):
        return Plan(by_arrival, most_tokens)
    turn = engine.memory.get("turn", 0)
    chunks, victims = engine.choose(Plan(classes[turn], most_tokens, others=classes[1 - turn]))
    if not chunks and not victims:
        turn = 1 - turn
        chunks, victims = engine.choose(Plan(classes[turn], most_tokens, others=classes[1 - turn]))
    engine.memory["turn"] = 1 - turn
    return engine.carry_out(chunks, victims)


@dataclass(frozen=True, slots=True)
class ServedPart:
    """A request's part of the step."""

    request: Request
    part: Part


class BrosStep:
    """Plans one step by Algorithm 1."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.most = engine.settings["max_num_seqs"]
        self.base = min(int(engine.option("base_batch_size")), self.most)
        self.size = min(engine.memory.get("batch_size", self.base), self.most)
        self.limit_s = time_limit_s(engine)
        self.served: list[ServedPart] = []
        self.preempted: list[str] = []

    def plan(self) -> Planned:
        """Serve real-time requests by the time left, then best effort."""
        engine = self.engine
        engine.memory["batch_size"] = 2 * self.size
        all_decode = engine.can_decode_all(Plan([], engine.settings["max_num_batched_tokens"], self.limit_s))
        if not engine.is_shared and not engine.waiting and len(engine.running) <= self.size and all_decode:
            for request in engine.running:
                self.give(request)
            return self.finished()
        urgent = [one for one in engine.ordered(lambda one: (left_s(engine, one),)) if is_real_time(one)]
        others = [one for one in engine.ordered(lambda _: ()) if not is_real_time(one)]
        for place, request in enumerate(urgent):
            if len(self.served) == self.size:
                break
            if not self.fits_in_tokens(request):
                continue
            if self.served and not self.fits_in_time(self.served, request):
                engine.memory["batch_size"] = self.base
                break
            if self.take(request, urgent[place + 1 :], others):
                self.give(request)
        self.add_best_effort()
        return self.finished()

    def add_best_effort(self) -> None:
        """Add or replace until neither can be done."""
        engine = self.engine
        num_real_time = len(self.served)
        admits = True
        order = [one for one in engine.ordered(lambda one: (in_host_memory(engine, one),)) if not is_real_time(one)]
        for place, request in enumerate(order):
            was_running = request.running
            can_join = admits and not self.preempted and len(engine.running) < self.most
            if not (was_running or can_join) or not self.fits_in_tokens(request):
                continue
            is_full = len(self.served) >= self.size
            replaces = bool(self.served) and (is_full or not self.fits_in_time(self.served, request))
            if replaces:
                if num_real_time < 2 or not self.can_wait(self.served[num_real_time - 1].request):
                    return
                without = self.served[: num_real_time - 1] + self.served[num_real_time:]
                if len(without) >= self.size or not self.fits_in_time(without, request):
                    return
            if not self.take(request, order[place + 1 :], []):
                admits = admits and was_running
                continue
            if replaces:
                num_real_time -= 1
                replaced = self.served.pop(num_real_time).request
            self.give(request)
            if replaces and engine.is_shared:
                engine.cells.take_back_left(replaced.id)

    def can_wait(self, request: Request) -> bool:
        """Whether a real-time request decodes, and is on time in the step after this one."""
        needed_s = self.engine.cost_s(request) + self.engine.constant_s
        return request.decodes and left_s(self.engine, request) - self.limit_s >= needed_s

    def before_and_chunk(self, request: Request) -> tuple[int, int]:
        """Return the tokens that need not be computed, and those of this step."""
        settings = self.engine.settings
        before = self.engine.known_before(request, hits_of(self.engine, request))
        chunk = min(request.num_tokens - before, settings["max_num_batched_tokens"])
        threshold = settings["long_prefill_token_threshold"]
        return before, min(chunk, threshold) if threshold and len(self.engine.requests) > 1 else chunk

    def fits_in_tokens(self, request: Request) -> bool:
        """Whether the step has tokens left."""
        total = sum(one.part[0] for one in self.served) + self.before_and_chunk(request)[1]
        return bool(total <= self.engine.settings["max_num_batched_tokens"])

    def fits_in_time(self, served: list[ServedPart], request: Request) -> bool:
        """Whether the step with these parts and a request, and the copies for both, end in time."""
        engine = self.engine
        before, chunk = self.before_and_chunk(request)
        parts = [*(one.part for one in served), (chunk, before, before + chunk == request.num_tokens)]
        token_s = engine.settings["kv_bytes_per_token"] / engine.settings["host_link_bytes_per_s"]
        copied_s = (engine.swapped + in_host_memory(engine, request)) * token_s
        return self.limit_s == INFINITY or (engine.believed_s(parts) <= self.limit_s and copied_s <= self.limit_s)

    def take(self, request: Request, later: list[Request], others: list[Request]) -> bool:
        """Make room for a request; `others` are of best effort, for a real-time request."""
        engine = self.engine
        num_tokens = sum(self.before_and_chunk(request))
        victims = [one for one in others if one.running]
        if request.running:
            victims = [one for one in later if one.running] + ([] if engine.is_shared else victims)
            while not has_room(engine, request, num_tokens):
                if not victims:
                    return False
                self.preempt(victims.pop())
            return True
        num_more = 0 if engine.is_shared else sum(len(one.blocks) for one in victims)
        has_seat = len(engine.running) - len(victims) < self.most
        if not has_seat or not can_admit(engine, request, num_tokens, num_more):
            return False
        while len(engine.running) == self.most or not can_admit(engine, request, num_tokens, 0):
            if not victims:
                return False
            self.preempt(victims.pop())
        return True

    def preempt(self, victim: Request) -> None:
        """Preempt a running request that is not in the step."""
        self.engine.running.remove(victim)
        self.engine.preempt(victim)
        self.preempted.append(victim.id)

    def give(self, request: Request) -> None:
        """Admit a request that waits, and place its tokens."""
        engine = self.engine
        before, chunk = self.before_and_chunk(request)
        if not request.running:
            engine.let_run(request, hits_of(engine, request))
        if engine.is_shared:
            sides = [(block, end) for end in ("left", "right") for block in engine.cells.of(request.id, end)]
            new = before + chunk - sum(block.tokens[end] for block, end in sides)
            place = engine.cells.place_left if is_real_time(request) else engine.cells.place_right
            engine.swapped += place(request.id, new)
        else:
            lacking = engine.blocks_for(before + chunk) - len(request.blocks)
            request.blocks = request.blocks + engine.pool.take(max(0, lacking))
        self.served.append(ServedPart(request, (chunk, before, before + chunk == request.num_tokens)))

    def finished(self) -> Planned:
        """Count the step's tokens as computed."""
        for one in self.served:
            request, count = one.request, one.part[0]
            if not self.engine.is_shared:
                self.engine.cache_full_blocks(request, request.computed + count)
            request.computed += count
            request.in_flight += count
        return {one.request.id: one.part[0] for one in self.served}, self.preempted


def bros(engine: Engine) -> Planned:
    """BROS's Algorithm 1."""
    return BrosStep(engine).plan()


def is_real_time(request: Request) -> bool:
    """Whether it is of this class, which is the default."""
    return request.request_class in ("", REAL_TIME)


def left_s(engine: Engine, request: Request) -> float:
    """Return the time left until the next token is due, at most the target for it."""
    target = request.ttft_slo_s if request.num_output == 0 else request.tpot_slo_s
    return min(request.due_s(False) - engine.now_s, INFINITY if target is None else target)


def time_limit_s(engine: Engine) -> float:
    """Return the least time left of deadlines that can be met."""
    limit_s = INFINITY
    for request in engine.requests:
        if not is_real_time(request):
            continue
        time_left_s = left_s(engine, request)
        if time_left_s < engine.constant_s + engine.cost_s(request):  # late
            if request.num_output == 0 or request.tpot_slo_s is None:
                continue
            time_left_s = request.tpot_slo_s
        limit_s = min(limit_s, time_left_s)
    shortest_s = engine.shortest_tpot_s
    return limit_s if shortest_s == INFINITY else max(limit_s, engine.option("eta") * shortest_s)


def in_host_memory(engine: Engine, request: Request) -> int:
    """Return the tokens that come back when it is served."""
    return engine.cells.checkpointed(request.id) if request.running else request.computed


def has_room(engine: Engine, request: Request, num_tokens: int) -> bool:
    """Whether a running request has blocks for so many tokens."""
    if not engine.is_shared:
        return engine.blocks_for(num_tokens) - len(request.blocks) <= len(engine.pool.free)
    if is_real_time(request):
        return engine.cells.room_left(request.id) >= num_tokens - request.computed
    return engine.cells.room_right(request.id) >= num_tokens - request.computed + in_host_memory(engine, request)


def can_admit(engine: Engine, request: Request, num_tokens: int, num_more: int) -> bool:
    """Whether a waiting request fits, with so many more free blocks."""
    if engine.is_shared:
        cells = engine.cells
        return (cells.room_left if is_real_time(request) else cells.room_right)(request.id) >= num_tokens
    if engine.settings["scheduler_reserve_full_isl"]:
        num_tokens = max(num_tokens, request.num_tokens)
    hits = hits_of(engine, request)
    needed = engine.blocks_for(num_tokens) - len(hits) + sum(engine.pool.refs[block] == 0 for block in hits)
    kept = int(engine.settings["watermark"] * engine.settings["num_gpu_blocks"]) if engine.running else 0
    return needed + kept <= len(engine.pool.free) + num_more


def hits_of(engine: Engine, request: Request) -> list[int]:
    """Return the cached blocks of a waiting request."""
    if request.running or not engine.settings["enable_prefix_caching"]:
        return []
    return engine.pool.hits(request, engine.block_size)
