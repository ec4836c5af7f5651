"""`block profile measure`, `transfer` and `kernels`: profiles that are measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

import click

from predictor.fitting.kernel_profile import UntimedCosts
from predictor.profile import profile_to_dict, profile_to_json
from predictor.request import LEGS
from services.cli.engine_options import profile_named
from services.cli.output_files import require_folder, save_profile
from services.cli.profile_output import OUTPUT, profile_line
from services.cli.progress_bars import share_bar
from services.profiling.kernels_command import KernelOptions, kernel_profile
from services.profiling.measure_command import MeasureOptions, measured_profile
from services.profiling.transfers import TransferOptions, measured_transfers
from services.settings import default_of, duration_text, seconds_of

F = TypeVar("F", bound=Callable[..., Any])

MEASURED = ("source", "num_requests", "num_batches", "num_disturbed", "num_preemptions", "took_s")


def _budget(options: type, meaning: str = "Duration of the measurement") -> Callable[[F], F]:
    """Return the option for how long a command measures, with the default of its options."""
    default = duration_text(default_of(options, "budget_s"))
    return click.option("--budget", default=default, show_default=True, help=f"{meaning}: 90s, 3m.")


@click.command()
@click.option("--engine-url", default="", envvar="BLOCK_ENGINE_URL", help="URL of a running engine.")
@click.option("--state-file", default="", envvar="BLOCK_STATE_FILE", help="State file that the engine exports.")
@click.option(
    "--start",
    default="",
    metavar="COMMAND",
    help="Command that starts an engine, 'vllm serve MODEL …'; it is stopped afterwards.",
)
@click.option(
    "--start-timeout",
    default=duration_text(default_of(MeasureOptions, "start_s")),
    show_default=True,
    help="Maximum time until a started engine serves.",
)
@_budget(MeasureOptions)
@click.option("--name", default="", help="Name of the profile.  [default: from the model's and the GPU's name]")
@click.option("--gpu", default="", help="Name of the GPU.  [default: this machine's, otherwise CPU]")
@click.option(
    "--tensor-parallel",
    type=int,
    default=default_of(MeasureOptions, "tensor_parallel"),
    show_default=True,
    help="Number of devices that the engine spreads over.",
)
@click.option("--dtype", default=default_of(MeasureOptions, "dtype"), show_default=True, help="Type of the weights.")
@click.option(
    "--seed",
    type=int,
    default=default_of(MeasureOptions, "seed"),
    show_default=True,
    help="Seed of the lengths in mixed batches.",
)
@click.option(
    "--leg",
    type=click.Choice(LEGS),
    default=default_of(MeasureOptions, "leg"),
    show_default=True,
    help="What the engine is measured for: whole requests, or one leg of disaggregated prefill and decode.",
)
@OUTPUT
@click.option("--json", "as_json", is_flag=True, help="Print the measurement and the profile as one JSON object.")
def measure(output: str | None, *, budget: str, start_timeout: str, as_json: bool, **fields: Any) -> None:
    """Measure an engine that exports its state, and fit a profile to the step times of planned batches.

    The engine must serve no other requests meanwhile. An API key is read from BLOCK_ENGINE_API_KEY.
    """
    import uvloop

    options = MeasureOptions(
        budget_s=seconds_of(budget, "budget"),
        start_s=seconds_of(start_timeout, "start_timeout"),
        api_key=os.environ.get("BLOCK_ENGINE_API_KEY") or None,
        **fields,
    )
    require_folder(output)
    with share_bar() as progress:
        made, measured = uvloop.run(measured_profile(options, progress))
    if output is not None:
        save_profile(made, output)
    if as_json:
        about = {name: getattr(measured, name) for name in MEASURED}
        engine = asdict(measured.config)
        click.echo(json.dumps({"engine": engine, **about, "profile": profile_to_dict(made)}))
    elif output is None:
        click.echo(profile_to_json(made), nl=False)
    else:
        click.echo(profile_line(made))


@click.command()
@click.option("--prefill-url", default="", envvar="BLOCK_PREFILL_URL", help="URL of the engine that prefills.")
@click.option("--decode-url", default="", envvar="BLOCK_DECODE_URL", help="URL of the engine that fetches the blocks.")
@click.option(
    "--profile",
    "-p",
    "known",
    default=None,
    metavar="NAME|FILE",
    help="Profile that the transfer is added to.  [default: print the transfer alone]",
)
@_budget(TransferOptions)
@click.option(
    "--kv-bytes-per-token",
    type=int,
    default=0,
    help="Bytes of a token's KV cache, for engines that do not count them.  [default: the profile's]",
)
@OUTPUT
@click.option("--json", "as_json", is_flag=True, help="Print the measurement as one JSON object.")
def transfer(
    known: str | None, budget: str, kv_bytes_per_token: int, output: str | None, *, as_json: bool, **urls: str
) -> None:
    """Measure how long KV blocks take from a prefill engine to a decode engine.

    Both engines must have the same version and model and a KV connector, and serve no other requests meanwhile. The
    result is the base time of a transfer and its bandwidth, which engines get with the profile as kv_transfer_base_s
    and kv_transfer_bytes_per_s. An API key is read from BLOCK_ENGINE_API_KEY.
    """
    import uvloop

    chosen = None if known is None else profile_named(known)
    if output is not None and chosen is None:
        raise ValueError("profile: is missing, the profile that the transfer is added to")
    options = TransferOptions(
        **urls,
        budget_s=seconds_of(budget, "budget"),
        kv_bytes_per_token=kv_bytes_per_token or (chosen.transfer.kv_bytes_per_token if chosen else None) or 0,
        api_key=os.environ.get("BLOCK_ENGINE_API_KEY") or None,
    )
    require_folder(output)
    with share_bar() as progress:
        measured = uvloop.run(measured_transfers(options, progress))
    made = None if chosen is None else replace(chosen, transfer=measured.fitted.time)
    if made is not None and output is not None:
        save_profile(made, output)
    if as_json:
        click.echo(json.dumps(measured.to_dict() | ({} if made is None else {"profile": profile_to_dict(made)})))
    elif made is not None and output is None:
        click.echo(profile_to_json(made), nl=False)
    else:
        click.echo(measured.line())


@click.command("kernels")
@click.argument("config", metavar="CONFIG_JSON_OR_FOLDER")
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default=default_of(KernelOptions, "device"),
    show_default=True,
    help="Device that runs the kernels.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default=default_of(KernelOptions, "dtype"),
    show_default=True,
    help="Type of the weights.",
)
@click.option(
    "--tensor-parallel",
    type=int,
    default=default_of(KernelOptions, "tensor_parallel"),
    show_default=True,
    help="Number of devices that the model is divided among; one device's share is timed.",
)
@_budget(KernelOptions, "Maximum duration of the timing")
@click.option(
    "--max-num-seqs",
    type=int,
    default=default_of(KernelOptions, "max_num_seqs"),
    show_default=True,
    help="Maximum number of sequences of a batch.",
)
@click.option(
    "--max-num-batched-tokens",
    type=int,
    default=default_of(KernelOptions, "max_num_batched_tokens"),
    show_default=True,
    help="Maximum number of tokens of a step.",
)
@click.option(
    "--max-model-len",
    type=int,
    default=None,
    help="Maximum number of tokens of a sequence.  [default: the model's, at most 32768]",
)
@click.option(
    "--cpu-overhead-ms", type=float, default=0, show_default=True, help="CPU time of the engine per step, in ms."
)
@click.option("--all-reduce-us", type=float, default=0, show_default=True, help="Latency of an all-reduce, in µs.")
@click.option("--link-gb-per-s", type=float, default=None, help="Bandwidth of all-reduces: busbw of nccl-tests.")
@click.option("--name", default="", help="Name of the profile.  [default: from the model's and the device's name]")
@click.option("--gpu", default="", help="Name of the GPU.  [default: as torch reports it, otherwise CPU]")
@click.option(
    "--seed",
    type=int,
    default=default_of(KernelOptions, "seed"),
    show_default=True,
    help="Seed of the choice of mixed batches.",
)
@OUTPUT
@click.option("--json", "as_json", is_flag=True, help="Print all timings and the profile as one JSON object.")
def timed_kernels(
    output: str | None,
    *,
    budget: str,
    cpu_overhead_ms: float,
    all_reduce_us: float,
    link_gb_per_s: float | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Time a model's kernels with random weights on this machine, and compose a profile; needs torch.

    Any GPU that torch supports will do, or the CPU. Only the model's config.json is read; the model must be of the
    Llama, Mistral, Mixtral, Qwen2, Qwen3, GLM-4.5, gpt-oss, DeepSeek-V2, DeepSeek-V3, Kimi-K2 or GLM-4.7-Flash family.
    """
    untimed = UntimedCosts(
        cpu_s=cpu_overhead_ms / 1e3,
        all_reduce_s=all_reduce_us / 1e6,
        link_bytes_per_s=None if link_gb_per_s is None else link_gb_per_s * 1e9,
    )
    options = KernelOptions(budget_s=seconds_of(budget, "budget"), untimed=untimed, **fields)
    require_folder(output)
    with share_bar("timing") as progress:
        report = kernel_profile(options, progress)
    if output is not None:
        save_profile(report.profile, output)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    elif output is None:
        click.echo(profile_to_json(report.profile), nl=False)
    else:
        click.echo(profile_line(report.profile))
        if report.kv_tokens is not None:
            click.echo(f"the memory left holds the KV cache of {report.kv_tokens:,} tokens")
