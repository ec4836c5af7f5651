"""Engine settings on the command line: flags with vLLM's names, BLOCK_* in the environment, TOML, the profile's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from predictor.batching import BATCHERS
from predictor.config import SCHEDULING_POLICIES, EngineConfig
from predictor.profile import Profile, load_profile, profile_from_json, profile_names
from simulator.codec import read_text, settings_from_toml

F = TypeVar("F", bound=Callable[..., Any])

CHOICES = {"batcher": tuple(BATCHERS), "scheduling_policy": SCHEDULING_POLICIES}
HELP = {
    "batcher": "Local scheduler of the engine.",
    "max_num_seqs": "Most requests that run at once.",
    "max_num_batched_tokens": "Token budget of a step.",
    "block_size": "Tokens per KV block.",
    "num_gpu_blocks": "KV blocks (vLLM's count, its null block included).",
    "max_model_len": "Most tokens that a request may have, answer included.",
    "scheduling_policy": "Order of the waiting queue.",
    "watermark": "Fraction of the blocks that admissions leave free.",
    "long_prefill_token_threshold": "Most prompt tokens that a request may get in a step with others.",
}


def engine_options(command: F) -> F:
    """Give a command a profile and every engine setting."""
    for spec in reversed(fields(EngineConfig)):
        command = _option(spec.name, str(spec.type))(command)
    command = click.option(
        "--engine", "-c", "engine_file", metavar="TOML", envvar="BLOCK_ENGINE", help="Engine settings, same names."
    )(command)
    return click.option(
        "--profile",
        "-p",
        "profile_name",
        metavar="NAME|FILE",
        default="llama-3.1-8b-h100",
        show_default=True,
        envvar="BLOCK_PROFILE",
        help="Latency profile: a shipped one, or a JSON file.",
    )(command)


def _option(name: str, kind: str) -> Callable[[F], F]:
    flag = name.replace("_", "-")
    names = [f"--{flag}/--no-{flag}"] if "bool" in kind else [f"--{flag}"]
    if name == "num_gpu_blocks":
        names.append("--num-gpu-blocks-override")
    value: Any = click.Choice(CHOICES[name]) if name in CHOICES else int if "int" in kind else float
    return click.option(
        *names,
        name,
        type=None if "bool" in kind else value,
        default=None,
        envvar=f"BLOCK_{name.upper()}",
        help=HELP.get(name, "As in vLLM."),
    )


def profile_named(name: str) -> Profile:
    """Load a shipped profile, or one from a JSON file."""
    if name in profile_names() or not name.endswith(".json"):
        return load_profile(name)
    try:
        return profile_from_json(read_text(name))
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None


def engine_config(profile: Profile, engine_file: str | None, flags: dict[str, Any]) -> EngineConfig:
    """Settle the engine's settings: flags and environment first, then the file, then what suits the profile."""
    suggested = {
        spec.name: value for spec in fields(profile.engine) if (value := getattr(profile.engine, spec.name)) is not None
    }
    from_file = settings_from_toml(engine_file) if engine_file else {}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return EngineConfig(**{**suggested, **from_file, **given})
    except TypeError as error:
        raise ValueError(str(error)) from None
