"""A forecast as a value; it imports no kernels, so that programs without an engine model start fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

# How far a forecast is simulated: to the end, or until it is known which deadlines are kept. `OTHERS_KEPT`: those of
# the other requests, whatever becomes of this one's; `OTHERS_KEPT_AND_START`: and when this one starts. `FIRST_TOKEN`:
# until the request has its first token.
TO_THE_END, ALL_KEPT, OTHERS_KEPT, OTHERS_KEPT_AND_START, FIRST_TOKEN = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastDetail:
    """What a forecast says of the other requests: nothing, all, or with `only_deadlines` whether they keep these.

    Then the least slack is only known to be at least `min_slack_s`, or not.
    """

    delays: bool = False
    only_deadlines: bool = False
    min_slack_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predicted latencies of a request; times count from now and are infinite where the engine never gets there.

    The delays are what the request adds to the end of the other requests, in sum and for the one that is delayed most,
    and `others_preempted` the preemptions that it causes among them; None if they were not forecast. `fetched_s` is
    when the KV blocks of a decode leg have been fetched; None for other requests.

    `attained` is whether all tokens come by their deadlines (true without deadlines), as a probability where several
    lengths were tried. `others_missed` counts the other requests that miss a deadline because of this one and would
    not without it, on average over these lengths. The gain is the summed weight of the tokens that come by their
    deadlines from now on, without and with this request, and `least_slack_s` the least time to its deadline at which
    a token comes in time, of requests none of whose tokens were late before; infinite without deadlines.

    `prefix_hit_tokens` are None where it is not known what is cached; the times are then those without a hit.
    `unmeasured` is the share of the simulated time in steps whose batches lie outside of what the profile measured.
    `offloaded_hit_tokens` of the prompt are on an off-loading tier, behind the prefix hits.
    `approximations` are sentences of `predictor.approximations`.
    """

    request_id: str
    ttft_s: float
    e2e_s: float
    tpot_s: float
    queue_s: float
    output_tokens: int
    num_preemptions: int
    prefix_hit_tokens: int | None
    others_preempted: int | None = None
    delay_sum_s: float | None = None
    delay_worst_s: float | None = None
    fetched_s: float | None = None
    attained: float = 1.0
    others_missed: float | None = None
    gain_before: float | None = None
    gain_after: float | None = None
    least_slack_s: float | None = None
    unmeasured: float = 0.0
    approximations: tuple[str, ...] = ()
    offloaded_hit_tokens: int = 0


def averaged(forecasts: Sequence[Forecast], request_id: str) -> Forecast:
    """Return one forecast of a request that was simulated with equally likely lengths, in their order.

    What concerns deadlines is the mean, everything else that of the middle length.
    """
    middle = forecasts[len(forecasts) // 2]
    if len(forecasts) == 1:
        return middle
    return replace(
        middle,
        request_id=request_id,
        attained=fmean(one.attained for one in forecasts),
        others_missed=_mean([one.others_missed for one in forecasts]),
        gain_before=_mean([one.gain_before for one in forecasts]),
        gain_after=_mean([one.gain_after for one in forecasts]),
    )


def merged(forecasts: Sequence[Forecast], request_id: str, leaders: Sequence[int]) -> Forecast:
    """Return one forecast of requests that arrive together: from the first token of any to the last token of all.

    The time per token is that of the request that ends last, and prefix hits are those of the first request of each
    prompt, its `leaders`. The first forecast has the effects of all on other requests.
    """
    last = max(forecasts, key=lambda one: one.e2e_s)
    hits = [hit for leader in leaders if (hit := forecasts[leader].prefix_hit_tokens) is not None]
    return replace(
        forecasts[0],
        request_id=request_id,
        ttft_s=min(one.ttft_s for one in forecasts),
        e2e_s=last.e2e_s,
        tpot_s=last.tpot_s,
        queue_s=min(one.queue_s for one in forecasts),
        output_tokens=sum(one.output_tokens for one in forecasts),
        num_preemptions=sum(one.num_preemptions for one in forecasts),
        prefix_hit_tokens=sum(hits) if len(hits) == len(leaders) else None,
        fetched_s=None if last.fetched_s is None else max(one.fetched_s or 0.0 for one in forecasts),
        attained=min(one.attained for one in forecasts),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
