"""A plain engine for the local schedulers that plan one step at a time, with lists and numbers only.

A local scheduler is a function that reads the queues and calls `admit`, `go_on` and `preempt`; `replay` does the
rest. Blocks are only counted, because none of these schedulers caches prefixes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

EngineSettings = Mapping[str, Any]
Step = dict[str, Any]
Part = tuple[int, int, bool]  # what one request has in a step: its tokens, its context before them, whether it samples
Seconds = Callable[[list[Part]], float]


@dataclass(eq=False)
class OfferedRequest:
    """A request as a load has it, with the real length of its response, and when its tokens came."""

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int = 0
    prefix_hashes: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)  # when each token of its response came


@dataclass(eq=False)
class Request(OfferedRequest):
    """A request and its progress."""

    num_output: int = 0
    computed: int = 0
    prefill_tokens: int = 0  # tokens to compute as of its last admission
    num_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """The tokens known so far: a preempted request's output is a part of its prompt."""
        return self.prompt_tokens + self.num_output

    @property
    def is_decoding(self) -> bool:
        """Whether its prefill is finished."""
        return self.computed >= self.prefill_tokens


@dataclass(eq=False)
class Engine:
    """The queues, the number of free blocks, and the step being planned."""

    settings: EngineSettings
    sorts_arrivals: bool
    free_blocks: int = 0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    scheduled: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Initialise it with all blocks free."""
        self.free_blocks = self.settings["num_gpu_blocks"]

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admissions leave free."""
        return int(self.settings["watermark"] * self.settings["num_gpu_blocks"])

    @property
    def has_seat(self) -> bool:
        """Whether one more request may run."""
        return len(self.running) < self.settings["max_num_seqs"]

    @property
    def budget(self) -> int:
        """The tokens that still fit into the planned step."""
        return int(self.settings["max_num_batched_tokens"]) - sum(self.scheduled.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.settings["block_size"])

    def final_tokens(self, request: Request) -> int:
        """Return the response's length: its own end, the client's limit, or the model's limit."""
        room = self.settings["max_model_len"] - request.prompt_tokens
        return int(min(request.output_tokens, request.max_tokens, room))

    def arrive(self, request: Request) -> None:
        """Add a request at the end of the queue, or in the order of priorities."""
        self.waiting.append(request)
        self.sort_waiting()

    def sort_waiting(self) -> None:
        """Sort the queue by priority, then arrival, then id, where configured."""
        if self.sorts_arrivals and self.settings["scheduling_policy"] == "priority":
            self.waiting.sort(key=lambda request: (request.priority, request.arrival_s, request.id))

    def admit(self, request: Request, num_tokens: int, room_for: int) -> None:
        """Admit a waiting request: `num_tokens` tokens in this step, and blocks for `room_for`."""
        self.waiting.remove(request)
        self.running.append(request)
        request.prefill_tokens = request.num_tokens
        self.go_on(request, num_tokens, room_for)

    def go_on(self, request: Request, num_tokens: int, room_for: int) -> None:
        """Schedule tokens of a running request, and allocate missing blocks for `room_for` tokens."""
        assert request.id not in self.scheduled
        lacking = max(0, self.blocks_for(room_for) - request.num_blocks)
        assert lacking <= self.free_blocks
        self.free_blocks -= lacking
        request.num_blocks += lacking
        self.scheduled[request.id] = num_tokens

    def preempt(self, victim: Request) -> None:
        """Free a running request's blocks; it keeps its output, and moves to the front of the queue."""
        assert victim.id not in self.scheduled
        self.free(victim)
        victim.computed = 0
        self.running.remove(victim)
        self.waiting.insert(0, victim)
        self.sort_waiting()
        self.preempted.append(victim.id)

    def free(self, request: Request) -> None:
        """Free all its blocks."""
        self.free_blocks += request.num_blocks
        request.num_blocks = 0

    def parts(self) -> list[Part]:
        """Return the planned step's parts, on which its duration depends."""
        parts = []
        for request in self.running:
            if request.id in self.scheduled:
                count = self.scheduled[request.id]
                parts.append((count, request.computed, request.computed + count == request.num_tokens))
        return parts

    def update(self, now_s: float) -> None:
        """Process the step that ends now: a request that has computed all its tokens gets one more."""
        for request in list(self.running):
            request.computed += self.scheduled.get(request.id, 0)
            if request.id in self.scheduled and request.computed == request.num_tokens:
                request.num_output += 1
                request.token_s.append(now_s)
                if request.num_output == self.final_tokens(request):
                    self.free(request)
                    self.running.remove(request)


def one_second(parts: list[Part]) -> float:
    """Return one second for every step."""
    del parts
    return 1.0


def decode_all(engine: Engine, *, spare_blocks: int = 0) -> None:
    """Schedule a token of each decoding request; where blocks are short, the last running request is preempted."""
    for request in list(engine.running):
        if request not in engine.running or not request.is_decoding:
            continue
        lacking = engine.blocks_for(request.num_tokens) - request.num_blocks
        while engine.free_blocks < max(lacking, spare_blocks):
            victim = engine.running[-1]
            engine.preempt(victim)
            if victim is request:
                return
        engine.go_on(request, 1, request.num_tokens)


def replay(
    schedule: Callable[[Engine], None],
    settings: EngineSettings,
    requests: Iterable[Mapping[str, Any]],
    *,
    seconds: Seconds = one_second,
    sorts_arrivals: bool = True,
) -> Iterator[Step]:
    """Run an engine with a local scheduler, and yield each step right after its planning."""
    engine = Engine(settings, sorts_arrivals)
    arrivals = deque(sorted((Request(**request) for request in requests), key=lambda request: request.arrival_s))
    now_s, num_steps = 0.0, 0
    while arrivals or engine.running or engine.waiting:
        while arrivals and arrivals[0].arrival_s <= now_s:
            engine.arrive(arrivals.popleft())
        engine.scheduled, engine.preempted = {}, []
        schedule(engine)
        if not engine.scheduled and not engine.preempted:  # no request, or none that fits
            if not arrivals:
                return
            now_s = arrivals[0].arrival_s
            continue
        end_s = now_s + seconds(engine.parts())
        yield {
            "step": num_steps,
            "start_s": now_s,
            "end_s": end_s,
            "scheduled": engine.scheduled,
            "running": [request.id for request in engine.running],
            "waiting": [request.id for request in engine.waiting],
            "free_blocks": engine.free_blocks,
            "preempted": engine.preempted,
        }
        num_steps += 1
        now_s = end_s
        engine.update(now_s)
