"""A request from its arrival to its answer: sent to one engine after the other until one answers, and passed on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from services.explanations import in_short
from services.gateway.context import GatewayContext
from services.gateway.incoming import Incoming
from services.gateway.placing import Placing
from services.gateway.upstream_attempt import CANCELLED, FAILED, UpstreamAttempt
from services.http.client import ConnectError, Headers
from services.http.errors import ApiError
from services.http.reply import Client
from services.logs import log_event

log = logging.getLogger(__name__)

WORTH_ANOTHER = (429, 500, 502, 503, 504)  # an engine's statuses that another engine may not give
NOT_SERVING = (502, 503, 504)  # of them, those that say that it is down

# Of an engine's reply these are ours to say.
OURS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"x-request-id",
     b"upgrade", b"trailer", b"te", b"proxy-connection")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxiedExchange:
    """One request under way. `run` ends with the client answered, or with the ApiError that it is to be told."""

    shared: GatewayContext
    incoming: Incoming
    client: Client
    placing: Placing

    async def run(self) -> None:
        """See it through."""
        self.shared.budget.earn()
        attempt = await self._answered()
        try:
            await (self._stream(attempt) if attempt.is_stream else self._pass_on(attempt))
        finally:
            attempt.leave(CANCELLED)  # unless it has been left already

    async def _answered(self) -> UpstreamAttempt:
        """Place and send until an engine answers; every failure leaves one engine less to try."""
        last: UpstreamAttempt | None = None
        for number in range(1, self.shared.settings.attempts + 1):
            try:
                place = await self.placing.place()
            except ApiError:
                if last is not None:  # what an engine said is worth more than what we could say
                    return last
                raise
            attempt = UpstreamAttempt(shared=self.shared, incoming=self.incoming, place=place)
            try:
                await attempt.send()
            except (ConnectionError, TimeoutError) as error:
                self.shared.failed_lately.failed(place.instance_id)
                self._give_up(attempt, str(error))
                if not self._may_retry(number, type(error).__name__):
                    raise unanswered(error) from None
                continue
            except BaseException:
                attempt.leave(CANCELLED)
                raise
            if attempt.status not in WORTH_ANOTHER:
                self.shared.failed_lately.succeeded(place.instance_id)
                return attempt
            if attempt.status in NOT_SERVING:
                self.shared.failed_lately.failed(place.instance_id)
            self._give_up(attempt, f"status {attempt.status}")
            last = attempt
            if not self._may_retry(number, str(attempt.status)):
                return attempt
        raise AssertionError("the last attempt returns or raises")

    def _give_up(self, attempt: UpstreamAttempt, why: str) -> None:
        log_event(
            log, logging.INFO, "engine failed", request_id=self.incoming.request.request_id,
            instance_id=attempt.place.instance_id, why=why,
        )  # fmt: skip
        attempt.leave(FAILED)

    def _may_retry(self, number: int, why: str) -> bool:
        if number >= self.shared.settings.attempts or not self.shared.budget.spend():
            return False
        self.shared.metrics.retries.labels(why).inc()
        return True

    async def _pass_on(self, attempt: UpstreamAttempt) -> None:
        """Send an answer that is in one piece."""
        attempt.leave()
        await self.client.answer(attempt.status, self._headers(attempt), attempt.body)

    async def _stream(self, attempt: UpstreamAttempt) -> None:
        """Pass a stream on as it comes."""
        await self.client.begin(attempt.status, self._headers(attempt))
        events: bytes | None = attempt.body
        try:
            while events is not None:
                if events:
                    await self.client.go_on(events)
                events = await attempt.events()
        except (ConnectionError, TimeoutError) as error:
            self.shared.failed_lately.failed(attempt.place.instance_id)
            self.shared.metrics.broken.inc()
            log_event(
                log, logging.WARNING, "stream broken", request_id=self.incoming.request.request_id,
                instance_id=attempt.place.instance_id, why=str(error),
            )  # fmt: skip
            attempt.leave(FAILED)
            raise unanswered(error) from None
        rest = attempt.rest()
        attempt.leave()
        await self.client.end(rest)

    def _headers(self, attempt: UpstreamAttempt) -> Headers:
        """Pass the engine's headers on, and say where the answer comes from and why."""
        place = attempt.place
        headers = [pair for pair in attempt.headers if pair[0] not in OURS]
        headers += (
            (b"x-block-instance", place.instance_id.encode("ascii", "replace")),
            (b"x-block-policy", place.policy.encode("ascii", "replace")),
            (b"x-block-decision-ms", b"%.2f" % (self.placing.took_s * 1000)),
        )
        if place.decision is not None and place.decision.HasField("forecast"):
            forecast = place.decision.forecast
            headers += (
                (b"x-block-predicted-ttft-ms", b"%.1f" % (forecast.ttft_s * 1000)),
                (b"x-block-predicted-e2e-ms", b"%.1f" % (forecast.e2e_s * 1000)),
            )
        if self.incoming.explain and place.decision is not None:
            headers.append((b"x-block-explanation", in_short(place.decision).encode()))
        if log.isEnabledFor(logging.DEBUG):
            log_event(
                log, logging.DEBUG, "placed", request_id=self.incoming.request.request_id,
                instance_id=place.instance_id, policy=place.policy, decision_ms=self.placing.took_s * 1000,
                status=attempt.status,
            )  # fmt: skip
        return headers


def unanswered(error: Exception) -> ApiError:
    """Put an engine's failure into words that name no address."""
    if isinstance(error, ConnectError):
        return ApiError(503, "the engine cannot be reached")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the engine does not answer in time")
    return ApiError(502, "the engine broke off")
