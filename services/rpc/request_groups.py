"""Requests of several prompts and responses: their messages as the engine's requests, and what these approximate."""

from __future__ import annotations

from dataclasses import replace

from predictor.approximations import ESTIMATED_MEDIA, GRAMMAR_COMPILATION, MERGED_PROMPTS, joined
from predictor.request_group import MAX_MEMBERS, Placeable, PromptFacts, RequestGroup, group_of
from protos.block.v1 import common_pb2
from services.rpc.messages import NO_LIMIT, prefix_from, request_from

NO_APPROXIMATIONS: tuple[str, ...] = ()
LONGEST_GRAMMAR = 64  # bytes of a name


def num_responses_of(message: common_pb2.Request) -> int:
    """Return how many responses a request has: those to each of its prompts."""
    return (message.num_sequences or 1) * (len(message.prompts) or 1)


def require_num_responses(message: common_pb2.Request, limit: int) -> None:
    """Refuse a request with more responses than allowed."""
    num = num_responses_of(message)
    if num > limit:
        raise ValueError(
            f"n: {len(message.prompts) or 1} prompts with n = {message.num_sequences or 1} ask for {num} responses, "
            f"more than the limit of {limit}; split the request (--max-responses)"
        )


def placeable_from(  # noqa: PLR0913 - what an engine reads a request by
    message: common_pb2.Request,
    *,
    now_s: float = 0.0,
    clock_rate: float = 1.0,
    block_size: int | None = None,
    known_as: str = "",
    longest_prompt: int = NO_LIMIT,
    shares_prompts: bool = False,
) -> Placeable:
    """Read a request as `request_from` does; where an engine makes several of it, all of these.

    With `shares_prompts` the responses to a prompt share its KV blocks.
    """
    if len(message.grammar) > LONGEST_GRAMMAR:
        raise ValueError(f"grammar: must have at most {LONGEST_GRAMMAR} bytes, not {len(message.grammar)}")
    whole = request_from(
        message,
        now_s=now_s,
        clock_rate=clock_rate,
        block_size=block_size,
        known_as=known_as,
        longest_prompt=longest_prompt,
    )
    if message.num_sequences <= 1 and not message.prompts:
        return whole
    require_num_responses(message, MAX_MEMBERS)
    prompts = tuple(
        PromptFacts(
            tokens=_tokens_of(prompt, number),
            prefix_hashes=prefix_from(
                prompt.prefix_hashes, message.prefix_block_tokens, block_size, f"prompts[{number}].prefix_hashes"
            ),
        )
        for number, prompt in enumerate(message.prompts)
    )
    return group_of(
        whole,
        num_sequences=message.num_sequences or 1,
        prompts=prompts,
        block_size=(block_size or 0) if shares_prompts else 0,
    )


def _tokens_of(prompt: common_pb2.Prompt, number: int) -> int:
    if prompt.prompt_tokens == 0:
        raise ValueError(f"prompts[{number}].prompt_tokens: must be at least 1, not 0")
    return prompt.prompt_tokens


def with_delay(request: Placeable, delay_s: float) -> Placeable:
    """Return a request that arrives later by so many seconds of the engine's clock."""
    if delay_s <= 0:
        return request
    if isinstance(request, RequestGroup):
        whole = replace(request.whole, in_s=request.whole.in_s + delay_s)
        return replace(
            request, whole=whole, members=tuple(replace(one, in_s=one.in_s + delay_s) for one in request.members)
        )
    return replace(request, in_s=request.in_s + delay_s)


def approximations_of(message: common_pb2.Request, request: Placeable) -> tuple[str, ...]:
    """Return what a forecast of a request only approximates, on any engine."""
    named = NO_APPROXIMATIONS
    if message.num_prompts > 1 and not message.prompts:
        named = (MERGED_PROMPTS,)
    if message.grammar:
        named = (*named, GRAMMAR_COMPILATION)
    if any(one.is_estimate for one in message.encoder_inputs):
        named = (*named, ESTIMATED_MEDIA)
    return joined(request.approximations, named) if isinstance(request, RequestGroup) else named
