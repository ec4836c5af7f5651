"""Learned estimators in a running tagger: batches, reloading, correction, records; and their commands."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from length_tagger import DEFAULT_ORDER, chained
from length_tagger.estimate import Estimate, Query
from length_tagger.linear import SHIPPED, load, save
from protos.block.v1 import common_pb2, tagger_pb2
from services.tagger_server.batches import Batches
from services.tagger_server.drift import Drift
from services.tagger_server.outcomes import recording
from services.tagger_server.reloading import Watched, linear_from, reloading
from services.tagger_server.service import TaggerService
from tests.services.cli.running import answer, block, refusal
from tests.services.waiting import PATIENCE_S, run, until

STOP = common_pb2.FINISH_REASON_STOP


class RecordingEstimator:
    """An estimator that records its batches, and may be delayed."""

    def __init__(self, tokens: float = 77.0) -> None:
        self.tokens = tokens
        self.sizes: list[int] = []
        self.go = threading.Event()
        self.go.set()
        self.fails = False

    def estimate_many(self, queries: Sequence[Query]) -> list[Estimate | None]:
        """Return the same estimate for all."""
        self.sizes.append(len(queries))
        assert self.go.wait(PATIENCE_S)
        if self.fails:
            raise RuntimeError("out of order")
        return [Estimate(median_tokens=self.tokens, spread=0.2, confidence=0.9, estimator="roberta") for _ in queries]


def missed(registry: CollectorRegistry, why: str) -> float:
    """The number of requests without an estimate of the encoder."""
    return registry.get_sample_value("block_tagger_encoder_missed_total", {"why": why}) or 0.0


def test_simultaneous_requests_share_a_batch() -> None:
    """Twenty requests make two batches at most, in order, and each gets its estimate."""

    async def test() -> None:
        reader = RecordingEstimator()
        batches = Batches(reader, CollectorRegistry(), deadline_s=PATIENCE_S)
        said = await asyncio.gather(*(batches.estimate(Query(prompt=str(n))) for n in range(20)))
        assert all(one is not None and one.median_tokens == 77 for one in said)
        assert reader.sizes == [16, 4]

    run(test)


def test_a_slow_encoder_delays_no_request() -> None:
    """Beyond the queue's limit, and beyond the deadline, there is no estimate, and it is counted; later requests get one."""

    async def test() -> None:
        registry, reader = CollectorRegistry(), RecordingEstimator()
        reader.go.clear()
        batches = Batches(reader, registry, deadline_s=0.2, max_queued=2)
        first = asyncio.create_task(batches.estimate(Query(prompt="first")))
        await until(lambda: reader.sizes == [1])
        said = await asyncio.gather(first, *(batches.estimate(Query(prompt=str(n))) for n in range(5)))
        assert said == [None] * 6
        assert (missed(registry, "full"), missed(registry, "late")) == (3, 3)
        reader.go.set()
        slow = Batches(reader, CollectorRegistry(), deadline_s=PATIENCE_S)
        assert await slow.estimate(Query(prompt="later")) is not None

    run(test)


def test_a_failing_encoder_costs_an_estimate_not_the_service() -> None:
    """An exception is counted, and the next request is estimated."""

    async def test() -> None:
        registry, reader = CollectorRegistry(), RecordingEstimator()
        batches = Batches(reader, registry, deadline_s=PATIENCE_S)
        reader.fails = True
        assert await batches.estimate(Query(prompt="x")) is None
        assert missed(registry, "failed") == 1
        reader.fails = False
        assert await batches.estimate(Query(prompt="x")) is not None

    run(test)


def test_the_encoder_runs_only_if_needed() -> None:
    """Lengths that the client fixed are not estimated; others fall back to the next estimator."""

    async def test() -> None:
        reader = RecordingEstimator()
        registry = CollectorRegistry()
        batches = Batches(reader, registry, deadline_s=PATIENCE_S)
        service = TaggerService(chained(["client", "roberta", "constant"]), registry, batches)

        async def tag(**request: Any) -> common_pb2.Tag:
            asked = tagger_pb2.TagRequest(request=common_pb2.Request(**request), prompt=b"Hello")
            return (await service.Tag(asked, None)).tag  # type: ignore[arg-type]

        assert (await tag(max_tokens=9, ignore_eos=True)).estimator == "client"
        assert reader.sizes == []
        assert (await tag()).estimator == "roberta"
        reader.fails = True
        assert (await tag()).estimator == "constant"

    run(test)


def test_a_new_checkpoint_is_loaded_and_a_bad_one_is_not(tmp_path: Path) -> None:
    """Estimates change with the file; an invalid file is refused, and the present model stays."""

    async def test() -> None:
        path = tmp_path / "m.npz"
        model = load(SHIPPED)
        save(model, path)
        chain = chained(["linear"])
        registry = CollectorRegistry()
        query = Query(prompt="Explain how rivers come to be.", model="x")
        before = chain.estimate(query)

        def reloads(taken: str) -> float:
            return registry.get_sample_value("block_tagger_reloads_total", {"taken": taken}) or 0.0

        watched = Watched(path=str(path), load=linear_from, use=lambda new: chain.replaced("linear", new))
        async with reloading([watched], registry, check_s=0.02):
            await asyncio.sleep(0)  # the task has started, and has seen the first version
            model.network.out_bias[: len(model.models)] += math.log(2)
            save(model, tmp_path / "new.npz")
            (tmp_path / "new.npz").rename(path)
            await until(lambda: reloads("yes") == 1)
            after = chain.estimate(query)
            assert before is not None
            assert after is not None
            assert after.median_tokens == pytest.approx(2 * before.median_tokens, rel=0.01)
            (tmp_path / "bad.npz").write_bytes(b"nonsense")
            (tmp_path / "bad.npz").rename(path)
            await until(lambda: reloads("no") == 1)
            assert chain.estimate(query) == after

    run(test)


def test_outcomes_correct_estimates_and_drift_is_shown(tmp_path: Path) -> None:
    """A model with answers five times as long as estimated: estimates follow, metrics show it, and the record can be evaluated."""

    async def test() -> None:
        chain = chained(["client", "linear", "constant"])
        registry = CollectorRegistry()
        record = tmp_path / "outcomes.jsonl"
        with recording(str(record)) as told:
            await teach(registry, TaggerService(chain, registry, record=told))

    async def teach(registry: CollectorRegistry, service: TaggerService) -> None:
        async def tag(number: int) -> common_pb2.Tag:
            asked = tagger_pb2.TagRequest(
                request=common_pb2.Request(model="wordy"), prompt=f"Name river number {number}.".encode()
            )
            return (await service.Tag(asked, None)).tag  # type: ignore[arg-type]

        first = await tag(0)
        for number in range(600):
            told = await tag(number)
            length = round(5 * first.median_tokens)
            outcome = common_pb2.Outcome(output_tokens=length, model="wordy", finish_reason=STOP, tag=told)
            await service.Observe(tagger_pb2.ObserveRequest(outcomes=[outcome]), None)  # type: ignore[arg-type]
        assert (await tag(0)).median_tokens == pytest.approx(5 * first.median_tokens, rel=0.25)
        labels = {"estimator": "linear", "model": "wordy"}
        assert registry.get_sample_value("block_tagger_drift", labels) == 1
        assert registry.get_sample_value("block_tagger_bias", labels) == pytest.approx(math.log(5), abs=0.3)
        assert registry.get_sample_value("block_tagger_error", labels) is not None

    run(test)
    results = answer("tagger", "evaluate", str(tmp_path / "outcomes.jsonl"))["results"]
    values = {one["name"]: one["value"] for one in results}
    assert values["linear.all.mae"] > 0
    assert next(one["n"] for one in results if one["name"] == "linear.all.mae") == 600


def test_metrics_without_outcomes_are_empty() -> None:
    """There is no sample, and no exception."""
    assert all(not family.samples for family in Drift(chained(DEFAULT_ORDER)).collect())


def data(folder: Path, num: int = 200) -> str:
    """A file of prompts whose words determine the length."""
    rows = []
    for number in range(num):
        task, tokens = (("List every", 900), ("Name one", 12))[number % 2]
        rows.append(
            {"prompt": f"{task} of the kings of country {number}", "model": "m", "kind": "chat",
             "output_tokens": [tokens, tokens + number % 5]}
        )  # fmt: skip
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_train_evaluate_predict(tmp_path: Path) -> None:
    """A model trained from a file is better than the median on its held-out part, and explains a prediction."""
    file, model = data(tmp_path), str(tmp_path / "m.npz")
    made = answer("tagger", "train", "linear", file, "-o", model, "--epochs", "60")
    assert made["num_prompts"] == 200
    results = answer("tagger", "evaluate", file, "--linear-model", model)["results"]
    values = {one["name"]: one["value"] for one in results}
    for group in ("all", "chat"):
        assert values[f"linear.{group}.mae"] < 0.6 * values[f"median.{group}.mae"]
        for measure in ("mae_over_mean", "acc50", "acc100", "spearman", "pinball", "coverage_p90"):
            assert math.isfinite(values[f"linear.{group}.{measure}"])
    assert values["ceiling.all.mae"] < values["linear.all.mae"]
    asked = ("tagger", "predict", "-", "--model", "m", "--linear-model", model)
    long, short = (
        answer(*asked, stdin=prompt)["predictions"][0]
        for prompt in ("List every of the kings of country 7", "Name one of the kings of country 7")
    )
    assert long["median_tokens"] > 3 * short["median_tokens"]
    assert long["p90_tokens"] > long["median_tokens"]
    assert "tokens, P90 " in block(*asked, stdin="List every king").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "/nowhere.jsonl"), "/nowhere.jsonl: cannot be read"),
        (("evaluate", "data.txt"), "must end in .jsonl"),
        (("predict", "/nowhere.txt"), "/nowhere.txt: cannot be read"),
        (("predict", "-"), "prompt: is empty"),
        (("train", "linear", "/nowhere.jsonl", "-o", "x.npz"), "/nowhere.jsonl: cannot be read"),
        (("train", "linear", "-o", "/nowhere/x.npz"), "output: /nowhere is no directory"),
        (("evaluate", "--linear-model", "/nowhere.npz"), "cannot be read"),
        (("predict", "x", "--modell", "m"), "No such option"),
    ],
)
def test_bad_input_ends_with_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """It names the error, with status 2."""
    given = tuple(data(tmp_path) if one == "data" else one for one in arguments)
    if "--linear-model" in given:
        given = (*given[:1], data(tmp_path), *given[1:])
    assert message in refusal("tagger", *given)


def test_castillo_is_where_block_data_says(tmp_path: Path) -> None:
    """Without the data the message names the variable or the file."""
    assert "castillo_prompts.jsonl.gz: cannot be read" in refusal("tagger", "evaluate", BLOCK_DATA=str(tmp_path))
    assert "BLOCK_DATA" in refusal("tagger", "evaluate", BLOCK_DATA=str(tmp_path / "nowhere"))


def test_an_encoder_and_its_name_belong_together(tmp_path: Path) -> None:
    """One without the other is refused, and so is a folder without a checkpoint."""
    order = ("--estimator", "roberta", "--encoder", "small")
    assert "encoder_runtime: must be one of" in refusal("serve", "tagger", *order, "--encoder-runtime", "x")
    assert "encoder: roberta needs the folder" in refusal("serve", "tagger", "--estimator", "client,roberta")
    assert "estimator: with an encoder roberta must be there" in refusal("serve", "tagger", "--encoder", str(tmp_path))


def test_a_tag_takes_no_noticeable_time() -> None:
    """The work of `linear` is bounded for prompts of any length: a hundred times the text, less than ten times the time."""
    chain = chained(DEFAULT_ORDER)
    short, long = (Query(prompt="word " * repeats, model="m") for repeats in (600, 60_000))

    def cost_s(query: Query) -> float:
        start_s = time.thread_time()
        chain.estimate(query)
        return time.thread_time() - start_s

    assert min(cost_s(long) for _ in range(50)) < 10 * min(cost_s(short) for _ in range(50))
