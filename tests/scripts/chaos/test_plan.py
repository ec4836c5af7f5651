"""The plan of faults."""

from __future__ import annotations

import pytest

from scripts.chaos.faults import FAULTS
from scripts.chaos.plan import ENDS_PROCESS, OTHERS, ChaosSettings, kind_of, parts_of, plan_of

LONG = ChaosSettings(minutes=60, engines=8, schedulers=3, gateways=2)


def test_a_plan_follows_from_its_seed() -> None:
    """The same one for the same seed, and another one for another."""
    assert plan_of(LONG) == plan_of(LONG)
    assert plan_of(LONG) != plan_of(ChaosSettings(minutes=60, engines=8, schedulers=3, gateways=2, seed=2))


def test_a_plan_has_every_kind_of_fault_at_its_time() -> None:
    """A kill every ten seconds, and another fault between two kills; all of them can be carried out."""
    plan = plan_of(LONG)
    kills = [fault.at_s for fault in plan if fault.kind == "kill"]
    assert kills == [10.0 * number for number in range(1, 360)]
    assert [fault.at_s for fault in plan if fault.kind != "kill"] == [at_s + 5.0 for at_s in kills]
    assert {fault.kind for fault in plan} == {"kill", *OTHERS} == set(FAULTS)


def test_the_first_part_of_several_is_never_ended() -> None:
    """So that its memory can be judged; of a single part there is no other one."""
    ended = {fault.part for fault in plan_of(LONG) if fault.kind in ENDS_PROCESS}
    assert ended == {
        *(f"engine-{number}" for number in range(1, 8)),
        *(f"predictor-{number}" for number in range(1, 4)),
        "scheduler-1", "scheduler-2", "gateway-1", "tagger", "provisioner",
    }  # fmt: skip


def test_links_lead_to_every_second_engine() -> None:
    """One engine alone has none, so that a fault of a link names no part."""
    assert parts_of("engine-link", LONG) == [f"engine-link-{number}" for number in (1, 3, 5, 7)]
    alone = ChaosSettings(minutes=30, engines=1)
    links = [fault for fault in plan_of(alone) if fault.kind.endswith("_link")]
    assert {fault.part for fault in links} == {"none"}


@pytest.mark.parametrize(
    ("part", "kind"), [("engine-3", "engine"), ("sidecar-link-1", "sidecar-link"), ("disk", "disk")]
)
def test_the_kind_of_a_part(part: str, kind: str) -> None:
    """Its name without the number."""
    assert kind_of(part) == kind


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"minutes": 0}, "minutes: must be a number above 0"),
        ({"every_s": float("nan")}, "every_s: must be a number above 0"),
        ({"rate": float("inf")}, "rate: must be a number above 0"),
        ({"engines": 0}, "engines: must be at least 1"),
        ({"tokens": 0}, "tokens: must be at least 1"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(values: dict[str, float], message: str) -> None:
    """The message names the field."""
    with pytest.raises(ValueError, match=message):
        ChaosSettings(**values)
