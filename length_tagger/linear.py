"""`linear`: lengths from the words of the prompt.

A linear layer over hashed words and pairs of words, and one small hidden layer, give a median and a spread for each
served model. It needs only numpy and scipy.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from length_tagger.estimate import MAX_SPREAD, Estimate, LengthOutcome, Query, chance_within_factor_two
from length_tagger.features import NUM_BUCKETS, NUM_COUNTS, Features, features
from length_tagger.linear_network import Network
from length_tagger.served_models import model_indices

NAME = "linear"
SHIPPED = Path(__file__).parent / "models" / "linear.npz"
FORMAT = "block-linear-1"
MAX_LOG = math.log(1_000_000)  # longer than any response in the training data
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModel:
    """A trained model: weights, the names of the served models in the training data, and its card."""

    network: Network
    models: tuple[str, ...]
    spread_scale: float  # calibrated so that 90 % of held-out responses are below the 90th percentile
    card: Mapping[str, Any]

    def predict(self, prompts: Sequence[str], models: Sequence[str]) -> tuple[list[float], list[float]]:
        """Return medians in tokens and spreads; an unknown model gets the mean of all known ones."""
        return self.of_features(features(prompts), models)

    def of_features(self, prompt_features: Features, models: Sequence[str]) -> tuple[list[float], list[float]]:
        """Return them for the features of prompts."""
        medians, spreads = self.network.outputs(prompt_features)
        spreads = spreads * self.spread_scale
        out: tuple[list[float], list[float]] = [], []
        for row, indices in enumerate(model_indices(name, self.models) for name in models):
            if len(indices) == 1:
                log, variance = float(medians[row, indices[0]]), float(spreads[row, indices[0]]) ** 2
            else:
                log = float(medians[row, indices].mean())
                variance = float(medians[row, indices].var()) + float((spreads[row, indices] ** 2).mean())
            out[0].append(max(1.0, math.exp(min(MAX_LOG, log))))
            out[1].append(min(MAX_SPREAD, max(0.01, math.sqrt(variance))))
        return out


class LinearTagger:
    """Estimates every request that has a prompt."""

    def __init__(self, model: LinearModel) -> None:
        """Use a loaded model."""
        self.model = model

    def estimate(self, query: Query) -> Estimate | None:
        """Estimate one request."""
        return self.estimate_many((query,))[0]

    def estimate_many(self, queries: Sequence[Query]) -> list[Estimate | None]:
        """Estimate several requests at once, which costs less than one by one."""
        with_prompt = [query for query in queries if query.prompt]
        if not with_prompt:
            return [None] * len(queries)
        prompt_features = features([query.prompt for query in with_prompt])
        estimates = iter(self.of_features(prompt_features, [query.model for query in with_prompt]))
        return [next(estimates) if query.prompt else None for query in queries]

    def of_features(self, prompt_features: Features, models: Sequence[str]) -> list[Estimate]:
        """Return estimates for the features of prompts."""
        medians, spreads = self.model.of_features(prompt_features, models)
        return [
            Estimate(median_tokens=median, spread=spread, confidence=chance_within_factor_two(spread), estimator=NAME)
            for median, spread in zip(medians, spreads, strict=True)
        ]

    def observe(self, outcome: LengthOutcome) -> None:
        """Ignore outcomes: `length_tagger.selection` corrects the bias of each model."""


def save(model: LinearModel, path: str | Path) -> None:
    """Write a model as numpy arrays and JSON, which cannot contain code."""
    kept = {spec.name: getattr(model.network, spec.name).astype(np.float32) for spec in fields(Network)}
    scale = np.maximum(np.abs(kept["words"]).max(axis=1, keepdims=True), 1e-9) / 127  # a byte per weight
    kept |= {"words": np.rint(kept["words"] / scale).astype(np.int8), "words_scale": scale.astype(np.float32)}
    about = {
        "format": FORMAT,
        "models": list(model.models),
        "spread_scale": model.spread_scale,
        "card": dict(model.card),
    }
    content = io.BytesIO()
    np.savez_compressed(content, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **kept)
    whole = Path(path).with_suffix(".new")
    whole.write_bytes(content.getvalue())
    whole.replace(path)


def load(path: str | Path = SHIPPED) -> LinearModel:
    """Read a model; an invalid file is rejected."""
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise ValueError(f"is larger than {MAX_BYTES} bytes")
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            about = json.loads(bytes(arrays["about"]).decode())
            if about.get("format") != FORMAT:
                raise ValueError(f"format is {about.get('format')!r}, not {FORMAT!r}")
            weights = {spec.name: arrays[spec.name].astype(np.float32) for spec in fields(Network)}
            weights["words"] *= arrays["words_scale"].astype(np.float32)
            network = Network(**weights)
        model = LinearModel(
            network=network,
            models=tuple(str(name) for name in about["models"]),
            spread_scale=float(about["spread_scale"]),
            card=dict(about["card"]),
        )
        _require_shapes(network, len(model.models))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: is not a model of `linear`: {error}") from None
    return model


def _require_shapes(network: Network, num_models: int) -> None:
    num_factors, num_hidden = network.hidden.shape
    shapes = {
        "rarity": (NUM_BUCKETS,),
        "count_means": (NUM_COUNTS,),
        "count_scales": (NUM_COUNTS,),
        "words": (NUM_BUCKETS, num_factors),
        "from_counts": (NUM_COUNTS, num_factors),
        "factor_bias": (num_factors,),
        "hidden": (num_factors, num_hidden),
        "hidden_bias": (num_hidden,),
        "out": (num_hidden, 2 * num_models),
        "straight": (NUM_COUNTS, 2 * num_models),
        "out_bias": (2 * num_models,),
    }
    for name, shape in shapes.items():
        weights = getattr(network, name)
        if weights.shape != shape or num_models == 0:
            raise ValueError(f"{name} is {weights.shape}, not {shape}")
        if not np.isfinite(weights).all():
            raise ValueError(f"{name} is not finite")
    if not (network.count_scales > 0).all():
        raise ValueError("count_scales are not above 0")
