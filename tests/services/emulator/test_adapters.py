"""LoRA adapters of an emulated engine: listed, loaded, unloaded, named as a model, and shown to sidecars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predictor.config import EngineConfig
from predictor.request import adapter_number
from services.emulator.adapters import modules_from
from services.emulator.server import with_adapters
from services.emulator.settings import EmulatorSettings
from services.engine_state.reader import Reader
from services.engine_state.snapshot import snapshot_from_view
from tests.services.emulator.running import CONFIG, MODEL, Emulated, emulated

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
WITH_ADAPTERS = replace(CONFIG, max_loras=2, max_cpu_loras=3, lora_load_s=0.5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """An engine with two adapters."""
    modules = ("sql=/loras/sql", "chat=/loras/chat")
    folder = tmp_path_factory.mktemp("adapters")
    with emulated(folder, WITH_ADAPTERS, enable_lora=True, lora_modules=modules) as running:
        yield running


def listed(engine: Emulated) -> dict[str, Any]:
    """Return the cards of /v1/models by id."""
    return {card["id"]: card for card in engine.client.get("/v1/models").json()["data"]}


def test_adapters_are_listed_with_their_base_model(engine: Emulated) -> None:
    """As in vLLM, an adapter has a parent, and its path is its root."""
    cards = listed(engine)
    assert list(cards)[:3] == [MODEL, "sql", "chat"]
    assert (cards["sql"]["parent"], cards["sql"]["root"], cards[MODEL]["parent"]) == (MODEL, "/loras/sql", None)


def test_a_request_names_an_adapter_as_its_model(engine: Emulated) -> None:
    """The reply names it, the state file has it, and the engine has it in memory."""
    reply = engine.complete(model="sql", max_tokens=3)
    assert reply["model"] == "sql"
    view = Reader(str(engine.state_file)).read()
    assert [number for number, _ in view.adapters.tolist()][-1] == adapter_number("sql")
    snapshot = snapshot_from_view(view)
    assert [one.is_active for one in snapshot.adapters] == [True, True]
    assert snapshot.config.max_loras == 2


def test_the_metrics_name_adapters_and_their_limit(engine: Emulated) -> None:
    """The labels are vLLM's."""
    text = engine.client.get("/metrics").text
    (line,) = [one for one in text.splitlines() if one.startswith("vllm:lora_requests_info{")]
    assert 'max_lora="2"' in line
    assert 'running_lora_adapters=""' in line
    assert 'waiting_lora_adapters=""' in line


def test_adapters_are_loaded_and_unloaded(engine: Emulated) -> None:
    """A new one can be named at once; an unloaded one no more."""
    loaded = engine.client.post(LOAD, json={"lora_name": "new", "lora_path": "/loras/new"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert "new" in listed(engine)
    assert engine.complete(model="new", max_tokens=2)["model"] == "new"
    unloaded = engine.client.post(UNLOAD, json={"lora_name": "new"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    refused = engine.client.post("/v1/completions", json={"model": "new", "prompt": "Hi"})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].startswith("The model `new` does not exist.")


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {"lora_name": "a"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (
            LOAD,
            {"lora_name": MODEL, "lora_path": "/x"},
            400,
            f"The lora adapter '{MODEL}' conflicts with a served base",
        ),
        (LOAD, {"lora_name": "sql", "lora_path": "/x"}, 400, "The lora adapter 'sql' has already been loaded."),
        (LOAD, {"lora_name": 5, "lora_path": "/x"}, 400, "1 validation error"),
        (UNLOAD, {}, 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
        (UNLOAD, {"lora_name": "other"}, 404, "The lora adapter 'other' cannot be found."),
    ],
)
def test_impossible_orders_are_refused_as_by_vllm(
    engine: Emulated, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    """The message is vLLM's."""
    reply = engine.client.post(path, json=body)
    assert reply.status_code == status
    assert reply.json()["error"]["message"].startswith(message)


def test_an_engine_without_adapters_has_no_such_paths(tmp_path: Path) -> None:
    """As vLLM without --enable-lora."""
    with emulated(tmp_path) as engine:
        assert engine.client.post(LOAD, json={"lora_name": "a", "lora_path": "/a"}).status_code == 404
        assert "lora" not in engine.client.get("/metrics").text


def test_settings_of_adapters_are_checked() -> None:
    """Each error names its setting."""
    assert modules_from(["a=/x=y"]) == {"a": "/x=y"}
    with pytest.raises(ValueError, match="lora_modules: 'a' is not NAME=PATH"):
        modules_from(["a"])
    with pytest.raises(ValueError, match="lora_modules: 'a' is a duplicate"):
        modules_from(["a=/x", "a=/y"])
    with pytest.raises(ValueError, match="lora_modules: need enable_lora"):
        EmulatorSettings(model="m", lora_modules=("a=/x",))
    with pytest.raises(ValueError, match="max_loras: 2 needs enable_lora"):
        with_adapters(EngineConfig(max_loras=2), enabled=False)
    assert with_adapters(EngineConfig(), enabled=True).max_loras == 1
