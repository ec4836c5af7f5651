"""Parsing of SGLang's /metrics and /server_info, and how kinds of engines are recognized."""

from __future__ import annotations

import json
from typing import Any

import pytest

from predictor.batching import settled
from predictor.config import EngineConfig
from predictor.mirror.engine_kinds import GENERIC, SGLANG, VLLM, kind_of
from predictor.mirror.scraped_metrics import ScrapedMetrics
from predictor.mirror.sglang_metrics import parse_server_info, parse_sglang_metrics

TEXT = """# HELP sglang:num_running_reqs The number of running requests.
sglang:num_running_reqs{engine_type="unified",model_name="a",pp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="a",pp_rank="0",tp_rank="0",priority="5"} 2.0
sglang:num_queue_reqs{model_name="a"} 1.0
sglang:token_usage{model_name="a"} 0.25
sglang:prompt_tokens_total{model_name="a",is_streaming="true"} 700.0
sglang:prompt_tokens_total{model_name="a",is_streaming="false"} 300.0
sglang:cached_tokens_total{model_name="a",cache_source="device"} 100.0
sglang:num_retracted_requests_total{model_name="a"} 2.0
sglang:max_total_num_tokens{model_name="a"} 4096.0
sglang:page_size{model_name="a"} 16.0
sglang:context_len{model_name="a"} 2048.0
sglang:gen_throughput{model_name="a"} NaN
"""
INFO: dict[str, Any] = {
    "page_size": 1, "max_total_num_tokens": 50_000, "max_running_requests": 128, "chunked_prefill_size": 4096,
    "max_prefill_tokens": 16384, "schedule_policy": "lpm", "schedule_conservativeness": 1.3,
    "enable_mixed_chunk": False, "disable_radix_cache": False, "disable_overlap_schedule": False,
}  # fmt: skip


def info_with(**changes: Any) -> bytes:
    """Write a /server_info; a field that is None is left out."""
    return json.dumps({name: value for name, value in {**INFO, **changes}.items() if value is not None}).encode()


def test_metrics_are_parsed() -> None:
    """Counts by priority are parts of others; tokens that are counted at the end of a request are no progress."""
    metrics = parse_sglang_metrics(TEXT)
    assert (metrics.running, metrics.waiting, metrics.kv_usage, metrics.preemptions) == (3, 1, 0.25, 2)
    assert (metrics.prefix_queries, metrics.prefix_hits) == (1000, 100)
    assert metrics.generation_tokens is None
    assert metrics.settings == {"block_size": 16, "num_gpu_blocks": 256, "max_model_len": 2048}


@pytest.mark.parametrize(
    "text", ["", "sglang:num_running_reqs{ 1", "sglang:num_running_reqs --1", "sglang:page_size 0"]
)
def test_text_without_metrics_is_an_empty_scrape(text: str) -> None:
    """Garbage is neither a metric nor an error."""
    assert parse_sglang_metrics(text) == ScrapedMetrics(updates_rarely=True)


def test_a_scrape_that_repeats_the_last_one_says_nothing() -> None:
    """SGLang updates its gauges with prefills, and with every 40th decode."""
    metrics = parse_sglang_metrics(TEXT)
    assert metrics.repeats(parse_sglang_metrics(TEXT))
    assert not metrics.repeats(parse_sglang_metrics(TEXT.replace("0.25", "0.26")))
    assert not ScrapedMetrics(running=1).repeats(ScrapedMetrics(running=1))


def test_server_info_gives_the_engines_settings() -> None:
    """Its limits and rules have other names there; a page is a block."""
    settings, approximations = parse_server_info(info_with())
    config = settled(EngineConfig(batcher="sglang", **settings))
    assert approximations == ()
    assert (config.block_size, config.num_gpu_blocks, config.max_num_seqs) == (1, 50_000, 128)
    assert (config.max_num_batched_tokens, config.enable_chunked_prefill, config.async_scheduling) == (4096, True, True)
    assert config.batcher_options["longest_prefix_match"] == 1.0
    assert config.batcher_options["schedule_conservativeness"] == 1.3


@pytest.mark.parametrize(
    ("changes", "settings", "note"),
    [
        ({"max_running_requests": None, "internal_states": [{"effective_max_running_requests_per_dp": 48}]},
         {"max_num_seqs": 48}, ""),
        ({"chunked_prefill_size": -1}, {"enable_chunked_prefill": False, "max_num_batched_tokens": 16384}, ""),
        ({"page_size": 64, "chunked_prefill_size": 1000}, {"max_num_batched_tokens": 1024}, ""),
        ({"max_running_requests": None}, {}, "max_running_requests is missing"),
        ({"max_running_requests": "many"}, {}, "max_running_requests is 'many'"),
        ({"schedule_policy": "hrrn"}, {}, "schedule_policy 'hrrn' is forecast as fcfs"),
        ({"schedule_conservativeness": -1}, {}, "schedule_conservativeness is '-1'"),
        ({"enable_priority_scheduling": True}, {}, "priority scheduling"),
        ({"speculative_algorithm": "EAGLE"}, {}, "speculative decoding"),
        ({"internal_states": ["x"]}, {"max_num_seqs": 128}, ""),
    ],
)  # fmt: skip
def test_what_server_info_lacks_is_named(changes: dict[str, Any], settings: dict[str, Any], note: str) -> None:
    """A missing or unusable field leaves a default, and one sentence for the forecasts' explanations."""
    got, approximations = parse_server_info(info_with(**changes))
    assert {name: got[name] for name in settings} == settings
    assert (note in " ".join(approximations)) if note else approximations == ()
    settled(EngineConfig(batcher="sglang", **got))


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b'"x"', b'{"version": "1"}', b"[" * 100_000])
def test_what_is_no_server_info_is_refused(body: bytes) -> None:
    """One line says so."""
    with pytest.raises(ValueError, match="^server_info: [^\n]*$"):
        parse_server_info(body)


@pytest.mark.parametrize(
    ("replies", "kind"),
    [
        ({"models": b'{"data": [{"owned_by": "vllm"}]}'}, VLLM),
        ({"models": b'{"data": [{"owned_by": "sglang"}]}'}, SGLANG),
        ({"models": b'{"data": [{"owned_by": "me"}]}', "metrics": b"x 1\nsglang:token_usage 0\n"}, SGLANG),
        ({"metrics": b"# HELP\nvllm:num_requests_running 0\n"}, VLLM),
        ({"version": b'{"version": "0.32.0"}'}, VLLM),
        ({"server_info": json.dumps(INFO).encode()}, SGLANG),
        ({"server_info": b"{}", "version": b"[]", "models": b"nonsense", "metrics": b"\xff\x00"}, GENERIC),
        ({}, GENERIC),
    ],
)  # fmt: skip
def test_kinds_of_engines_are_recognized_by_their_replies(replies: dict[str, bytes], kind: str) -> None:
    """By the owner of the models, the names of the metrics, and the paths that only one kind serves."""
    assert kind_of(**{"models": None, "metrics": None, "version": None, "server_info": None, **replies}) == kind
