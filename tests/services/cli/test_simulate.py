"""`block simulate`, `capacity` and `recommend`."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from services.cli import block
from services.cli.slo_bound_lines import bound_lines
from simulator.slo_bound import KINDS, SloBound
from tests.services.cli.running import refusal

SMALL = (
    "--instances", "2", "--profile", "llama-2-7b-a30", "--max-num-seqs", "8", "--max-num-batched-tokens", "256",
    "--num-gpu-blocks", "200", "--max-model-len", "1024", "--prompt-tokens", "uniform:16:128",
    "--output-tokens", "uniform:16:64", "--num-requests", "60",
)  # fmt: skip


def run(*arguments: str) -> str:
    """Run a command that must succeed; return its standard output."""
    result = CliRunner().invoke(block, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_policies_are_compared(tmp_path: Path) -> None:
    """The results are a table, JSON, and a file of rows for each policy."""
    table = run("simulate", *SMALL, "--rate", "5", "--policy", "jsq,block")
    assert [line.split()[0] for line in table.splitlines()[1:3]] == ["jsq", "block"]
    found = json.loads(
        run("simulate", *SMALL, "--rate", "5", "--policy", "jsq", "--policy", "linear: lambda = 0.3", "--slo-ttft-s",
            "1", "--csv", str(tmp_path / "{policy}.csv"), "--json")
    )  # fmt: skip
    assert [one["policy"] for one in found["policies"]] == ["jsq", "linear: lambda = 0.3"]
    assert found["policies"][0]["num_finished"] == 60
    assert 0 < found["policies"][0]["slo_attainment"] <= 1
    with (tmp_path / "linear.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60
    assert {row["fate"] for row in rows} == {"finished"}
    assert all(float(row["ttft_s"]) <= float(row["e2e_s"]) for row in rows)


def test_a_mix_is_simulated(tmp_path: Path) -> None:
    """Requests of a mix have targets, and each policy's report and rows have what was attained."""
    mix = tmp_path / "mix.toml"
    mix.write_text("[[mix]]\nname = 'chat'\nshare = 1\nttft_slo_s = 0.2\ntpot_slo_s = 0.03\npriority = 2\n")
    arguments = ("simulate", *SMALL, "--rate", "20", "--policy", "jsq,random", "--mix", str(mix))
    table = run(*arguments, "--csv", str(tmp_path / "{policy}.csv"))
    assert [line for line in table.splitlines() if line in {"jsq", "random"}] == ["jsq", "random"]
    for one in json.loads(run(*arguments, "--json"))["policies"]:
        assert 0 < one["tdg_ratio"] < 1
        assert one["by_priority"]["2"]["tdg_ratio"] == one["tdg_ratio"]
        with (tmp_path / f"{one['policy']}.csv").open() as file:
            rows = list(csv.DictReader(file))
        on_time = sum(int(float(row["tokens_on_time"])) for row in rows)
        assert one["tdg_ratio"] == pytest.approx(on_time / sum(int(row["output_tokens"]) for row in rows))
        assert {row["mix"] for row in rows} == {"chat"}


MIX = """
[[mix]]
name = "chat"
share = 2
tenant = "one"
when_late = "shed"
ttft_slo_s = 0.5
tpot_slo_s = 0.04

[[mix]]
name = "reports"
share = 1
tenant = "two"
ttft_slo_s = 2.0
tpot_slo_s = 0.1
"""


@pytest.fixture
def mix(tmp_path: Path) -> str:
    """A file with two tiers."""
    file = tmp_path / "mix.toml"
    file.write_text(MIX)
    return str(file)


def test_attainment_is_reported_by_tier_and_tenant(mix: str) -> None:
    """Each policy has who attained what, by requests and by tokens; the bound stands beside all."""
    arguments = ("simulate", *SMALL, "--rate", "30", "--policy", "jsq,slo", "--mix", mix)
    found = json.loads(run(*arguments, "--json"))
    jsq, slo = found["policies"]
    assert list(jsq["by_tier"]) == ["0.04", "0.1"]
    assert jsq["by_tier"]["0.04"].items() <= jsq["by_tenant"]["one"].items()
    assert 0 < jsq["deadline_attained_tokens"] < 1
    assert jsq["missed_prompt_ratio"] > 0
    assert (slo["num_shed"], slo["num_demoted"]) == (
        sum(part["num_shed_with_targets"] for part in slo["by_tier"].values()), 0
    )  # fmt: skip
    assert slo["num_shed"] > 0 == slo["by_tier"]["0.1"]["num_shed_with_targets"]
    assert found["bound"]["optimum_qps"]["tiers"] < found["bound"]["bound_qps"]["0.99"]
    table = run(*arguments)
    assert "tier 40 ms" in table
    assert f"slo: {slo['num_shed']} shed" in table
    assert "no placement on these instances serves more requests/s by their deadlines than" in table
    assert f"tiers apart are worth {100 * found['bound']['worth_of_tiers']:.1f} %" in table


def test_best_effort_without_targets_is_reported(mix: str) -> None:
    """By class, tenant and entry: what was served and shed, and the latencies, also where there is no target."""
    Path(mix).write_text(MIX.replace("ttft_slo_s = 2.0\ntpot_slo_s = 0.1", "class = 'best-effort'"))
    arguments = ("simulate", *SMALL, "--rate", "30", "--policy", "slo", "--mix", mix)
    (slo,) = json.loads(run(*arguments, "--json"))["policies"]
    best_effort, real_time = slo["by_class"]["best-effort"], slo["by_class"]["real-time"]
    assert best_effort == slo["by_mix"]["reports"] == slo["by_tenant"]["two"]
    assert best_effort["num_requests"] + real_time["num_requests"] == 60
    assert real_time["num_shed"] == slo["num_shed"] > 0 == best_effort["num_shed"]
    assert best_effort["num_served"] == best_effort["num_requests"] > 0
    assert 0 < best_effort["ttft_s"]["p50"] < best_effort["e2e_s"]["p50"] <= best_effort["e2e_s"]["p99"]
    assert (best_effort["deadline_attained"], best_effort["num_with_targets"]) == (None, 0)
    rows = {line[:20].strip(): line.split() for line in run(*arguments).splitlines()}
    assert rows["class best-effort"][2] == str(best_effort["num_requests"])


def test_objectives_of_a_mix_are_simulated(mix: str, tmp_path: Path) -> None:
    """A file, or the scenario itself, has the table of the names that entries have; without one they are refused."""
    Path(mix).write_text("[[mix]]\nname = 'chat'\nshare = 1\nobjective = 'quick'\ntpot_slo_s = 0.04\n")
    table = "[[objective]]\nname = 'quick'\nttft_slo_s = 0.5\ntpot_slo_s = 9\nwhen_late = 'shed'\n"
    (tmp_path / "objectives.toml").write_text(table)
    arguments = ("simulate", *SMALL, "--rate", "30", "--policy", "slo", "--mix", mix)
    (named,) = json.loads(run(*arguments, "--objectives", str(tmp_path / "objectives.toml"), "--json"))["policies"]
    (tmp_path / "scenario.toml").write_text(table)
    (in_scenario,) = json.loads(run(*arguments, "-s", str(tmp_path / "scenario.toml"), "--json"))["policies"]
    assert named == in_scenario
    assert (list(named["by_tier"]), named["num_with_targets"]) == (["0.04"], 60)
    assert named["num_shed"] > 0
    assert "mix[0].objective: 'quick' needs a table of objectives (--objectives FILE)" in refusal(*arguments)
    (tmp_path / "objectives.toml").write_text(table.replace("quick", "fast"))
    error = refusal(*arguments, "--objectives", str(tmp_path / "objectives.toml"))
    assert "mix[0].objective: 'quick' is no known objective" in error


@pytest.mark.parametrize(
    ("text", "flags", "error"),
    [
        ("", ("--slo-ttft-s", "-1"), "slo_ttft_s: must be a number above 0, not -1.0"),
        ("", ("--slo-tpot-s", "nan"), "slo_tpot_s: must be a number above 0, not nan"),
        ("", ("--rate", "nan"), "rate: must be a number above 0, not nan"),
        ("slo = {ttft_s = 'x'}", (), "slo.ttft_s: must be a number above 0, not 'x'"),
        ("instances = 3", (), "instances: must be a table, or a list of tables, not 3"),
        ("instances = {engine = 3}", (), "instances.engine: must be a table, not 3"),
        ("conditions = 3", (), "conditions: must be a table, not 3"),
        ("traffic = 3", (), "traffic: must be a table, not 3"),
        ("conditions = {outages = 3}", (), "conditions.outages: must be a list of tables, not 3"),
        ("traffic = {schedule = [['a', 1]]}", (), "traffic.schedule[0]: must be a number from 0 on, not 'a'"),
        ("condition = {}", (), "scenario: 'condition' is unknown; did you mean conditions?"),
    ],
)
def test_bad_input_is_refused_by_its_name(text: str, flags: tuple[str, ...], error: str, tmp_path: Path) -> None:
    """One line, and no run."""
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(text)
    given = ("--rate", "5", *flags) if "--rate" not in flags else flags
    assert error in refusal("simulate", "--scenario", str(scenario), "--num-requests", "20", *given)


def test_demoted_requests_are_counted(mix: str) -> None:
    """Where late requests become best effort, the report says how many."""
    Path(mix).write_text(MIX.replace("shed", "demote"))
    found = json.loads(run("simulate", *SMALL, "--rate", "30", "--policy", "slo", "--mix", mix, "--json"))
    (slo,) = found["policies"]
    assert slo["num_demoted"] > 0 == slo["num_shed"]
    assert slo["by_tier"]["0.04"]["num_demoted_with_targets"] == slo["num_demoted"]


def test_goodput_is_found(mix: str) -> None:
    """The largest rates at which shares of the requests and of the tokens keep their deadlines, and the bound."""
    arguments = ("capacity", *SMALL, "--policy", "jsq", "--seeds", "2", "--resolution", "0.1", "--workers", "1",
                 "--mix", mix, "--attained", "0.8", "--attained", "0.95")  # fmt: skip
    found = json.loads(run(*arguments, "--json"))
    (jsq,) = found["policies"]
    for name in ("goodput_qps", "work_goodput_qps"):
        assert jsq[name]["0.8"]["mean"] > jsq[name]["0.95"]["mean"] > 0
        assert len(jsq[name]["0.8"]["per_seed"]) == 2
    assert jsq["goodput_qps"]["0.95"]["mean"] < found["bound"]["bound_qps"]["0.95"]
    at = jsq["goodput_qps"]["0.8"]
    assert not at["at_least"]
    assert at["deadline_attained"] >= 0.8
    assert at["by_tier"]["0.04"] == at["by_tenant"]["one"] == at["by_mix"]["chat"]
    assert at["by_class"]["real-time"]["deadline_attained"] == at["deadline_attained"]
    table = run(*arguments).splitlines()
    assert table[1].split("  ")[-1].strip() == "95 % of tokens"
    assert [line.split()[0] for line in table[2:4]] == ["jsq", "jsq:"]
    (tenant,) = (line for line in table if line.startswith("tenant one"))
    assert tenant.split()[2] == f"{at['by_tenant']['one']['deadline_attained']:.1%}"


def test_goodput_between_tiers_is_found(mix: str, tmp_path: Path) -> None:
    """Instances move between the tiers of a file; policies without forecasts have none."""
    tiers = tmp_path / "tiers.toml"
    tiers.write_text("[[tier]]\nname = 'fast'\ntpot_slo_s = 0.04\n[[tier]]\nname = 'slow'\ntpot_slo_s = 0.1\n")
    arguments = ("capacity", *SMALL, "--seeds", "2", "--resolution", "0.3", "--workers", "1", "--attained", "0.8",
                 "--mix", mix)  # fmt: skip
    found = json.loads(run(*arguments, "--policy", "polyserve", "--tiers", str(tiers), "--json"))
    at = found["policies"][0]["goodput_qps"]["0.8"]
    assert at["mean"] > 0
    assert 0 < at["num_serving"] <= 2
    assert "jsq makes no forecasts, which --tiers needs" in refusal(
        *arguments, "--policy", "jsq", "--tiers", str(tiers)
    )


def test_few_requests_show_a_least_rate(mix: str) -> None:
    """Where all requests may arrive at once, the output says so, and how to find the rate."""
    Path(mix).write_text(MIX.replace("0.5", "50").replace("2.0", "50"))
    few = ("capacity", *SMALL, "--num-requests", "20", "--policy", "jsq", "--seeds", "2", "--workers", "1")
    for more in ((), ("--mix", mix)):
        table = run(*few, *more)
        assert "jsq" in table
        assert "≥" in table
        assert "--num-requests" in table
        (jsq,) = json.loads(run(*few, *more, "--json"))["policies"]
        part = jsq["goodput_qps"]["0.99"] if more else jsq
        assert (part["at_least"], part["ci95"]) == (True, None)
        assert part["mean"] == pytest.approx(part["per_seed"][0])


def test_impossible_targets_are_reported(mix: str) -> None:
    """The goodput is 0, and there is no optimum of what no instance can do."""
    Path(mix).write_text(MIX.replace("0.5", "1e-6").replace("2.0", "1e-6"))
    arguments = ("capacity", *SMALL, "--policy", "jsq", "--seeds", "2", "--workers", "1")
    found = json.loads(run(*arguments, "--mix", mix, "--json"))
    assert found["policies"][0]["goodput_qps"]["0.9"]["per_seed"] == [0.0, 0.0]
    assert found["num_trials"] == 2
    assert set(found["bound"]["optimum_qps"].values()) == {None}
    for table in (run(*arguments, "--mix", mix), run(*arguments, "--limit-s", "1e-6")):
        assert "missed at all rates, even where requests hardly meet" in table
    simulated = run("simulate", *SMALL, "--rate", "5", "--policy", "jsq", "--mix", mix)
    last = simulated.splitlines()[-1]
    assert last.startswith("no placement on these instances serves any request by its deadlines")
    assert "inf" not in simulated


def test_a_cluster_is_recommended_by_deadlines(mix: str) -> None:
    """Each policy has the number of instances and its cost, also with a rule, beside the least cost."""
    arguments = ("recommend", *SMALL, "--rate", "15", "--policy", "jsq,block", "--seeds", "1", "--workers", "1",
                 "--mix", mix, "--attained", "0.9", "--autoscale", "headroom", "--cold-start-s", "1")  # fmt: skip
    found = json.loads(run(*arguments, "--json"))
    rows = {row["policy"]: row for row in found["ranking"]}
    assert rows["jsq"]["cost"]["autoscaled"] is None
    for row in rows.values():
        assert row["used"] <= 1
        assert row["cost"]["fixed"]["attained"] >= 0.9
    (least,) = found["bound"].values()
    assert 0 < least["instance_s_per_request"] < rows["block"]["cost"]["fixed"]["instance_s_per_request"]
    assert least["num_instances"] <= rows["block"]["num_instances"]
    assert rows["block"]["cost"]["autoscaled"]["instance_s_per_request"] > 0
    fixed = rows["jsq"]["cost"]["fixed"]
    assert fixed["by_tier"]["0.04"] == fixed["by_tenant"]["one"]
    assert fixed["deadline_attained"] == fixed["attained"]
    lines = run(*arguments).splitlines()
    assert "90 % of the requests with all tokens by their deadlines" in lines[0]
    assert sum("with headroom" in line for line in lines) == 1
    assert "instance-seconds per request, by whatever policy" in lines[-1]
    assert [line.split()[2] for line in lines if line.startswith("tenant one")] == [
        f"{_share_of_one(rows['block']):.1%}"
    ]


def _share_of_one(row: Any) -> float:
    share: float = row["cost"]["fixed"]["by_tenant"]["one"]["deadline_attained"]
    return share


def test_the_cost_of_tiers_is_shown(mix: str, tmp_path: Path) -> None:
    """With tiers, an instance in the best-effort pool is paid for and serves no tier."""
    tiers = tmp_path / "tiers.toml"
    tiers.write_text("[[tier]]\nname = 'fast'\ntpot_slo_s = 0.04\n[[tier]]\nname = 'slow'\ntpot_slo_s = 0.1\n")
    found = json.loads(
        run("recommend", *SMALL, "--rate", "12", "--policy", "slo", "--seeds", "1", "--workers", "1", "--mix", mix,
            "--attained", "0.5", "--autoscale", "tiers", "--tiers", str(tiers), "--cold-start-s", "1", "--json")
    )  # fmt: skip
    (row,) = found["ranking"]
    cost = row["cost"]["autoscaled"]
    assert 0 < cost["serving_s_per_request"] < cost["instance_s_per_request"]


@pytest.mark.slow
def test_pools_are_recommended_by_deadlines(mix: str) -> None:
    """A share of the tokens can be the target of pools as well."""
    arguments = ("recommend", *SMALL, "--rate", "8", "--policy", "jsq", "--seeds", "1", "--workers", "1", "--pools",
                 "--max-instances", "6", "--mix", mix, "--by-work", "--json")  # fmt: skip
    found = json.loads(run(*arguments))
    assert found["target"]["goal"] == {"share": 0.9, "by_work": True}
    assert found["ranking"][0]["used"] <= 1


@pytest.mark.slow
def test_pools_have_costs_and_the_bound(mix: str) -> None:
    """As co-located instances have, each with the instances that were recommended."""
    arguments = ("recommend", *SMALL, "--rate", "5", "--policy", "jsq", "--seeds", "1", "--workers", "1", "--pools",
                 "--max-instances", "6", "--mix", mix)  # fmt: skip
    found = json.loads(run(*arguments, "--json"))
    (least,) = found["bound"].values()
    for row in found["ranking"]:
        cost = row["cost"]["fixed"]
        assert cost["instance_s_per_request"] > least["instance_s_per_request"] > 0
        assert cost["attained"] >= 0.9
        assert row["num_instances"] >= least["num_instances"]
    lines = run(*arguments).splitlines()
    assert sum("instance-seconds per request with a fixed number of instances" in line for line in lines) == 2
    assert "instance-seconds per request, by whatever policy" in lines[-1]


def test_tiers_and_a_changing_number_of_instances_are_simulated(tmp_path: Path) -> None:
    """The report has what the instances cost: paid for, and in tiers."""
    (tmp_path / "mix.toml").write_text("[[mix]]\nname = 'chat'\nshare = 1\nttft_slo_s = 2\ntpot_slo_s = 0.1\n")
    (tmp_path / "tiers.toml").write_text("[[tier]]\nname = 'chat'\ntpot_slo_s = 0.1\n")
    arguments = ("simulate", *SMALL, "--rate", "5", "--policy", "polyserve", "--mix", str(tmp_path / "mix.toml"))
    tiers = ("--tiers", str(tmp_path / "tiers.toml"))
    (fixed,) = json.loads(run(*arguments, *tiers, "--json"))["policies"]
    assert fixed["num_finished"] == 60
    assert fixed["instance_s"] >= fixed["span_s"] * 2
    assert 0 < fixed["serving_instance_s"] < fixed["instance_s"]
    assert fixed["tier_instance_s"]["chat"] <= fixed["serving_instance_s"]
    assert fixed["num_moves"] > 0
    assert "instance-seconds paid" in run(*arguments, *tiers)
    for more in (tiers, ()):
        (grown,) = json.loads(run(*arguments, *more, "--provision", "1-2", "--cold-start-s", "1", "--json"))["policies"]
        assert grown["num_finished"] == 60
        assert grown["instance_s"] < fixed["instance_s"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tiers", "none.toml"), "none.toml: cannot be read"),
        (("--tiers", "bad.toml"), "bad.toml: tier[0].max_instances: must be a whole number from 1 on, not 0"),
        (("--tiers", "fast.toml"), "tier: tpot_slo_s: no instance can keep the 0.1 ms of 'fast': the shortest step of"),
        (("--provision", "3-2"), "provision: must be 1 <= MIN <= MAX"),
        (("--provision", "1-9"), "max_instances: 9 is more than the 2 available instances"),
    ],
)
def test_invalid_tiers_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], message: str
) -> None:
    """One line."""
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("[[tier]]\nname = 'chat'\ntpot_slo_s = 0.1\nmax_instances = 0\n")
    Path("fast.toml").write_text("[[tier]]\nname = 'fast'\ntpot_slo_s = 0.0001\nmin_instances = 1\n")
    assert message in refusal("simulate", *SMALL, "--rate", "5", "--policy", "polyserve", *more)


def test_a_rule_without_decode_legs_is_refused_for_instances_that_decode(tmp_path: Path) -> None:
    """The error names what the user has set, and where it belongs; there it works."""
    file = tmp_path / "pools.toml"
    pools = "[instances]\nprofile = 'llama-2-7b-a30'\ncount = 2\nrole = 'decode'\nnum_prefill = 1\n"
    file.write_text(pools)
    arguments = ("simulate", "--scenario", str(file), "--rate", "5", "--policy", "slo", "--num-requests", "20")
    assert refusal(*arguments, "--batcher", "decode_then_edf") == (
        "block: batcher: decode_then_edf serves no decode legs, so only prefill instances can run it; leave batcher "
        'out, and set it for them in the scenario: prefill_engine = { batcher = "decode_then_edf" }\n'
    )
    file.write_text(pools + 'prefill_engine = { batcher = "decode_then_edf" }\n')
    assert json.loads(run(*arguments, "--json"))["policies"][0]["num_finished"] == 20


def test_parquet_holds_what_csv_holds(tmp_path: Path) -> None:
    """The rows are the same, with types."""
    parquet = pytest.importorskip("pyarrow.parquet")
    for ending in ("csv", "parquet"):
        run("simulate", *SMALL, "--rate", "5", "--policy", "block", "--csv", str(tmp_path / f"rows.{ending}"))
    table = parquet.read_table(tmp_path / "rows.parquet").to_pydict()
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(table) == list(rows[0])
    assert [float(row["finished_s"]) for row in rows] == table["finished_s"]


def test_the_same_seed_gives_the_same_bytes() -> None:
    """The output is reproducible, and depends on the seed."""
    arguments = ("simulate", *SMALL, "--rate", "8", "--policy", "power_of_two", "--step-noise", "0.2", "--json")
    assert run(*arguments, "--seed", "3") == run(*arguments, "--seed", "3") != run(*arguments, "--seed", "4")


def test_scenarios_come_from_files(tmp_path: Path) -> None:
    """A TOML file has all settings, flags take precedence, and kinds of instances can be mixed."""
    file = tmp_path / "scenario.toml"
    file.write_text(
        """
        instances = [
            { profile = "llama-2-7b-a30", count = 1, engine = { max_model_len = 1024, num_gpu_blocks = 200 } },
            { profile = "llama-3.1-8b-h100", count = 2, engine = { max_model_len = 2048 } },
        ]
        [traffic]
        prompt_tokens = "64"
        output_tokens = "16"
        num_requests = 40
        [conditions]
        network_s = 0.5
        """
    )
    slow = json.loads(run("simulate", "-s", str(file), "--rate", "5", "--policy", "block", "--json"))
    fast = json.loads(
        run("simulate", "-s", str(file), "--rate", "5", "--policy", "block", "--network-s", "0", "--json")
    )
    assert slow["num_instances"] == 3
    waits_s = [one["policies"][0]["ttft_s"]["mean"] for one in (slow, fast)]
    assert waits_s[0] - waits_s[1] == pytest.approx(0.5, abs=0.1)


def test_recorded_requests_are_replayed(tmp_path: Path) -> None:
    """Requests with their tags are replayed at their own rate, or at another."""
    file = tmp_path / "requests.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"request_id": f"r{n}", "arrival_s": 100.0 + n / 4, "prompt_tokens": 50 + n, "output_tokens": 20,
                        "tag": {"median_tokens": 30.0, "spread": 0.4}})
            for n in range(40)
        )
    )  # fmt: skip
    found = [
        json.loads(run("simulate", "--replay", str(file), *SMALL, "--policy", "block", "--json", *more))["policies"][0]
        for more in ((), ("--rate", "16"))
    ]
    assert [one["num_finished"] for one in found] == [40, 40]
    assert found[0]["span_s"] > 9.75 > found[1]["span_s"]


def test_capacity_is_found() -> None:
    """Each policy has a capacity with a confidence interval."""
    found = json.loads(
        run("capacity", *SMALL, "--policy", "jsq,round_robin", "--seeds", "2", "--limit-s", "1", "--resolution", "0.05",
            "--workers", "1", "--json")
    )  # fmt: skip
    capacities = {one["policy"]: one for one in found["policies"]}
    assert capacities["jsq"]["mean"] > 0
    assert capacities["jsq"]["ci95"] > 0
    assert len(capacities["round_robin"]["per_seed"]) == 2


def test_a_cluster_is_recommended() -> None:
    """Policies are ranked by the cluster size that they need."""
    found = json.loads(
        run("recommend", *SMALL, "--rate", "10", "--policy", "jsq,random", "--seeds", "1", "--workers", "1", "--json")
    )
    sizes = [row["num_instances"] for row in found["ranking"]]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("simulate", *SMALL), "rate"),
        (("simulate", *SMALL, "--rate", "-1"), "rate"),
        (("simulate", *SMALL, "--rate", "1", "--policy", "bolck"), "did you mean block"),
        (("simulate", *SMALL, "--rate", "1", "--tags", "noisy:x"), "--tags"),
        (("simulate", *SMALL, "--rate", "1", "--num-schedulers", "0"), "num_schedulers"),
        (("simulate", *SMALL, "--rate", "1", "--csv", "rows.txt", "--policy", "jsq"), "must end in"),
        (("simulate", "nowhere.csv", "--rate", "1"), "nowhere.csv"),
        (("simulate", *SMALL, "--rate", "1", "--mix", "nowhere.toml"), "nowhere.toml: cannot be read"),
        (("simulate", *SMALL, "--rate", "1", "--priority-weight", "1=-1"), "priority_weight: '1=-1'"),
        (("capacity", *SMALL, "--seeds", "1"), "seeds"),
        (("capacity", *SMALL, "--attained", "0.9"), "^mix: "),
        (("capacity", *SMALL, "--warm-up", "10"), "^--warm-up: is for goodput"),
        (("capacity", *SMALL, "--tiers", "tiers.toml"), "^--tiers: is for goodput"),
        (("capacity", *SMALL, "--warm-up", "-1"), "^--warm-up: must be a time from 0 on, not -1.0"),
        (("capacity", *SMALL, "--mix", "nowhere.toml"), "nowhere.toml"),
        (("recommend", *SMALL, "--rate", "1", "--attained", "0.9"), "^mix: "),
        (("recommend", *SMALL, "--rate", "1", "--by-work"), "^--by-work: needs --mix"),
        (("simulate", *SMALL, "--rate", "1", "--cold-start-s", "5"), "^--cold-start-s: needs --provision"),
        (("recommend", *SMALL, "--rate", "1", "--autoscale", "headroom"), "^--autoscale: needs --mix"),
        (("capacity", *SMALL, "--limit-s", "0"), "limit_s"),
        (("recommend", *SMALL, "--rate", "1", "--slo-ttft-s", "-1"), "slo_ttft_s"),
        (("experiment", "block-table3"), "block-table2"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: tuple[str, ...], complaint: str) -> None:
    """The error is one line that names the field."""
    with pytest.raises(ValueError, match=complaint):
        CliRunner().invoke(block, list(arguments), standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("capacity", "--attained", "1.5"), "^attained: must be a share above 0, at most 1, not 1.5"),
        (("capacity", "--attained", "0"), "^attained: "),
        (("capacity", "--percentile", "90"), "^--percentile: is for latencies"),
        (("capacity", "--max-seeds", "9"), "^--max-seeds: is for latencies"),
        (("recommend", "--rate", "5", "--attained", "-1"), "^attained: "),
        (("recommend", "--rate", "5", "--slo-ttft-s", "1"), "^--slo-ttft-s: --mix and --attained are about deadlines"),
        (("recommend", "--rate", "5", "--tiers", "tiers.toml"), "^--tiers: needs --autoscale"),
        (("recommend", "--rate", "5", "--cold-start-s", "5"), "^--cold-start-s: needs --autoscale"),
        (("recommend", "--rate", "5", "--autoscale", "grow"), "^autoscale: rule: must be one of .*, not 'grow'"),
        (("recommend", "--rate", "5", "--autoscale", "tiers"), "^autoscale: the rule tiers, and no other, needs"),
        (("recommend", "--rate", "5", "--autoscale", "headroom", "--pools"), "^--autoscale: cannot be combined"),
        (("recommend", "--rate", "5", "--autoscale", "headroom", "--cold-start-s", "-1"), "^cold_start_s: "),
    ],
)
def test_bad_options_of_deadlines_are_refused(mix: str, arguments: tuple[str, ...], complaint: str) -> None:
    """The error is one line that names the field."""
    name, *rest = arguments
    given = [name, *SMALL, "--mix", mix, "--workers", "1", *rest]
    with pytest.raises(ValueError, match=complaint):
        CliRunner().invoke(block, given, standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("ttft_slo_s = 0.5", "ttft_slo_s = -0.5"), "ttft_slo_s"),
        (("share = 2", "share = 2\nweight = -1"), "weight"),
        (("tpot_slo_s = 0.1", 'tpot_slo_s = "fast"'), "tpot_slo_s"),
        ((MIX, "[[mix]]\nname = 'all'\nshare = 1\ntpot_slo_s = 0.1"), "^mix: goodput needs requests with ttft_slo_s"),
    ],
)
def test_bad_mixes_are_refused(mix: str, change: tuple[str, str], complaint: str) -> None:
    """A negative target or weight, and a mix without deadlines."""
    Path(mix).write_text(MIX.replace(*change))
    given = ["capacity", *SMALL, "--mix", mix, "--workers", "1"]
    with pytest.raises(ValueError, match=complaint):
        CliRunner().invoke(block, given, standalone_mode=False, catch_exceptions=False)


def test_shares_are_printed_as_they_were_given() -> None:
    """A share of 99.5 % is not rounded to all."""
    bound = SloBound(
        num_instances=1, num_requests=2, tokens=np.ones(2), costs_s=np.ones(2), optimum_s=dict.fromkeys(KINDS, 1.0),
        tier_s={"0.05": 1.0}, allowed_s=1.0,
    )  # fmt: skip
    first, _, *others = bound_lines(bound, (0.995,))
    assert not any("tiers apart are worth" in line for line in others)  # there is one tier only
    two = replace(bound, tier_s={"0.05": 1.0, "0.1": 1.0})
    assert "tiers apart are worth 0.0 %" in list(bound_lines(two))
    assert "with 99.5 % of the requests" in first
    assert "with 99.5 % of the tokens" in first


def test_pools_need_two_instances() -> None:
    """One in each."""
    arguments = ["recommend", "--pools", "--max-instances", "1", *SMALL[2:], "--rate", "5", "--workers", "1"]
    with pytest.raises(ValueError, match="max_instances: must be at least 2 with --pools, not 1"):
        CliRunner().invoke(block, arguments, standalone_mode=False, catch_exceptions=False)
