"""`linear`: lengths from the words of the prompt.

Hashed words and pairs of words are added up linearly, each with a learned weight in every one of some directions; one
small hidden layer makes a median and a spread of them for each served model. Only numpy and scipy are needed.
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

from length_tagger.estimate import MOST_SPREAD, Estimate, LengthOutcome, Query, chance_within_factor_two
from length_tagger.features import NUM_BUCKETS, NUM_COUNTS, Features, features
from length_tagger.network import Network
from length_tagger.served import places_of

NAME = "linear"
SHIPPED = Path(__file__).parent / "models" / "linear.npz"
FORMAT = "block-linear-1"
LONGEST_LOG = math.log(1_000_000)  # no answer of such a length was ever learned from
MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModel:
    """What `linear` has learned: weights, the names of the models it learned from, and where all that comes from."""

    network: Network
    models: tuple[str, ...]
    spread_scale: float  # that makes nine of ten held-out answers stay below the 90th percentile
    card: Mapping[str, Any]

    def predict(self, prompts: Sequence[str], models: Sequence[str]) -> tuple[list[float], list[float]]:
        """Give medians in tokens and spreads; a model never heard of is answered for by all that were."""
        return self.of_features(features(prompts), models)

    def of_features(self, seen: Features, models: Sequence[str]) -> tuple[list[float], list[float]]:
        """Give them for prompts that are turned into numbers already."""
        medians, spreads = self.network.outputs(seen)
        spreads = spreads * self.spread_scale
        out: tuple[list[float], list[float]] = [], []
        for row, places in enumerate(places_of(name, self.models) for name in models):
            if len(places) == 1:
                log, varied = float(medians[row, places[0]]), float(spreads[row, places[0]]) ** 2
            else:
                log = float(medians[row, places].mean())
                varied = float(medians[row, places].var()) + float((spreads[row, places] ** 2).mean())
            out[0].append(max(1.0, math.exp(min(LONGEST_LOG, log))))
            out[1].append(min(MOST_SPREAD, max(0.01, math.sqrt(varied))))
        return out


class LinearTagger:
    """Answers about anything that has a prompt."""

    def __init__(self, model: LinearModel) -> None:
        """Take a model that is loaded already."""
        self.model = model

    def estimate(self, query: Query) -> Estimate | None:
        """Read the prompt."""
        return self.estimate_many((query,))[0]

    def estimate_many(self, queries: Sequence[Query]) -> list[Estimate | None]:
        """Read several prompts at once, which costs less than one by one."""
        asked = [query for query in queries if query.prompt]
        if not asked:
            return [None] * len(queries)
        made = iter(self.of_features(features([query.prompt for query in asked]), [query.model for query in asked]))
        return [next(made) if query.prompt else None for query in queries]

    def of_features(self, seen: Features, models: Sequence[str]) -> list[Estimate]:
        """Estimate for prompts that are turned into numbers already, none of them empty."""
        medians, spreads = self.model.of_features(seen, models)
        return [
            Estimate(median_tokens=median, spread=spread, confidence=chance_within_factor_two(spread), estimator=NAME)
            for median, spread in zip(medians, spreads, strict=True)
        ]

    def observe(self, outcome: LengthOutcome) -> None:
        """Learn nothing: what outcomes teach about a model is kept apart, in `length_tagger.contest`."""


def save(model: LinearModel, path: str | Path) -> None:
    """Write a model as numpy arrays and JSON: nothing in the file can run."""
    kept = {spec.name: getattr(model.network, spec.name).astype(np.float32) for spec in fields(Network)}
    scale = np.maximum(np.abs(kept["words"]).max(axis=1, keepdims=True), 1e-9) / 127  # the bulk of it, in a byte each
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
    """Read a model; a file that is none is refused, whatever it holds."""
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise ValueError(f"is larger than {MOST_BYTES} bytes")
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
        raise ValueError(f"{path}: is no model of `linear`: {error}") from None
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
