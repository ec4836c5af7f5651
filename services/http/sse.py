"""Server-sent events of an engine's response, read cheaply while they pass: whole events, tokens, the finish reason."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from protos.block.v1 import common_pb2
from services.http.reply_format import COMPLETIONS_FORMAT, DATA, FAILED, UNSPECIFIED, ReplyFormat

TAIL_BYTES = 4096  # of the last events of a stream
NUM_LAST_PIECES = 4  # which contain them: the last token's, the usage's, [DONE]
MAX_EVENT_BYTES = 16 * 2**20  # a longer event is passed on before it is complete; the ids of a long prompt are long

EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
LONGEST_END = max(map(len, EVENT_ENDS))
DATA_FIRST = b"data:"
DONE = b"[DONE]"
DONE_EVENTS = tuple(DONE + end for end in EVENT_ENDS)

# In JSON texts a quotation mark is escaped, so these cannot stand inside the text of a response.
_USAGE_ONLY = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_ROLE_ONLY = re.compile(rb'"delta"\s*:\s*\{[^{}]*"role"\s*:[^{}]*"content"\s*:\s*(?:""|null)')
_ERROR = re.compile(rb'\ndata: ?\{\s*"error"\s*:')


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a response; `prompt_tokens` is None where the engine reports no usage."""

    finish_reason: common_pb2.FinishReason.ValueType
    output_tokens: int  # the engine's count, else the number of events that contain text
    has_count: bool = True  # the engine counted them
    prompt_tokens: int | None


@dataclass(slots=True)
class StreamReader:
    """Cuts a stream into whole events, byte for byte as they came, and keeps what its end is read from.

    The start of an event waits for the rest of it, so that an engine that dies leaves no half event behind.
    """

    format: ReplyFormat = COMPLETIONS_FORMAT
    num_data: int = 0  # events so far that may have a token
    last_name: bytes = b""  # of the last event, where events have names
    _held: bytearray = field(default_factory=bytearray)
    _first: bytes = b""
    _last: deque[bytes] = field(default_factory=lambda: deque(maxlen=NUM_LAST_PIECES))

    def feed(self, piece: bytes) -> bytes:
        """Take received bytes; return the events that are complete, which may be none."""
        held = self._held
        if held or not piece.endswith(EVENT_ENDS):
            search_from = max(0, len(held) - LONGEST_END + 1)  # what is before contains no end
            held += piece
            places = ((held.rfind(end, search_from), len(end)) for end in EVENT_ENDS)
            cut = max(place + length if place >= 0 else 0 for place, length in places)
            if len(held) - cut > MAX_EVENT_BYTES:
                cut = len(held)
            piece = bytes(held[:cut])
            del held[:cut]
        if piece:
            self._note(piece)
        return piece

    def rest(self) -> bytes:
        """Return the incomplete event at the end of the stream."""
        rest = bytes(self._held)
        self._held.clear()
        if rest:
            self._note(rest)
        return rest

    def _note(self, piece: bytes) -> None:
        """Count the events of a piece, which starts with one, and keep its end for a while."""
        if self.format.is_named:
            self.num_data += piece.count(self.format.token_mark)
            self.last_name = self.format.last_name(piece) or self.last_name
        else:
            self.num_data += piece.count(DATA) + piece.startswith(DATA_FIRST)
        if not self._first:
            self._first = piece[:TAIL_BYTES]
        self._last.append(piece)

    def has_role_only(self) -> bool:
        """Return whether only the first event of a chat has come, which contains no text."""
        return self.num_data <= 1 and self._begins_with_role()

    def ending(self) -> Ending:
        """Return how the stream ended, as far as it has come."""
        tail = b"\n" + b"".join(self._last)[-TAIL_BYTES:]
        ending = ending_of(tail, self.format)
        finish_reason = self._reason(tail, ending)
        if ending.output_tokens:
            return Ending(
                finish_reason=finish_reason, output_tokens=ending.output_tokens, prompt_tokens=ending.prompt_tokens
            )
        return Ending(
            finish_reason=finish_reason,
            output_tokens=self._num_texts(tail),
            prompt_tokens=ending.prompt_tokens,
            has_count=False,
        )

    def _reason(self, tail: bytes, ending: Ending) -> common_pb2.FinishReason.ValueType:
        if not self.format.is_named:
            return FAILED if _ERROR.search(tail) else ending.finish_reason
        by_name = self.format.last_events.get(self.last_name, UNSPECIFIED)
        given = self.format.reason_in(tail)
        return by_name if given is None or by_name in (FAILED, UNSPECIFIED) else given

    def is_cut(self) -> bool:
        """Return whether an answer has begun, and no event ends it."""
        if self.format.is_named:
            return bool(self.last_name) and self.last_name not in self.format.last_events
        tail = b"\n" + b"".join(self._last)[-TAIL_BYTES:]
        has_end = self.format.reason.search(tail) or _ERROR.search(tail) or b"data: " + DONE in tail
        return not has_end and b'"finish_reason"' in tail

    def token_times(self, marks: Iterable[tuple[int, float]], ending: Ending) -> Iterable[tuple[int, float]]:
        """Turn the numbers of lines of data at some times into numbers of tokens; the last ones may be too large.

        Where an engine puts several tokens into an event, all events count as many.
        """
        before = self._begins_with_role()
        if ending.has_count:
            # the last event may have a reason to finish and no text
            num_texts = max(1, min(self._num_texts(b"\n" + b"".join(self._last)[-TAIL_BYTES:]), ending.output_tokens))
            return [((so_far - before) * ending.output_tokens // num_texts, at_s) for so_far, at_s in marks]
        return [(so_far - 1, at_s) for so_far, at_s in marks] if before else marks

    def _num_texts(self, tail: bytes) -> int:
        """Return the number of events that contain text."""
        if self.format.is_named:
            return self.num_data
        no_text = (b"data: " + DONE in tail) + len(_ERROR.findall(tail)) + (_USAGE_ONLY.search(tail) is not None)
        return max(0, self.num_data - no_text - self._begins_with_role())

    def _begins_with_role(self) -> bool:
        return not self.format.is_named and _ROLE_ONLY.search(self._first.partition(b"\n\n")[0]) is not None


def ending_of(body: bytes, form: ReplyFormat = COMPLETIONS_FORMAT) -> Ending:
    """Read the end of a response in one piece; 0 output tokens where it reports no usage."""
    reason = form.reason_in(body)
    prompt_tokens, output_tokens = form.tokens_in(body)
    return Ending(
        finish_reason=form.otherwise if reason is None else reason,
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
    )


def num_without_token(events: bytes) -> int:
    """Return how many of these events, which end a stream, contain no token: usage and [DONE]."""
    if not events.endswith(DONE_EVENTS) and b'"usage"' not in events:
        return 0
    return events.endswith(DONE_EVENTS) + (_USAGE_ONLY.search(events) is not None)


def data_of(events: bytes) -> Iterator[bytes]:
    """Give the data of each line of whole events."""
    for line in events.split(b"\n"):
        if line.startswith(DATA_FIRST):
            yield line[len(DATA_FIRST) :].strip()
