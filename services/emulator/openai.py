"""OpenAI request bodies as an emulated engine reads them, with vLLM's checks and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from predictor.request import PREFILL, SERVE, EncoderInput
from services.emulator import answers
from services.emulator.answers import AnswerLengths, EmulatedAnswer, StopRule
from services.emulator.errors import VllmError, bad_value, busy
from services.emulator.prompts import prompts_of
from services.emulator.request_bodies import CHAT, ChatBody, CompletionBody, StreamOptions, body_from
from services.emulator.transfer_params import RemoteBlocks, leg_and_blocks
from services.engine_state.xargs import facts_in
from services.http.openai_body import MAX_SAMPLES
from services.http.structured_output import grammar_of

DEFAULT_COMPLETION_TOKENS = 16
LONGEST_ID = 512
MAX_STOP_STRINGS = 64
OUTPUT_TOKENS_HEADER = "x-block-output-tokens"
MAX_DIGITS = 9
GREEDY_BELOW = 1e-5  # temperatures


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


def request_from(kind: str, data: Any, headers: Mapping[str, str], request_id: str, served: Served) -> ParsedRequest:
    """Check a request, and make its answer."""
    body = body_from(kind, data)
    if body.model not in (None, served.model) and body.model not in served.adapters:
        aliases = ", ".join((served.model, *served.adapters))
        raise VllmError(
            404,
            f"The model `{body.model}` does not exist. Valid aliases: {aliases}.",
            kind="NotFoundError",
            param="model",
        )
    prompts = prompts_of(body)
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
