"""What a mirror's proxy reads of one request and its reply, while both pass unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from predictor.lengths import Tag
from predictor.mirror.events import MirrorEvent, PromptCounted, RequestEnded, TokensReceived
from predictor.request import SERVE
from services.http.endpoints import EngineEndpoint
from services.http.kv_transfer import leg_of
from services.http.openai_body import KV_TRANSFER_PARAMS, OpenAIRequest
from services.http.reply_format import COMPLETIONS_FORMAT, POOLING_FORMAT, ReplyFormat

MAX_SAMPLES = 128
TAG_TOKENS, TAG_SPREAD = "block_tag_tokens", "block_tag_spread"
CHAT_FIELDS = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")  # that change the prompt

SALTED_FIELDS = ("cache_salt", "mm_processor_kwargs", "prompt_embeds")  # that are a part of the names of KV blocks

# In JSON texts a quotation mark is escaped, so these cannot match inside an answer's own text.
_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})\b')
_ROLE_ONLY = re.compile(rb'"delta"\s*:\s*\{[^{}]*"role"\s*:[^{}]*"content"\s*:\s*(?:""|null)')
_CHOICE = re.compile(rb'"(?:delta|text)"\s*:')
_DATA = b"data:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxiedRequest:
    """A completion request: its body, and how many requests the engine makes of it."""

    body: OpenAIRequest
    num_prompts: int
    num_samples: int
    tag: Tag | None
    to_tokenize: Mapping[str, Any] | None  # the body for the engine's /tokenize; None if there is nothing to count
    leg: str = SERVE
    is_plain: bool = True  # nothing but its tokens decides which cached blocks it can use

    @property
    def num_requests(self) -> int:
        """Return how many requests the engine makes of it."""
        return self.num_prompts * self.num_samples

    @property
    def known_tokens(self) -> int | None:
        """Return the length of the answer, where it is certain."""
        return self.body.max_tokens or None if self.body.ignore_eos or self.body.prefill_only else None


def parse_request(endpoint: EngineEndpoint, body: bytes, content_type: bytes = b"") -> ProxiedRequest | None:
    """Parse a request body; None for an invalid one, which the engine itself refuses."""
    try:
        parsed = endpoint.read(body, content_type)
    except ValueError:
        return None
    data = json.loads(body) if parsed.is_object else {}
    samples = data.get("n")
    return ProxiedRequest(
        body=parsed,
        num_prompts=parsed.num_prompts,
        num_samples=samples if type(samples) is int and 1 <= samples <= MAX_SAMPLES else 1,
        tag=_tag(data, parsed),
        to_tokenize=_to_tokenize(data, parsed),
        leg=leg_of(data.get(KV_TRANSFER_PARAMS)),
        is_plain=not any(data.get(name) is not None for name in SALTED_FIELDS),
    )


def _tag(data: Mapping[str, Any], body: OpenAIRequest) -> Tag | None:
    """Return the tag that the request carries, or else its client's own estimate."""
    extra = data.get("vllm_xargs")
    tokens = extra.get(TAG_TOKENS) if isinstance(extra, dict) else None
    try:
        if tokens is not None and isinstance(extra, dict):
            return Tag(median_tokens=float(tokens), spread=float(extra.get(TAG_SPREAD, 0.0)))
        return Tag(median_tokens=float(body.expected_tokens)) if body.expected_tokens else None
    except (TypeError, ValueError, OverflowError):
        return None


def _to_tokenize(data: Mapping[str, Any], parsed: OpenAIRequest) -> Mapping[str, Any] | None:
    model = {} if data.get("model") is None else {"model": data["model"]}
    if parsed.conversation is not None:
        more = {name: data[name] for name in CHAT_FIELDS if name in data}
        return {**model, "messages": parsed.conversation["messages"], **more}
    return {**model, "prompt": data["prompt"]} if isinstance(data.get("prompt"), str) else None


@dataclass(slots=True)
class TokenCount:
    """Counts the tokens of one stream; `exact` where the engine reports its count with every event."""

    num_tokens: int = 0
    exact: bool = False
    form: ReplyFormat = COMPLETIONS_FORMAT

    def feed(self, events: bytes) -> bool:
        """Read whole events; return whether they brought tokens."""
        before = self.num_tokens
        if self.form.is_named:
            self.num_tokens += events.count(self.form.token_mark)
            return self.num_tokens > before
        if b'"completion_tokens"' in events and (counts := _USAGE.findall(events)):
            self.exact = self.exact or _CHOICE.search(events) is not None
            self.num_tokens = max(self.num_tokens, int(counts[-1]))
        if not self.exact:
            self.num_tokens = max(self.num_tokens, before + self._events_with_text(events))
        return self.num_tokens > before

    @staticmethod
    def _events_with_text(events: bytes) -> int:
        """Count one token for each event, except for the one that only has the role."""
        return sum(
            1
            for event in events.split(b"\n\n")
            if event.startswith(_DATA) and _CHOICE.search(event) is not None and _ROLE_ONLY.search(event) is None
        )


class EventSink(Protocol):
    """Receives the events of a mirrored engine."""

    def new_name(self, request_id: str) -> str:
        """Return a unique name for a request in events."""

    def record(self, event: MirrorEvent) -> None:
        """Take an event that happens now."""

    @property
    def reads_tokens(self) -> bool:
        """Whether the tokens of prompts are of use."""


class StreamObserver:
    """Reports the reply to one completion request, which may be several requests of the engine."""

    def __init__(self, sink: EventSink, names: tuple[str, ...], form: ReplyFormat = COMPLETIONS_FORMAT) -> None:
        """Report the requests of these names, whose reply has this form."""
        self.form = form
        self.prompt_tokens: int | None = None  # that the engine counted
        self._sink = sink
        self._names = names
        self._count = TokenCount(form=form)
        self._final_tokens: int | None = None
        self._has_ended = False

    @property
    def num_tokens(self) -> int:
        """Return how many tokens have passed."""
        return self._count.num_tokens

    @property
    def least_tokens(self) -> int:
        """How many tokens the engine has counted at least where its reply counts none: one for each request."""
        return len(self._names) if self.form is POOLING_FORMAT else 0

    def on_prompt_counted(self, prompt_tokens: int, token_ids: tuple[int, ...] = ()) -> None:
        """Report the length of the prompt and its tokens, unless the request has ended."""
        if not self._has_ended:
            for name in self._names:
                self._sink.record(PromptCounted(name=name, prompt_tokens=prompt_tokens, token_ids=token_ids))

    def on_events(self, events: bytes) -> None:
        """Report the tokens of some events of a stream."""
        if self._count.feed(events) and len(self._names) == 1:
            self._sink.record(
                TokensReceived(name=self._names[0], num_tokens=self._count.num_tokens, exact=self._count.exact)
            )

    def on_complete(self, num_tokens: int, prompt_tokens: int | None) -> None:
        """Keep the final counts of a complete reply."""
        self._final_tokens, self.prompt_tokens = num_tokens, prompt_tokens

    def on_end(self) -> None:
        """Report the end of the request, complete or not."""
        self._has_ended = True
        completed = self._final_tokens is not None
        num_tokens = self._final_tokens if self._final_tokens is not None else self.num_tokens
        exact = completed and self.prompt_tokens is not None  # the engine counted the tokens, not only the events
        for name in self._names:
            self._sink.record(
                RequestEnded(
                    name=name,
                    num_tokens=num_tokens // len(self._names),
                    completed=completed,
                    exact=exact,
                    prompt_tokens=self.prompt_tokens if len(self._names) == 1 else None,
                )
            )
