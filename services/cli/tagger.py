"""`block tagger`: trains, evaluates and queries estimators of response lengths."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.progress_bars import are_shown
from simulator.codec import read_text
from simulator.progress import followed
from simulator.reference_data import data_folder

if TYPE_CHECKING:
    from length_tagger.samples import Sample

CASTILLO = "castillo"
DATA_HELP = (
    "DATA is JSON lines, CSV (either may end in .gz) or Parquet with prompt, output_tokens (one or several), and "
    "optionally model and kind. Without it, the CASTILLO data in BLOCK_DATA is used."
)


@click.group()
def tagger() -> None:
    """Train, evaluate and query estimators of response lengths."""


@tagger.group()
def train() -> None:
    """Train an estimator on prompts and the lengths of their responses."""


@train.command(epilog=DATA_HELP)
@click.argument("data", required=False, default=CASTILLO)
@click.option("--output", "-o", metavar="FILE", required=True, help="File of the model (.npz).")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Seed of the training.")
@click.option("--epochs", type=click.IntRange(1, 10_000), default=None, help="Number of passes over the data.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def linear(data: str, output: str, seed: int, epochs: int | None, *, as_json: bool) -> None:
    """Train `linear` on DATA: a tenth of the prompts is for calibration, a fifth is held out."""
    from dataclasses import replace

    from length_tagger.linear import save
    from length_tagger.linear_network import Recipe
    from length_tagger.linear_training import fit

    require_writable(output)
    samples = samples_from(data)
    recipe = Recipe() if epochs is None else replace(Recipe(), epochs=epochs)
    command = f"block tagger train linear {data} --seed {seed}" + (f" --epochs {epochs}" if epochs else "")
    with training_bar() as progress:
        model = fit(samples, seed=seed, recipe=recipe, card=card_of(samples, data, seed, command), progress=progress)
    save(model, output)
    report = {"output": output, "bytes": Path(output).stat().st_size, "spread_scale": model.spread_scale}
    report |= {"num_models": len(model.models), **model.card}
    print(json.dumps(report) if as_json else f"{output}: {report['bytes']} bytes, {len(model.models)} models")


@train.command(epilog=DATA_HELP)
@click.argument("data", required=False, default=CASTILLO)
@click.option("--output", "-o", metavar="FOLDER", required=True, help="Folder of the checkpoint.")
@click.option("--checkpoint", default="", help="Encoder to start from: a name on Hugging Face, or a folder.")
@click.option("--resume", is_flag=True, help="Continue the training that was interrupted in FOLDER.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Seed of the training.")
@click.option("--size", type=int, default=None, help="Width of a new, small encoder.")
@click.option("--layers", type=int, default=None, help="Number of its layers.")
@click.option("--heads", type=int, default=None, help="Number of its attention heads.")
@click.option("--num-words", type=int, default=None, help="Size of its vocabulary.")
@click.option(
    "--max-tokens",
    "--most-tokens",
    "most_tokens",
    type=int,
    default=None,
    help="Maximum number of tokens that are read; of a longer prompt, its head and its tail.",
)
@click.option("--epochs", type=int, default=None, help="Maximum number of passes over the data.")
@click.option(
    "--patience", type=int, default=None, help="Number of passes without improvement after which training ends."
)
@click.option("--batch", type=int, default=None, help="Batch size.")
@click.option("--rate", type=float, default=None, help="Learning rate; 3e-5 is usual with a checkpoint.")
@click.option("--beside-linear", type=float, default=None, help="Weight of the package's `linear` in the estimates.")
@click.option("--hide", type=float, default=None, help="Share of the tokens that are masked during training.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def roberta(
    data: str, output: str, checkpoint: str, seed: int, *, resume: bool, as_json: bool, **given: float | None
) -> None:
    """Fine-tune an encoder of the RoBERTa family on DATA, or train a small one; needs the extra `tagger`.

    A tenth of the prompts is for early stopping and calibration, a fifth is held out. After each pass a checkpoint is
    written from which training can continue. A GPU is used if there is one.
    """
    try:
        from length_tagger.roberta_training import EncoderRecipe, fit
    except ImportError:
        raise ValueError("roberta needs torch: pip install 'block-serving[tagger]'") from None
    require_writable(output)
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    recipe = EncoderRecipe(checkpoint=checkpoint, seed=seed, **chosen)
    samples = samples_from(data)
    flags = "".join(f" --{name.replace('_', '-')} {value}" for name, value in chosen.items())
    start = f" --checkpoint {checkpoint}" if checkpoint else ""
    command = f"block tagger train roberta {data} --seed {seed}{start}{flags}"
    with training_bar() as progress:
        made = fit(
            samples, output, recipe, card=card_of(samples, data, seed, command), resume=resume, progress=progress
        )
    report = {"output": output, "spread_scale": made.spread_scale, "num_models": len(made.models), **made.card}
    print(
        json.dumps(report)
        if as_json
        else f"{output}: {len(made.models)} models, mean error of the logarithm {made.card['validation_log_error']:.4f}"
    )


@tagger.command(epilog=DATA_HELP)
@click.argument("data", required=False, default=CASTILLO)
@click.option("--linear-model", metavar="FILE", default=None, help="Model file of `linear`.  [default: the package's]")
@click.option("--encoder", metavar="FOLDER", default=None, help="Checkpoint of `roberta`.  [default: the package's]")
@click.option("--seed", type=click.IntRange(0, 2**31), default=None, help="Seed of the split.  [default: the model's]")
@click.option("--errors", metavar="FOLDER", default="", help="Folder for predicted and true lengths, for simulations.")
@click.option(
    "--part",
    type=click.Choice(["held-out", "all"]),
    default="held-out",
    show_default=True,
    help="Prompts to evaluate on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    data: str, linear_model: str | None, encoder: str | None, seed: int | None, *, part: str, errors: str, as_json: bool
) -> None:
    """Evaluate the estimators on DATA's held-out prompts, or on outcomes that a tagger has recorded.

    Two references are reported as well: `median`, one length for all, and `ceiling`, the mean of the other responses of
    the same model to the same prompt. `roberta` is evaluated if torch is installed. `cached` knows one response to each
    prompt, `history` the responses to prompts that are not held out.
    """
    from length_tagger.evaluation import outcome_rows
    from services.tagger_server.evaluation import evaluated, outcomes_from

    recorded = outcomes_from(data) if data != CASTILLO else None
    if recorded is not None:
        results = outcome_rows(recorded)
    else:
        results = evaluated(
            samples_from(data), linear_model=linear_model, encoder=encoder, seed=seed, held_out=part == "held-out",
            errors=errors, progress=lambda items, label: followed(items, label, len(items)),
        )  # fmt: skip
    if as_json:
        print(json.dumps({"evaluate": data, "part": "recorded" if recorded is not None else part, "results": results}))
        return
    _print_scores(results)


@tagger.command()
@click.argument("prompts", default="-")
@click.option("--model", default="", help="Name of the served model.")
@click.option("--linear-model", metavar="FILE", default=None, help="Model file of `linear`.  [default: the package's]")
@click.option(
    "--encoder",
    metavar="FOLDER",
    default=None,
    help="Checkpoint of `roberta` to use in place of `linear`; small is the package's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def predict(prompts: str, model: str, linear_model: str | None, encoder: str | None, *, as_json: bool) -> None:
    """Predict the length of the response to the text in PROMPTS (a file, or - for standard input).

    Each line of a file that ends in .jsonl is a prompt of its own, in JSON: prompt, and optionally model.
    """
    from length_tagger.estimate import Query
    from length_tagger.scores import P90
    from services.tagger_server.evaluation import batched_from

    queries = (
        _queries(prompts, model) if prompts.endswith(".jsonl") else [Query(prompt=read_text(prompts), model=model)]
    )
    if not all(query.prompt for query in queries):
        raise ValueError(f"{prompts}: prompt: is empty")
    predictions = []
    for estimate in batched_from(linear_model, encoder).estimate_many(queries):
        if estimate is None:
            raise AssertionError("a prompt that is not empty has an estimate")
        predictions.append(
            {
                "median_tokens": estimate.median_tokens,
                "p90_tokens": estimate.median_tokens * math.exp(P90 * estimate.spread),
                "spread": estimate.spread,
                "confidence": estimate.confidence,
                "estimator": estimate.estimator,
            }
        )
    if as_json:
        print(json.dumps({"predictions": predictions}))
        return
    for one in predictions:
        print(
            f"{one['median_tokens']:.0f} tokens, P90 {one['p90_tokens']:.0f}"
            f" ({one['estimator']}, confidence {one['confidence']:.2f})"
        )


def _queries(path: str, model: str) -> list[Any]:
    from length_tagger.estimate import Query

    queries = []
    lines = read_text(path).splitlines()
    for number, line in enumerate(followed(lines, "reading prompts", len(lines)), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: is not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise ValueError(f"{path}:{number}: prompt: must be a text")
        queries.append(Query(prompt=row["prompt"], model=str(row.get("model") or model)))
    if not queries:
        raise ValueError(f"{path}: holds no prompts")
    return queries


def samples_from(data: str) -> list[Sample]:
    """Read the training data."""
    from length_tagger.samples import read_castillo, read_samples

    if data == CASTILLO:
        return read_castillo(data_folder() / "text")
    return read_samples(data, lambda rows: followed(rows, "reading samples"))


def card_of(samples: list[Sample], data: str, seed: int, command: str) -> dict[str, Any]:
    """Describe the training of a model."""
    return {
        "data": data,
        "num_prompts": len({sample.prompt for sample in samples}),
        "num_answers": sum(len(sample.output_tokens) for sample in samples),
        "seed": seed,
        "command": command,
    }


def require_writable(output: str) -> None:
    """Refuse an output that cannot be written, before the work."""
    if not Path(output).parent.is_dir():
        raise ValueError(f"output: {Path(output).parent} is no directory")


@contextmanager
def training_bar() -> Iterator[Callable[[int, int, float], None]]:
    """Show the progress and the current error of training on a terminal."""
    if not are_shown():
        yield lambda *_: None
        return
    shown: dict[str, float] = {"error": math.nan, "done": 0}
    bar: Any
    with click.progressbar(
        length=1000, label="training", file=sys.stderr, item_show_func=lambda _: f"error {shown['error']:.4f}"
    ) as bar:

        def progress(done: int, total: int, error: float) -> None:
            shown["error"] = error
            share = 1000 * done // max(1, total)
            bar.update(int(share - shown["done"]))
            shown["done"] = share

        yield progress


def _print_scores(results: list[dict[str, Any]]) -> None:
    metrics = ("mae", "mae_over_mean", "acc50", "acc100", "spearman", "pinball", "coverage_p90")
    values = {result["name"]: result["value"] for result in results}
    print(f"{'':24}" + "".join(f"{metric:>15}" for metric in metrics))
    for estimator in dict.fromkeys(name.rpartition(".")[0] for name in values):
        print(f"{estimator:24}" + "".join(f"{values[f'{estimator}.{metric}']:>15.3f}" for metric in metrics))
