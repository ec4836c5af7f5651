"""An engine replica has the state that its engine reports, whatever its state was before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.batching import BATCHERS
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.engine_replica import EngineReplica
from predictor.forecast import Forecast, Forecaster
from predictor.lengths import RESIDUALS, Tag, expected_lengths, expected_tokens
from predictor.reported_state import ReportedContents, ReportedMemory, ReportedState, ReportedStep
from predictor.reported_transfers import fetch_starts
from predictor.request import BEST_EFFORT, CLASSES, LEGS, RequestFacts, Slo, adapter_number, tenant_number
from predictor.snapshot import STAGES, LiveRequest, Memory, Snapshot
from predictor.snapshot_of_engine import snapshot_of
from predictor.state import MEMORY_SIZE
from services.engine_state.layout import CLIENT, LIVE, REQUEST
from tests.inspecting import free_list
from tests.strategies import AFFINE, Load, examples, load_of, loads

CLOSE = 1e-9
COUNTS = (
    "output_tokens", "computed_tokens", "placeholders", "in_flight_tokens", "stale_tokens", "num_blocks",
    "full_blocks", "num_preemptions", "hit_tokens", "draft_tokens",
)  # fmt: skip
# engines that report their state have this layout
LOADS = {batcher: loads(batcher, layout="plain", ending=True, max_requests=12, tick_s=0.004) for batcher in BATCHERS}
every_batcher = pytest.mark.parametrize("batcher", BATCHERS)
NUM_SLOTS = 40


def reported_from(snapshot: Snapshot, *, seed: int = 0) -> ReportedState:
    """Convert a snapshot to arrays, with the requests in random slots."""
    items = (*snapshot.running, *snapshot.waiting, *snapshot.held)
    slots = np.random.default_rng(seed).permutation(NUM_SLOTS)[: len(items)]
    at = {item.request.request_id: slot for item, slot in zip(items, slots.tolist(), strict=True)}
    live, facts = np.zeros(NUM_SLOTS, LIVE), np.zeros(NUM_SLOTS, REQUEST)
    engine = Engine(snapshot.config, AFFINE)
    known, median, spread = np.zeros(NUM_SLOTS, np.int64), np.full(NUM_SLOTS, np.nan), np.zeros(NUM_SLOTS)
    for item, slot in zip(items, slots, strict=True):
        request = item.request
        row = live[slot]
        row["output_tokens"], row["hit_tokens"] = item.produced_tokens, 0
        for name in set(COUNTS) - {"output_tokens", "hit_tokens"}:
            row[name] = getattr(item, name)
        row["prefill_tokens"] = -1 if item.prefill_tokens is None else item.prefill_tokens
        row["scheduled_s"] = -1
        row["first_token_s"] = -1 if item.first_token_s is None else item.first_token_s
        write_transfer(row, item, snapshot.taken_s)
        most = snapshot.config.max_model_len if request.max_tokens is None else request.max_tokens
        if snapshot.config.batcher == "sglang":  # it clips max_tokens when a request arrives
            _, most = engine.lengths(request, item.produced_tokens)
        slo = request.slo or Slo()
        facts[slot] = (
            1, b"", request.arrival_s, np.nan, np.nan, request.priority, request.prompt_tokens, most, 0,
            CLASSES.index(request.request_class), LEGS.index(request.leg), 0, slo.ttft_s or np.nan, slo.tpot_s or np.nan, request.weight,
            tenant_number(request.client_id), b"", b"", adapter_number(request.adapter), b"",
        )  # fmt: skip
        known[slot] = request.output_tokens or 0
        if isinstance(request.tag, Tag):
            median[slot], spread[slot] = request.tag.median_tokens, request.tag.spread
    write_starts(live, snapshot, at)
    running, waiting = len(snapshot.running), len(snapshot.running) + len(snapshot.waiting)
    return ReportedState(
        now_s=snapshot.taken_s,
        num_free_blocks=snapshot.num_free_blocks,
        decodes_since_look=snapshot.decodes_since_look,
        running=slots[:running].astype(np.uint32),
        waiting=slots[running:waiting].astype(np.uint32),
        held=slots[waiting:].astype(np.uint32),
        steps=tuple(
            ReportedStep(
                start_s=step.start_s,
                slots=np.array([at[name] for name in step.scheduled], np.int32),
                tokens=np.array(list(step.scheduled.values()), np.int64),
                drafts=np.array([step.drafts.get(name, 0) for name in step.scheduled], np.int64),
                sampled=np.array([name in step.sampled for name in step.scheduled], np.int32),
            )
            for step in snapshot.steps
        ),
        live=live,
        facts=facts,
        known_tokens=known,
        tag_median=median,
        tag_spread=spread,
        contents=contents(snapshot),
        memory=reported_memory(snapshot.memory),
    )


def write_transfer(row: np.void, item: LiveRequest, taken_s: float) -> None:
    """Write the stage of a transfer, and when blocks are held no longer."""
    row["stage"] = STAGES.index(item.stage)
    row["fetch_started_s"] = row["fetch_ended_s"] = row["held_until_s"] = -1
    if item.stage == "held":
        row["held_until_s"] = taken_s + (item.transfer_left_s or 0.0)


def write_starts(live: np.ndarray, snapshot: Snapshot, at: Mapping[str, int]) -> None:
    """Write when fetches started, so that they end as the snapshot says."""
    config = snapshot.config
    fetching = [one for one in (*snapshot.waiting, *snapshot.held) if one.stage == "fetching"]
    got_s = [
        config.transfer_s(one.request.prompt_tokens, one.num_blocks) - (one.transfer_left_s or 0.0) for one in fetching
    ]
    starts_s = fetch_starts(got_s, snapshot.taken_s, shared=config.kv_transfer_shared)
    for one, start_s in zip(fetching, starts_s, strict=True):
        live["fetch_started_s"][at[one.request.request_id]] = start_s


def reported_memory(memory: Memory) -> ReportedMemory:
    """Convert what a local scheduler remembers."""
    numbers = np.zeros(MEMORY_SIZE)
    numbers[: len(memory.numbers)] = memory.numbers
    clients = [(one.tenant, one.weight, one.tokens, one.waits) for one in memory.clients]
    return ReportedMemory(memory.num_steps, memory.correction, numbers, np.array(clients, CLIENT))


def contents(snapshot: Snapshot) -> ReportedContents | None:
    """Convert the contents of blocks."""
    if snapshot.kv_cache is None:
        return None
    items = (*snapshot.running, *snapshot.waiting, *snapshot.held)
    holding = [item for item in items if item.num_blocks > 0]
    num_blocks = len(snapshot.kv_cache.free_block_ids) + len({b for item in holding for b in item.block_ids})
    content, reuse = np.zeros(num_blocks, np.uint64), np.zeros(num_blocks, np.int64)
    for block, value in snapshot.kv_cache.contents.items():
        content[block] = number(value)
    reuse[list(snapshot.kv_cache.free_block_ids)] = np.arange(1, 1 + len(snapshot.kv_cache.free_block_ids))
    return ReportedContents(
        content=content,
        reuse=reuse,
        tables=tuple(np.array(item.block_ids, np.int32) for item in items),
        hashes=tuple(np.array([number(value) for value in item.request.prefix_hashes], np.uint64) for item in items),
    )


def number(value: int | str) -> int:
    """Return a positive number for a content, as in a state file."""
    return value + 1 if isinstance(value, int) else 1 + hash(value) % 2**60


def numbered(request: RequestFacts) -> RequestFacts:
    """Convert the contents of a request's prefix."""
    return replace(request, prefix_hashes=tuple(number(value) for value in request.prefix_hashes))


def replica_of(snapshot: Snapshot) -> EngineReplica:
    """Return an idle replica for a snapshot's engine."""
    return EngineReplica(snapshot.config, AFFINE, num_slots=NUM_SLOTS, track_blocks=snapshot.kv_cache is not None)


def without_own_contents(snapshot: Snapshot) -> Snapshot:
    """Remove the contents that only one request can hit, which an engine does not report."""
    if snapshot.kv_cache is None:
        return snapshot
    return replace(snapshot, kv_cache=replace(snapshot.kv_cache, own_contents={}))


def expect_same(ours: Forecast, theirs: Forecast) -> None:
    """Compare two forecasts in all fields."""
    for name in ("ttft_s", "e2e_s", "tpot_s", "queue_s", "delay_sum_s", "delay_worst_s"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=CLOSE, abs=CLOSE), name
    for name in ("output_tokens", "num_preemptions", "prefix_hit_tokens", "others_preempted"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_full_blocks_of_unknown_content_are_free_once_their_request_ends() -> None:
    """The free list has them all: otherwise later requests would take the same block twice, and never end."""
    load = load_of("vllm_v1", (9, 6), (7, 5), max_num_seqs=2, max_num_batched_tokens=32, num_gpu_blocks=16)
    engine = load.loaded(AFFINE)
    for _ in range(4):
        engine.next_step()
    snapshot = without_own_contents(snapshot_of(engine, engine.now_s))
    replica = replica_of(snapshot)
    replica.update(reported_from(snapshot, seed=0))
    state = replica.engine.state
    assert any(state.requests[slot].full_blocks > 0 for slot in state.running[: state.engine[0].num_running])
    replica.engine.advance()
    assert len(free_list(replica.engine)) == state.engine[0].num_free_blocks == replica.engine.num_blocks


@every_batcher
def test_a_replica_forecasts_like_the_engine_of_the_snapshot(batcher: str) -> None:
    """A state from arrays equals one from values, and former states of the replica have no effect."""

    @examples(30)
    @given(LOADS[batcher], st.lists(st.floats(0.0, 1.05), min_size=1, max_size=3), st.integers(0, 9))
    def check(load: Load, moments: list[float], seed: int) -> None:
        first, *others = load.requests
        candidate = replace(Load(engine=load.engine, requests=[first]).our_requests()[0], request_id="candidate")
        load = Load(engine=load.engine, requests=others or [first])
        whole = load.loaded(AFFINE)
        whole.advance()
        replica: EngineReplica | None = None
        for moment in moments:
            engine = load.loaded(AFFINE)
            engine.advance(moment * whole.now_s)
            snapshot = without_own_contents(snapshot_of(engine, moment * whole.now_s))
            replica = replica or replica_of(snapshot)
            reserved = [numbered(request) for request in snapshot.reserved]
            for request in reserved:
                replica.engine.add(request)
            replica.update(reported_from(snapshot, seed=seed))
            (ours,) = Forecaster(replica.engine).forecast([numbered(candidate)], snapshot.taken_s)
            (theirs,) = Forecaster(engine_from(snapshot, AFFINE)).forecast([candidate], snapshot.taken_s)
            expect_same(ours, theirs)
            for request in reserved:
                replica.engine.abort(request.request_id)
                replica.engine.remove(request.request_id)

    check()


@examples(200)
@given(
    st.lists(st.tuples(st.floats(0.01, 1e6), st.sampled_from([0.0, 0.1, 0.7, 3.0]), st.integers(0, 10**6)), min_size=1),
    st.sampled_from(list(RESIDUALS)),
)
def test_lengths_of_many_are_the_lengths_of_each(cases: list[tuple[float, float, int]], residual: str) -> None:
    """The vectorised prediction equals that for single requests."""
    medians, spreads, so_far = (np.array(column) for column in zip(*cases, strict=True))
    at_once = expected_lengths(medians, spreads, so_far, residual)
    each = [expected_tokens(Tag(median_tokens=m, spread=s), n, residual) for m, s, n in cases]
    assert at_once == pytest.approx(each, rel=1e-9)
    assert np.isnan(expected_lengths(np.array([np.nan]), np.zeros(1), np.zeros(1, np.int64), residual)).all()


def steady() -> tuple[Snapshot, ReportedState]:
    """An engine with two requests that decode and one that waits."""
    config = EngineConfig(max_num_seqs=2, num_gpu_blocks=100, enable_prefix_caching=False)
    engine = Engine(config, AFFINE)
    for name in "abc":
        engine.add(RequestFacts(request_id=name, prompt_tokens=20, tag=Tag(median_tokens=50, spread=0.5)))
    engine.advance(10 * engine.next_step().end_s)  # type: ignore[union-attr]
    snapshot = snapshot_of(engine, engine.now_s)
    return snapshot, reported_from(snapshot)


def test_an_impossible_state_is_refused_and_leaves_an_idle_replica() -> None:
    """No invalid array reaches compiled code, and the error names the field."""
    snapshot, right = steady()
    replica = replica_of(snapshot)
    assert (len(right.running), len(right.waiting), len(right.steps)) == (2, 1, 1)
    slot = int(right.running[0])

    def wrong(**changes: object) -> str:
        with pytest.raises(ValueError, match=":") as caught:
            replica.update(right._replace(**changes))  # type: ignore[arg-type]
        head = replica.engine.state.engine[0]
        assert (head.num_running, head.num_waiting, head.num_in_flight) == (0, 0, 0)
        return str(caught.value)

    def live(name: str, value: int) -> np.ndarray:
        rows = right.live.copy()
        rows[name][slot] = value
        return rows

    def facts(name: str, value: int) -> np.ndarray:
        rows = right.facts.copy()
        rows[name][slot] = value
        return rows

    step = right.steps[0]
    huge = np.full(len(step.tokens), 2**40)
    assert wrong(running=np.array([slot, slot])).startswith("running")
    assert wrong(running=np.array([NUM_SLOTS])).startswith("running")
    assert wrong(running=np.array([-1])).startswith("running")
    assert wrong(running=np.arange(3)).startswith("running")
    assert wrong(num_free_blocks=10**6).startswith("num_free_blocks")
    assert wrong(now_s=np.nan).startswith("steps")
    assert wrong(steps=(step, step, step)).startswith("steps")
    assert wrong(steps=(step._replace(tokens=huge),)).startswith("scheduled")
    assert wrong(steps=(step._replace(tokens=0 * huge),)).startswith("steps")
    assert wrong(steps=(step._replace(slots=step.slots * 0 + NUM_SLOTS),)).startswith("steps")
    assert wrong(steps=(step._replace(start_s=np.inf),)).startswith("steps")
    for name in COUNTS:
        assert wrong(live=live(name, -1)) == "live: a count is below zero"
    assert wrong(live=live("output_tokens", 2**31 - 1)).startswith("output_tokens")
    assert wrong(live=live("computed_tokens", 2**31 - 1)).startswith("computed_tokens")
    assert wrong(live=live("num_blocks", 0)).startswith("num_blocks")
    assert wrong(live=live("num_blocks", 2**31 - 1)).startswith("num_blocks")
    assert wrong(facts=facts("prompt_tokens", 0)).startswith("prompt_tokens")
    assert wrong(facts=facts("prompt_tokens", 2**31 - 1)).startswith("prompt_tokens")
    assert wrong(facts=facts("max_tokens", 0)).startswith("output_tokens")
    memory = reported_memory(Memory())
    for correction in (0.0, np.nan, np.inf):
        assert wrong(memory=memory._replace(correction=correction)).startswith("memory.correction")
    assert wrong(memory=memory._replace(numbers=np.full(MEMORY_SIZE, np.nan))).startswith("memory.numbers")
    for tokens, weight in ((np.nan, 1.0), (-1.0, 1.0), (np.inf, 1.0), (1.0, 0.0), (1.0, np.nan), (1.0, np.inf)):
        clients = np.array([(1, weight, tokens, 0)], CLIENT)
        assert wrong(memory=memory._replace(clients=clients)).startswith("memory.clients.")
    clients = np.array([(1, 1.0, 1.0, 0)], CLIENT)
    assert wrong(memory=memory._replace(clients=clients)) == "memory.clients: 1 are more than vllm_v1 counts"
    replica.update(right)
    (forecast,) = Forecaster(replica.engine).forecast(
        [RequestFacts(request_id="new", prompt_tokens=9, tag=5)], right.now_s
    )
    (theirs,) = Forecaster(engine_from(snapshot, AFFINE)).forecast(
        [RequestFacts(request_id="new", prompt_tokens=9, tag=5)], right.now_s
    )
    expect_same(forecast, theirs)


def test_facts_reach_the_replica() -> None:
    """Service level, class, weight, tenant and adapter are those of the file; impossible values count as not given."""
    config = EngineConfig(max_num_seqs=2, num_gpu_blocks=100, enable_prefix_caching=False)
    engine = Engine(config, AFFINE)
    engine.add(
        RequestFacts(
            request_id="a", prompt_tokens=20, output_tokens=9, slo=Slo(ttft_s=0.5, tpot_s=0.125), weight=4.0,
            request_class=BEST_EFFORT, client_id="alice", adapter="sql",
        )
    )  # fmt: skip
    engine.add(RequestFacts(request_id="b", prompt_tokens=20, output_tokens=9))
    engine.next_step()
    snapshot = snapshot_of(engine, engine.now_s)
    reported = reported_from(snapshot)
    first, second = (int(slot) for slot in reported.running)
    replica = replica_of(snapshot)
    replica.update(reported)
    facts = replica.engine.state.facts
    assert facts[first].item() == (0.5, 0.125, 4.0, tenant_number("alice"), 1, adapter_number("sql"), 0)
    assert np.isnan((facts[second].ttft_slo_s, facts[second].tpot_slo_s)).all()
    assert facts[second].item()[2:] == (1.0, 0, 0, 0, 0)
    for name, value in (("ttft_slo_s", -1.0), ("tpot_slo_s", np.inf), ("weight", np.nan), ("request_class", 7)):
        rows = reported.facts.copy()
        rows[name][first] = value
        replica.update(reported._replace(facts=rows))
        assert np.array_equal(facts[name][first], facts[name][second], equal_nan=True)
