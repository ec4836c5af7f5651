"""Fits the time of transfers of KV blocks: a base, the bytes over a bandwidth, and the number of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.optimize import nnls

from predictor.fitting.regression import rounded
from predictor.profile import KvTransferTime

MIN_TRANSFERS = 6
MIN_RATIO = 2.0  # of the largest to the smallest transfer
LEAST_BYTE_S = 1e-15  # where the number of descriptors explains all
LEAST_SHARE = 0.1  # of the median: errors of quicker transfers count relative to this
VARIES = 0.3  # coefficient of variation of descriptors per byte from which their own cost can be fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTransfer:
    """One transfer of whole blocks: their number, bytes and descriptors (0: unknown), and the seconds it took."""

    blocks: int
    bytes: float
    seconds: float
    descriptors: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTransfers:
    """The fit, and its relative error on the transfers that it was made of."""

    time: KvTransferTime
    median_error: float
    num_transfers: int


def fit_transfers(transfers: Sequence[MeasuredTransfer], block_size: int) -> FittedTransfers:
    """Fit to the medians of equal transfers, by relative errors; ValueError if they are too few or too much alike.

    The cost of a descriptor can be fitted only where their number does not grow with the bytes: blocks that lie side by
    side need fewer. Otherwise it is a part of the bandwidth, and kv_transfer_block_s is 0.
    """
    if len(transfers) < MIN_TRANSFERS:
        raise ValueError(f"transfers: {len(transfers)} are too few; {MIN_TRANSFERS} are needed")
    by_size: dict[tuple[int, float, float], list[float]] = {}
    for one in transfers:
        by_size.setdefault((one.blocks, one.bytes, one.descriptors), []).append(one.seconds)
    blocks, num_bytes, descriptors = np.array(sorted(by_size), float).T
    if num_bytes.min() <= 0:
        raise ValueError("transfers: some have no bytes; give kv_bytes_per_token")
    if blocks.max() < MIN_RATIO * blocks.min():
        raise ValueError("transfers: all are about equally large; measure prompts of more different lengths")
    seconds = np.array([median(by_size[size]) for size in sorted(by_size)])
    columns = [np.ones(len(seconds)), num_bytes]
    if _varies(descriptors / num_bytes):
        columns.append(descriptors)
    table = np.column_stack(columns)
    scale = table.max(axis=0)
    weights = 1 / np.maximum(seconds, LEAST_SHARE * np.median(seconds))
    solved, _ = nnls(table / scale * weights[:, None], seconds * weights)
    base_s, byte_s, *descriptor_s = (solved / scale).tolist()
    per_block = float(np.median(descriptors / blocks))
    return FittedTransfers(
        time=KvTransferTime(
            kv_bytes_per_token=round(_slope(blocks, num_bytes) / block_size),
            kv_transfer_base_s=rounded(base_s),
            kv_transfer_bytes_per_s=rounded(1 / max(byte_s, LEAST_BYTE_S)),
            kv_transfer_block_s=rounded(descriptor_s[0] * per_block) if descriptor_s else 0.0,
        ),
        median_error=float(np.median(np.abs(table @ (solved / scale) / seconds - 1))),
        num_transfers=len(transfers),
    )


def _slope(blocks: np.ndarray, num_bytes: np.ndarray) -> float:
    """Return the bytes of a block: the last one of a prompt may be copied in part."""
    least, most = blocks.argmin(), blocks.argmax()
    return float((num_bytes[most] - num_bytes[least]) / (blocks[most] - blocks[least]))


def _varies(per_byte: np.ndarray) -> bool:
    return bool(per_byte.min() > 0 and per_byte.std() > VARIES * per_byte.mean())
