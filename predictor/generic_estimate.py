"""Learns the few parameters of a generic engine from when its requests are sent and their tokens come."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from predictor.profile import CONSTANT, Profile, ValidRange
from predictor.step_time import Curve, StepTime

GENERIC_NAME = "generic"
KEPT = 0.98  # of an observation's weight, with each later one
MIN_OBSERVATIONS = 8  # before outliers are recognized
FAR = 1.5  # times what is expected
PRIOR = 1e-3  # weight of the first guess
MIN_TOKENS = 4  # of one stream in a span of equal load, to learn from
MAX_TOKENS = 32  # after which the span ends
SLOW = 3.0  # times its predicted TTFT that a request takes if it waited for a seat
NUM_WAITS = 16
MIN_WAITS = 4  # that agree on the number of seats
NUM_ERRORS = 64
UNKNOWN_ERROR = 1.0  # before anything is learnt
MAX_SEATS = 1024
LARGEST_STEP = 8192  # tokens


class AffineFit:
    """y = base + slope · x, by least squares; old observations decay, and neither part falls below zero."""

    def __init__(self, base: float, slope: float, scale: float) -> None:
        """Start with a guess; `scale` is a typical x."""
        self.base, self.slope = base, slope
        self.num = 0
        self._sums = [0.0] * 5  # weight, x, y, x², xy
        for x in (0.5 * scale, 2.0 * scale):
            self._add(x, base + slope * x, PRIOR)

    def observe(self, x: float, y: float) -> None:
        """Take an observation; one that is far off counts only as somewhat off, once there are others."""
        if self.num >= MIN_OBSERVATIONS:
            y = min(max(y, self.at(x) / FAR), self.at(x) * FAR)
        self._sums = [KEPT * value for value in self._sums]
        self._add(x, y, 1.0)
        self.num += 1
        weight, sum_x, sum_y, sum_xx, sum_xy = self._sums
        mean_x, mean_y = sum_x / weight, sum_y / weight
        variance = sum_xx / weight - mean_x * mean_x
        covariance = sum_xy / weight - mean_x * mean_y
        slope = covariance / variance if variance > 1e-9 * max(1.0, mean_x * mean_x) else 0.0
        self.slope = min(max(0.0, slope), mean_y / mean_x if mean_x > 0 else math.inf)
        self.base = max(0.0, mean_y - self.slope * mean_x)

    def at(self, x: float) -> float:
        """Return the fitted value."""
        return self.base + self.slope * x

    def _add(self, x: float, y: float, weight: float) -> None:
        for place, value in enumerate((1.0, x, y, x * x, x * y)):
            self._sums[place] += weight * value


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericParameters:
    """What a generic engine model is made of; `error` is the median relative error of e2e, by these parameters."""

    step_s: float  # of a decode without any request
    request_s: float  # more for each request that decodes
    prefill_s: float  # of a prompt without tokens
    prefill_token_s: float
    max_num_seqs: int | None = None  # None: it was never seen to let a request wait
    prefill_first: bool = False
    error: float = UNKNOWN_ERROR
    num_requests: int = 0  # that ended, and were learnt from

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a generic engine, by their names in EngineConfig."""
        return {
            "batcher": "generic",
            "max_num_seqs": self.max_num_seqs or MAX_SEATS,
            "max_num_batched_tokens": LARGEST_STEP,
            "batcher_options": {"prefill_first": 1.0 if self.prefill_first else 0.0},
        }

    @property
    def step_time(self) -> StepTime:
        """The time of a step: affine in the requests that decode, and in the tokens of prompts."""
        requests = Curve(x=(1.0, float(MAX_SEATS)), y=(self.request_s, self.request_s * MAX_SEATS))
        return StepTime(
            constant_s=max(self.step_s, 1e-6),
            prefill_s=max(0.0, self.prefill_s - self.step_s),
            prefill_token_s=self.prefill_token_s,
            decode_base=requests,
            mixed_base=requests,
        )

    def differs_from(self, other: GenericParameters, share: float) -> bool:
        """Return whether a forecast by the others would be wrong by more than `share`."""
        if (self.max_num_seqs, self.prefill_first) != (other.max_num_seqs, other.prefill_first):
            return True
        pairs = (
            (self.step_s + 8 * self.request_s, other.step_s + 8 * other.request_s),
            (self.step_s + self.request_s, other.step_s + other.request_s),
            (self.prefill_s + 500 * self.prefill_token_s, other.prefill_s + 500 * other.prefill_token_s),
        )
        return any(abs(mine - theirs) > share * max(mine, theirs) for mine, theirs in pairs)


FIRST_GUESS = GenericParameters(step_s=0.02, request_s=0.0003, prefill_s=0.03, prefill_token_s=0.0001)


def generic_profile() -> Profile:
    """Return the profile of an engine whose step times are learnt from its traffic."""
    return Profile(
        name=GENERIC_NAME, model="any", gpu="any", tensor_parallel=1, dtype="any", kind=CONSTANT,
        step_time=FIRST_GUESS.step_time,
        valid=ValidRange(max_tokens=2**31 - 1, max_sequences=2**31 - 1, max_context_tokens=2**31 - 1),
        error=None,
        source="a first guess: nothing is known about the engine before its requests show it",
    )  # fmt: skip


def is_generic(profile: Profile) -> bool:
    """Return whether the step times of an engine are learnt, as no profile of it is given."""
    return profile.name == GENERIC_NAME


@dataclass(slots=True, kw_only=True)
class _Seen:
    """A request between its arrival and its end."""

    arrived_s: float
    prompt_tokens: int
    streamed: bool  # else its tokens are seen at its end
    is_alone: bool  # no other prompt was computed while its own was
    num_ahead: int  # prompt tokens that arrived before and were not computed
    num_decoding: int
    num_streams: int  # of these, whose tokens are seen
    tokens_then: int  # received by all others, as it arrived
    first_s: float | None = None
    num_tokens: int = 0
    predicted_ttft_s: float = 0.0
    step_sum_s: float = 0.0  # predicted step time by tokens received

    @property
    def awaits_first_token(self) -> bool:
        """Whether its first token will be seen; a request that is not streamed counts as one that decodes."""
        return self.streamed and self.first_s is None


@dataclass(slots=True)
class _Span:
    """A time in which the same requests decode, and no prompt is computed."""

    since_s: float
    tokens: dict[str, int] = field(default_factory=dict)  # of those that are streamed
    num_decoding: int = 0


class GenericEstimator:
    """Takes arrivals, tokens and ends of requests; times are in seconds from any origin."""

    def __init__(self, guess: GenericParameters = FIRST_GUESS) -> None:
        """Start from a guess."""
        self._guess = guess
        self._decode = AffineFit(guess.step_s, guess.request_s, 8.0)
        self._prefill = AffineFit(guess.prefill_s, guess.prefill_token_s, 500.0)
        self._requests: dict[str, _Seen] = {}
        self._span = _Span(0.0)
        self._num_received = 0
        self._waits: deque[int] = deque(maxlen=NUM_WAITS)
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self._interrupts = 0.0  # above 0: prefills interrupt decodes
        self._num_ended = 0

    def arrive(self, name: str, prompt_tokens: int, now_s: float, *, streamed: bool = True) -> None:
        """Take that a request is sent."""
        self._learn_span(now_s)
        pending = [one for one in self._requests.values() if one.awaits_first_token]
        for one in pending:
            one.is_alone = False
        ahead = sum(one.prompt_tokens for one in pending)
        seen = _Seen(
            arrived_s=now_s,
            prompt_tokens=prompt_tokens,
            streamed=streamed,
            is_alone=not pending,
            num_ahead=ahead,
            num_decoding=self.num_decoding,
            num_streams=sum(one.first_s is not None for one in self._requests.values()),
            tokens_then=self._num_received,
        )
        seen.predicted_ttft_s = self._prefill.at(ahead + prompt_tokens) + (
            self._decode.at(seen.num_decoding) if seen.num_decoding else 0.0
        )
        self._requests[name] = seen
        self._start_span(now_s)

    def correct_prompt(self, name: str, prompt_tokens: int) -> None:
        """Take the real length of a prompt."""
        if name in self._requests:
            self._requests[name].prompt_tokens = prompt_tokens

    def receive(self, name: str, num_tokens: int, now_s: float) -> None:
        """Take that a request has so many tokens now."""
        seen = self._requests.get(name)
        if seen is None or num_tokens <= seen.num_tokens:
            return
        self._num_received += num_tokens - seen.num_tokens
        seen.step_sum_s += (num_tokens - max(1, seen.num_tokens)) * self._decode.at(max(1, self.num_decoding))
        seen.num_tokens = num_tokens
        if seen.first_s is None:
            seen.first_s = now_s
            self._learn_first_token(seen, now_s)
            self._end_span(now_s)
        elif name in self._span.tokens and num_tokens - self._span.tokens[name] >= MAX_TOKENS:
            self._end_span(now_s)

    def end(self, name: str, num_tokens: int, now_s: float, *, completed: bool) -> None:
        """Take that a request has ended."""
        seen = self._requests.get(name)
        if seen is not None and completed and seen.first_s is None and not seen.streamed:
            self._learn_from_whole(seen, num_tokens, now_s)
        elif completed:
            self.receive(name, num_tokens, now_s)
        self._learn_span(now_s)
        self._requests.pop(name, None)
        self._start_span(now_s)
        if seen is None or not completed or seen.num_tokens < 1 or now_s <= seen.arrived_s:
            return
        predicted_s = seen.predicted_ttft_s + seen.step_sum_s
        self._errors.append(abs(predicted_s / (now_s - seen.arrived_s) - 1))
        self._num_ended += 1

    @property
    def num_decoding(self) -> int:
        """Number of requests that have a token, or whose tokens are not seen, and that have not ended."""
        return sum(not one.awaits_first_token for one in self._requests.values())

    def parameters(self) -> GenericParameters:
        """Return what is learnt so far."""
        errors = sorted(self._errors)
        return replace(
            self._guess,
            step_s=self._decode.base,
            request_s=self._decode.slope,
            prefill_s=self._prefill.base,
            prefill_token_s=self._prefill.slope,
            max_num_seqs=self._seats(),
            prefill_first=self._interrupts > 0,
            error=errors[len(errors) // 2] if errors else UNKNOWN_ERROR,
            num_requests=self._num_ended,
        )

    def _seats(self) -> int | None:
        """Return how many requests run at once, if those that waited agree on it."""
        if len(self._waits) < MIN_WAITS or max(self._waits) - min(self._waits) > max(1, max(self._waits) // 8):
            return None
        return max(self._waits)

    def _learn_first_token(self, seen: _Seen, now_s: float) -> None:
        """Learn from the time to a request's first token."""
        ttft_s = now_s - seen.arrived_s
        step_s = self._decode.at(seen.num_decoding) if seen.num_decoding else 0.0
        if ttft_s > SLOW * seen.predicted_ttft_s + 2 * step_s and self._prefill.num >= MIN_WAITS:
            self._waits.append(self.num_decoding)
            return
        if self._waits and self.num_decoding > max(self._waits):
            self._waits.clear()
        if not seen.is_alone:
            return
        self._prefill.observe(seen.prompt_tokens, max(0.0, ttft_s - step_s / 2))
        if seen.num_streams and ttft_s > 3 * step_s > 0:
            tokens_of_others = (self._num_received - seen.tokens_then - seen.num_tokens) / seen.num_streams
            flows = tokens_of_others >= 0.5 * ttft_s / step_s
            self._interrupts = 0.8 * self._interrupts + (-0.2 if flows else 0.2)

    def _learn_from_whole(self, seen: _Seen, num_tokens: int, now_s: float) -> None:
        """Learn the time of a decode from a response that came in one piece, at the mean of the loads around it."""
        num_decodes, load = max(0, num_tokens - 1), (seen.num_decoding + 1 + self.num_decoding) / 2
        seen.num_tokens, seen.step_sum_s = num_tokens, num_decodes * self._decode.at(load)
        decoding_s = now_s - seen.arrived_s - seen.predicted_ttft_s
        if num_decodes >= MIN_TOKENS and decoding_s > 0:
            self._decode.observe(load, decoding_s / num_decodes)

    def _end_span(self, now_s: float) -> None:
        """Learn the time of a decode from a span of equal load, and start the next."""
        self._learn_span(now_s)
        self._start_span(now_s)

    def _learn_span(self, now_s: float) -> None:
        span, seconds = self._span, now_s - self._span.since_s
        gained = [
            self._requests[name].num_tokens - before for name, before in span.tokens.items() if name in self._requests
        ]
        if gained and max(gained) >= MIN_TOKENS and seconds > 0:
            self._decode.observe(span.num_decoding, seconds / max(gained))

    def _start_span(self, now_s: float) -> None:
        waits_for_prompt = any(one.awaits_first_token for one in self._requests.values())
        tokens = {name: one.num_tokens for name, one in self._requests.items() if one.first_s is not None}
        self._span = _Span(now_s, {} if waits_for_prompt else tokens, self.num_decoding)
