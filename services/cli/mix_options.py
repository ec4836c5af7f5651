"""Options of commands that give requests service levels, and report what was attained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from predictor.gain import GainWeights, priority_weights

F = TypeVar("F", bound=Callable[..., Any])


def mix_options(command: F) -> F:
    """Give a command a mix of requests, and the weights of the gain in its report."""
    command = click.option(
        "--first-token-weight",
        type=float,
        default=1.0,
        show_default=True,
        help="Weight of a first token in the gain, as a multiple of a later one's.",
    )(command)
    command = click.option(
        "--priority-weight",
        multiple=True,
        metavar="PRIORITY=WEIGHT",
        help="Weight of a priority in the gain, beside the requests' own weights; 1 where it is not given. Repeatable.",
    )(command)
    return click.option(
        "--mix",
        "mix_file",
        metavar="TOML",
        default=None,
        help="File with a mix: shares of requests with their class, priority, weight and targets.",
    )(command)


def gain_weights(priority_weight: tuple[str, ...], first_token_weight: float) -> GainWeights:
    """Return the weights that the options give."""
    if not 0 < first_token_weight < math.inf:
        raise ValueError(f"first_token_weight: must be above 0, not {first_token_weight}")
    return GainWeights(first_token=first_token_weight, by_priority=priority_weights(priority_weight))
