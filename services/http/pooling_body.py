"""Bodies of requests that generate nothing: embeddings, scores, ranks, classes; the values that placing them needs.

An engine makes a request of each input. They are forecast as one whose prompt has the tokens of all: the budget of the
engine's steps, which they share, is what they wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.http.json_fields import count_in, description_of
from services.http.openai_body import MAX_TOKEN_IDS, OpenAIRequest, conversation_texts, request_in

EMBED = "embeddings"
INPUTS = ("input", "texts", "inputs", "data")
QUERIES = ("query", "queries", "text_1", "data_1")
DOCUMENTS = ("documents", "items", "text_2", "data_2")


def read_pooling_body(data: Mapping[str, Any]) -> OpenAIRequest:
    """Read a request for embeddings, the output of a pooler, or classes."""
    if isinstance(data.get("messages"), list):
        texts = conversation_texts(data["messages"])
        return _pooled(data, texts, num_prompts=1, num_messages=len(data["messages"]))
    name = next((name for name in INPUTS if data.get(name) is not None), "input")
    given = data.get(name)
    if given is None and isinstance(data.get("images"), list) and data["images"]:
        return _pooled(data, [], num_prompts=len(data["images"]))
    inputs = given if isinstance(given, list) and not _is_ids(given) else [given]
    if given is None or given in ([], ""):
        raise ValueError(f"{name}: must be a text, a list of token ids, or a list of either")
    ids = [one for one in inputs if isinstance(one, list) and _is_ids(one)]
    if len(ids) == len(inputs):
        first = tuple(ids[0][:MAX_TOKEN_IDS]) if len(ids) == 1 else ()
        num_tokens = sum(map(len, ids))
        return _pooled(data, [], num_prompts=len(ids), prompt_tokens=num_tokens, token_ids=first)
    return _pooled(data, [_text(one) for one in inputs], num_prompts=len(inputs))


def read_scoring_body(data: Mapping[str, Any]) -> OpenAIRequest:
    """Read a request for scores or ranks: an engine computes each pair of a query and a document."""
    queries, documents = _listed(data, QUERIES), _listed(data, DOCUMENTS)
    num_pairs = max(len(queries), len(documents))
    texts = [_text(one) for one in queries]
    again = len(texts[0].encode("utf-8", "replace")) * (num_pairs - 1) if len(texts) == 1 else 0
    return _pooled(data, [*texts, *map(_text, documents)], num_prompts=num_pairs, repeated_bytes=again)


def _pooled(data: Mapping[str, Any], texts: Sequence[str], *, num_prompts: int, **more: Any) -> OpenAIRequest:
    count_in(data, "max_tokens")
    return request_in(
        {**data, "stream": None, "ignore_eos": None, "min_tokens": None},
        texts,
        max_tokens=1,
        num_prompts=num_prompts,
        prefill_only=True,
        operation=EMBED,
        why_not_continuable="no_stream",
        **more,
    )


def _listed(data: Mapping[str, Any], names: tuple[str, ...]) -> list[Any]:
    name = next((name for name in names if data.get(name) is not None), "")
    given = data.get(name)
    if isinstance(given, dict) and isinstance(given.get("content"), list):  # one of several parts
        return [given]
    found = given if isinstance(given, list) else [given]
    if not name or not found:
        raise ValueError(f"{name or names[0]}: must be a text, or a list of at least one")
    return found


def _text(given: Any) -> str:
    """Return the text of an input, which may be a text, an object with one, or its parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, dict | list):
        raise ValueError(f"input: must be texts or lists of token ids, not {description_of(given)}")
    parts = [given, *_parts(given.get("content"))] if isinstance(given, dict) else given
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


def _is_ids(given: Sequence[Any]) -> bool:
    return bool(given) and all(type(item) is int for item in given)
