"""`block tagger`: train estimators of answers' lengths, judge them, and ask them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.codec import read_text
from simulator.reference_data import data_folder

if TYPE_CHECKING:
    from length_tagger.samples import Sample

CASTILLO = "castillo"
DATA_HELP = (
    "DATA is JSON lines, CSV (either may end in .gz) or Parquet with prompt, output_tokens (one or several), and "
    "optionally model and kind; without it, the CASTILLO data in BLOCK_DATA."
)


@click.group()
def tagger() -> None:
    """Estimators of how long answers will be."""


@tagger.group()
def train() -> None:
    """Train an estimator on prompts and the lengths of their answers."""


@train.command(epilog=DATA_HELP)
@click.argument("data", required=False, default=CASTILLO)
@click.option("--output", "-o", metavar="FILE", required=True, help="Where to write the model (.npz).")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True)
@click.option("--epochs", type=click.IntRange(1, 10_000), default=None, help="Passes over the data.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def linear(data: str, output: str, seed: int, epochs: int | None, *, as_json: bool) -> None:
    """Train `linear` on DATA: a tenth of the prompts calibrates it, a fifth is held out."""
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
@click.option("--output", "-o", metavar="FOLDER", required=True, help="Where to write the checkpoint.")
@click.option("--checkpoint", default="", help="Start from this encoder: a name on Hugging Face, or a folder.")
@click.option("--resume", is_flag=True, help="Go on where training into FOLDER stopped.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True)
@click.option("--size", type=int, default=None, help="Width of a small encoder of one's own.")
@click.option("--layers", type=int, default=None, help="Its layers.")
@click.option("--heads", type=int, default=None, help="Its attention heads.")
@click.option("--num-words", type=int, default=None, help="Pieces of words that its tokenizer learns.")
@click.option("--most-tokens", type=int, default=None, help="Of a longer prompt head and tail are read.")
@click.option("--epochs", type=int, default=None, help="Most passes over the data.")
@click.option("--patience", type=int, default=None, help="Passes without a better one until it ends.")
@click.option("--batch", type=int, default=None)
@click.option("--rate", type=float, default=None, help="Learning rate; with a checkpoint 3e-5 is usual.")
@click.option("--beside-linear", type=float, default=None, help="Share of the package's `linear` in its estimates.")
@click.option("--hide", type=float, default=None, help="Share of tokens that are masked while learning.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def roberta(
    data: str, output: str, checkpoint: str, seed: int, *, resume: bool, as_json: bool, **given: float | None
) -> None:
    """Fine-tune an encoder of the RoBERTa family on DATA, or train a small one; needs the extra `tagger`.

    A tenth of the prompts says when to stop and calibrates it, a fifth is held out. After each pass everything that
    going on needs is written down. A GPU is used where there is one.
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
@click.option("--linear-model", metavar="FILE", default=None, help="Instead of the one that comes with the package.")
@click.option("--encoder", metavar="FOLDER", default=None, help="For `roberta`, instead of the package's own.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=None, help="Of the split; the model's own by default.")
@click.option("--errors", metavar="FOLDER", default="", help="Write tags beside true lengths there, for simulations.")
@click.option("--part", type=click.Choice(["held-out", "all"]), default="held-out", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def evaluate(
    data: str, linear_model: str | None, encoder: str | None, seed: int | None, *, part: str, errors: str, as_json: bool
) -> None:
    """Judge the estimators on DATA's held-out prompts, or on outcomes that a tagger has recorded.

    Beside them stand `median`, one length for all, and `ceiling`, the mean of the other answers of the same model to
    the same prompt. `roberta` is judged where torch is installed. `cached` has been told one answer to each prompt,
    `history` those to the prompts not held out.
    """
    from length_tagger.evaluation import outcome_rows
    from services.tagger_server.evaluation import evaluated, outcomes_from

    recorded = outcomes_from(data) if data != CASTILLO else None
    if recorded is not None:
        results = outcome_rows(recorded)
    else:
        results = evaluated(
            samples_from(data), linear_model=linear_model, encoder=encoder, seed=seed, held_out=part == "held-out",
            errors=errors, progress=bar_over,
        )  # fmt: skip
    if as_json:
        print(json.dumps({"evaluate": data, "part": "recorded" if recorded is not None else part, "results": results}))
        return
    _print_scores(results)


@tagger.command()
@click.argument("prompts", default="-")
@click.option("--model", default="", help="The served model's name.")
@click.option("--linear-model", metavar="FILE", default=None, help="Instead of the one that comes with the package.")
@click.option(
    "--encoder",
    metavar="FOLDER",
    default=None,
    help="Ask `roberta` of this checkpoint instead; small is the package's own.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def predict(prompts: str, model: str, linear_model: str | None, encoder: str | None, *, as_json: bool) -> None:
    """Say how long answers will be: to the text in PROMPTS (a file, or - for standard input), or to JSON lines.

    In a file that ends in .jsonl each line has a prompt, and may have a model.
    """
    from length_tagger.estimate import Query
    from length_tagger.scores import P90
    from services.tagger_server.evaluation import batched_from

    asked = _queries(prompts, model) if prompts.endswith(".jsonl") else [Query(prompt=read_text(prompts), model=model)]
    if not all(query.prompt for query in asked):
        raise ValueError(f"{prompts}: prompt: is empty")
    answers = []
    for estimate in batched_from(linear_model, encoder).estimate_many(asked):
        if estimate is None:
            raise AssertionError("a prompt that is not empty has an estimate")
        answers.append(
            {
                "median_tokens": estimate.median_tokens,
                "p90_tokens": estimate.median_tokens * math.exp(P90 * estimate.spread),
                "spread": estimate.spread,
                "confidence": estimate.confidence,
                "estimator": estimate.estimator,
            }
        )
    if as_json:
        print(json.dumps({"predictions": answers}))
        return
    for answer in answers:
        print(
            f"{answer['median_tokens']:.0f} tokens, nine of ten times at most {answer['p90_tokens']:.0f}"
            f" ({answer['estimator']}, confidence {answer['confidence']:.2f})"
        )


def _queries(path: str, model: str) -> list[Any]:
    from length_tagger.estimate import Query

    queries = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
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
    """Read what there is to learn from."""
    from length_tagger.samples import read_castillo, read_samples

    return read_castillo(data_folder() / "text") if data == CASTILLO else read_samples(data)


def card_of(samples: list[Sample], data: str, seed: int, command: str) -> dict[str, Any]:
    """Say what a model is trained on."""
    return {
        "data": data,
        "num_prompts": len({sample.prompt for sample in samples}),
        "num_answers": sum(len(sample.output_tokens) for sample in samples),
        "seed": seed,
        "command": command,
    }


def require_writable(output: str) -> None:
    """Refuse a place where nothing can be written before work is put into what should go there."""
    if not Path(output).parent.is_dir():
        raise ValueError(f"output: {Path(output).parent} is no directory")


@contextmanager
def training_bar() -> Iterator[Callable[[int, int, float], None]]:
    """Show how far training is and the current error, on a terminal."""
    if not sys.stderr.isatty():
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


def bar_over(items: list[Any], label: str) -> Iterator[Any]:
    """Go through items, with a bar on a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    with click.progressbar(items, label=label, file=sys.stderr) as bar:
        yield from bar


def _print_scores(results: list[dict[str, Any]]) -> None:
    measures = ("mae", "mae_over_mean", "acc50", "acc100", "spearman", "pinball", "coverage_p90")
    values = {result["name"]: result["value"] for result in results}
    print(f"{'':24}" + "".join(f"{measure:>15}" for measure in measures))
    for who in dict.fromkeys(name.rpartition(".")[0] for name in values):
        print(f"{who:24}" + "".join(f"{values[f'{who}.{measure}']:>15.3f}" for measure in measures))
