"""The training of `linear`: the same samples and seed give the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from length_tagger.features import features
from length_tagger.linear import LinearModel
from length_tagger.linear_network import LOG_SPREADS, Array, Network, Recipe, arranged, averaged, train, untrained
from length_tagger.samples import Sample, split
from length_tagger.scores import P90

MAX_MODELS = 256
MIN_PROMPTS = 20
MAX_LENGTHS = 10  # of one prompt and model


def fit(
    samples: Sequence[Sample],
    *,
    seed: int = 0,
    recipe: Recipe | None = None,
    card: Mapping[str, Any] | None = None,
    progress: Callable[[int, int, float], None] = lambda *_: None,
) -> LinearModel:
    """Train on the training and validation parts of samples, without the test part.

    The first training uses the training part only, to calibrate spreads on the validation part; the second uses both.
    `progress` is called with the steps done, their total, and the mean error of the logarithm on the validation part.
    """
    recipe = replace(recipe or Recipe(), seed=seed)
    parts = split(samples, seed)
    models = tuple(sorted({sample.model for sample in samples}))
    if len(models) > MAX_MODELS:
        raise ValueError(f"model: {len(models)} names are more than {MAX_MODELS}")
    for part in ("train", "validation"):
        num = len({sample.prompt for sample in parts[part]})
        if num < (MIN_PROMPTS if part == "train" else 1):
            raise ValueError(f"prompt: {num} different ones are too few for {part}")
    validation_prompts, validation_lengths = arrange_samples(parts["validation"], models)
    validation_features = features(validation_prompts)
    total, done, error = 2 * recipe.members * recipe.epochs, 0, float("nan")

    def on_trial(_: int, network: Network) -> None:
        nonlocal done, error
        done += 1
        error = float(np.nanmean(np.abs(validation_lengths - network.outputs(validation_features)[0][:, :, None])))
        progress(done, total, error)

    def on_final(_: int, __: Network) -> None:
        nonlocal done
        done += 1
        progress(done, total, error)

    trial = _trained(parts["train"], models, recipe, on_trial)
    medians, spreads = trial.outputs(validation_features)
    return LinearModel(
        network=_trained([*parts["train"], *parts["validation"]], models, recipe, on_final),
        models=models,
        spread_scale=spread_scale(validation_lengths, medians, spreads),
        card=card or {},
    )


def spread_scale(log_lengths: Array, medians: Array, spreads: Array) -> float:
    """Return the factor of spreads with which 90 % of the responses are below the 90th percentile."""
    ratios = (log_lengths - medians[:, :, None]) / spreads[:, :, None]
    scale = float(np.nanquantile(ratios, 0.9)) / P90
    return min(max(scale, 0.1), float(np.exp(LOG_SPREADS[1])))


def _trained(
    samples: Sequence[Sample], models: tuple[str, ...], recipe: Recipe, after_epoch: Callable[[int, Network], None]
) -> Network:
    prompts, log_lengths = arrange_samples(samples, models)
    prompt_features = features(prompts)
    networks = []
    for number in range(recipe.members):
        own = replace(recipe, seed=recipe.seed * 1009 + number)
        network = untrained(prompt_features, log_lengths, np.random.default_rng(own.seed))
        train(network, prompt_features, log_lengths, own, after_epoch)
        networks.append(network)
    return averaged(networks)


def arrange_samples(samples: Sequence[Sample], models: tuple[str, ...]) -> tuple[list[str], Array]:
    """Group samples by prompt: the prompts, and log lengths as prompts x models x responses."""
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    prompt_indices = {prompt: index for index, prompt in enumerate(prompts)}
    model_indices = {model: index for index, model in enumerate(models)}
    grouped: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        row = grouped.setdefault((prompt_indices[sample.prompt], model_indices[sample.model]), [])
        row.extend(np.log(sample.output_tokens).tolist())
    rows = [(prompt, model, values[:MAX_LENGTHS]) for (prompt, model), values in grouped.items()]
    return prompts, arranged(rows, len(prompts), len(models))
