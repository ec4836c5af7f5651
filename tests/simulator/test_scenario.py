"""Scenario files: each field of each table refuses what it cannot be, by its name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from predictor.config import FIELD_NAMES
from simulator.conditions import Conditions, Outage
from simulator.hybrid_load import BestEffort
from simulator.metrics import SloTarget
from simulator.mix import FIELDS as MIX_FIELDS
from simulator.scenario import TABLES, Instances, Scenario, as_table, scenario_from
from simulator.traffic import Tags, Traffic

KINDS = {"instances": Instances, "traffic": Traffic, "tags": Tags, "conditions": Conditions, "slo": SloTarget,
         "best_effort": BestEffort}  # fmt: skip
ODD = ("a", [1], [["a", 1]], {"a": "b"}, -1, -0.5, math.nan, True, 3)


def places() -> Iterator[tuple[str, Any]]:
    """Yield each field with a function that makes a scenario's table of a value of it."""
    for table in TABLES:
        yield table, lambda value, table=table: {table: value}
    for table, kind in KINDS.items():
        for spec in fields(kind):  # type: ignore[arg-type]
            yield f"{table}.{spec.name}", lambda value, table=table, name=spec.name: {table: {name: value}}
    for name in MIX_FIELDS:
        yield f"mix.{name}", lambda value, name=name: {"mix": [{"name": "a", "share": 1, name: value}]}
    for spec in fields(Outage):
        yield (
            f"conditions.outages.{spec.name}",
            lambda value, name=spec.name: {"conditions": {"outages": [{"instance": 0, "from_s": 1.0, name: value}]}},
        )
    for engine in ("engine", "prefill_engine"):
        for name in FIELD_NAMES:
            yield (
                f"instances.{engine}.{name}",
                lambda value, engine=engine, name=name: {
                    "instances": {"count": 2, "num_prefill": 1, engine: {name: value}}
                },
            )


def drawn(table: dict[str, Any]) -> Scenario:
    """Read a scenario, and make all that a run starts from; engines of a scenario with settings only."""
    scenario = scenario_from(table)
    scenario.instance_specs()
    if not any(name in table.get("instances", {}) for name in ("engine", "prefill_engine")):
        scenario.workload(4.0, 0)
    return scenario


@pytest.mark.parametrize(("field", "made"), [pytest.param(*place, id=place[0]) for place in places()])
def test_a_field_takes_a_value_or_refuses_it_by_name(field: str, made: Any) -> None:
    """Whatever its type; the error is one line, and some value of another type is refused."""
    refused = []
    for value in ODD:
        try:
            drawn(made(value))
        except ValueError as error:
            refused.append(str(error))
    if field != "instances.engine.batcher_options":
        assert refused
    name = field.rpartition(".")[2]
    for error in refused:
        assert "\n" not in error
        assert name in error or "constant_s" in error or error.startswith(("profile:", "/", "a:", "traffic.trace"))


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"instances": 3}, "instances: must be a table, or a list of tables, not 3"),
        ({"instances": []}, r"instances: must be a table, or a list of tables, not \[\]"),
        ({"instances": [3]}, "instances: must be a table, not 3"),
        ({"instances": {"engine": 3}}, r"instances\.engine: must be a table, not 3"),
        ({"instances": {"engine": {"watermark": "a"}}}, r"instances\.engine\.watermark: must be a number, not 'a'"),
        ({"instances": {"added_step_s": "a"}}, r"instances\.added_step_s: must be a number from 0 on, not 'a'"),
        ({"conditions": 3}, "conditions: must be a table, not 3"),
        ({"conditions": {"outages": 3}}, r"conditions\.outages: must be a list of tables, not 3"),
        ({"conditions": {"outages": [{"instance": 0, "from_s": "a"}]}}, r"outage\.from_s: must be a number from 0 on"),
        ({"conditions": {"best_effort_share": "a"}}, "best_effort_share: must be a share from 0 to 1, not 'a'"),
        ({"conditions": {"late_s": "a"}}, "late_s: must be a number above 0, not 'a'"),
        ({"conditions": {"hop_s": "a"}}, "hop_s: must be a number from 1e-06 on, not 'a'"),
        ({"conditions": {"reservations": "no"}}, "reservations: must be true or false, not 'no'"),
        ({"conditions": {"max_held": -1}}, "max_held: must be at least 0"),
        ({"conditions": {"max_held_tokens": 0.5}}, "max_held_tokens: must be a whole number"),
        ({"conditions": {"max_wait_s": -1}}, "max_wait_s: must be a number from 0 on, not -1"),
        ({"conditions": {"tenant_weights": {"a": 0}}}, r"tenant_weights\.a: must be a number above 0, not 0"),
        ({"traffic": {"schedule": 3}}, r"traffic\.schedule: must be a list of pairs of a time and a rate, not 3"),
        ({"traffic": {"schedule": [["a", 1]]}}, r"traffic\.schedule\[0\]: must be a number from 0 on, not 'a'"),
        ({"traffic": {"schedule": [[0, 1], [2]]}}, r"traffic\.schedule\[1\]: must be a pair of a time and a rate"),
        ({"traffic": {"grid_s": -1}}, r"traffic\.grid_s: must be a number from 0 on, not -1"),
        ({"slo": {"ttft_s": "x"}}, r"slo\.ttft_s: must be a number above 0, not 'x'"),
        ({"slo": {"ttft_s": -1}}, r"slo\.ttft_s: must be a number above 0, not -1"),
        ({"slo": {"e2e_s": math.nan}}, r"slo\.e2e_s: must be a number above 0, not nan"),
        ({"mix": 0}, "mix: must be a list of tables"),
        ({"tags": {"sigma": -1}}, r"tags\.sigma: must be a number from 0 on, not -1"),
    ],
)
def test_wrong_values_are_refused(table: dict[str, Any], error: str) -> None:
    """The error names the field and says what it must be."""
    with pytest.raises(ValueError, match=f"^{error}"):
        scenario_from(table)


def test_a_scenario_is_written_as_it_is_read() -> None:
    """Also lists and tables within tables."""
    table = {
        "instances": [{"count": 2, "engine": {"max_num_seqs": 8}}],
        "traffic": {"schedule": [[0, 1], [2, 3.5]]},
        "conditions": {"outages": [{"instance": 0, "from_s": 1.0}], "tenant_weights": {"gold": 2}, "max_wait_s": 0.8},
    }
    scenario = scenario_from(table)
    assert scenario_from(as_table(scenario)) == scenario
