"""Emulated engines with speculative decoding: several tokens in a chunk, and vLLM's counters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from predictor.mirror.scraped_metrics import parse_metrics
from services.engine_state.reader import Reader
from simulator.speculative_config import speculative_settings
from tests.services.emulator.running import CONFIG, PATIENCE_S, emulated, events

NGRAM = replace(CONFIG, speculative_method="ngram", num_speculative_tokens=3, speculative_acceptance=0.6)


def test_accepted_tokens_come_together(tmp_path: Path) -> None:
    """A stream has fewer chunks than tokens, the same text as without speculation, and the counters agree with it."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with emulated(tmp_path, NGRAM) as engine:
        text = engine.complete(**body)["choices"][0]["text"]
        stream = engine.client.post("/v1/completions", json={**body, "stream": True}).text
        chunks = [event["choices"][0]["text"] for event in events(stream)]
        assert "".join(chunks) == text
        engine.until(engine.is_idle)
        metrics = parse_metrics(engine.client.get("/metrics").text)
        assert metrics.generation_tokens == 800
        drafts = metrics.drafts
        assert drafts is not None
        assert drafts.accepted[0] / drafts.num_drafts == pytest.approx(0.6, abs=0.12)
        assert drafts.accepted[1] / drafts.accepted[0] == pytest.approx(0.6, abs=0.15)
        assert engine.metric("vllm:spec_decode_num_accepted_tokens_total") == sum(drafts.accepted)
        reader = Reader(str(engine.state_file), patience_s=PATIENCE_S)
        state = reader.read().state
        assert int(state["num_drafts"]) == drafts.num_drafts
        assert tuple(state["num_accepted"][:4]) == (*drafts.accepted, 0)
        reader.close()
    with emulated(tmp_path) as engine:
        assert engine.complete(**body)["choices"][0]["text"] == text


def test_a_draft_is_not_always_proposed(tmp_path: Path) -> None:
    """N-gram look-up proposes in the configured share of steps."""
    with emulated(tmp_path, replace(NGRAM, speculative_proposals=0.25, speculative_acceptance=0.0)) as engine:
        engine.complete(max_tokens=500)
        reader = Reader(str(engine.state_file), patience_s=PATIENCE_S)
        state = reader.read().state
        assert int(state["num_drafts"]) / int(state["num_draft_chances"]) == pytest.approx(0.25, abs=0.08)
        reader.close()


def test_engines_without_speculation_have_no_such_metrics(tmp_path: Path) -> None:
    """As in vLLM."""
    with emulated(tmp_path) as engine:
        assert "spec_decode" not in engine.client.get("/metrics").text


def test_vllms_own_configuration_is_read() -> None:
    """Options that only concern a real model are accepted."""
    text = '{"method": "eagle3", "model": "x", "num_speculative_tokens": 2}'
    assert speculative_settings(text) == {"speculative_method": "eagle", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "speculative_config: is not JSON"),
        ("[]", "speculative_config: must be a JSON object"),
        ('{"method": "ngram"}', "speculative_config.num_speculative_tokens: is missing"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "depth": 1}', "speculative_config.depth: is not emulated"),
        ('{"method": "dflash", "num_speculative_tokens": 3}', "speculative_config.method: must be one of"),
    ],
)
def test_other_configurations_are_refused(text: str, message: str) -> None:
    """In one line that names the field."""
    with pytest.raises(ValueError, match=message):
        speculative_settings(text)
