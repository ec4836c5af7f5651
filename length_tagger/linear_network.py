"""The network of `linear`: a sum of word weights, one small hidden layer, and a median and a spread per served model.

Training and inference need only numpy and scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse

from length_tagger.features import NUM_BUCKETS, NUM_COUNTS, Features

Array: TypeAlias = npt.NDArray[np.float32]

NUM_FACTORS = 64  # width of the first layer, in each of the networks that are averaged
NUM_HIDDEN = 64
LENGTH_POWER = 0.5  # an error of the logarithm is weighted by this power of the length: 1 for tokens, 0 for ratios
UNIT_LOG = 5.7  # logarithm of the length with weight 1
LOG_LENGTHS = (1.0, 9.0)
LOG_SPREADS = (-4.0, 0.3)  # from below sampling noise to above the spread of all data


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The weights, and the scales of the features."""

    rarity: Array  # of buckets: inverse document frequency
    count_means: Array
    count_scales: Array
    words: Array  # buckets x factors
    from_counts: Array  # counts x factors
    factor_bias: Array
    hidden: Array  # factors x hidden
    hidden_bias: Array
    out: Array  # hidden x 2 models: medians, then spreads, of the logarithm
    straight: Array  # counts x 2 models
    out_bias: Array

    def prepared(self, prompt_features: Features) -> tuple[sparse.csr_array, Array]:
        """Scale features for the weights."""
        num = len(prompt_features.counts)
        weights: Array = prompt_features.weights * self.rarity[prompt_features.buckets]
        squares = np.add.reduceat(
            np.append(weights * weights, np.float32(0)), np.minimum(prompt_features.starts[:-1], len(weights))
        )
        squares[prompt_features.starts[:-1] == prompt_features.starts[1:]] = 0
        lengths = np.sqrt(np.maximum(squares, 1e-12)).astype(np.float32)
        scaled = (weights / np.repeat(lengths, np.diff(prompt_features.starts))).astype(np.float32)
        rows = sparse.csr_array((scaled, prompt_features.buckets, prompt_features.starts), shape=(num, NUM_BUCKETS))
        counts = (prompt_features.counts - self.count_means) / self.count_scales
        return rows, np.clip(counts, -5, 5).astype(np.float32)

    def outputs(self, prompt_features: Features) -> tuple[Array, Array]:
        """Return medians and spreads of the logarithm of the length: prompts x models."""
        rows, counts = self.prepared(prompt_features)
        factors = np.maximum(rows @ self.words + counts @ self.from_counts + self.factor_bias, 0)
        hidden = np.maximum(factors @ self.hidden + self.hidden_bias, 0)
        out = hidden @ self.out + counts @ self.straight + self.out_bias
        num_models = out.shape[1] // 2
        return out[:, :num_models], np.exp(np.clip(out[:, num_models:], *LOG_SPREADS))


TRAINED = ("words", "from_counts", "factor_bias", "hidden", "hidden_bias", "out", "straight", "out_bias")
DECAYED = ("words", "from_counts", "hidden", "out", "straight")


def untrained(prompt_features: Features, log_lengths: Array, rng: np.random.Generator) -> Network:
    """Return an untrained network: features are scaled by the data, every model starts at its own median."""
    num_models = log_lengths.shape[1]
    num_prompts = len(prompt_features.counts)
    in_prompts = np.bincount(prompt_features.buckets, minlength=NUM_BUCKETS)
    rarity = np.where(in_prompts > 1, np.log((1 + num_prompts) / (1 + in_prompts)) + 1, 0)  # once is too rare
    medians = [_median(log_lengths[:, place]) for place in range(num_models)]
    spreads = np.log([_mean_deviation(log_lengths[:, place]) for place in range(num_models)])

    def normal(rows: int, columns: int, scale: float) -> Array:
        return rng.normal(0, scale, (rows, columns)).astype(np.float32)

    return Network(
        rarity=rarity.astype(np.float32),
        count_means=prompt_features.counts.mean(0),
        count_scales=np.maximum(prompt_features.counts.std(0), 1e-3),
        words=normal(NUM_BUCKETS, NUM_FACTORS, 0.02) * (rarity > 0)[:, None].astype(np.float32),
        from_counts=normal(NUM_COUNTS, NUM_FACTORS, NUM_COUNTS**-0.5),
        factor_bias=np.zeros(NUM_FACTORS, np.float32),
        hidden=normal(NUM_FACTORS, NUM_HIDDEN, (2 / NUM_FACTORS) ** 0.5),
        hidden_bias=np.zeros(NUM_HIDDEN, np.float32),
        out=normal(NUM_HIDDEN, 2 * num_models, 0.5 * NUM_HIDDEN**-0.5),
        straight=np.zeros((NUM_COUNTS, 2 * num_models), np.float32),
        out_bias=np.concatenate((medians, spreads)).astype(np.float32),
    )


def averaged(networks: Sequence[Network]) -> Network:
    """Join networks to one whose outputs are the means of theirs (for spreads: the means of the logarithms)."""
    one, num = networks[0], len(networks)

    def joined(name: str) -> Array:
        return np.concatenate([getattr(network, name) for network in networks], axis=-1)

    def mean(name: str) -> Array:
        same: Array = np.mean([getattr(network, name) for network in networks], axis=0, dtype=np.float32)
        return same

    hidden = sparse.block_diag([network.hidden for network in networks]).toarray()
    return Network(
        rarity=one.rarity,
        count_means=one.count_means,
        count_scales=one.count_scales,
        words=joined("words"),
        from_counts=joined("from_counts"),
        factor_bias=joined("factor_bias"),
        hidden=hidden.astype(np.float32),
        hidden_bias=joined("hidden_bias"),
        out=(np.concatenate([network.out for network in networks]) / num).astype(np.float32),
        straight=mean("straight"),
        out_bias=mean("out_bias"),
    )


def _median(values: Array) -> float:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else 5.5


def _mean_deviation(values: Array) -> float:
    known = values[np.isfinite(values)]
    return max(0.05, float(np.abs(known - np.median(known)).mean())) if len(known) else 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The hyperparameters of `linear`."""

    epochs: int = 40
    batch: int = 128
    rate: float = 5e-3
    decay: float = 0.1
    drop_words: float = 0.5
    drop: float = 0.2
    members: int = 3  # networks with different seeds that are averaged
    seed: int = 0


def train(
    network: Network,
    prompt_features: Features,
    log_lengths: Array,
    recipe: Recipe,
    after_epoch: Callable[[int, Network], None],
) -> None:
    """Train a network in place; `log_lengths` is prompts x models x responses, NaN if missing.

    Medians minimise an absolute error, weighted by length: it is robust to long tails, and a relative error counts more
    for long responses. Spreads maximise the likelihood of a Laplace distribution of the logarithm.
    """
    rng = np.random.default_rng((recipe.seed, 1))
    rows, counts = network.prepared(prompt_features)
    num = len(counts)
    steps = -(-num // recipe.batch)
    moments = {name: (np.zeros_like(getattr(network, name)), np.zeros_like(getattr(network, name))) for name in TRAINED}
    step = 0
    for epoch in range(recipe.epochs):
        for chosen in np.array_split(rng.permutation(num), steps):
            step += 1
            batch = rows[chosen]
            batch.data = batch.data * (rng.random(len(batch.data)) >= recipe.drop_words) / (1 - recipe.drop_words)
            gradients = _gradients(network, batch.astype(np.float32), counts[chosen], log_lengths[chosen], recipe, rng)
            _step(network, gradients, moments, step, _rate(recipe, step / (steps * recipe.epochs)), recipe.decay)
        after_epoch(epoch + 1, network)


def _rate(recipe: Recipe, done: float) -> float:
    """Return the learning rate: linear warm-up over the first fifth, then a cosine."""
    warm = 0.2
    if done < warm:
        return recipe.rate * done / warm
    return recipe.rate * 0.5 * (1 + float(np.cos(np.pi * (done - warm) / (1 - warm))))


def _gradients(
    network: Network,
    rows: sparse.csr_array,
    counts: Array,
    log_lengths: Array,
    recipe: Recipe,
    rng: np.random.Generator,
) -> dict[str, Array]:
    """Compute the gradients of one batch."""
    keep = 1 - recipe.drop
    raw_factors = rows @ network.words + counts @ network.from_counts + network.factor_bias
    open_factors = ((raw_factors > 0) * (rng.random(raw_factors.shape) < keep) / keep).astype(np.float32)
    factors = raw_factors * open_factors
    raw_hidden = factors @ network.hidden + network.hidden_bias
    open_hidden = ((raw_hidden > 0) * (rng.random(raw_hidden.shape) < keep) / keep).astype(np.float32)
    hidden = raw_hidden * open_hidden
    out = hidden @ network.out + counts @ network.straight + network.out_bias

    num_models = log_lengths.shape[1]
    errors = log_lengths - out[:, :num_models, None]
    known = np.isfinite(errors)
    share = known / np.maximum(1, known.sum())
    errors = np.where(known, errors, 0)
    log_spreads = np.clip(out[:, num_models:, None], *LOG_SPREADS)
    of_medians = -(np.sign(errors) * share).sum(2) * np.exp(
        LENGTH_POWER * (np.clip(out[:, :num_models], *LOG_LENGTHS) - UNIT_LOG)
    )
    of_spreads = ((1 - np.abs(errors) * np.exp(-log_spreads)) * share).sum(2)
    raw = out[:, num_models:]  # no gradient away from the bounds
    out_of_bounds = ((raw >= LOG_SPREADS[1]) & (of_spreads < 0)) | ((raw <= LOG_SPREADS[0]) & (of_spreads > 0))
    of_spreads[out_of_bounds] = 0
    of_out = np.concatenate((of_medians, of_spreads), axis=1).astype(np.float32)

    of_hidden = (of_out @ network.out.T) * open_hidden
    of_factors = (of_hidden @ network.hidden.T) * open_factors
    return {
        "words": rows.T @ of_factors,
        "from_counts": counts.T @ of_factors,
        "factor_bias": of_factors.sum(0),
        "hidden": factors.T @ of_hidden,
        "hidden_bias": of_hidden.sum(0),
        "out": hidden.T @ of_out,
        "straight": counts.T @ of_out,
        "out_bias": of_out.sum(0),
    }


def _step(
    network: Network,
    gradients: dict[str, Array],
    moments: dict[str, tuple[Array, Array]],
    step: int,
    rate: float,
    decay: float,
) -> None:
    """Apply one step of Adam with decoupled weight decay."""
    for name in TRAINED:
        weights, gradient = getattr(network, name), gradients[name]
        first, second = moments[name]
        first *= 0.9
        first += np.float32(0.1) * gradient
        second *= 0.999
        second += np.float32(0.001) * gradient * gradient
        towards = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        if name in DECAYED:
            weights *= np.float32(1 - rate * decay)
        weights -= (rate * towards).astype(np.float32)


def arranged(rows: Sequence[tuple[int, int, Sequence[float]]], num_prompts: int, num_models: int) -> Array:
    """Arrange log lengths as prompts x models x responses, NaN if missing."""
    width = max(len(values) for _, _, values in rows)
    arranged_lengths = np.full((num_prompts, num_models, width), np.nan, np.float32)
    for prompt, model, values in rows:
        arranged_lengths[prompt, model, : len(values)] = values
    return arranged_lengths
