"""Mixes: which requests get which entry, and the messages for bad files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.gain import service_levels_of
from predictor.request import BEST_EFFORT, RequestFacts, Slo
from scheduler.objectives import objectives_from
from simulator.mix import MixEntry, as_tables, mix_from, mix_from_file, mixed, mixed_workload
from simulator.scenario import as_table, scenario_from
from simulator.workload import lengths_of, workload

CHAT = {
    "name": "chat", "share": 3, "class": "real-time", "priority": 1, "weight": 2.5, "ttft_slo_s": 1, "tpot_slo_s": 0.05
}  # fmt: skip
BATCH = {"name": "batch", "share": 1, "class": "best-effort", "ttft_slo_s": 30.0}


def some_requests(num: int) -> list[RequestFacts]:
    """Requests of which every second one has facts of its own."""
    own = {"priority": 7, "weight": 0.5, "slo": Slo(tpot_s=0.5)}
    return [
        RequestFacts(request_id=str(number), prompt_tokens=5, output_tokens=5, **(own if number % 2 else {}))  # type: ignore[arg-type]
        for number in range(num)
    ]


def test_requests_get_entries_by_share() -> None:
    """Shares need not sum up to 1; what an entry leaves out stays as it is; a seed fixes the draw."""
    mix = mix_from([CHAT, BATCH])
    given, entries = mixed(some_requests(4000), mix, 1)
    names = [entry.name for entry in entries]
    assert names.count("chat") / 4000 == pytest.approx(0.75, abs=0.03)
    for number, (request, name) in enumerate(zip(given, names, strict=True)):
        if name == "chat":
            assert (request.priority, request.weight, request.slo) == (1, 2.5, Slo(ttft_s=1.0, tpot_s=0.05))
        else:
            tpot_s = 0.5 if number % 2 else None
            assert (request.request_class, request.slo) == (BEST_EFFORT, Slo(ttft_s=30.0, tpot_s=tpot_s))
            assert (request.priority, request.weight) == ((7, 0.5) if number % 2 else (0, 1.0))
    assert mixed(some_requests(4000), mix, 1)[1] == entries
    assert mixed(some_requests(4000), mix, 2)[1] != entries


def test_shares_change_half_way() -> None:
    """The second half has its own shares; entries without a later share keep theirs, and the first half is as before."""
    tables = [
        {**CHAT, "share": 3, "later_share": 1},
        {**BATCH, "share": 1, "later_share": 6},
        {"name": "c", "share": 1},
    ]
    mix = mix_from(tables)
    names = [entry.name for entry in mixed(some_requests(8001), mix, 1)[1]]
    for half, shares in ((names[:4001], (0.6, 0.2, 0.2)), (names[4001:], (0.125, 0.75, 0.125))):
        found = [half.count(name) / len(half) for name in ("chat", "batch", "c")]
        assert found == pytest.approx(shares, abs=0.03)
    assert mix_from(as_tables(mix)) == mix
    constant = mix_from([{name: value for name, value in table.items() if name != "later_share"} for table in tables])
    assert [entry.name for entry in mixed(some_requests(4001), constant, 1)[1]] == names[:4001]


def test_a_workload_and_its_requests_get_the_same() -> None:
    """The columns of a simulated cluster's requests are those of the requests of one engine."""
    requests, mix = some_requests(500), mix_from([CHAT, BATCH, {"name": "rest", "share": 1}])
    work = workload(lengths_of(requests), np.arange(500.0))
    for service, plain in (
        (service_levels_of(requests), requests),
        (None, [RequestFacts(request_id=one.request_id, prompt_tokens=5) for one in requests]),
    ):
        levels = mixed_workload(replace(work, service=service), mix, 4).service
        given, entries = mixed(plain, mix, 4)
        expected = service_levels_of(given)
        assert levels is not None
        assert expected is not None
        for name in ("ttft_slo_s", "tpot_slo_s", "weight", "priority", "request_class"):
            np.testing.assert_array_equal(getattr(levels, name), getattr(expected, name))
        assert levels.mix_entry is not None
        assert levels.mix_entry.tolist() == [entry.name for entry in entries]
    assert mixed_workload(work, (), 4) is work


def test_the_target_for_the_first_token_may_grow_with_the_prompt() -> None:
    """For one request as for a workload."""
    mix = mix_from([{**CHAT, "ttft_slo_token_s": 0.001}])
    requests = [RequestFacts(request_id=str(size), prompt_tokens=size, output_tokens=5) for size in (1, 500)]
    given, _ = mixed(requests, mix, 0)
    assert [one.slo for one in given] == [Slo(ttft_s=1.001, tpot_s=0.05), Slo(ttft_s=1.5, tpot_s=0.05)]
    levels = mixed_workload(workload(lengths_of(requests), np.arange(2.0)), mix, 0).service
    assert levels is not None
    assert levels.ttft_slo_s.tolist() == [1.001, 1.5]


def test_a_mix_is_written_as_it_was_read() -> None:
    """Scenarios carry a mix, and write it as tables."""
    mix = mix_from([CHAT, BATCH])
    assert mix_from(as_tables(mix)) == mix
    scenario = scenario_from({"mix": [CHAT, BATCH]})
    assert scenario.mix == mix
    assert scenario_from(as_table(scenario)) == scenario
    assert "mix" not in as_table(scenario_from({}))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "mix: must be a list"),
        ("mix = 3", "mix: must be a list"),
        ("[[mixx]]", "mixx: is no known table; did you mean mix"),
        ("[[mix]]\nname = 1\nshare = 1", "mix[0].name: must be a text"),
        ("[[mix]]\nname = 'a'", "mix[0].share: is missing"),
        ("[[mix]]\nname = 'a'\nshare = 0", "mix[0].share: must be a number above 0, at most 1e+09, not 0"),
        (f"[[mix]]\nname = 'a'\nshare = 1{400 * '0'}", "mix[0].share: must be a number above 0, at most 1e+09, not 10"),
        (
            "[[mix]]\nname = 'a'\nshare = 1\nlater_share = -1",
            "mix[0].later_share: must be a number above 0, at most 1e",
        ),
        ("[[mix]]\nname = 'a'\nshare = true", "mix[0].share: must be a number above 0, at most 1e+09, not True"),
        ("[[mix]]\nname = 'a'\nshare = 1\n[[mix]]\nname = 'a'\nshare = 1", "mix[1].name: 'a' is a duplicate"),
        ("[[mix]]\nname = 'a'\nshare = 1\nweight = 0", "mix[0].weight: must be a number above 0, at most 1e+09, not 0"),
        (
            "[[mix]]\nname = 'a'\nshare = 1\nweight = nan",
            "mix[0].weight: must be a number above 0, at most 1e+09, not nan",
        ),
        (
            "[[mix]]\nname = 'a'\nshare = 1\nttft_slo_s = -1",
            "mix[0].ttft_slo_s: must be a number above 0, at most 1e+09, not -1",
        ),
        (
            "[[mix]]\nname = 'a'\nshare = 1\ntpot_slo_s = 'x'",
            "mix[0].tpot_slo_s: must be a number above 0, at most 1e+09, not 'x'",
        ),
        (
            "[[mix]]\nname = 'a'\nshare = 1\nttft_slo_token_s = 1",
            "mix[0].ttft_slo_token_s: is added to ttft_slo_s, which is missing",
        ),
        ("[[mix]]\nname = 'a'\nshare = 1\nclass = 'slow'", "mix[0].class: 'slow' is neither real-time nor best-effort"),
        ("[[mix]]\nname = 'a'\nshare = 1\npriority = 1.5", "mix[0].priority: must be a whole number"),
        ("[[mix]]\nname = 'a'\nshare = 1\ntpot_slo = 1", "mix[0].tpot_slo: is no known field; did you mean tpot_slo_s"),
        ("[[mix]\n", "is not TOML"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(text: str, error: str, tmp_path: Path) -> None:
    """The line names the file, the entry and the field."""
    path = tmp_path / "mix.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {error}')}[^\n]*$"):
        mix_from_file(str(path))


def test_an_entry_is_refused_where_it_is_made() -> None:
    """Values are checked in code as in files."""
    with pytest.raises(ValueError, match=r"^share: "):
        MixEntry(name="a", share=float("inf"))


OBJECTIVES = [
    {"name": "gold", "class": "best-effort", "weight": 3, "priority": 2, "ttft_slo_s": 0.5, "tpot_slo_s": 0.02,
     "when_late": "shed"},
    {"name": "plain", "ttft_slo_s": 9},
]  # fmt: skip
NAMED = [
    {"name": "all", "share": 1, "objective": "gold"},
    {"name": "own", "share": 1, "objective": "gold", "class": "real-time", "weight": 1, "ttft_slo_s": 4},
    {"name": "none", "share": 1},
]


def test_an_objective_gives_what_is_not_said() -> None:
    """Fields of the entry have precedence, then those of the request, then those of the objective."""
    mix = mix_from(NAMED)
    known = {one.name: one for one in objectives_from(OBJECTIVES)}
    requests, entries = mixed(some_requests(300), mix, 1, known)
    for number, (request, entry) in enumerate(zip(requests, entries, strict=True)):
        own_slo_s, own = (0.5, (7, 0.5)) if number % 2 else (None, None)
        facts = (request.request_class, request.priority, request.weight, request.slo)
        if entry.name == "all":
            assert facts == (BEST_EFFORT, *(own or (2, 3.0)), Slo(ttft_s=0.5, tpot_s=own_slo_s or 0.02))
        elif entry.name == "own":
            assert facts == ("real-time", own[0] if own else 2, 1.0, Slo(ttft_s=4.0, tpot_s=own_slo_s or 0.02))
        else:
            assert facts[:3] == ("real-time", *(own or (0, 1.0)))
    work = workload(lengths_of(some_requests(300)), np.arange(300.0))
    levels = mixed_workload(replace(work, service=service_levels_of(some_requests(300))), mix, 1, known).service
    assert levels is not None
    assert levels.when_late is not None
    named = {"all": "shed", "own": "shed", "none": "serve"}
    assert levels.when_late.tolist() == [named[entry.name] for entry in entries]
    assert service_levels_of(requests) is not None
    for name in ("ttft_slo_s", "tpot_slo_s", "weight", "priority", "request_class"):
        assert np.array_equal(getattr(levels, name), getattr(service_levels_of(requests), name), equal_nan=True)


def test_a_scenario_has_a_table_of_objectives() -> None:
    """It is written as it is read; an unknown name is refused, and so is any name without a table."""
    scenario = scenario_from({"mix": NAMED, "objective": OBJECTIVES, "traffic": {"num_requests": 50}})
    assert scenario_from(as_table(scenario)) == scenario
    levels = scenario.workload(4.0, 0).service
    assert levels is not None
    assert set(levels.ttft_slo_s[~np.isnan(levels.ttft_slo_s)].tolist()) == {0.5, 4.0}
    for table, error in (
        ({"mix": NAMED}, r"^mix\[0\].objective: 'gold' needs a table of objectives \(--objectives FILE\)$"),
        ({"mix": NAMED, "objective": OBJECTIVES[1:]}, r"^mix\[0\].objective: 'gold' is no known objective"),
    ):
        with pytest.raises(ValueError, match=error):
            scenario_from(table).workload(4.0, 0)
    with pytest.raises(ValueError, match=r"^mix\[0\].objective: must be at most 256 printable ASCII characters"):
        mix_from([{"name": "a", "share": 1, "objective": "a\nb"}])
