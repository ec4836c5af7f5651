"""The accuracy of a profile that is composed of kernels, with a real vLLM engine and a mixture of experts.

A small random model of the kind of Qwen3-30B-A3B runs on vLLM's CPU build, on one core. Its kernels are timed on that
core before the engine starts and after it has ended, by vLLM's own Python, so with vLLM's own kernels, and the profile
is composed of the mean times. Then the engine runs planned batches, and each of its steps is predicted. The processor
time of a step, which no kernel contains, is the median difference on every other step; errors are those of the rest.

- `step_error`: of the predicted steps; `prefill`, `decode`, `mixed`: of steps by what they contain.
- `cpu_ms`: the processor time of a step that was found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from predictor.fitting.engine_profile import steps_of
from predictor.fitting.kernel_plan import AttentionBatch, Reach
from predictor.fitting.kernel_profile import Timings, UntimedCosts, fit_kernels
from predictor.fitting.model_shard import Share, share_of
from predictor.fitting.regression import Steps, predict
from scripts.report import report
from services.cluster.engines import free_port
from services.http.client import origin_of
from services.profiling.measure_command import run_engine
from services.profiling.measuring import MeasurementOptions, measure
from services.settings import seconds_of

ROOT = Path(__file__).parents[1]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
HOST, MODEL = "127.0.0.1", "tiny"
LONGEST, BLOCK_SIZE, NUM_BLOCKS, SEATS, STEP_TOKENS = 1024, 32, 320, 16, 512
START_S = 600.0
EXPERTS: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768,
    "moe_intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--budget", default="60s", help="time of each timing of kernels, and of the engine's batches")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="core that everything runs on")
    parser.add_argument("--vllm", default=os.environ.get("BLOCK_VLLM_PYTHON", str(VLLM)), help="Python that has vLLM")
    parser.add_argument("--time", metavar="CONFIG", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.time:
        print(json.dumps(timed_here(arguments)))
        return
    if not Path(arguments.vllm).exists():
        sys.exit(f"accuracy_kernels: there is no vLLM at {arguments.vllm}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    from tests.deploy.engines import tiny_model  # not in vLLM's Python, which has no pytest

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model", **EXPERTS)
        before = timed_by_vllm(arguments, model)
        steps = asyncio.run(measured(arguments, model, Path(folder)))
        results = compared([before, timed_by_vllm(arguments, model)], share_at(model), steps)
    report("accuracy_kernels", results, as_json=arguments.json)


def timed_here(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the kernels in this process."""
    import torch

    from services.profiling.kernel_timing import TimingOptions, time_kernels

    torch.set_num_threads(1)
    reach = Reach(
        max_num_seqs=SEATS,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=LONGEST,
        kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
    )
    options = TimingOptions(
        share=share_at(Path(arguments.time)),
        reach=reach,
        device=torch.device("cpu"),
        budget_s=seconds_of(arguments.budget, "budget"),
    )
    timed = time_kernels(options, lambda _: None)
    return {
        "attention_by": timed.attention,
        "dense": timed.timings.dense,
        "head": timed.timings.head,
        "attention": [[asdict(batch), seconds] for batch, seconds in timed.timings.attention.items()],
    }


def timed_by_vllm(arguments: argparse.Namespace, model: Path) -> Timings:
    """Time the kernels by vLLM's Python."""
    words = [
        "taskset", "-c", str(arguments.core), arguments.vllm, str(Path(__file__)), "--time", str(model), "--budget",
        arguments.budget,
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        sys.exit(f"accuracy_kernels: the kernels were not timed: {done.stderr[-500:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Timings(
        dense={name: {int(count): one for count, one in times.items()} for name, times in found["dense"].items()},
        head={int(count): one for count, one in found["head"].items()},
        attention={AttentionBatch(**batch): one for batch, one in found["attention"]},
    )


def environment() -> dict[str, str]:
    """Return the environment of one thread, on the core that this process gives."""
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip


async def measured(arguments: argparse.Namespace, model: Path, folder: Path) -> Steps:
    """Run planned batches on an engine, and return its steps."""
    vllm = Path(arguments.vllm).with_name("vllm")
    settings = {name: value for name, value in environment().items() if os.environ.get(name) != value}
    settings.pop("PYTHONPATH", None)
    command = (
        f"env {shlex.join(f'{name}={value}' for name, value in settings.items())} taskset -c {arguments.core} {vllm}"
        f" serve {model} --served-model-name {MODEL} --load-format dummy --enforce-eager --max-model-len {LONGEST}"
        f" --block-size {BLOCK_SIZE} --num-gpu-blocks-override {NUM_BLOCKS + 1} --max-num-seqs {SEATS}"
        f" --max-num-batched-tokens {STEP_TOKENS} --disable-uvicorn-access-log --host {HOST} --port {free_port(HOST)}"
    )
    async with run_engine(command, str(folder / "engine.state"), START_S) as engine:
        options = MeasurementOptions(
            origin=origin_of(engine.url),
            state_file=engine.state_file,
            budget_s=seconds_of(arguments.budget, "budget"),
        )
        found = await measure(options, lambda _: None)
    return steps_of(found.steps)


def compared(timings: Sequence[Timings], share: Share, steps: Steps) -> list[dict[str, Any]]:
    """Return the errors of the composed profile on the engine's steps."""
    step_time, _, _ = fit_kernels(mean_of(timings), share, UntimedCosts())
    other = np.arange(len(steps)) % 2 == 1
    cpu_s = float(np.median((steps.seconds - predict(step_time, steps))[other]))
    test = steps.where(~other)
    errors = predict(replace(step_time, constant_s=step_time.constant_s + max(0.0, cpu_s)), test) / test.seconds - 1
    has_prefill, has_decode = test.num_prefills > 0, test.num_decodes > 0
    kinds = {
        "all": np.ones(len(test), np.bool_),
        "prefill": has_prefill & ~has_decode,
        "decode": has_decode & ~has_prefill,
        "mixed": has_prefill & has_decode,
    }
    results = [{"name": "cpu_ms", "value": 1e3 * cpu_s, "unit": "ms", "n": int(other.sum())}]
    for kind, chosen in kinds.items():
        for figure, value in figures_of(errors[chosen]).items():
            name = f"step_error.{kind}.{figure}"
            results.append({"name": name, "value": value, "unit": "ratio", "n": int(chosen.sum())})
    return results


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
