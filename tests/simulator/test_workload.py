"""Workloads have the requested rates, patterns and tags; errors in traces name row and column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simulator import workload as work
from simulator.scenario import Scenario, as_table, scenario_from

GENERATOR = 5


def generator() -> np.random.Generator:
    """A new generator with the same seed."""
    return np.random.default_rng(GENERATOR)


def test_rates_are_kept() -> None:
    """Drawn traffic has the requested rate, whatever its burstiness."""
    for gaps in (work.poisson_gaps, work.gamma_gaps(3.0), work.uniform_gaps):
        arrival_s = work.at_rate(gaps(50_000, generator()), 8.0)
        assert len(arrival_s) / arrival_s[-1] == pytest.approx(8.0, rel=0.05)


def test_gamma_gaps_have_the_requested_variation() -> None:
    """The gaps have the requested coefficient of variation."""
    gaps = work.gamma_gaps(2.5)(200_000, generator())
    assert gaps.std() / gaps.mean() == pytest.approx(2.5, rel=0.03)


def test_schedules_change_the_rate() -> None:
    """In each span of a schedule, requests arrive at its rate; none arrive if it is 0."""
    arrival_s = work.by_schedule(work.poisson_gaps(20_000, generator()), [(0, 10), (100, 0), (200, 40)])
    counts = [((arrival_s >= low) & (arrival_s < low + 100)).sum() for low in (0, 100, 200)]
    assert counts[0] == pytest.approx(1000, rel=0.1)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(4000, rel=0.05)
    with pytest.raises(ValueError, match="schedule"):
        work.by_schedule(np.ones(3), [(5, 1)])


def test_up_scaling_keeps_the_pattern() -> None:
    """A trace that is scaled in time has the requested rate, and its gaps keep their proportions."""
    arrival_s = np.array([3.0, 4.0, 6.0, 10.0])
    scaled = work.scaled_up(arrival_s, 6.0)
    assert 3 / (scaled[-1] - scaled[0]) == pytest.approx(6.0)
    assert np.diff(scaled) / np.diff(arrival_s) == pytest.approx(np.full(3, np.diff(scaled)[0]))


def test_tags_have_the_requested_errors() -> None:
    """Noisy tags have the requested spread; fitted tags have the tagger's spread at each length."""
    true = np.exp(generator().normal(5, 1, 20_000)).astype(np.int64) + 1
    median, spread = work.noisy(0.4)(true, generator())
    assert np.log(median / true).std() == pytest.approx(0.4, rel=0.05)
    assert (spread == 0.4).all()
    noise = np.where(true < 100, 0.1, 0.8)
    tagger = true * np.exp(noise * np.random.default_rng(9).standard_normal(len(true)))
    median, _ = work.fitted(true.astype(float), tagger, np.full(len(true), 0.5))(true, generator())
    errors = np.log(median / true)
    assert errors[true < 80].std() == pytest.approx(0.1, rel=0.3)
    assert errors[true > 150].std() == pytest.approx(0.8, rel=0.1)


def test_ranked_tags_are_as_accurate_on_other_lengths() -> None:
    """A tagger's accuracy, by rank and relative to the spread of lengths, is kept for lengths a twentieth as long."""
    draw = np.random.default_rng(9)
    evaluated = np.exp(draw.normal(6, 1, 20_000))
    medians = np.exp(6 + 0.7 * (np.log(evaluated) - 6) + 0.4 * draw.standard_normal(len(evaluated)))
    tags = work.ranked(evaluated, medians, np.full(len(evaluated), 0.6))
    true = np.exp(generator().normal(3, 0.5, 20_000)).astype(np.int64) + 1
    median, spread = tags(true, generator())

    def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.corrcoef(np.argsort(np.argsort(one)), np.argsort(np.argsort(other)))[0, 1])

    assert rank_correlation(np.log(true), median) == pytest.approx(rank_correlation(evaluated, medians), abs=0.04)
    assert np.abs(np.log(median / true)).mean() == pytest.approx(
        0.5 * np.abs(np.log(medians / evaluated)).mean(), rel=0.15
    )
    assert spread == pytest.approx(0.6 * np.log(true).std() / np.log(evaluated).std(), rel=0.01)
    alike, _ = tags(np.full(50, 7), generator())
    assert alike == pytest.approx(np.full(50, 7.0))
    with pytest.raises(ValueError, match="too few"):
        work.ranked(evaluated[:5], medians[:5], medians[:5])


def test_the_same_seed_gives_the_same_pattern_at_any_rate() -> None:
    """Another rate only scales the arrival times: prompts, responses and tags stay the same."""
    scenario = scenario_from({"traffic": {"num_requests": 50}, "tags": {"kind": "noisy"}})
    slow, fast = scenario.workload(2.0, 1), scenario.workload(4.0, 1)
    assert slow.arrival_s == pytest.approx(2 * fast.arrival_s)
    assert (slow.lengths.prompt_tokens == fast.lengths.prompt_tokens).all()
    assert (slow.tag_median == fast.tag_median).all()
    assert (slow.tag_median != scenario.workload(2.0, 2).tag_median).any()


def test_scenarios_can_be_written_and_read() -> None:
    """A scenario that is read from the table it was written as is equal."""
    scenario = scenario_from(
        {
            "instances": [{"count": 2, "engine": {"max_num_seqs": 4}}, {"profile": "llama-2-7b-a30"}],
            "traffic": {"schedule": [[0, 1], [10, 3]]},
            "conditions": {"outages": [{"instance": 1, "from_s": 3.0}]},
            "slo": {"ttft_s": 1.0},
        }
    )
    assert scenario_from(as_table(scenario)) == scenario
    assert scenario.changed(instances={"engine": {"max_num_seqs": 9}}).instances[1].engine == (("max_num_seqs", 9),)


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"instance": {}}, "instances"),
        ({"traffic": {"rates": 3}}, "traffic: 'rates' is unknown"),
        ({"instances": {"engine": {"max_seqs": 3}}}, "max_num_seqs"),
        ({"conditions": {"num_schedulers": 0}}, "num_schedulers"),
        ({"conditions": {"outages": [{"instance": 0, "from_s": 3.0, "until_s": 1.0}]}}, "until_s"),
        ({"tags": {"kind": "exakt"}}, "did you mean exact"),
        ({"traffic": {"arrivals": "trace"}}, "traffic.trace"),
    ],
)
def test_bad_scenarios_are_refused_by_name(table: dict[str, object], complaint: str) -> None:
    """Unknown keys and invalid values are named."""
    with pytest.raises(ValueError, match=complaint):
        scenario_from(table)


def trace(tmp_path: Path, text: str | bytes) -> Scenario:
    """A scenario with a trace file of this content."""
    file = tmp_path / "trace.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return scenario_from({"traffic": {"trace": str(file), "arrivals": "trace"}})


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (HEAD + "2023-11-16 18:00:05,10,5\n2023-11-16 18:00:03,10,5\n", "row 3: TIMESTAMP"),
        (HEAD + "2023-11-16 18:00:05,-10,5\n", "row 2: ContextTokens"),
        (HEAD + "2023-11-16 18:00:05,10\n", "row 2: GeneratedTokens: is missing"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:00:05,10\n", "row 2"),
        ("", "empty|none|no request"),
        (HEAD, "empty|none|no request"),
        (b"\x00\xff\xfe" * 4_000_000, "row 1"),
        (b"x" * 8_000_000, "row 1"),
        ("num_prefill_tokens,num_decode_tokens\n10,5\n", "no arrival times"),
    ],
    ids=["unsorted", "negative", "missing cell", "missing column", "empty", "only a head", "binary", "one long line",
         "no times"],
)  # fmt: skip
def test_bad_traces_are_refused_by_row_and_column(tmp_path: Path, text: str | bytes, complaint: str) -> None:
    """The error has one line that names the place."""
    with pytest.raises(ValueError, match=complaint):
        trace(tmp_path, text).workload(None, 0)


def test_a_huge_invalid_file_is_refused_by_its_beginning(tmp_path: Path) -> None:
    """A file of many gigabytes is not read in full."""
    file = tmp_path / "huge.csv"
    with file.open("wb") as out:
        out.truncate(50 << 30)  # sparse
    with pytest.raises(ValueError, match="row 1"):
        scenario_from({"traffic": {"trace": str(file)}}).workload(1.0, 0)


def test_traces_keep_or_scale_their_arrival_times(tmp_path: Path) -> None:
    """Without a rate, the arrival times are the trace's; with a rate, they are scaled."""
    scenario = trace(tmp_path, HEAD + "".join(f"2023-11-16 18:00:{second:02d},10,5\n" for second in (1, 2, 4, 8, 16)))
    assert scenario.workload(None, 0).arrival_s.tolist() == [0, 1, 3, 7, 15]
    assert scenario.workload(4.0, 0).arrival_s[-1] == pytest.approx(1.0)
