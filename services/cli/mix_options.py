"""Options of commands that give requests service levels, and report what was attained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from predictor.gain import GainWeights, priority_weights
from scheduler.objectives import NO_OBJECTIVES, Objectives, objectives_in
from services.load.settings import FIRST_WEIGHT_HELP, MIX_HELP, OBJECTIVES_HELP, PRIORITY_WEIGHT_HELP, BenchSettings
from services.settings import default_of
from simulator.codec import read_text
from simulator.mix import mix_from_file, require_objectives
from simulator.scenario import Scenario

F = TypeVar("F", bound=Callable[..., Any])

OBJECTIVES = "block.objectives"  # the name of the file in the command's context


def mix_options(command: F) -> F:
    """Give a command a mix of requests, and the weights of the gain in its report."""
    command = click.option(
        "--first-token-weight",
        type=float,
        default=default_of(BenchSettings, "first_token_weight"),
        show_default=True,
        help=FIRST_WEIGHT_HELP,
    )(command)
    command = click.option(
        "--priority-weight",
        multiple=True,
        metavar="PRIORITY=WEIGHT",
        help=PRIORITY_WEIGHT_HELP,
    )(command)
    return mix_option(command)


def mix_option(command: F) -> F:
    """Give a command a mix of requests."""
    command = click.option(
        "--objectives",
        "objectives_file",
        metavar="TOML",
        default=None,
        expose_value=False,
        callback=_keep_objectives,
        help=OBJECTIVES_HELP,
    )(command)
    return click.option("--mix", "mix_file", metavar="TOML", default=None, help=MIX_HELP)(command)


def _keep_objectives(context: click.Context, _: click.Parameter, value: str | None) -> None:
    """Keep the name of the file for `objectives_given`, so that commands with a mix need no further argument."""
    context.meta[OBJECTIVES] = value


def objectives_given() -> Objectives:
    """Return the objectives of the file that the command's option names; without one, none."""
    path: str | None = click.get_current_context().meta.get(OBJECTIVES)
    return NO_OBJECTIVES if path is None else objectives_in(read_text(path), path)


def with_mix(scenario: Scenario, mix_file: str | None) -> Scenario:
    """Return a scenario with the mix and the objectives of files, where there are any."""
    if mix_file is not None:
        scenario = replace(scenario, mix=mix_from_file(mix_file))
    if objectives := objectives_given():
        scenario = replace(scenario, objectives=tuple(objectives.values()))
    require_objectives(scenario.mix, {one.name: one for one in scenario.objectives})
    return scenario


def gain_weights(priority_weight: tuple[str, ...], first_token_weight: float) -> GainWeights:
    """Return the weights that the options give."""
    if not 0 < first_token_weight < math.inf:
        raise ValueError(f"first_token_weight: must be above 0, not {first_token_weight}")
    return GainWeights(first_token=first_token_weight, by_priority=priority_weights(priority_weight))


def refuse_given(why: str, *names: str) -> None:
    """Refuse options that were given although they mean nothing here."""
    context = click.get_current_context()
    options = {option.name: option.opts[0] for option in context.command.params}
    for name in names:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise ValueError(f"{options[name]}: {why}")
