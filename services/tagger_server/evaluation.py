"""`block tagger evaluate`: loads estimators and data for `length_tagger.evaluation`, and writes files of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from length_tagger.estimate import BatchTagger, Estimate, LengthOutcome
from length_tagger.evaluation import ALL, Predictions, Progress, predictions_on, score_rows
from length_tagger.linear import SHIPPED, LinearTagger, load
from length_tagger.samples import Sample, part_of
from services.tagger_server.batches import SMALL, Batched, encoder_from
from simulator.progress import followed

MAX_ERRORS = 1000  # rows per kind; simulations need no more


def batched_from(linear_model: str | None, encoder: str | None) -> Batched:
    """Load an encoder, or else `linear`."""
    if encoder is None:
        return LinearTagger(load(linear_model or SHIPPED))
    return encoder_from(encoder)


def can_run_encoders() -> bool:
    """Whether the packages of the shipped encoder are installed."""
    return find_spec("tokenizers") is not None and any(find_spec(one) is not None for one in ("onnxruntime", "torch"))


def evaluated(  # noqa: PLR0913 - the command's options
    samples: Sequence[Sample],
    *,
    linear_model: str | None = None,
    encoder: str | None = None,
    seed: int | None = None,
    held_out: bool = True,
    errors: str = "",
    progress: Progress = lambda items, _: items,
) -> list[dict[str, Any]]:
    """Score every estimator on the test part of the samples, or on all of them."""
    linear = LinearTagger(load(linear_model or SHIPPED))
    taggers: dict[str, BatchTagger] = {"linear": linear}
    if encoder is not None or can_run_encoders():
        taggers["roberta"] = batched_from(None, encoder or SMALL)
    if seed is None:
        seed = int(linear.model.card.get("seed", 0))
    tests = [sample for sample in samples if not held_out or part_of(sample.prompt, seed) == "test"]
    others = [sample for sample in samples if part_of(sample.prompt, seed) != "test"] or list(tests)
    if not tests:
        raise ValueError("no prompt is held out: use --part all, or more data")
    Random(seed).shuffle(others)  # noqa: S311 - an order, not a secret
    predictions = predictions_on(tests, others, taggers, progress)
    if errors:
        write_errors(predictions, Path(errors), seed)
    return [row for name, one in predictions.items() for row in score_rows(name, one)]


def write_errors(predictions: Mapping[str, Predictions], folder: Path, seed: int) -> None:
    """Write real and predicted lengths of each estimator, one file per kind of prompts, one row per response.

    Simulations draw tags from these files: `tags = { kind = "ranked", file = ... }`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, one in predictions.items():
            for kind in dict.fromkeys(one.kinds):
                indices = [index for index, other in enumerate(one.kinds) if other == kind]
                Random(seed).shuffle(indices)  # noqa: S311 - a sample, not a secret
                rows = (
                    f"{one.lengths[index]:.0f},{one.medians[index]:.4g},{one.spreads[index]:.3g}\n"
                    for index in indices[:MAX_ERRORS]
                )
                file = folder / f"{name}-{kind or ALL}.csv"
                file.write_text("output_tokens,median_tokens,spread\n" + "".join(rows), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"errors: {folder} cannot be written: {error.strerror}") from None


def outcomes_from(path: str) -> list[tuple[int, Estimate]] | None:
    """Read recorded outcomes, as lengths with estimates; None if the file has samples, which have prompts."""
    if not path.endswith(".jsonl"):
        return None
    outcomes: list[tuple[int, Estimate]] = []
    try:
        with Path(path).open(encoding="utf-8") as lines:
            num_bytes = Path(path).stat().st_size
            for number, line in enumerate(followed(lines, "reading outcomes", num_bytes, size=len), 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict) or "tag" not in row:
                    if outcomes:
                        raise ValueError(f"{path}:{number}: tag: is missing")
                    return None
                outcomes.append(_outcome(row, f"{path}:{number}"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        if outcomes:
            raise ValueError(f"{path}:{len(outcomes) + 1}: is not JSON") from None
        return None
    return outcomes or None


def _outcome(row: dict[str, Any], where: str) -> tuple[int, Estimate]:
    """Convert a recorded outcome."""
    try:
        LengthOutcome(output_tokens=row["output_tokens"])
        tag = row["tag"]
        estimate = Estimate(
            median_tokens=float(tag["median_tokens"]), spread=float(tag["spread"]), confidence=0.0,
            estimator=str(tag["estimator"]),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where}: is not a recorded outcome: {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return row["output_tokens"], estimate
