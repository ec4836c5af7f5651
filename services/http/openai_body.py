"""OpenAI request bodies: the values that placing a request needs; errors name the field as the client wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.prefix.prompt import PROMPT_END_BYTES
from services.http.continuable import IDS_FIELD, has_other_parts, why_not_continuable
from services.http.json_body import MAX_JSON_DEPTH
from services.http.json_fields import (
    count_in,
    description_of,
    flag_in,
    model_in,
    object_in,
    signed,
    xargs_in,
)
from services.http.media_parts import MediaPart, media_in
from services.http.structured_output import grammar_of

MAX_TOKEN_IDS = 8192  # kept of a prompt that is sent as token ids
MAX_SAMPLES = 16384  # responses to a prompt: vLLM's own limit
KV_TRANSFER_PARAMS = "kv_transfer_params"
COMPLETE, CONVERSE = "text_completion", "chat"
MOST_BYTES = 2**31  # that a prompt counts
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
    prompt_sizes: tuple[int, ...] = ()  # of several prompts, in tokens where the client sent these, else in bytes
    grammar: bytes = b""  # names the grammar of a structured output
    conversation: Mapping[str, Any] | None = None  # the whole body of a chat
    xargs: Mapping[str, Any] | None = None  # `vllm_xargs`, for plug-ins of vLLM; None without this key
    undivided: bool = False  # one engine must serve it whole: see `_is_undivided`
    prefill_only: bool = False  # the engine computes the prompts and generates nothing
    is_object: bool = True  # its body is a JSON object, to which fields can be added
    operation: str = COMPLETE  # what it asks for, as OpenTelemetry names it
    response_id: str = ""  # of the earlier response that it continues, which one engine keeps
    names_itself: bool = False  # its body has the id that the engine gives the response
    is_kept: bool = False  # the engine keeps its response, which can be requested later
    in_background: bool = False  # the engine may reply before it computes the response
    why_not_continuable: str = ""  # why its stream cannot continue on another engine; empty where it can
    returns_token_ids: bool = False  # the client asks for them
    fields: frozenset[str] = frozenset()  # the names of all fields of its body
    has_kv_transfer_params: bool = False  # as a field, or in `vllm_xargs`, where vLLM finds them too
    media: tuple[MediaPart, ...] = ()  # images, audio and videos


def read_body(body: bytes, *, chat: bool, max_depth: int = MAX_JSON_DEPTH) -> OpenAIRequest:
    """Read the body of a (chat) completion."""
    data = object_in(body, max_depth)
    prompts: list[list[int]] = []
    if chat:
        parts, num_messages = _conversation(data)
    else:
        (parts, prompts), num_messages = _prompt(data), 0
    num_prompts = 1 if chat else max(len(parts), len(prompts))
    limit = count_in(data, "max_completion_tokens") if chat else None
    max_tokens = count_in(data, "max_tokens") if limit is None else limit
    return request_in(
        data,
        parts,
        max_tokens=max_tokens,
        prompt_tokens=sum(map(len, prompts)) if prompts else None,
        num_messages=num_messages,
        token_ids=tuple(prompts[0][:MAX_TOKEN_IDS]) if len(prompts) == 1 else (),
        num_prompts=num_prompts,
        num_samples=_num_samples(data),
        prompt_sizes=_sizes(parts, prompts) if num_prompts > 1 else (),
        conversation=data if chat else None,
        undivided=num_prompts > 1
        or (max_tokens is not None and max_tokens <= 1)
        or (chat and has_other_parts(data["messages"]))
        or _is_undivided(data),
        why_not_continuable=why_not_continuable(data, chat=chat),
        returns_token_ids=bool(data.get(IDS_FIELD)),
        operation=CONVERSE if chat else COMPLETE,
        media=media_in(data["messages"]) if chat else (),
    )


def request_in(  # noqa: PLR0913 - what endpoints differ in
    data: Mapping[str, Any],
    texts: Sequence[str],
    *,
    max_tokens: int | None,
    undivided: bool = True,
    prompt_tokens: int | None = None,
    num_messages: int = 0,
    expected_tokens: int | None = None,
    repeated_bytes: int = 0,
    **more: Any,
) -> OpenAIRequest:
    """Read the fields that the bodies of all endpoints share; `texts` are those of the prompts.

    An engine computes `repeated_bytes` of them again.
    """
    text = "\n".join(texts).encode("utf-8", "replace")
    hints = _hints(data)
    if names_blocks_in(data):
        more |= {"has_kv_transfer_params": True, "why_not_continuable": KV_TRANSFER_PARAMS}
        undivided = True
    return OpenAIRequest(
        model=model_in(data),
        stream=flag_in(data, "stream"),
        prompt=ends_of(text),
        prompt_bytes=min(len(text) + repeated_bytes, MOST_BYTES),
        prompt_tokens=prompt_tokens,
        num_messages=num_messages,
        max_tokens=max_tokens,
        min_tokens=count_in(data, "min_tokens"),
        ignore_eos=flag_in(data, "ignore_eos"),
        expected_tokens=_hinted_length(hints) or expected_tokens,
        priority=signed(data.get("priority"), "priority"),
        hinted_priority=_hinted_priority(hints),
        xargs=xargs_in(data),
        grammar=grammar_of(data),
        undivided=undivided,
        fields=frozenset(data),
        **more,
    )


def ends_of(text: bytes) -> bytes:
    """Return what is kept of a prompt: the whole of a short one, the head and the tail of a long one."""
    return text if len(text) <= 2 * PROMPT_END_BYTES else text[:PROMPT_END_BYTES] + text[-PROMPT_END_BYTES:]


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
    return isinstance(data, dict) and names_blocks_in(data)


def names_blocks_in(data: Mapping[str, Any]) -> bool:
    """Return whether a request has `kv_transfer_params`, as a field or in `vllm_xargs`."""
    xargs = data.get("vllm_xargs")
    return data.get(KV_TRANSFER_PARAMS) is not None or (isinstance(xargs, dict) and KV_TRANSFER_PARAMS in xargs)


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
    """Return how many responses to a prompt are generated; vLLM's engine ignores `best_of`."""
    num = data.get("n")
    if num is None:
        return 1
    if type(num) is not int:
        raise ValueError(f"n: must be a whole number, not {description_of(num)}")
    if not 1 <= num <= MAX_SAMPLES:
        raise ValueError(f"n: must lie between 1 and {MAX_SAMPLES}, not {num}")
    return num


def _sizes(texts: Sequence[str], prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the sizes of several prompts, none of which is empty."""
    sizes = tuple(map(len, prompts)) if prompts else tuple(len(text.encode("utf-8", "replace")) for text in texts)
    if 0 in sizes:
        raise ValueError(f"prompt[{sizes.index(0)}]: is empty")
    return sizes


def _prompt(data: Mapping[str, Any]) -> tuple[list[str], list[list[int]]]:
    """Read a text, token ids, or a list of either; return texts or token ids."""
    prompt = data.get("prompt")
    if prompt is None:
        raise ValueError("prompt: is missing")
    if isinstance(prompt, str):
        return [prompt], []
    if prompt == []:
        raise ValueError("prompt: is an empty list; give at least one prompt")
    if isinstance(prompt, list):
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


def _hints(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find Dynamo's hints for agents; its other extensions are for the engine."""
    extensions = data.get("nvext")
    hints = extensions.get("agent_hints") if isinstance(extensions, dict) else None
    return hints if isinstance(hints, dict) else {}


def _hinted_length(hints: Mapping[str, Any]) -> int | None:
    try:
        return count_in(hints, "osl") or None
    except ValueError as error:
        raise ValueError(f"nvext.agent_hints.{error}") from None


def _hinted_priority(hints: Mapping[str, Any]) -> int | None:
    """Read Dynamo's priority and change its sign: there, higher runs first."""
    hinted = signed(hints.get("priority"), "nvext.agent_hints.priority")
    return None if hinted is None else -hinted
