"""The list of instances: which serve a model, which are healthy, and what stays known as they come and go."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.candidate import CandidateStatus
from scheduler.instance_table import InstanceTable
from scheduler.instances import MAX_MODELS, InstanceDirectory, InstanceStatus, NoInstanceError, UnknownModelError


def directory_of(*statuses: InstanceStatus) -> InstanceDirectory:
    """A directory of some instances."""
    directory = InstanceDirectory()
    directory.update(statuses)
    return directory


def named(names: str, **fields: object) -> list[InstanceStatus]:
    """Instances that serve any model."""
    return [InstanceStatus(instance_id=name, **fields) for name in names]


def unhealthy(directory: InstanceDirectory, now_s: float = 0.0, excluded: str = "") -> dict[str, str]:
    """The instances that no policy compares, with their states."""
    return {one.instance_id: one.status.value for one in directory.unhealthy(None, frozenset(excluded), now_s)}


def test_a_directory_over_a_table_takes_its_instances_for_healthy() -> None:
    """As a simulator has them."""
    directory = InstanceDirectory(InstanceTable("ba"))
    assert list(directory.by_id) == ["a", "b"]
    assert directory.rows_of_model("") is None
    assert unhealthy(directory) == {}


def test_models_have_rows() -> None:
    """None stands for all instances; those without models serve any."""
    directory = directory_of(
        InstanceStatus(instance_id="b", models=("m", "n")),
        InstanceStatus(instance_id="a", models=("m",)),
        InstanceStatus(instance_id="c"),
    )
    assert directory.models() == ["m", "n"]
    assert directory.rows_of_model("m") is None
    rows = directory.rows_of_model("n")
    assert rows is not None
    assert rows.tolist() == [1, 2]
    other = directory.rows_of_model("o")
    assert other is not None
    assert other.tolist() == [2]
    with pytest.raises(ValueError, match="model: is missing; there are m, n"):
        directory.rows_of_model("")


def test_unknown_models_and_empty_lists_are_errors_of_their_own() -> None:
    """The request is to blame for the one, the instances for the other; callers may name any number of models."""
    directory = directory_of(InstanceStatus(instance_id="a", models=("m",)))
    assert directory.rows_of_model("") is None
    with pytest.raises(UnknownModelError, match=r"The model `x` does not exist\. There are m\."):
        directory.rows_of_model("x")
    with pytest.raises(NoInstanceError):
        InstanceDirectory().rows_of_model("m")
    directory.update(named("a"))
    for number in range(MAX_MODELS + 10):
        assert directory.rows_of_model(f"m{number}") is None
    assert len(directory._rows_of_model) == MAX_MODELS
    directory.update([InstanceStatus(instance_id="a", models=("m",))])
    with pytest.raises(UnknownModelError):
        directory.rows_of_model("m1")


def test_instances_that_stay_are_known_and_those_that_changed_are_not() -> None:
    """An instance whose status is another object is another instance under the same name."""
    first, second = named("ab")
    directory = directory_of(first, second)
    for name in "ab":
        directory.table.replace(name, {"num_running": 3.0}, now_s=1.0)
        directory.suspect(name)
    directory.update([second, *named("ac")])
    assert list(directory.by_id) == ["a", "b", "c"]
    running = directory.table.candidates()["num_running"]
    assert np.isnan(running).tolist() == [True, False, True]
    directory.update([])
    assert directory.suspects == set()
    assert len(directory.table.candidates()) == 0


@pytest.mark.parametrize(
    ("harm", "status", "note"),
    [
        (lambda one: setattr(one, "is_draining", True), "draining", "is draining"),
        (lambda one: setattr(one, "reported_state", "draining"), "draining", "is draining"),
        (lambda one: setattr(one, "reported_state", "starting"), "draining", "is starting"),
        (lambda one: setattr(one, "reported_state", "down"), "stopped", "its engine is down"),
        (lambda one: [one.sidecar.failed(0.0) for _ in range(2)], "down", "its sidecar failed recently, circuit open"),
        (
            lambda one: [one.connection.failed(0.0) for _ in range(2)],
            "down",
            "its sidecar failed recently, circuit open",
        ),
    ],
)
def test_an_unhealthy_instance_is_not_compared(harm: object, status: str, note: str) -> None:
    """The candidate says why, with its last known indicators and how old they are."""
    one, two = named("ab")
    one.indicators, one.reported_s, one.age_s, one.num_unseen = {"num_running": 3.0}, 5.0, 0.5, 2
    directory = directory_of(one, two)
    assert one.is_healthy
    harm(one)  # type: ignore[operator]
    directory.suspect("a")
    assert not one.is_healthy
    (candidate,) = directory.unhealthy(None, (), 7.0)
    assert (candidate.instance_id, candidate.status.value, candidate.note) == ("a", status, note)
    assert (candidate.indicators, candidate.age_s, candidate.num_unseen) == ({"num_running": 3.0}, 2.5, 2)
    rows = directory.rows_without(None, [candidate])
    assert rows is not None
    assert rows.tolist() == [1]
    rows = directory.rows_without(np.array([0, 1], np.intp), [candidate])
    assert rows is not None
    assert rows.tolist() == [1]


def test_an_engine_that_failed_is_left_alone_until_its_trial() -> None:
    """It stays a suspect until a request succeeds there; unknown names are ignored."""
    directory = directory_of(*named("ab"))
    engine = directory.by_id["a"].engine
    directory.engine_failed("a", 10.0)
    assert unhealthy(directory, 10.0) == {}
    directory.engine_failed("a", 10.0)
    (candidate,) = directory.unhealthy(None, (), 10.1)
    assert (candidate.status, candidate.engine_failed) == (CandidateStatus.NOT_QUERIED, True)
    assert candidate.note == "its engine failed recently, circuit open"
    assert unhealthy(directory, 10.3) == {}
    assert engine.allows(10.3)
    assert unhealthy(directory, 10.3) == {"a": "not_queried"}, "one request is the trial"
    assert directory.suspects == {"a"}
    directory.engine_succeeded("a")
    assert unhealthy(directory, 10.3) == {}
    assert directory.suspects == set()
    directory.engine_failed("z", 0.0)
    directory.engine_succeeded("z")
    assert directory.suspects == set()


def test_excluded_instances_are_named_as_such() -> None:
    """Whatever else they are; only those that serve the model matter."""
    directory = directory_of(*named("abc"))
    directory.by_id["a"].is_draining = True
    directory.suspect("a")
    assert unhealthy(directory, excluded="abz") == {"a": "excluded", "b": "excluded"}
    only = directory.unhealthy(np.array([1, 2], np.intp), frozenset("ab"), 0.0)
    assert [one.instance_id for one in only] == ["b"]
    assert directory.rows_without(None, []) is None


def test_the_age_of_indicators_is_that_at_a_time() -> None:
    """Reports that came after that time are new; an instance that never reported has no age."""
    (one,) = named("a")
    assert one.age_at(100.0) == 0.0
    one.indicators, one.reported_s, one.age_s = {"num_running": 1.0}, 50.0, 0.25
    assert (one.age_at(60.0), one.age_at(49.0)) == (10.25, 0.25)


def test_the_pace_is_the_reported_one() -> None:
    """One, where none is reported."""
    (one,) = named("a")
    assert one.pace == 1.0
    one.indicators = {"pace": 1.5}
    assert one.pace == 1.5
