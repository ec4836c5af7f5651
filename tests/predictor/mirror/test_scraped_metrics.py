"""Parsing of an engine's /metrics and /v1/models."""

from __future__ import annotations

import pytest

from predictor.mirror.scraped_metrics import (
    ScrapedMetrics,
    parse_adapters,
    parse_max_model_len,
    parse_metrics,
    parse_version,
)
from predictor.speculation import DraftTotals

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="a, \\"b\\""} 3.0
vllm:num_requests_waiting{engine="0"} 1e+00
vllm:gpu_cache_usage_perc{engine="0"} 0.25
vllm:generation_tokens_total{engine="0"} 1.5e+03
vllm:generation_tokens_total{engine="1"} 500.0
vllm:prompt_tokens_total NaN
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="2048",x="None"} 1.0
process_start_time_seconds 17
"""


def test_metrics_are_parsed() -> None:
    """Old spellings are accepted, several engines are added up, and invalid values are left out."""
    metrics = parse_metrics(TEXT)
    assert (metrics.running, metrics.waiting, metrics.kv_usage) == (3, 1, 0.25)
    assert metrics.generation_tokens == 2000
    assert metrics.prompt_tokens is None
    assert metrics.settings == {"num_gpu_blocks": 2048, "block_size": 16, "enable_prefix_caching": True}


def test_an_engine_that_fetches_kv_blocks_is_known_by_its_metrics() -> None:
    """Requests whose fetch has not started, or has ended, are not counted."""
    stages = ("waiting_to_start", "in_progress", "completed_waiting")
    lines = [f'vllm:num_requests_kv_fetch_by_stage{{stage="{name}"}} {n}.0' for n, name in enumerate(stages, 3)]
    metrics = parse_metrics("\n".join(lines))
    assert (metrics.fetching, metrics.settings) == (4, {"kv_role": "kv_both"})


DRAFTS = """vllm:generation_tokens_total{engine="0"} 5000.0
vllm:spec_decode_num_drafts_total{engine="0"} 1000.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 2000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 900.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 600.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 300.0
"""


def test_counters_of_speculative_decoding_are_read() -> None:
    """The positions tell how many tokens a draft has, and tokens that no draft brought how often there was none."""
    metrics = parse_metrics(DRAFTS)
    assert metrics.drafts == DraftTotals(num_drafts=1000, num_draft_tokens=2000, accepted=(600, 300), num_chances=4100)
    assert metrics.settings == {"speculative_method": "eagle", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    "text",
    [
        DRAFTS.replace('position="0"', 'position="5"'),
        DRAFTS.replace('position="0"', 'position="x"'),
        DRAFTS.replace("num_drafts_total", "num_x_total"),
        DRAFTS.replace(" 600.0", " 9e9"),
        DRAFTS.replace(" 600.0", " NaN"),
    ],
)
def test_inconsistent_counters_of_drafts_are_left_out(text: str) -> None:
    """Without all positions, or with more accepted than drafted, nothing can be learnt."""
    metrics = parse_metrics(text)
    assert (metrics.drafts, metrics.settings) == (None, {})


def test_speculation_beside_a_connector_is_not_assumed() -> None:
    """The engine model has no legs with draft tokens; the mirror goes on without them."""
    stage = 'vllm:num_requests_kv_fetch_by_stage{stage="in_progress"} 1.0'
    assert parse_metrics(f"{DRAFTS}{stage}").settings == {"kv_role": "kv_both"}


@pytest.mark.parametrize(
    "text", ["", "garbage\n\x00", "vllm:num_requests_running{ 1", 'vllm:cache_config_info{block_size="None"} 1']
)
def test_text_without_metrics_is_an_empty_scrape(text: str) -> None:
    """Garbage is neither a metric nor an error."""
    assert parse_metrics(text) == ScrapedMetrics()


def test_lower_or_newer_counters_show_a_restart() -> None:
    """Counters only grow while an engine runs."""
    before = ScrapedMetrics(generation_tokens=100, created_s=5.0)
    assert ScrapedMetrics(generation_tokens=99).shows_restart_since(before)
    assert ScrapedMetrics(generation_tokens=200, created_s=6.0).shows_restart_since(before)
    assert not ScrapedMetrics(generation_tokens=100, created_s=5.0).shows_restart_since(before)
    assert ScrapedMetrics(generation_tokens=101).shows_progress_since(before)


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (b'{"data": [{"id": "a", "max_model_len": 512}, {"id": "lora", "max_model_len": null}]}', 512),
        (b'{"data": []}', None), (b"[]", None), (b"nonsense", None), (b'{"data": [{"max_model_len": "x"}]}', None),
    ],
)  # fmt: skip
def test_max_model_len_is_parsed(body: bytes, length: int | None) -> None:
    """The largest of all models counts."""
    assert parse_max_model_len(body) == length


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b'{"version": "0.31.0"}', "0.31.0"), (b'{"version": 0.31}', ""), (b'{"v": "0.31.0"}', ""), (b"[]", ""),
        (b"no JSON", ""), (b"\xff", ""),
    ],
)  # fmt: skip
def test_a_version_is_parsed(body: bytes, version: str) -> None:
    """What is no text is no version."""
    assert parse_version(body) == version


def test_adapters_and_their_limit_are_read() -> None:
    """The limit from the labels of a metric, the names from the list of models; impossible values are left out."""
    line = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql,chat",waiting_lora_adapters=""} 1.7e+09'
    assert parse_metrics(line).settings["max_loras"] == 4
    assert "max_loras" not in parse_metrics(line.replace('"4"', '"99999"')).settings
    assert "max_loras" not in parse_metrics(line.replace('"4"', '"x"')).settings
    body = b'{"data": [{"id": "base", "parent": null}, {"id": "sql", "parent": "base"}]}'
    assert parse_adapters(body) == {"sql"}
    assert parse_adapters(b"not JSON") == parse_adapters(b'{"data": 5}') == frozenset()
