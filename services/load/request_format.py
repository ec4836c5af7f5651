"""Bodies and headers of planned requests; prompts and responses have the planned lengths."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from predictor.request import REAL_TIME, RequestFacts, Slo
from predictor.suggestions import require_choice
from services.http.headers import Headers
from simulator.load_plan import Planned, target_of

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROMPTS = ("token-ids", "words")
NO_SLO = Slo()
OUTPUTS = ("ignore-eos", "header", "none")

COMMON = (
    "the of and to in is was for on as with by he that at from his it an were are this be had not has but she have "
    "they who one all her two new been time year also when more some can out up may its if no any what into now day"
)
WORDS = tuple(COMMON.split())  # short words are one token in nearly every vocabulary
IDS = range(100, 1900)  # token ids that even small vocabularies have


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFormat:
    """The form of the requests."""

    model: str
    endpoint: Annotated[str, f"Endpoint: {' or '.join(ENDPOINTS)}."] = "completions"
    prompt: Annotated[str, "Form of the prompts: token-ids, which are exact, or words."] = "token-ids"
    output: Annotated[
        str,
        "How the length of a response is set: ignore-eos (with max_tokens), header (x-block-output-tokens, for "
        "emulated engines) or none (max_tokens only).",
    ] = "ignore-eos"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    slo: Slo = NO_SLO  # of requests that have none of their own
    seed: Annotated[int, "Seed of lengths, prompts and arrival times."] = 0
    time_scale: Annotated[
        float,
        "Endpoint seconds per second, for emulated engines with that --speed; rates and latencies are in endpoint "
        "time.",
    ] = 1.0

    def __post_init__(self) -> None:
        """Reject unknown values, naming the field."""
        for name, known in (("endpoint", ENDPOINTS), ("prompt", PROMPTS), ("output", OUTPUTS)):
            require_choice(name, getattr(self, name), known)
        if not (math.isfinite(self.time_scale) and self.time_scale > 0):
            raise ValueError(f"time_scale: must be above 0, not {self.time_scale}")

    @property
    def target(self) -> bytes:
        """The path of the endpoint."""
        return ENDPOINTS[self.endpoint].encode()


def body_of(one: Planned, form: RequestFormat) -> bytes:
    """Return a request's body; the same plan and seed give the same body."""
    fields: dict[str, Any] = {"model": form.model, "stream": True, "stream_options": {"include_usage": True}}
    if form.output != "header":
        fields["max_tokens"] = one.output_tokens
    if form.output == "ignore-eos":
        fields["ignore_eos"] = True
    said, insists = said_by(one)
    if said.priority or "priority" in insists:
        fields["priority"] = said.priority
    if form.endpoint == "chat":
        fields["messages"] = [{"role": "user", "content": _words(one, form)}]
    else:
        fields["prompt"] = _words(one, form) if form.prompt == "words" else prompt_ids(one, form.seed)
    return json.dumps(fields).encode()


def headers_of(one: Planned, form: RequestFormat, request_id: str) -> Headers:
    """Return a request's headers."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode()), *form.headers]
    if form.output == "header":
        headers.append((b"x-block-output-tokens", b"%d" % one.output_tokens))
    said, insists = said_by(one)
    if one.entry is not None and one.entry.objective is not None:
        headers.append((b"x-block-objective", one.entry.objective.encode()))
    for header, name in ((b"x-slo-ttft-ms", "ttft_s"), (b"x-slo-tpot-ms", "tpot_s")):
        is_of_objective = getattr(one.slo, name, None) is not None and getattr(said.slo, name, None) is None
        target_s = None if is_of_objective else target_of(name, said, form.slo)
        if target_s is not None:
            headers.append((header, b"%.3f" % (1000 * target_s / form.time_scale)))
    if said.request_class != REAL_TIME or "request_class" in insists:
        headers.append((b"x-block-class", said.request_class.encode()))
    if said.weight != 1.0 or "weight" in insists:
        headers.append((b"x-block-weight", b"%r" % said.weight))
    if one.when_late:
        headers.append((b"x-block-when-late", one.when_late.encode()))
    if one.tenant:
        headers.append((b"x-llm-d-inference-fairness-id", one.tenant.encode()))
    return headers


def said_by(one: Planned) -> tuple[Planned | RequestFacts, Collection[str]]:
    """Return what a request says itself, and what it says also by default, as its objective may say otherwise."""
    said = one if one.stated is None else one.stated
    if one.entry is None or one.entry.objective is None:
        return said, ()
    entry = one.entry
    return said, [name for name in ("request_class", "weight", "priority") if getattr(entry, name) is not None]


def prompt_ids(one: Planned, seed: int) -> list[int]:
    """Return a prompt's token ids: its shared prefix, then tokens of its own."""
    ids = [token for name in one.prefix for token in _block(seed, name, one.block_tokens)][: one.prompt_tokens]
    draw = random.Random(f"{seed} {one.request_id}")  # noqa: S311 - must be repeatable
    return ids + draw.choices(IDS, k=one.prompt_tokens - len(ids))


@lru_cache(maxsize=16384)
def _block(seed: int, name: int | str, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens of a named block."""
    draw = random.Random(f"{seed} block {name}")  # noqa: S311 - must be repeatable
    return tuple(draw.choices(IDS, k=num_tokens))


def _words(one: Planned, form: RequestFormat) -> str:
    return " ".join([WORDS[token % len(WORDS)] for token in prompt_ids(one, form.seed)])


def header_of(text: str) -> tuple[bytes, bytes]:
    """Parse `name: value`."""
    name, colon, value = (part.strip() for part in text.partition(":"))
    is_valid = colon and name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if not is_valid or not value.isascii() or not value.isprintable():
        raise ValueError("header: must be NAME: VALUE in printable ASCII")  # without the value, which may be a secret
    return name.lower().encode(), value.encode()


def headers_from(texts: Sequence[str], api_key: str | None) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers that are sent with every request."""
    headers = [header_of(text) for text in texts]
    if api_key:
        headers.append(header_of(f"authorization: Bearer {api_key}"))
    return tuple(headers)
