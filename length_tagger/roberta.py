"""`roberta`: lengths from a fine-tuned encoder of the RoBERTa family (Block §5).

It runs by ONNX Runtime (the extra `encoder`) if that is installed and the checkpoint has an ONNX model, else by torch
(the extra `tagger`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from length_tagger import onnx_form
from length_tagger.estimate import MAX_SPREAD, Estimate, LengthOutcome, Query, chance_within_factor_two
from length_tagger.features import NUM_COUNTS, features
from length_tagger.linear import LinearTagger
from length_tagger.linear import load as load_linear
from length_tagger.onnx_form import AUTO, ONNX, RUNTIMES, TORCH, Array, Run
from length_tagger.served_models import model_indices
from length_tagger.tokenization import encoded, groups_of_similar_length, padded

NAME = "roberta"
SHIPPED = Path(__file__).parent / "models" / "encoder"
FORMAT = "block-roberta-1"
MAX_LOG = math.log(1_000_000)
WEIGHTS, ABOUT, CONFIG, TOKENS = "model.safetensors", "block.json", "config.json", "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A trained network with its tokenizer and settings, from a folder of safetensors, ONNX and JSON files.

    `beside_linear` is the weight of the shipped `linear` in the estimates: a small encoder and `linear` have different
    errors, so their mean is more accurate than either.
    """

    run: Run
    runtime: str
    tokenizer: Tokenizer
    models: tuple[str, ...]
    most_tokens: int
    padding: int
    spread_scale: float
    beside_linear: float
    card: Mapping[str, Any]
    config: Mapping[str, Any]

    def outputs(self, prompts: Sequence[str], counts: Array) -> tuple[Array, Array]:
        """Return log medians and spreads: prompts x models."""
        ids = encoded(self.tokenizer, prompts, self.most_tokens)
        medians, log_spreads = np.zeros((2, len(ids), len(self.models)), np.float32)
        for indices in groups_of_similar_length(ids):
            batch = padded([ids[index] for index in indices], self.padding)
            medians[indices], log_spreads[indices] = self.run(*batch, counts[indices])
        return medians, np.exp(log_spreads) * np.float32(self.spread_scale)


class RobertaTagger:
    """Estimates every request that has a prompt, preferably several at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Use a loaded checkpoint."""
        self.checkpoint = checkpoint
        self._linear = LinearTagger(load_linear()) if checkpoint.beside_linear else None

    @classmethod
    def load(cls, folder: str | Path, *, runtime: str = AUTO, threads: int = 1) -> RobertaTagger:
        """Load a checkpoint from a folder."""
        return cls(load(folder, runtime=runtime, threads=threads))

    def estimate(self, query: Query) -> Estimate | None:
        """Estimate one request."""
        return self.estimate_many((query,))[0]

    def estimate_many(self, queries: Sequence[Query]) -> list[Estimate | None]:
        """Estimate several requests at once."""
        with_prompt = [query for query in queries if query.prompt]
        if not with_prompt:
            return [None] * len(queries)
        prompts, models = [query.prompt for query in with_prompt], [query.model for query in with_prompt]
        prompt_features = features(prompts)
        medians, spreads = self.checkpoint.outputs(prompts, prompt_features.counts)
        estimates = []
        for row, model in enumerate(models):
            indices = model_indices(model, self.checkpoint.models)
            estimates.append(_estimate(medians[row, indices], spreads[row, indices]))
        if self._linear is not None:
            share, others = self.checkpoint.beside_linear, self._linear.of_features(prompt_features, models)
            estimates = [_weighted_mean(one, other, share) for one, other in zip(estimates, others, strict=True)]
        remaining = iter(estimates)
        return [next(remaining) if query.prompt else None for query in queries]

    def observe(self, outcome: LengthOutcome) -> None:
        """Ignore outcomes: `length_tagger.selection` corrects the bias of each model."""


def _estimate(medians: Array, spreads: Array) -> Estimate:
    log = float(medians.mean())
    spread = math.sqrt(float(medians.var()) + float((spreads**2).mean()))
    spread = min(MAX_SPREAD, max(0.01, spread))
    return Estimate(
        median_tokens=max(1.0, math.exp(min(MAX_LOG, log))),
        spread=spread,
        confidence=chance_within_factor_two(spread),
        estimator=NAME,
    )


def _share(value: Any) -> float:
    share = float(value)
    if not 0 <= share <= 1:
        raise ValueError(f"beside_linear: must lie between 0 and 1, not {value}")
    return share


def _weighted_mean(one: Estimate, other: Estimate, share: float) -> Estimate:
    """Return the weighted geometric mean of two estimates."""
    spread = one.spread ** (1 - share) * other.spread**share
    return Estimate(
        median_tokens=one.median_tokens ** (1 - share) * other.median_tokens**share,
        spread=spread,
        confidence=chance_within_factor_two(spread),
        estimator=NAME,
    )


def load(folder: str | Path, *, runtime: str = AUTO, threads: int = 1) -> Checkpoint:
    """Read a checkpoint; an invalid one is rejected, and none of its code is run."""
    folder = Path(folder)
    chosen = runtime_for(folder, runtime)
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if about.get("format") != FORMAT:
            raise ValueError(f"format is {about.get('format')!r}, not {FORMAT!r}")
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        models = tuple(str(name) for name in about["models"])
        checkpoint = Checkpoint(
            run=_run(folder, chosen, config, len(models), threads),
            runtime=chosen,
            tokenizer=_tokenizer(folder),
            models=models,
            most_tokens=int(about["most_tokens"]),
            padding=int(about["padding"]),
            spread_scale=float(about["spread_scale"]),
            beside_linear=_share(about["beside_linear"]),
            card=dict(about["card"]),
            config=config,
        )
        _require_valid_outputs(checkpoint)
    except OSError as error:
        raise ValueError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{folder}: is not a checkpoint of `roberta`: {error}") from None
    return checkpoint


def runtime_for(folder: Path, wanted: str = AUTO) -> str:
    """Return the runtime of a checkpoint: ONNX Runtime if possible, else torch; reject one that is not installed."""
    if wanted not in RUNTIMES:
        raise ValueError(f"runtime: must be one of {', '.join(RUNTIMES)}, not {wanted!r}")
    has_onnx = (folder / onnx_form.FILE).exists()
    if find_spec("onnxruntime") is not None and (wanted == ONNX or (wanted == AUTO and has_onnx)):
        return ONNX
    if wanted != ONNX and find_spec("torch") is not None and find_spec("transformers") is not None:
        return TORCH
    extra = "encoder" if wanted == ONNX or (has_onnx and wanted == AUTO) else "tagger"
    raise ValueError(f"roberta: the runtime of {folder} is not installed: pip install 'block-serving[{extra}]'")


def _run(folder: Path, runtime: str, config: Mapping[str, Any], num_models: int, threads: int) -> Run:
    if runtime == ONNX:
        return onnx_form.run_from(folder / onnx_form.FILE, threads)
    import torch

    from length_tagger.encoder import network_from, run_of

    torch.set_num_threads(threads)
    return run_of(network_from(config, num_models, folder / WEIGHTS))


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / TOKENS))
    except Exception as error:  # noqa: BLE001 - its errors are plain Exceptions
        raise ValueError(f"{TOKENS}: {error}") from None


def _require_valid_outputs(checkpoint: Checkpoint) -> None:
    """Reject a network without a finite median and spread for each model, or with too small a vocabulary."""
    last = np.array([[max(0, checkpoint.tokenizer.get_vocab_size() - 1)]])
    for out in checkpoint.run(last, np.ones_like(last), np.zeros((1, NUM_COUNTS), np.float32)):
        if out.shape != (1, len(checkpoint.models)) or not np.isfinite(out).all():
            raise ValueError(
                f"its network returns {out.shape}, or values that are not finite, for {len(checkpoint.models)} models"
            )
