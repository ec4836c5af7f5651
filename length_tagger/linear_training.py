"""How `linear` is trained: from samples to a model, the same from the same samples and seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from length_tagger.features import features
from length_tagger.linear import LinearModel
from length_tagger.network import LOG_SPREADS, Array, Network, Recipe, arranged, averaged, fresh, train
from length_tagger.samples import Sample, split
from length_tagger.scores import P90

MOST_MODELS = 256
LEAST_PROMPTS = 20
MOST_ANSWERS = 10  # of one prompt and model: more would say little more


def fit(
    samples: Sequence[Sample],
    *,
    seed: int = 0,
    recipe: Recipe | None = None,
    card: Mapping[str, Any] | None = None,
    progress: Callable[[int, int, float], None] = lambda *_: None,
) -> LinearModel:
    """Train on the training and validation parts of some samples; the test part is not looked at.

    First on the training part alone, to calibrate spreads on the validation part; then on both. `progress` hears of
    steps done, of how many, and the current mean error of the logarithm on the validation part.
    """
    recipe = replace(recipe or Recipe(), seed=seed)
    parts = split(samples, seed)
    models = tuple(sorted({sample.model for sample in samples}))
    if len(models) > MOST_MODELS:
        raise ValueError(f"model: {len(models)} names are more than {MOST_MODELS}")
    for part in ("train", "validation"):
        num = len({sample.prompt for sample in parts[part]})
        if num < (LEAST_PROMPTS if part == "train" else 1):
            raise ValueError(f"prompt: {num} different ones for {part} are too few to learn from")
    held_prompts, held_lengths = laid_out(parts["validation"], models)
    held_features = features(held_prompts)
    total, done, error = 2 * recipe.members * recipe.epochs, 0, float("nan")

    def trying(_: int, network: Network) -> None:
        nonlocal done, error
        done += 1
        error = float(np.nanmean(np.abs(held_lengths - network.outputs(held_features)[0][:, :, None])))
        progress(done, total, error)

    def again(_: int, __: Network) -> None:
        nonlocal done
        done += 1
        progress(done, total, error)

    trial = _trained(parts["train"], models, recipe, trying)
    medians, spreads = trial.outputs(held_features)
    return LinearModel(
        network=_trained([*parts["train"], *parts["validation"]], models, recipe, again),
        models=models,
        spread_scale=spread_scale(held_lengths, medians, spreads),
        card=card or {},
    )


def spread_scale(log_lengths: Array, medians: Array, spreads: Array) -> float:
    """Find by what to multiply spreads so that nine of ten answers stay below the 90th percentile."""
    ratios = (log_lengths - medians[:, :, None]) / spreads[:, :, None]
    scale = float(np.nanquantile(ratios, 0.9)) / P90
    return min(max(scale, 0.1), float(np.exp(LOG_SPREADS[1])))


def _trained(
    samples: Sequence[Sample], models: tuple[str, ...], recipe: Recipe, after_epoch: Callable[[int, Network], None]
) -> Network:
    prompts, log_lengths = laid_out(samples, models)
    seen = features(prompts)
    networks = []
    for number in range(recipe.members):
        own = replace(recipe, seed=recipe.seed * 1009 + number)
        network = fresh(seen, log_lengths, np.random.default_rng(own.seed))
        train(network, seen, log_lengths, own, after_epoch)
        networks.append(network)
    return averaged(networks)


def laid_out(samples: Sequence[Sample], models: tuple[str, ...]) -> tuple[list[str], Array]:
    """Gather samples by prompt: the prompts, and log lengths as prompts x models x answers."""
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    places = {prompt: place for place, prompt in enumerate(prompts)}
    model_places = {model: place for place, model in enumerate(models)}
    gathered: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        row = gathered.setdefault((places[sample.prompt], model_places[sample.model]), [])
        row.extend(np.log(sample.output_tokens).tolist())
    rows = [(prompt, model, values[:MOST_ANSWERS]) for (prompt, model), values in gathered.items()]
    return prompts, arranged(rows, len(prompts), len(models))
