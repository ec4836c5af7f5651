"""Adapters at schedulers: which instances have one, which serve one, and the policy that keeps requests of one together."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.request import adapter_number
from scheduler.adapters import AdapterIndex, ReportedAdapters
from scheduler.candidates import RequestIndicators
from scheduler.instance_table import InstanceTable
from scheduler.instances import InstanceDirectory, InstanceStatus, UnknownModelError
from scheduler.policies import entry_named
from scheduler.prefix.prompt import blocks_of_text

SQL, CHAT = adapter_number("sql"), adapter_number("chat")


def directory_of(**models: tuple[str, ...]) -> InstanceDirectory:
    """Return instances with these models."""
    directory = InstanceDirectory()
    directory.update(InstanceStatus(instance_id=name, models=those) for name, those in models.items())
    return directory


def serving(directory: InstanceDirectory, model: str) -> list[str]:
    """Return the instances that serve a model."""
    rows = directory.rows_of_model(model)
    ids = directory.table.known.instance_ids
    return list(ids) if rows is None else [ids[row] for row in rows.tolist()]


def test_the_index_follows_what_instances_report() -> None:
    """Active ones count as loaded; what is not reported any more is forgotten."""
    index, ids = AdapterIndex(), ("a", "b", "c")
    index.replace("a", ReportedAdapters(frozenset([SQL]), frozenset([CHAT])))
    index.replace("b", ReportedAdapters(frozenset([CHAT])))
    assert index.active(SQL, ids).tolist() == [1, 0, 0]
    assert index.active(CHAT, ids).tolist() == [0, 1, 0]
    assert index.loaded(CHAT, ids).tolist() == [1, 1, 0]
    assert index.active(0, ids).tolist() == [1, 1, 1]
    index.replace("a", ReportedAdapters())
    assert index.loaded(CHAT, ids).tolist() == [0, 1, 0]
    index.keep(["a"])
    assert index.loaded(CHAT, ids).tolist() == [0, 0, 0]


def test_candidates_show_where_the_requests_adapter_is() -> None:
    """Also after the list of instances has changed."""
    table = InstanceTable(["a", "b"])
    table.set_adapters("b", ReportedAdapters(frozenset([SQL]), frozenset([CHAT])))
    table.follow(["b", "c"])
    candidates = table.candidates(RequestIndicators(adapter=SQL))
    assert candidates["adapter_active"].tolist() == [1, 0]
    assert table.candidates(RequestIndicators(adapter=CHAT))["adapter_active"].tolist() == [0, 0]
    assert table.candidates(RequestIndicators(adapter=CHAT))["adapter_loaded"].tolist() == [1, 0]
    assert table.candidates(RequestIndicators(), rows=np.array([1]))["adapter_active"].tolist() == [1]


@pytest.mark.parametrize(
    ("predicted", "active", "best"),
    [
        ([1.0, 1.05, 3.0], [0, 1, 1], 1),  # it has the adapter, and is within a tenth of the best
        ([1.0, 1.2, 3.0], [0, 1, 1], 0),  # it has it, and is too slow
        ([1.0, 1.05, 1.08], [0, 0, 0], 0),
        ([1.09, 1.0, 1.05], [1, 0, 1], 2),  # the faster one of those that have it
    ],
)
def test_affinity_prefers_the_adapter_within_a_bound(predicted: list[float], active: list[int], best: int) -> None:
    """The lowest score wins."""
    table = InstanceTable(["a", "b", "c"])
    for name, is_active in zip("abc", active, strict=True):
        table.set_adapters(name, ReportedAdapters(frozenset([SQL] if is_active else [])))
    candidates = table.candidates(RequestIndicators(adapter=SQL))
    candidates.add({"predicted_e2e_s": np.array(predicted)})
    score = entry_named("adapter_affinity").make({"slack": 0.1}, np.random.default_rng(0))
    assert int(np.argmin(score(candidates))) == best


def test_an_adapter_is_served_where_an_engine_lists_it() -> None:
    """Base models by the list of instances, adapters by the engines; without either, anywhere."""
    directory = directory_of(a=("base",), b=("base",), c=("other",))
    with pytest.raises(UnknownModelError, match=r"The model `sql` does not exist\. There are base, other\."):
        directory.rows_of_model("sql")
    directory.set_listed("b", frozenset(["base", "sql"]), frozenset(["sql"]))
    assert serving(directory, "sql") == ["b"]
    assert serving(directory, "base") == ["a", "b"]
    assert directory.adapters == {"sql"}
    directory.set_listed("b", frozenset(["base"]), frozenset())
    with pytest.raises(UnknownModelError):
        directory.rows_of_model("sql")


def test_instances_without_a_list_of_models_serve_what_no_other_lists() -> None:
    """One whose engine lists other models does not serve a model that another one lists."""
    directory = directory_of(a=(), b=(), c=())
    assert serving(directory, "anything") == ["a", "b", "c"]
    directory.set_listed("a", frozenset(["base", "sql"]), frozenset(["sql"]))
    directory.set_listed("b", frozenset(["base"]), frozenset())
    assert serving(directory, "sql") == ["a", "c"]  # nothing is known of c
    assert serving(directory, "base") == ["a", "b", "c"]
    assert serving(directory, "anything") == ["a", "b", "c"]


def test_prompts_of_adapters_share_no_blocks() -> None:
    """The same text has other names with an adapter."""
    text = b"the same text " * 100
    base, sql = blocks_of_text(text, 300).names, blocks_of_text(text, 300, "sql").names
    assert len(base) == len(sql)
    assert not set(base) & set(sql)
    assert blocks_of_text(text, 300, "sql").names == sql
