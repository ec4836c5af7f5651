"""`roberta`: lengths from a fine-tuned encoder of the RoBERTa family (Block §5). Needs the extra `tagger`: torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from length_tagger.encoder import LengthNetwork, batch_of, counts_of, encoded, encoder_from
from length_tagger.estimate import MOST_SPREAD, Estimate, Outcome, Query, chance_within_factor_two
from length_tagger.linear import LinearTagger
from length_tagger.linear import load as load_linear
from length_tagger.served import places_of

NAME = "roberta"
SHIPPED = Path(__file__).parent / "models" / "encoder"
FORMAT = "block-roberta-1"
LONGEST_LOG = math.log(1_000_000)
WEIGHTS, ABOUT, CONFIG, TOKENS = "model.safetensors", "block.json", "config.json", "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A trained network and what it needs beside its weights; a folder of safetensors and JSON.

    `beside_linear` is the share that the package's `linear` has in its estimates: a small encoder of one's own and
    `linear` err differently, and their mean errs less than either.
    """

    network: LengthNetwork
    tokenizer: Tokenizer
    models: tuple[str, ...]
    most_tokens: int
    padding: int
    spread_scale: float
    beside_linear: float
    card: Mapping[str, Any]
    config: Mapping[str, Any]

    def outputs(self, prompts: Sequence[str]) -> tuple[Any, Any]:
        """Give log medians and log spreads as arrays: prompts x models."""
        ids = encoded(self.tokenizer, prompts, self.most_tokens)
        with torch.inference_mode():
            medians, spreads = self.network(*batch_of(ids, self.padding), torch.from_numpy(counts_of(prompts)))
        return medians.numpy(), spreads.exp().numpy() * self.spread_scale


class RobertaTagger:
    """Answers about anything that has a prompt, best about several at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint that is loaded already."""
        self.checkpoint = checkpoint
        self._linear = LinearTagger(load_linear()) if checkpoint.beside_linear else None
        checkpoint.network.eval()

    @classmethod
    def load(cls, folder: str | Path) -> RobertaTagger:
        """Load a checkpoint's folder."""
        return cls(load(folder))

    def estimate(self, query: Query) -> Estimate | None:
        """Read one prompt."""
        return self.estimate_many((query,))[0]

    def estimate_many(self, queries: Sequence[Query]) -> list[Estimate | None]:
        """Read several prompts at once."""
        asked = [query for query in queries if query.prompt]
        if not asked:
            return [None] * len(queries)
        medians, spreads = self.checkpoint.outputs([query.prompt for query in asked])
        made = iter(
            [
                _estimate(medians[row, places], spreads[row, places])
                for row, places in enumerate(places_of(query.model, self.checkpoint.models) for query in asked)
            ]
        )
        own = [next(made) if query.prompt else None for query in queries]
        if self._linear is None:
            return own
        beside = self._linear.estimate_many(queries)
        return [_mean(one, other, self.checkpoint.beside_linear) for one, other in zip(own, beside, strict=True)]

    def observe(self, outcome: Outcome) -> None:
        """Learn nothing: what outcomes teach about a model is kept apart, in `length_tagger.contest`."""


def _estimate(medians: Any, spreads: Any) -> Estimate:
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


def _mean(one: Estimate | None, other: Estimate | None, share: float) -> Estimate | None:
    """Give the weighted geometric mean of two estimates."""
    if one is None or other is None:
        return one
    spread = one.spread ** (1 - share) * other.spread**share
    return Estimate(
        median_tokens=one.median_tokens ** (1 - share) * other.median_tokens**share,
        spread=spread,
        confidence=chance_within_factor_two(spread),
        estimator=NAME,
    )


def save(checkpoint: Checkpoint, folder: str | Path) -> None:
    """Write a checkpoint: weights in half precision, the last file being the one by which it counts as whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.half().contiguous().cpu() for name, tensor in checkpoint.network.state_dict().items()}
    _whole(folder / WEIGHTS, lambda path: save_file(weights, path))
    _whole(folder / TOKENS, lambda path: checkpoint.tokenizer.save(str(path)))
    _whole(folder / CONFIG, lambda path: path.write_text(json.dumps(dict(checkpoint.config), indent=1) + "\n"))
    about = {
        "format": FORMAT,
        "models": list(checkpoint.models),
        "most_tokens": checkpoint.most_tokens,
        "padding": checkpoint.padding,
        "spread_scale": checkpoint.spread_scale,
        "beside_linear": checkpoint.beside_linear,
        "card": dict(checkpoint.card),
    }
    _whole(folder / ABOUT, lambda path: path.write_text(json.dumps(about, indent=1) + "\n"))


def _whole(path: Path, write: Any) -> None:
    """Let a file appear only when it is complete."""
    new = path.with_suffix(".new")
    write(new)
    new.replace(path)


def load(folder: str | Path) -> Checkpoint:
    """Read a checkpoint; what is none is refused, and no code in it is run."""
    folder = Path(folder)
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if about.get("format") != FORMAT:
            raise ValueError(f"format is {about.get('format')!r}, not {FORMAT!r}")
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        models = tuple(str(name) for name in about["models"])
        network = LengthNetwork(encoder_from(config), int(config["hidden_size"]), len(models))
        weights = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
        if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
            raise ValueError("weights are not finite")
        network.load_state_dict(weights)
        return Checkpoint(
            network=network,
            tokenizer=Tokenizer.from_file(str(folder / TOKENS)),
            models=models,
            most_tokens=int(about["most_tokens"]),
            padding=int(about["padding"]),
            spread_scale=float(about["spread_scale"]),
            beside_linear=_share(about["beside_linear"]),
            card=dict(about["card"]),
            config=config,
        )
    except OSError as error:
        raise ValueError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{folder}: is no checkpoint of `roberta`: {error}") from None
