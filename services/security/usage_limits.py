"""What keys and tenants use of a gateway, and which requests are refused because of it; the time is passed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.security.keys import ApiKeys, KeyHolder, UsageLimits
from services.security.token_bucket import TokenBucket

MINUTE_S = 60.0
BUSY_S = 1.0  # after which a refused request may find that another one has ended
REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE = "requests_per_minute", "tokens_per_minute"
MAX_REQUESTS, MAX_TOKENS = "max_requests", "max_tokens_in_flight"


class LimitReachedError(Exception):
    """A request that would exceed a limit; `retry_after_s` is infinite where it always would."""

    def __init__(self, limit: str, message: str, retry_after_s: float) -> None:
        """Note the limit's name, as key files have it."""
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RateStatus:
    """A rate limit, what is left of it, and the time until all of it is."""

    limit: int
    remaining: int
    reset_s: float


class UsageMeter:
    """What one key, or one tenant, uses of its limits."""

    def __init__(self, whose: str, limits: UsageLimits) -> None:
        """Start with nothing used; `whose` is for messages."""
        self.limits = limits
        self._whose = whose
        self._requests = _bucket(limits.requests_per_minute)
        self._tokens = _bucket(limits.tokens_per_minute)
        self.num_requests = 0  # under way
        self.num_tokens = 0  # of these requests

    def require(self, num_tokens: int, now_s: float) -> None:
        """Raise LimitReachedError where a request of so many tokens would exceed a limit."""
        limits, whose = self.limits, self._whose
        if limits.max_requests is not None and self.num_requests >= limits.max_requests:
            raise LimitReachedError(
                MAX_REQUESTS,
                f"{whose} has {self.num_requests} requests under way, and may have {limits.max_requests}",
                BUSY_S,
            )
        if limits.max_tokens_in_flight is not None and self.num_tokens + num_tokens > limits.max_tokens_in_flight:
            raise LimitReachedError(
                MAX_TOKENS,
                f"{whose} has {self.num_tokens} tokens under way, may have {limits.max_tokens_in_flight}, and this "
                f"request may need {num_tokens}",
                BUSY_S if num_tokens <= limits.max_tokens_in_flight else math.inf,
            )
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now_s)) > 0:
            raise LimitReachedError(
                REQUESTS_PER_MINUTE,
                f"{whose} may send {limits.requests_per_minute} requests a minute",
                wait_s,
            )
        if self._tokens is not None and (wait_s := self._tokens.wait_s(num_tokens, now_s)) > 0:
            raise LimitReachedError(
                TOKENS_PER_MINUTE,
                f"{whose} may use {limits.tokens_per_minute} tokens a minute, and this request may need {num_tokens}",
                wait_s,
            )

    def begin(self, num_tokens: int, now_s: float) -> None:
        """Count a request, which `require` has allowed."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        if self._requests is not None:
            self._requests.take(1, now_s)
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)

    def correct(self, before: int, after: int, now_s: float) -> None:
        """Replace the tokens that a request under way was counted with."""
        self.num_tokens += after - before
        if self._tokens is not None:
            self._tokens.take(after - before, now_s)

    def end(self, counted: int, used: int, now_s: float) -> None:
        """Count the end of a request, and what it used in fact."""
        self.num_requests -= 1
        self.num_tokens -= counted
        if self._tokens is not None:
            self._tokens.take(used - counted, now_s)

    def rates(self, now_s: float) -> dict[str, RateStatus]:
        """Return the state of each rate limit by what it limits: requests, tokens."""
        found = {}
        for name, limit, bucket in (
            ("requests", self.limits.requests_per_minute, self._requests),
            ("tokens", self.limits.tokens_per_minute, self._tokens),
        ):
            if limit is not None and bucket is not None:
                remaining = max(0, math.floor(bucket.level(now_s)))
                found[name] = RateStatus(limit=limit, remaining=remaining, reset_s=bucket.reset_s(now_s))
        return found


def _bucket(per_minute: int | None) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(capacity=per_minute, per_s=per_minute / MINUTE_S)


@dataclass(slots=True, kw_only=True, eq=False)
class MeteredRequest:
    """One request under way, and the meters that count it."""

    meters: Sequence[UsageMeter]
    counted: int  # tokens that it is counted with
    prompt_tokens: int = 0
    max_tokens: int | None = None  # of each of its responses
    num_responses: int = 1
    used: int = 0  # tokens, as far as responses say

    def predicted(self, output_tokens: float, now_s: float) -> None:
        """Count it with a predicted length of its response, of which its own limit is the maximum."""
        if not self.meters or not math.isfinite(output_tokens):
            return
        output = math.ceil(output_tokens) if self.max_tokens is None else min(self.max_tokens, math.ceil(output_tokens))
        after = self.prompt_tokens + self.num_responses * output
        for meter in self.meters:
            meter.correct(self.counted, after, now_s)
        self.counted = after

    def served(self, prompt_tokens: int, output_tokens: int) -> None:
        """Note what a response says that it used; of several, the last one counts."""
        if self.meters:
            self.used = prompt_tokens + output_tokens

    def goes_on(self) -> None:
        """Note that an engine computes the response after the reply: the tokens it is counted with count as used."""
        self.used = self.counted

    def end(self, now_s: float) -> None:
        """Count the end."""
        for meter in self.meters:
            meter.end(self.counted, self.used, now_s)


NOT_METERED = MeteredRequest(meters=(), counted=0)


class UsageMeters:
    """The meters of all keys and tenants that have limits; they are kept while the limits stay as they are."""

    def __init__(self) -> None:
        """Start without meters."""
        self._of_keys: dict[str, UsageMeter] = {}
        self._of_tenants: dict[str, UsageMeter] = {}
        self._known: ApiKeys | None = None

    def of(self, holder: KeyHolder, keys: ApiKeys) -> Sequence[UsageMeter]:
        """Return the meters that a request with a key counts in."""
        if keys is not self._known:
            self._forget(keys)
        found = []
        if holder.limits:
            found.append(_meter(self._of_keys, holder.name, holder.limits, f"the key {holder.name!r}"))
        limits = keys.limits_of(holder.tenant)
        if limits:
            found.append(_meter(self._of_tenants, holder.tenant, limits, f"the tenant {holder.tenant!r}"))
        return found

    def _forget(self, keys: ApiKeys) -> None:
        """Drop the meters of names that a new version of the keys lacks."""
        names = {one.name for one in keys.keys}
        self._of_keys = {name: meter for name, meter in self._of_keys.items() if name in names}
        self._of_tenants = {name: meter for name, meter in self._of_tenants.items() if name in keys.tenants}
        self._known = keys


def _meter(meters: dict[str, UsageMeter], name: str, limits: UsageLimits, whose: str) -> UsageMeter:
    found = meters.get(name)
    if found is None or found.limits != limits:
        found = meters[name] = UsageMeter(whose, limits)
    return found


def begin(  # noqa: PLR0913 - what a request is counted by
    meters: Sequence[UsageMeter],
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    expected: int,
    num_responses: int = 1,
    now_s: float,
) -> MeteredRequest:
    """Count a request in all meters, or in none where one of them refuses: LimitReachedError.

    Until its length is predicted, it is counted with its prompt and its own limit, or else an expected length.
    """
    if not meters:
        return NOT_METERED
    counted = prompt_tokens + num_responses * (expected if max_tokens is None else max_tokens)
    for meter in meters:
        meter.require(counted, now_s)
    for meter in meters:
        meter.begin(counted, now_s)
    return MeteredRequest(
        meters=meters,
        counted=counted,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        num_responses=num_responses,
    )
