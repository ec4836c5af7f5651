"""`block profile kernels`, but for its flags: a model's kernels timed on this machine, and its profile composed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from predictor.fitting.kernel_plan import Reach
from predictor.fitting.kernel_profile import Timings, Told, fit_kernels
from predictor.fitting.model_shard import Share, share_of
from predictor.fitting.roofline import BLOCK_SIZE, MEMORY_UTILIZATION
from predictor.profile import FITTED, Profile, SuggestedEngine, profile_to_dict
from services.profiling.measure_command import named_after
from simulator.codec import read_json

CONFIG = "config.json"
CPU_KV_BYTES = 4 * 2**30  # vLLM's CPU build keeps so much for keys and values unless told otherwise
FEWEST_BUDGET_S = 2.0
NO_OPINION = SuggestedEngine()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOrders:
    """Which model's kernels to time, where, how far, and for how long; '' and None where that is to be found out."""

    config: str  # a file, or the folder that it is in
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
    told: Told

    def __post_init__(self) -> None:
        """Refuse a budget in which nothing can be timed, and what is told of links that there are none of."""
        if not FEWEST_BUDGET_S <= self.budget_s < 1e6:
            raise ValueError(f"budget: must be at least {FEWEST_BUDGET_S:g} s, not {self.budget_s:g} s")
        if self.tensor_parallel == 1 and (self.told.all_reduce_s or self.told.link_bytes_per_s):
            raise ValueError("tensor_parallel: one device all-reduces nothing; say among how many the model is divided")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """The profile, and what it was made from."""

    profile: Profile
    timings: Timings
    device: str
    attention: str
    kv_tokens: int | None  # that the device has room for; None where that is not known
    took_s: float

    def to_dict(self) -> dict[str, Any]:
        """Give all of it as plain data: a row for each kernel's time."""
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


def kernel_profile(orders: KernelOrders, progress: Callable[[float], None]) -> KernelReport:
    """Carry the orders out; ValueError where the model cannot be timed, or this machine cannot time it."""
    model, config = _config_at(orders.config)
    share = share_of(config, tensor_parallel=orders.tensor_parallel, dtype=orders.dtype)
    try:
        from services.profiling.devices import device_named
        from services.profiling.timing_kernels import KernelWish, OutOfMemoryError, time_kernels
    except ImportError:
        raise ValueError("kernels: needs torch: pip install torch, or 'block-serving[tagger]', which has it") from None
    device = device_named(orders.device)
    kv_tokens = None if device.memory_bytes is None else share.kv_tokens(device.memory_bytes, MEMORY_UTILIZATION)
    reach = Reach(
        max_num_seqs=orders.max_num_seqs,
        max_num_batched_tokens=orders.max_num_batched_tokens,
        max_model_len=min(share.longest, share.longest if orders.max_model_len is None else orders.max_model_len),
        kv_tokens=kv_tokens or max(1, CPU_KV_BYTES // (share.kv_bytes * share.model.num_layers)),
    )
    try:
        wish = KernelWish(share=share, reach=reach, device=device.torch, budget_s=orders.budget_s, seed=orders.seed)
        timed = time_kernels(wish, progress)
    except OutOfMemoryError:
        raise ValueError(
            "device: its memory does not hold what is to be timed; lower max_num_batched_tokens or max_num_seqs"
        ) from None
    step_time, error, valid = fit_kernels(timed.timings, share, orders.told)
    gpu = orders.gpu or device.name
    made = Profile(
        name=orders.name or named_after(model, gpu),
        model=model,
        gpu=gpu,
        tensor_parallel=orders.tensor_parallel,
        dtype=share.dtype,
        kind=FITTED,
        step_time=step_time,
        valid=valid,
        error=error,
        source=f"one layer's kernels and the head's, timed with random weights in {timed.took_s:.0f} s on {device.name}"
        f" ({device.driven_by}), {len(timed.timings.attention)} batches of {timed.attention}; the error is that of"
        f" steps composed of them. {notes_of(share, orders.told)}",
        engine=NO_OPINION
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


def notes_of(share: Share, told: Told) -> str:
    """Say what no kernel told: what was told instead, or that it is missing."""
    notes = [f"{told.cpu_s * 1e3:g} ms of processor time a step, as told" if told.cpu_s else "No processor time"]
    if share.tensor_parallel > 1:
        link = f" and {told.link_bytes_per_s / 1e9:g} GB/s" if told.link_bytes_per_s else ""
        as_told = f"all-reduces of {told.all_reduce_s * 1e6:g} us{link}, as told"
        notes.append(as_told if told.all_reduce_s or link else "no all-reduces, which one device cannot time")
    return "; ".join(notes) + "."


def _config_at(given: str) -> tuple[str, dict[str, Any]]:
    """Read a `config.json`, and tell the model's name: what it says itself, or else its folder's."""
    path = Path(given)
    path = path / CONFIG if path.is_dir() else path
    config = read_json(str(path))
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must be an object, a model's config.json")
    return str(config.get("_name_or_path") or path.absolute().parent.name or "unnamed"), config
