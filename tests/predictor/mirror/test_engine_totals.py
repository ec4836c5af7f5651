"""What is read from an engine's /metrics and /v1/models."""

from __future__ import annotations

import pytest

from predictor.mirror.engine_totals import EngineTotals, model_length_from, totals_from

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


def test_it_reads_what_there_is() -> None:
    """Old spellings count too, engines behind one address are summed up, and what makes no sense is left out."""
    totals = totals_from(TEXT)
    assert (totals.running, totals.waiting, totals.kv_usage) == (3, 1, 0.25)
    assert totals.generation_tokens == 2000
    assert totals.prompt_tokens is None
    assert totals.settings == {"num_gpu_blocks": 2048, "block_size": 16, "enable_prefix_caching": True}


@pytest.mark.parametrize(
    "text", ["", "garbage\n\x00", "vllm:num_requests_running{ 1", 'vllm:cache_config_info{block_size="None"} 1']
)
def test_what_tells_nothing_is_nothing(text: str) -> None:
    """Garbage is no reading, and no failure."""
    assert totals_from(text) == EngineTotals()


def test_counters_that_go_back_are_another_engines() -> None:
    """As are those that were created later."""
    before = EngineTotals(generation_tokens=100, created_s=5.0)
    assert EngineTotals(generation_tokens=99).began_anew(before)
    assert EngineTotals(generation_tokens=200, created_s=6.0).began_anew(before)
    assert not EngineTotals(generation_tokens=100, created_s=5.0).began_anew(before)
    assert EngineTotals(generation_tokens=101).shows_progress(before)


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (b'{"data": [{"id": "a", "max_model_len": 512}, {"id": "lora", "max_model_len": null}]}', 512),
        (b'{"data": []}', None), (b"[]", None), (b"nonsense", None), (b'{"data": [{"max_model_len": "x"}]}', None),
    ],
)  # fmt: skip
def test_how_long_requests_may_be(body: bytes, length: int | None) -> None:
    """By any of the models that the engine serves."""
    assert model_length_from(body) == length
