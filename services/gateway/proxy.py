"""Forwarding a request: to one engine after the other until one responds, and the response back to the client."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from services.explanations import in_short
from services.gateway.context import GatewayContext
from services.gateway.incoming import Incoming
from services.gateway.placing import Placing
from services.gateway.upstream_attempt import CANCELLED, FAILED, UpstreamAttempt
from services.http.application import Call
from services.http.client import Headers
from services.http.errors import ApiError
from services.http.proxying import engine_error
from services.logs import log_event

log = logging.getLogger(__name__)

RETRIED = (429, 500, 502, 503, 504)  # statuses of an engine that another engine may not return
NOT_SERVING = (502, 503, 504)  # of them, those of an engine that is down

# Headers of an engine's reply that the gateway sets itself.
OWN_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"x-request-id",
     b"upgrade", b"trailer", b"te", b"proxy-connection")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForwarder:
    """Forwards one request. `run` ends with a complete reply, or raises the ApiError that the client receives."""

    context: GatewayContext
    incoming: Incoming
    call: Call
    placing: Placing

    async def run(self) -> None:
        """Forward the request, and pass the response on."""
        self.context.budget.earn()
        attempt = await self._response()
        try:
            await (self._stream(attempt) if attempt.is_stream else self._pass_on(attempt))
        finally:
            attempt.finish(CANCELLED)  # unless it is finished already

    async def _response(self) -> UpstreamAttempt:
        """Place and send until an engine responds; no engine is tried twice."""
        last: UpstreamAttempt | None = None
        for number in range(1, self.context.settings.attempts + 1):
            try:
                destination = await self.placing.place()
            except ApiError:
                if last is not None:  # an engine's own error is more precise than the gateway's
                    return last
                raise
            attempt = UpstreamAttempt(context=self.context, incoming=self.incoming, destination=destination)
            try:
                await attempt.send()
            except (ConnectionError, TimeoutError) as error:
                self.context.failed_lately.failed(destination.instance_id)
                self._give_up(attempt, str(error))
                if not self._may_retry(number, type(error).__name__):
                    raise engine_error(error) from None
                continue
            except BaseException:
                attempt.finish(CANCELLED)
                raise
            if attempt.status not in RETRIED:
                self.context.failed_lately.succeeded(destination.instance_id)
                return attempt
            if attempt.status in NOT_SERVING:
                self.context.failed_lately.failed(destination.instance_id)
            self._give_up(attempt, f"status {attempt.status}")
            last = attempt
            if not self._may_retry(number, str(attempt.status)):
                return attempt
        raise AssertionError("the last attempt returns or raises")

    def _give_up(self, attempt: UpstreamAttempt, why: str) -> None:
        log_event(
            log, logging.INFO, "engine failed", request_id=self.incoming.request.request_id,
            instance_id=attempt.destination.instance_id, why=why,
        )  # fmt: skip
        attempt.finish(FAILED)

    def _may_retry(self, number: int, why: str) -> bool:
        if number >= self.context.settings.attempts or not self.context.budget.spend():
            return False
        self.context.metrics.retries.labels(why).inc()
        return True

    async def _pass_on(self, attempt: UpstreamAttempt) -> None:
        """Pass on a response in one piece."""
        attempt.finish()
        await self.call.reply(attempt.status, self._headers(attempt), attempt.body)

    async def _stream(self, attempt: UpstreamAttempt) -> None:
        """Pass on a stream as it arrives."""
        await self.call.start(attempt.status, self._headers(attempt))
        events: bytes | None = attempt.body
        try:
            while events is not None:
                if events:
                    await self.call.write(events)
                events = await attempt.events()
        except (ConnectionError, TimeoutError) as error:
            self.context.failed_lately.failed(attempt.destination.instance_id)
            self.context.metrics.broken.inc()
            log_event(
                log, logging.WARNING, "stream broken", request_id=self.incoming.request.request_id,
                instance_id=attempt.destination.instance_id, why=str(error),
            )  # fmt: skip
            attempt.finish(FAILED)
            raise engine_error(error) from None
        rest = attempt.rest()
        attempt.finish()
        await self.call.end(rest)

    def _headers(self, attempt: UpstreamAttempt) -> Headers:
        """Return the engine's headers, and add the decision and its forecast."""
        destination = attempt.destination
        headers = [pair for pair in attempt.headers if pair[0] not in OWN_HEADERS]
        headers += (
            (b"x-block-instance", destination.instance_id.encode("ascii", "replace")),
            (b"x-block-policy", destination.policy.encode("ascii", "replace")),
            (b"x-block-decision-ms", b"%.2f" % (self.placing.took_s * 1000)),
        )
        if destination.decision is not None and destination.decision.HasField("forecast"):
            forecast = destination.decision.forecast
            headers += (
                (b"x-block-predicted-ttft-ms", b"%.1f" % (forecast.ttft_s * 1000)),
                (b"x-block-predicted-e2e-ms", b"%.1f" % (forecast.e2e_s * 1000)),
            )
        if self.incoming.explain and destination.decision is not None:
            headers.append((b"x-block-explanation", in_short(destination.decision).encode()))
        if log.isEnabledFor(logging.DEBUG):
            log_event(
                log, logging.DEBUG, "request placed", request_id=self.incoming.request.request_id,
                instance_id=destination.instance_id, policy=destination.policy,
                decision_ms=self.placing.took_s * 1000, status=attempt.status,
            )  # fmt: skip
        return headers
