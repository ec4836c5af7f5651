"""The facts of a request: which values are possible, and which of them the engine model keeps in columns."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.lengths import Tag
from predictor.request import (
    BEST_EFFORT,
    DECODE,
    MAX_PRIORITY,
    NO_ADAPTER,
    NO_TENANT,
    EncoderInput,
    RequestFacts,
    Slo,
    adapter_number,
    tenant_number,
)
from tests.strategies import AFFINE

FACTS = RequestFacts(
    request_id="r", model="m", prompt_tokens=48, tag=Tag(median_tokens=90.5, spread=0.5), arrival_s=3.0, max_tokens=200,
    min_tokens=4, priority=-2, prefix_hashes=("a1", "b2", "c3"), request_class=BEST_EFFORT,
    slo=Slo(ttft_s=0.5, tpot_s=0.04), weight=2.5, client_id="alice", session_id="chat-7",
    in_s=0.125, waited_s=0.25, leg=DECODE, held_s=0.75, transfer_s=0.25, length_quantiles=3,
    adapter="sql", encoder_inputs=(EncoderInput(position=8, tokens=16, identity="d4"), EncoderInput(position=24, tokens=4)),
)  # fmt: skip
KNOWN_LENGTH = replace(FACTS, output_tokens=90, tag=None)
DECODING = EngineConfig(kv_role="kv_consumer")
# The TTFT that is left, the other facts, and no encoder inputs, which such an engine does not compute.
COLUMNS = (0.25, 0.04, 2.5, tenant_number("alice"), 1, adapter_number("sql"), 0)


def test_the_samples_differ_from_the_defaults_in_every_field() -> None:
    """Round trips of these facts notice a field that is left out."""
    bare = RequestFacts(request_id="", prompt_tokens=1)
    for field in fields(RequestFacts):
        values = {getattr(sample, field.name) for sample in (FACTS, KNOWN_LENGTH)}
        assert values != {getattr(bare, field.name)}, field.name


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens: must be at least 1"),
        ({"output_tokens": 0}, "output_tokens: must be at least 1"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"min_tokens": -1}, "min_tokens: must be at least 0"),
        ({"tag": -1.0}, "tag.median_tokens: must be above 0"),
        ({"arrival_s": math.nan}, "arrival_s: must be a time"),
        ({"arrival_s": -1.0}, "arrival_s: must be a time"),
        ({"priority": MAX_PRIORITY + 1}, "priority: must lie within"),
        ({"request_class": "urgent"}, "request_class: 'urgent' is neither"),
        ({"in_s": -0.5}, "in_s: must be a time from 0 on"),
        ({"in_s": math.inf}, "in_s: must be a time from 0 on"),
        ({"leg": "both"}, "leg: must be one of serve, prefill, decode, not 'both'"),
        ({"held_s": -1.0}, "held_s: must be a time from 0 on"),
        ({"transfer_s": math.nan}, "transfer_s: must be a time from 0 on"),
        ({"length_quantiles": 2}, "length_quantiles: must be an odd number from 1 to 9, not 2"),
        ({"length_quantiles": 11}, "length_quantiles: must be an odd number"),
        ({"weight": 0.0}, "weight: must be above 0"),
        ({"weight": math.inf}, "weight: must be above 0"),
        ({"weight": math.nan}, "weight: must be above 0"),
    ],
)
def test_impossible_facts_are_refused(change: dict[str, Any], error: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=f"^{error}"):
        replace(FACTS, **change)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_impossible_targets_are_refused(target: float) -> None:
    """A target is a positive number of seconds."""
    with pytest.raises(ValueError, match="^tpot_s: must be above 0"):
        Slo(tpot_s=target)


def test_tenants_have_the_same_number_everywhere() -> None:
    """The number depends on the client id alone, and fits into 64 signed bits."""
    assert tenant_number("") == NO_TENANT
    assert tenant_number("alice") == -8513398901633652147
    assert tenant_number("bob") != tenant_number("alice")
    assert all(-(2**63) <= tenant_number(f"tenant {number}") < 2**63 for number in range(100))


def test_an_engine_keeps_the_facts_in_columns() -> None:
    """A local scheduler finds targets, weight, tenant and class beside a request; a slot's next request has its own."""
    engine = Engine(DECODING, AFFINE)
    slot = engine.add(FACTS)
    assert engine.state.facts[slot].item() == COLUMNS
    engine.abort("r")
    engine.remove("r")
    again = engine.add(RequestFacts(request_id="bare", prompt_tokens=3, slo=Slo(tpot_s=0.1)))
    assert again == slot
    assert np.isnan(engine.state.facts[slot].ttft_slo_s)
    assert engine.state.facts[slot].item()[1:] == (0.1, 1.0, NO_TENANT, 0, NO_ADAPTER, 0)


def test_facts_stay_with_their_requests_when_the_engine_grows() -> None:
    """More requests than there were slots leave the facts of the others as they are."""
    engine = Engine(DECODING, AFFINE)
    slot = engine.add(FACTS)
    for number in range(200):
        engine.add(RequestFacts(request_id=str(number), prompt_tokens=3))
    assert engine.state.facts[slot].item() == COLUMNS
    others = np.delete(engine.state.facts, slot)
    assert np.isnan(others["ttft_slo_s"]).all()
    assert (others["weight"] == 1.0).all()
