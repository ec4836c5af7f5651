"""A simulated cluster and its traffic on the command line: a TOML file, and flags that win over it."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import click

from predictor.config import FIELD_NAMES
from services.cli.engine_options import engine_options
from services.parallel import processes, ray_cluster
from simulator.codec import read_text, settings_from_toml
from simulator.parallel import Runner
from simulator.scenario import Scenario, scenario_from

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_POLICIES = "block,llumnix,jsq"
SHOW_BAR_S = 2.0

TRAFFIC = {
    "most_tokens": (int, "Leave requests out whose prompt and answer have more tokens."),
    "arrivals": (click.Choice(["trace", "poisson", "gamma", "uniform"]), "How requests come."),
    "cv": (float, "Coefficient of variation of gamma's gaps."),
    "prompt_tokens": (str, "Without a trace: 128, uniform:16:512, lognormal:MEDIAN:SPREAD or exponential:MEAN."),
    "output_tokens": (str, "Likewise."),
    "num_requests": (int, "How many requests."),
    "grid_s": (float, "Spread a trace's times over the cells of the grid that they were recorded on."),
}
CONDITIONS = {
    "num_schedulers": (int, "Schedulers that decide at once, each with its own view."),
    "decision_s": (float, "From a scheduler's look at the instances to its promise."),
    "network_s": (float, "From there to the engine."),
    "indicator_period_s": (float, "How often instances tell of themselves; 0: indicators are always true."),
    "indicator_delay_s": (float, "How old what they tell is when it is heard."),
    "step_noise": (float, "Standard deviation of the logarithm of step times."),
    "residual": (str, "What is left of an answer: conditional_median, conditional_quartile or plus_ten."),
    "prefix_view": (click.Choice(["engine", "sent"]), "Hits are known from engines' caches, or from what was sent."),
}


def scenario_options(command: F) -> F:
    """Give a command a cluster, its engines, its traffic and its conditions."""
    for table in (CONDITIONS, TRAFFIC):
        for name, (kind, told) in reversed(table.items()):
            command = click.option(f"--{name.replace('_', '-')}", name, type=kind, default=None, help=told)(command)
    command = click.option(
        "--reservations/--no-reservations", default=None, help="Whether promises count before the engine shows them."
    )(command)
    command = click.option(
        "--tags",
        default=None,
        metavar="KIND",
        help="What is known of lengths: exact, noisy:SIGMA, constant:TOKENS, typical, or fitted:FILE of errors.",
    )(command)
    command = click.option(
        "--scenario", "-s", "scenario_file", metavar="TOML", help="Instances, traffic, tags, conditions and slo."
    )(command)
    command = click.option("--instances", "-n", type=int, default=None, help="How many.  [default: 12]")(command)
    return engine_options(command)


def policy_option(command: F) -> F:
    """Give a command policies to compare."""
    return click.option(
        "--policy",
        "policies",
        multiple=True,
        metavar="A,B,C",
        help=f"Policies; one with parameters by itself.  [default: {DEFAULT_POLICIES}]",
    )(command)


def policies_in(given: tuple[str, ...]) -> list[str]:
    """Read policies: several between commas, or one with its parameters."""
    texts = given or (DEFAULT_POLICIES,)
    found = [one.strip() for text in texts for one in ([text] if ":" in text else text.split(","))]
    return list(dict.fromkeys(one for one in found if one))


def scenario_of(trace: str | None, flags: Mapping[str, Any]) -> Scenario:
    """Put file and flags together."""
    table = _table(flags["scenario_file"]) if flags["scenario_file"] else {}
    kinds = table.get("instances", {})
    kinds = [kinds] if isinstance(kinds, Mapping) else list(kinds)
    engine = settings_from_toml(flags["engine_file"]) if flags.get("engine_file") else {}
    engine |= {name: flags[name] for name in FIELD_NAMES if flags.get(name) is not None}
    given = _profile_given()
    for kind in kinds:
        kind["engine"] = {**kind.get("engine", {}), **engine}
        if given or "profile" not in kind:
            kind["profile"] = flags["profile_name"]
    if flags["instances"] is not None or (len(kinds) == 1 and "count" not in kinds[0]):
        if len(kinds) > 1:
            raise ValueError("--instances: the scenario has several kinds of them, each with its count")
        kinds[0]["count"] = 12 if flags["instances"] is None else flags["instances"]
    traffic = {**table.get("traffic", {}), **_given(flags, TRAFFIC)}
    if trace is not None:
        traffic["trace"] = trace
    conditions = {**table.get("conditions", {}), **_given(flags, CONDITIONS)}
    if flags["reservations"] is not None:
        conditions["reservations"] = flags["reservations"]
    tags = tags_in(flags["tags"]) if flags["tags"] else table.get("tags", {})
    return scenario_from(
        {**table, "instances": kinds, "traffic": traffic, "conditions": conditions, "tags": tags}
    )  # fmt: skip


def tags_in(text: str) -> dict[str, Any]:
    """Read a kind of tags with its number."""
    kind, colon, value = text.partition(":")
    table: dict[str, Any] = {"kind": kind}
    key = {"noisy": "sigma", "constant": "tokens", "fitted": "file"}.get(kind)
    if colon and key is None:
        raise ValueError(f"--tags: {kind} takes no number")
    if colon and key is not None:
        try:
            table[key] = value if key == "file" else float(value)
        except ValueError:
            raise ValueError(f"--tags: {value!r} is no number") from None
    return table


def _profile_given() -> bool:
    context = click.get_current_context(silent=True)
    source = None if context is None else context.get_parameter_source("profile_name")
    return source is not None and source.name != "DEFAULT"


def _given(flags: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: flags[name] for name in names if flags.get(name) is not None}


def _table(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def runner_for(workers: int | None, ray: str | None) -> AbstractContextManager[Runner]:
    """Have processes, or a Ray cluster."""
    return processes(workers) if ray is None else ray_cluster(ray)


@contextmanager
def bar(length: int, label: str) -> Iterator[Callable[[int], None]]:
    """Show how much is done, on a terminal, once it has taken a while; told how much that is."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    start_s, shown, made = time.monotonic(), 0, click.progressbar(length=length, label=label, file=sys.stderr)

    def at(done: int) -> None:
        nonlocal shown
        if time.monotonic() - start_s > SHOW_BAR_S:
            made.update(done - shown)
            shown = done

    yield at
    if shown:
        made.update(length - shown)
        made.render_finish()
