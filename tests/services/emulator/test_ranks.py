"""An emulated engine with several data-parallel ranks: headers, balancing, state files, metrics, lockstep."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from predictor.data_parallel import DataParallelRank
from services.emulator.ranks import RankCounts, RankDrivers
from services.emulator.settings import EmulatorSettings
from services.engine_state.identity import rank_file
from services.engine_state.reader import Reader
from tests.services.emulator.running import Emulated, emulated

RANKS = 4


def complete(client: httpx.Client, rank: int | str | None = None, **fields: Any) -> httpx.Response:
    """Request a completion, at a rank."""
    headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
    body = {"prompt": "Hello", "ignore_eos": True, "max_tokens": 5, **fields}
    return client.post("/v1/completions", json=body, headers=headers)


def ranks_of(engine: Emulated) -> RankDrivers:
    """Return the drivers."""
    assert isinstance(engine.app.driver, RankDrivers)
    return engine.app.driver


def num_served(engine: Emulated) -> list[int]:
    """Return how many requests each rank has served, by its metrics."""
    text = engine.client.get("/metrics").text
    found = re.findall(r'vllm:e2e_request_latency_seconds_count\{engine="(\d)".*\} (\S+)', text)
    return [int(float(value)) for _, value in sorted(found)]


def test_a_request_goes_to_the_rank_that_its_header_names(tmp_path: Path) -> None:
    """Each rank has its own engine model, state file and metrics."""
    with emulated(tmp_path, data_parallel_size=RANKS) as engine:
        for rank in (2, 2, 3, 0):
            assert complete(engine.client, rank).status_code == 200
        assert num_served(engine) == [1, 0, 2, 1]
        for rank in range(RANKS):
            reader = Reader(rank_file(str(engine.state_file), rank))
            view = reader.read(contents=False)
            known = DataParallelRank.from_table(view.settings["data_parallel"])
            assert (known.rank, known.size, known.lockstep) == (rank, RANKS, None)
            assert int(view.state["num_outcomes"]) == num_served(engine)[rank]
            reader.close()
        metrics = engine.client.get("/metrics").text
        assert metrics.count("# TYPE vllm:num_requests_running gauge") == 1
        engines = re.findall(r'vllm:cache_config_info\{.*engine="(\d)"', metrics)
        assert engines == ["0", "1", "2", "3"]
    assert not list(tmp_path.iterdir())  # its state files are gone


def test_all_responses_of_a_request_are_of_the_rank_that_it_names(tmp_path: Path) -> None:
    """Each is a request of the engine."""
    with emulated(tmp_path, data_parallel_size=2) as engine:
        assert len(complete(engine.client, 1, n=3).json()["choices"]) == 3
        assert num_served(engine) == [0, 3]


@pytest.mark.parametrize(("ranks", "rank"), [(RANKS, RANKS), (RANKS, -1), (1, 1)])
def test_a_rank_out_of_range_is_refused_as_by_vllm(tmp_path: Path, ranks: int, rank: int) -> None:
    """With one line that has the range."""
    with emulated(tmp_path, data_parallel_size=ranks) as engine:
        answer = complete(engine.client, rank)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"data_parallel_rank {rank} is out of range [0, {ranks})."
        assert complete(engine.client, "first").status_code == 200  # no number: vLLM ignores it


def test_requests_without_a_rank_are_balanced(tmp_path: Path) -> None:
    """A burst is spread evenly, as by vLLM's own balancing."""
    with emulated(tmp_path, data_parallel_size=RANKS, speed=1.0) as engine:
        with ThreadPoolExecutor(12) as threads:
            answers = list(threads.map(lambda _: complete(engine.client, max_tokens=60), range(12)))
        assert {answer.status_code for answer in answers} == {200}
        assert num_served(engine) == [3, 3, 3, 3]


def test_a_queue_counts_more_where_kv_blocks_are_short() -> None:
    """The balancing of vLLM 0.32: waiting requests weigh up to four times as much where the KV cache is full."""
    assert RankCounts(num_waiting=2, num_running=3, kv_cache_usage=0.4).score(0) == 5
    assert RankCounts(num_waiting=2, num_running=3, kv_cache_usage=1.0).score(0) == 5 + 2 * 3
    assert RankCounts(num_running=3, kv_cache_usage=1.0).score(7) == 7


def test_ranks_in_lockstep_step_together(tmp_path: Path) -> None:
    """Their steps start and end at the same times; the ranks stop when none has a request."""
    with emulated(tmp_path, data_parallel_size=2, data_parallel_lockstep=True, speed=1.0) as engine:
        with ThreadPoolExecutor(9) as threads:
            busy = [
                threads.submit(complete, engine.client, 0, prompt=[number] * 900, max_tokens=40) for number in range(8)
            ]
            engine.until(lambda: ranks_of(engine).drivers[0].num_jobs == 8)
            assert complete(engine.client, 1, max_tokens=5).status_code == 200
            assert {one.result().status_code for one in busy} == {200}
        steps = []
        for rank in range(2):
            reader = Reader(rank_file(str(engine.state_file), rank))
            reader.read(contents=False)
            records = reader.new_steps()
            steps.append(dict(zip(records["start_s"].tolist(), records["seconds"].tolist(), strict=True)))
            reader.close()
        assert len(steps[1]) == 5
        assert steps[1].items() <= steps[0].items()
        engine.until(engine_is_idle(engine))
        group = ranks_of(engine)._lockstep
        assert group is not None
        engine.until(lambda: not group._group.is_running)


def engine_is_idle(engine: Emulated) -> Any:
    """Return whether no rank has a request."""
    return lambda: ranks_of(engine).num_jobs == 0


def test_a_client_that_leaves_frees_its_rank(tmp_path: Path) -> None:
    """The request is aborted where it runs."""
    with emulated(tmp_path, data_parallel_size=2, speed=1.0) as engine:
        engine.request_and_disconnect(max_tokens=900)
        engine.until(engine_is_idle(engine))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size: must lie between 1 and 64, not 0"),
        ({"data_parallel_size": 65}, "data_parallel_size: must lie between 1 and 64, not 65"),
        ({"data_parallel_lockstep": True}, "data_parallel_lockstep: needs a data_parallel_size above 1"),
    ],
)
def test_bad_numbers_of_ranks_are_refused(fields: dict[str, Any], message: str) -> None:
    """By name."""
    with pytest.raises(ValueError, match=re.escape(message)):
        EmulatorSettings(model="m", **fields)
