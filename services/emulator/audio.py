"""/v1/audio/… of an emulated engine: transcripts and speech, the same for the same input."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.emulator.errors import bad_value
from services.emulator.openai import ParsedRequest, Served, request_from
from services.emulator.request_bodies import CHAT, COMPLETION, TRANSCRIPT
from services.http.audio_body import TOKENS_PER_S, TRUE, read_form

RATE = 8000  # samples per second of speech, one byte each
SPEECH_TOKENS_PER_WORD = 4
MAX_WORDS = 4096


def transcription_request(
    data: bytes, content_type: bytes, headers: Mapping[str, str], request_id: str, served: Served
) -> ParsedRequest:
    """Check a form with an audio file; its prompt is as long as what Whisper's encoder makes of the audio."""
    try:
        form = read_form(data, content_type)
    except ValueError as error:
        raise bad_value(str(error), "file") from None
    if not form.file_bytes:
        raise bad_value("file: Field required", "file")
    content = int.from_bytes(hashlib.blake2b(form.file_head, digest_size=4).digest())
    num_tokens = min(max(1, round(form.audio_s * TOKENS_PER_S)), served.max_model_len // 2)
    body = {"prompt": [content + place for place in range(num_tokens)], "max_tokens": served.max_model_len // 4}
    body |= {"model": form.fields.get("model") or None, "stream": form.fields.get("stream", "").lower() in TRUE}
    request = request_from(COMPLETION, body, headers, request_id, served)
    extra = {"seconds": round(form.audio_s)}
    return replace(request, kind=TRANSCRIPT, engine_name=f"transcribe-{request_id}", extra=extra)


def speech_request(data: Any, headers: Mapping[str, str], request_id: str, served: Served) -> ParsedRequest:
    """Check a request for speech, for which the engine makes tokens of audio."""
    if not isinstance(data, dict) or not isinstance(data.get("input"), str) or not data["input"]:
        raise bad_value("input: Field required", "input")
    num_words = min(MAX_WORDS, len(data["input"].split()) or 1)
    chat = {"model": data.get("model"), "messages": [{"role": "user", "content": data["input"]}]}
    chat |= {"max_tokens": min(num_words * SPEECH_TOKENS_PER_WORD, served.max_model_len // 2), "ignore_eos": True}
    return request_from(CHAT, chat, headers, request_id, served)


def speech(request: ParsedRequest) -> bytes:
    """Return a WAV file of silence, as long as the answer."""
    samples = b"\x80" * (request.answer.num_tokens * RATE // 50)
    size = len(samples)
    return (
        b"RIFF" + (36 + size).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
        + (1).to_bytes(2, "little") + (1).to_bytes(2, "little") + RATE.to_bytes(4, "little")
        + RATE.to_bytes(4, "little") + (1).to_bytes(2, "little") + (8).to_bytes(2, "little")
        + b"data" + size.to_bytes(4, "little") + samples
    )  # fmt: skip


class TranscriptReply:
    """Writes one transcript."""

    def __init__(self, request: ParsedRequest, created_s: int) -> None:
        """Write the reply to a request."""
        self._request, self._answer = request, request.answer
        about = {"id": f"trsc-{request.request_id}", "object": "transcription.chunk"}
        self._common = {**about, "created": created_s, "model": request.model}

    def at_once(self) -> bytes:
        """Return the events that come before the engine begins: none."""
        return b""

    def first(self) -> bytes:
        """Return the events before the first token: none."""
        return b""

    def events(self, start: int, end: int, cached_tokens: int = 0) -> bytes:  # noqa: ARG002
        """Return the events of tokens from `start` to before `end`; after the last one, also the stream's end."""
        num_tokens = self._answer.num_tokens
        events = []
        for place in range(start, end):
            reason = self._answer.finish_reason if place == num_tokens - 1 else None
            delta = {"content": self._answer.text(place, place + 1)}
            choice = {"delta": delta, "finish_reason": reason, "stop_reason": None}
            events.append(b"data: " + _json({**self._common, "choices": [choice]}) + b"\n\n")
        return b"".join([*events, *([b"data: [DONE]\n\n"] if end >= num_tokens else [])])

    def whole(self, cached_tokens: int, _: dict[str, Any] | None = None, /) -> bytes:  # noqa: ARG002
        """Return the transcript in one piece."""
        text = self._answer.text(0, self._answer.num_tokens)
        return _json({"text": text, "usage": {"type": "duration", "seconds": self._request.extra["seconds"]}})


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
