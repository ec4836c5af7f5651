"""Mirrors of engines that are not vLLM: SGLang, and engines about which nothing is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from predictor.config import EngineConfig
from predictor.generic_estimate import generic_profile
from predictor.mirror.engine_kinds import OTHER_TIMES
from predictor.request import RequestFacts
from services.http.client import HttpClient
from services.http.origin import origin_of
from services.predictor_server.engine_identification import NO_INFO, identify
from services.predictor_server.settings import MirrorSettings
from tests.services.emulator.running import emulated
from tests.services.predictor_server.running_mirrors import forecast_by, mirror_of
from tests.services.predictor_server.running_sidecars import run
from tests.services.predictor_server.scripted_engine import scripted_engine

SGLANG = EngineConfig(
    batcher="sglang", max_num_seqs=16, num_gpu_blocks=4096, block_size=1, max_model_len=1024,
    max_num_batched_tokens=512,
)  # fmt: skip
CANDIDATE = RequestFacts(request_id="candidate", prompt_tokens=100, output_tokens=50)
INFO = {"page_size": 1, "max_total_num_tokens": 5000, "max_running_requests": 4, "schedule_policy": "fcfs"}


def test_an_sglang_engine_is_found_out_and_followed(tmp_path: Path) -> None:
    """Its kind and its settings come from its own replies, and a forecast equals that of its own model while idle."""

    async def check(url: str) -> None:
        async with mirror_of(url, engine={}) as mirror:
            await mirror.until(lambda: mirror.mirror.source.config is not None or _ready(mirror))
            assert (await mirror.complete(max_tokens=5)).status_code == 200
            await mirror.until(lambda: _batcher(mirror) == "sglang")
            config = mirror.mirror.source.refresh().engine.config
            assert (config.block_size, config.num_gpu_blocks, config.max_num_seqs) == (1, 4096, 16)
            assert (config.max_num_batched_tokens, config.max_model_len) == (512, 1024)
            assert mirror.mirror.source.refresh().approximations[1] == OTHER_TIMES
            assert forecast_by(mirror.mirror.source, CANDIDATE).e2e_s > 0

    with emulated(tmp_path, SGLANG, engine_kind="sglang", state_file="") as engine:
        run(check(str(engine.client.base_url).rstrip("/")))


def _ready(mirror: Any) -> bool:
    try:
        mirror.mirror.source.refresh()
    except Exception:  # noqa: BLE001 - it starts
        return False
    return True


def _batcher(mirror: Any) -> str:
    return mirror.mirror.source.refresh().engine.config.batcher if _ready(mirror) else ""


def test_an_engine_without_metrics_or_a_version_is_served_and_forecast() -> None:
    """Nothing but completions: the forecast is that of a generic engine, and says how wrong it may be."""

    async def check() -> None:
        async with (
            scripted_engine({}) as url,
            mirror_of(url, engine={}, profile=generic_profile(), counts_prompts=False) as mirror,
        ):
            await mirror.until(lambda: _batcher(mirror) == "generic")
            first = mirror.mirror.source.refresh().approximations
            assert "guessed" in first[-1]
            for _ in range(3):
                assert (await mirror.complete(max_tokens=5)).status_code == 200
            second = mirror.mirror.source.refresh().approximations
            assert "the engine is of unknown kind" in second[1]
            assert "by 3 requests" in second[-1]
            assert "%" in second[-1]
            assert forecast_by(mirror.mirror.source, CANDIDATE).e2e_s > 0

    run(check())


@pytest.mark.parametrize(
    ("replies", "kind", "approximations"),
    [
        ({"/server_info": INFO}, "sglang", 2),
        ({"/get_server_info": INFO}, "sglang", 2),
        ({"/v1/models": {"data": [{"owned_by": "sglang"}]}, "/server_info": {"x": 1}}, "sglang", 1),
        ({"/v1/models": {"data": [{"owned_by": "vllm"}]}}, "vllm", 0),
        ({"/version": {"version": "0.30.0"}}, "vllm", 0),
        ({"/metrics": "garbage"}, "generic", 0),
    ],
)
def test_identification_by_http(replies: dict[str, Any], kind: str, approximations: int) -> None:
    """Missing paths are no errors; what SGLang does not say is one sentence each."""

    async def check() -> None:
        client = HttpClient()
        async with scripted_engine(replies) as url:
            event = await identify(client, origin_of(url), "auto")
        client.close()
        assert event.kind == kind
        assert len(event.approximations) == approximations
        assert all("\n" not in note for note in event.approximations)
        if replies.get("/server_info") == {"x": 1}:
            assert event.approximations == (NO_INFO,)

    run(check())


def test_an_engine_that_starts_is_not_identified_yet() -> None:
    """A reply 503 says nothing about its kind."""

    async def check() -> None:
        client = HttpClient()
        async with scripted_engine({}, status=503) as url:
            with pytest.raises(ConnectionError, match="returns 503"):
                await identify(client, origin_of(url), "auto")
        client.close()

    run(check())


def test_an_engine_that_fails_on_unknown_paths_is_generic() -> None:
    """A path that it does not serve is none, whatever the status; settings that SGLang serves are asked for again."""

    async def check() -> None:
        client = HttpClient()
        for status in (500, 501):
            async with scripted_engine({}, status=status) as url:
                assert (await identify(client, origin_of(url), "auto")).kind == "generic"
            async with scripted_engine({"/v1/models": {"data": [{"owned_by": "sglang"}]}}, status=status) as url:
                with pytest.raises(ConnectionError, match=f"server_info returns {status}"):
                    await identify(client, origin_of(url), "auto")
        client.close()

    run(check())


def test_a_wrong_kind_is_refused() -> None:
    """One line names the field."""
    with pytest.raises(ValueError, match="^engine_kind: must be one of .*, not 'tgi'"):
        MirrorSettings(engine_url="http://127.0.0.1:1", engine_kind="tgi")
