"""Continuing a stream on another engine, after the one that began it has failed.

The other engine gets the prompt and what the client has received of the answer, as token ids where the first engine
returned them and as text otherwise, and answers with the rest. Its events are rewritten, so that the client sees one
stream: with the first one's id and model, and a usage that counts every token once.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.http.continuable import IDS_FIELD
from services.http.paths import CHAT, COMPLETIONS
from services.http.sse import DONE, data_of

MAX_UNREAD_BYTES = 2**16  # of events that are kept as they came
DEFAULT_COMPLETION_TOKENS = 16  # of OpenAI's API
LENGTH = "length"
INVALID_EVENT, NO_END = "invalid_event", "no_end"
UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
ID_TYPE = "q"  # a list of numbers takes five times the memory

# In JSON texts a quotation mark is escaped, so these cannot stand inside the text of a response.
_TOKEN_IDS = re.compile(rb'"((?:prompt_)?token_ids)":\s*\[[\d,\s]*\]')
_FAILURE = re.compile(rb'(?:^|\n)data: ?\{\s*(?:"error"\s*:|[^\n]*"finish_reason"\s*:\s*"(?:abort|error)")')

# Fields of a chat that a completion of token ids does not have.
CHAT_FIELDS = frozenset(
    ("messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "chat_template",
     "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens", "documents",
     "reasoning_effort", "include_reasoning", "response_format", "logprobs", "top_logprobs", "mm_processor_kwargs")
)  # fmt: skip
# A prompt of token ids has been cut, and has its special tokens.
PROMPT_FIELDS = frozenset(("truncate_prompt_tokens", "add_special_tokens", "prompt"))


def failure_in(events: bytes) -> int:
    """Return where in whole events an engine reports that it failed; -1 where it does not."""
    if b'"error"' not in events and b'"abort"' not in events:
        return -1
    found = _FAILURE.search(events)
    if found is None:
        return -1
    return found.start() + (events[found.start() : found.start() + 1] == b"\n")


def _no_ids() -> array[int]:
    return array(ID_TYPE)


class NotContinuableError(Exception):
    """A stream cannot continue on another engine; the message is the reason, as metrics name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A request for the rest of an answer."""

    path: bytes
    body: bytes
    num_sent: int  # tokens of the answer that the client has
    num_prompt: int | None  # tokens of the prompt, where they are known
    max_tokens: int | None  # of the rest


@dataclass(slots=True, kw_only=True)
class StreamTranscript:
    """What a client has received of one answer, and where it continues.

    Events of the first engine pass as they come, but for token ids that the client did not ask for, and are read only
    when they are needed. Those of other engines are read and rewritten.
    """

    body: bytes  # of the client's request
    chat: bool
    max_model_len: int | None = None
    hides_ids: bool = False  # the engine returns token ids for us alone

    finish_reason: str = ""
    is_done: bool = False
    _data: Mapping[str, Any] | None = None
    _unread: list[bytes] = field(default_factory=list)
    _num_unread: int = 0
    _head: dict[str, Any] | None = None  # of the first event
    _prompt_ids: array[int] | None = None
    _ids: array[int] = field(default_factory=_no_ids)  # up to the last text
    _pending_ids: list[int] = field(default_factory=list)  # of text that has not been sent yet
    _has_ids: bool = True
    _texts: list[str] = field(default_factory=list)
    _num_events: int = 0  # with text
    _num_held_back: int = 0  # characters of a text that an engine holds back, because a stop string may begin there
    _num_characters: int = 0  # sent
    _num_before: int = 0  # tokens whose text has been sent as a whole
    _shown: deque[tuple[int, int]] = field(default_factory=deque)  # characters of the text, and tokens, where known
    _is_reasoning: bool = False
    _obstacle: str = ""
    _usage: Mapping[str, Any] | None = None
    _has_last_usage: bool = False  # that of the whole answer, after its end
    _continued: Continuation | None = None
    _num_prompt: int | None = None

    def __post_init__(self) -> None:
        """Find out how much text engines hold back."""
        if b'"stop"' in self.body:
            stop = self.data.get("stop")  # anything: the engine refuses what is no string
            strings = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
            if not self.data.get("include_stop_str_in_output"):  # vLLM: IncrementalDetokenizer.stop_buffer_length
                self._num_held_back = max((len(one) - 1 for one in strings if isinstance(one, str)), default=0)

    @property
    def data(self) -> Mapping[str, Any]:
        """The client's request."""
        if self._data is None:
            self._data = json.loads(self.body)
        return self._data

    def passed(self, events: bytes) -> bytes:
        """Take whole events of an engine; return them as the client gets them."""
        if self._continued is not None:
            return self._rewritten(events)
        self._unread.append(events)
        self._num_unread += len(events)
        if self._num_unread > MAX_UNREAD_BYTES:
            self._read()
        return _TOKEN_IDS.sub(rb'"\1":null', events) if self.hides_ids and b"token_ids" in events else events

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the client has received."""
        self._read()
        if self._has_ids:
            return len(self._ids) if not self._num_held_back or self.finish_reason else self._num_before_held_back()
        usage = self._usage or {}
        counted = usage.get("completion_tokens")
        return counted if type(counted) is int and counted >= self._num_events else self._num_events

    def _num_before_held_back(self) -> int:
        """Return the number of tokens whose text has been sent as a whole; others are answered again."""
        shown, num = self._shown, self._num_before
        while shown and shown[0][0] <= self._num_characters:
            num = shown.popleft()[1]
        self._num_before = num
        return num

    def continuation(self) -> Continuation:
        """Return the request for the rest; NotContinuableError where there is no honest one."""
        self._read()
        if self.finish_reason:
            raise NotContinuableError(NO_END)
        if self._obstacle:
            raise NotContinuableError(self._obstacle)
        if self._is_reasoning:
            raise NotContinuableError("reasoning")
        num_sent = self.num_tokens
        limit = self._limit()
        rest = None if limit is None else limit - num_sent
        body = {name: value for name, value in self.data.items() if name != IDS_FIELD or not self.hides_ids}
        if self.data.get("min_tokens"):
            body["min_tokens"] = max(0, self.data["min_tokens"] - num_sent)
        if not self._texts:
            return self._made(CHAT if self.chat else COMPLETIONS, dict(self.data), 0, limit)
        if self._ids and self._has_ids and self._prompt_ids and not self.data.get("stop"):
            return self._by_ids(body, num_sent, rest)
        return self._by_text(body, num_sent, rest)

    def _by_ids(self, body: dict[str, Any], num_sent: int, rest: int | None) -> Continuation:
        assert self._prompt_ids is not None
        prompt = [*self._prompt_ids, *self._ids]
        if rest is None:  # a completion without `max_tokens` would get very few
            if self.max_model_len is None:
                return self._by_text(body, num_sent, rest)
            rest = self.max_model_len - len(prompt)
        left_out = PROMPT_FIELDS | CHAT_FIELDS if self.chat else PROMPT_FIELDS
        body = {name: value for name, value in body.items() if name not in left_out}
        body |= {"prompt": prompt, "max_tokens": rest}
        return self._made(COMPLETIONS, body, num_sent, rest)

    def _by_text(self, body: dict[str, Any], num_sent: int, rest: int | None) -> Continuation:
        text = "".join(self._texts)
        if self.data.get("truncate_prompt_tokens") is not None:
            raise NotContinuableError("truncated_prompt")
        if self.chat:
            if body.get("continue_final_message"):
                raise NotContinuableError("continued_message")
            messages = [*body["messages"], {"role": "assistant", "content": text}]
            body |= {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
            body.pop("max_completion_tokens", None)
            if rest is not None:
                body["max_tokens"] = rest
            return self._made(CHAT, body, num_sent, rest)
        if not isinstance(body["prompt"], str):
            raise NotContinuableError("no_token_ids")
        body |= {"prompt": body["prompt"] + text, "max_tokens": rest}
        return self._made(COMPLETIONS, body, num_sent, rest)

    def _made(self, path: bytes, body: dict[str, Any], num_sent: int, rest: int | None) -> Continuation:
        if rest is not None and rest < 1:
            raise NotContinuableError(NO_END)
        if self.hides_ids:
            body[IDS_FIELD] = True
        return Continuation(
            path=path,
            body=json.dumps(body, separators=(",", ":")).encode(),
            num_sent=num_sent,
            num_prompt=self._num_prompt if self._prompt_ids is None else len(self._prompt_ids),
            max_tokens=rest,
        )

    def _limit(self) -> int | None:
        """Return the number of tokens at which the answer is cut, if the request says so."""
        get = self.data.get
        limit = (get("max_completion_tokens") if self.chat else None) or get("max_tokens")
        return DEFAULT_COMPLETION_TOKENS if limit is None and not self.chat else limit

    def continue_as(self, continuation: Continuation) -> None:
        """Expect the events of another engine from now on, which answers this request."""
        self._continued = continuation
        self._pending_ids = []
        if self._num_held_back:
            del self._ids[continuation.num_sent :]  # the others are answered again
            self._shown.clear()

    def end(self) -> bytes | None:
        """Return the events that are missing after the last token; None where tokens are missing."""
        self._read()
        limit = self._limit()
        if self._obstacle == INVALID_EVENT:
            return None
        if not self.finish_reason and (limit is None or self.num_tokens < limit):
            return None
        if self.is_done:
            return b""
        events = []
        if not self.finish_reason:
            self.finish_reason = LENGTH
            events.append(self._event([self._choice("", LENGTH, None)]))
        options = self.data.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage") and not self._has_last_usage:
            num_prompt = len(self._prompt_ids) if self._prompt_ids is not None else self._num_prompt
            if num_prompt is None:
                return None
            events.append(self._event([], usage=_usage(num_prompt, self.num_tokens)))
        return b"".join([*events, b"data: " + DONE + b"\n\n"])

    # Reading.

    def _read(self) -> None:
        unread, self._unread, self._num_unread = b"".join(self._unread), [], 0
        for event in data_of(unread):
            if event == DONE:
                self.is_done = True
                continue
            try:
                self._note(json.loads(event))
            except UNREADABLE:  # the client has got it as it came
                self._obstacle = INVALID_EVENT

    def _note(self, event: Mapping[str, Any]) -> None:
        """Note what an event adds to the answer."""
        if self._head is None:
            self._head = {name: event[name] for name in ("id", "created", "model") if name in event}
        if event.get("usage"):
            self._usage = event["usage"]
            if self._continued is None:
                self._num_prompt = self._usage.get("prompt_tokens")
        choices = event.get("choices") or ()
        if not choices:
            self._has_last_usage |= bool(event.get("usage"))
            return
        choice = choices[0]
        prompt_ids = event.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt_ids and self._continued is None:
            self._prompt_ids = array(ID_TYPE, prompt_ids)
        delta = choice.get("delta") or {}
        if delta.get("tool_calls") or delta.get("function_call"):
            self._obstacle = "tools"
        if choice.get("logprobs"):
            self._obstacle = "logprobs"
        self._add(choice, delta)

    def _add(self, choice: Mapping[str, Any], delta: Mapping[str, Any]) -> None:
        text = self._text_of(choice)
        ids = choice.get("token_ids")
        self._pending_ids += ids or ()
        if _reasoning_in(delta):
            self._is_reasoning = True
        if text:
            if not isinstance(text, str):
                raise TypeError("a text must be a string")
            self._is_reasoning = False
            self._has_ids &= bool(ids or self._pending_ids)
            self._texts.append(text)
            self._num_events += 1
            self._ids.extend(self._pending_ids)
            self._pending_ids = []
            if self._num_held_back:
                self._num_characters += len(text)
                self._shown.append((self._num_characters + self._num_held_back, len(self._ids)))
                self._num_before_held_back()
        if choice.get("finish_reason"):
            self.finish_reason = str(choice["finish_reason"])
            self._ids.extend(self._pending_ids)
            self._pending_ids = []

    def _text_of(self, choice: Mapping[str, Any]) -> Any:
        """Return the text that an event adds to the answer.

        Of the rest of a text, an engine's parser may take all for reasoning, since it does not see that this has ended.
        """
        delta = choice.get("delta")
        if delta is None:
            return choice.get("text")
        text = delta.get("content")
        return _reasoning_in(delta) if not text and self._is_rest else text

    @property
    def _is_rest(self) -> bool:
        """Whether an engine answers with the rest of an answer, and not with the whole."""
        return self._continued is not None and self._continued.num_sent > 0

    # Rewriting.

    def _rewritten(self, events: bytes) -> bytes:
        """Return the events of an engine that continues the answer as those of the first one."""
        try:
            return b"".join(self._rewritten_event(event) for event in data_of(events))
        except UNREADABLE:  # events before it have been noted, and the client does not get them
            self._obstacle = INVALID_EVENT
            raise NotContinuableError(INVALID_EVENT) from None

    def _rewritten_event(self, data: bytes) -> bytes:
        if data == DONE:
            self.is_done = True
            return b"data: " + DONE + b"\n\n"
        assert self._continued is not None
        had_role = self._head is not None
        event = json.loads(data)
        self._note(event)
        usage = event.get("usage")
        if usage:
            usage = self._whole_usage(usage)
        if not event.get("choices"):
            return self._event([], usage=usage, fingerprint=event.get("system_fingerprint")) if usage else b""
        choice = event["choices"][0]
        delta = choice.get("delta")
        if delta is not None and delta.get("role") and not delta.get("content"):
            if had_role:
                return b""  # the client has it
            return self._event([choice], usage=usage)
        ids = None if self.hides_ids else choice.get("token_ids")
        if delta is not None and not self._is_rest:
            made = {**choice, "token_ids": ids}
        else:
            made = self._choice(
                self._text_of(choice) or "", choice.get("finish_reason"), ids, choice.get("stop_reason")
            )
        return self._event([made], usage=usage, fingerprint=event.get("system_fingerprint"))

    def _whole_usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Count the tokens before those of the continuation as tokens of the answer."""
        assert self._continued is not None
        num_sent = self._continued.num_sent
        num_prompt = self._continued.num_prompt
        if num_prompt is None:
            num_prompt = max(0, int(usage.get("prompt_tokens", 0)) - num_sent)
        whole = {**usage, **_usage(num_prompt, num_sent + int(usage.get("completion_tokens", 0)))}
        details = whole.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            whole["prompt_tokens_details"] = {**details, "cached_tokens": min(details["cached_tokens"], num_prompt)}
        return whole

    def _choice(
        self, text: str, finish_reason: str | None, ids: list[int] | None, stop_reason: Any = None
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        if not self.chat:
            return {**choice, "stop_reason": stop_reason, "prompt_token_ids": None, "token_ids": ids}
        return {**choice, **({"stop_reason": stop_reason} if finish_reason else {}), "token_ids": ids}

    def _event(
        self, choices: list[Any], *, usage: Mapping[str, Any] | None = None, fingerprint: str | None = None
    ) -> bytes:
        head = dict(self._head or {})
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        event = {"id": head.pop("id", ""), "object": kind, **head, "choices": choices}
        if usage is not None:
            event["usage"] = usage
        if fingerprint is not None:
            event["system_fingerprint"] = fingerprint
        return b"data: " + json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def _reasoning_in(delta: Mapping[str, Any]) -> Any:
    return delta.get("reasoning") or delta.get("reasoning_content")


def _usage(num_prompt: int, num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_tokens, "completion_tokens": num_tokens}
