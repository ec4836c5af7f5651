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
from services.engine_state.layout import CLIENT
from tests.conformance.compare import first_difference
from tests.conformance.ruled_workloads import PROFILE, our_engine, our_steps, ruled_workload
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
    """A sidecar's model gets the rule, its options, and the engine's limits."""
    for load, trace in traced[: len(PLANNED)]:
        config = settled(EngineConfig(**trace["exported"]))
        assert config == settled(EngineConfig(**load["engine"], batcher=load["rule"]))


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


def test_the_plug_in_has_a_class_for_every_rule() -> None:
    """Rules that plan over all requests are those that vLLM can run."""
    names = Path(PLUGIN, "README.md").read_text(encoding="utf-8")
    assert not [rule for rule in PLANNED if f"`{rule}`" not in names]
