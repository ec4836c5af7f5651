"""`block profile kernels` without its flags: times a model's kernels on this machine, and composes its profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from predictor.fitting.engine_profile import profile_name
from predictor.fitting.kernel_plan import Reach
from predictor.fitting.kernel_profile import Timings, UntimedCosts, fit_kernels
from predictor.fitting.kv_memory import BLOCK_SIZE, MEMORY_UTILIZATION
from predictor.fitting.model_shard import Share, share_of
from predictor.profile import FITTED, Profile, SuggestedEngine, profile_to_dict
from simulator.codec import read_json

CONFIG = "config.json"
CPU_KV_BYTES = 4 * 2**30  # default size of the KV cache in vLLM's CPU build
MIN_BUDGET_S = 2.0
NO_SUGGESTION = SuggestedEngine()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """Which model's kernels to time, on which device, up to which sizes, and for how long; '' and None for defaults."""

    config: str  # a file or its folder
    device: str = "auto"
    dtype: str = "auto"
    tensor_parallel: int = 1
    budget_s: float = 180.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    seed: int = 0
    name: str = ""
    gpu: str = ""
    untimed: UntimedCosts

    def __post_init__(self) -> None:
        """Reject a budget that is too short, and link parameters for a single device."""
        if not MIN_BUDGET_S <= self.budget_s < 1e6:
            raise ValueError(f"budget: must be at least {MIN_BUDGET_S:g} s, not {self.budget_s:g} s")
        if self.tensor_parallel == 1 and (self.untimed.all_reduce_s or self.untimed.link_bytes_per_s):
            raise ValueError("tensor_parallel: must be above 1 with all-reduce parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """The profile, and the timings that it was composed of."""

    profile: Profile
    timings: Timings
    device: str
    attention: str
    kv_tokens: int | None  # size of the device's KV cache; None if unknown
    took_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, with a row per timed kernel."""
        timings = self.timings
        return {
            "device": self.device,
            "attention_by": self.attention,
            "kv_tokens": self.kv_tokens,
            "took_s": self.took_s,
            "dense": [
                {"kernel": name, "tokens": count, "seconds": seconds}
                for name, by_count in timings.dense.items()
                for count, seconds in by_count.items()
            ],
            "head": [{"sequences": count, "seconds": seconds} for count, seconds in timings.head.items()],
            "attention": [asdict(batch) | {"seconds": seconds} for batch, seconds in timings.attention.items()],
            "profile": profile_to_dict(self.profile),
        }


def kernel_profile(options: KernelOptions, progress: Callable[[float], None]) -> KernelReport:
    """Time the kernels and compose the profile; ValueError if the model or the machine is not supported."""
    model, config = _config_at(options.config)
    share = share_of(config, tensor_parallel=options.tensor_parallel, dtype=options.dtype)
    try:
        from services.profiling.kernel_timing import OutOfMemoryError, TimingOptions, time_kernels
        from services.profiling.torch_device import device_named
    except ImportError:
        raise ValueError("kernels: needs torch: pip install torch, or 'block-serving[tagger]', which has it") from None
    device = device_named(options.device)
    kv_tokens = None if device.memory_bytes is None else share.kv_tokens(device.memory_bytes, MEMORY_UTILIZATION)
    reach = Reach(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=min(share.longest, share.longest if options.max_model_len is None else options.max_model_len),
        kv_tokens=kv_tokens or max(1, CPU_KV_BYTES // (share.kv_bytes * share.model.num_layers)),
    )
    try:
        timing = TimingOptions(
            share=share, reach=reach, device=device.torch, budget_s=options.budget_s, seed=options.seed
        )
        timed = time_kernels(timing, progress)
    except OutOfMemoryError:
        raise ValueError("device: has too little memory; lower max_num_batched_tokens or max_num_seqs") from None
    step_time, error, valid = fit_kernels(timed.timings, share, options.untimed)
    gpu = options.gpu or device.name
    made = Profile(
        name=options.name or profile_name(model, gpu),
        model=model,
        gpu=gpu,
        tensor_parallel=options.tensor_parallel,
        dtype=share.dtype,
        kind=FITTED,
        step_time=step_time,
        valid=valid,
        error=error,
        source=f"one layer's kernels and the head's, timed with random weights in {timed.took_s:.0f} s on {device.name}"
        f" ({device.description}), {len(timed.timings.attention)} batches of {timed.attention}; the error is that of"
        f" steps composed of them. {notes_of(share, options.untimed)}",
        engine=NO_SUGGESTION
        if kv_tokens is None
        else SuggestedEngine(num_gpu_blocks=max(1, kv_tokens // BLOCK_SIZE), block_size=BLOCK_SIZE),
    )
    return KernelReport(
        profile=made,
        timings=timed.timings,
        device=device.name,
        attention=timed.attention,
        kv_tokens=kv_tokens,
        took_s=timed.took_s,
    )


def notes_of(share: Share, untimed: UntimedCosts) -> str:
    """Describe the costs that are not timed: those that were given, or that they are missing."""
    notes = [f"{untimed.cpu_s * 1e3:g} ms of processor time a step, as given" if untimed.cpu_s else "No processor time"]
    if share.tensor_parallel > 1:
        link = f" and {untimed.link_bytes_per_s / 1e9:g} GB/s" if untimed.link_bytes_per_s else ""
        all_reduces = f"all-reduces of {untimed.all_reduce_s * 1e6:g} us{link}, as given"
        notes.append(all_reduces if untimed.all_reduce_s or link else "no all-reduces, which one device cannot time")
    return "; ".join(notes) + "."


def _config_at(given: str) -> tuple[str, dict[str, Any]]:
    """Read a `config.json`; return the model's name from it, or else from its folder, and its content."""
    path = Path(given)
    path = path / CONFIG if path.is_dir() else path
    config = read_json(str(path))
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must be an object, a model's config.json")
    return str(config.get("_name_or_path") or path.absolute().parent.name or "unnamed"), config
