"""The accuracy of a profile that is composed of kernels, with a real vLLM engine and a mixture of experts.

A small random model of the kind of Qwen3-30B-A3B runs on vLLM's CPU build, in one thread. Its kernels are timed before
the engine starts and after it has ended, by vLLM's own Python, so with vLLM's own kernels, and the profile is composed
of the mean times. Then the engine runs planned batches one after the other. All times are processor times, as other
programs use the same cores: of the timing thread, and of the thread in which the engine's loop runs its model. What no
kernel contains, a constant per step, is the median difference on every other batch; errors are those of the rest.

- `step_error`: of a batch's mean step; `alone`: of prompts one by one, `together`: of decodes, `mixed`: of both.
- `cpu_ms`: the constant per step that was found.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from predictor.fitting.kernel_plan import AttentionBatch, Reach
from predictor.fitting.kernel_profile import Timings, UntimedCosts, fit_kernels
from predictor.fitting.measurement_batches import Batch, BatchLimits, mixed, structured
from predictor.fitting.model_shard import Share, share_of
from predictor.fitting.regression import COLUMNS, Steps, predict
from scripts.report import report
from services.cluster.engines import free_port
from services.http.client import origin_of
from services.profiling.measure_command import run_engine
from services.profiling.measuring import EngineObserver, all_steps
from services.profiling.prompt_sender import PromptSender
from services.settings import seconds_of

ROOT = Path(__file__).parents[1]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
HOST, MODEL = "127.0.0.1", "tiny"
LONGEST, BLOCK_SIZE, NUM_BLOCKS, SEATS, STEP_TOKENS = 1024, 32, 320, 16, 512
START_S = 600.0
POLL_S = 0.02
PREFIX = "accuracy-"
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
        ran = asyncio.run(measured(arguments, model, Path(folder)))
        results = compared([before, timed_by_vllm(arguments, model)], share_at(model), ran)
    report("accuracy_kernels", results, as_json=arguments.json)


def timed_here(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the kernels in this process."""
    import torch

    from services.profiling.kernel_timing import TimingOptions, time_kernels
    from services.profiling.torch_device import CpuStopwatch

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
    timed = time_kernels(options, lambda _: None, lambda _, sample_s: CpuStopwatch(sample_s, clock=time.thread_time))
    return {
        "attention_by": timed.attention,
        "dense": timed.timings.dense,
        "head": timed.timings.head,
        "attention": [[asdict(batch), seconds] for batch, seconds in timed.timings.attention.items()],
    }


def timed_by_vllm(arguments: argparse.Namespace, model: Path) -> Timings:
    """Time the kernels by vLLM's Python."""
    words = [arguments.vllm, str(Path(__file__)), "--time", str(model), "--budget", arguments.budget]
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
    """Return the environment of one thread."""
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RanBatch:
    """A batch that the engine ran: its steps, and the processor time of its loop."""

    kind: str
    steps: Steps
    cpu_s: float


async def measured(arguments: argparse.Namespace, model: Path, folder: Path) -> list[RanBatch]:
    """Run planned batches on an engine until the budget ends."""
    vllm = Path(arguments.vllm).with_name("vllm")
    settings = {name: value for name, value in environment().items() if os.environ.get(name) != value}
    settings.pop("PYTHONPATH", None)
    command = (
        f"env {shlex.join(f'{name}={value}' for name, value in settings.items())} {vllm} serve {model}"
        f" --served-model-name {MODEL} --load-format dummy --enforce-eager --max-model-len {LONGEST}"
        f" --block-size {BLOCK_SIZE} --num-gpu-blocks-override {NUM_BLOCKS + 1} --max-num-seqs {SEATS}"
        f" --max-num-batched-tokens {STEP_TOKENS} --disable-uvicorn-access-log --host {HOST} --port {free_port(HOST)}"
    )
    async with run_engine(command, str(folder / "engine.state"), START_S) as engine:
        observer, sender = EngineObserver(engine.state_file, PREFIX), PromptSender(origin_of(engine.url), PREFIX)
        try:
            await sender.connect()
            loop, limits = loop_of(engine.pid), BatchLimits.of(observer.config)
            plan = planned(limits, np.random.default_rng(0))
            await ran(next(plan), observer, sender, loop)  # caches are cold
            until_s = time.monotonic() + seconds_of(arguments.budget, "budget")
            found = []
            while time.monotonic() < until_s:
                found.append(await ran(next(plan), observer, sender, loop))
            return found
        finally:
            sender.close()
            observer.close()


def planned(limits: BatchLimits, generator: np.random.Generator) -> Iterator[Batch]:
    """Yield batches of prompts alone and of decodes, with a mixed one after each."""
    yield structured(limits)[0]
    while True:
        for batch in structured(limits):
            yield batch
            while not limits.holds(one := mixed(limits, generator)):
                pass
            yield one


async def ran(batch: Batch, observer: EngineObserver, sender: PromptSender, loop: Path) -> RanBatch:
    """Run one batch, and return its steps and processor time."""
    observer.take()
    before_s = cpu_s_of(loop)
    sending = asyncio.create_task(sender.send_all(batch.streams))
    while not sending.done() or not observer.is_idle:
        await asyncio.wait([sending], timeout=POLL_S)
        await asyncio.sleep(POLL_S)
        observer.poll()
    sending.result()
    after_s = cpu_s_of(loop)
    rows = all_steps(observer.take())
    rows = rows[rows["num_tokens"] > 0]
    steps = Steps(**{name: rows[name].astype(np.float64) for name in COLUMNS})
    return RanBatch(kind=batch.kind, steps=steps, cpu_s=after_s - before_s)


def loop_of(leader: int) -> Path:
    """Return where the kernel counts the processor time of the thread that runs the engine's loop."""
    for folder in Path("/proc").iterdir():
        try:
            is_core = "EngineCor" in (folder / "comm").read_text()
        except OSError:
            continue
        if is_core and os.getpgid(int(folder.name)) == leader:
            return folder / "task" / folder.name / "schedstat"
    raise SystemExit("accuracy_kernels: the engine's loop has no process of its own")


def cpu_s_of(schedstat: Path) -> float:
    """Return a thread's processor time."""
    return int(schedstat.read_text().split()[0]) / 1e9


def compared(timings: Sequence[Timings], share: Share, ran_batches: Sequence[RanBatch]) -> list[dict[str, Any]]:
    """Return the errors of the composed profile on the engine's batches."""
    step_time, _, _ = fit_kernels(mean_of(timings), share, UntimedCosts())
    counts = np.array([len(batch.steps) for batch in ran_batches])
    kernels_s = np.array([predict(step_time, batch.steps).sum() for batch in ran_batches]) / counts
    measured_s = np.array([batch.cpu_s for batch in ran_batches]) / counts
    other = np.arange(len(counts)) % 4 >= 2  # kinds alternate
    constant_s = float(np.median((measured_s - kernels_s)[other]))
    errors = (kernels_s + constant_s) / measured_s - 1
    results = [{"name": "cpu_ms", "value": 1e3 * constant_s, "unit": "ms", "n": int(other.sum())}]
    share_of_kernels = float(np.median(kernels_s / measured_s))
    results.append({"name": "kernel_share", "value": share_of_kernels, "unit": "ratio", "n": len(counts)})
    kinds = np.array([batch.kind for batch in ran_batches])
    for kind in ("all", *sorted(set(kinds))):
        chosen = ~other & ((kinds == kind) | (kind == "all"))
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
