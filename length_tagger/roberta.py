"""`roberta`: lengths from a fine-tuned encoder of the RoBERTa family (Block §5).

Read by ONNX Runtime where that is installed and the checkpoint has the form for it (the extra `encoder`), else by torch
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
from length_tagger.estimate import MOST_SPREAD, Estimate, LengthOutcome, Query, chance_within_factor_two
from length_tagger.features import NUM_COUNTS, features
from length_tagger.linear import LinearTagger
from length_tagger.linear import load as load_linear
from length_tagger.onnx_form import AUTO, ONNX, RUNTIMES, TORCH, Array, Run
from length_tagger.reading import alike, encoded, laid_out
from length_tagger.served import places_of

NAME = "roberta"
SHIPPED = Path(__file__).parent / "models" / "encoder"
FORMAT = "block-roberta-1"
LONGEST_LOG = math.log(1_000_000)
WEIGHTS, ABOUT, CONFIG, TOKENS = "model.safetensors", "block.json", "config.json", "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What reads batches by a trained network, and what it needs beside; a folder of safetensors, ONNX and JSON.

    `beside_linear` is the share that the package's `linear` has in its estimates: a small encoder of one's own and
    `linear` err differently, and their mean errs less than either.
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
        """Give log medians and spreads: prompts x models."""
        ids = encoded(self.tokenizer, prompts, self.most_tokens)
        medians, log_spreads = np.zeros((2, len(ids), len(self.models)), np.float32)
        for places in alike(ids):
            laid = laid_out([ids[place] for place in places], self.padding)
            medians[places], log_spreads[places] = self.run(*laid, counts[places])
        return medians, np.exp(log_spreads) * np.float32(self.spread_scale)


class RobertaTagger:
    """Answers about anything that has a prompt, best about several at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint that is loaded already."""
        self.checkpoint = checkpoint
        self._linear = LinearTagger(load_linear()) if checkpoint.beside_linear else None

    @classmethod
    def load(cls, folder: str | Path, *, runtime: str = AUTO, threads: int = 1) -> RobertaTagger:
        """Load a checkpoint's folder."""
        return cls(load(folder, runtime=runtime, threads=threads))

    def estimate(self, query: Query) -> Estimate | None:
        """Read one prompt."""
        return self.estimate_many((query,))[0]

    def estimate_many(self, queries: Sequence[Query]) -> list[Estimate | None]:
        """Read several prompts at once."""
        asked = [query for query in queries if query.prompt]
        if not asked:
            return [None] * len(queries)
        seen = features([query.prompt for query in asked])
        medians, spreads = self.checkpoint.outputs([query.prompt for query in asked], seen.counts)
        made = iter(
            [
                _estimate(medians[row, places], spreads[row, places])
                for row, places in enumerate(places_of(query.model, self.checkpoint.models) for query in asked)
            ]
        )
        if self._linear is not None:
            share, other = self.checkpoint.beside_linear, self._linear.of_features(seen, [one.model for one in asked])
            made = iter([_mean(one, beside, share) for one, beside in zip(made, other, strict=True)])
        return [next(made) if query.prompt else None for query in queries]

    def observe(self, outcome: LengthOutcome) -> None:
        """Learn nothing: what outcomes teach about a model is kept apart, in `length_tagger.contest`."""


def _estimate(medians: Array, spreads: Array) -> Estimate:
    log = float(medians.mean())
    spread = math.sqrt(float(medians.var()) + float((spreads**2).mean()))
    spread = min(MOST_SPREAD, max(0.01, spread))
    return Estimate(
        median_tokens=max(1.0, math.exp(min(LONGEST_LOG, log))),
        spread=spread,
        confidence=chance_within_factor_two(spread),
        estimator=NAME,
    )


def _share(value: Any) -> float:
    share = float(value)
    if not 0 <= share <= 1:
        raise ValueError(f"beside_linear: must lie between 0 and 1, not {value}")
    return share


def _mean(one: Estimate, other: Estimate, share: float) -> Estimate:
    """Give the weighted geometric mean of two estimates."""
    spread = one.spread ** (1 - share) * other.spread**share
    return Estimate(
        median_tokens=one.median_tokens ** (1 - share) * other.median_tokens**share,
        spread=spread,
        confidence=chance_within_factor_two(spread),
        estimator=NAME,
    )


def load(folder: str | Path, *, runtime: str = AUTO, threads: int = 1) -> Checkpoint:
    """Read a checkpoint; what is none is refused, and no code in it is run."""
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
        _require_sense(checkpoint)
    except OSError as error:
        raise ValueError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{folder}: is no checkpoint of `roberta`: {error}") from None
    return checkpoint


def runtime_for(folder: Path, wanted: str = AUTO) -> str:
    """Choose by what to read a checkpoint: ONNX Runtime where it can be, else torch; refuse what is not installed."""
    if wanted not in RUNTIMES:
        raise ValueError(f"runtime: {wanted!r} is none of {', '.join(RUNTIMES)}")
    has_form = (folder / onnx_form.FILE).exists()
    if find_spec("onnxruntime") is not None and (wanted == ONNX or (wanted == AUTO and has_form)):
        return ONNX
    if wanted != ONNX and find_spec("torch") is not None and find_spec("transformers") is not None:
        return TORCH
    extra = "encoder" if wanted == ONNX or (has_form and wanted == AUTO) else "tagger"
    raise ValueError(f"roberta: what reads {folder} is not installed: pip install 'block-serving[{extra}]'")


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


def _require_sense(checkpoint: Checkpoint) -> None:
    """Refuse a network that does not give a finite median and spread for each model, or none for a word's number."""
    last = np.array([[max(0, checkpoint.tokenizer.get_vocab_size() - 1)]])
    for out in checkpoint.run(last, np.ones_like(last), np.zeros((1, NUM_COUNTS), np.float32)):
        if out.shape != (1, len(checkpoint.models)) or not np.isfinite(out).all():
            raise ValueError(
                f"its network gives {out.shape}, or what is not finite, for {len(checkpoint.models)} models"
            )
