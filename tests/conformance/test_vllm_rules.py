"""Compares the plug-in's scheduler classes in vLLM 0.32 with the engine model under the same rule, at every step."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from predictor.batching import BATCHERS, settled
from predictor.config import EngineConfig
from predictor.profile import profile_to_json
from predictor.vllm_versions import release_of
from services.engine_state.layout import CLIENT
from tests.conformance.compare import first_difference
from tests.conformance.ruled_workloads import PROFILE, SECONDS, our_engine, our_steps, ruled_workload
from tests.conformance.vllm_side import interpreter, plugin_traces
from tests.deploy.installing import PLUGIN, pip_install
from tests.strategies import PLANNED

pytestmark = pytest.mark.vllm

DEFAULT_RUNS = 300
# Events of `vllm_trace.py` that a default run must have in five workloads or more.
EVENTS = (
    "budget_cuts", "ended_by_eos", "evictions", "preempted_with_output_in_flight", "preemptions", "prefix_hits",
    "resumed_with_hits", "running_left_out", "threshold_cuts",
)  # fmt: skip

# Settings of an engine that is operated by a script.
ROOMY = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "num_gpu_blocks": 65, "max_model_len": 64,
    "scheduling_policy": "fcfs", "enable_prefix_caching": True, "async_scheduling": False, "watermark": 0.0,
    "long_prefill_token_threshold": 0, "scheduler_reserve_full_isl": True, "batcher_options": {},
}  # fmt: skip

Traced = list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the plug-in into a folder, with the profile of the workloads."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    folder = tmp_path_factory.mktemp("site-packages")
    pip_install(PLUGIN, folder)
    (folder / "exact.json").write_text(profile_to_json(PROFILE))
    return folder


@pytest.fixture(scope="module")
def traced(installed: Path) -> Traced:
    """Return workloads with the traces of vLLM, in which the plug-in is installed."""
    runs = int(os.environ.get("BLOCK_CONFORMANCE_RUNS", DEFAULT_RUNS))
    workloads = [ruled_workload(seed, str(installed / "exact.json")) for seed in range(runs)]
    return list(zip(workloads, answers(workloads, installed), strict=True))


def answers(workloads: list[dict[str, Any]], installed: Path) -> list[dict[str, Any]]:
    """Return what vLLM with the plug-in makes of the workloads."""
    return [json.loads(line) for line in plugin_traces(workloads, installed)]


@pytest.mark.parametrize("rule", PLANNED)
def test_the_engine_model_makes_the_decisions_of_the_plug_in(traced: Traced, rule: str) -> None:
    """Scheduled tokens in order, queues, preemptions, free blocks and times are equal at every step."""
    loads = [(load, trace["steps"]) for load, trace in traced if load["rule"] == rule]
    differences = [first_difference(load, steps, our_steps(load)) for load, steps in loads]
    found = [difference for difference in differences if difference is not None]
    assert loads
    assert not found, f"{len(found)} of {len(loads)} workloads differ; the first:\n{found[0]}"


def test_the_workloads_reach_what_a_plan_must_foresee(traced: Traced) -> None:
    """The real scheduler preempts nobody by itself, and only where it reserves whole prompts does it refuse an admission."""
    reached: Counter[str] = Counter()
    for load, trace in traced:
        reached.update(trace["coverage"].keys())
        refused = trace["coverage"].get("admission_stops", 0)
        assert trace["coverage"]["unplanned"] == refused
        assert not refused or load["engine"]["scheduler_reserve_full_isl"] or load["engine"]["watermark"]
    if len(traced) >= DEFAULT_RUNS:
        assert {event: reached[event] for event in EVENTS if reached[event] < 5} == {}


def test_what_is_not_supported_is_refused_in_one_line(installed: Path) -> None:
    """The message names the rule, and the setting or what the engine has."""
    profile = str(installed / "exact.json")
    cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("slide_batching", {}, {}, "profile: slide_batching plans by step times; name a profile in block_rule or BLOCK_RULE"),
        ("edf", {}, {"options": {"eta": 0.5}}, "profile: edf plans by step times; name a profile in block_rule or BLOCK_RULE"),
        ("edf", {}, {"profile": "none.json"}, "profile: none.json cannot be read: No such file or directory"),
        ("edf", {}, {"profiel": profile}, "--additional-config: block_rule.profiel: is no known setting; did you mean profile?"),
        ("edf", {}, {"profile": profile, "options": {"etta": 1}}, "batcher_options.etta: is no known option of edf; did you mean eta?"),
        ("edf", {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}, {}, "enable_chunked_prefill: edf supports only True, not False"),
        ("edf", {"enable_chunked_prefill": True}, {}, ""),
    ]  # fmt: skip
    asked = []
    for rule, engine, settings, _ in cases:
        load = ruled_workload(1, profile)
        asked.append({**load, "rule": rule, "settings": settings, "engine": load["engine"] | engine})
    for (rule, _, _, message), found in zip(cases, answers(asked, installed), strict=True):
        expected = f"block-vllm-export: {rule}: {message}" if message else None
        assert found.get("refused") == expected


def test_a_failing_rule_leaves_the_engine_to_vllm(installed: Path) -> None:
    """From that step on all requests end in the order of vLLM alone."""
    load = {**ruled_workload(8, str(installed / "exact.json")), "fails_at": 3}
    (found,) = answers([load], installed)
    assert found["has_failed"]
    assert found["coverage"]["finished"] == len(load["requests"])


def test_impossible_facts_are_counted_and_ignored(installed: Path) -> None:
    """They change nothing, as if the client had not sent them."""
    load = ruled_workload(2, str(installed / "exact.json"))
    for request in load["requests"]:
        request["xargs"] = {}
    wrong = json.loads(json.dumps(load))
    for request in wrong["requests"]:
        request["xargs"] = {"block_ttft_s": -1, "block_tpot_s": "soon", "block_weight": 0, "block_class": [1]}
    plain, found = answers([load, wrong], installed)
    assert found["bad_facts"] == 4 * len(load["requests"])
    assert not found["has_failed"]
    assert found["steps"] == plain["steps"]


def test_the_state_file_names_the_rule(traced: Traced) -> None:
    """A sidecar's model gets the rule, its options, the engine's limits, and its version."""
    for load, trace in traced[: len(PLANNED)]:
        version = trace["exported"]["vllm_version"]
        assert release_of(version) == (0, 32)
        config = settled(EngineConfig(**trace["exported"]))
        assert config == settled(EngineConfig(**load["engine"], batcher=load["rule"], vllm_version=version))


def test_the_state_is_exported_beside_a_rule(traced: Traced, installed: Path) -> None:
    """Exporting changes no step, and does not fail, with and without async scheduling."""
    some = traced[: 2 * len(PLANNED)]
    assert len({load["engine"]["async_scheduling"] for load, _ in some}) == 2
    loads = [{**load, "state_file": str(installed / f"{load['seed']}.state")} for load, _ in some]
    for (_, alone), found in zip(some, answers(loads, installed), strict=True):
        assert found["exports"]
        assert found["steps"] == alone["steps"]


def test_the_state_file_has_what_the_rule_remembers(installed: Path) -> None:
    """After each step, clients and counters are those of the engine model; other rules have no room for clients."""
    seeds = [seed for seed in range(6 * len(PLANNED)) if PLANNED[seed % len(PLANNED)] in ("weighted_vtc", "edf")]
    loads = [ruled_workload(seed, str(installed / "exact.json")) for seed in seeds]
    loads = [{**load, "state_file": str(installed / f"{load['seed']}.memory")} for load in loads]
    most: Counter[str] = Counter()
    for load, found in zip(loads, answers(loads, installed), strict=True):
        engine = our_engine(load)
        head, room = engine.state.engine[0], BATCHERS[load["rule"]].max_clients
        for number, remembered in enumerate(found["remembered"]):
            assert engine.next_step() is not None
            clients = [list(one)[: len(CLIENT)] for one in engine.state.clients[: head.num_clients].tolist()]
            ours = {"memory": head.memory.tolist(), "clients": clients, "room": room}
            assert remembered == ours, f"seed {load['seed']}, step {number}"
            most[load["rule"]] = max(most[load["rule"]], len(clients))
    assert most["weighted_vtc"] > 3
    assert most["edf"] == 0


def take_half_the_time(load: dict[str, Any]) -> None:
    """Let real steps take half the time that the profile predicts, which is corrected."""
    load["settings"]["correction"] = True
    load["seconds"] = {name: seconds / 2 for name, seconds in SECONDS.items()}


def factor_for_half(steps: list[dict[str, Any]]) -> Any:
    """Return the factor after these steps, each of which took half the predicted time."""
    observed = sum(bool(step["scheduled"]) for step in steps)
    return pytest.approx(0.5 + 0.5 * 0.9**observed)


def test_the_correction_follows_the_real_steps(installed: Path) -> None:
    """With async scheduling, and real steps of half the predicted time, no plan runs ahead of the clock."""
    profile = str(installed / "exact.json")
    loads = [ruled_workload(seed, profile) for seed in range(10 * len(PLANNED))]
    loads = [load for load in loads if load["engine"]["async_scheduling"] and load["rule"] in {"edf", "slide_batching"}]
    for load in loads:
        take_half_the_time(load)
    found = answers(loads, installed)
    for trace in found:
        longest_s = max(step["end_s"] - step["start_s"] for step in trace["steps"])
        assert trace["refused_samples"] == 0
        assert trace["factor"] == factor_for_half(trace["steps"])
        assert max(trace["leads_s"]) <= 2 * longest_s


def scripted(script: list[list[Any]], installed: Path, rule: str = "sarathi_fcfs", **engine: Any) -> dict[str, Any]:
    """Return what the operations of a script make vLLM do."""
    load = ruled_workload(0, str(installed / "exact.json"))
    load["settings"]["options"] = {}
    load["engine"] = {**load["engine"], **ROOMY, **engine}
    take_half_the_time(load)
    (found,) = answers([{**load, "rule": rule, "script": script}], installed)
    assert "refused" not in found, found
    return found


def test_a_continued_session_is_not_lost(installed: Path) -> None:
    """VLLM admits it before the plan's requests, in one step with them."""
    script = [
        ["stream", "s", 4, 2], ["steps", 2], ["add", "a", 4, 20], ["steps", 1],
        ["stream", "s", 4, 6], ["add", "b", 12, 8], ["steps", 1],
        ["add", "s", 1, 1], ["steps", 25],
    ]  # fmt: skip
    found = scripted(script, installed)
    assert set(found["steps"][3]["running"]) == set(found["steps"][3]["scheduled"]) == {"a", "b", "s"}
    assert found["steps"][-1]["unfinished"] == []
    assert found["unplanned"] == 0


def test_a_session_gets_what_a_plan_leaves(installed: Path) -> None:
    """A new session is admitted beside running requests, and beside those that the plan admits, if a seat is free."""
    script = [
        ["add", "a", 4, 20], ["add", "b", 4, 6], ["steps", 2], ["stream", "s", 4, 20], ["steps", 1],
        ["add", "c", 4, 20], ["stream", "t", 4, 20], ["stream", "u", 4, 20], ["steps", 6],
    ]  # fmt: skip
    steps = scripted(script, installed, max_num_seqs=5)["steps"]
    assert [step["running"] for step in steps[1:4]] == [["a", "b"], ["a", "b", "s"], ["a", "b", "s", "c", "t"]]
    assert steps[3]["scheduled"] == {"a": 1, "b": 1, "s": 1, "c": 4, "t": 4}
    assert steps[-1]["running"] == ["a", "s", "c", "t", "u"]


@pytest.mark.parametrize("state", ["PAUSED_ALL", "PAUSED_NEW"])
def test_requests_that_end_in_a_pause_are_forgotten(installed: Path, state: str) -> None:
    """Their slots are free again, also where another request has the same name; clock and correction go on."""
    script = [
        ["add", "a", 4, 20], ["add", "b", 4, 5], ["add", "c", 4, 20], ["steps", 2],
        ["pause", state], ["abort", "a"], ["steps", 5], ["add", "a", 4, 20], ["add", "d", 4, 20], ["steps", 1],
        ["abort", "c"], ["steps", 1], ["pause", "UNPAUSED"], ["steps", 2],
    ]  # fmt: skip
    found = scripted(script, installed)
    last = found["steps"][-1]
    left = ["a", "d"] if state == "PAUSED_NEW" else ["a", "b", "d"]
    assert last["unfinished"] == last["planned"] == left
    assert last["slots"] == len(left)
    assert set(found["leads_s"]) == {0.0}
    assert found["factor"] == factor_for_half(found["steps"])


def test_a_new_request_with_the_name_of_an_ended_one_is_planned(installed: Path) -> None:
    """Also where the step that tells of the end has no plan."""
    script = [
        ["stream", "s", 24, 6], ["steps", 1], ["add", "a", 20, 4], ["steps", 1], ["abort", "a"], ["add", "a", 20, 4],
        ["steps", 1],
    ]  # fmt: skip
    steps = scripted(script, installed, num_gpu_blocks=10)["steps"]
    assert [step["waiting"] for step in steps] == [[], ["a"], ["a"]]
    assert [step["planned"] for step in steps] == [[], ["a"], ["a"]]


def test_hits_are_looked_up_again_for_each_plan(installed: Path) -> None:
    """Also where requests arrive for which the planner needs more slots."""
    script: list[list[Any]] = [
        ["add", "first", 12, 8, [1, 2]], ["steps", 2], ["add", "long", 32, 4, [1, 2]], ["steps", 2],
        *(["add", f"r{number:03}", 4, 4] for number in range(100)), ["steps", 2],
    ]  # fmt: skip
    steps = scripted(script, installed, num_gpu_blocks=10, max_num_seqs=200, max_num_batched_tokens=200)["steps"]
    assert "long" in steps[3]["waiting"]
    assert max(step["slots"] for step in steps) > 64
    assert {step["old_hits"] for step in steps} == {0}


def test_the_readme_names_every_class() -> None:
    """Every rule that vLLM can run is named."""
    names = Path(PLUGIN, "README.md").read_text(encoding="utf-8")
    assert not [rule for rule in PLANNED if f"`{rule}`" not in names]
