"""The `block` command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.cli.running import answer, block, refusal

EXAMPLES = Path(__file__).parents[3] / "examples"
MIX = """
[[mix]]
name = "chat"
share = 1
weight = 2.0
ttft_slo_s = 1.5
tpot_slo_s = 0.995
[[mix]]
name = "batch"
share = 1
class = "best-effort"
priority = 1
ttft_slo_s = 1.5
"""
SNAPSHOT, REQUEST, REQUESTS = (str(EXAMPLES / name) for name in ("snapshot.json", "request.json", "requests.jsonl"))


def test_the_installed_command_reads_standard_input() -> None:
    """The entry point works as a process."""
    command = [str(Path(sys.executable).with_name("block")), "replay", "-", "-p", "constant", "--json"]
    line = '{"prompt_tokens": 4, "output_tokens": 3}'
    done = subprocess.run(command, input=line, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["summary"]["makespan_s"] == 3.0


def test_forecast_has_times_and_delays() -> None:
    """A forecast has the latencies of the request and the delays of the others."""
    (forecast,) = answer("forecast", SNAPSHOT, REQUEST)["forecasts"]
    assert 0 <= forecast["queue_s"] < forecast["ttft_s"] < forecast["e2e_s"]
    assert forecast["output_tokens"] == 210
    assert forecast["delay_sum_s"] >= forecast["delay_worst_s"] >= 0


def test_forecast_of_several_requests_equals_each_alone() -> None:
    """Candidates of one call do not affect each other."""
    request = json.loads(Path(REQUEST).read_text())
    many = [{**request, "request_id": f"c{n}", "prompt_tokens": 100 * (n + 1)} for n in range(3)]
    together = answer("forecast", SNAPSHOT, "-", stdin=json.dumps(many))["forecasts"]
    alone = [answer("forecast", SNAPSHOT, "-", stdin=json.dumps(one))["forecasts"][0] for one in many]
    assert together == alone


def test_forecast_knows_hits_only_of_prompts_whose_blocks_are_named(tmp_path: Path) -> None:
    """As a sidecar, it says nothing of others; an engine without prefix caching has no hits."""
    request = json.loads(Path(REQUEST).read_text())
    cached = {"free_block_ids": [*range(2, 64), 0, 1], "contents": {"0": 100, "1": 101}}

    def hits(*, caches: bool, **more: Any) -> int | None:
        settings = {"block_size": 16, "num_gpu_blocks": 65, "enable_prefix_caching": caches}
        snapshot: dict[str, Any] = {"version": 2, "taken_s": 0.0, "config": settings, "num_free_blocks": 64}
        if caches:
            snapshot["kv_cache"] = cached
        path = tmp_path / "request.json"
        path.write_text(json.dumps({**request, **more}))
        (found,) = answer("forecast", "-", str(path), stdin=json.dumps(snapshot))["forecasts"]
        hit_tokens: int | None = found["prefix_hit_tokens"]
        return hit_tokens

    assert hits(caches=False) == 0
    assert hits(caches=True) is None
    assert hits(caches=True, prefix_hashes=[100, 101, 102]) == 32
    assert hits(caches=True, prefix_hashes=[200, 201, 202]) == 0


def test_residual_rules_are_selectable_by_name() -> None:
    """The rest of a response is predicted by the rule of the flag."""
    snapshot = json.loads(Path(SNAPSHOT).read_text())
    for item in snapshot["running"]:
        item["request"]["tag"] = {"median_tokens": 5, "spread": 1.0}
    text = json.dumps(snapshot)
    e2e_s = {}
    for rule in ("plus_ten", "conditional_median"):
        result = answer("forecast", "-", REQUEST, "--residual", rule, "-p", "llama-2-7b-a30", stdin=text)
        e2e_s[rule] = result["forecasts"][0]["e2e_s"]
    assert e2e_s["plus_ten"] < e2e_s["conditional_median"]


def test_replay_gives_times_and_steps(tmp_path: Path) -> None:
    """A replay reports each request's latencies; with --steps, each step's batch and queues."""
    steps_file = tmp_path / "steps.jsonl"
    result = answer("replay", REQUESTS, "--profile", "constant", "--steps", str(steps_file))
    steps = [json.loads(line) for line in steps_file.read_text().splitlines()]
    assert list(steps[0]) == ["step", "start_s", "end_s", "scheduled", "running", "waiting", "free_blocks", "preempted"]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    asked = [json.loads(line) for line in Path(REQUESTS).read_text().splitlines()]
    tokens = sum(sum(step["scheduled"].values()) for step in steps)
    assert tokens == sum(r["prompt_tokens"] + r["output_tokens"] - 1 for r in asked)
    assert steps[-1]["end_s"] == max(r["finished_s"] for r in result["requests"])
    assert result["summary"]["num_unfinished"] == 0


def test_replay_reports_what_a_mix_attains(tmp_path: Path) -> None:
    """Each request has its tokens on time, and the summary the gain by priority, class, entry and prompt length."""
    path = tmp_path / "mix.toml"
    path.write_text(MIX)
    arguments = ("replay", REQUESTS, "--profile", "constant", "--mix", str(path))
    result = answer(*arguments)
    total = result["summary"]
    assert 0 < total["tdg_ratio"] < 1
    assert set(total["by_priority"]) == {"0", "1"}
    assert set(total["by_class"]) == {"real-time", "best-effort"}
    assert set(total["by_mix"]) == {"chat", "batch"}
    assert len(total["by_prompt_quarter"]) == 4
    assert all(0 <= row["tokens_on_time"] <= row["output_tokens"] for row in result["requests"])
    weighted = answer(*arguments, "--priority-weight", "0=1e9", "--first-token-weight", "1e9")["summary"]
    first = [row for row in result["requests"] if row["tokens_on_time"] > 0]
    assert 0 < len(first) < len(result["requests"])
    assert weighted["tdg_ratio"] != pytest.approx(total["tdg_ratio"])
    assert weighted["by_priority"]["0"]["slo_attained"] == total["by_priority"]["0"]["slo_attained"]
    assert answer(*arguments, "--seed", "1")["summary"]["by_mix"] != total["by_mix"]
    lines = block(*arguments).stdout.splitlines()
    assert any(line.startswith("mix chat") for line in lines)
    assert "tdg_ratio" not in answer("replay", REQUESTS, "--profile", "constant")["summary"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--mix", "nowhere.toml"), "nowhere.toml: cannot be read"),
        (("--priority-weight", "0"), "priority_weight: '0' is not PRIORITY=WEIGHT"),
        (("--first-token-weight", "0"), "first_token_weight: must be above 0"),
        (("--first-token-weight", "nan"), "first_token_weight: must be above 0"),
    ],
)
def test_bad_weights_and_mixes_are_named(arguments: tuple[str, ...], named: str) -> None:
    """The error is one line with the option."""
    assert named in refusal("replay", REQUESTS, "-p", "constant", *arguments)


def test_steps_alone_go_to_standard_output() -> None:
    """`--steps` without a file prints the steps and nothing else."""
    done = block("replay", REQUESTS, "--profile", "constant", "--steps")
    assert done.returncode == 0
    assert all("scheduled" in json.loads(line) for line in done.stdout.splitlines())


def test_settings_come_from_flag_environment_and_file_in_that_order(tmp_path: Path) -> None:
    """A flag takes precedence over the environment, and that over the file."""
    settings = tmp_path / "engine.toml"
    settings.write_text("[engine]\nmax_num_seqs = 1\n")

    def makespan(*arguments: str, **environment: str) -> float:
        result = answer("replay", REQUESTS, "-p", "constant", *arguments, **environment)
        return float(result["summary"]["makespan_s"])

    alone, two, four = (makespan("--max-num-seqs", str(n)) for n in (1, 2, 4))
    assert alone > two > four
    assert makespan("-c", str(settings)) == alone
    assert makespan("-c", str(settings), BLOCK_MAX_NUM_SEQS="2") == two
    assert makespan("-c", str(settings), "--max-num-seqs", "4", BLOCK_MAX_NUM_SEQS="2") == four


def test_options_of_a_local_scheduler_come_from_flags_or_file(tmp_path: Path) -> None:
    """Both forms mean the same; an unknown option is refused in one line."""
    settings = tmp_path / "engine.toml"
    settings.write_text('batcher = "sarathi_fcfs"\nbatcher_options = { token_budget = 32 }\n')

    def makespan(*arguments: str) -> float:
        return float(answer("replay", REQUESTS, "-p", "constant", *arguments)["summary"]["makespan_s"])

    by_flag = makespan("--batcher", "sarathi_fcfs", "--batcher-option", "token_budget=32")
    assert by_flag == makespan("-c", str(settings)) > makespan("--batcher", "sarathi_fcfs")
    done = block("replay", REQUESTS, "-p", "constant", "-c", str(settings), "--batcher-option", "tokenbudget=8")
    assert done.returncode == 2
    message = "batcher_options.tokenbudget: is no known option of sarathi_fcfs; did you mean token_budget?"
    assert done.stderr.strip() == f"block: {message}"


def test_token_ids_are_counted_and_share_prefixes() -> None:
    """Prompts of token ids share cached prefixes."""
    lines = [{"prompt_tokens": list(range(40)), "output_tokens": 2, "arrival_s": n * 10.0} for n in range(2)]
    text = "\n".join(json.dumps(line) for line in lines)
    first, second = answer("replay", "-", "-p", "constant", "--block-size", "16", stdin=text)["requests"]
    assert (first["prefix_hit_tokens"], second["prefix_hit_tokens"]) == (0, 32)


def test_csv_is_read_as_well(tmp_path: Path) -> None:
    """A CSV file with a header is a trace."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,10,3\n1.5,20,4\n")
    assert len(answer("replay", str(trace), "-p", "constant")["requests"]) == 2


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"prompt_tokens": -4, "output_tokens": 3}', "requests[0].prompt_tokens"),
        ('{"prompt_tokens": 4, "output_tokens": 0}', "requests[0].output_tokens"),
        ('{"prompt_tokens": 4}', "requests[0].output_tokens"),
        ('{"output_tokens": 4}', "requests[0].prompt_tokens"),
        ('{"prompt_tokens": 4.5, "output_tokens": 3}', "requests[0].prompt_tokens"),
        ('{"prompt_tokens": true, "output_tokens": 3}', "requests[0].prompt_tokens"),
        ('{"prompt_tokens": 4, "output_tokens": 3, "arrival_s": -1}', "requests[0].arrival_s"),
        ('{"prompt_tokens": 4, "output_tokens": 3, "arrival_s": NaN}', "NaN"),
        ('{"prompt_tokens": 4, "output_tokens": 3, "arrival_s": 1e999}', "requests[0].arrival_s"),
        ('{"prompt_tokens": 4, "output_tokens": 3, "prioritty": 1}', "did you mean priority"),
        ('{"prompt_tokens": 99999, "output_tokens": 3}', "max_model_len"),
        ('{"prompt_tokens": 99999999999999999999, "output_tokens": 3}', "requests[0].prompt_tokens"),
        ('{"prompt_tokens": ["a"], "output_tokens": 3}', "prompt_token_ids"),
        ('{"prompt_tokens": 4, "output_tokens": 3, "slo": {"ttft_s": -1}}', "requests[0].slo.ttft_s"),
        ('{"prompt_tokens": 4, "output_tokens": 3, "prefix_hashes": 3}', "requests[0].prefix_hashes"),
        ("[1]", "requests[0]"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("", "no requests"),
    ],
)
def test_a_bad_request_is_named(line: str, named: str) -> None:
    """The error is one line with the index and the field, and the exit status is 2."""
    assert named in refusal("replay", "-", "-p", "constant", stdin=line)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--max-num-seqs", "-1"), "max_num_seqs"),
        (("--block-size", "0"), "block_size"),
        (("--num-gpu-blocks", "1"), "num_gpu_blocks"),
        (("--watermark", "nan"), "watermark"),
        (("--watermark", "1.5"), "watermark"),
        (("--scheduling-policy", "lifo"), "scheduling-policy"),
        (("--batcher", "vllm_v2"), "batcher"),
        (("--batcher", "orca", "--async-scheduling"), "async_scheduling"),
        (("--no-enable-chunked-prefill",), "max_num_batched_tokens"),
        (("--max-num-batched-tokens", "2", "--max-num-seqs", "4"), "max_num_batched_tokens"),
        (("--num-gpu-blocks", "3"), "KV blocks"),
        (("--max-num-sqs", "4"), "--max-num-seqs"),
        (("--profile", "llama-on-a-toaster"), "profile"),
        (("--engine", "missing.toml"), "missing.toml"),
    ],
)
def test_a_bad_setting_is_named(arguments: tuple[str, ...], named: str) -> None:
    """The error is one line that names the setting, and the exit status is 2."""
    profile = () if "--profile" in arguments else ("-p", "constant")
    assert named in refusal("replay", REQUESTS, *profile, *arguments)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 6}, "version: 6 is newer"),
        ({"version": "1"}, "version"),
        ({"taken_s": None}, "taken_s"),
        ({"num_free_blocks": -1}, "num_free_blocks"),
        ({"num_free_blocks": 5000}, "num_free_blocks"),
        ({"num_free_blocks": 1056}, "num_free_blocks"),
        ({"surprise": 1}, "surprise: is unknown"),
        ({"config": {"max_num_seqs": 0}}, "config.max_num_seqs"),
        ({"config": {"max_num_seqs": 2}}, "running"),
        ({"running": {}}, "running"),
        ({"running": [{}]}, "running[0].request: is missing"),
        (
            {"running": [{"request": {"request_id": "a", "prompt_tokens": 4}, "num_blocks": 999}]},
            "running[0].num_blocks",
        ),
        ({"running": [{"request": {"request_id": "a", "prompt_tokens": 4}, "computed_tokens": 9}]}, "computed_tokens"),
        (
            {"running": [{"request": {"request_id": "a", "prompt_tokens": 4}, "tokens_on_time": -1}]},
            "running[0].tokens_on_time",
        ),
        (
            {"waiting": [{"request": {"request_id": "a", "prompt_tokens": 4}, "tokens_on_time": 1}]},
            "waiting[0].tokens_on_time: 1 are more than its produced_tokens",
        ),
        ({"steps": [{"start_s": 0.0, "scheduled": {"nobody": 1}}]}, "steps[0].scheduled.nobody"),
        ({"reserved": [{"request_id": "x", "prompt_tokens": 1}] * 2}, "request_id"),
    ],
)
def test_a_bad_snapshot_is_named(change: dict[str, Any], named: str) -> None:
    """A snapshot that is newer, incomplete or inconsistent is refused by field."""
    snapshot = {**json.loads(Path(SNAPSHOT).read_text()), **change}
    assert named in refusal("forecast", "-", REQUEST, "-p", "constant", stdin=json.dumps(snapshot))


@pytest.mark.parametrize("field", ["version", "taken_s", "config", "num_free_blocks"])
def test_a_missing_field_of_a_snapshot_is_named(field: str) -> None:
    """The error names the missing field."""
    snapshot = json.loads(Path(SNAPSHOT).read_text())
    del snapshot[field]
    assert f"{field}: is missing" in refusal("forecast", "-", REQUEST, "-p", "constant", stdin=json.dumps(snapshot))


def test_policies_list_all_that_they_read() -> None:
    """Also what their conditions and the rules for legs read, each once."""
    reads = {one["name"]: one["reads"] for one in answer("policies", "--json")["policies"]}
    assert reads["jsq"] == ["num_queued", "num_running"]
    assert reads["hold"] == ["predicted_e2e_s", "predicted_queue_s", "predicted_preemptions"]
    assert {"decode_step_s", "predicted_attained", "least_slack_s"} <= set(reads["slo"])
    assert "new_prefill_tokens" in reads["pd_threshold"]


def test_profiles_are_listed_and_shown() -> None:
    """Every listed profile can be shown."""
    done = block("profile", "show")
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert "constant" in names
    for name in names:
        assert block("profile", "show", name, "--json").returncode == 0


SLOW = (
    "numba", "scipy", "sklearn", "torch", "transformers", "kubernetes_asyncio", "ray", "pyarrow", "pydantic", "grpc_reflection.v1alpha",
)  # fmt: skip
STARTS = (  # a module of a command, and what it must start without
    ("services.cli", (*SLOW, "grpc", "numpy", "google.protobuf", "uvicorn")),
    *((f"services.cli.serve_{part}", SLOW) for part in ("engine", "gateway", "predictor", "scheduler", "tagger")),
    ("services.cli.serve_provisioner", SLOW),
    ("services.cli.up", SLOW[:-1]),
    ("services.cli.bench", (*SLOW, "grpc")),
    ("services.cli.policies", SLOW),
    ("services.gateway.server", SLOW),
    ("services.scheduler_server", SLOW[:-1]),
    ("services.provisioner_server.server", SLOW[:-1]),
    ("services.tagger_server.server", ("numba", *SLOW[2:-1])),
    ("services.predictor_server.server", ("sklearn", "torch", "pydantic", "kubernetes_asyncio")),
)


@pytest.mark.parametrize(("module", "slow"), STARTS, ids=[module for module, _ in STARTS])
def test_a_command_starts_without_what_it_does_not_need(module: str, slow: tuple[str, ...]) -> None:
    """Every process of a cluster is this command: what is slow to import is imported only where it is used."""
    code = f"import sys, {module}; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_reference_is_what_the_code_says() -> None:
    """`scripts/generate_reference.py` would write the same pages."""
    command = [sys.executable, str(EXAMPLES.parent / "scripts" / "generate_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
