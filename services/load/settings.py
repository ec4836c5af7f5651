"""Settings of `block bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from services.settings import Option, default_of
from simulator.load_plan import LENGTH_FORMS, Timing

DEFAULT_RATE = 4.0
DEFAULT_REQUESTS = 100
# the help of options that other commands have as well
MIX_HELP = "File with a mix: shares of requests with their class, priority, weight and targets."
OBJECTIVES_HELP = "File with a table [[objective]] for each name that entries of the mix may have as their objective."
PRIORITY_WEIGHT_HELP = (
    "Weight of a priority in the gain, beside the requests' own weights; 1 where it is not given. Repeatable."
)
FIRST_WEIGHT_HELP = "Weight of a first token in the gain, as a multiple of a later one's."


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The requests of a load test, when they are sent, and what is reported."""

    model: Annotated[str, Option("Model to request.", unset="the only one that the endpoint lists")] = ""
    trace: Annotated[
        str,
        Option(
            "Trace: requests as `block replay` reads them, or in the format of Azure, Mooncake, BurstGPT, Vidur or "
            "LLMServingSim.",
            metavar="FILE",
        ),
    ] = ""
    num_requests: Annotated[
        int | None, Option("Number of requests.", short="-n", unset=f"all of a trace, otherwise {DEFAULT_REQUESTS}")
    ] = None
    warm_up: Annotated[int, "Number of first requests that are left out of the report."] = 0
    prompt_tokens: Annotated[str, f"Prompt lengths without a trace: {LENGTH_FORMS}."] = "lognormal:128:1"
    output_tokens: Annotated[str, "Response lengths without a trace, in the same forms."] = "lognormal:128:0.8"
    arrivals: Annotated[
        str,
        Option(
            "Arrival process: poisson, gamma, uniform, or trace, the trace's own times.",
            unset="trace for a trace with times and no --rate, otherwise poisson",
        ),
    ] = ""
    rate: Annotated[float | None, Option("Requests per second on average.", unset=f"{DEFAULT_RATE:g}")] = None
    cv: Annotated[float, "Coefficient of variation of the gaps of gamma arrivals: 1 is Poisson, above is burstier."] = (
        default_of(Timing, "cv")
    )
    speed: Annotated[float, "Speed at which the times of a trace are replayed."] = default_of(Timing, "speed")
    slo_ttft_ms: Annotated[float | None, "TTFT target in milliseconds, for goodput; it is sent with every request."] = (
        None
    )
    slo_tpot_ms: Annotated[float | None, "TPOT target in milliseconds, for goodput; it is sent with every request."] = (
        None
    )
    mix: Annotated[
        str,
        Option(MIX_HELP, metavar="TOML"),
    ] = ""
    objectives: Annotated[
        str,
        Option(
            f"{OBJECTIVES_HELP} It is only for the report: the endpoint gets the name and has its own table.",
            metavar="TOML",
        ),
    ] = ""
    priority_weight: Annotated[
        tuple[str, ...],
        Option(
            PRIORITY_WEIGHT_HELP,
            metavar="PRIORITY=WEIGHT",
            environment=False,
        ),
    ] = ()
    first_token_weight: Annotated[float, FIRST_WEIGHT_HELP] = 1.0
    header: Annotated[
        tuple[str, ...],
        Option(
            "Header that is sent with every request. Repeatable.", short="-H", metavar="NAME: VALUE", environment=False
        ),
    ] = ()
    csv: Annotated[str, Option("File for one line per request.", metavar="FILE")] = ""
    window: Annotated[
        str,
        Option(
            "File of a window for `block accuracy`, of the one engine at URL; behind a gateway, one file for each "
            "instance, with its name before the ending.",
            metavar="FILE",
        ),
    ] = ""
    html: Annotated[str, Option("File for a page with charts of the latencies and forecasts.", metavar="FILE")] = ""
