"""How good forecasts turn out to be: what was promised, kept beside what came of it."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.reservations import Promise
from services.predictor_server.engine_view import Ended
from services.predictor_server.metrics import InstanceMetrics

MOST_EXPECTED = 1 << 14
REMEMBERED = 0.95  # of the bias, from one request to the next


class ForecastErrors:
    """Remembers what requests that the engine has taken over were told, until they end."""

    def __init__(self, measures: InstanceMetrics) -> None:
        """Expect nothing yet."""
        self._measures = measures
        self._promises: dict[str, Promise] = {}
        self._bias: dict[str, float] = {}

    def __len__(self) -> int:
        """How many requests are expected to end."""
        return len(self._promises)

    def expect(self, promises: Iterable[Promise]) -> None:
        """Wait for the end of these requests; where there are too many, the oldest are given up."""
        for promise in promises:
            if promise.forecast is None:
                continue
            if len(self._promises) >= MOST_EXPECTED:
                del self._promises[next(iter(self._promises))]
            self._promises[promise.request.request_id] = promise

    def compare(self, ended: Iterable[Ended]) -> None:
        """Note the errors for requests that have ended; of those that did not complete there is nothing to learn."""
        for one in ended:
            promise = self._promises.pop(one.request_id, None)
            if promise is None or promise.forecast is None or not one.completed:
                continue
            forecast = promise.forecast
            self._note("ttft", forecast.ttft_s, one.ttft_s)
            self._note("e2e", forecast.e2e_s, one.e2e_s)
            self._note("output_tokens", forecast.output_tokens, one.output_tokens)
            if one.ttft_s is not None and one.e2e_s is not None and one.output_tokens > 1:
                self._note("tpot", forecast.tpot_s, (one.e2e_s - one.ttft_s) / (one.output_tokens - 1))

    def _note(self, quantity: str, predicted: float, actual: float | None) -> None:
        if actual is None or actual <= 0:
            return
        ratio = (predicted - actual) / actual
        bias = REMEMBERED * self._bias.get(quantity, ratio) + (1 - REMEMBERED) * ratio
        self._bias[quantity] = bias
        self._measures.erred(quantity, ratio, bias)
