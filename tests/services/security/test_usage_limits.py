"""Limits of keys and tenants against a plain list of all requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.security.key_file import keys_in
from services.security.keys import UsageLimits
from services.security.usage_limits import LimitReachedError, UsageMeter, UsageMeters, begin
from tests.services.security.key_files import key, tenant

RATES = ("requests_per_minute", "tokens_per_minute")


@dataclass
class Known:
    """What the plain list knows of a request under way."""

    request: Any
    counted: int
    prompt: int
    limit: int | None


LIMITS = st.builds(
    UsageLimits,
    requests_per_minute=st.none() | st.integers(1, 8),
    tokens_per_minute=st.none() | st.integers(1, 300),
    max_requests=st.none() | st.integers(1, 4),
    max_tokens_in_flight=st.none() | st.integers(1, 200),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "predict", "end"]),
        st.integers(0, 40),  # seconds since the step before
        st.integers(0, 60),  # tokens of the prompt, or which request
        st.none() | st.integers(0, 80),  # max_tokens, or tokens predicted or used
    ),
    max_size=40,
)


class PlainList:
    """All requests under way, and what each bucket holds, in the simplest way."""

    def __init__(self, limits: UsageLimits) -> None:
        """Start with full buckets."""
        self.limits = limits
        self.going: list[Known] = []
        self.levels = {name: float(getattr(limits, name) or math.inf) for name in RATES}

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        for name in RATES:
            limit = getattr(self.limits, name)
            if limit is not None:
                self.levels[name] = min(limit, self.levels[name] + limit * seconds / 60)

    def take(self, name: str, amount: float) -> None:
        """Take from a bucket."""
        limit = getattr(self.limits, name)
        if limit is not None:
            self.levels[name] = min(limit, self.levels[name] - amount)

    def num_tokens(self) -> int:
        """Return the tokens under way."""
        return sum(one.counted for one in self.going)

    def refusal(self, need: int) -> str:
        """Return the first limit that a request exceeds."""
        limits = self.limits
        if limits.max_requests is not None and len(self.going) >= limits.max_requests:
            return "max_requests"
        if limits.max_tokens_in_flight is not None and self.num_tokens() + need > limits.max_tokens_in_flight:
            return "max_tokens_in_flight"
        if self.levels["requests_per_minute"] < 1 - 1e-9:
            return "requests_per_minute"
        return "tokens_per_minute" if self.levels["tokens_per_minute"] < need - 1e-9 else ""

    def begin(self, meter: UsageMeter, prompt: int, limit: int | None, now_s: float) -> None:
        """Begin a request, where the meter and this list agree that it may begin."""
        need = prompt + (50 if limit is None else limit)
        expected = self.refusal(need)
        try:
            request = begin([meter], prompt_tokens=prompt, max_tokens=limit, expected=50, now_s=now_s)
        except LimitReachedError as error:
            close = any(abs(self.levels[name] - amount) < 1e-6 for name, amount in zip(RATES, (1, need), strict=True))
            assert error.limit == expected or close
            assert error.retry_after_s > 0
        else:
            assert expected == ""
            self.going.append(Known(request, need, prompt, limit))
            self.take("requests_per_minute", 1)
            self.take("tokens_per_minute", need)

    def predict(self, known: Known, tokens: int, now_s: float) -> None:
        """Predict the length of a response."""
        known.request.predicted(float(tokens), now_s)
        output = tokens if known.limit is None else min(known.limit, tokens)
        self.take("tokens_per_minute", known.prompt + output - known.counted)
        known.counted = known.prompt + output

    def end(self, known: Known, tokens: int, now_s: float) -> None:
        """End a request, after two attempts, of which the last one counts."""
        self.going.remove(known)
        known.request.served(known.prompt, 3)
        known.request.served(known.prompt, tokens)
        known.request.end(now_s)
        self.take("tokens_per_minute", known.prompt + tokens - known.counted)


@settings(deadline=None)
@given(LIMITS, STEPS)
def test_requests_are_admitted_as_the_list_says(
    limits: UsageLimits, steps: list[tuple[str, int, int, int | None]]
) -> None:
    """Whatever happens, a request is refused exactly where a limit is reached, by its name; what ends is given back."""
    meter, plain, now_s = UsageMeter("the key", limits), PlainList(limits), 0
    for what, passed, number, more in steps:
        now_s += passed
        plain.wait(passed)
        if what == "begin":
            plain.begin(meter, number, more, now_s)
        elif plain.going:
            known = plain.going[number % len(plain.going)]
            (plain.predict if what == "predict" else plain.end)(known, more or 0, now_s)
        assert (meter.num_requests, meter.num_tokens) == (len(plain.going), plain.num_tokens())
        for name, rate in meter.rates(now_s).items():
            assert abs(rate.remaining - max(0, math.floor(plain.levels[f"{name}_per_minute"]))) <= 1
    for known in plain.going:
        known.request.end(now_s)
    assert (meter.num_requests, meter.num_tokens) == (0, 0)


def test_a_refused_request_counts_nowhere() -> None:
    """Where the tenant refuses, the key has not counted it either."""
    keys = keys_in(
        key("x", "a", tenant="t", max_requests=5) + key("y", "b", tenant="t") + tenant("t", max_requests=1), "f"
    )
    meters, a, b = UsageMeters(), keys.holder(b"x"), keys.holder(b"y")
    assert a is not None
    assert b is not None
    first = begin(meters.of(b, keys), prompt_tokens=1, max_tokens=1, expected=0, now_s=0.0)
    with pytest.raises(LimitReachedError, match="the tenant 't' has 1 requests under way, and may have 1"):
        begin(meters.of(a, keys), prompt_tokens=1, max_tokens=1, expected=0, now_s=0.0)
    assert [meter.num_requests for meter in meters.of(a, keys)] == [0, 1]
    first.end(1.0)
    assert [meter.num_requests for meter in meters.of(a, keys)] == [0, 0]


def test_several_responses_count_several_times() -> None:
    """Of `n` samples each may be as long as max_tokens."""
    meter = UsageMeter("the key", UsageLimits(max_tokens_in_flight=100))
    request = begin([meter], prompt_tokens=10, max_tokens=20, expected=0, num_responses=3, now_s=0.0)
    assert meter.num_tokens == 70
    request.predicted(4.2, 0.0)
    assert meter.num_tokens == 25
    request.predicted(math.inf, 0.0)
    request.predicted(1e9, 0.0)
    assert meter.num_tokens == 70
    with pytest.raises(LimitReachedError) as refused:
        begin([meter], prompt_tokens=101, max_tokens=0, expected=0, now_s=0.0)
    assert math.isinf(refused.value.retry_after_s)


def test_meters_are_kept_while_limits_stay() -> None:
    """A new version of the file keeps what is counted, unless it changes the limits; names that it lacks are dropped."""
    meters = UsageMeters()

    def meter_of(*tables: str) -> UsageMeter:
        keys = keys_in("".join(tables), "f")
        holder = keys.holder(b"x")
        assert holder is not None
        (meter,) = meters.of(holder, keys)
        return meter

    first = meter_of(key("x", "a", max_requests=2))
    assert meter_of(key("x", "a", max_requests=2), key("y", "b")) is first
    assert meter_of(key("x", "a", max_requests=3)) is not first
    second = meter_of(key("x", "b", max_requests=3))
    assert meter_of(key("x", "a", max_requests=3)) is not first
    assert meter_of(key("x", "b", max_requests=3)) is not second
