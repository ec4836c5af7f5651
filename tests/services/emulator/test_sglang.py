"""The emulated engine that speaks SGLang's HTTP API."""

from __future__ import annotations

from pathlib import Path

import pytest

from predictor.batching import settled
from predictor.config import EngineConfig
from predictor.mirror.engine_kinds import SGLANG, kind_of
from predictor.mirror.sglang_metrics import parse_server_info, parse_sglang_metrics
from services.emulator.settings import EmulatorSettings
from tests.services.emulator.running import emulated, events

CONFIG = EngineConfig(
    batcher="sglang", max_num_seqs=16, num_gpu_blocks=4096, block_size=1, max_model_len=1024,
    batcher_options={"schedule_conservativeness": 1.5},
)  # fmt: skip


def test_it_is_sglang_by_all_that_it_says(tmp_path: Path) -> None:
    """Its models, metrics and /server_info are SGLang's, and give the settings with which it runs."""
    with emulated(tmp_path, CONFIG, engine_kind="sglang") as engine:
        replies = {path: engine.client.get(f"/{path}") for path in ("v1/models", "metrics", "version", "server_info")}
        assert [reply.status_code for reply in replies.values()] == [200, 200, 404, 200]
        models, metrics, _, info = (reply.content for reply in replies.values())
        assert kind_of(models=models, metrics=None, version=None, server_info=None) == SGLANG
        assert kind_of(models=None, metrics=metrics, version=None, server_info=None) == SGLANG
        assert kind_of(models=None, metrics=None, version=None, server_info=info) == SGLANG
        settings, approximations = parse_server_info(info)
        config, max_model_len = settled(CONFIG), replies["v1/models"].json()["data"][0]["max_model_len"]
        assert approximations == ()
        assert settled(EngineConfig(batcher="sglang", max_model_len=max_model_len, **settings)) == config
        assert parse_sglang_metrics(metrics.decode()).settings == {
            "block_size": 1, "num_gpu_blocks": 4096, "max_model_len": 1024,
        }  # fmt: skip
        assert engine.client.get("/health_generate").status_code == 200
        assert engine.client.get("/get_model_info").json()["is_generation"] is True


def test_replies_have_sglangs_fields(tmp_path: Path) -> None:
    """Ids without a prefix, `matched_stop`, and usage with reasoning tokens."""
    with emulated(tmp_path, CONFIG, engine_kind="sglang") as engine:
        reply = engine.client.post(
            "/v1/completions", json={"prompt": "Hello", "max_tokens": 5, "ignore_eos": True},
            headers={"x-request-id": "mine"},
        ).json()  # fmt: skip
        assert reply["id"] == "mine"
        assert reply["choices"][0]["matched_stop"] is None
        assert reply["usage"]["completion_tokens"] == 5
        assert reply["usage"]["reasoning_tokens"] == 0
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True, "stream": True}
        chunks = events(engine.client.post("/v1/chat/completions", json=body).text)
        assert not chunks[0]["id"].startswith("chatcmpl-")
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert "matched_stop" in chunks[-1]["choices"][0]
        metrics = parse_sglang_metrics(engine.client.get("/metrics").text)
        assert (metrics.running, metrics.waiting, metrics.kv_usage) == (0, 0, 0)
        assert metrics.prompt_tokens is not None
        assert metrics.prompt_tokens > reply["usage"]["prompt_tokens"]


def test_a_wrong_kind_is_refused() -> None:
    """One line names the field."""
    with pytest.raises(ValueError, match="^engine_kind: must be one of .*, not 'tgi'"):
        EmulatorSettings(model="tiny", engine_kind="tgi")
