"""What one instance answers, as messages of block.v1.Predictor; what they say is its sidecar's."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from predictor.forecast import Forecast
from predictor.request import Request
from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.reservations import Promise
from services.predictor_server.engine_view import DownError, EngineView
from services.predictor_server.sidecar import Refused, Sidecar
from services.rpc.errors import BusyError
from services.rpc.messages import forecast_from, forecast_message, indicators_message, request_from, require_name
from simulator.codec import snapshot_json

LEAST_INTERVAL_S = 0.02
USUAL_INTERVAL_S = 0.1
ALL_IS_AS_IT_WAS = 5  # intervals after which that is told too: what an idle engine told does not look stale

RESERVED = predictor_pb2.RESERVE_RESULT_RESERVED
EXTENDED = predictor_pb2.RESERVE_RESULT_EXTENDED
CONFLICT = predictor_pb2.RESERVE_RESULT_CONFLICT
REFUSED = predictor_pb2.RESERVE_RESULT_REFUSED


class InstanceEndpoint:
    """Translates between messages and one engine's sidecar."""

    def __init__(self, sidecar: Sidecar) -> None:
        """Answer for a sidecar."""
        self.name = sidecar.settings.instance_id
        self._sidecar = sidecar
        self._epoch = secrets.randbits(64)
        self._summed_up: tuple[int, int, common_pb2.Indicators] | None = None

    def answers_at_once(self, num_requests: int) -> bool:
        """Tell whether an answer needs nobody else's leave and no thread, as far as is known."""
        return not self._sidecar.lock.locked() and self._sidecar.simulates_here(num_requests)

    async def predict(self, request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
        """Forecast each request, and tell the indicators."""
        start_s = time.perf_counter()
        sidecar = self._sidecar
        async with sidecar.lock:
            response = predictor_pb2.PredictResponse(
                instance_id=self.name, version=sidecar.reservations.version, epoch=self._epoch
            )
            try:
                picture = sidecar.picture()
            except DownError as error:
                response.state = error.state
                return response
            response.state = sidecar.state_of()
            response.indicators.CopyFrom(self._indicators(picture))
            predictions = await self._predictions(
                picture, request.requests, delays=request.with_delays, simulate=not request.without_forecasts
            )
            response.predictions.extend(predictions)
        response.predict_s = time.perf_counter() - start_s
        sidecar.measures.predict_s.observe(response.predict_s)
        return response

    async def reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        """Promise a place, unless others came first."""
        require_name("request.request_id", request.request.request_id)
        longest_s = self._sidecar.settings.longest_reservation_s
        if not 0 < request.ttl_s <= longest_s:
            raise ValueError(f"ttl_s: must be above 0 and at most {longest_s:g}, not {request.ttl_s}")
        if request.HasField("if_version") != request.HasField("if_epoch"):
            raise ValueError("if_version: goes with if_epoch")
        async with self._sidecar.lock:
            response = await self._reserve(request)
        self._sidecar.measures.reserved(predictor_pb2.ReserveResult.Name(response.result)[15:].lower())
        return response

    async def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """End a promise."""
        async with self._sidecar.lock:
            released = self._sidecar.release(request.request_id)
            try:
                indicators = self._indicators(self._sidecar.picture())
            except DownError:
                indicators = None
        return common_pb2.ReleaseResponse(released=released, indicators=indicators)

    async def watch(self, request: predictor_pb2.WatchRequest) -> AsyncIterator[predictor_pb2.WatchResponse]:
        """Tell the indicators whenever they change, and now and then that they have not; the whole state if wanted."""
        interval_s = max(LEAST_INTERVAL_S, request.min_interval_s or USUAL_INTERVAL_S)
        sequence, num_silent, told = 0, 0, predictor_pb2.WatchResponse()
        known: Mapping[str, float] = {}
        while True:
            async with self._sidecar.lock:
                response, values = self._seen(with_snapshot=request.with_snapshots)
            changed = {name: value for name, value in values.items() if known.get(name) != value}
            gone = known.keys() - values.keys()
            is_new = changed or gone or (response.state, response.version) != (told.state, told.version)
            num_silent += 1
            if is_new or sequence == 0 or num_silent >= ALL_IS_AS_IT_WAS:
                sequence, num_silent = sequence + 1, 0
                response.full = sequence == 1 or bool(gone)
                response.sequence = sequence
                age_s, source = response.indicators.age_s, response.indicators.source
                shown = values if response.full else changed
                response.indicators.CopyFrom(indicators_message(shown, age_s=age_s, source=source))
                known, told = values, response
                yield response
            await asyncio.sleep(interval_s)

    async def _predictions(
        self, picture: EngineView, messages: Any, *, delays: bool, simulate: bool
    ) -> list[predictor_pb2.Prediction]:
        """Forecast what makes sense, refuse what does not, in the order of the questions."""
        sidecar = self._sidecar
        read: list[Request | Refused] = [
            _request_or_refusal(one, picture, known_as=f"candidate/{place}") for place, one in enumerate(messages)
        ]
        requests = [one for one in read if isinstance(one, Request)]
        made = await sidecar.forecast(picture, requests, delays=delays) if simulate else [None] * len(requests)
        forecasts = iter(made)
        answers = [one if isinstance(one, Refused) else next(forecasts) for one in read]
        for answer in answers if simulate else ():
            sidecar.measures.forecast("refused" if isinstance(answer, Refused) else "made")
        return [_prediction(message, answer, picture) for message, answer in zip(messages, answers, strict=True)]

    async def _reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        sidecar = self._sidecar
        response = predictor_pb2.ReserveResponse(
            instance_id=self.name, version=sidecar.reservations.version, epoch=self._epoch, expires_in_s=request.ttl_s
        )
        response.state = sidecar.state_of()
        try:
            picture = sidecar.picture()
        except DownError as error:
            response.state = error.state
            return _refused(response, str(error))
        again = request.request.request_id in sidecar.reservations
        stale = (request.if_version, request.if_epoch) != (sidecar.reservations.version, self._epoch)
        if sidecar.is_draining and not again:
            _refused(response, "takes nothing new, as it is about to end")
        elif request.HasField("if_version") and stale and not again:
            response.result = CONFLICT
            (prediction,) = await self._predictions(picture, [request.request], delays=False, simulate=True)
            response.prediction.CopyFrom(prediction)
        elif sidecar.reservations.is_full and not again:
            raise BusyError(f"{len(sidecar.reservations)} requests are promised, as many as may be")
        else:
            self._promise(request, picture, response)
        response.version = sidecar.reservations.version
        response.indicators.CopyFrom(self._indicators(picture))
        if response.result in (CONFLICT, REFUSED):
            response.expires_in_s = 0.0
        return response

    def _promise(
        self,
        request: predictor_pb2.ReserveRequest,
        picture: EngineView,
        response: predictor_pb2.ReserveResponse,
    ) -> None:
        promised = _request_or_refusal(request.request, picture)
        if isinstance(promised, Request):
            promise = Promise(
                request=promised,
                until_s=time.monotonic() + request.ttl_s,
                forecast=forecast_from(request.forecast) if request.HasField("forecast") else None,
                policy=request.policy,
                holder=request.holder,
            )
            try:
                new = self._sidecar.reserve(promise)
            except ValueError as error:
                field, _, reason = str(error).partition(": ")
                promised = Refused(field=field, reason=reason)
            else:
                response.result = RESERVED if new else EXTENDED
                return
        response.result = REFUSED
        response.prediction.CopyFrom(_prediction(request.request, promised, picture))

    def _seen(self, *, with_snapshot: bool) -> tuple[predictor_pb2.WatchResponse, dict[str, float]]:
        sidecar = self._sidecar
        response = predictor_pb2.WatchResponse(
            instance_id=self.name, version=sidecar.reservations.version, epoch=self._epoch
        )
        try:
            picture = sidecar.picture()
        except DownError as error:
            response.state = error.state
            response.indicators.source = sidecar.source.kind
            return response, {}
        response.state = sidecar.state_of()
        response.indicators.age_s, response.indicators.source = picture.age_s, sidecar.source.kind
        if with_snapshot:
            response.snapshot_json = snapshot_json(sidecar.snapshot()).encode()
        return response, sidecar.indicators(picture)

    def _indicators(self, picture: EngineView) -> common_pb2.Indicators:
        """Sum a picture up, unless that has been done already."""
        key = (picture.serial, len(self._sidecar.reservations))
        if self._summed_up is None or self._summed_up[:2] != key:
            told = indicators_message(self._sidecar.indicators(picture), age_s=0.0, source=self._sidecar.source.kind)
            self._summed_up = (*key, told)
        message = self._summed_up[2]
        message.age_s = picture.age_s
        return message


def _refused(response: predictor_pb2.ReserveResponse, reason: str) -> predictor_pb2.ReserveResponse:
    """Have an answer say that whatever the request is, it is not taken now."""
    response.result, response.expires_in_s = REFUSED, 0.0
    response.prediction.refusal.reason = reason
    return response


def _request_or_refusal(message: common_pb2.Request, picture: EngineView, known_as: str = "") -> Request | Refused:
    try:
        return request_from(
            message,
            now_s=picture.now_s,
            clock_rate=picture.clock_rate,
            block_size=picture.engine.config.block_size,
            known_as=known_as,
        )
    except ValueError as error:
        field, _, reason = str(error).partition(": ")
        return Refused(field=field, reason=reason)


def _prediction(
    message: common_pb2.Request, answer: Forecast | Refused | None, picture: EngineView
) -> predictor_pb2.Prediction:
    prediction = predictor_pb2.Prediction(request_id=message.request_id)
    if isinstance(answer, Refused):
        prediction.refusal.field, prediction.refusal.reason = answer.field, answer.reason
    elif answer is not None:
        prediction.forecast.CopyFrom(forecast_message(answer))
        prediction.forecast.request_id = message.request_id
        if picture.engine.tracks_blocks:
            prediction.prefix_hit_tokens = answer.prefix_hit_tokens
            prediction.new_prefill_tokens = max(0, message.prompt_tokens - answer.prefix_hit_tokens)
    return prediction
