"""Images, audio and videos in a conversation: their kinds, sizes and places, without loading what a URL names."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from predictor.media_tokens import MediaTokens, audio_tokens, image_tokens, video_tokens
from protos.block.v1 import common_pb2
from services.http.image_size import MAX_HEAD_BYTES, Size, image_size
from services.http.json_fields import description_of

IMAGE, AUDIO, VIDEO = "image", "audio", "video"
# The type of a part, its kind, and the field that has it.
TYPES = {
    "image_url": (IMAGE, "image_url"),
    "image": (IMAGE, "image"),
    "input_image": (IMAGE, "image_url"),
    "input_audio": (AUDIO, "input_audio"),
    "audio_url": (AUDIO, "audio_url"),
    "video_url": (VIDEO, "video_url"),
}
MAX_PARTS = 256  # of one request
COMPRESSED_BYTES_PER_S = 16_000  # of audio: 128 kbit/s
WAV_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """An image, audio or a video in a prompt, with the bytes of text before it; `size` and `seconds` where known."""

    kind: str
    text_before: int
    identity: bytes
    size: Size | None = None
    seconds: float | None = None

    def tokens(self, model: str) -> MediaTokens:
        """Count its tokens by the model's rule, or estimate them."""
        if self.kind == IMAGE:
            return image_tokens(model, self.size)
        return audio_tokens(model, self.seconds) if self.kind == AUDIO else video_tokens(model)


def media_in(messages: Sequence[Any]) -> tuple[MediaPart, ...]:
    """Find the media of a conversation; ValueError names a part whose data cannot be decoded.

    What is decoded but is no known image is estimated: the engine may know it.
    """
    found: list[MediaPart] = []
    text_before = 0
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            text_before += len(content)
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict):
                continue
            if isinstance(part.get("text"), str):
                text_before += len(part["text"])
            elif part.get("type") in TYPES:
                found.append(_part(part, text_before, f"messages[{place}].content[{number}]"))
                if len(found) > MAX_PARTS:
                    raise ValueError(f"messages: have more than {MAX_PARTS} images and other media")
    return tuple(found)


def _part(part: dict[str, Any], text_before: int, where: str) -> MediaPart:
    kind, field = TYPES[part["type"]]
    given = part.get(field)
    if isinstance(given, dict):
        given = given.get("data") if field == "input_audio" else given.get("url")
        field = f"{field}.{'data' if field == 'input_audio' else 'url'}"
    if given is None and part.get("uuid"):  # an image that the engine has
        return MediaPart(kind=kind, text_before=text_before, identity=_digest(str(part["uuid"])))
    if not isinstance(given, str) or not given:
        raise ValueError(f"{where}.{field}: must be a string, not {description_of(given)}")
    identity, head, num_bytes = _digest(given), b"", 0
    if kind != VIDEO and (given[:5].lower() == "data:" or field == "input_audio.data"):
        head, num_bytes = _decoded(given, f"{where}.{field}")
    if kind == IMAGE:
        return MediaPart(kind=kind, text_before=text_before, identity=identity, size=image_size(head))
    seconds = _seconds(head, num_bytes) if kind == AUDIO and head else None
    return MediaPart(kind=kind, text_before=text_before, identity=identity, seconds=seconds)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _decoded(given: str, where: str) -> tuple[bytes, int]:
    """Return the first bytes of the data, and about how many there are in all."""
    form, comma, data = given.partition(",") if given[:5].lower() == "data:" else (";base64", ",", given)
    if not comma or not form.lower().endswith(";base64"):
        raise ValueError(f"{where}: must be data in base64")
    first = data[: MAX_HEAD_BYTES // 3 * 4]
    try:
        head = base64.b64decode(first + "=" * (-len(first) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{where}: is no valid base64") from None
    if not head:
        raise ValueError(f"{where}: is empty")
    return head, len(data) * 3 // 4


def _seconds(head: bytes, num_bytes: int) -> float:
    """Return the length of audio: of WAV by its header, otherwise estimated from its size."""
    at = head[:WAV_HEAD_BYTES].find(b"fmt ")
    if head[:4] == b"RIFF" and at >= 0 and len(head) >= at + 20:
        rate = int.from_bytes(head[at + 16 : at + 20], "little")
        if rate:
            return num_bytes / rate
    return num_bytes / COMPRESSED_BYTES_PER_S


def media_tokens(parts: Sequence[MediaPart], model: str) -> int:
    """Return how many tokens of a prompt its media take."""
    return sum(part.tokens(model).tokens for part in parts)


def encoder_inputs(parts: Sequence[MediaPart], model: str, prompt_tokens: int) -> list[common_pb2.EncoderInput]:
    """Write the media of a prompt as inputs of an encoder, at about their places; none if the prompt is too short."""
    counts = [part.tokens(model) for part in parts]
    text_tokens = prompt_tokens - sum(count.tokens for count in counts)
    if text_tokens < 0:
        return []
    most_text = max([1, *(part.text_before for part in parts)])
    inputs, before = [], 0
    for part, count in zip(parts, counts, strict=True):
        position = text_tokens * part.text_before // most_text + before
        inputs.append(
            common_pb2.EncoderInput(
                position=position, tokens=count.tokens, identity=part.identity, is_estimate=not count.is_exact
            )
        )
        before += count.tokens
    return inputs
