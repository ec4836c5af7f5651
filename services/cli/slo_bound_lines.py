"""What serving by deadlines allows, beside what was simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from predictor.gain import NO_TIER
from simulator.fleet import InstanceSpec
from simulator.request_needs import kinds_of
from simulator.slo_bound import KINDS, TITLES, SloBound, slo_bound
from simulator.workload import Workload

SHARES = (0.9, 0.99)


def bound_of(specs: Sequence[InstanceSpec], work: Workload) -> SloBound | None:
    """Return the bound of a workload with deadlines on equal instances; None without these."""
    has_deadlines = work.service is not None and bool((work.service.ttft_slo_s >= 0).any())
    return slo_bound(specs, work) if has_deadlines and len(kinds_of(specs)) == 1 else None


def bound_lines(bound: SloBound, shares: Sequence[float] = SHARES) -> Iterator[str]:
    """Yield the lines of a bound for people."""
    if not bound.is_possible:
        yield (
            f"no placement on these instances serves any request by its deadlines: an idle instance misses those of all"
            f" {bound.num_impossible} that have some"
        )
        return
    rates = ", ".join(
        f"{bound.rate(share):.2f} with {100 * share:g} % of the requests"
        f" ({bound.rate(share, by_work=True):.2f} with {100 * share:g} % of the tokens)"
        for share in shares
    )
    yield f"no placement on these instances serves more requests/s by their deadlines than {rates}"
    optimum = ", ".join(f"{TITLES[kind]} {bound.optimum(kind):.2f}" for kind in KINDS)
    yield f"all by their deadlines, at best, in requests/s: {optimum}"
    worth = bound.worth_of_tiers
    if len(bound.tier_s) > 1 and math.isfinite(worth):
        yield f"tiers apart are worth {100 * worth:.1f} %"
    costs = ", ".join(
        f"{'without TPOT target' if name == NO_TIER else f'{1000 * float(name):g} ms'} {seconds:.3f}"
        for name, seconds in bound.tier_s.items()
    )
    yield f"least instance-seconds of a request, by tier: {costs}"
    rate = bound.rate(min(shares))
    if bound.is_for_longer_runs(rate):
        yield (
            f"at that rate {bound.num_requests} requests arrive within {bound.num_requests / rate:.0f} s, and responses"
            f" may take {bound.allowed_s:.0f} s: with so few, more attain than in the long run (--num-requests)"
        )
    if bound.num_impossible:
        yield f"{bound.num_impossible} requests have deadlines that an idle instance misses"
