"""What serving by deadlines costs at least: the optimum of PolyServe §3.5 by the profile's step time, and a bound.

§3.4: a step with B tokens, of which B_dc = B · d / (p + d) are decodes, takes T = GEMM(B) + DcAttn(B_dc · (p + d/2) +
p). T must be below the TPOT, and the context must fit into memory. §3.5: with the largest such B, a request costs
(p + d) · GEMM(B) / B + PF(p) + DcAttn(d · (p + d/2)) instance-seconds; with prefill and decode apart, each has a GEMM
term and a B of its own.

Here T is the step time of the profile, with whatever was added to it, and p and d are the means of a tier's requests. T
may be as long as the deadlines allow for a decode: the TPOT, and what is left of the TTFT after the prefill, spread
over the response. This is an optimum of engines that serve the same mix all the time. Engines that choose which
requests share a step can exceed it a little, in theory. `rate` is a bound for all engines (`slo_prices.py`). It leaves
out the requests that cost most as those that may miss, so that shedding the longest tenth cannot beat it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.gain import NO_TIER
from predictor.tabulated_costs import (
    ALONE,
    BESIDE,
    CONSTANT,
    PREFILL,
    PREFILL_TOKEN,
    SAMPLED,
    mean_context_seconds,
    tabulate,
)
from simulator.fleet import InstanceSpec
from simulator.request_needs import RequestNeeds, allowed_e2e_s, needs_of, the_only_kind
from simulator.slo_prices import least_costs_s
from simulator.workload import Workload

Floats = npt.NDArray[np.float64]

TIERS, MIXED, APART, MEMORY = KINDS = ("tiers", "mixed", "apart", "memory")
TITLES = {
    TIERS: "tiers apart",
    MIXED: "all mixed at the strictest TPOT",
    APART: "prefill and decode apart",
    MEMORY: "memory alone",
}
MIN_RUN = 5.0  # arrivals last at least so many times the allowed time of a response
PARTS = np.geomspace(1e-3, 0.999, 100)  # numbers of decodes in a step where most steps have none


@dataclass(frozen=True, slots=True, kw_only=True)
class SloBound:
    """Least instance-seconds of requests with deadlines, and the rates that they allow.

    `optimum_s` is per request, by kind of serving; it leaves out requests that no instance can serve in time. `tier_s`
    is per request of a TPOT target, where tiers are apart.
    """

    num_instances: int
    num_requests: int  # all of them, also those without deadlines, whose service costs nothing here
    tokens: Floats  # of prompt and response of each request with deadlines
    costs_s: Floats  # of each of these, at the prices of `slo_prices`; infinite: cannot attain
    optimum_s: Mapping[str, float]
    tier_s: Mapping[str, float]
    allowed_s: float  # P99 of the times after which responses must have ended

    def is_for_longer_runs(self, rate: float) -> bool:
        """Whether a run of these requests at a rate is too short: it serves many of them after the last arrival."""
        return rate > 0 and self.num_requests / rate < MIN_RUN * self.allowed_s

    @property
    def num_impossible(self) -> int:
        """The number of requests that no instance could serve by their deadlines."""
        return int(np.isinf(self.costs_s).sum())

    @property
    def is_possible(self) -> bool:
        """Whether an idle instance could serve any request by its deadlines; if not, there is no optimum."""
        return self.num_impossible < len(self.costs_s)

    def instance_s(self, share: float = 1.0, *, by_work: bool = False) -> float:
        """Return the least instance-seconds per request if a share of the requests, or of their tokens, attain."""
        if not 0 < share <= 1:
            raise ValueError(f"attained: must be a share above 0, at most 1, not {share}")
        worth = self.tokens if by_work else np.ones(len(self.costs_s))
        prices = (self.costs_s / worth).tolist()
        order = np.array(sorted(range(len(prices)), key=prices.__getitem__), np.intp)
        before = np.cumsum(worth[order]) - worth[order]
        needed = share * float(worth.sum()) * (1 - 1e-12)
        parts = np.clip((needed - before) / worth[order], 0.0, 1.0)  # the last of the cheapest counts in part
        taken = parts > 0
        return float((parts[taken] * self.costs_s[order][taken]).sum()) / self.num_requests

    def rate(self, share: float = 1.0, *, by_work: bool = False) -> float:
        """Return the number of requests per second that no placement exceeds."""
        seconds = self.instance_s(share, by_work=by_work)
        return self.num_instances / seconds if seconds > 0 else math.inf

    def optimum(self, kind: str) -> float:
        """Return the largest number of requests per second at which a kind of serving attains all that can attain."""
        seconds = self.optimum_s[kind]
        return self.num_instances / seconds if seconds > 0 else math.inf

    @property
    def worth_of_tiers(self) -> float:
        """How far the optimum with tiers apart is above that with all mixed, as a share."""
        mixed_s, tiers_s = self.optimum_s[MIXED], self.optimum_s[TIERS]
        return mixed_s / tiers_s - 1 if 0 < tiers_s < math.inf else 0.0

    def as_table(self, shares: Sequence[float]) -> dict[str, object]:
        """Return all numbers by name; the optimum is None where no request can be served by its deadlines."""
        optimum_s = {kind: self.optimum_s[kind] if self.is_possible else math.inf for kind in KINDS}
        rates = {kind: self.optimum(kind) if self.is_possible else math.inf for kind in KINDS}
        return {
            "bound_qps": {f"{share:g}": _or_none(self.rate(share)) for share in shares},
            "work_bound_qps": {f"{share:g}": _or_none(self.rate(share, by_work=True)) for share in shares},
            "optimum_qps": {kind: _or_none(rate) for kind, rate in rates.items()},
            "optimum_instance_s": {kind: _or_none(seconds) for kind, seconds in optimum_s.items()},
            "worth_of_tiers": _or_none(self.worth_of_tiers) if self.is_possible else None,
            "tier_instance_s": {name: _or_none(seconds) for name, seconds in self.tier_s.items()},
            "num_impossible": self.num_impossible,
        }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def slo_bound(specs: Sequence[InstanceSpec], work: Workload) -> SloBound:
    """Return what equal instances need at least for the requests of a workload that have deadlines.

    A run of a finite trace may exceed the bound, because instances start empty and serve on after the last arrival: by
    a little if it is long compared with what responses may take (`is_for_longer_runs`), by any factor if it is not.
    With prefix caching, contents are computed once, and memory limits no step.
    """
    spec = the_only_kind(specs)
    needs, shapes = needs_of(spec, work)
    shares_blocks = bool(spec.config.enable_prefix_caching and work.lengths.num_contents)
    some = needs.chosen(needs.is_possible)
    model = _SteadyModel(spec, shares_blocks=shares_blocks)
    tiers = {name: some.chosen(rows) for name, rows in _tiers(some).items()}
    apart_s = {name: model.prefill_s(tier) + model.decode_s(tier, _patience_s(tier)) for name, tier in tiers.items()}
    tiers_s = {name: model.whole_s(tier, _patience_s(tier)) for name, tier in tiers.items()}
    strictest_s = min((_patience_s(tier) for tier in tiers.values()), default=math.inf)
    totals = {
        TIERS: sum(tiers_s.values()),
        MIXED: model.whole_s(some, strictest_s),
        APART: sum(apart_s.values()),
        MEMORY: model.whole_s(some, math.inf),
    }
    due = ~np.isnan(work.service.ttft_slo_s) if work.service is not None else np.zeros(0, np.bool_)
    lengths = work.lengths
    return SloBound(
        num_instances=len(specs),
        num_requests=len(work),
        tokens=(lengths.prompt_tokens + lengths.output_tokens)[due].astype(np.float64),
        costs_s=least_costs_s(shapes, needs),
        optimum_s={kind: seconds / len(work) for kind, seconds in totals.items()},
        allowed_s=allowed_e2e_s(work) or 0.0,
        tier_s={name: seconds / len(tiers[name]) for name, seconds in tiers_s.items()},
    )


def _tiers(needs: RequestNeeds) -> dict[str, npt.NDArray[np.bool_]]:
    """Return the requests of each TPOT target."""
    values = needs.tpot_slo_s
    tiers = {f"{value:g}": values == value for value in np.unique(values[~np.isnan(values)]).tolist()}
    return {**tiers, NO_TIER: np.isnan(values)} if np.isnan(values).any() else tiers


def _patience_s(needs: RequestNeeds) -> float:
    """Return the mean time that the deadlines allow for a decode."""
    decodes = float(needs.decodes.sum())
    return float(needs.patience_s.sum()) / decodes if decodes else math.inf


class _SteadyModel:
    """Engines of one kind whose steps are all alike."""

    def __init__(self, spec: InstanceSpec, *, shares_blocks: bool) -> None:
        """Tabulate the step time."""
        config = spec.config
        self._costs = tabulate(spec.step_time, config.max_num_batched_tokens, config.max_num_seqs)
        self._pace, self._chunk = spec.pace, config.max_num_batched_tokens
        self._room = math.inf if shares_blocks else float((config.num_gpu_blocks - 1) * config.block_size)
        self._counts = np.concatenate([PARTS, np.arange(1, min(config.max_num_seqs, self._chunk) + 1)])

    def prefill_s(self, needs: RequestNeeds) -> float:
        """Return the instance-seconds of prefills in steps of their own, of the best size."""
        tokens = np.arange(1, self._chunk + 1, dtype=np.float64)
        per_token_s = float((self._seconds(np.zeros(self._chunk), tokens, 0.0) / tokens).min())
        return float(needs.prompt_tokens.sum()) * per_token_s + float(needs.attention_s.sum())

    def decode_s(self, needs: RequestNeeds, patience_s: float) -> float:
        """Return the instance-seconds of decodes in steps of their own."""
        return self._steady_s(needs, patience_s, with_prefill=False)

    def whole_s(self, needs: RequestNeeds, patience_s: float) -> float:
        """Return the instance-seconds of requests whose prefills and decodes share the steps; infinite: impossible."""
        if needs.decodes.sum() == 0:
            return self.prefill_s(needs)
        return self._steady_s(needs, patience_s, with_prefill=True)

    def _steady_s(self, needs: RequestNeeds, patience_s: float, *, with_prefill: bool) -> float:
        decodes = float(needs.decodes.sum())
        if decodes == 0:
            return 0.0
        context = float(needs.context_tokens.sum()) / decodes
        prompts = float(needs.prompt_tokens.sum()) / decodes if with_prefill else 0.0
        attention_s = float(needs.attention_s.sum()) / decodes if with_prefill else 0.0
        held = float(needs.prompt_tokens.mean()) if with_prefill else 0.0  # by the request that is prefilled (§3.4)
        num = self._counts
        whole = np.maximum(1.0, num)  # a step with a decode has at least one
        longest_s = self._seconds(whole, num * prompts, context) + num * attention_s
        rest_s = self._seconds(np.zeros(len(num)), num * prompts, context) + num * attention_s
        mean_s = np.where(num < 1, num * longest_s + (1 - num) * rest_s, longest_s)
        fits = (whole + num * prompts <= self._chunk) & (whole * context + held <= self._room)
        fits &= longest_s <= patience_s
        return decodes * float((mean_s / num)[fits].min()) if fits.any() else math.inf

    def _seconds(self, decodes: Floats, prompts: Floats, context: float) -> Floats:
        """Return the time of steps with these numbers of decodes and prompt tokens; of less than one, on average."""
        costs, rows = self._costs, decodes.astype(np.int64)
        by_count = costs.by_count[rows]
        prefills = np.minimum(1.0, prompts)
        tokens = np.minimum(decodes + prompts, self._chunk)
        seconds = costs.coefficients[CONSTANT] + np.interp(tokens, np.arange(self._chunk + 1), costs.by_tokens)
        seconds += by_count[:, SAMPLED] + prefills * costs.coefficients[PREFILL]
        seconds += prompts * costs.coefficients[PREFILL_TOKEN]

        alone, beside = (mean_context_seconds(costs, context, first)[rows] for first in (ALONE, BESIDE))
        found: Floats = self._pace * (seconds + (decodes > 0) * (prefills * beside + (1 - prefills) * alone))
        return found
