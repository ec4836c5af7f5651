"""Compares the memory of LoRA adapters, and the tokens of images, with vLLM 0.32 and the processors that it runs."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from predictor.config import EngineConfig
from predictor.engine import Engine, bring_adapter
from predictor.media_tokens import image_tokens
from tests.conformance.vllm_side import input_answers, interpreter
from tests.strategies import ONE_SECOND

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    """Draw steps of adapters, and sizes of images."""
    rng = Random(5)
    cases = []
    for _ in range(200):
        max_loras = rng.randint(1, 4)
        numbers = range(1, rng.randint(2, 10))
        steps = [rng.sample(numbers, min(len(numbers), rng.randint(1, max_loras))) for _ in range(30)]
        cases.append({"max_loras": max_loras, "max_cpu_loras": max_loras + rng.randint(0, 4), "steps": steps})
    sizes = [(rng.randint(1, 4000), rng.randint(1, 4000)) for _ in range(400)]
    sizes = [size for size in sizes if max(size) / min(size) < 190]
    return {"adapters": cases, "sizes": [*sizes, (336, 336), (672, 672), (448, 448), (28, 28), (4000, 21)]}


@pytest.fixture(scope="module")
def answered(asked: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's answers."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    return dict(json.loads(input_answers(asked)))


def test_adapters_are_in_memory_as_in_the_worker_of_vllm(asked: dict[str, Any], answered: dict[str, Any]) -> None:
    """After each step the same adapters are in host memory, in the same order, and the same ones in GPU slots."""
    for case, theirs in zip(asked["adapters"], answered["adapters"], strict=True):
        config = EngineConfig(max_loras=case["max_loras"], max_cpu_loras=case["max_cpu_loras"], num_gpu_blocks=4)
        engine = Engine(config, ONE_SECOND)
        for numbers, (registered, active) in zip(case["steps"], theirs, strict=True):
            for number in numbers:
                bring_adapter(engine.state, number)
            loaded = engine.adapters()
            assert [adapter.number for adapter in loaded] == registered
            assert sorted(adapter.number for adapter in loaded if adapter.is_active) == active


@pytest.mark.parametrize("model", ["llava-next", "internvl", "qwen2-vl", "qwen3-vl"])
def test_images_have_the_tokens_that_the_processor_makes(
    model: str, asked: dict[str, Any], answered: dict[str, Any]
) -> None:
    """Every size has the same number of tokens."""
    ours = [image_tokens(model, tuple(size)).tokens for size in asked["sizes"]]
    assert ours == answered["sizes"][model]
