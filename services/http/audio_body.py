"""Bodies of /v1/audio/…: the values that placing a request needs; what a client uploads passes byte for byte.

A transcription is forecast by the length of its audio: of WAV files it is read, of others it is estimated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header

from services.http.json_body import MAX_JSON_DEPTH, request_json
from services.http.json_fields import LONGEST_NAME
from services.http.openai_body import KV_TRANSFER_PARAMS, OpenAIRequest, request_in

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # a bad form is a reply, and no line of the log

FORM = b"multipart/form-data"
TRANSCRIBE, SPEAK = "transcription", "speech"
FILE = "file"
MAX_FIELD_BYTES = 16 * 1024  # of a field that is read
MAX_FIELDS = 64
TOKENS_PER_S = 50  # that Whisper's encoder makes of audio
SPOKEN_TOKENS_PER_S = 3.3  # of a transcription: 150 words in a minute
BYTES_PER_S = 16_000  # of compressed audio: 128 kbit/s
TRUE = ("true", "1", "on", "yes", "t", "y")
WAV_HEAD_BYTES = 4096


def read_transcription_body(body: bytes, content_type: bytes, max_depth: int = MAX_JSON_DEPTH) -> OpenAIRequest:
    """Read a form with an audio file."""
    form = read_form(body, content_type)
    names_blocks = KV_TRANSFER_PARAMS in form.fields or _names_blocks(form.fields.get("vllm_xargs", ""), max_depth)
    seconds = form.audio_s
    limit = form.fields.get("max_completion_tokens", "")
    return request_in(
        {"model": form.fields.get("model") or None, "stream": form.fields.get("stream", "").lower() in TRUE},
        [form.fields.get("prompt", "")],
        max_tokens=int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else None,
        prompt_tokens=max(1, round(seconds * TOKENS_PER_S)),
        expected_tokens=max(1, round(seconds * SPOKEN_TOKENS_PER_S)),
        why_not_continuable="audio",
        operation=TRANSCRIBE,
        has_kv_transfer_params=names_blocks,
        is_object=False,
    )


def read_speech_body(data: Mapping[str, Any]) -> OpenAIRequest:
    """Read a request for speech."""
    given = data.get("input")
    if not isinstance(given, str):
        raise ValueError("input: must be a text")
    return request_in(data, [given], max_tokens=None, why_not_continuable="audio", operation=SPEAK)


@dataclass(slots=True)
class AudioForm:
    """The short fields of a form, and its file's size and first bytes."""

    fields: dict[str, str] = field(default_factory=dict)
    file_bytes: int = 0
    file_head: bytes = b""

    @property
    def audio_s(self) -> float:
        """The length of the audio: from the head of a WAV file, otherwise estimated."""
        at = self.file_head.find(b"fmt ")
        if self.file_head[:4] == b"RIFF" and 0 <= at <= len(self.file_head) - 20:
            rate = int.from_bytes(self.file_head[at + 16 : at + 20], "little")
            if rate:
                return self.file_bytes / rate
        return self.file_bytes / BYTES_PER_S


def read_form(body: bytes, content_type: bytes) -> AudioForm:
    """Read a form; ValueError where it is none."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != FORM or not boundary:
        raise ValueError("content-type: must be multipart/form-data with a boundary")
    reader = _FormReader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except MultipartParseError as error:
        raise ValueError(f"the body is not a form: {error}") from None
    if not reader.has_ended:
        raise ValueError("the body is not a form: its last boundary is missing")
    return reader.form


@dataclass(slots=True)
class _FormReader:
    form: AudioForm = field(default_factory=AudioForm)
    has_ended: bool = False
    _header: bytearray = field(default_factory=bytearray)
    _value: bytearray = field(default_factory=bytearray)
    _name: str = ""
    _is_disposition: bool = False

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin, "on_header_begin": self._header.clear, "on_header_field": self._header_name,
            "on_header_value": self._header_value, "on_header_end": self._header_end, "on_part_data": self._data,
            "on_part_end": self._end_part, "on_end": self._end,
        }  # fmt: skip

    def _begin(self) -> None:
        self._name = ""
        self._value.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._is_disposition = bytes(self._header).lower() == b"content-disposition"

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        if self._is_disposition:
            self._value += data[start:end]

    def _header_end(self) -> None:
        if self._is_disposition:
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")[:LONGEST_NAME]
        self._value.clear()
        self._is_disposition = False

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self.form.file_head += data[start : min(end, start + WAV_HEAD_BYTES - len(self.form.file_head))]
            self.form.file_bytes += end - start
        elif len(self._value) <= MAX_FIELD_BYTES:
            self._value += data[start:end]

    def _end_part(self) -> None:
        if self._name == FILE:
            return
        if len(self.form.fields) >= MAX_FIELDS:
            raise ValueError(f"the body: a form may have at most {MAX_FIELDS} fields")
        if len(self._value) > MAX_FIELD_BYTES:
            raise ValueError(f"{self._name}: is longer than {MAX_FIELD_BYTES} bytes")
        value = bytes(self._value).decode("utf-8", "replace")
        if self._name in self.form.fields:
            raise ValueError(f"{self._name}: is a duplicate")
        self.form.fields[self._name] = value

    def _end(self) -> None:
        self.has_ended = True


def _names_blocks(xargs: str, max_depth: int) -> bool:
    if not xargs:
        return False
    try:
        return KV_TRANSFER_PARAMS in (request_json(xargs.encode(), max_depth) or ())
    except (ValueError, TypeError) as error:
        raise ValueError(f"vllm_xargs: {error}") from None
