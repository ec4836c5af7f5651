"""SGLang 0.5.23's scheduler in plain Python, one batch at a time, written from its rules.

Names follow `managers/scheduler.py`, `schedule_policy.py` and `schedule_batch.py`. The prefix cache is a set of pages:
which of several equally old pages is evicted first is not SGLang's, which evicts whole nodes of its tree.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.oracle.engine import EngineSettings, OfferedRequest, Part, Seconds, Step, one_second

CHECK_THRESHOLD = DEPRIORITIZE_THRESHOLD = 32
PREFIX_MATCH_MAX = 128


class OutOfPagesError(Exception):
    """SGLang fails here: a chunked prompt must go on, and decodes in mixed batches have taken its pages."""


@dataclass(eq=False)
class Request(OfferedRequest):
    """A request as the scheduler sees it."""

    output: int = 0
    prefix_len: int = 0  # tokens whose KV exists, in flight or not
    extend_end: int = 0
    keys: list[Hashable] = field(default_factory=list)  # its pages in the tree
    private: int = 0  # its other pages
    finished: bool = False
    retracted: bool = False

    @property
    def fill(self) -> int:
        """Prompt and known output: what a prefill has to cover."""
        return self.prompt_tokens + self.output

    def key(self, index: int) -> Hashable:
        """Return the content of a full page: shared where the prompt has a hash, else this request's own."""
        return self.prefix_hashes[index] if index < len(self.prefix_hashes) else (self.id, index)


class Pool:
    """Pages: free ones, those in the tree (with the number of requests that lock them), and private ones."""

    def __init__(self, num_pages: int, *, disabled: bool) -> None:
        self.free = num_pages
        self.locks: dict[Hashable, int] = {}
        self.evictable: OrderedDict[Hashable, None] = OrderedDict()
        self.disabled = disabled

    @property
    def available(self) -> int:
        """Pages that are free, or can be evicted."""
        return self.free + len(self.evictable)

    def evict(self, num_pages: int) -> None:
        """Evict cached pages until so many are free, or none is left to evict."""
        while self.free < num_pages and self.evictable:
            key, _ = self.evictable.popitem(last=False)
            del self.locks[key]
            self.free += 1

    def alloc(self, request: Request, num_pages: int) -> None:
        """Give pages to a request."""
        self.evict(num_pages)
        if self.free < num_pages:
            raise OutOfPagesError
        self.free -= num_pages
        request.private += num_pages

    def match(self, request: Request, num_pages: int) -> list[Hashable]:
        """Return the cached prefix, at most so many pages."""
        keys: list[Hashable] = []
        while len(keys) < num_pages and request.key(len(keys)) in self.locks:
            keys.append(request.key(len(keys)))
        return keys

    def lock(self, keys: Iterable[Hashable]) -> None:
        """Lock pages of the tree."""
        for key in keys:
            self.locks[key] += 1
            self.evictable.pop(key, None)

    def checkpoint(self, request: Request, num_pages: int) -> None:
        """Insert a request's pages into the tree, and free those whose content is there already."""
        if self.disabled:
            return
        for index in range(len(request.keys), num_pages):
            key = request.key(index)
            if key in self.locks:
                self.free += 1
            else:
                self.locks[key] = 0
            request.private -= 1
            request.keys.append(key)
            self.lock([key])

    def release(self, request: Request) -> None:
        """Unlock a request's pages, and free the private ones."""
        for key in reversed(request.keys):
            self.locks[key] -= 1
            if self.locks[key] == 0:
                self.evictable[key] = None
        self.free += request.private
        request.keys, request.private = [], 0


@dataclass(eq=False)
class Batch:
    """What one forward computes."""

    parts: list[tuple[Request, int]]  # requests and their tokens
    is_extend: bool = False
    decoding: list[Request] = field(default_factory=list)  # in a mixed batch
    chunked: Request | None = None
    end_s: float = 0.0


class Scheduler:
    """The queues and one plan after the other."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.options = settings["batcher_options"]
        self.page = settings["block_size"]
        self.pool = Pool(settings["num_gpu_blocks"], disabled=not settings["enable_prefix_caching"])
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.is_full = False
        self.chunked: Request | None = None
        self.in_flight: deque[Batch] = deque()
        self.retracted: list[str] = []
        self.first_ratio = min(self.options["init_new_token_ratio"] * self.options["schedule_conservativeness"], 1.0)
        self.least_ratio = min(self.first_ratio * self.options["min_new_token_ratio_factor"], 1.0)
        self.ratio = self.first_ratio

    # get_next_batch_to_run

    def plan(self, last: Batch | None) -> Batch | None:
        """Return the next batch: a prefill, or else a decode."""
        self.retracted = []
        if self.chunked is not None:
            self.pool.checkpoint(self.chunked, self.chunked.extend_end // self.page)
        if last is not None and last.is_extend:
            everyone = [request for request, _ in last.parts]
            stay = [request for request in everyone if request is not last.chunked and not request.finished]
            if len(stay) < len(everyone):
                self.is_full = False
            if stay:
                if not self.running:
                    self.is_full = False
                self.running = self.running + stay
        stay = [request for request in self.running if not request.finished]
        if len(stay) < len(self.running):
            self.is_full = False
        self.running = stay
        return self.new_batch_prefill() or self.update_running_batch()

    # _get_new_batch_prefill_raw, PrefillAdder

    def new_batch_prefill(self) -> Batch | None:
        """Admit from the queue within the budgets."""
        if not self.running:
            self.is_full = False
        if (self.is_full or not self.waiting) and self.chunked is None:
            return None
        if len(self.running) >= self.settings["max_num_seqs"] and self.chunked is None:
            self.is_full = True
            return None
        self.calc_priority()
        self.begin_prefill()
        chunked = None
        if self.chunked is not None and self.add_chunked(self.chunked):
            chunked = self.chunked
        chunked = self.admit() or chunked
        if not self.can_run:
            return None
        for request, tokens in self.can_run:
            self.extend(request, tokens)
        self.chunked = chunked
        batch = Batch(parts=list(self.can_run), is_extend=True, chunked=chunked)
        if self.mixes and self.running:
            self.mix(batch)
        return batch

    @property
    def mixes(self) -> bool:
        """Whether decodes go with chunks."""
        return bool(self.settings["enable_chunked_prefill"] and self.options["mixed_chunk"])

    def begin_prefill(self) -> None:
        """Set the budgets of a prefill (`PrefillAdder.__init__`)."""
        chunking = self.settings["enable_chunked_prefill"]
        num_mixed = len(self.running) if self.mixes else 0
        limit = self.options["max_prefill_tokens"] if chunking else self.settings["max_num_batched_tokens"]
        self.rem_input = int(limit) - num_mixed
        self.rem_chunk = self.settings["max_num_batched_tokens"] - num_mixed if chunking else None
        self.current_offset = num_mixed
        self.total_offset = num_mixed + sum(
            min(request.max_tokens - request.output, self.clip) * self.ratio for request in self.running
        )
        self.can_run: list[tuple[Request, int]] = []

    def admit(self) -> Request | None:
        """Add requests from the head of the queue; return the one whose prompt is cut, if any."""
        chunked = None
        while self.waiting and self.budget_state() != "other":
            if len(self.can_run) >= self.settings["max_num_seqs"] - len(self.running):
                self.is_full = True
            if self.is_full:
                break
            request = self.waiting[0]
            result, truncated = self.add_one(request)
            if truncated:
                chunked = request
            if self.can_run and self.can_run[-1][0] is request:
                self.waiting.pop(0)
            if result == "no token":
                self.is_full = bool(self.can_run or self.running)
            if result != "continue":
                break
        return chunked

    @property
    def clip(self) -> int:
        """The estimate of a response's length is clipped."""
        return int(self.options["clip_max_new_tokens"])

    @property
    def rem_total(self) -> float:
        """Tokens that are neither held nor reserved."""
        return self.pool.available * self.page - self.total_offset

    def ceil(self, tokens: int) -> int:
        """Round up to whole pages."""
        return -(-tokens // self.page) * self.page

    def budget_state(self) -> str:
        """Say whether more requests can be added."""
        if not (self.rem_total > 0 and self.pool.available * self.page - self.current_offset > 0):
            return "no token"
        if self.rem_input <= 0 or (self.rem_chunk is not None and self.rem_chunk <= 0):
            return "other"
        return "continue"

    def charge(self, request: Request, tokens: int, reserve: int) -> None:
        """Add a request to the batch and charge the budgets."""
        self.can_run.append((request, tokens))
        paged = self.ceil(tokens)
        self.total_offset += paged + self.page + reserve
        self.current_offset += paged + self.page
        self.rem_input -= paged
        if self.rem_chunk is not None:
            self.rem_chunk -= paged

    def add_chunked(self, request: Request) -> bool:
        """Continue the chunked prompt; return whether some of it is left."""
        assert self.rem_chunk is not None
        limit = min(self.rem_chunk, int(self.rem_total))
        if limit <= 0:
            limit = max(1, self.rem_chunk)
        left = request.fill - request.prefix_len
        tokens = min(left, limit)
        self.charge(request, tokens, min(request.max_tokens, self.clip) if tokens == left else 0)
        return tokens < left

    def add_one(self, request: Request) -> tuple[str, bool]:
        """Add a waiting request, or the first chunk of it, if it fits; its cached prefix is locked from then on."""
        keys = self.pool.match(request, (request.fill - 1) // self.page)
        locked = [key for key in keys if self.pool.locks[key] == 0]
        tokens = request.fill - len(keys) * self.page
        reserve = min(request.max_tokens, self.clip)
        total = tokens + min(max(request.max_tokens - request.output, 0), self.clip) + self.page
        if not total < self.rem_total - len(locked) * self.page:
            return "no token", False
        if self.rem_chunk is None and self.can_run and self.ceil(tokens) >= self.rem_input:
            return "other", False
        truncated = self.rem_chunk is not None and self.ceil(tokens) > self.rem_chunk
        if truncated:
            assert self.rem_chunk is not None
            tokens = self.rem_chunk // self.page * self.page
            reserve = 0
            if tokens <= 0:
                return "other", False
        self.pool.lock(keys)
        request.keys = keys
        request.prefix_len = len(keys) * self.page
        self.charge(request, tokens, reserve)
        return self.budget_state(), truncated

    def extend(self, request: Request, tokens: int) -> None:
        """Allocate what a request lacks for more tokens."""
        request.retracted = False
        end = request.prefix_len + tokens
        self.pool.alloc(request, -(-end // self.page) - len(request.keys) - request.private)
        request.extend_end = request.prefix_len = end

    # SchedulePolicy

    def calc_priority(self) -> None:
        """Sort the queue by the longest cached prefix, where so configured."""
        if not self.options["longest_prefix_match"] or self.pool.disabled or len(self.waiting) > PREFIX_MATCH_MAX:
            return
        tree: list[Request] = []
        late = set()
        matched = {}
        for request in self.waiting:
            prefix = len(self.pool.match(request, self.shared_pages(request))) * self.page
            own = len(self.pool.match(request, (request.fill - 1) // self.page)) * self.page
            prefix = max(prefix, own)
            matched[request.id] = min(prefix, request.fill - 1)
            if prefix <= CHECK_THRESHOLD:
                if any(self.common(request, other) >= DEPRIORITIZE_THRESHOLD for other in tree):
                    late.add(request.id)
                else:
                    tree.append(request)
        self.waiting.sort(key=lambda request: float("inf") if request.id in late else -matched[request.id])

    def shared_pages(self, request: Request) -> int:
        """Return how many full pages of a request have contents that others can have."""
        return min(request.fill // self.page, len(request.prefix_hashes))

    def common(self, request: Request, other: Request) -> int:
        """Return how many leading tokens two prompts share, as far as their hashes show."""
        pages = 0
        for mine, theirs in zip(request.prefix_hashes, other.prefix_hashes, strict=False):
            if mine != theirs:
                break
            pages += 1
        return pages * self.page

    # update_running_batch, retract_decode

    def finishing(self) -> list[Request]:
        """Return the requests whose result in flight is their last token by length."""
        queued = {id(request) for batch in self.in_flight for request, _ in batch.parts}
        return [one for one in self.running if id(one) in queued and one.output + 1 >= one.max_tokens]

    def pages_for_decode(self, requests: Iterable[Request]) -> int:
        """Return how many pages the next token of these requests needs."""
        return sum(request.prefix_len % self.page == 0 for request in requests)

    def fits_decode(self, requests: list[Request]) -> bool:
        """Evict what the next token of these requests needs, and return whether that is enough."""
        needed = self.pages_for_decode(requests)
        self.pool.evict(needed)
        return self.pool.free >= needed

    def update_running_batch(self) -> Batch | None:
        """Decode all running requests; retract some where pages are short."""
        if not self.running:
            return None
        before = len(self.running)
        finishing = self.finishing()
        self.running = [request for request in self.running if request not in finishing]
        if not self.running:
            self.is_full = False
            return None
        fits = self.fits_decode(self.running)
        if not fits and finishing:
            self.is_full = False
            return None
        if not fits:
            self.retract()
        else:
            step = (self.first_ratio - self.least_ratio) / self.options["new_token_ratio_decay_steps"]
            self.ratio = max(self.ratio - step, self.least_ratio)
        if len(self.running) < before:
            self.is_full = False
        for request in self.running:
            self.extend(request, 1)
        return Batch(parts=[(request, 1) for request in self.running])

    def retract(self) -> None:
        """Retract the requests with the least output until the others fit."""
        order = sorted(self.running, key=lambda one: (one.output, -one.prompt_tokens), reverse=True)
        first = True
        while first or not self.fits_decode(order):
            if len(order) == 1:
                break
            first = False
            victim = order.pop()
            self.pool.release(victim)
            self.pool.evict(-(-len(order) * int(self.options["retract_decode_steps"]) // self.page))
            victim.retracted, victim.prefix_len = True, 0
            self.waiting.append(victim)
            self.retracted.append(victim.id)
        assert self.fits_decode(order), "one request always fits"
        self.running = order
        outputs = sum(request.output for request in order) + self.options["retract_decode_steps"] * len(order)
        self.ratio = min(1.0, outputs / (sum(request.max_tokens for request in order) + 1))

    def mix(self, batch: Batch) -> None:
        """Let the running requests decode in a prefill batch."""
        finishing = self.finishing()
        self.running = [request for request in self.running if request not in finishing]
        if finishing:
            self.is_full = False
        if not self.running or not self.fits_decode(self.running):
            return
        for request in self.running:
            self.extend(request, 1)
            batch.parts.append((request, 1))
        batch.decoding, self.running = self.running, []

    # process_batch_result

    def process(self, batch: Batch, now_s: float) -> None:
        """Give each request of a batch its token."""
        for request, _ in batch.parts:
            if request.finished or request.retracted or request is batch.chunked:
                continue
            request.output += 1
            request.token_s.append(now_s)
            request.finished = request.output >= self.final(request)
            if request.finished:
                self.pool.checkpoint(request, min(request.prefix_len, request.fill) // self.page)
                self.pool.release(request)
            elif batch.is_extend and request not in batch.decoding:
                self.pool.checkpoint(request, (request.fill - 1) // self.page)

    def final(self, request: Request) -> int:
        """Return the length of a response."""
        return min(request.output_tokens, request.max_tokens)


def replay_steps(
    settings: EngineSettings, requests: Iterable[Mapping[str, Any]], seconds: Seconds = one_second
) -> Iterator[Step]:
    """Run the event loop, normal or overlapped, and yield each batch right after its planning."""
    engine = Scheduler(settings)
    arrivals = deque(sorted((Request(**request) for request in requests), key=lambda request: request.arrival_s))
    for request in arrivals:
        request.max_tokens = clipped(settings, request)
    everyone = list(arrivals)
    now_s = free_s = 0.0
    last: Batch | None = None
    num_steps = 0
    while True:
        while arrivals and arrivals[0].arrival_s <= now_s:
            engine.waiting.append(arrivals.popleft())
        batch = engine.plan(last)
        if batch is not None:
            start_s = max(now_s, free_s)
            batch.end_s = free_s = start_s + seconds(parts_of(batch))
            engine.in_flight.append(batch)
            yield {
                "step": num_steps,
                "start_s": start_s,
                "end_s": batch.end_s,
                "scheduled": {request.id: tokens for request, tokens in batch.parts},
                "running": [one.id for one in everyone if not one.finished and (one.keys or one.private)],
                "waiting": [request.id for request in engine.waiting],
                "free_blocks": engine.pool.available,
                "preempted": engine.retracted,
            }
            num_steps += 1
        overlapped = settings["async_scheduling"]
        if (last is not None and overlapped) or (batch is not None and not overlapped):
            done = engine.in_flight.popleft()
            now_s = max(now_s, done.end_s)
            engine.process(done, now_s)
        elif batch is None:
            if not arrivals:
                return
            if not engine.waiting:
                engine.ratio = engine.first_ratio
            now_s = max(now_s, arrivals[0].arrival_s)
        last = batch


def parts_of(batch: Batch) -> list[Part]:
    """Return a batch's parts, on which its duration depends."""
    return [(tokens, request.prefix_len - tokens, request is not batch.chunked) for request, tokens in batch.parts]


def clipped(settings: EngineSettings, request: Request) -> int:
    """Return `init_req_max_new_tokens`, but at least one token."""
    page, capacity = settings["block_size"], settings["num_gpu_blocks"] * settings["block_size"]
    longest = min(settings["max_model_len"] - 1, capacity - 1) - request.prompt_tokens - 1
    paged = -(-request.prompt_tokens // page) * page
    return max(1, min(request.max_tokens, longest, capacity - paged - page - 1))
