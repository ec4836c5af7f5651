"""Runs vLLM's real engine cores of data-parallel ranks in lockstep, without a model, and records every iteration.

Runs under the interpreter that has vLLM, as `vllm_trace.py`. Each rank is a thread with the real `DPEngineCoreProc`:
its busy loop, its steps, its waves. Stand-ins are the executor, whose forward passes need all ranks, the all-reduce
among ranks, and the coordinator, which wakes the ranks when one of them gets a request. Time is virtual: a pass lasts
as long as on its slowest rank. Reads one workload a line, with `ranks`, `sync_interval` and `seconds`; each request has
a `rank`. Writes one line for each: `{"iterations": [[...] of each rank], "coverage": {...}}`.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import Counter, deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from vllm.config import ParallelConfig  # noqa: E402
from vllm.v1.engine import EngineCoreRequestType  # noqa: E402
from vllm.v1.engine import core as engine_core  # noqa: E402
from vllm_trace import (  # noqa: E402
    EOS,
    ModelRunnerOutput,
    Request,
    SamplingParams,
    SchedulerOutput,
    TokenSource,
    answer_all,
    build_scheduler,
    get_request_block_hasher,
    request_in,
    sha256,
)

PATIENCE_S = 60.0  # of real time; ranks that wait for longer wait for each other


class Pass:
    """One forward pass: what each rank has in it, and its end once all ranks have joined."""

    def __init__(self, num_ranks: int) -> None:
        self.seconds: dict[int, float] = {}
        self.planned_s: dict[int, float] = {}
        self.num_ranks = num_ranks
        self.ended = threading.Event()
        self.end_s = 0.0


class Group:
    """What the ranks share: passes in order, agreement, and the arrival of requests."""

    def __init__(self, workload: dict[str, Any]) -> None:
        self.num_ranks: int = workload["ranks"]
        self.seconds = workload["seconds"]
        self.depth = 2 if workload["engine"]["async_scheduling"] else 1
        self.lock = threading.Condition(threading.RLock())
        self.passes: list[Pass] = []
        self.last_end_s = 0.0
        self.votes: list[dict[int, bool]] = []
        self.idle: set[int] = set()
        self.current_wave = 0  # these two as the coordinator knows them
        self.is_running = False
        self.ranks: list[Rank] = []
        self.coverage: Counter[str] = Counter()

    def join(self, rank: int, number: int, planned_s: float, seconds: float) -> Pass:
        """Join a pass; the last rank to join ends it."""
        with self.lock:
            while len(self.passes) <= number:
                self.passes.append(Pass(self.num_ranks))
            one = self.passes[number]
            one.seconds[rank], one.planned_s[rank] = seconds, planned_s
            if len(one.seconds) == self.num_ranks:
                start_s = max(self.last_end_s, *one.planned_s.values())
                one.end_s = self.last_end_s = start_s + max(one.seconds.values())
                one.ended.set()
            return one

    def agree(self, rank: int, number: int, unfinished: bool) -> bool:
        """Return whether any rank has requests, as the all-reduce does."""
        with self.lock:
            while len(self.votes) <= number:
                self.votes.append({})
            self.votes[number][rank] = unfinished
            self.lock.notify_all()
            if not self.lock.wait_for(lambda: len(self.votes[number]) == self.num_ranks, PATIENCE_S):
                raise TimeoutError(f"rank {rank} waits for the others to agree")
            return any(self.votes[number].values())

    def wait_for_requests(self, rank: int) -> None:
        """Note that a rank has nothing to do; the last one moves the time on to the next arrival."""
        with self.lock:
            self.idle.add(rank)
            if len(self.idle) < self.num_ranks:
                return
            self.idle.clear()
            left = [one.arrivals[0]["arrival_s"] for one in self.ranks if one.arrivals]
            if not left:
                for one in self.ranks:
                    one.core.shutdown_state = engine_core.EngineShutdownState.REQUESTED
                    one.core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
                return
            now_s = max(min(left), *(one.now_s for one in self.ranks))
            first = min(self.ranks, key=lambda one: one.arrivals[0]["arrival_s"] if one.arrivals else float("inf"))
            wave = first.core.current_wave
            for one in self.ranks:
                one.now_s = now_s
                one.deliver(wave)
            self.start(wave, first.number)

    def start(self, wave: int, number: int) -> None:
        """Have all ranks join a wave that one of them has started."""
        self.current_wave, self.is_running = wave, True
        for one in self.ranks:
            one.core.input_queue.put((EngineCoreRequestType.START_DP_WAVE, (wave, number)))


class InputQueue(queue.Queue):  # type: ignore[type-arg]
    """An engine core's queue; a rank that blocks on it has nothing to do."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item; a rank that would block has nothing to do until it comes."""
        if block and self.empty():
            self.rank.group.wait_for_requests(self.rank.number)
        item = super().get(block, PATIENCE_S if block else timeout)
        with self.rank.group.lock:
            self.rank.group.idle.discard(self.rank.number)
        return item


class Coordinator(queue.Queue):  # type: ignore[type-arg]
    """An engine core's outputs, of which the coordinator reads when waves start and end (0.32 coordinator.py)."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank

    def put_nowait(self, item: Any) -> None:
        """Read what the core says of waves."""
        client, outputs = item
        group = self.rank.group
        if client != -1:
            return
        with group.lock:
            if outputs.wave_complete is not None and group.current_wave <= outputs.wave_complete:
                group.current_wave, group.is_running = outputs.wave_complete + 1, False
            wave = outputs.start_wave
            if wave is not None and (
                wave > group.current_wave or (wave == group.current_wave and not group.is_running)
            ):
                group.coverage["started_by_rank"] += 1
                group.start(wave, self.rank.number)


class Executor:
    """Stands in for the workers of a rank: each forward pass is one with all ranks."""

    is_sleeping = False

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.results: deque[tuple[Pass | None, SchedulerOutput, set[str]]] = deque()

    def execute_model(self, output: SchedulerOutput, non_block: bool = False) -> Future[Any]:
        """Start a step; without tokens there is nothing to execute."""
        del non_block
        rank = self.rank
        num_tokens = output.total_num_scheduled_tokens
        scheduler = rank.core.scheduler
        sampled = {name for name in output.num_scheduled_tokens if not scheduler.requests[name].is_prefill_chunk}
        joined = None
        if num_tokens:
            joined = rank.start(dict(output.num_scheduled_tokens))
            if rank.group.depth > 1:
                rank.wait_for_earlier()
        self.results.append((joined, output, sampled))
        future: Future[Any] = Future()
        if num_tokens:
            future.set_result(None)  # the tokens are sampled by another call
        else:
            self.results.pop()
            future.set_result(ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[]))
        return future

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the tokens of the step that was started last, when its pass has ended."""
        del grammar_output
        result = Result(self.rank, *self.results.popleft())
        return result if non_block else result.result()

    def execute_dummy_batch(self) -> None:
        """Take part in a pass without a batch."""
        self.rank.start(None)
        self.rank.wait_for_earlier()


class Result:
    """The tokens of a step, which come when its pass ends."""

    def __init__(self, rank: Rank, joined: Pass | None, output: SchedulerOutput, sampled: set[str]) -> None:
        self.rank, self.joined, self.output, self.sampled = rank, joined, output, sampled

    def result(self) -> ModelRunnerOutput:
        """Wait for the pass; an answer that ends early gets EOS."""
        if self.joined is not None:
            self.rank.wait_for(self.joined)
        names = list(self.output.num_scheduled_tokens)
        tokens = [self.rank.sample(name) if name in self.sampled else [] for name in names]
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens
        )


class Rank:
    """One rank: a thread that runs the real engine core."""

    def __init__(self, group: Group, number: int, base: Any, workload: dict[str, Any]) -> None:
        self.group, self.number = group, number
        self.now_s = 0.0
        self.number_of_passes = self.number_of_votes = 0
        self.iterations: list[dict[str, Any]] = []
        engine = workload["engine"]
        self.engine = engine
        self.tokens = TokenSource()
        specs = [spec for spec in workload["requests"] if spec["rank"] == number]
        self.specs = {spec["id"]: spec for spec in specs}
        self.arrivals = deque(sorted(specs, key=lambda spec: spec["arrival_s"]))
        caching = engine["enable_prefix_caching"]
        self.hasher = get_request_block_hasher(engine["block_size"], sha256) if caching else None
        self.failure: BaseException | None = None
        self.core = self.make_core(base, workload)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def make_core(self, base: Any, workload: dict[str, Any]) -> Any:
        """Make the engine core without its constructor, which starts workers, sockets and threads."""
        core: Any = object.__new__(engine_core.DPEngineCoreProc)
        core.vllm_config = base
        core.scheduler = build_scheduler(base, self.engine)
        core.model_executor = Executor(self)
        core.batch_queue_size = self.group.depth
        core.batch_queue = deque(maxlen=self.group.depth) if self.group.depth > 1 else None
        core.step_fn = core.step if core.batch_queue is None else core.step_with_batch_queue
        core.input_queue, core.output_queue = InputQueue(self), Coordinator(self)
        core.aborts_queue = queue.Queue()
        core._idle_state_callbacks = []
        core.process_input_queue_block = True
        core.log_stats = core.use_spec_decode = core.check_for_draft_tokens = False
        core.is_mm_encoder_only = core.is_pooling_model = core.publish_dp_lb_stats = False
        core.async_scheduling = self.engine["async_scheduling"]
        core.has_coordinator = True
        core.enable_fault_tolerance = False
        core.engine_index = core.dp_rank = self.number
        core.dp_size, core.dp_group = self.group.num_ranks, self
        core.engines_running = core.pending_pause = core.ignore_start_dp_wave = False
        core.current_wave = core.step_counter = 0
        core.prefill_schedule_interval = 1
        core.dp_sync_interval = workload["sync_interval"]
        core.eep_scaling_state = None
        core.shutdown_state = engine_core.EngineShutdownState.RUNNING
        core._weight_version = "default"
        return core

    def run(self) -> None:
        """Run the busy loop until all requests have ended."""
        try:
            self.core.run_busy_loop()
        except SystemExit:  # the way in which a busy loop ends
            pass
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            self.failure = error
            os.write(2, f"rank {self.number}: {error!r}\n".encode())

    def start(self, scheduled: dict[str, int] | None) -> Pass:
        """Join the next pass with a batch, or with none."""
        seconds = self.group.seconds
        num_tokens = sum(scheduled.values()) if scheduled else 1
        number = self.number_of_passes
        self.number_of_passes += 1
        scheduler = self.core.scheduler
        self.iterations.append(
            {
                "wave": self.core.current_wave,
                "counter": self.core.step_counter + 1,
                "planned_s": self.now_s,
                "scheduled": scheduled,
                "running": [request.request_id for request in scheduler.running],
                "waiting": len(scheduler.waiting),
                "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            }
        )
        self.group.coverage["dummy" if scheduled is None else "steps"] += 1
        return self.group.join(self.number, number, self.now_s, seconds["constant_s"] + seconds["token_s"] * num_tokens)

    def wait_for_earlier(self) -> None:
        """Wait until the workers take another pass: with two steps in flight, when the one before the last ends."""
        number = self.number_of_passes - self.group.depth
        if number >= 0:
            self.wait_for(self.group.passes[number])

    def wait_for(self, one: Pass) -> None:
        """Wait for the end of a pass; requests that have come by then are seen before the next step."""
        if not one.ended.wait(PATIENCE_S):
            raise TimeoutError(f"rank {self.number} waits for a pass")
        self.now_s = max(self.now_s, one.end_s)
        self.deliver(self.core.current_wave)

    def deliver(self, wave: int) -> None:
        """Send the engine core the requests that have come."""
        while self.arrivals and self.arrivals[0]["arrival_s"] <= self.now_s:
            request = self.request_of(self.arrivals.popleft())
            self.core.input_queue.put((EngineCoreRequestType.ADD, (request, wave)))

    def request_of(self, spec: dict[str, Any]) -> Request:
        """Make vLLM's request."""
        prompt, params = (
            self.tokens.prompt(spec, self.engine["block_size"]),
            SamplingParams(max_tokens=spec["max_tokens"]),
        )
        return request_in(spec, prompt, params, block_hasher=self.hasher)

    def sample(self, name: str) -> list[int]:
        """Return a request's next token."""
        request = self.core.scheduler.requests.get(name)
        spec = self.specs[name]
        is_early = spec["output_tokens"] < spec["max_tokens"]
        if request is not None and is_early and request.num_output_tokens + 1 == spec["output_tokens"]:
            return [EOS]
        return self.tokens.fresh(1)


def agreed(rank: Rank, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
    """Stand in for `ParallelConfig.sync_dp_state`; the process group is the rank."""
    assert not pending_pause
    number = rank.number_of_votes
    rank.number_of_votes += 1
    return rank.group.agree(rank.number, number, has_unfinished), False


def trace(base: Any, workload: dict[str, Any]) -> dict[str, Any]:
    """Run one workload."""
    group = Group(workload)
    group.ranks = [Rank(group, number, base, workload) for number in range(workload["ranks"])]
    for rank in group.ranks:
        rank.thread.start()
    for rank in group.ranks:
        rank.thread.join(PATIENCE_S)
        if rank.thread.is_alive() or rank.failure is not None:
            raise RuntimeError(f"workload {workload['seed']}: rank {rank.number} does not end: {rank.failure!r}")
    waves = max(rank.core.current_wave for rank in group.ranks)
    return {
        "iterations": [rank.iterations for rank in group.ranks],
        "ends_s": [one.end_s for one in group.passes],
        "coverage": {**group.coverage, "waves": waves},
    }


def main() -> None:
    """Trace the workloads of several ranks."""
    ParallelConfig.sync_dp_state = staticmethod(agreed)
    answer_all(trace)


if __name__ == "__main__":
    main()
