"""Conversations grow turn by turn, and decisions of a simulated cluster know them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from simulator.assembly import simulate
from simulator.conditions import Conditions
from simulator.scenario import scenario_from
from simulator.workload import Workload
from tests.simulator.small_clusters import specs

TALK = {
    "traffic": {
        "turns": "uniform:1:6", "pause_s": "uniform:1:3", "prompt_tokens": "uniform:5:60",
        "output_tokens": "uniform:1:40", "num_requests": 400,
    },
    "instances": [{"engine": {"max_model_len": 300}}],
}  # fmt: skip


def talk(rate: float = 20.0, seed: int = 1, **traffic: object) -> Workload:
    """Conversations."""
    return scenario_from({**TALK, "traffic": {**TALK["traffic"], **traffic}}).workload(rate, seed)


def blocks_of(work: Workload, row: int) -> list[int]:
    """The blocks of a prompt."""
    first = work.lengths.first_content
    return work.lengths.contents[first[row] : first[row + 1]].tolist()


def test_every_prompt_contains_all_that_was_said_before() -> None:
    """Blocks are those of the last prompt and more, no other conversation has them, and all fit into the context."""
    work = talk()
    assert work.session is not None
    seen: dict[int, int] = {}  # a block's session
    num_turns = 0
    for session in range(int(work.session.max()) + 1):
        rows = np.flatnonzero(work.session == session)
        prompts, outputs = work.lengths.prompt_tokens[rows], work.lengths.output_tokens[rows]
        pauses_s = np.diff(work.arrival_s[rows])
        assert ((pauses_s > 1 - 1e-9) & (pauses_s < 3 + 1e-9)).all()
        assert (prompts[1:] >= prompts[:-1] + outputs[:-1] + 5).all()
        assert (prompts + outputs <= 300).all()
        for before, after in pairwise(rows):
            assert blocks_of(work, after)[: len(blocks_of(work, before))] == blocks_of(work, before)
            num_turns += 1
        last = blocks_of(work, rows[-1])
        assert len(last) == prompts[-1] // 16
        assert all(seen.setdefault(block, session) == session for block in last)
    assert num_turns > 100
    assert (np.diff(work.arrival_s) >= 0).all()


def test_the_rate_is_that_of_all_requests() -> None:
    """And the same seed gives the same conversations at any rate."""
    slow, fast = talk(10.0, num_requests=20_000), talk(40.0, num_requests=20_000)
    assert len(slow) / slow.arrival_s[-1] == pytest.approx(10.0, rel=0.05)
    assert sorted(slow.lengths.prompt_tokens) == sorted(fast.lengths.prompt_tokens)


def test_sessions_stay_where_a_policy_keeps_them() -> None:
    """Each on one instance with an affinity without bound; without affinity on several."""
    work = talk()
    made = specs(enable_prefix_caching=True, max_model_len=300)
    assert work.session is not None

    def num_places(policy: str) -> int:
        instances = simulate(made, work, policy).decisions.instance
        return len(set(zip(work.session.tolist(), instances.tolist(), strict=True)))

    num_sessions = int(work.session.max()) + 1
    assert num_places("jsq: session_affinity = 1e6") == num_sessions
    assert num_places("random: session_affinity = 1e6") == num_sessions
    assert num_places("jsq") > 1.2 * num_sessions


def test_a_session_has_its_scheduler() -> None:
    """Among several, so that its memory suffices."""
    work = talk()
    made = specs(enable_prefix_caching=True, max_model_len=300)
    conditions = Conditions(num_schedulers=3)
    made_by = simulate(made, work, "jsq: session_affinity = 1e6", conditions).decisions
    assert work.session is not None
    pairs = set(zip(work.session.tolist(), made_by.scheduler.tolist(), strict=True))
    assert len(pairs) == int(work.session.max()) + 1
    assert set(made_by.scheduler.tolist()) == {0, 1, 2}
    assert len(set(zip(work.session.tolist(), made_by.instance.tolist(), strict=True))) == len(pairs)


def test_traces_name_sessions(tmp_path: Path) -> None:
    """Requests without one belong to none; traces without any have no column of them."""
    rows = [
        {"prompt_tokens": 9, "output_tokens": 4, "arrival_s": at, "session_id": name} for at, name in enumerate("aba")
    ]
    rows.append({"prompt_tokens": 9, "output_tokens": 4, "arrival_s": 3})
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    traffic = {"trace": str(path), "arrivals": "trace"}
    session = scenario_from({"traffic": traffic}).workload(None, 0).session
    assert session is not None
    assert session.tolist() == [0, 1, 0, -1]
    path.with_name("bare.jsonl").write_text(json.dumps(rows[-1]))
    assert (
        scenario_from({"traffic": {**traffic, "trace": str(path.with_name("bare.jsonl"))}}).workload(None, 0).session
        is None
    )


@pytest.mark.parametrize(
    ("traffic", "error"),
    [
        ({"turns": "5", "trace": "x.csv"}, "traffic.turns: is for drawn requests"),
        ({"turns": "5", "block_tokens": 0}, "traffic.block_tokens: must be at least 1"),
        ({"turns": "many"}, "traffic.turns: 'many' is neither"),
        ({"turns": 4}, "traffic.turns: must be text"),
        ({"turns": "5", "pause_s": 10.0}, "traffic.pause_s: must be text"),
        ({"turns": "5", "pause_s": "long"}, "traffic.pause_s: 'long' is neither"),
    ],
)
def test_impossible_conversations_are_refused(traffic: dict[str, object], error: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=f"^{error}"):
        scenario_from({"traffic": traffic}).workload(1.0, 0)


# Forecasts with several lengths.


def test_forecasts_with_several_lengths_leave_the_request_as_it_is() -> None:
    """Without deadlines nothing depends on the other lengths: the times are those of the median."""
    work = replace(talk(), tag_spread=np.full(400, 0.5))
    work = replace(work, tag_median=work.lengths.output_tokens.astype(np.float64))
    made = specs(enable_prefix_caching=True, max_model_len=300)
    plain, several = (simulate(made, work, policy) for policy in ("block", "block: length_quantiles = 3"))
    for name in ("instance", "predicted_e2e_s", "predicted_ttft_s"):
        assert np.array_equal(plain.decisions[name], several.decisions[name]), name
    assert np.array_equal(plain.outcomes.finished_s, several.outcomes.finished_s)
