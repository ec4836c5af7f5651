"""Published benchmarks of engines on GPUs: each is a mean TTFT and TPOT with a constant number of requests at once.

A benchmark is predicted by serving the same load with the engine model. All its requests wait in the queue of an engine
that has as many seats as the benchmark has clients, so a request starts when another one ends: it was sent then.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.config import EngineConfig
from predictor.fitting.gpus import GPUS
from predictor.fitting.kv_memory import BLOCK_SIZE, num_gpu_blocks
from predictor.fitting.model_config import model_shape
from predictor.fitting.model_shape import ModelShape
from predictor.fitting.roofline import Parallelism, Roofline, RooflineConstants
from predictor.request import RequestFacts
from predictor.suggestions import unknown_choice
from simulator.replay import replay

POINTS = "measured/silicon_ttft_tpot.csv"
GPU_OF_SYSTEM = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
QUANTIZATION: Mapping[str, Mapping[str, Any] | None] = {
    "": None,
    "fp8": {"quant_method": "fp8"},
    "fp8_block": {"quant_method": "fp8"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.1-70B": {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
    },
    "Llama-3.1-8B-Instruct": {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    },
    "Qwen3-32B": {
        "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
    },
}  # fmt: skip
# The clients draw lengths evenly from this share of the longest to the longest, as the load generators of vLLM do.
SHORTEST_SHARE = 0.8
# Requests per client: it decides how much of the mean is the first burst, in which all clients send at once. Published
# for one series of benchmarks (ten); for the others it is what the bursts in their TTFT show.
TURNS = {"": 10, "0.12.0": 5}
DEFAULT_TURNS = 5
STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One row: an engine with a model on GPUs, a load, and the means that were measured."""

    engine: str
    version: str
    model: str
    family: str
    gpu: str
    precision: str
    tensor_parallel: int
    clients: int
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float

    @property
    def measured_s(self) -> NDArray[np.float64]:
        """TTFT, TPOT and e2e."""
        return with_e2e(self.ttft_s, self.tpot_s, self.output_tokens)

    @property
    def configuration(self) -> tuple[str, str, str, str, int]:
        """What one profile describes."""
        return self.engine, self.model, self.gpu, self.precision, self.tensor_parallel

    @property
    def shape(self) -> ModelShape:
        """The model with its quantization."""
        return _shape(self.model, self.precision)

    @property
    def num_blocks(self) -> int:
        """The KV blocks that fit beside the weights; 0 where nothing does."""
        try:
            return num_gpu_blocks(self.shape, GPUS[self.gpu], tensor_parallel=self.tensor_parallel)
        except ValueError:
            return 0

    @property
    def fits(self) -> bool:
        """Whether all clients' sequences fit into the memory; else the TTFT is that of a queue."""
        return self.clients * (self.prompt_tokens + self.output_tokens) <= self.num_blocks * BLOCK_SIZE


def read_benchmarks(folder: Path) -> list[Benchmark]:
    """Read the rows that one engine served alone: prefill and decode on different engines are left out."""
    with (folder / POINTS).open(newline="", encoding="utf-8") as lines:
        return [_benchmark(row) for row in csv.DictReader(lines) if row["mode"] == "agg"]


def predicted_s(benchmark: Benchmark, constants: RooflineConstants, request_s: float) -> NDArray[np.float64]:
    """Return TTFT, TPOT and e2e of a benchmark by the engine model and the roofline's step time."""
    roofline = Roofline(
        model=benchmark.shape,
        gpu=GPUS[benchmark.gpu],
        constants=constants,
        parallel=Parallelism(tensor=benchmark.tensor_parallel),
    )
    turns = TURNS.get(benchmark.version, DEFAULT_TURNS)
    requests = _requests(benchmark.clients, benchmark.prompt_tokens, benchmark.output_tokens, turns)
    config = EngineConfig(
        max_num_seqs=benchmark.clients,
        max_num_batched_tokens=STEP_TOKENS,
        num_gpu_blocks=benchmark.num_blocks,
        max_model_len=benchmark.prompt_tokens + benchmark.output_tokens,
    )
    outcomes = replay(config, roofline.step_time(), requests)
    ends = np.sort([outcome.e2e_s for outcome in outcomes])
    sent = np.concatenate([np.zeros(benchmark.clients), ends[: -benchmark.clients]])
    first = np.sort([outcome.ttft_s for outcome in outcomes])
    tpot_s = float(np.mean([outcome.tpot_s for outcome in outcomes]))
    return with_e2e(float((first - sent).mean()) + request_s, tpot_s, benchmark.output_tokens)


def naive_s(benchmark: Benchmark) -> NDArray[np.float64]:
    """Return TTFT, TPOT and e2e by the data sheet: operations over the peak, bytes over the bandwidth."""
    model, gpu, ranks = benchmark.shape, GPUS[benchmark.gpu], benchmark.tensor_parallel
    bits = model.weight_bytes_each.compute_bits
    weights = model.num_layers * (model.attention_weights + model.mlp_weights) + model.head_weights
    context = benchmark.prompt_tokens + benchmark.output_tokens / 2
    ttft_s = 2 * weights * benchmark.prompt_tokens / (gpu.peak(bits) * ranks)
    kv_bytes = benchmark.clients * context * model.kv_bytes_per_token
    tpot_s = (model.weight_bytes + kv_bytes) / (gpu.bandwidth * ranks)
    return with_e2e(ttft_s, tpot_s, benchmark.output_tokens)


def with_e2e(ttft_s: float, tpot_s: float, output_tokens: int) -> NDArray[np.float64]:
    """Return TTFT, TPOT and the e2e that they make."""
    return np.array([ttft_s, tpot_s, ttft_s + (output_tokens - 1) * tpot_s])


@cache
def _shape(model: str, precision: str) -> ModelShape:
    config = {"torch_dtype": "bfloat16", **MODELS[model]}
    if (quantization := QUANTIZATION[precision]) is not None:
        config["quantization_config"] = quantization
    return model_shape(config)


@cache
def _requests(clients: int, prompt_tokens: int, output_tokens: int, turns: int) -> list[RequestFacts]:
    generator, num = np.random.default_rng(0), clients * turns
    prompts, outputs = (
        generator.integers(max(1, int(SHORTEST_SHARE * longest)), longest, num, endpoint=True)
        for longest in (prompt_tokens, output_tokens)
    )
    return [
        RequestFacts(request_id=f"{number:06}", prompt_tokens=int(prompt), output_tokens=int(output))
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def _benchmark(row: Mapping[str, str]) -> Benchmark:
    model = row["model_path"].rsplit("/", 1)[-1]
    if model not in MODELS:
        raise unknown_choice(f"{POINTS}: model_path", row["model_path"], MODELS)
    return Benchmark(
        engine=row["backend"],
        version=row["backend_version"],
        model=model,
        family=str(MODELS[model]["model_type"]),
        gpu=GPU_OF_SYSTEM[row["system"]],
        precision=row["gemm_quant_mode"],
        tensor_parallel=int(float(row["tp_size"])),
        clients=int(float(row["batch_size"])),
        prompt_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )
