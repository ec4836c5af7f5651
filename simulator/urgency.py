"""How many requests of an engine its rule treats as urgent, over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from predictor.batching.slide_batching import URGENT, list_by_urgency
from predictor.request import CLASSES, RequestFacts, Slo
from simulator.replay import loaded_engine

if TYPE_CHECKING:
    from simulator.scenario import Scenario
    from simulator.workload import Workload

RULE = "slide_batching"  # the one that distinguishes urgent requests
LOOK_S = 1.0


def count_urgent(scenario: Scenario, rate: float, seed: int) -> dict[str, Any]:
    """Serve requests on one engine; every second until the last one arrives, count the urgent ones and the others.

    A request counts once the step is over in which it arrived.
    """
    specs = scenario.instance_specs()
    if len(specs) != 1:
        raise ValueError(f"instances.count: an experiment of kind urgency has one instance, not {len(specs)}")
    if specs[0].config.batcher != RULE:
        raise ValueError(f"instances.engine.batcher: an experiment of kind urgency needs {RULE}")
    requests = requests_of(scenario.workload(rate, seed))
    engine = loaded_engine(specs[0].config, specs[0].step_time, requests)
    times_s = np.arange(LOOK_S, requests[-1].arrival_s, LOOK_S)
    if len(times_s) == 0:
        raise ValueError(f"traffic: all requests arrive within {LOOK_S:g} s, so that nothing can be counted")
    counts = np.zeros((len(times_s), 2))
    for place, time_s in enumerate(times_s):
        engine.advance(float(time_s))
        num_requests, _ = list_by_urgency(engine.state)
        groups = engine.state.ranks["group"][engine.state.turns[:num_requests]]
        counts[place] = (groups == URGENT).sum(), (groups != URGENT).sum()
    over_time = {
        name: [(float(time_s), float(count), 0.0) for time_s, count in zip(times_s, column, strict=True)]
        for name, column in zip(("urgent", "normal"), counts.T, strict=True)
    }
    num_urgent, num_normal = counts.mean(axis=0).tolist()
    return {
        "num_urgent": num_urgent,
        "num_normal": num_normal,
        "urgent_share": num_urgent / max(num_urgent + num_normal, 1e-9),
        "over_time": over_time,
    }


def requests_of(work: Workload) -> list[RequestFacts]:
    """Return the requests of a workload, without their prefixes."""
    levels = work.service
    requests = []
    for index, arrival_s in enumerate(work.arrival_s.tolist()):
        asked: dict[str, Any] = {}
        if levels is not None:
            slo = {"ttft_s": levels.ttft_slo_s[index], "tpot_s": levels.tpot_slo_s[index]}
            asked = {
                "slo": Slo(**{name: None if np.isnan(value) else float(value) for name, value in slo.items()}),
                "weight": float(levels.weight[index]),
                "priority": int(levels.priority[index]),
                "request_class": CLASSES[levels.request_class[index]],
            }
        requests.append(
            RequestFacts(
                request_id=f"request-{index:06}",
                prompt_tokens=int(work.lengths.prompt_tokens[index]),
                output_tokens=int(work.lengths.output_tokens[index]),
                arrival_s=arrival_s,
                **asked,
            )
        )
    return requests
