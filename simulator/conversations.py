"""Traffic of conversations: the prompt of each turn contains all that was said before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.load_plan import lengths_of as distribution
from simulator.load_plan import whole
from simulator.workload import Counts, Floats, RequestLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How long conversations are.

    `count` is the distribution of the number of requests of a conversation, `pause_s` that of the seconds from one
    request to the next, and `prompt_tokens` that of what the user adds in each.
    """

    count: str
    pause_s: str
    prompt_tokens: str
    output_tokens: str
    block_tokens: int


def conversations(
    turns: Turns, num: int, max_tokens: int, sizes: np.random.Generator
) -> tuple[RequestLengths, Counts, Floats]:
    """Draw conversations of `num` requests in all, one after the other.

    Return the lengths, each request's conversation, numbered from 0 on, and the seconds since its first request. A
    conversation ends before it exceeds `max_tokens`.
    """
    num_turns = distribution(turns.count, "traffic.turns")
    prompts = whole(distribution(turns.prompt_tokens, "traffic.prompt_tokens")(sizes, num))
    outputs = whole(distribution(turns.output_tokens, "traffic.output_tokens")(sizes, num))
    pauses = distribution(turns.pause_s, "traffic.pause_s", continuous=True)(sizes, num)
    prompt_tokens, output_tokens = np.zeros(num, np.int64), np.zeros(num, np.int64)
    session, after_s = np.zeros(num, np.int64), np.zeros(num)
    current, left, said, waited_s = -1, 0, 0, 0.0
    for number in range(num):
        output = min(outputs[number], max_tokens - 1)
        prompt = min(prompts[number], max_tokens - output)
        if left == 0 or said + prompt + output > max_tokens:
            current, said, waited_s = current + 1, 0, 0.0
            (left,) = whole(num_turns(sizes, 1))
        else:
            waited_s += pauses[number]
        prompt_tokens[number], output_tokens[number] = said + prompt, output
        session[number], after_s[number] = current, waited_s
        said += prompt + output
        left -= 1
    return _named(prompt_tokens, output_tokens, session, turns.block_tokens), session, after_s


def _named(prompt_tokens: Counts, output_tokens: Counts, session: Counts, block_tokens: int) -> RequestLengths:
    """Name the blocks of each conversation's text: every prompt is the beginning of the next one."""
    num_blocks = prompt_tokens // block_tokens
    most = np.zeros(int(session[-1]) + 1, np.int64)
    np.maximum.at(most, session, num_blocks)
    base = np.concatenate(([0], np.cumsum(most)[:-1]))
    first = np.concatenate(([0], np.cumsum(num_blocks)))
    within = np.arange(first[-1]) - np.repeat(first[:-1], num_blocks)
    return RequestLengths(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        first_content=first,
        contents=np.repeat(base[session], num_blocks) + within,
        block_tokens=block_tokens,
    )
