"""What placing a request needs to know, from its body and headers; what is wrong is named as the client wrote it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from protos.block.v1 import common_pb2

Headers = Iterable[tuple[bytes, bytes]]

MOST_TOKENS = 2**31 - 1
LONGEST_NAME = 256  # characters of ids and names
PROMPT_END_BYTES = 64 * 1024  # of a longer prompt, schedulers and taggers get head and tail
MESSAGE_TOKENS = 4  # what a chat template puts around each message, about

CLASSES = {"real-time": common_pb2.REQUEST_CLASS_REAL_TIME, "best-effort": common_pb2.REQUEST_CLASS_BEST_EFFORT}

# Headers that say the same; of llm-d, the newer and the older spelling.
SLO_TTFT = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
SLO_TPOT = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
SESSION = (b"x-session-id", b"x-block-session-id")
FAIRNESS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
PRIORITY = b"x-block-priority"
CLASS = b"x-block-class"
REQUEST_ID = b"x-request-id"
READ = frozenset((*SLO_TTFT, *SLO_TPOT, *SESSION, *FAIRNESS, PRIORITY, CLASS, REQUEST_ID))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as far as placing it needs to know."""

    model: str
    stream: bool
    prompt: bytes  # head and tail at least; empty where the client sent token ids
    prompt_bytes: int  # of the whole
    prompt_tokens: int | None  # where the client sent token ids
    num_messages: int
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool
    expected_tokens: int | None
    priority: int  # lower runs first


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What its headers add."""

    request_id: str | None
    slo: common_pb2.Slo | None
    session_id: str
    fairness_id: str
    priority: int | None
    request_class: common_pb2.RequestClass.ValueType


def read_body(body: bytes, *, chat: bool) -> Ask:
    """Read the body of a (chat) completion."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("the body must be a JSON object")
    if chat:
        parts, num_messages = _messages(data)
        tokens = None
    else:
        parts, tokens = _prompt(data)
        num_messages = 0
    text = "\n".join(parts).encode("utf-8", "replace")
    limit = _count(data, "max_completion_tokens") if chat else None
    hints = _hints(data)
    return Ask(
        model=_model(data),
        stream=_flag(data, "stream"),
        prompt=text if len(text) <= 2 * PROMPT_END_BYTES else text[:PROMPT_END_BYTES] + text[-PROMPT_END_BYTES:],
        prompt_bytes=len(text),
        prompt_tokens=tokens,
        num_messages=num_messages,
        max_tokens=_count(data, "max_tokens") if limit is None else limit,
        min_tokens=_count(data, "min_tokens"),
        ignore_eos=_flag(data, "ignore_eos"),
        expected_tokens=_hinted_length(hints),
        priority=_priority(data, hints),
    )


def read_headers(headers: Headers) -> Wishes:
    """Read the headers that placing needs."""
    given = {name: value for name, value in headers if name in READ}
    if not given:
        return NO_WISHES
    ttft_s, tpot_s = _milliseconds(given, SLO_TTFT), _milliseconds(given, SLO_TPOT)
    request_class = common_pb2.REQUEST_CLASS_UNSPECIFIED
    if CLASS in given:
        name = _text(given, (CLASS,))
        if name not in CLASSES:
            raise ValueError(f"{CLASS.decode()}: must be one of {', '.join(CLASSES)}, not {name!r}")
        request_class = CLASSES[name]
    return Wishes(
        request_id=_text(given, (REQUEST_ID,)) or None,
        slo=None if ttft_s is None and tpot_s is None else common_pb2.Slo(ttft_s=ttft_s, tpot_s=tpot_s),
        session_id=_text(given, SESSION),
        fairness_id=_text(given, FAIRNESS),
        priority=_whole(given, PRIORITY),
        request_class=request_class,
    )


NO_WISHES = Wishes(
    request_id=None,
    slo=None,
    session_id="",
    fairness_id="",
    priority=None,
    request_class=common_pb2.REQUEST_CLASS_UNSPECIFIED,
)


# Bodies. JSON's null means that a field is not given, as everywhere in OpenAI's.


def _model(data: Mapping[str, Any]) -> str:
    model = data.get("model")
    if model is None:
        return ""
    if not isinstance(model, str):
        raise ValueError(f"model: must be a string, not {_kind(model)}")
    if len(model) > LONGEST_NAME:
        raise ValueError(f"model: is longer than {LONGEST_NAME} characters")
    return model


def _prompt(data: Mapping[str, Any]) -> tuple[list[str], int | None]:
    """Read a text, token ids, or a list of either."""
    prompt = data.get("prompt")
    if prompt is None:
        raise ValueError("prompt: is missing")
    if isinstance(prompt, str):
        return [prompt], None
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt, None
        if all(type(item) is int for item in prompt):
            return [], len(prompt)
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
            return [], sum(len(item) for item in prompt)
    raise ValueError("prompt: must be a string, a list of token ids, or a list of either")


def _messages(data: Mapping[str, Any]) -> tuple[list[str], int]:
    """Write a conversation down about as a chat template would."""
    messages = data.get("messages")
    if messages is None:
        raise ValueError("messages: is missing")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: must be a list of at least one message")
    parts: list[str] = []
    tools = data.get("tools")
    if tools:
        parts.append(json.dumps(tools))
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{place}]: must be an object, not {_kind(message)}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise ValueError(f"messages[{place}].role: must be a string, not {_kind(role)}")
        parts.append(role)
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            parts += [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        elif content is not None:
            raise ValueError(f"messages[{place}].content: must be a string or a list of parts, not {_kind(content)}")
    return parts, len(messages)


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false, not {_kind(value)}")
    return value


def _count(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise ValueError(f"{name}: must be a whole number, not {_kind(value)}")
    if not 0 <= value <= MOST_TOKENS:
        raise ValueError(f"{name}: must lie between 0 and {MOST_TOKENS}, not {value}")
    return value


def _hints(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find Dynamo's hints for agents; whatever else is in its extensions is the engine's business."""
    extensions = data.get("nvext")
    hints = extensions.get("agent_hints") if isinstance(extensions, dict) else None
    return hints if isinstance(hints, dict) else {}


def _hinted_length(hints: Mapping[str, Any]) -> int | None:
    try:
        return _count(hints, "osl") or None
    except ValueError as error:
        raise ValueError(f"nvext.agent_hints.{error}") from None


def _priority(data: Mapping[str, Any], hints: Mapping[str, Any]) -> int:
    """Read vLLM's priority, where lower runs first; else Dynamo's, where higher does."""
    own = _signed(data.get("priority"), "priority")
    if own is not None:
        return own
    hinted = _signed(hints.get("priority"), "nvext.agent_hints.priority")
    return 0 if hinted is None else -hinted


def _signed(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise ValueError(f"{name}: must be a whole number, not {_kind(value)}")
    return _bounded(value, name)


def _bounded(value: int, name: str) -> int:
    if abs(value) > MOST_TOKENS:
        raise ValueError(f"{name}: must lie between -{MOST_TOKENS} and {MOST_TOKENS}, not {value}")
    return value


def _kind(value: Any) -> str:
    """Name what JSON had instead, shortly."""
    kinds: dict[type, Callable[[Any], str]] = {
        dict: lambda _: "an object",
        list: lambda _: "a list",
        str: lambda text: repr(text if len(text) <= 40 else text[:40] + "…"),
        type(None): lambda _: "null",
        bool: lambda flag: str(flag).lower(),
    }
    return kinds.get(type(value), repr)(value)


# Headers.


def _text(given: Mapping[bytes, bytes], names: Iterable[bytes]) -> str:
    for name in names:
        value = given.get(name)
        if value is not None:
            text = value.decode("latin-1").strip()
            if len(text) > LONGEST_NAME or not text.isascii() or not text.isprintable():
                raise ValueError(f"{name.decode()}: must be at most {LONGEST_NAME} printable ASCII characters")
            return text
    return ""


def _milliseconds(given: Mapping[bytes, bytes], names: Iterable[bytes]) -> float | None:
    for name in names:
        value = given.get(name)
        if value is not None:
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name.decode()}: must be a number of milliseconds above 0")
            return number / 1000
    return None


def _whole(given: Mapping[bytes, bytes], name: bytes) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{name.decode()}: must be a whole number") from None
    return _bounded(number, name.decode())
