"""`block profile fit`: profiles that are fitted to data, or estimated from a data sheet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from services.cli.profile_output import OUTPUT, put_profile
from simulator.codec import read_json

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def fit() -> None:
    """Fit a profile to measured steps or kernel tables, or estimate it from a data sheet."""


def _described(command: F) -> F:
    """Give a command the description of a fitted profile."""
    for option in (
        OUTPUT,
        click.option("--dtype", default="bfloat16", show_default=True, help="Type of the weights."),
        click.option("--tensor-parallel", type=int, default=1, show_default=True, help="Number of devices."),
        click.option("--gpu", required=True, help="Name of the GPU, such as H100."),
        click.option("--model", required=True, help="Name of the model."),
        click.option("--name", required=True, help="Name of the profile."),
    ):
        command = option(command)
    return command


@fit.command()
@click.argument("csv_file", metavar="CSV")
@_described
def steps(csv_file: str, output: str | None, **described: Any) -> None:
    """Fit a profile to measured steps, one line each.

    Columns: num_decodes, decode_context (sum of their contexts, new token included), num_prefills, prefill_tokens,
    prefill_qq (sum of chunk²), prefill_qkv (sum of chunk x context before it), seconds; optionally num_sampled,
    decode_longest.
    """
    from predictor.fitting.measured_steps import measured_profile

    with _reading(csv_file):
        fitted = measured_profile(Path(csv_file), **described)
    put_profile(fitted, output)


@fit.command()
@click.argument("folder")
@click.option("--model-config", required=True, metavar="JSON", help="The model's config.json.")
@_described
def kernels(folder: str, model_config: str, output: str | None, **described: Any) -> None:
    """Fit a profile to a folder of kernel tables: attention.csv, dense.csv, per_sequence.csv (LLMServingSim's).

    For a mixture of experts also moe.csv: tokens, activated_experts, time_us.
    """
    from predictor.fitting.kernel_tables import kernel_table_profile
    from predictor.fitting.model_config import model_shape

    shape = model_shape(_model_config(model_config))
    with _reading(folder):
        fitted = kernel_table_profile(Path(folder), shape=shape, **described)
    put_profile(fitted, output)


@fit.command()
@click.argument("model_config", metavar="CONFIG_JSON")
@click.option("--gpu", required=True, help="Name of the GPU, such as H100.")
@click.option("--tensor-parallel", type=int, default=1, show_default=True, help="Number of devices.")
@click.option(
    "--data-parallel",
    type=int,
    default=1,
    show_default=True,
    help="Number of data-parallel ranks, among which experts are divided; the profile is that of one.",
)
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="Type of the KV cache, as in vLLM.")
@click.option("--name", default=None, help="Name of the profile.")
@OUTPUT
def roofline(model_config: str, output: str | None, **described: Any) -> None:
    """Estimate the profile of a model without measurements, from its config.json and the GPU's data sheet.

    Dense models, mixtures of experts, latent attention, sliding windows, linear attention and quantized weights are
    read from the config.json. The profile states the error that such estimates had on published benchmarks.
    """
    from predictor.fitting.roofline_profile import roofline_profile

    put_profile(roofline_profile(_model_config(model_config), described.pop("gpu"), **described), output)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None


def _model_config(path: str) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must be an object, a model's config.json")
    return config
