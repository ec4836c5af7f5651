"""What keys allow at the gateway: models, rates, requests and tokens under way; refusals and headers as OpenAI's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from services.http.application import Call
from services.http.errors import ApiError
from services.http.headers import Headers
from services.http.openai_body import OpenAIRequest
from services.rpc.errors import MAX_RETRY_AFTER_S
from services.security.access import AccessControl
from services.security.keys import KeyHolder
from services.security.usage_limits import LimitReachedError, MeteredRequest, UsageMeter, UsageMeters, begin

EXPECTED_TOKENS = 256  # of a response of unknown length, until it is predicted
MODEL = "model"  # reason of a refusal, as metrics name it


class LimitError(ApiError):
    """The reply to a request that would exceed a limit of its key or tenant."""

    def __init__(self, error: LimitReachedError) -> None:
        """Take the limit's own error."""
        super().__init__(429, str(error), code=f"{error.limit}_exceeded")
        self._retry_after_s = error.retry_after_s

    def seconds_to_wait(self) -> int:
        """Return the whole seconds after which the request may be sent again."""
        return max(1, math.ceil(min(self._retry_after_s, MAX_RETRY_AFTER_S)))

    def headers(self) -> Headers:
        """Return the headers of the reply; a request that is too large for its limit is not worth a retry."""
        headers = super().headers()
        if math.isfinite(self._retry_after_s):
            return headers
        return [*(pair for pair in headers if pair[0] != b"retry-after"), (b"x-should-retry", b"false")]


class UsageControl:
    """Refuses requests that their keys do not allow, and counts the others."""

    def __init__(self, access: AccessControl, clock: Callable[[], float]) -> None:
        """Count nothing yet."""
        self._access = access
        self._clock = clock
        self._meters = UsageMeters()

    def require_model(self, holder: KeyHolder, model: str) -> None:
        """Refuse a model that a key may not use, in the words for one that does not exist."""
        if holder.may_use(model):
            return
        self._access.refused(MODEL)
        if not model:
            raise ApiError(400, f"model: is missing, and this key may use {', '.join(sorted(holder.models))} only")
        raise ApiError(
            404,
            f"The model `{model}` does not exist or this API key may not use it.",
            code="model_not_found",
            param="model",
        )

    @contextmanager
    def metered(
        self, call: Call, holder: KeyHolder, openai: OpenAIRequest, prompt_tokens: int
    ) -> Iterator[MeteredRequest]:
        """Count a request while the block runs; LimitError where a limit refuses it. All its replies tell the rates."""
        meters = self._meters.of(holder, self._access.keys)
        try:
            request = begin(
                meters,
                prompt_tokens=prompt_tokens,
                max_tokens=openai.max_tokens,
                expected=openai.expected_tokens or EXPECTED_TOKENS,
                num_responses=openai.num_prompts * openai.num_samples,
                now_s=self._clock(),
            )
        except LimitReachedError as error:
            self._access.refused(error.limit)
            raise LimitError(error) from None
        finally:
            call.added_headers.extend(rate_headers(meters, self._clock()))
        try:
            yield request
        finally:
            request.end(self._clock())


def rate_headers(meters: Sequence[UsageMeter], now_s: float) -> Headers:
    """Write the rate limits as OpenAI's headers; where key and tenant have one, that of which less is left."""
    headers: Headers = []
    rates = [meter.rates(now_s) for meter in meters]
    for name in ("requests", "tokens"):
        found = [one[name] for one in rates if name in one]
        if found:
            tightest = min(found, key=lambda one: one.remaining)
            headers += (
                (f"x-ratelimit-limit-{name}".encode(), b"%d" % tightest.limit),
                (f"x-ratelimit-remaining-{name}".encode(), b"%d" % tightest.remaining),
                (f"x-ratelimit-reset-{name}".encode(), duration(tightest.reset_s).encode()),
            )
    return headers


def duration(seconds: float) -> str:
    """Write a time as OpenAI does: 20ms, 7.66s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{text}s" if minutes else f"{text}s"
