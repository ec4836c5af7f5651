"""Answers of an emulated engine: random words, the same for the same prompt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from services.emulator.tokens import token_ids

STOP, LENGTH = "stop", "length"
MAX_SPREAD = 10.0
LONGEST_DRAW = 1 << 30

WORDS = (
    "the", "of", "and", "to", "in", "a", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as",
    "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all",
    "were", "we", "when", "your", "can", "said", "use", "an", "each", "she", "do", "how", "if", "will", "up", "out",
    "many", "then", "them", "so", "some", "her", "like", "him", "into", "time", "has", "look", "two", "more", "go",
    "see", "no", "way", "my", "than", "call", "who", "oil", "its", "now", "find", "long", "down", "day", "did", "get",
    "come", "made", "may", "part", "over", "new", "take", "only", "work", "know", "year", "live", "me", "back", "give",
    "most", "very", "good", "just", "name", "home", "help", "turn", "same",
)  # fmt: skip
PERIOD = 8192
PIECES = tuple(f" {WORDS[index]}" for index in np.random.default_rng(7).integers(0, len(WORDS), PERIOD))
IDS = tuple(token_ids(piece)[0] for piece in PIECES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedAnswer:
    """One answer: a section of the endless text, which starts at `offset`.

    Where a stop string cuts it, its text is that of its first `num_whole` tokens, and `tail`.
    """

    offset: int
    num_tokens: int
    finish_reason: str
    stop_reason: str | None = None
    num_whole: int
    tail: str = ""
    num_held_back: int = 0  # characters at the end of a text that goes on, as a stop string may begin there

    def text(self, start: int, end: int) -> str:
        """Return the text of its tokens from `start` to before `end`."""
        if end <= self.num_whole:
            return stretch(self.offset + start, end - start)
        whole = stretch(self.offset + start, max(0, self.num_whole - start))
        return whole + self.tail if start <= self.num_whole else whole

    def streamed_text(self, place: int) -> str:
        """Return the text that a stream sends with the token at a place (vLLM: get_next_output_text)."""
        if not self.num_held_back:
            return self.text(place, place + 1)
        start = max(0, place - self.num_held_back - 2)  # what is before has been sent
        sent = max(0, len(stretch(self.offset + start, place - start)) - self.num_held_back)
        if place + 1 >= self.num_tokens:
            return self.text(start, self.num_tokens)[sent:]
        text = stretch(self.offset + start, place + 1 - start)
        return text[sent : max(0, len(text) - self.num_held_back)]

    def token_ids(self) -> list[int]:
        """Return all its tokens."""
        return [self.token_id(place) for place in range(self.num_tokens)]

    def token_id(self, place: int) -> int:
        """Return one of its tokens."""
        return IDS[(self.offset + place) % PERIOD]


def stretch(offset: int, num_tokens: int) -> str:
    """Return a number of tokens of the endless text."""
    if num_tokens == 1:
        return PIECES[offset % PERIOD]
    return "".join([PIECES[place % PERIOD] for place in range(offset, offset + num_tokens)])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLengths:
    """Lengths of answers whose requests set none: log-normal, drawn by the prompt."""

    median_tokens: float = 200.0
    spread: float = 0.8  # standard deviation of the logarithm
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible distributions, naming the field."""
        if not (math.isfinite(self.median_tokens) and 1 <= self.median_tokens <= LONGEST_DRAW):
            raise ValueError(f"output_median: must lie between 1 and {LONGEST_DRAW}, not {self.median_tokens}")
        if not (math.isfinite(self.spread) and 0 <= self.spread <= MAX_SPREAD):
            raise ValueError(f"output_spread: must lie between 0 and {MAX_SPREAD:g}, not {self.spread}")

    def draw(self, chance: float) -> int:
        """Return the length at a quantile, a number between 0 and 1."""
        exponent = self.spread * NormalDist().inv_cdf(chance)
        return max(1, round(min(LONGEST_DRAW, self.median_tokens * math.exp(exponent))))


def seeded_draw(prompt: Sequence[int], seed: int) -> tuple[float, int]:
    """Draw a quantile and an offset for a prompt, the same ones on every engine."""
    return _drawn(_hashed(np.asarray(prompt, np.int64), seed))


def _hashed(prompt: npt.NDArray[np.int64], seed: int) -> hashlib.blake2b:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16, salt=(seed % 2**64).to_bytes(8))


def _drawn(hashed: hashlib.blake2b) -> tuple[float, int]:
    digest = hashed.digest()
    chance = (int.from_bytes(digest[:6]) + 0.5) / 2**48
    return chance, int.from_bytes(digest[6:]) % PERIOD


PLACES_OF = {token: [place for place, other in enumerate(IDS) if other == token] for token in set(IDS)}


def answered_before(prompt: Sequence[int], seed: int) -> int:
    """Return how many tokens at the end of a prompt are the start of the answer to what is before them.

    A prompt that continues an answer is answered with the rest of it, as by a model that always takes the likeliest
    token.
    """
    data = np.asarray(prompt, np.int64)
    places = PLACES_OF.get(int(data[-1]), []) if len(data) else []
    lengths = [_length_of_stretch(data, last) for last in places]
    longest = max(lengths, default=0)
    hashed = _hashed(data[: len(data) - longest], seed)
    for length in range(longest, 0, -1):
        offset = _drawn(hashed)[1]
        for last, most in zip(places, lengths, strict=True):
            if length <= most and offset == (last - length + 1) % PERIOD:
                return length
        hashed.update(data[len(data) - length : len(data) - length + 1].tobytes())
    return 0


def _length_of_stretch(data: npt.NDArray[np.int64], last: int) -> int:
    """Return how many tokens at the end are those of the endless text up to a place; one token is left out."""
    length = 0
    while length < min(len(data) - 1, PERIOD) and data[-1 - length] == IDS[(last - length) % PERIOD]:
        length += 1
    return length


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """An answer stops at the first of these strings after `min_tokens`; `shows`: the string is part of the text."""

    strings: Sequence[str] = ()
    min_tokens: int = 0
    shows: bool = False


def answer(offset: int, num_tokens: int, max_tokens: int, stop: StopRule) -> EmulatedAnswer:
    """Make an answer that ends after `num_tokens`, at `max_tokens`, or where the rule stops it."""
    num_tokens = min(max_tokens, max(num_tokens, stop.min_tokens))
    reason = LENGTH if num_tokens == max_tokens else STOP
    num_held_back = 0 if stop.shows else max((len(string) - 1 for string in stop.strings), default=0)
    if stop.strings:
        text = stretch(offset, num_tokens)
        search_from = len(stretch(offset, stop.min_tokens))
        found = [
            (place + len(string), order, place, string)
            for order, string in enumerate(stop.strings)
            if (place := text.find(string, max(0, search_from - len(string) + 1))) >= 0
        ]
        if found:
            end, _, place, string = min(found)
            shown = end if stop.shows else place
            num_whole = tokens_within(offset, shown + 1) - 1
            return EmulatedAnswer(
                offset=offset,
                num_tokens=tokens_within(offset, end),
                finish_reason=STOP,
                stop_reason=string,
                num_whole=num_whole,
                tail=text[len(stretch(offset, num_whole)) : shown],
                num_held_back=num_held_back,
            )
    return EmulatedAnswer(
        offset=offset,
        num_tokens=num_tokens,
        finish_reason=reason,
        num_whole=num_tokens,
        num_held_back=num_held_back,
    )


def tokens_within(offset: int, num_characters: int) -> int:
    """Count the tokens that contain a number of characters of the endless text."""
    num_tokens = 0
    while num_characters > 0:
        num_characters -= len(PIECES[(offset + num_tokens) % PERIOD])
        num_tokens += 1
    return num_tokens
