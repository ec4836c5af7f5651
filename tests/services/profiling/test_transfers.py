"""Measuring transfers between two engines that speak vLLM's protocol, and what is wrong with others."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predictor.fitting.kv_transfers import MeasuredTransfer
from predictor.profile import load_profile, profile_from_json
from services.profiling.transfers import (
    TransferMeasurement,
    TransferOptions,
    cache_settings,
    measured_transfers,
    totals,
    with_counted_seconds,
)
from tests.services.cli.running import block, refusal
from tests.services.emulator.running import CONFIG, emulated
from tests.services.http_stand_in import StandInHandler, serving

BLOCK_SIZE, BLOCK_BYTES = 32, 2**19
BASE_S, BYTES_PER_S = 0.004, 2e9
CACHE = f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",enable_prefix_caching="CACHING",num_gpu_blocks="65"}} 1.0\n'
EVENT = b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n'


class StandIn:
    """What an engine answers, and what it has counted; a prefill engine holds blocks, a decode engine fetches them."""

    def __init__(self, **changed: Any) -> None:
        self.version, self.caching = "0.32.0", "True"
        self.holds_blocks = self.fetches = self.counts = True
        for name, value in changed.items():
            setattr(self, name, value)
        self.fetched: list[int] = []  # blocks of each transfer

    def metrics(self) -> str:
        """Write its metrics."""
        text = CACHE.replace("CACHING", self.caching)
        text += f"vllm:external_prefix_cache_hits_total {sum(self.fetched) * BLOCK_SIZE}\n"
        if not self.counts:
            return text
        seconds = sum(BASE_S + blocks * BLOCK_BYTES / BYTES_PER_S for blocks in self.fetched)
        text += f"vllm:nixl_xfer_time_seconds_count {len(self.fetched)}\nvllm:nixl_xfer_time_seconds_sum {seconds}\n"
        text += f"vllm:nixl_bytes_transferred_sum {sum(self.fetched) * BLOCK_BYTES}\n"
        return text + f"vllm:nixl_num_descriptors_sum {sum(self.fetched) * 16}\n"

    def complete(self, body: dict[str, Any]) -> bytes:
        """Answer a request."""
        params = body.get("kv_transfer_params") or {}
        blocks = -(-len(body["prompt"]) // BLOCK_SIZE)
        if params.get("do_remote_prefill") and self.fetches:
            assert len(params["remote_block_ids"][0]) == blocks
            self.fetched.append(blocks)
        if body.get("stream"):
            return EVENT
        held = params.get("do_remote_decode") and self.holds_blocks
        reply = {"do_remote_prefill": True, "remote_block_ids": [list(range(blocks))]} if held else None
        return json.dumps({"choices": [], "kv_transfer_params": reply}).encode()


def serving_engine(engine: StandIn) -> AbstractContextManager[str]:
    """Serve a stand-in; the context value is its URL."""

    class Handler(StandInHandler):
        def do_GET(self) -> None:
            card = {"id": "tiny", "root": "/tiny", "max_model_len": 1024}
            answers = {"/version": {"version": engine.version}, "/v1/models": {"data": [card]}}
            self.answer(
                engine.metrics().encode() if self.path == "/metrics" else json.dumps(answers[self.path]).encode()
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.answer(b'{"tokens": [5, 6, 7]}' if self.path == "/tokenize" else engine.complete(body))

    return serving(Handler)


def measured(prefill: StandIn, decode: StandIn, **options: Any) -> TransferMeasurement:
    """Measure between two stand-ins."""
    with serving_engine(prefill) as prefill_url, serving_engine(decode) as decode_url:
        asked = TransferOptions(prefill_url=prefill_url, decode_url=decode_url, budget_s=5.0, **options)
        return asyncio.run(measured_transfers(asked, lambda _: None))


def test_bandwidth_is_that_of_the_counted_transfers() -> None:
    """Prompts of many lengths are fetched; what requests experience in addition is a part of the base."""
    decode = StandIn()
    found = measured(StandIn(), decode)
    assert found.fitted.time.kv_bytes_per_token == BLOCK_BYTES // BLOCK_SIZE
    assert found.fitted.time.kv_transfer_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.01)
    assert (found.fitted.time.kv_transfer_base_s or 0) >= 0.99 * BASE_S
    assert found.block_size == BLOCK_SIZE
    assert len(set(decode.fetched)) >= 6
    assert max(decode.fetched) * BLOCK_SIZE <= 1024


def test_emulated_engines_have_the_transfers_of_their_settings(tmp_path: Path) -> None:
    """Bandwidth and bytes are found, and a base that has at least theirs."""
    settings = {"kv_transfer_base_s": BASE_S, "kv_transfer_bytes_per_s": BYTES_PER_S, "kv_bytes_per_token": 2**17}
    config = replace(CONFIG, **settings)
    for name in ("prefill", "decode"):
        (tmp_path / name).mkdir()
    with (
        emulated(tmp_path / "prefill", replace(config, kv_role="kv_producer"), speed=1.0) as prefill,
        emulated(tmp_path / "decode", replace(config, kv_role="kv_consumer"), speed=1.0) as decode,
    ):
        urls = {"prefill_url": str(prefill.client.base_url), "decode_url": str(decode.client.base_url)}
        found = asyncio.run(measured_transfers(TransferOptions(**urls, budget_s=5.0), lambda _: None)).fitted.time
    assert found.kv_bytes_per_token == config.kv_bytes_per_token
    assert found.kv_transfer_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.01)
    assert (found.kv_transfer_base_s or 0) >= 0.9 * BASE_S


def test_engines_that_count_no_bytes_need_them_given() -> None:
    """Then the time is what requests experience, and the bytes are those of the given size of a token."""
    found = measured(StandIn(), StandIn(counts=False), kv_bytes_per_token=1000)
    assert found.fitted.time.kv_bytes_per_token == 1000
    assert {one.bytes for one in found.transfers} == {1000 * BLOCK_SIZE * one.blocks for one in found.transfers}
    with pytest.raises(ValueError, match="^kv_bytes_per_token: is missing"):
        measured(StandIn(), StandIn(counts=False))


@pytest.mark.parametrize(
    ("prefill", "decode", "error"),
    [
        ({"version": "0.31.0"}, {}, "prefill_url has version 0.31.0 and model tiny .*, decode_url has version 0.32.0"),
        ({"holds_blocks": False}, {}, "prefill_url: it answers without kv_transfer_params; start it with"),
        ({}, {"caching": "False"}, "decode_url: its prefix cache is off"),
    ],
)
def test_engines_that_cannot_be_measured(prefill: dict[str, Any], decode: dict[str, Any], error: str) -> None:
    """The error is one line that says which engine lacks what."""
    with pytest.raises(ValueError, match=f"^{error}[^\n]*$"):
        measured(StandIn(**prefill), StandIn(**decode))


def test_an_engine_that_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes the prompt itself, and that time is not reported as a transfer."""
    monkeypatch.setattr("services.profiling.transfers.COUNTED_WITHIN_S", 0.1)
    with pytest.raises(ValueError, match="^decode_url: it fetched no blocks"):
        measured(StandIn(), StandIn(fetches=False))


def test_the_command_adds_the_transfer_to_a_profile(tmp_path: Path) -> None:
    """The rest of the profile stays as it was."""
    file = tmp_path / "with-transfer.json"
    with serving_engine(StandIn()) as prefill_url, serving_engine(StandIn()) as decode_url:
        urls = ("--prefill-url", prefill_url, "--decode-url", decode_url)
        done = block("profile", "transfer", *urls, "--budget", "5s", "-p", "llama-2-7b-a30", "-o", str(file), "--json")
    made, before = profile_from_json(file.read_text()), load_profile("llama-2-7b-a30")
    assert (made.step_time, made.engine, made.source) == (before.step_time, before.engine, before.source)
    assert made.transfer.kv_bytes_per_token == BLOCK_BYTES // BLOCK_SIZE
    report = json.loads(done.stdout)
    assert report["num_transfers"] == len(report["transfers"])
    assert report["profile"]["transfer"] == report["transfer"]


BAD_FLAGS = (
    ((), "prefill_url: is missing"),
    (("--prefill-url", "http://x"), "decode_url: is missing"),
    (("--prefill-url", "x", "--decode-url", "http://x"), "prefill_url: "),
    (("--prefill-url", "http://x", "--decode-url", "http://x", "--budget", "1s"), "budget: must be at least 5 s"),
    (("-o", "there.json"), "profile: is missing"),
)


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags(flags: tuple[str, ...], message: str) -> None:
    """The error is one line that names the flag."""
    assert message in refusal("profile", "transfer", *flags)


def test_metrics_are_read() -> None:
    """Engines of several ranks are added up; other metrics are left out."""
    text = (
        'vllm:nixl_bytes_transferred_sum{engine="0"} 3.0\nvllm:nixl_bytes_transferred_sum{engine="1"} 4.0\nother 1.0\n'
    )
    assert totals(text) == {"vllm:nixl_bytes_transferred_sum": 7.0}
    assert cache_settings(text) is None
    assert (cache_settings(CACHE) or {})["block_size"] == str(BLOCK_SIZE)


def test_what_requests_experience_beyond_the_copy_is_the_same_for_all() -> None:
    """It is the median of the differences, and not below 0; without counted seconds nothing is replaced."""
    rows = [MeasuredTransfer(blocks=n, bytes=n, seconds=seconds) for n, seconds in ((1, 0.5), (2, 9.0), (3, 0.7))]
    assert [one.seconds for one in with_counted_seconds(rows, [0.1, 0.2, 0.3])] == pytest.approx([0.5, 0.6, 0.7])
    assert [one.seconds for one in with_counted_seconds(rows, [1.0, 10.0, 1.0])] == [1.0, 10.0, 1.0]
    assert with_counted_seconds(rows, [0.1, float("nan"), 0.3]) == rows
