"""The endpoints of engines that are placed: what reads their requests and replies, and what their forecast is of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.http.audio_body import read_speech_body, read_transcription_body
from services.http.error_shape import ANTHROPIC_ERRORS, PLAIN_ERRORS, RESPONSES_ERRORS, ErrorShape
from services.http.json_body import MAX_JSON_DEPTH
from services.http.json_fields import count_in, object_in
from services.http.messages_body import read_message_body
from services.http.openai_body import OpenAIRequest, read_body, request_in
from services.http.paths import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    MESSAGES,
    POOLING,
    RESPONSES,
    SCORING,
    SPEECH,
    TOKENIZE,
    TRANSCRIPTIONS,
)
from services.http.pooling_body import read_pooling_body, read_scoring_body
from services.http.reply_format import (
    COMPLETIONS_FORMAT,
    MESSAGES_FORMAT,
    POOLING_FORMAT,
    RESPONSES_FORMAT,
    ReplyFormat,
)
from services.http.responses_body import read_response_body

GENERATE, PREFILL_ONLY, UNPLACED = "generate", "prefill_only", "unplaced"
RESPONSE_ID = re.compile(r"resp_[\w.-]{1,300}")

Parse = Callable[[bytes, bytes, int], OpenAIRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """One path of engines.

    The forecast of a request is of its prompt and its answer (`generate`), of its prompts alone (`prefill_only`), or it
    has none, and any instance with the model serves it without a reservation (`unplaced`).
    """

    path: str
    kind: str
    parse: Parse
    format: ReplyFormat = COMPLETIONS_FORMAT
    errors: ErrorShape = PLAIN_ERRORS

    def read(self, body: bytes, content_type: bytes = b"", max_depth: int = MAX_JSON_DEPTH) -> OpenAIRequest:
        """Read a body, whose JSON has at most `max_depth` levels; ValueError names the field."""
        return self.parse(body, content_type, max_depth)

    @property
    def is_chat(self) -> bool:
        """Whether its bodies are those of OpenAI's chats."""
        return self.path.encode() == CHAT


def _read_unplaced(data: Mapping[str, Any]) -> OpenAIRequest:
    return request_in({"model": data.get("model")}, [], max_tokens=1, prompt_tokens=1, prefill_only=True)


def read_any_body(data: Mapping[str, Any]) -> OpenAIRequest:
    """Read the body of an endpoint that only engines know: its texts are taken for its prompt."""
    limits = (count_in(data, name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
    given = [value for name, value in data.items() if name != "model"]
    texts = [text for value in given for text in (value if isinstance(value, list) else [value])]
    return request_in(
        data,
        [text for text in texts if isinstance(text, str)],
        max_tokens=next((limit for limit in limits if limit is not None), None),
        why_not_continuable="unknown_endpoint",
    )


def _of_object(read: Callable[[Mapping[str, Any]], OpenAIRequest]) -> Parse:
    return lambda body, _, max_depth: read(object_in(body, max_depth))


def _named(paths: tuple[bytes, ...], kind: str, parse: Parse, **more: Any) -> list[EngineEndpoint]:
    return [EngineEndpoint(path=path.decode(), kind=kind, parse=parse, **more) for path in paths]


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        *_named((COMPLETIONS,), GENERATE, lambda body, _, max_depth: read_body(body, chat=False, max_depth=max_depth)),
        *_named((CHAT,), GENERATE, lambda body, _, max_depth: read_body(body, chat=True, max_depth=max_depth)),
        EngineEndpoint(
            path=RESPONSES.decode(), kind=GENERATE, parse=_of_object(read_response_body), format=RESPONSES_FORMAT,
            errors=RESPONSES_ERRORS,
        ),
        EngineEndpoint(
            path=MESSAGES.decode(), kind=GENERATE, parse=_of_object(read_message_body), format=MESSAGES_FORMAT,
            errors=ANTHROPIC_ERRORS,
        ),
        *_named((COUNT_TOKENS,), UNPLACED, _of_object(_read_unplaced), errors=ANTHROPIC_ERRORS),
        *_named(POOLING, PREFILL_ONLY, _of_object(read_pooling_body), format=POOLING_FORMAT),
        *_named(SCORING, PREFILL_ONLY, _of_object(read_scoring_body), format=POOLING_FORMAT),
        *_named((TOKENIZE, DETOKENIZE), UNPLACED, _of_object(_read_unplaced)),
        *_named(TRANSCRIPTIONS, GENERATE, read_transcription_body),
        *_named((SPEECH,), GENERATE, _of_object(read_speech_body)),
    )
}  # fmt: skip


def announced_endpoint(path: str) -> EngineEndpoint:
    """Return the endpoint of a path that only engines know."""
    return EngineEndpoint(path=path, kind=GENERATE, parse=_of_object(read_any_body))


def errors_of(path: str) -> ErrorShape:
    """Return the shape of the errors of a path."""
    endpoint = ENDPOINTS.get(path)
    return PLAIN_ERRORS if endpoint is None else endpoint.errors
