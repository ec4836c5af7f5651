"""Measures how long KV blocks take from a prefill engine to a decode engine, by prompts of many lengths.

The decode engine gets every prompt twice. The first request fetches the blocks, the second finds them in the prefix
cache, and both then compute one token: their times to the first token differ by the fetch as requests experience it,
whatever the connector. With NIXL, vLLM also counts the seconds, bytes and descriptors of the copy itself. How the time
grows with the bytes is then taken from these, which other processes disturb less, and only what requests experience in
addition, the same for all, from their times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan, nan
from statistics import median
from typing import Any
from uuid import uuid4

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from predictor.fitting.kv_transfers import FittedTransfers, MeasuredTransfer, fit_transfers
from predictor.fitting.measurement_batches import BatchItem
from services.http.engine_identity import difference
from services.http.kv_transfer import REMOTE_DECODE
from services.http.openai_body import KV_TRANSFER_PARAMS
from services.http.origin import Origin, origin_of
from services.profiling.prompt_sender import PromptSender

SIZES = 8  # different lengths of prompts
MIN_BUDGET_S = 5.0
SHORTEST_BLOCKS = 4  # that the longest prompt must have
FETCH_TIMEOUT_S = 120.0
LONGEST_SHARE = 0.5  # of the smaller engine's KV blocks
NIXL = ("xfer_time_seconds", "bytes_transferred", "num_descriptors")
COUNTS = tuple(f"vllm:nixl_{name}_sum" for name in NIXL)
NUM_TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
FETCHED_TOKENS = "vllm:external_prefix_cache_hits_total"
COUNTED_WITHIN_S, POLL_S = 5.0, 0.05
SHORTEST_FETCH_S = 1e-6  # where the two requests differ by less than their noise

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Between which engines to measure, for how long; the bytes of a token, where the engine does not count them."""

    prefill_url: str
    decode_url: str
    budget_s: float = 60.0
    kv_bytes_per_token: int = 0
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Refuse a measurement that cannot be made."""
        for name in ("prefill_url", "decode_url"):
            if not getattr(self, name):
                raise ValueError(f"{name}: is missing")
        if not MIN_BUDGET_S <= self.budget_s < 1e6:
            raise ValueError(f"budget: must be at least {MIN_BUDGET_S:g} s, not {self.budget_s:g} s")
        if self.kv_bytes_per_token < 0:
            raise ValueError(f"kv_bytes_per_token: must be at least 0, not {self.kv_bytes_per_token}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMeasurement:
    """The fit, the transfers that it was made of, and the median seconds that NIXL itself reports; NaN: none."""

    fitted: FittedTransfers
    transfers: Sequence[MeasuredTransfer]
    nixl_s: Sequence[float]
    block_size: int

    def line(self) -> str:
        """Describe the fit in one line."""
        time = self.fitted.time
        return (
            f"{time.kv_transfer_base_s or 0:.3g} s and {(time.kv_transfer_bytes_per_s or 0) / 1e9:.3g} GB/s with "
            f"{time.kv_bytes_per_token} bytes a token: {self.fitted.median_error:.1%} off on "
            f"{self.fitted.num_transfers} transfers"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fit and all transfers."""
        rows = [
            {**asdict(one), "nixl_seconds": None if isnan(nixl_s) else nixl_s}
            for one, nixl_s in zip(self.transfers, self.nixl_s, strict=True)
        ]
        return {
            "transfer": asdict(self.fitted.time),
            "median_error": self.fitted.median_error,
            "num_transfers": self.fitted.num_transfers,
            "block_size": self.block_size,
            "transfers": rows,
        }


async def measured_transfers(options: TransferOptions, progress: Progress) -> TransferMeasurement:
    """Measure and fit; ValueError if one of the engines is not set up for it."""
    id_prefix = f"profile-{uuid4().hex[:12]}-"
    prefill, decode = (
        PromptSender(_origin(setting, url), id_prefix, options.api_key, setting=setting)
        for setting, url in (("prefill_url", options.prefill_url), ("decode_url", options.decode_url))
    )
    try:
        return await _Transfers(prefill, decode, options).run(progress)
    finally:
        prefill.close()
        decode.close()


class _Transfers:
    """One measurement between two engines."""

    def __init__(self, prefill: PromptSender, decode: PromptSender, options: TransferOptions) -> None:
        self._prefill = prefill
        self._decode = decode
        self._options = options
        self._block_size = 0

    async def run(self, progress: Progress) -> TransferMeasurement:
        """Send prompts of all lengths in turn until the budget is used up."""
        identities = {"prefill_url": await self._prefill.identity(), "decode_url": await self._decode.identity()}
        if reason := difference(identities):
            raise ValueError(reason)
        await self._prefill.connect()
        await self._decode.connect()
        sizes = await self._sizes([one.max_model_len for one in identities.values()])
        for size in (sizes[0], sizes[-1]):  # the first fetch connects the engines
            await self._within(size)
        transfers: list[MeasuredTransfer] = []
        nixl_s: list[float] = []
        start_s = time.monotonic()
        while (used := (time.monotonic() - start_s) / self._options.budget_s) < 1 or len(transfers) < len(sizes):
            progress(min(1.0, used))
            transfer, seconds = await self._within(sizes[len(transfers) % len(sizes)])
            transfers.append(transfer)
            nixl_s.append(seconds)
        return TransferMeasurement(
            fitted=fit_transfers(with_counted_seconds(transfers, nixl_s), self._block_size),
            transfers=transfers,
            nixl_s=nixl_s,
            block_size=self._block_size,
        )

    async def _sizes(self, longest: Sequence[int | None]) -> list[int]:
        """Choose numbers of blocks; the prompts have one token more than these blocks hold."""
        limits = []
        for setting, sender in (("prefill_url", self._prefill), ("decode_url", self._decode)):
            settings = cache_settings(await sender.metrics())
            if settings is None:
                raise ValueError(f"{setting}: /metrics has no vllm:cache_config_info with the engine's KV blocks")
            if settings.get("enable_prefix_caching") == "False" and sender is self._decode:
                raise ValueError("decode_url: its prefix cache is off, which the measurement needs")
            self._block_size = int(settings["block_size"])
            limits.append(int(LONGEST_SHARE * int(settings["num_gpu_blocks"])))
        limits += [(tokens - 2) // self._block_size for tokens in longest if tokens is not None]
        largest = min(limits)
        if largest < SHORTEST_BLOCKS:
            raise ValueError("decode_url: the engines hold too few KV blocks, or too short prompts")
        return sorted({round(largest ** (step / (SIZES - 1))) for step in range(SIZES)})

    async def _within(self, num_blocks: int) -> tuple[MeasuredTransfer, float]:
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await self._fetch(num_blocks)
        except TimeoutError:
            raise ValueError(f"decode_url: blocks of a prompt are not there after {FETCH_TIMEOUT_S:g} s") from None

    async def _fetch(self, num_blocks: int) -> tuple[MeasuredTransfer, float]:
        """Prefill a prompt on one engine, fetch its blocks to the other, and send it there again."""
        prompt = self._prefill.prompt(num_blocks * self._block_size + 1)
        reply = await self._prefill.answer(prompt, 1, {KV_TRANSFER_PARAMS: REMOTE_DECODE})
        params = reply.get(KV_TRANSFER_PARAMS)
        if not isinstance(params, dict) or not params.get("remote_block_ids"):
            raise ValueError(
                "prefill_url: it answers without kv_transfer_params; start it with --kv-transfer-config, as a producer"
            )
        before = totals(await self._decode.metrics())
        item = BatchItem(prompt_tokens=len(prompt), output_tokens=1)
        fetched = await self._decode.send(item, prompt, {KV_TRANSFER_PARAMS: params})
        after = await self._counted(before)
        cached = await self._decode.send(item, prompt)
        seconds = max(SHORTEST_FETCH_S, (fetched.first_s - fetched.sent_s) - (cached.first_s - cached.sent_s))
        blocks = num_blocks + 1
        nixl_s, num_bytes, descriptors = self._counts_between(before, after, blocks)
        measured = MeasuredTransfer(blocks=blocks, bytes=num_bytes, seconds=seconds, descriptors=descriptors)
        return measured, nixl_s

    def _counts_between(
        self, before: Mapping[str, float], after: Mapping[str, float], blocks: int
    ) -> tuple[float, float, float]:
        """Return what NIXL counted of a transfer: seconds, bytes and descriptors of a rank."""
        num = after.get(NUM_TRANSFERS, 0.0) - before.get(NUM_TRANSFERS, 0.0)
        if num > 0:  # one for each rank
            nixl_s, num_bytes, descriptors = ((after[name] - before.get(name, 0.0)) / num for name in COUNTS)
            return nixl_s, num_bytes, descriptors
        if not self._options.kv_bytes_per_token:
            raise ValueError(
                "kv_bytes_per_token: is missing, and the decode engine does not count vllm:nixl_bytes_transferred"
            )
        return nan, self._options.kv_bytes_per_token * blocks * self._block_size, 0.0

    async def _counted(self, before: Mapping[str, float]) -> Mapping[str, float]:
        """Wait until the decode engine has counted the transfer; ValueError if it fetched nothing."""
        deadline_s = time.monotonic() + COUNTED_WITHIN_S
        while True:
            after = totals(await self._decode.metrics())
            if any(after.get(name, 0.0) > before.get(name, 0.0) for name in (NUM_TRANSFERS, FETCHED_TOKENS)):
                return after
            if time.monotonic() > deadline_s:
                raise ValueError(
                    "decode_url: it fetched no blocks; start it with --kv-transfer-config, with the connector of the "
                    "prefill engine"
                )
            await asyncio.sleep(POLL_S)


def with_counted_seconds(transfers: Sequence[MeasuredTransfer], nixl_s: Sequence[float]) -> list[MeasuredTransfer]:
    """Replace the experienced seconds by those of NIXL and the median of what requests experience in addition."""
    if any(map(isnan, nixl_s)):
        return list(transfers)
    more_s = max(0.0, median(one.seconds - copy_s for one, copy_s in zip(transfers, nixl_s, strict=True)))
    return [replace(one, seconds=more_s + copy_s) for one, copy_s in zip(transfers, nixl_s, strict=True)]


def totals(text: str) -> dict[str, float]:
    """Add up the samples of each metric of a transfer."""
    found: dict[str, float] = {}
    for sample in _samples(text):
        if sample.name in (*COUNTS, NUM_TRANSFERS, FETCHED_TOKENS):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def cache_settings(text: str) -> Mapping[str, str] | None:
    """Find the settings of the KV cache; None where they are not exported."""
    for sample in _samples(text):
        if sample.name == "vllm:cache_config_info" and {"block_size", "num_gpu_blocks"} <= sample.labels.keys():
            return dict(sample.labels)
    return None


def _samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        yield from family.samples


def _origin(setting: str, url: str) -> Origin:
    try:
        return origin_of(url.rstrip("/").removesuffix("/v1"))
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None
