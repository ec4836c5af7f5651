"""OpenAI request bodies as an emulated engine reads them, with vLLM's checks and defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from predictor.request import PREFILL, SERVE, EncoderInput
from services.emulator import answers
from services.emulator.answers import AnswerLengths, EmulatedAnswer, StopRule
from services.emulator.errors import VllmError, bad_value, busy, invalid, malformed, mistyped
from services.emulator.tokens import VOCABULARY, chat_text, token_ids
from services.emulator.transfer_params import RemoteBlocks, leg_and_blocks
from services.engine_state.xargs import facts_in
from services.http.openai_body import MAX_SAMPLES, MessageError, read_messages
from services.http.structured_output import grammar_of

COMPLETION, CHAT = "completion", "chat"
RESPONSE, MESSAGE, TRANSCRIPT = "response", "message", "transcript"  # which other modules read
DEFAULT_COMPLETION_TOKENS = 16
LONGEST_ID = 512
MAX_STOP_STRINGS = 64
OUTPUT_TOKENS_HEADER = "x-block-output-tokens"
MAX_DIGITS = 9
GREEDY_BELOW = 1e-5  # temperatures
NOT_EMULATED = ("echo", "logprobs", "prompt_logprobs", "use_beam_search", "suffix", "prompt_embeds")


class StreamOptions(BaseModel):
    """Whether a stream reports usage, and how often."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Body(BaseModel):
    """The fields of both kinds of requests; other fields are ignored."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    priority: int = Field(default=0, ge=-(2**31), le=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    temperature: float | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None


class CompletionBody(_Body):
    """The body of /v1/completions."""

    prompt: Any = None


class ChatBody(_Body):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The served model, against which requests are checked; without a KV connector requests are served whole."""

    model: str
    max_model_len: int
    lengths: AnswerLengths
    has_connector: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)  # paths of those that requests may name as their model
    max_num_requests: int = 10_000  # that the engine queues


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A checked request: its prompt, its answer, and the form of the reply."""

    kind: str
    request_id: str
    model: str
    prompt: Sequence[int]
    max_tokens: int
    answer: EmulatedAnswer
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    min_tokens: int
    returns_token_ids: bool
    facts: Mapping[str, Any]  # of `vllm_xargs`, as columns of a state file
    leg: str = SERVE
    remote: RemoteBlocks | None = None  # of a decode leg
    engine_name: str = ""  # in the engine, before a number that makes it unique; else by the kind
    extra: Mapping[str, Any] = field(default_factory=dict)  # what the reply repeats of the body
    grammar: bytes = b""  # names the grammar of a structured output, which is compiled before
    num_prompts: int = 1
    choices: tuple[ParsedRequest, ...] = ()  # of which the engine makes a request each, where there are several
    data_parallel_rank: int | None = None  # by its header
    lora: tuple[str, str] | None = None  # name and path of the LoRA adapter that it names as its model
    images: tuple[EncoderInput, ...] = ()

    @property
    def adapter(self) -> str:
        """The name of its LoRA adapter; empty for the base model."""
        return self.lora[0] if self.lora else ""


def parsed(data: bytes) -> Any:
    """Parse a body."""
    if not data:
        raise invalid([{"type": "missing", "loc": "body", "msg": "Field required", "input": None}])
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise malformed(error if isinstance(error, ValueError) else ValueError("nested too deeply")) from None


def request_from(kind: str, data: Any, headers: Mapping[str, str], request_id: str, served: Served) -> ParsedRequest:
    """Check a request, and make its answer."""
    body = _body(kind, data)
    if body.model not in (None, served.model) and body.model not in served.adapters:
        aliases = ", ".join((served.model, *served.adapters))
        raise VllmError(
            404,
            f"The model `{body.model}` does not exist. Valid aliases: {aliases}.",
            kind="NotFoundError",
            param="model",
        )
    prompts = _prompts(body)
    num_samples = _num_samples(body)
    if len(prompts) * num_samples > served.max_num_requests:
        raise busy()
    grammar = grammar_of(data)
    made = [
        _choice(kind, body, headers, request_id, served, prompt=prompt, sequence=sequence)
        for prompt in prompts
        for sequence in range(num_samples)
    ]
    if len(made) == 1:
        return replace(made[0], grammar=grammar) if grammar else made[0]
    named = tuple(
        replace(one, engine_name=_engine_name(one, *divmod(index, num_samples), num_samples))
        for index, one in enumerate(made)
    )
    return replace(made[0], grammar=grammar, num_prompts=len(prompts), choices=named)


def _engine_name(choice: ParsedRequest, prompt: int, sequence: int, num_samples: int) -> str:
    """Name the engine's request for a choice as vLLM does, up to the number that makes it unique."""
    name = f"chatcmpl-{choice.request_id}" if choice.kind == CHAT else f"cmpl-{choice.request_id}-{prompt}"
    return name if num_samples == 1 else f"{sequence}_{name}"


def _choice(  # noqa: PLR0913 - what a choice is made of
    kind: str,
    body: CompletionBody | ChatBody,
    headers: Mapping[str, str],
    request_id: str,
    served: Served,
    *,
    prompt: list[int],
    sequence: int,
) -> ParsedRequest:
    """Check a request with one of its prompts, and make one of its answers."""
    room = served.max_model_len - len(prompt)
    wanted = _wanted_tokens(headers)
    max_tokens = _max_tokens(body, len(prompt), served.max_model_len, wanted)
    leg, remote = _leg(body.kv_transfer_params) if served.has_connector else (SERVE, None)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    _check(body, stop, max_tokens)
    seed = served.lengths.seed + (body.seed or 0) + sequence
    num_before = answers.answered_before(prompt, seed)
    chance, offset = answers.seeded_draw(prompt[: len(prompt) - num_before], seed)
    num_tokens = room if body.ignore_eos else max(1, (wanted or served.lengths.draw(chance)) - num_before)
    if leg == PREFILL:
        num_tokens = max_tokens = 1  # the engine model has no other prefill legs
    options = body.stream_options or StreamOptions()
    return ParsedRequest(
        kind=kind,
        request_id=request_id,
        model=body.model or served.model,
        lora=(body.model, served.adapters[body.model]) if body.model and body.model in served.adapters else None,
        prompt=prompt,
        max_tokens=max_tokens,
        answer=answers.answer(
            offset + num_before,
            num_tokens,
            max_tokens,
            StopRule(strings=stop, min_tokens=body.min_tokens, shows=body.include_stop_str_in_output),
        ),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        priority=body.priority,
        min_tokens=body.min_tokens,
        returns_token_ids=bool(body.return_token_ids),
        facts=_facts(body.vllm_xargs or {}),
        leg=leg,
        remote=remote,
    )


def remote_blocks_in(data: Any) -> RemoteBlocks | None:
    """Return the blocks that a request names, whatever else is wrong with it; None where it names none."""
    params = data.get("kv_transfer_params") if isinstance(data, dict) else None
    try:
        return leg_and_blocks(params)[1]
    except ValueError:
        return None


def prompt_of(data: Any) -> tuple[list[int], bool]:
    """Tokenize the prompt of /tokenize; return whether the tokens' texts are requested too."""
    found = data if isinstance(data, dict) else {}
    if not isinstance(found.get("prompt"), str) and "messages" not in found:
        raise invalid(
            [
                {"type": "missing", "loc": f"body.{name}", "msg": "Field required", "input": found}
                for name in ("prompt", "messages")
            ]
        )
    wants_texts = bool(data.get("return_token_strs"))
    if isinstance(data.get("prompt"), str):
        return token_ids(data["prompt"]), wants_texts
    return _prompt(_body(CHAT, data)), wants_texts


def _body(kind: str, data: Any) -> CompletionBody | ChatBody:
    if not isinstance(data, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid([{"type": "model_attributes_type", "loc": "body", "msg": message, "input": data}])
    if data.get("stream_options") and not data.get("stream"):
        raise bad_value("Stream options can only be defined when `stream=True`.", "stream_options")
    for name in NOT_EMULATED:
        if data.get(name):
            raise bad_value(f"{name} is not emulated.", name)
    try:
        return CompletionBody.model_validate(data) if kind == COMPLETION else ChatBody.model_validate(data)
    except ValidationError as error:
        raise mistyped(error) from None


def _prompt(body: CompletionBody | ChatBody) -> list[int]:
    if isinstance(body, ChatBody):
        if not body.messages:
            raise bad_value("Cannot apply chat template to an empty conversation. Provide at least one message.")
        return token_ids(chat_text(_messages(body.messages), continues=_continues(body)))
    return _prompts(body)[0]


def _prompts(body: CompletionBody | ChatBody) -> list[list[int]]:
    """Tokenize the prompts; a chat has one."""
    if isinstance(body, ChatBody):
        return [_prompt(body)]
    prompt = body.prompt
    if prompt is None or prompt == "":
        raise bad_value("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if prompt == []:
        raise bad_value("You must pass at least one prompt")
    given = prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]
    return [token_ids(one) if isinstance(one, str) else _checked_ids(one) for one in given]


def _continues(body: ChatBody) -> bool:
    """Return whether the answer continues the last message."""
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_value("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return body.continue_final_message


def _checked_ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, list):
        message = "Input should be a valid string, or a list of token ids"
        raise invalid([{"type": "string_type", "loc": "body.prompt", "msg": message, "input": prompt}])
    if not prompt:
        raise bad_value("You must pass at least one prompt")
    for place, token in enumerate(prompt):
        if type(token) is not int or token < 0:
            message = "Input should be a valid integer greater than or equal to 0"
            raise invalid([{"type": "int_type", "loc": f"body.prompt.{place}", "msg": message, "input": token}])
        if token >= VOCABULARY:
            raise bad_value(f"Token id {token} is out of vocabulary")
    return prompt


def _messages(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """Read roles and texts; other parts than text are refused."""
    try:
        return [
            (role, "\n".join(_text(part, place, number) for number, part in enumerate(parts)))
            for place, (role, parts) in enumerate(read_messages(messages))
        ]
    except MessageError as error:
        kind, text = "string_type", "Input should be a valid string"
        if error.field == "content":
            text += " or a list of parts"
        elif error.value is None:
            kind, text = "missing", "Field required"
        where = f"body.messages.{error.place}.{error.field}"
        raise invalid([{"type": kind, "loc": where, "msg": text, "input": error.value}]) from None


def _text(part: Any, place: int, number: int) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise bad_value("Only parts of type text can be read by this model.", f"body.messages.{place}.content.{number}")
    return str(part["text"])


def _max_tokens(body: CompletionBody | ChatBody, num_prompt: int, max_model_len: int, wanted: int | None) -> int:
    """Return the maximum length of the answer, with vLLM's checks of prompt and `max_tokens`."""
    if num_prompt > max_model_len:
        raise bad_value(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {num_prompt}"
            " input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            "input prompt.",
            "input_tokens",
            num_prompt,
        )
    limit = body.max_tokens
    if isinstance(body, ChatBody):
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    elif limit is None and wanted is None:
        limit = DEFAULT_COMPLETION_TOKENS
    if limit is not None and limit > max_model_len:
        raise bad_value(
            f"max_tokens={limit} cannot be greater than max_model_len={max_model_len}. Please request fewer output "
            "tokens.",
            "max_tokens",
            limit,
        )
    room = max_model_len - num_prompt
    max_tokens = room if limit is None else min(limit, room)
    if max_tokens < 1:
        raise bad_value(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    return max_tokens


def _check(body: CompletionBody | ChatBody, stop: list[str], max_tokens: int) -> None:
    if body.n is not None and body.n > 1 and body.temperature is not None and body.temperature < GREEDY_BELOW:
        raise bad_value(f"n must be 1 when using greedy sampling, got {body.n}.")
    if "" in stop:
        raise bad_value("stop cannot contain an empty string.")
    if len(stop) > MAX_STOP_STRINGS:
        raise bad_value(f"stop cannot have more than {MAX_STOP_STRINGS} strings.", "stop")
    if body.min_tokens < 0:
        raise bad_value(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if body.min_tokens > max_tokens:
        raise bad_value(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.")
    if body.temperature is not None and not body.temperature >= 0:
        raise bad_value(f"temperature must be non-negative, got {body.temperature}.", "temperature", body.temperature)


def _num_samples(body: CompletionBody | ChatBody) -> int:
    """Return how many answers to each prompt are wanted."""
    num = 1 if body.n is None else body.n
    if num < 1:
        raise bad_value(f"n must be at least 1, got {num}.")
    if num > MAX_SAMPLES:
        raise bad_value(
            f"n must be at most {MAX_SAMPLES}, got {num}. To increase this limit, set the VLLM_MAX_N_SEQUENCES "
            "environment variable."
        )
    return num


def _wanted_tokens(headers: Mapping[str, str]) -> int | None:
    text = headers.get(OUTPUT_TOKENS_HEADER)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS or int(text) == 0:
        raise bad_value(f"{OUTPUT_TOKENS_HEADER} must be a whole number above 0, not {text[:32]!r}.")
    return int(text)


def _leg(params: Mapping[str, Any] | None) -> tuple[str, RemoteBlocks | None]:
    try:
        return leg_and_blocks(params)
    except ValueError as error:
        raise bad_value(f"kv_transfer_params.{error}", "kv_transfer_params") from None


def _facts(xargs: Mapping[str, Any]) -> dict[str, Any]:
    """Read the facts that a client adds to its request; a bad one is refused."""
    facts, errors = facts_in(xargs)
    if errors:
        raise bad_value(f"vllm_xargs.{errors[0]}.", "vllm_xargs")
    return facts
