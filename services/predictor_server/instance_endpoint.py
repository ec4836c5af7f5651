"""The messages of block.v1.Predictor about one instance: its sidecar's forecasts, reservations and indicators."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from predictor.approximations import UNKNOWN_PREFIXES, joined
from predictor.config import EngineConfig
from predictor.engine_view import EngineView
from predictor.forecast_result import Forecast, ForecastDetail
from predictor.indicators import adapters_of
from predictor.request_group import Placeable
from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.reservations import Reservation
from services.predictor_server.engine_source import DownError
from services.predictor_server.input_approximations import input_approximations
from services.predictor_server.sidecar import Refusal, Sidecar
from services.rpc.errors import BusyError
from services.rpc.messages import forecast_from, forecast_message, indicators_message, require_name
from services.rpc.request_groups import approximations_of, placeable_from, with_delay
from simulator.codec import snapshot_json

MIN_WATCH_S = 0.02
DEFAULT_WATCH_S = 0.1
MAX_UNCHANGED = 5  # intervals without a message of Watch, so that an idle engine's indicators do not become stale

RESERVED = predictor_pb2.RESERVE_RESULT_RESERVED
EXTENDED = predictor_pb2.RESERVE_RESULT_EXTENDED
CONFLICT = predictor_pb2.RESERVE_RESULT_CONFLICT
REFUSED = predictor_pb2.RESERVE_RESULT_REFUSED


class InstanceEndpoint:
    """Translates between messages and one engine's sidecar."""

    def __init__(self, sidecar: Sidecar) -> None:
        """Serve a sidecar."""
        self.name = sidecar.settings.instance_id
        self._sidecar = sidecar
        self._epoch = secrets.randbits(64)
        self._indicators: tuple[int, int, common_pb2.Indicators] | None = None  # of a view and number of reservations

    def replies_at_once(self, num_requests: int) -> bool:
        """Return whether forecasts need neither the lock of another call nor a thread, as far as is known."""
        return not self._sidecar.lock.locked() and self._sidecar.simulates_here(num_requests)

    async def predict(self, request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
        """Forecast each request, and return the indicators."""
        start_s = time.perf_counter()
        sidecar = self._sidecar
        async with sidecar.lock:
            response = predictor_pb2.PredictResponse(
                instance_id=self.name, version=sidecar.reservations.version, epoch=self._epoch
            )
            try:
                view = sidecar.view()
            except DownError as error:
                response.state = error.state
                return response
            response.state = sidecar.state()
            response.indicators.CopyFrom(self._indicators_of(view))
            detail = None if request.without_forecasts else _detail_of(request)
            predictions = await self._predictions(view, request.requests, detail)
            response.predictions.extend(predictions)
        response.predict_s = time.perf_counter() - start_s
        sidecar.metrics.predict_s.observe(response.predict_s)
        return response

    async def reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        """Make a reservation, unless another was made since the version that it names."""
        require_name("request.request_id", request.request.request_id)
        max_ttl_s = self._sidecar.settings.longest_reservation_s
        if not 0 < request.ttl_s <= max_ttl_s:
            raise ValueError(f"ttl_s: must be above 0 and at most {max_ttl_s:g}, not {request.ttl_s}")
        if not 0 <= request.request.in_s <= max_ttl_s:
            raise ValueError(f"request.in_s: must be at least 0 and at most {max_ttl_s:g}, not {request.request.in_s}")
        if request.HasField("if_version") != request.HasField("if_epoch"):
            raise ValueError("if_version: must be set together with if_epoch")
        async with self._sidecar.lock:
            response = await self._reserve(request)
        self._sidecar.metrics.count_reserve(predictor_pb2.ReserveResult.Name(response.result)[15:].lower())
        return response

    async def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """Release a reservation."""
        async with self._sidecar.lock:
            released = self._sidecar.release(request.request_id)
            try:
                indicators = self._indicators_of(self._sidecar.view())
            except DownError:
                indicators = None
        return common_pb2.ReleaseResponse(released=released, indicators=indicators)

    async def watch(self, request: predictor_pb2.WatchRequest) -> AsyncIterator[predictor_pb2.WatchResponse]:
        """Return the indicators whenever they change, and from time to time that they have not changed."""
        interval_s = max(MIN_WATCH_S, request.min_interval_s or DEFAULT_WATCH_S)
        sequence, num_silent, last = 0, 0, predictor_pb2.WatchResponse()
        known: Mapping[str, float] = {}
        while True:
            async with self._sidecar.lock:
                response, values = self._current(with_snapshot=request.with_snapshots)
            changed = {name: value for name, value in values.items() if known.get(name) != value}
            removed = known.keys() - values.keys()
            is_new = changed or removed or (response.state, response.version) != (last.state, last.version)
            num_silent += 1
            if is_new or sequence == 0 or num_silent >= MAX_UNCHANGED:
                sequence, num_silent = sequence + 1, 0
                response.full = sequence == 1 or bool(removed)
                response.sequence = sequence
                age_s, source = response.indicators.age_s, response.indicators.source
                sent = values if response.full else changed
                adapters = response.indicators.active_adapters, response.indicators.cached_adapters
                message = indicators_message(sent, age_s=age_s, source=source)
                message.active_adapters.extend(adapters[0])
                message.cached_adapters.extend(adapters[1])
                response.indicators.CopyFrom(message)
                known, last = values, response
                yield response
            await asyncio.sleep(interval_s)

    async def _predictions(
        self, view: EngineView, messages: Any, detail: ForecastDetail | None
    ) -> list[predictor_pb2.Prediction]:
        """Forecast the valid requests, or with None only read them, and refuse the others; in the order of messages."""
        sidecar = self._sidecar
        read: list[Placeable | Refusal] = [
            self._request_or_refusal(message, view, known_as=f"candidate/{number}")
            for number, message in enumerate(messages)
        ]
        requests = [one for one in read if not isinstance(one, Refusal)]
        made = [None] * len(requests) if detail is None else await sidecar.forecast(view, requests, detail)
        forecasts = iter(made)
        results = [one if isinstance(one, Refusal) else next(forecasts) for one in read]
        for result in results if detail is not None else ():
            sidecar.metrics.count_forecast("refused" if isinstance(result, Refusal) else "made")
        return [
            _prediction(message, _naming_approximations(result, message, request, view))
            for message, request, result in zip(messages, read, results, strict=True)
        ]

    async def _reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        sidecar = self._sidecar
        response = predictor_pb2.ReserveResponse(
            instance_id=self.name,
            version=sidecar.reservations.version,
            epoch=self._epoch,
            expires_in_s=request.request.in_s + request.ttl_s,
        )
        response.state = sidecar.state()
        try:
            view = sidecar.view()
        except DownError as error:
            response.state = error.state
            return _refuse(response, str(error))
        is_known = request.request.request_id in sidecar.reservations
        is_stale = (request.if_version, request.if_epoch) != (sidecar.reservations.version, self._epoch)
        if sidecar.is_draining and not is_known:
            _refuse(response, "the sidecar is draining and takes no new reservations")
        elif request.HasField("if_version") and is_stale and not is_known:
            response.result = CONFLICT
            # the decision may depend on what it does to others
            detail = ForecastDetail(delays=request.forecast.HasField("others_missed"))
            (prediction,) = await self._predictions(view, [request.request], detail)
            response.prediction.CopyFrom(prediction)
        elif sidecar.reservations.is_full and not is_known:
            raise BusyError(f"{len(sidecar.reservations)} requests are reserved, which is the limit")
        else:
            self._add_reservation(request, view, response)
        response.version = sidecar.reservations.version
        response.indicators.CopyFrom(self._indicators_of(view))
        if response.result in (CONFLICT, REFUSED):
            response.expires_in_s = 0.0
        return response

    def _add_reservation(
        self, message: predictor_pb2.ReserveRequest, view: EngineView, response: predictor_pb2.ReserveResponse
    ) -> None:
        """Make or extend a reservation, or refuse a request that the engine could never serve."""
        request = self._request_or_refusal(message.request, view)
        if not isinstance(request, Refusal):
            reservation = Reservation(
                request=request,
                until_s=time.monotonic() + message.request.in_s + message.ttl_s,
                forecast=_since_arrival(message) if message.HasField("forecast") else None,
                policy=message.policy,
                holder=message.holder,
            )
            try:
                is_new = self._sidecar.reserve(reservation)
            except ValueError as error:
                field, _, reason = str(error).partition(": ")
                request = Refusal(field=field, reason=reason)
            else:
                if is_new and message.request.grammar:
                    self._note_grammar(message.request, reservation.forecast)
                response.result = RESERVED if is_new else EXTENDED
                return
        assert isinstance(request, Refusal)
        response.result = REFUSED
        response.prediction.CopyFrom(_prediction(message.request, request))

    def _note_grammar(self, message: common_pb2.Request, forecast: Forecast | None) -> None:
        """Note that the engine will have compiled the grammar of a request."""
        ttft_s = None if forecast is None else forecast.ttft_s
        self._sidecar.grammars.begin(message.grammar, time.monotonic(), request_id=message.request_id, ttft_s=ttft_s)

    def _request_or_refusal(
        self, message: common_pb2.Request, view: EngineView, known_as: str = ""
    ) -> Placeable | Refusal:
        """Read a request for the engine; one whose grammar is not compiled arrives later."""
        try:
            request = placeable_from(
                message,
                now_s=view.now_s,
                clock_rate=view.clock_rate,
                block_size=view.engine.config.block_size,
                known_as=known_as,
                longest_prompt=_longest_prompt(view.engine.config),
                shares_prompts=view.engine.tracks_blocks,
            )
        except ValueError as error:
            field, _, reason = str(error).partition(": ")
            return Refusal(field=field, reason=reason)
        if not message.grammar:
            return request
        return with_delay(request, self._sidecar.grammars.delay_s(message.grammar, time.monotonic()) * view.clock_rate)

    def _current(self, *, with_snapshot: bool) -> tuple[predictor_pb2.WatchResponse, dict[str, float]]:
        """Return a message of Watch without its indicators, and the indicators."""
        sidecar = self._sidecar
        response = predictor_pb2.WatchResponse(
            instance_id=self.name, version=sidecar.reservations.version, epoch=self._epoch
        )
        response.indicators.source = sidecar.source.kind
        try:
            view = sidecar.view()
            if with_snapshot:  # this reads the state again, so the engine can be down although its view is fresh
                response.snapshot_json = snapshot_json(sidecar.snapshot()).encode()
        except DownError as error:
            response.state = error.state
            return response, {}
        response.state = sidecar.state()
        response.indicators.age_s = view.age_s
        _put_adapters(response.indicators, view)
        return response, sidecar.indicators(view)

    def _indicators_of(self, view: EngineView) -> common_pb2.Indicators:
        """Return the indicators' message, made once for each change of the view."""
        key = (view.serial, len(self._sidecar.reservations))
        if self._indicators is None or self._indicators[:2] != key:
            made = indicators_message(self._sidecar.indicators(view), age_s=0.0, source=self._sidecar.source.kind)
            _put_adapters(made, view)
            self._indicators = (*key, made)
        message = self._indicators[2]
        message.age_s = view.age_s
        return message


def _put_adapters(message: common_pb2.Indicators, view: EngineView) -> None:
    """Write the LoRA adapters of an engine."""
    if view.engine.config.max_loras:
        active, cached = adapters_of(view.engine)
        message.active_adapters.extend(active)
        message.cached_adapters.extend(cached)


def _refuse(response: predictor_pb2.ReserveResponse, reason: str) -> predictor_pb2.ReserveResponse:
    """Refuse a reservation for a reason that does not depend on the request."""
    response.result, response.expires_in_s = REFUSED, 0.0
    response.prediction.refusal.reason = reason
    return response


def _detail_of(request: predictor_pb2.PredictRequest) -> ForecastDetail:
    """Return what forecasts say of other requests."""
    if not 0 <= request.min_slack_s < math.inf:
        raise ValueError(f"min_slack_s: must be at least 0 and finite, not {request.min_slack_s}")
    return ForecastDetail(
        delays=request.with_delays, only_deadlines=request.only_deadlines, min_slack_s=request.min_slack_s
    )


def _naming_approximations(
    result: Forecast | Refusal | None, message: common_pb2.Request, request: Placeable | Refusal, view: EngineView
) -> Forecast | Refusal | None:
    """Add to a forecast what it only approximates."""
    if not isinstance(result, Forecast) or isinstance(request, Refusal):
        return result
    named = joined(view.approximations, approximations_of(message, request), input_approximations(message, view))
    if _knows_hits(message, view):
        return replace(result, approximations=named) if named else result
    return replace(result, approximations=named, prefix_hit_tokens=None)


def _knows_hits(message: common_pb2.Request, view: EngineView) -> bool:
    """Return whether it is known how much of a request's prompt the engine has cached."""
    is_named = message.prefix_block_tokens == view.engine.config.block_size and (
        bool(message.prefix_hashes) or any(prompt.prefix_hashes for prompt in message.prompts)
    )
    return view.engine.knows_hits(is_named=is_named and UNKNOWN_PREFIXES not in view.approximations)


def _longest_prompt(config: EngineConfig) -> int:
    """Return the longest prompt of an engine that leaves room for one token."""
    return max(1, min(config.max_model_len, (config.num_gpu_blocks - 1) * config.block_size) - 1)


def _since_arrival(message: predictor_pb2.ReserveRequest) -> Forecast:
    """Read a forecast; its times then count from the request's arrival at the engine, as the engine's own do."""
    forecast, in_s = forecast_from(message.forecast), message.request.in_s
    return replace(forecast, ttft_s=max(0.0, forecast.ttft_s - in_s), e2e_s=max(0.0, forecast.e2e_s - in_s))


def _prediction(message: common_pb2.Request, result: Forecast | Refusal | None) -> predictor_pb2.Prediction:
    prediction = predictor_pb2.Prediction(request_id=message.request_id)
    if isinstance(result, Refusal):
        prediction.refusal.field, prediction.refusal.reason = result.field, result.reason
    elif result is not None:
        prediction.forecast.CopyFrom(forecast_message(result))
        prediction.forecast.request_id = message.request_id
        if result.prefix_hit_tokens is not None:
            prediction.prefix_hit_tokens = result.prefix_hit_tokens
            prediction.new_prefill_tokens = max(0, message.prompt_tokens - result.prefix_hit_tokens)
    return prediction
