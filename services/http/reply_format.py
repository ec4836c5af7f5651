"""How replies of engines are read: counts of tokens, how an answer ended, and which events of a stream have text.

In JSON texts a quotation mark and a line break are escaped, so none of these patterns matches inside an answer's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from protos.block.v1 import common_pb2

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
UNSPECIFIED, FAILED = common_pb2.FINISH_REASON_UNSPECIFIED, common_pb2.FINISH_REASON_FAILED
CANCELLED = common_pb2.FINISH_REASON_CANCELLED
Reason: TypeAlias = common_pb2.FinishReason.ValueType

EVENT = b"\nevent: "
DATA = b"\ndata:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """The replies of one family of endpoints; without `last_events`, events have no names and the last one is [DONE].

    `token_mark` is contained once in each event that may have a token. `early_events` come before the engine computes
    anything: until another one comes, a request can be sent to another engine.
    """

    output: re.Pattern[bytes]
    prompt: re.Pattern[bytes]
    cached: tuple[re.Pattern[bytes], ...] = ()  # tokens of the prompt that `prompt` does not count
    reason: re.Pattern[bytes]
    reasons: Mapping[bytes, Reason]
    otherwise: Reason = UNSPECIFIED  # of a whole reply without a reason
    token_mark: bytes = DATA
    last_events: Mapping[bytes, Reason] = field(default_factory=dict)  # and the reason, unless one is given
    early_events: frozenset[bytes] = frozenset()

    @property
    def is_named(self) -> bool:
        """Whether the events of streams have names."""
        return bool(self.last_events)

    def reason_in(self, text: bytes) -> Reason | None:
        """Return the last reason that a part of a reply gives."""
        found = self.reason.findall(text)
        return self.reasons.get(found[-1], UNSPECIFIED) if found else None

    def tokens_in(self, text: bytes) -> tuple[int | None, int]:
        """Return the last counts of the prompt and the answer, where a part of a reply has them."""
        outputs, prompts = self.output.findall(text), self.prompt.findall(text)
        prompt = int(prompts[-1]) if prompts else None
        for pattern in self.cached if prompt is not None else ():
            cached = pattern.findall(text)
            prompt = (prompt or 0) + (int(cached[-1]) if cached else 0)
        return prompt, int(outputs[-1]) if outputs else 0

    def last_name(self, events: bytes) -> bytes:
        """Return the name of the last of some events; empty where they have none."""
        at = (b"\n" + events).rfind(EVENT)
        return events[at + len(EVENT) - 1 :].partition(b"\n")[0].strip() if at >= 0 else b""

    def has_begun(self, events: bytes) -> bool:
        """Return whether the first events of a stream contain more than early ones."""
        if not self.early_events:
            return bool(events)
        names = [part.partition(b"\n")[0].strip() for part in (b"\n" + events).split(EVENT)[1:]]
        return bool(events) and (not names or any(name not in self.early_events for name in names))


COMPLETIONS_FORMAT = ReplyFormat(
    output=re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})\b'),
    prompt=re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,9})\b'),
    reason=re.compile(rb'"finish_reason"\s*:\s*"(\w+)"'),
    reasons={b"stop": STOP, b"tool_calls": STOP, b"length": LENGTH, b"abort": FAILED, b"error": FAILED},
)
RESPONSES_FORMAT = ReplyFormat(
    output=re.compile(rb'"output_tokens"\s*:\s*(\d{1,9})\b'),
    prompt=re.compile(rb'"input_tokens"\s*:\s*(\d{1,9})\b'),
    reason=re.compile(rb'"status"\s*:\s*"(incomplete|failed|cancelled|queued)"'),
    reasons={b"incomplete": LENGTH, b"failed": FAILED, b"cancelled": CANCELLED, b"queued": UNSPECIFIED},
    otherwise=STOP,
    token_mark=b".delta\ndata:",
    last_events={
        b"response.completed": STOP, b"response.incomplete": LENGTH, b"response.failed": FAILED, b"error": FAILED,
        b"response.cancelled": CANCELLED,
    },
    early_events=frozenset((b"response.created", b"response.queued", b"response.in_progress")),
)  # fmt: skip
MESSAGES_FORMAT = ReplyFormat(
    output=re.compile(rb'"output_tokens"\s*:\s*(\d{1,9})\b'),
    prompt=re.compile(rb'"input_tokens"\s*:\s*(\d{1,9})\b'),
    cached=(
        re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,9})\b'),
        re.compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,9})\b'),
    ),
    reason=re.compile(rb'"stop_reason"\s*:\s*"(\w+)"'),
    reasons={b"end_turn": STOP, b"stop_sequence": STOP, b"tool_use": STOP, b"max_tokens": LENGTH},
    token_mark=b"event: content_block_delta\ndata:",
    last_events={b"message_stop": STOP, b"error": FAILED},
)
# of replies that generate nothing: their prompts have been computed
POOLING_FORMAT = ReplyFormat(
    output=re.compile(rb'"completion_tokens"\s*:\s*([1-9]\d{0,8})\b'),
    prompt=re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,9})\b'),
    reason=re.compile(rb'"finish_reason"\s*:\s*"(\w+)"'),
    reasons={},
    otherwise=STOP,
)
