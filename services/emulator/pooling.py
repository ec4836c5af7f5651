"""Embeddings, scores, ranks and classes of an emulated engine: the same for the same text, in vLLM 0.32's shapes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from services.emulator.errors import bad_value
from services.emulator.openai import ParsedRequest, Served, request_from
from services.emulator.request_bodies import COMPLETION
from services.emulator.tokens import chat_text, token_ids
from services.http.openai_body import read_messages

DIMENSIONS = 32
LARGEST_DIMENSIONS = 4096
PREFIXES = {"/v1/embeddings": "embd", "/v2/embed": "embd", "/pooling": "pooling", "/classify": "classify"}
SCORE, INPUTS = "score", ("input", "texts", "data")
Vector = npt.NDArray[np.float32]


def pooling_requests(
    path: str, data: Any, headers: Mapping[str, str], request_id: str, served: Served
) -> list[ParsedRequest]:
    """Check a request; return what the engine computes, one request for each input or pair."""
    if not isinstance(data, dict):
        raise bad_value("Input should be a valid dictionary")
    shared = {name: data[name] for name in ("model", "priority", "vllm_xargs") if data.get(name) is not None}
    prefix = PREFIXES.get(path, SCORE)
    made = []
    for number, prompt in enumerate(_prompts(path, data)):
        body = {**shared, "prompt": prompt, "max_tokens": 1}
        request = request_from(COMPLETION, body, headers, request_id, served)
        made.append(replace(request, engine_name=f"{prefix}-{request_id}-{number}"))
    return made


def _prompts(path: str, data: Mapping[str, Any]) -> list[list[int]]:
    if path in PREFIXES:
        return [_ids(one) for one in _inputs(data)]
    queries, documents = _pairs(data)
    return [_ids(query) + _ids(document) for query, document in zip(queries, documents, strict=True)]


def _inputs(data: Mapping[str, Any]) -> list[Any]:
    if isinstance(data.get("messages"), list):
        turns = [(role, "\n".join(str(part.get("text", "")) for part in parts)) for role, parts in read_messages(data["messages"])]  # noqa: E501  # fmt: skip
        return [chat_text(turns)]
    given = next((data[name] for name in INPUTS if data.get(name) is not None), None)
    if not given:
        raise bad_value("input: Field required", "input")
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


def _pairs(data: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    queries = _first(data, ("query", "queries", "text_1", "data_1"))
    documents = _first(data, ("documents", "items", "text_2", "data_2"))
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents) or not documents:
        raise bad_value("Input lengths must be either 1:1, 1:N or N:N", "documents")
    return queries, documents


def _first(data: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    given = next((data[name] for name in names if data.get(name) is not None), None)
    if given is None:
        raise bad_value(f"{names[0]}: Field required", names[0])
    return given if isinstance(given, list) else [given]


def _ids(given: Any) -> list[int]:
    if isinstance(given, str) and given:
        return token_ids(given)
    if isinstance(given, list) and given and all(type(one) is int and one >= 0 for one in given):
        return given
    raise bad_value("Input should be a non-empty string or a list of token ids", "input")


def embedding(prompt: Sequence[int], dimensions: int = DIMENSIONS) -> Vector:
    """Return a unit vector that depends on the tokens only; texts with common tokens are near each other."""
    total = np.zeros(dimensions, np.float64)
    for token in prompt:
        digest = hashlib.blake2b(token.to_bytes(8), digest_size=8).digest()
        total += np.random.default_rng(int.from_bytes(digest)).standard_normal(dimensions)
    return (total / max(1e-9, float(np.linalg.norm(total)))).astype(np.float32)


def pooling_reply(path: str, data: Mapping[str, Any], requests: Sequence[ParsedRequest], created_s: int) -> bytes:
    """Write the reply."""
    request = requests[0]
    num_tokens = sum(len(one.prompt) for one in requests)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    full = {**usage, "completion_tokens": 0, "prompt_tokens_details": None}
    prefix = PREFIXES.get(path, SCORE)
    head: dict[str, Any] = {
        "id": f"{prefix}-{request.request_id}", "object": "list", "created": created_s, "model": request.model,
    }  # fmt: skip
    if path == "/v2/embed":
        vectors = {"float": [embedding(one.prompt).tolist() for one in requests]}
        units = {"input_tokens": num_tokens, "image_tokens": None}
        meta = {"api_version": {"version": "2"}, "billed_units": units}
        body = {"id": head["id"], "embeddings": vectors, "texts": data.get("texts"), "meta": meta}
        return _json({**body, "response_type": "embeddings_by_type"})
    if path.endswith("rerank"):
        return _json({"id": head["id"], "model": request.model, "usage": usage, "results": _ranked(data)})
    return _json({**head, "data": _items(path, data, requests), "usage": full})


def _items(path: str, data: Mapping[str, Any], requests: Sequence[ParsedRequest]) -> list[dict[str, Any]]:
    if path == "/v1/embeddings":
        size = data.get("dimensions") or DIMENSIONS
        if type(size) is not int or not 0 < size <= LARGEST_DIMENSIONS:
            raise bad_value(f"dimensions must lie between 1 and {LARGEST_DIMENSIONS}", "dimensions")
        vectors = [embedding(one.prompt, size) for one in requests]
        is_text = data.get("encoding_format") == "base64"
        written = [base64.b64encode(one.tobytes()).decode() if is_text else one.tolist() for one in vectors]
        return [{"index": place, "object": "embedding", "embedding": one} for place, one in enumerate(written)]
    if path == "/pooling":
        vectors = [embedding(one.prompt) for one in requests]
        return [{"index": place, "object": "pooling", "data": one.tolist()} for place, one in enumerate(vectors)]
    if path == "/classify":
        chances = [float(embedding(one.prompt, 1)[0] > 0) for one in requests]
        return [
            {"index": place, "label": f"LABEL_{int(one)}", "probs": [1 - one, one], "num_classes": 2}
            for place, one in enumerate(chances)
        ]
    return [{"index": place, "object": "score", "score": one} for place, one in enumerate(_scores(data))]


def _scores(data: Mapping[str, Any]) -> list[float]:
    queries, documents = _pairs(data)
    pairs = zip(queries, documents, strict=True)
    return [float(embedding(_ids(one)) @ embedding(_ids(other))) / 2 + 0.5 for one, other in pairs]


def _ranked(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    _, documents = _pairs(data)
    ranked = sorted(enumerate(_scores(data)), key=lambda one: -one[1])
    results = [
        {"index": place, "document": {"text": documents[place], "multi_modal": None}, "relevance_score": score}
        for place, score in ranked
    ]
    return results[: data.get("top_n") or len(results)]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
