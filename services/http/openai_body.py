"""OpenAI request bodies: the values that placing a request needs; errors name the field as the client wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.prefix.prompt import PROMPT_END_BYTES
from services.http.json_body import MAX_JSON_DEPTH, JsonError, request_json
from services.http.stream_continuation import IDS_FIELD, why_not_continuable

MAX_TOKENS = 2**31 - 1
LONGEST_NAME = 256  # characters of ids and names
MAX_TOKEN_IDS = 8192  # kept of a prompt that is sent as token ids
KV_TRANSFER_PARAMS = "kv_transfer_params"
MESSAGE_TOKENS = 4  # that a chat template adds to each message, approximately


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """The values of a request that placing it needs."""

    model: str
    stream: bool
    prompt: bytes  # at least its head and tail; empty where the client sent token ids
    prompt_bytes: int  # of the whole prompt
    prompt_tokens: int | None  # where the client sent token ids
    num_messages: int
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool
    expected_tokens: int | None
    priority: int | None  # as engines read it: lower runs first
    hinted_priority: int | None  # likewise, from a hint that engines do not read
    token_ids: tuple[int, ...] = ()  # the first ones, where the client sent those of one prompt
    num_prompts: int = 1
    num_samples: int = 1  # responses to each prompt
    conversation: Mapping[str, Any] | None = None  # the whole body of a chat
    xargs: Mapping[str, Any] | None = None  # `vllm_xargs`, for plug-ins of vLLM; None without this key
    undivided: bool = False  # one engine must serve it whole: see `_is_undivided`
    why_not_continuable: str = ""  # why its stream cannot continue on another engine; empty where it can
    returns_token_ids: bool = False  # the client asks for them
    has_kv_transfer_params: bool = False  # as a field, or in `vllm_xargs`, where vLLM finds them too


def read_body(body: bytes, *, chat: bool, max_depth: int = MAX_JSON_DEPTH) -> OpenAIRequest:
    """Read the body of a (chat) completion."""
    try:
        data = request_json(body, max_depth)
    except JsonError:
        raise
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("the body must be a JSON object")
    prompts: list[list[int]] = []
    if chat:
        parts, num_messages = _conversation(data)
    else:
        (parts, prompts), num_messages = _prompt(data), 0
    text = "\n".join(parts).encode("utf-8", "replace")
    num_prompts = 1 if chat else max(len(parts), len(prompts))
    limit = _count(data, "max_completion_tokens") if chat else None
    max_tokens = _count(data, "max_tokens") if limit is None else limit
    hints, xargs = _hints(data), _xargs(data)
    names_blocks = _names_blocks(data)
    return OpenAIRequest(
        model=_model(data),
        stream=_flag(data, "stream"),
        prompt=text if len(text) <= 2 * PROMPT_END_BYTES else text[:PROMPT_END_BYTES] + text[-PROMPT_END_BYTES:],
        prompt_bytes=len(text),
        prompt_tokens=sum(map(len, prompts)) if prompts else None,
        num_messages=num_messages,
        max_tokens=max_tokens,
        min_tokens=_count(data, "min_tokens"),
        ignore_eos=_flag(data, "ignore_eos"),
        expected_tokens=_hinted_length(hints),
        priority=_signed(data.get("priority"), "priority"),
        hinted_priority=_hinted_priority(hints),
        token_ids=tuple(prompts[0][:MAX_TOKEN_IDS]) if len(prompts) == 1 else (),
        num_prompts=num_prompts,
        num_samples=_num_samples(data),
        conversation=data if chat else None,
        xargs=xargs,
        undivided=num_prompts > 1
        or names_blocks
        or (max_tokens is not None and max_tokens <= 1)
        or (chat and _has_other_parts(data["messages"]))
        or _is_undivided(data),
        why_not_continuable="kv_transfer_params" if names_blocks else why_not_continuable(data, chat=chat),
        returns_token_ids=bool(data.get(IDS_FIELD)),
        has_kv_transfer_params=names_blocks,
    )


def names_kv_blocks(body: bytes) -> bool:
    """Return whether the body of any request has `kv_transfer_params`, in an encoding that engines read.

    A body that is too deep to be read is refused: an engine may read deeper.
    """
    try:
        data = json.loads(body)
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except ValueError:
        return False
    return isinstance(data, dict) and _names_blocks(data)


def _names_blocks(data: Mapping[str, Any]) -> bool:
    xargs = data.get("vllm_xargs")
    return data.get(KV_TRANSFER_PARAMS) is not None or (isinstance(xargs, dict) and KV_TRANSFER_PARAMS in xargs)


def with_fields(body: bytes, fields: bytes) -> bytes:
    """Add fields, written as JSON, to a body that is an object and not empty; the rest is not read again."""
    inside = body.index(b"{") + 1
    return b"%s%s,%s" % (body[:inside], fields, body[inside:])


def _is_undivided(data: Mapping[str, Any]) -> bool:
    """Return whether prefill and decode must not be disaggregated.

    Several samples would fetch the same KV blocks, which are freed by the first; what reads the prompt's own
    probabilities computes the prompt again.
    """
    get = data.get
    return bool(
        (get("n") or 1) != 1
        or (get("best_of") or 1) != 1
        or get("use_beam_search")
        or get("echo")
        or get("prompt_logprobs") is not None
    )


def _num_samples(data: Mapping[str, Any]) -> int:
    """Return how many responses to a prompt are generated; the engine refuses what is no such number."""
    given = [value for value in (data.get("n"), data.get("best_of")) if type(value) is int]
    return min(MAX_TOKENS, max([1, *given]))


def _has_other_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation contains anything but text, such as images."""
    contents = (message.get("content") for message in messages)
    return any(
        isinstance(part, dict) and part.get("text") is None
        for content in contents
        if isinstance(content, list)
        for part in content
    )


# As everywhere in OpenAI's API, null means that a field is absent.


def _model(data: Mapping[str, Any]) -> str:
    model = data.get("model")
    if model is None:
        return ""
    if not isinstance(model, str):
        raise ValueError(f"model: must be a string, not {description_of(model)}")
    if len(model) > LONGEST_NAME:
        raise ValueError(f"model: is longer than {LONGEST_NAME} characters")
    return model


def _xargs(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if "vllm_xargs" not in data:
        return None
    xargs = data["vllm_xargs"] or {}
    if not isinstance(xargs, dict):
        raise ValueError(f"vllm_xargs: must be an object, not {description_of(xargs)}")
    return xargs


def _prompt(data: Mapping[str, Any]) -> tuple[list[str], list[list[int]]]:
    """Read a text, token ids, or a list of either; return texts or token ids."""
    prompt = data.get("prompt")
    if prompt is None:
        raise ValueError("prompt: is missing")
    if isinstance(prompt, str):
        return [prompt], []
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt, []
        if all(type(item) is int for item in prompt):
            return [], [prompt]
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
            return [], prompt
    raise ValueError("prompt: must be a string, a list of token ids, or a list of either")


def _conversation(data: Mapping[str, Any]) -> tuple[list[str], int]:
    """Read tools and messages; return their texts, approximately as a chat template writes them."""
    messages = data.get("messages")
    if messages is None:
        raise ValueError("messages: is missing")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: must be a list of at least one message")
    tools = data.get("tools")
    return [*([json.dumps(tools)] if tools else []), *conversation_texts(messages)], len(messages)


class MessageError(ValueError):
    """A message of a conversation that cannot be read."""

    def __init__(self, place: int, field: str, value: Any, expected: str) -> None:
        """Note the message's place, its field (empty: the message itself) and the value."""
        super().__init__(
            f"messages[{place}]{'.' if field else ''}{field}: must be {expected}, not {description_of(value)}"
        )
        self.place = place
        self.field = field
        self.value = value


def read_messages(messages: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Give the role of each message and the parts of its content, a plain text as one part."""
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise MessageError(place, "", message, "an object")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise MessageError(place, "role", role, "a string")
        if content is None:
            yield role, []
        elif isinstance(content, str):
            yield role, [{"type": "text", "text": content}]
        elif isinstance(content, list):
            yield role, content
        else:
            raise MessageError(place, "content", content, "a string or a list of parts")


def conversation_texts(messages: Sequence[Any]) -> list[str]:
    """Write a conversation approximately as a chat template does: roles and texts; other parts are left out."""
    texts: list[str] = []
    for role, parts in read_messages(messages):
        texts.append(role)
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false, not {description_of(value)}")
    return value


def _count(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise ValueError(f"{name}: must be a whole number, not {description_of(value)}")
    if not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{name}: must lie between 0 and {MAX_TOKENS}, not {value}")
    return value


def _hints(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find Dynamo's hints for agents; its other extensions are for the engine."""
    extensions = data.get("nvext")
    hints = extensions.get("agent_hints") if isinstance(extensions, dict) else None
    return hints if isinstance(hints, dict) else {}


def _hinted_length(hints: Mapping[str, Any]) -> int | None:
    try:
        return _count(hints, "osl") or None
    except ValueError as error:
        raise ValueError(f"nvext.agent_hints.{error}") from None


def _hinted_priority(hints: Mapping[str, Any]) -> int | None:
    """Read Dynamo's priority and change its sign: there, higher runs first."""
    hinted = _signed(hints.get("priority"), "nvext.agent_hints.priority")
    return None if hinted is None else -hinted


def _signed(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise ValueError(f"{name}: must be a whole number, not {description_of(value)}")
    return bounded(value, name)


def bounded(value: int, name: str) -> int:
    """Refuse a whole number beyond 32 bits, which engines do."""
    if abs(value) > MAX_TOKENS:
        raise ValueError(f"{name}: must lie between -{MAX_TOKENS} and {MAX_TOKENS}, not {value}")
    return value


def description_of(value: Any) -> str:
    """Describe a JSON value of the wrong type, in short."""
    kinds: dict[type, Callable[[Any], str]] = {
        dict: lambda _: "an object",
        list: lambda _: "a list",
        str: lambda text: repr(text if len(text) <= 40 else text[:40] + "…"),
        type(None): lambda _: "null",
        bool: lambda flag: str(flag).lower(),
    }
    return kinds.get(type(value), repr)(value)
