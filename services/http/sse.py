"""What an engine's answer says of itself, read cheaply while it passes: events, tokens, how it ended."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from protos.block.v1 import common_pb2

TAIL_BYTES = 4096  # of the last events of a stream
LAST_PIECES = 4  # that hold them: the last token's, the usage's, [DONE]
MOST_HELD_BYTES = 2**20  # of an event that does not end

ENDS = (b"\n\n", b"\r\n\r\n")
DATA, DATA_FIRST = b"\ndata:", b"data:"

# In JSON texts a quotation mark is escaped, so these cannot stand inside an answer's own text.
_REASON = re.compile(rb'"finish_reason"\s*:\s*"(\w+)"')
_OUTPUT = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})\b')
_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,9})\b')
_USAGE_ONLY = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_ROLE_ONLY = re.compile(rb'"delta"\s*:\s*\{[^{}]*"role"\s*:[^{}]*"content"\s*:\s*(?:""|null)')
_ERROR = re.compile(rb'\ndata: ?\{\s*"error"\s*:')

REASONS = {
    b"stop": common_pb2.FINISH_REASON_STOP,
    b"tool_calls": common_pb2.FINISH_REASON_STOP,
    b"length": common_pb2.FINISH_REASON_LENGTH,
    b"abort": common_pb2.FINISH_REASON_FAILED,
    b"error": common_pb2.FINISH_REASON_FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is known of an answer at its end; tokens are None where the engine did not count them."""

    finish_reason: common_pb2.FinishReason.ValueType
    output_tokens: int  # the engine's count, else the number of events that carried text
    prompt_tokens: int | None


@dataclass(slots=True)
class StreamReader:
    """Passes on a stream of server-sent events, whole events only, and remembers what its end will tell.

    What is passed on is what came, byte for byte; only the beginning of an event waits for the rest of it, so that an
    engine that dies leaves no half of one behind.
    """

    num_data: int = 0
    _held: bytes = b""
    _first: bytes = b""
    _last: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_PIECES))

    def feed(self, piece: bytes) -> bytes:
        """Take what came; give what may go on."""
        if self._held:
            piece = self._held + piece
            self._held = b""
        if not piece.endswith(ENDS):
            cut = max(piece.rfind(end) + len(end) if end in piece else 0 for end in ENDS)
            if len(piece) - cut <= MOST_HELD_BYTES:
                piece, self._held = piece[:cut], piece[cut:]
        if piece:
            self._note(piece)
        return piece

    def rest(self) -> bytes:
        """Give what is still held, at the end of the stream."""
        rest, self._held = self._held, b""
        if rest:
            self._note(rest)
        return rest

    def _note(self, piece: bytes) -> None:
        """Count the events of a piece, which begins with one, and keep it a while."""
        self.num_data += piece.count(DATA) + piece.startswith(DATA_FIRST)
        if not self._first:
            self._first = piece[:TAIL_BYTES]
        self._last.append(piece)

    def ending(self) -> Ending:
        """Tell how the stream ended, as far as it has come."""
        tail = b"\n" + b"".join(self._last)[-TAIL_BYTES:]
        told = ending_of(tail)
        finish_reason = common_pb2.FINISH_REASON_FAILED if _ERROR.search(tail) else told.finish_reason
        if told.output_tokens:
            return Ending(
                finish_reason=finish_reason, output_tokens=told.output_tokens, prompt_tokens=told.prompt_tokens
            )
        extra = (b"data: [DONE]" in tail) + len(_ERROR.findall(tail)) + (_USAGE_ONLY.search(tail) is not None)
        extra += _ROLE_ONLY.search(self._first.partition(b"\n\n")[0]) is not None
        tokens = max(0, self.num_data - extra)
        return Ending(finish_reason=finish_reason, output_tokens=tokens, prompt_tokens=told.prompt_tokens)


def ending_of(body: bytes) -> Ending:
    """Read the end of an answer in one piece; 0 output tokens where it does not tell."""
    reasons, outputs, prompts = _REASON.findall(body), _OUTPUT.findall(body), _PROMPT.findall(body)
    return Ending(
        finish_reason=REASONS.get(reasons[-1], common_pb2.FINISH_REASON_UNSPECIFIED)
        if reasons
        else common_pb2.FINISH_REASON_UNSPECIFIED,
        output_tokens=int(outputs[-1]) if outputs else 0,
        prompt_tokens=int(prompts[-1]) if prompts else None,
    )
