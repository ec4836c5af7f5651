"""The accuracy of predicted lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.stats import norm, rankdata

Numbers = npt.NDArray[np.float64]

P90 = float(norm.ppf(0.9))
METRICS = ("mae", "mae_over_mean", "acc50", "acc100", "spearman", "pinball", "coverage_p90")


def scores(lengths: Numbers, medians: Numbers, spreads: Numbers) -> dict[str, float]:
    """Score predicted medians and spreads against lengths in tokens.

    `acc50` and `acc100` are the shares with an error of less than 50 and 100 tokens, `pinball` is the mean pinball loss
    of the median and of the predicted 90th percentile, `coverage_p90` is the share of lengths up to that percentile.
    """
    p90 = medians * np.exp(P90 * spreads)
    errors = np.abs(lengths - medians)
    return {
        "mae": float(errors.mean()),
        "mae_over_mean": float(errors.mean() / lengths.mean()),
        "acc50": float((errors < 50).mean()),
        "acc100": float((errors < 100).mean()),
        "spearman": spearman(lengths, medians),
        "pinball": float((pinball(lengths, medians, 0.5) + pinball(lengths, p90, 0.9)) / 2),
        "coverage_p90": float((lengths <= p90).mean()),
    }


def pinball(lengths: Numbers, quantiles: Numbers, share: float) -> float:
    """Return the mean pinball loss of predicted quantiles."""
    over = lengths - quantiles
    return float(np.maximum(share * over, (share - 1) * over).mean())


def spearman(left: Numbers, right: Numbers) -> float:
    """Return the rank correlation; 0 if one side is constant."""
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return 0.0
    return float(np.corrcoef(rankdata(left), rankdata(right))[0, 1])


def sampling_ceiling(rows: Sequence[Sequence[int]]) -> tuple[Numbers, Numbers, Numbers]:
    """Predict each response from the others of the same model to the same prompt: lengths, medians, spreads.

    This is an upper bound for predictions from the prompt; rows with one response are left out. The prediction is the
    mean of the others, as for the published numbers.
    """
    lengths: list[int] = []
    medians: list[float] = []
    spreads: list[float] = []
    for row in rows:
        if len(row) < 2:
            continue
        values = np.asarray(row, float)
        logs = np.log(values)
        lengths.extend(row)
        medians.extend((values.sum() - values) / (len(row) - 1))
        spreads.extend([float(np.std(np.delete(logs, index))) for index in range(len(row))])
    return np.asarray(lengths, float), np.asarray(medians), np.asarray(spreads)
