"""Runs vLLM's own LRU of LoRA adapters, and its processors' rules for images, without a model.

Runs under the interpreter that has vLLM and imports nothing of this project. Reads `{"adapters": [...], "sizes": [...]}`
on standard input, and writes `{"adapters": [...], "sizes": {...}}`.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

from transformers.image_processing_utils import select_best_resolution
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

# vLLM imports it for pixels, which nothing here reads, and its CPU build comes without it
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.functional"):
    sys.modules.setdefault(name, mock.MagicMock(__spec__=mock.MagicMock()))

from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager  # noqa: E402
from vllm.model_executor.models.llava_next import LlavaNextProcessingInfo  # noqa: E402
from vllm.transformers_utils.processors.internvl import calculate_internvl_targets, get_internvl_target_ratios  # noqa: E402

GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def worker_with(max_loras: int, max_cpu_loras: int) -> Any:
    """Return vLLM's manager of a worker's adapters, which loads nothing."""
    manager = LRUCacheLoRAModelManager.__new__(LRUCacheLoRAModelManager)
    manager.lora_config = SimpleNamespace(max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    manager._registered_adapters = AdapterLRUCache(max_cpu_loras, manager.deactivate_adapter)
    manager._active_adapters = AdapterLRUCache(max_loras, manager._deactivate_adapter)
    manager.lora_index_to_id = [None] * max_loras
    manager.modules = {}
    manager._add_adapter = lambda lora: manager._registered_adapters.__setitem__(lora.id, lora)
    worker = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
    worker._adapter_manager = manager
    worker._load_adapter = lambda request: SimpleNamespace(id=request.lora_int_id)
    return worker


def adapter_steps(case: dict[str, Any]) -> list[Any]:
    """Return the adapters in host memory, the least recently used one first, and those in GPU slots, after each step."""
    worker = worker_with(case["max_loras"], case["max_cpu_loras"])
    manager, after = worker._adapter_manager, []
    for numbers in case["steps"]:
        worker._apply_adapters([LoRARequest(f"a{one}", one, f"/{one}") for one in numbers])
        after.append([list(manager._registered_adapters.order), sorted(manager._active_adapters.order)])
    return after


def next_tokens(width: int, height: int) -> int:
    """Count the tokens of an image as LLaVA-NeXT's processor does."""
    high, wide = select_best_resolution((height, width), GRIDS)
    unpadded, newlines = LlavaNextProcessingInfo._get_num_unpadded_features(
        None,
        original_height=height,
        original_width=width,
        npatches=24,
        num_patch_height=high // 336,
        num_patch_width=wide // 336,
    )
    return 576 + unpadded + newlines


def tile_tokens(width: int, height: int) -> int:
    """Count the tokens of an image as InternVL's processor does."""
    blocks, _, _ = calculate_internvl_targets(
        orig_width=width,
        orig_height=height,
        target_ratios=get_internvl_target_ratios(1, 12),
        image_size=448,
        use_thumbnail=True,
    )
    return 256 * blocks


def resized_tokens(width: int, height: int, factor: int, least: int, most: int) -> int:
    """Count the tokens of an image as the processors of Qwen's models do."""
    high, wide = smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
    return high // factor * (wide // factor)


def main() -> None:
    """Answer the question on standard input; vLLM's output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    json.dump(
        {
            "adapters": [adapter_steps(case) for case in asked["adapters"]],
            "sizes": {
                "llava-next": [next_tokens(*size) for size in asked["sizes"]],
                "internvl": [tile_tokens(*size) for size in asked["sizes"]],
                "qwen2-vl": [resized_tokens(*size, 28, 4 * 28 * 28, 16384 * 28 * 28) for size in asked["sizes"]],
                "qwen3-vl": [resized_tokens(*size, 32, 65_536, 16_777_216) for size in asked["sizes"]],
            },
        },
        answers,
    )
    answers.close()


if __name__ == "__main__":
    main()
