"""Estimates a profile from a model's config.json and a GPU's data sheet, by constants fitted to published benchmarks.

`scripts/fit_roofline.py` makes the constants and their errors, in `roofline.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from predictor.config import require_count
from predictor.fitting.gpus import gpu_key, gpu_named
from predictor.fitting.kv_memory import BLOCK_SIZE, kv_bytes_per_token, num_gpu_blocks
from predictor.fitting.model_config import model_shape, text_config
from predictor.fitting.quantization import dtype_of
from predictor.fitting.roofline import MAX_SEQUENCES, MAX_TOKENS, Parallelism, Roofline, RooflineConstants
from predictor.profile import ROOFLINE, EstimateError, KvTransferTime, Profile, SuggestedEngine, Transit, ValidRange

FILE = "roofline.json"
KNOWN, UNKNOWN = "known", "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRoofline:
    """Constants with their source, what they were fitted to, and their errors by what is known of GPU and family."""

    constants: RooflineConstants
    request_s: float  # of a request outside the engine's steps
    request_s_by_gpu: Mapping[str, float]  # on the machines of GPUs that it was fitted to
    families: tuple[str, ...]
    errors: tuple[EstimateError, ...]
    source: str

    def request_s_on(self, gpu_name: str) -> float:
        """Return the time of a request outside the steps."""
        known = self._known(gpu_name)
        return self.request_s_by_gpu[known] if known else self.request_s

    def _known(self, gpu_name: str) -> str | None:
        return next((name for name in self.request_s_by_gpu if gpu_key(name) == gpu_key(gpu_name)), None)

    def error_for(self, gpu_name: str, family: str) -> EstimateError:
        """Return the error of an estimate for a GPU and a model family, each fitted to or not."""
        gpu = KNOWN if self._known(gpu_name) else UNKNOWN
        by = KNOWN if family in self.families else UNKNOWN
        return next(error for error in self.errors if (error.gpu, error.family) == (gpu, by))


@cache
def fitted_roofline() -> FittedRoofline:
    """Read the constants that ship."""
    data = json.loads((resources.files(__package__) / FILE).read_text(encoding="utf-8"))
    return FittedRoofline(
        constants=RooflineConstants(**data["constants"]),
        request_s=data["request_s"],
        request_s_by_gpu=data["request_s_by_gpu"],
        families=tuple(data["families"]),
        errors=tuple(EstimateError(**error) for error in data["errors"]),
        source=data["source"],
    )


def roofline_profile(
    config: Mapping[str, Any],
    gpu_name: str,
    *,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    kv_cache_dtype: str = "auto",
    name: str | None = None,
) -> Profile:
    """Estimate the profile of an engine, or of one data-parallel rank of it; its kind is `roofline`."""
    require_count("tensor_parallel", tensor_parallel)
    require_count("data_parallel", data_parallel)
    gpu, model, found = gpu_named(gpu_name), model_shape(config, cache_dtype=kv_cache_dtype), fitted_roofline()
    if model.num_heads % tensor_parallel:
        raise ValueError(
            f"tensor_parallel: {tensor_parallel} devices cannot share num_attention_heads, {model.num_heads}, evenly"
        )
    inner = text_config(config)
    model_name = str(inner.get("_name_or_path") or inner.get("model_type") or "unnamed")
    parallel = Parallelism(tensor=tensor_parallel, data=data_parallel)
    roofline = Roofline(model=model, gpu=gpu, constants=found.constants, parallel=parallel)
    return Profile(
        name=name or f"{model_name.rsplit('/', 1)[-1].lower()}-{gpu_key(gpu_name)}-roofline",
        model=model_name,
        gpu=gpu_name,
        tensor_parallel=tensor_parallel,
        dtype=dtype_of(inner),
        kind=ROOFLINE,
        step_time=roofline.step_time(),
        valid=ValidRange(max_tokens=MAX_TOKENS, max_sequences=MAX_SEQUENCES, max_context_tokens=2**30),
        error=None,
        source=f"roofline, this model was not measured: {_described(parallel)}{found.source}",
        engine=SuggestedEngine(
            num_gpu_blocks=num_gpu_blocks(model, gpu, tensor_parallel=tensor_parallel, data_parallel=data_parallel),
            block_size=BLOCK_SIZE,
        ),
        transit=Transit(inward_s=found.request_s_on(gpu_name)),
        transfer=KvTransferTime(kv_bytes_per_token=round(kv_bytes_per_token(model, tensor_parallel=tensor_parallel))),
        estimate=found.error_for(gpu_name, str(inner.get("model_type") or "")),
    )


def _described(parallel: Parallelism) -> str:
    if parallel.data == 1:
        return ""
    return f"one of {parallel.data} data-parallel ranks, which divide the experts and have equal batches; "
