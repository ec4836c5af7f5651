"""The kinds of engines that a mirror knows, and how it recognizes them by their replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor.mirror.scraped_metrics import json_in, parse_version
from predictor.mirror.sglang_metrics import PREFIX, parse_server_info

VLLM, SGLANG, GENERIC, AUTO = "vllm", "sglang", "generic", "auto"
ENGINE_KINDS = (AUTO, VLLM, SGLANG, GENERIC)
ADAPTER_BATCHERS = ("vllm_v1",)  # local schedulers that limit the adapters of a step
# What a kind's settings are where the engine does not report them: no request then waits for KV blocks.
UNKNOWN_POOL: Mapping[str, Any] = {"block_size": 16, "num_gpu_blocks": 1 << 20}
UNKNOWN_MODEL_LENGTH = 131_072
NO_POOL_SIZE = "the size of the engine's KV cache is unknown, and assumed to be unlimited"
OTHER_TIMES = "step times are those of a profile that was measured with vLLM, corrected by the traffic"
UNKNOWN_KIND = "the engine is of unknown kind, and is forecast as one of continuous batching"


def learnt_times(error: float, num_requests: int) -> str:
    """Return the sentence of forecasts whose step times are learnt from the traffic."""
    if not num_requests:
        return "step times are not known, and guessed until requests have ended"
    return f"step times are learnt from the traffic: the error of e2e is about {error:.0%}, by {num_requests} requests"


def kind_of(*, models: bytes | None, metrics: bytes | None, version: bytes | None, server_info: bytes | None) -> str:
    """Return an engine's kind by the bodies of its replies, None for those that it does not serve."""
    owners = _owners(models)
    for kind in (SGLANG, VLLM):
        if kind in owners:
            return kind
    for line in (metrics or b"").splitlines():
        if line.startswith(PREFIX.encode()):
            return SGLANG
        if line.startswith(b"vllm:"):
            return VLLM
    if server_info is not None:
        try:
            parse_server_info(server_info)
        except ValueError:
            pass
        else:
            return SGLANG
    return VLLM if parse_version(version) else GENERIC


def _owners(models: bytes | None) -> set[str]:
    """Return the owners of the models that an engine lists."""
    data = json_in(models)
    cards = data.get("data") if isinstance(data, Mapping) else None
    if not isinstance(cards, list):
        return set()
    return {str(card.get("owned_by")) for card in cards if isinstance(card, Mapping)}
