"""Compares fast-forwarding with stepping over the conformance workloads; needs no vLLM."""

from __future__ import annotations

from itertools import islice

import pytest

from simulator.replay import loaded_engine, replay
from tests.conformance.ours import ONE_SECOND, our_config, our_requests
from tests.conformance.workloads import workload

# 451: a resumed request recomputes one token per step, which looks like a decode
SEEDS = (*range(200, 300), 451)


@pytest.mark.parametrize("seed", SEEDS)
def test_skipping_from_event_to_event_changes_no_outcome(seed: int) -> None:
    """Every request's times, preemptions and prefix hits are those of the run step by step."""
    load = workload(seed)
    config, requests = our_config(load), our_requests(load)
    stepped = loaded_engine(config, ONE_SECOND, requests)
    if len(list(islice(iter(stepped.next_step, None), load["max_steps"]))) == load["max_steps"]:
        return  # it may be an endless run, which has no outcomes
    assert replay(config, ONE_SECOND, requests) == [stepped.outcome(request.request_id) for request in requests]
