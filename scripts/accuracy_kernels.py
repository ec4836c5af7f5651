"""The accuracy of a profile that is composed of kernels, with a real vLLM engine and a mixture of experts.

A small random model of the kind of Qwen3-30B-A3B, or of DeepSeek-V3 (`--kind latent`), runs on vLLM's CPU build, in one
thread of vLLM's own Python. There its kernels are timed (vLLM's own where it has some) and its engine runs prompts
alone, decodes, and prompts beside decodes, several times, in turns; the profile is composed of the mean times. All
times are processor times, as other programs use the same cores. Steps of the same batch (tokens, decodes, prefills,
contexts within a factor of 1.4) are compared by their median. What no kernel contains, a time per step and per
sequence, is fitted to every other batch; errors are those of the rest. A step is scheduling, running the model, and
taking over the result.

- `step_error`: of the predicted steps by batch; `prefill`, `decode`, `mixed`: of batches by what they contain.
- `total_error`: of the time of all steps; `spread`: the median interquartile range of equal steps, over their median.
- `cpu_ms`, `cpu_sequence_ms`: the times per step and per sequence that were found; `kernel_share`: of all steps' time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from predictor.fitting.kernel_plan import AttentionBatch, Reach
from predictor.fitting.kernel_profile import Timings, UntimedCosts, fit_kernels
from predictor.fitting.model_shard import Share, share_of
from predictor.fitting.regression import COLUMNS, Steps, predict
from scripts.report import report, row
from scripts.vllm_steps import KV_TOKENS, LONGEST, SEATS
from services.settings import seconds_of

ROOT = Path(__file__).parents[1]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
MIN_EQUAL = 3  # steps of a batch
ROUNDS = 20  # of a fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of model, and the engine's limits for it."""

    config: Mapping[str, Any]
    block_size: int
    step_tokens: int


EXPERTS: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1536,
    "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip

LATENTS: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1536, "moe_intermediate_size": 256,
    "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
KINDS = {
    "experts": Kind(config=EXPERTS, block_size=32, step_tokens=512),
    "latent": Kind(config=LATENTS, block_size=16, step_tokens=2048),  # as vLLM's CPU build sets them
}


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kind", choices=KINDS, default="experts")
    parser.add_argument("--rounds", type=int, default=2, help="runs of the engine, each between timings of kernels")
    parser.add_argument("--budget", default="120s", help="time of each timing of kernels")
    parser.add_argument("--engine-budget", default="20s", help="processor time of each run's batches")
    parser.add_argument("--vllm", default=os.environ.get("BLOCK_VLLM_PYTHON", str(VLLM)), help="Python that has vLLM")
    parser.add_argument("--time", metavar="CONFIG", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.time:
        print(json.dumps(timed_here(arguments.time, KINDS[arguments.kind], seconds_of(arguments.budget, "budget"))))
        return
    if not Path(arguments.vllm).exists():
        sys.exit(f"accuracy_kernels: there is no vLLM at {arguments.vllm}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    from tests.deploy.engines import tiny_model  # not in vLLM's Python, which has no pytest

    kind = KINDS[arguments.kind]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model", **kind.config)
        engine_s = seconds_of(arguments.engine_budget, "engine_budget")
        asked = [str(one) for one in (model, engine_s, kind.block_size, kind.step_tokens)]
        first, attention = timed_by_vllm(arguments, model)
        timings, rows = [first], []
        for _ in range(arguments.rounds):
            rows += by_vllm(arguments, "vllm_steps.py", *asked)
            timings.append(timed_by_vllm(arguments, model)[0])
        steps = Steps(**dict(zip(COLUMNS, np.array(rows).T, strict=True)))
        results = compared(timings, share_at(model), steps)
    report("accuracy_kernels", results, as_json=arguments.json, kind=arguments.kind, attention=attention)


def timed_here(model: str, kind: Kind, budget_s: float) -> dict[str, Any]:
    """Time the kernels in this process."""
    import torch

    torch.set_num_threads(1)
    from services.profiling.kernel_timing import TimingOptions, time_kernels
    from services.profiling.torch_device import CpuStopwatch

    reach = Reach(
        max_num_seqs=SEATS,
        max_num_batched_tokens=kind.step_tokens,
        max_model_len=LONGEST,
        kv_tokens=KV_TOKENS,
    )
    options = TimingOptions(share=share_at(Path(model)), reach=reach, device=torch.device("cpu"), budget_s=budget_s)
    timed = time_kernels(options, lambda _: None, lambda _, sample_s: CpuStopwatch(sample_s, clock=time.thread_time))
    return {
        "attention_by": timed.attention,
        "dense": timed.timings.dense,
        "head": timed.timings.head,
        "attention": [[asdict(batch), seconds] for batch, seconds in timed.timings.attention.items()],
    }


def timed_by_vllm(arguments: argparse.Namespace, model: Path) -> tuple[Timings, str]:
    """Time the kernels by vLLM's Python; return the name of the timed attention as well."""
    found = by_vllm(
        arguments, Path(__file__).name, "--time", str(model), "--budget", arguments.budget, "--kind", arguments.kind
    )
    timings = Timings(
        dense={name: {int(count): one for count, one in times.items()} for name, times in found["dense"].items()},
        head={int(count): one for count, one in found["head"].items()},
        attention={AttentionBatch(**batch): one for batch, one in found["attention"]},
    )
    return timings, found["attention_by"]


def by_vllm(arguments: argparse.Namespace, script: str, *words: str) -> Any:
    """Run a script in vLLM's Python, and return its result."""
    words = (arguments.vllm, str(Path(__file__).with_name(script)), *words)
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        sys.exit(f"accuracy_kernels: vLLM's Python failed: {done.stderr[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
    """Return the environment of one thread."""
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip


def compared(timings: Sequence[Timings], share: Share, steps: Steps) -> list[dict[str, Any]]:
    """Return the errors of the composed profile on the engine's steps."""
    step_time, _, _ = fit_kernels(mean_of(timings), share, UntimedCosts())
    kernels_s = predict(step_time, steps)
    batches = equal_batches(steps)
    measured_s, predicted_s = (
        np.array([np.median(each[one]) for one in batches]) for each in (steps.seconds, kernels_s)
    )
    spreads = [
        np.subtract(*np.percentile(steps.seconds[one], [75, 25])) / np.median(steps.seconds[one]) for one in batches
    ]
    other = np.arange(len(batches)) % 2 == 1
    first = [one[0] for one in batches]
    outside = np.column_stack((np.ones(len(steps)), steps.num_sampled))  # costs outside kernels: per step, per sequence
    costs_s = least_relative((measured_s - predicted_s)[other], outside[first][other], measured_s[other])
    errors = (predicted_s + outside[first] @ costs_s) / measured_s - 1
    total = (kernels_s + outside @ costs_s).sum() / steps.seconds.sum() - 1
    results = [
        row("cpu_ms", 1e3 * costs_s[0], "ms", int(other.sum())),
        row("cpu_sequence_ms", 1e3 * costs_s[1], "ms", int(other.sum())),
        row("kernel_share", kernels_s.sum() / steps.seconds.sum(), "ratio", len(steps)),
        row("total_error", total, "ratio", len(steps)),
        row("spread", float(np.median(spreads)), "ratio", len(batches)),
    ]
    has_prefill, has_decode = steps.num_prefills[first] > 0, steps.num_decodes[first] > 0
    kinds = {
        "all": has_prefill | has_decode,
        "prefill": has_prefill & ~has_decode,
        "decode": has_decode & ~has_prefill,
        "mixed": has_prefill & has_decode,
    }
    for kind, of_kind in kinds.items():
        chosen = of_kind & ~other
        for figure, value in figures_of(errors[chosen]).items():
            results.append(row(f"step_error.{kind}.{figure}", value, "ratio", int(chosen.sum())))
    return results


def least_relative(rest_s: np.ndarray, columns: np.ndarray, measured_s: np.ndarray) -> np.ndarray:
    """Return coefficients of at least 0 with small relative errors; batches far from the others count little."""
    from scipy.optimize import nnls  # vLLM's Python may have none

    weights = 1 / measured_s
    found = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        found, _ = nnls(columns * weights[:, None], rest_s * weights)
        errors = np.abs(rest_s - columns @ found) / measured_s
        weights = 1 / measured_s / np.sqrt(np.maximum(errors, np.median(errors) + 1e-9))
    return found


def equal_batches(steps: Steps) -> list[list[int]]:
    """Group the steps of equal batches; return those of which there are enough."""
    groups: dict[tuple[float, ...], list[int]] = {}
    contexts = np.round(2 * np.log2(1 + steps.decode_context + np.sqrt(steps.prefill_qkv)))
    columns = (steps.num_tokens, steps.num_decodes, steps.num_prefills, contexts)
    for index, key in enumerate(zip(*columns, strict=True)):
        groups.setdefault(key, []).append(index)
    return [one for one in groups.values() if len(one) >= MIN_EQUAL]


def figures_of(errors: np.ndarray) -> dict[str, float]:
    """Return mean, median and 90th percentile of absolute errors, and the median of signed ones."""
    if not len(errors):
        return {}
    sizes = np.abs(errors)
    return {
        "mean": float(sizes.mean()),
        "median": float(np.median(sizes)),
        "p90": float(np.percentile(sizes, 90)),
        "bias": float(np.median(errors)),
    }


def mean_of(timings: Sequence[Timings]) -> Timings:
    """Return the mean times of the kernels that every timing has."""
    first = timings[0]

    def mean(each: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
        return {key: float(np.mean([one[key] for one in each])) for key in each[0] if all(key in one for one in each)}

    return Timings(
        dense={name: mean([one.dense[name] for one in timings]) for name in first.dense},
        head=mean([one.head for one in timings]),
        attention=mean([one.attention for one in timings]),
    )


def share_at(model: Path) -> Share:
    """Return the model as one device holds it."""
    return share_of(json.loads((model / "config.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
