"""The requests of a live scheduler's recording, for `block simulate --replay`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from predictor.gain import service_levels_of
from predictor.lengths import Tag
from predictor.request import RequestFacts
from services.decision_recordings import is_recording, requests_in
from simulator.codec import requests_from_file
from simulator.scenario import Scenario
from simulator.workload import Workload, lengths_of, scaled_up, workload


def recorded(path: str, scenario: Scenario, rate: float | None) -> Workload:
    """Read requests by arrival time, with the tags that the scheduler used; `rate` rescales the arrival times."""
    block_size = scenario.instance_specs()[0].config.block_size
    if is_recording(path):
        requests = requests_in(path, block_size=block_size)
    else:
        requests = requests_from_file(path, block_size=block_size)
    if not requests:
        raise ValueError(f"{path}: is empty: there is no request in it")
    return workload_of(path, sorted(requests, key=lambda one: one.arrival_s), block_size, rate)


def workload_of(path: str, requests: Sequence[RequestFacts], block_size: int, rate: float | None) -> Workload:
    """Put requests into arrays; the length of a request that was not recorded is the median of its tag."""
    known = []
    for place, request in enumerate(requests):
        tag = request.tag if isinstance(request.tag, Tag) else None
        if request.output_tokens is None and tag is None:
            raise ValueError(f"{path}: requests[{place}].output_tokens: is missing, and so is a tag")
        known.append(replace(request, output_tokens=request.output_tokens or max(1, round(tag.median_tokens)))
                     if tag is not None else request)  # fmt: skip
    arrival_s = np.array([request.arrival_s for request in known])
    arrival_s = scaled_up(arrival_s, rate) if rate is not None else arrival_s - arrival_s[0]
    work = workload(lengths_of(known, block_size), arrival_s)
    tags = [request.tag if isinstance(request.tag, Tag) else None for request in known]
    return replace(
        work,
        service=service_levels_of(known),
        tag_median=np.array([np.nan if tag is None else tag.median_tokens for tag in tags]),
        tag_spread=np.array([0.0 if tag is None else tag.spread for tag in tags]),
    )
