"""The requests of the load, and what their answers have to be: those that one engine alone gives."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.chaos.cluster import MAX_MODEL_LEN, MODEL
from scripts.chaos.plan import ChaosSettings
from services.emulator.answers import AnswerLengths, EmulatedAnswer
from services.emulator.openai import Served, request_from
from services.emulator.request_bodies import CHAT, COMPLETION
from services.http.continuable import why_not_continuable
from services.http.sse import DONE, data_of

WORDS = ("tide", "wind", "salt", "gull", "mast", "rope", "sand", "reef", "foam", "keel")
SERVED = Served(model=MODEL, max_model_len=MAX_MODEL_LEN, lengths=AnswerLengths())
MAX_TOKENS = 600
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

COMPLETE, OTHER_TEXT, OTHER_USAGE, CUT_SHORT, ERROR_EVENT = (
    "complete", "other text", "other usage", "cut short", "error event",
)  # fmt: skip

# The kinds of requests with their weights. The state of `tools` and `format` is in their engine, so that their streams
# cannot continue on another one; clients of `leaving` leave in the middle of the answer.
KINDS = {
    "completion": 40.0,
    "chat": 20.0,
    "whole_completion": 10.0,
    "whole_chat": 5.0,
    "generate": 10.0,
    "tools": 3.0,
    "format": 2.0,
    "leaving": 10.0,
}
GENERATE = "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRequest:
    """One request: an OpenAI body, and after how many tokens its client leaves."""

    number: int
    kind: str
    is_chat: bool
    body: dict[str, Any]
    leaves_after: int | None = None

    @property
    def is_stream(self) -> bool:
        """Whether its answer is streamed."""
        return bool(self.body.get("stream"))

    @property
    def why_not_continuable(self) -> str:
        """Why its stream cannot continue on another engine."""
        return why_not_continuable(self.body, chat=self.is_chat)

    def expected(self) -> EmulatedAnswer:
        """Return the answer of one engine alone."""
        return request_from(CHAT if self.is_chat else COMPLETION, self.body, {}, "expected", SERVED).answer


def requests_of(settings: ChaosSettings) -> Iterator[ChaosRequest]:
    """Draw requests without end."""
    draw = random.Random(f"requests {settings.seed}")
    kinds, weights = list(KINDS), list(KINDS.values())
    number = 0
    while True:
        kind = draw.choices(kinds, weights)[0]
        prompt = f"{number} " + " ".join(draw.choices(WORDS, k=draw.randint(4, 200)))
        max_tokens = max(2, min(MAX_TOKENS, round(draw.expovariate(1 / settings.tokens))))
        yield request_of(number, kind, prompt, max_tokens)
        number += 1


def request_of(number: int, kind: str, prompt: str, max_tokens: int) -> ChaosRequest:
    """Make a request of a kind."""
    is_chat = kind in ("chat", "whole_chat", "tools")
    body: dict[str, Any] = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    if not kind.startswith("whole"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "tools":
        body["tools"] = [TOOL]
    if kind == "format":
        body["response_format"] = {"type": "json_object"}
    leaves_after = max(1, max_tokens // 2) if kind == "leaving" else None
    return ChaosRequest(number=number, kind=kind, is_chat=is_chat, body=body, leaves_after=leaves_after)


def judged(received: bytes, request: ChaosRequest) -> str:
    """Compare a reply with the answer of one engine."""
    return _judged_stream(received, request) if request.is_stream else _judged_whole(received, request)


def _judged_stream(received: bytes, request: ChaosRequest) -> str:
    if b'data: {"error"' in received:
        return ERROR_EVENT
    events = list(data_of(received))
    if not events or events.pop() != DONE:
        return CUT_SHORT
    parsed = [json.loads(event) for event in events]
    text = "".join(_text_of(event["choices"][0]) for event in parsed if event["choices"])
    return compared(text, [event["usage"]["completion_tokens"] for event in parsed if event.get("usage")], request)


def _judged_whole(received: bytes, request: ChaosRequest) -> str:
    try:
        reply = json.loads(received)
    except ValueError:
        return CUT_SHORT
    return compared(_text_of(reply["choices"][0]), [reply["usage"]["completion_tokens"]], request)


def compared(text: str, usages: Sequence[int], request: ChaosRequest) -> str:
    """Compare a text and the counts of its tokens with the answer of one engine."""
    expected = request.expected()
    if text != expected.text(0, expected.num_tokens):
        return OTHER_TEXT
    return COMPLETE if list(usages) == [expected.num_tokens] else OTHER_USAGE


def _text_of(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message")
    return str((part.get("content") or "") if part else choice.get("text") or "")
