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
from predictor.request_group import MAX_MEMBERS
from services.http.endpoints import EngineEndpoint
from services.http.kv_transfer import leg_of
from services.http.openai_body import KV_TRANSFER_PARAMS, OpenAIRequest
from services.http.reply_format import COMPLETIONS_FORMAT, POOLING_FORMAT, ReplyFormat
from services.http.sse import data_of

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
    return ProxiedRequest(
        body=parsed,
        num_prompts=parsed.num_prompts,
        num_samples=parsed.num_samples if parsed.num_samples * parsed.num_prompts <= MAX_MEMBERS else 1,
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


class ChoiceCounts:
    """Counts the tokens of each choice in one stream; a choice has ended with its finish reason."""

    def __init__(self) -> None:
        """Start without tokens."""
        self.num_tokens: dict[int, int] = {}
        self.exact: set[int] = set()  # choices whose tokens the engine counts
        self.ended: set[int] = set()

    def feed(self, events: bytes) -> set[int]:
        """Read whole events; return the choices that they are about."""
        changed: set[int] = set()
        for data in data_of(events):
            try:
                event = json.loads(data)
                choices, usage = event.get("choices") or (), event.get("usage")
                for choice in choices:
                    changed.add(self._count(choice, usage if len(choices) == 1 else None))
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # [DONE], or no event of a completion
        return changed

    def _count(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None) -> int:
        index = int(choice["index"])
        before = self.num_tokens.get(index, 0)
        if usage:
            self.exact.add(index)
            self.num_tokens[index] = max(before, int(usage["completion_tokens"]))
        elif ids := choice.get("token_ids"):
            self.exact.add(index)
            self.num_tokens[index] = before + len(ids)
        else:
            delta = choice.get("delta")
            text = (
                choice.get("text")
                if delta is None
                else {name for name, part in delta.items() if name != "role" and part}
            )
            self.num_tokens[index] = before + bool(text)
        if choice.get("finish_reason"):
            self.ended.add(index)
        return index


class EventSink(Protocol):
    """Receives the events of a mirrored engine."""

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
        self._choices = ChoiceCounts()
        self._open = dict(enumerate(names))  # those that have not ended, by the index of their choice
        self._final_tokens: int | None = None
        self._has_ended = False

    @property
    def num_tokens(self) -> int:
        """Return how many tokens have passed."""
        return self._count.num_tokens if len(self._names) <= 1 else sum(self._choices.num_tokens.values())

    @property
    def least_tokens(self) -> int:
        """How many tokens the engine has counted at least where its reply counts none: one for each request."""
        return len(self._names) if self.form is POOLING_FORMAT else 0

    def on_prompt_counted(self, prompt_tokens: int, token_ids: tuple[int, ...] = ()) -> None:
        """Report the length of the prompt and its tokens, unless the request has ended."""
        if not self._has_ended:
            for name in self._open.values():
                self._sink.record(PromptCounted(name=name, prompt_tokens=prompt_tokens, token_ids=token_ids))

    def on_events(self, events: bytes) -> None:
        """Report the tokens of some events of a stream, which may be of several choices."""
        if len(self._names) > 1:
            self._on_choices(self._choices.feed(events))
        elif self._count.feed(events) and self._names:
            self._sink.record(
                TokensReceived(name=self._names[0], num_tokens=self._count.num_tokens, exact=self._count.exact)
            )

    def _on_choices(self, changed: set[int]) -> None:
        counts = self._choices
        for index in sorted(changed & self._open.keys()):
            name, num_tokens, exact = self._open[index], counts.num_tokens[index], index in counts.exact
            if index in counts.ended:
                del self._open[index]
                self._sink.record(RequestEnded(name=name, num_tokens=num_tokens, completed=True, exact=exact))
            elif num_tokens:
                self._sink.record(TokensReceived(name=name, num_tokens=num_tokens, exact=exact))

    def on_complete(self, num_tokens: int, prompt_tokens: int | None) -> None:
        """Keep the final counts of a complete reply."""
        self._final_tokens, self.prompt_tokens = num_tokens, prompt_tokens

    def on_end(self) -> None:
        """Report the end of the request, complete or not."""
        self._has_ended = True
        completed = self._final_tokens is not None
        num_tokens = self._final_tokens if self._final_tokens is not None else self.num_tokens
        exact = completed and self.prompt_tokens is not None  # the engine counted the tokens, not only the events
        is_single = len(self._names) == 1
        ended = sum(count for index, count in self._choices.num_tokens.items() if index not in self._open)
        share = max(0, num_tokens - ended) // max(1, len(self._open))
        for index, name in self._open.items():
            self._sink.record(
                RequestEnded(
                    name=name,
                    num_tokens=num_tokens if is_single else max(share, self._choices.num_tokens.get(index, 0)),
                    completed=completed,
                    exact=exact and is_single,
                    prompt_tokens=self.prompt_tokens if is_single else None,
                )
            )
        self._open = {}
