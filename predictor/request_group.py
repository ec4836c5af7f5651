"""Requests of which an engine makes several: the responses to each of one or more prompts, which arrive together.

vLLM makes a request of each prompt, and with `n` above 1 makes `n` requests of that one (`ParentRequest`). They share
the KV blocks of their prompt by the prefix cache, as any requests with equal prompts do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictor.approximations import MANY_RESPONSES
from predictor.lengths import Tag, quantile_medians
from predictor.request import PREFILL, RequestFacts

MAX_MEMBERS = 4096
HASH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """One of several prompts: its length, and the names of the contents of its leading full blocks."""

    tokens: int
    prefix_hashes: tuple[int | str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup:
    """The engine's requests for one request of a client, the `whole`; those of one prompt follow each other.

    `num_sequences` is the number of responses to each prompt. The index of a member is that of its choice in OpenAI's
    API: its prompt's number times `num_sequences`, and its own number.
    """

    whole: RequestFacts
    members: tuple[RequestFacts, ...]
    num_sequences: int = 1

    def __post_init__(self) -> None:
        """Refuse groups that no engine could serve."""
        num = len(self.members)
        if not 0 < num <= MAX_MEMBERS:
            raise ValueError(f"num_sequences: {num} responses are more than the limit of {MAX_MEMBERS}")
        if self.num_sequences < 1 or num % self.num_sequences:
            raise ValueError(f"num_sequences: {num} responses are not {self.num_sequences} to each prompt")

    @property
    def request_id(self) -> str:
        """The id of the client's request."""
        return self.whole.request_id

    @property
    def leaders(self) -> Sequence[int]:
        """The index of the first request of each prompt, which computes what its siblings find in the prefix cache."""
        return range(0, len(self.members), self.num_sequences)

    @property
    def approximations(self) -> tuple[str, ...]:
        """What a forecast of it only approximates."""
        whole = self.whole
        has_spread = whole.output_tokens is None and isinstance(whole.tag, Tag) and whole.tag.spread > 0
        return (MANY_RESPONSES,) if has_spread and whole.leg != PREFILL else ()


Placeable = RequestFacts | RequestGroup


def group_of(
    request: RequestFacts,
    *,
    num_sequences: int = 1,
    prompts: Sequence[PromptFacts] = (),
    block_size: int = 0,
) -> Placeable:
    """Return the requests that an engine makes of one; the request itself where that is one.

    Without `prompts` it has the one prompt of `request`. With a `block_size`, the full blocks of a prompt with several
    responses have names, also where they are not known, so that the siblings share them.
    """
    own = prompts or (PromptFacts(tokens=request.prompt_tokens, prefix_hashes=request.prefix_hashes),)
    num = len(own) * num_sequences
    if num == 1 and not prompts:
        return request
    if not 0 < num <= MAX_MEMBERS:
        raise ValueError(f"num_sequences: {num} responses are more than the limit of {MAX_MEMBERS}")
    tags = _tags(request, num)
    members = []
    for number, prompt in enumerate(own):
        names = prompt.prefix_hashes
        if num_sequences > 1 and block_size:
            names = _completed(names, f"{request.request_id}/{number}", prompt.tokens // block_size)
        for sequence in range(num_sequences):
            index = number * num_sequences + sequence
            members.append(
                replace(
                    request,
                    request_id=f"{request.request_id}/{index}",
                    prompt_tokens=prompt.tokens,
                    prefix_hashes=names,
                    tag=tags[index],
                    length_quantiles=1,
                )
            )
    return RequestGroup(whole=request, members=tuple(members), num_sequences=num_sequences)


def members_of(request: Placeable) -> tuple[RequestFacts, ...]:
    """Return the engine's requests for a request."""
    return request.members if isinstance(request, RequestGroup) else (request,)


def whole_of(request: Placeable) -> RequestFacts:
    """Return the client's request."""
    return request.whole if isinstance(request, RequestGroup) else request


def _tags(request: RequestFacts, num: int) -> Sequence[Tag | float | None]:
    """Return the tags of `num` responses: equally likely lengths of the request's tag, where it has a spread."""
    tag = request.tag
    if request.output_tokens is not None or not isinstance(tag, Tag) or tag.spread == 0:
        return [tag] * num
    return [Tag(median_tokens=median) for median in quantile_medians(tag.median_tokens, tag.spread, num)]


def _completed(names: tuple[int | str, ...], prompt: str, num_blocks: int) -> tuple[int | str, ...]:
    """Name the full blocks of a prompt beyond the known names, in hexadecimal digits as these."""
    base = int.from_bytes(hashlib.blake2b(prompt.encode("utf-8", "replace"), digest_size=HASH_BYTES).digest())
    made = ((base + block) % 2 ** (8 * HASH_BYTES) for block in range(len(names), num_blocks))
    return (*names, *(number.to_bytes(HASH_BYTES).hex() for number in made))
