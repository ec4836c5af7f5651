"""Random workloads with LoRA adapters, and with images, beside everything that `workloads.workload` draws."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.conformance.workloads import workload

MOST_IMAGES = 7  # of a request: vLLM frees them in the order of a set, which for so few is that of their places


def adapter_workload(seed: int) -> dict[str, Any]:
    """Draw an engine with LoRA limits, and requests with adapters."""
    load, rng = workload(seed), Random(f"adapters {seed}")
    load["engine"]["max_loras"] = rng.choice((1, 1, 2, 3, 4))
    num_adapters, base = rng.randint(1, 8), rng.choice((0.0, 0.2, 0.6))
    for request in load["requests"]:
        request["adapter"] = "" if rng.random() < base else f"a{min(rng.randrange(num_adapters) for _ in range(2))}"
    return load


def image_workload(seed: int) -> dict[str, Any]:
    """Draw an engine with an encoder, and requests with images, some of which are equal."""
    load, rng = workload(seed), Random(f"images {seed}")
    engine = load["engine"]
    largest = rng.choice((4, 12, engine["max_model_len"] // 2 + 1))
    images = [{"identity": f"image{place}", "tokens": rng.randint(1, largest)} for place in range(rng.randint(1, 9))]
    text = rng.choice((0.3, 0.7))
    for request in load["requests"]:
        request["encoder_inputs"] = _placed(rng, images, request["prompt_tokens"]) if rng.random() > text else []
    used = [image["tokens"] for request in load["requests"] for image in request["encoder_inputs"]]
    most = max(used, default=1)
    engine["max_num_encoder_input_tokens"] = most + rng.choice((0, rng.randint(0, most), 4 * most))
    engine["encoder_cache_size"] = most + rng.choice((0, rng.randint(0, most), 4 * most))
    engine["disable_chunked_mm_input"] = rng.random() < 0.3
    return load


def _placed(rng: Random, images: list[dict[str, Any]], prompt_tokens: int) -> list[dict[str, Any]]:
    placed: list[dict[str, Any]] = []
    position = rng.choice((0, rng.randint(0, 8)))
    while len(placed) < MOST_IMAGES:
        image = rng.choice(images)
        if position + image["tokens"] > prompt_tokens:
            return placed
        placed.append({**image, "position": position})
        position += image["tokens"] + rng.choice((0, 1, rng.randint(0, 20)))
    return placed


def with_contents(load: dict[str, Any]) -> dict[str, Any]:
    """Return the workload with names of blocks that stand for adapters and images too, as vLLM's hashes do."""
    size = load["engine"]["block_size"]
    requests = []
    for request in load["requests"]:
        names = []
        for place, value in enumerate(request["prefix_hashes"]):
            end = (place + 1) * size
            images = [
                (one["identity"], one["position"]) for one in request.get("encoder_inputs", ()) if one["position"] < end
            ]
            names.append(repr((value, request.get("adapter", ""), images)))
        requests.append({**request, "prefix_hashes": names})
    return {**load, "requests": requests}
