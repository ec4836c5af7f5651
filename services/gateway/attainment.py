"""What a streamed response attains of its request's targets, as a client sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from predictor.gain import ResponseAttainment, count_on_time, missed, response_attainment
from predictor.request import REAL_TIME, Slo
from protos.block.v1 import common_pb2
from services.attainment import AttainmentTally, ClientTally
from services.gateway.incoming import Incoming
from services.gateway.metrics import GatewayMetrics
from services.http.proxying import SERVER_ERROR
from services.http.reply_format import FAILED
from services.http.sse import Ending, StreamReader
from services.rpc.messages import CLASSES
from services.rpc.request_groups import num_responses_of

BUSY = 429


@dataclass(slots=True, kw_only=True)
class StreamAttainment:
    """Measures one request; a client that leaves is not counted."""

    tally: AttainmentTally
    clients: ClientTally
    request: common_pb2.Request
    slo: Slo
    arrived_s: float
    _marks: list[tuple[int, float]] = field(default_factory=list)
    _earlier: list[tuple[int, float]] = field(default_factory=list)  # tokens, of engines that failed
    _num_earlier: int = 0

    def received(self, num_data: int, at_s: float) -> None:
        """Note when a piece of the stream came; `num_data` lines of data have come so far."""
        self._marks.append((num_data, at_s - self.arrived_s))

    def continues(self, reader: StreamReader, ending: Ending, num_tokens: int) -> None:
        """Keep what an engine delivered that failed; another one continues the stream."""
        base, most = self._num_earlier, num_tokens
        times = reader.token_times(self._marks, ending)
        self._earlier += [(min(base + so_far, most), time_s) for so_far, time_s in times]
        self._marks, self._num_earlier = [], num_tokens

    def refused(self, status: int) -> None:
        """Count a request without a response, unless that is the client's fault."""
        if status == BUSY or status >= SERVER_ERROR:
            self._add(missed(self.slo, 1))

    def ended(self, reader: StreamReader, ending: Ending, *, broken: bool = False) -> None:
        """Count a response that has ended."""
        base = self._num_earlier
        num_tokens = base + (ending.output_tokens if self._marks else 0)
        if broken or num_tokens == 0 or not self._marks or ending.finish_reason == FAILED:
            self._add(missed(self.slo, num_tokens))
            return
        times = reader.token_times(self._marks, ending)
        if base:
            times = [*self._earlier, *((base + so_far, time_s) for so_far, time_s in times)]
        num_responses = num_responses_of(self.request)
        if num_responses > 1:  # their tokens come side by side: they count as one response of their mean length
            num_tokens = max(1, num_tokens // num_responses)
            times = [(-(-so_far // num_responses), time_s) for so_far, time_s in times]
        end_s = self._marks[-1][1]
        ttft_s = next((time_s for so_far, time_s in times if so_far > 0), end_s)
        last_s = next((time_s for so_far, time_s in times if so_far >= num_tokens), end_s)
        self._add(
            response_attainment(
                self.slo,
                num_tokens=num_tokens,
                tokens_on_time=count_on_time(self.slo, times, num_tokens),
                ttft_s=ttft_s,
                tpot_s=(last_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None,
            )
        )

    def _add(self, attained: ResponseAttainment) -> None:
        request = self.request
        self.tally.add(
            attained,
            request_class=CLASSES.get(request.request_class, REAL_TIME),
            priority=request.priority,
            weight=request.weight if request.HasField("weight") else 1.0,
        )
        self.clients.add(attained, client_id=request.client_id, tpot_s=self.slo.tpot_s)


def attainment_of(incoming: Incoming, metrics: GatewayMetrics) -> StreamAttainment | None:
    """Return the measurement of a request with targets whose response is streamed; None for any other."""
    request = incoming.request
    if not (incoming.openai.stream and request.HasField("slo")):
        return None
    slo = Slo(
        ttft_s=request.slo.ttft_s if request.slo.HasField("ttft_s") else None,
        tpot_s=request.slo.tpot_s if request.slo.HasField("tpot_s") else None,
    )
    return StreamAttainment(
        tally=metrics.attainment,
        clients=metrics.client_attainment,
        request=request,
        slo=slo,
        arrived_s=incoming.arrived_s,
    )
