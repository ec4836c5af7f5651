"""Forwarding a request: to one engine after the other until one responds, and the response back to the client."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial

from protos.block.v1 import common_pb2
from services.explanations import decision_headers
from services.gateway.attainment import StreamAttainment
from services.gateway.context import GatewayContext
from services.gateway.destinations import Destination
from services.gateway.incoming import Incoming
from services.gateway.placing import Placing
from services.gateway.stream_relay import BUDGET, LIMIT, NO_INSTANCE, PLANNED, StreamRelay
from services.gateway.upstream_attempt import LeftError, RemovedError, UpstreamAttempt
from services.http.application import Call
from services.http.connection import ConnectError
from services.http.continued_request import EarlierPart
from services.http.data_parallel import with_rank
from services.http.engine_deaths import EngineDeaths
from services.http.errors import ApiError, ShedError
from services.http.headers import Headers
from services.http.kv_transfer import KV_CONNECTORS
from services.http.prefill_leg import MAX_FAILED_FETCHES, SKIPPED, HeldBlocks, PrefillLeg
from services.http.proxying import NOT_SERVING, OK, OWN_HEADERS, RETRIED, SERVER_ERROR, engine_error
from services.http.reply_format import CANCELLED, FAILED
from services.instances.draining_requests import REMOVED
from services.logs import log_event
from services.tracing.request_spans import PREFILL, end_prefill

log = logging.getLogger(__name__)

BAD_GATEWAY = 502


class EngineFailedError(Exception):
    """An engine failed before the first byte; another one may be tried."""

    def __init__(self, why: str, reply: UpstreamAttempt | ApiError) -> None:
        """Note the reason, as metrics name it, and what the client gets where no other engine is tried."""
        super().__init__(why)
        self.why = why
        self.reply = reply


@dataclass(slots=True, kw_only=True)
class RequestForwarder:
    """Forwards one request. `run` ends with a complete reply, or raises the ApiError that the client receives."""

    context: GatewayContext
    incoming: Incoming
    call: Call
    placing: Placing
    attainment: StreamAttainment | None = None  # of a request with targets
    earlier: EarlierPart | None = None  # of an answer that this request continues
    deaths: EngineDeaths = field(init=False)
    _held: HeldBlocks | None = None  # by the instance of a prefill leg, not fetched yet
    _num_failed_fetches: int = 0
    _disaggregation: str = ""  # why the request has two legs, or one
    _num_moves: int = 0  # before the first byte, because the instance drained
    _found: Destination | None = None  # another one, for a request whose instance drains

    def __post_init__(self) -> None:
        """Count the engines that die of the request from now on."""
        self.deaths = EngineDeaths(
            request_id=self.incoming.request.request_id,
            limit=self.context.settings.max_migrations + 1,
            suspected=self.context.metrics.poison_suspects.inc,
        )

    async def run(self) -> None:
        """Forward the request, and pass the response on."""
        self.context.budget.earn()
        self.context.migrations.earn()
        try:
            attempt = await self._response()
        except ApiError as error:
            if self.attainment is not None:
                self.attainment.refused(error.status)
            raise
        self._note_kept(attempt)
        try:
            await (self._stream(attempt) if attempt.is_stream else self._pass_on(attempt))
        finally:
            attempt.finish(CANCELLED)  # unless it is finished already

    def _note_kept(self, attempt: UpstreamAttempt) -> None:
        """Note where the response is kept, if it is."""
        if self.incoming.openai.is_kept and attempt.status == OK:
            self.context.kept.note(attempt.body, attempt.destination, self.incoming.owner)

    async def _response(self) -> UpstreamAttempt:
        """Place and send until an engine responds; no reservation of an unused destination stays."""
        try:
            return await self._first_response()
        finally:
            if self._found is not None:
                self.placing.give_back_later(self._found)
                self._found = None

    async def _first_response(self) -> UpstreamAttempt:
        last: UpstreamAttempt | None = None
        number = 1
        while True:
            try:
                found, self._found = self._found, None
                destination = found or await self._destination()
            except ShedError:
                raise
            except ApiError:
                if last is not None:  # an engine's own error is more precise than the gateway's
                    return last
                raise
            try:
                return await self._served(destination)
            except LeftError:  # it counts as no attempt: the engine has not failed
                self.context.metrics.migrations.labels(PLANNED).inc()
            except EngineFailedError as failed:
                reply = failed.reply
                if isinstance(reply, UpstreamAttempt):
                    last = reply
                if self._may_retry(number, failed.why):
                    number += 1
                    continue
                if isinstance(reply, UpstreamAttempt):
                    return reply
                raise reply from None

    async def _found_other(self, attempt: UpstreamAttempt) -> bool:
        """Find another instance for a request whose own drains; False where it stays."""
        context, why = self.context, ""
        if attempt.held is not None:
            why = "decode_leg"
        elif self._num_moves >= context.settings.max_migrations:
            why = LIMIT
        elif not context.migrations.spend():
            why = BUDGET
        if not why:
            self.placing.exclude(attempt.destination.instance_id)
            try:
                self._found = await self.placing.place()
            except ApiError:
                context.migrations.give_back()
                why = NO_INSTANCE
        if why:
            assert attempt.movable is not None
            context.requests.cannot_move(attempt.movable, why)
        return not why

    async def _destination(self) -> Destination:
        """Find another decode instance while KV blocks are held; otherwise, place the request again."""
        if self._held is not None:
            try:
                destination = await self.placing.place_decode_leg()
            except ApiError:
                pass  # no other one
            else:
                if self._may_be_fetched(self._held):
                    return destination
                await self.placing.give_back(destination)
            self._held = None
        return await self.placing.place()

    def _may_be_fetched(self, held: HeldBlocks) -> bool:
        return held.may_be_fetched(time.monotonic(), self.context.settings.hand_over_deadline_s)

    async def _served(self, destination: Destination) -> UpstreamAttempt:
        """Serve a request at its destination, in one leg or two; EngineFailedError where another one may do it."""
        attempt = UpstreamAttempt(
            context=self.context,
            incoming=self.incoming,
            destination=destination,
            attainment=self.attainment,
            earlier=self.earlier,
        )
        if destination.decision is not None and self._held is None:  # that of a decode leg alone says nothing new
            self._disaggregation = destination.decision.disaggregation
        try:
            if destination.prefill is not None and not await self._prefilled(destination.prefill, attempt):
                return attempt
            attempt.held = self._held
            await self._send(attempt)
        except EngineFailedError:
            raise
        except BaseException:
            attempt.finish(CANCELLED, counts=self._counts)
            raise
        return attempt

    @property
    def _counts(self) -> bool:
        """Whether metrics count attempts that bring no response; an answer that they were to continue counts once."""
        return self.earlier is None

    async def _prefilled(self, destination: Destination, attempt: UpstreamAttempt) -> bool:
        """Have the prompt computed, unless the request is served whole; False where the request is refused."""
        context, incoming, instance_id = self.context, self.incoming, destination.instance_id
        leg = PrefillLeg(
            request=incoming.request, instance_id=instance_id, policy=destination.policy, arrived_s=incoming.arrived_s
        )
        span = None
        try:
            if self.placing.undivided or self._held is not None:
                leg.result = SKIPPED
                return True
            span = incoming.spans.leg(PREFILL, destination.origin, instance_id=instance_id, policy=destination.policy)
            reply = await leg.send(
                context.engines,
                destination.origin,
                target=incoming.target,
                headers=with_rank(incoming.spans.headers_below(span, incoming.headers), destination.rank),
                body=incoming.body_for(destination.decision),
                connector=KV_CONNECTORS[context.settings.kv_connector],
                within_s=context.settings.first_byte_s,
                max_bytes=context.settings.max_answer_bytes,
            )
        except (ConnectionError, TimeoutError) as error:
            context.failed_lately.failed(instance_id)
            self._exclude_ranks(destination, error)
            await self._give_up(attempt, instance_id, str(error))
            raise EngineFailedError(f"prefill {type(error).__name__}", engine_error(error)) from None
        finally:
            context.metrics.prefills.labels(leg.result).inc()
            end_prefill(span, leg.result)
            context.releases.put(
                common_pb2.ReleaseRequest(
                    request_id=incoming.request.request_id, instance_id=instance_id, outcome=leg.outcome()
                )
            )
        if reply.status in RETRIED:
            if reply.status in NOT_SERVING:
                context.failed_lately.failed(instance_id)
            attempt.refuse(reply)
            await self._give_up(attempt, instance_id, f"status {reply.status}")
            raise EngineFailedError(f"prefill {reply.status}", attempt)
        context.failed_lately.succeeded(instance_id)
        if reply.status != OK:
            attempt.refuse(reply)
            return False
        context.metrics.prefill.observe(reply.leg_s)
        self._held = leg.held
        return True

    async def _send(self, attempt: UpstreamAttempt) -> None:
        """Send a whole request or a decode leg, and wait for the response; LeftError where the instance drains."""
        instance_id, held = attempt.destination.instance_id, attempt.held
        try:
            await attempt.send(partial(self._found_other, attempt))
        except LeftError:
            self._num_moves += 1
            attempt.migration = PLANNED
            attempt.finish(CANCELLED, counts=False)
            raise
        except RemovedError:
            await self._give_up(attempt, instance_id, REMOVED)
            raise EngineFailedError("removed", ApiError(503, REMOVED)) from None
        except (ConnectionError, TimeoutError) as error:
            self.context.failed_lately.failed(instance_id)
            self._exclude_ranks(attempt.destination, error)
            self.deaths.failed(instance_id, error, attempt.sent_s)
            if held is not None and not held.usable_after(error):
                self._held = None
            await self._give_up(attempt, instance_id, str(error))
            raise EngineFailedError(type(error).__name__, engine_error(error)) from None
        if self._found is not None:  # the response came first
            found, self._found = self._found, None
            await self.placing.give_back(found)
        await self._check(attempt)

    def _exclude_ranks(self, destination: Destination, error: Exception) -> None:
        """Exclude all ranks of an engine that cannot be reached: they share its URL."""
        if isinstance(error, ConnectError):
            for name in self.context.last_resort.ranks_beside(destination):
                self.context.failed_lately.failed(name)
                self.placing.exclude(name)

    async def _check(self, attempt: UpstreamAttempt) -> None:
        """Raise EngineFailedError for a response that another engine may not give."""
        instance_id, held, status = attempt.destination.instance_id, attempt.held, attempt.status
        if status in RETRIED:
            self.deaths.replied(instance_id, attempt.body, attempt.sent_s)
        if held is not None and attempt.has_failed_to_fetch():
            self._held = None
            self._num_failed_fetches += 1
            again = self._num_failed_fetches >= MAX_FAILED_FETCHES
            reason = FAILED if again else CANCELLED  # the first one counts for the prefill instance
            await self._give_up(attempt, held.instance_id, "the KV blocks could not be fetched", reason)
            if again:
                self.placing.exclude(instance_id)
                self.placing.undivided = True
            if status == SERVER_ERROR:
                raise EngineFailedError("fetch", attempt)
            raise EngineFailedError("fetch", ApiError(BAD_GATEWAY, "the engine could not fetch the prompt's KV blocks"))
        if status in RETRIED:
            if status in NOT_SERVING:
                self.context.failed_lately.failed(instance_id)
            if held is not None and not held.usable_after(None):
                self._held = None
            await self._give_up(attempt, instance_id, f"status {status}")
            raise EngineFailedError(str(status), attempt)
        self.context.failed_lately.succeeded(instance_id)

    async def _give_up(
        self,
        attempt: UpstreamAttempt,
        instance_id: str,
        why: str,
        reason: common_pb2.FinishReason.ValueType = FAILED,
    ) -> None:
        """Exclude an instance from the next decision, and release what this one reserved, with the reason."""
        log_event(
            log, logging.INFO, "engine failed", request_id=self.incoming.request.request_id, instance_id=instance_id,
            why=why,
        )  # fmt: skip
        self.placing.exclude(instance_id)
        if instance_id == attempt.destination.instance_id:
            attempt.finish(reason, counts=self._counts)
        else:  # the instance may be chosen again
            await attempt.finish_now(reason, counts=self._counts)

    def _may_retry(self, number: int, why: str) -> bool:
        if number >= self.context.settings.attempts or self.deaths.is_exhausted or not self.context.budget.spend():
            return False
        self.context.metrics.retries.labels(why).inc()
        return True

    async def _pass_on(self, attempt: UpstreamAttempt) -> None:
        """Pass on a response in one piece."""
        attempt.finish()
        if self.attainment is not None:
            self.attainment.refused(attempt.status)
        await self.call.reply(attempt.status, self._headers(attempt), attempt.body)

    async def _stream(self, attempt: UpstreamAttempt) -> None:
        """Pass on a stream as it arrives; another engine continues it where its own fails."""
        relay = StreamRelay(
            context=self.context,
            incoming=self.incoming,
            call=self.call,
            attempt=attempt,
            forward=self._continue,
            deaths=self.deaths,
            attainment=self.attainment,
        )
        await relay.run(self._headers(attempt))

    async def _continue(self, incoming: Incoming, earlier: EarlierPart, left: list[str]) -> UpstreamAttempt:
        """Have another engine continue a stream, which left some instances; ApiError where none does."""
        placing = Placing(shared=self.context, incoming=incoming)
        for instance_id in left:
            placing.exclude(instance_id)
        follower = RequestForwarder(
            context=self.context,
            incoming=incoming,
            call=self.call,
            placing=placing,
            earlier=earlier,
        )
        follower.deaths = self.deaths
        attempt = await follower._response()
        if not attempt.is_stream:
            attempt.finish(counts=False)
            raise ApiError(BAD_GATEWAY, f"the next engine replies with status {attempt.status}")
        return attempt

    def _headers(self, attempt: UpstreamAttempt) -> Headers:
        """Return the engine's headers, and add the decision and its forecast."""
        destination = attempt.destination
        headers = [pair for pair in attempt.headers if pair[0] not in OWN_HEADERS]
        headers += (
            (b"x-block-instance", destination.instance_id.encode("ascii", "replace")),
            (b"x-block-policy", destination.policy.encode("ascii", "replace")),
            (b"x-block-decision-ms", b"%.2f" % (self.placing.took_s * 1000)),
        )
        if destination.decision is not None:
            headers += decision_headers(destination.decision, explain=self.incoming.explain)
        if self._disaggregation:
            headers.append((b"x-block-disaggregation", self._disaggregation.encode("ascii", "replace")))
        if attempt.held is not None:
            headers.append((b"x-block-prefill-instance", attempt.held.instance_id.encode("ascii", "replace")))
        if log.isEnabledFor(logging.DEBUG):
            log_event(
                log, logging.DEBUG, "request placed", request_id=self.incoming.request.request_id,
                instance_id=destination.instance_id, policy=destination.policy,
                decision_ms=self.placing.took_s * 1000, status=attempt.status,
            )  # fmt: skip
        return headers
