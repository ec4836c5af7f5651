"""A simulated cluster and its traffic on the command line: a TOML file, and flags that take precedence."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import click

from services.cli.engine_options import ENGINE, EngineModelSettings, settings_in
from services.cli.settings_options import SettingValues, settings_options
from services.parallel import processes, ray_cluster
from simulator.codec import read_text
from simulator.load_plan import LENGTH_FORMS
from simulator.parallel import Runner
from simulator.scenario import Scenario, require_tables, scenario_from

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_POLICIES = "block,llumnix,jsq"

DEFAULT_INSTANCES = 12

# Without a flag the scenario's own value counts, so these flags have no defaults.
TRAFFIC = {
    "most_tokens": (int, "Leave out requests with more tokens, prompt and response together."),
    "arrivals": (click.Choice(["trace", "poisson", "gamma", "uniform"]), "Arrival process."),
    "cv": (float, "Coefficient of variation of the gaps of gamma arrivals."),
    "prompt_tokens": (str, f"Prompt lengths without a trace: {LENGTH_FORMS}."),
    "output_tokens": (str, f"Response lengths without a trace: {LENGTH_FORMS}."),
    "num_requests": (int, "Number of requests."),
    "grid_s": (float, "Grid in seconds on which the times of a trace were recorded: they are spread over its cells."),
}
CONDITIONS = {
    "num_schedulers": (int, "Number of schedulers that decide at the same time, each with its own view."),
    "decision_s": (float, "Time from reading the instances' state to the reservation, in seconds."),
    "network_s": (float, "Time from the reservation until the request is at the engine, in seconds."),
    "indicator_period_s": (float, "Interval between indicator updates of an instance, in seconds; 0: always current."),
    "indicator_delay_s": (float, "Age of an indicator update when it arrives, in seconds."),
    "step_noise": (float, "Standard deviation of the logarithm of step times."),
    "residual": (str, "How the rest of a response is predicted: conditional_median, conditional_quartile or plus_ten."),
    "prefix_view": (
        click.Choice(["engine", "sent"]),
        "Prefix hits are predicted from engines' caches, or from requests.",
    ),
}


def scenario_options(command: F) -> F:
    """Give a command the flags of a cluster, its engines, its traffic and its conditions."""
    for table in (CONDITIONS, TRAFFIC):
        for name, (kind, meaning) in reversed(table.items()):
            command = click.option(f"--{name.replace('_', '-')}", name, type=kind, default=None, help=meaning)(command)
    command = click.option(
        "--reservations/--no-reservations", default=None, help="Count requests that the engine does not show yet."
    )(command)
    command = click.option(
        "--tags",
        default=None,
        metavar="KIND",
        help="Predicted response lengths: exact, noisy:SIGMA, constant:TOKENS, typical, or fitted:FILE with errors.",
    )(command)
    command = click.option(
        "--scenario",
        "-s",
        "scenario_file",
        metavar="TOML",
        help="File with instances, traffic, tags, conditions, slo, mix.",
    )(command)
    command = click.option(
        "--instances",
        "-n",
        type=int,
        default=None,
        help=f"Number of instances.  [default: the scenario's, otherwise {DEFAULT_INSTANCES}]",
    )(command)
    return cast("F", settings_options(ENGINE)(command))


def policy_option(command: F) -> F:
    """Give a command the policies that it compares."""
    return click.option(
        "--policy",
        "policies",
        multiple=True,
        metavar="A,B,C",
        help=f"Policies, with commas between; a policy with parameters needs its own flag.  "
        f"[default: {DEFAULT_POLICIES}]",
    )(command)


def policies_in(given: tuple[str, ...]) -> list[str]:
    """Read policies: several with commas between, or one with its parameters."""
    texts = given or (DEFAULT_POLICIES,)
    found = [one.strip() for text in texts for one in ([text] if ":" in text else text.split(","))]
    return list(dict.fromkeys(one for one in found if one))


def scenario_of(trace: str | None, flags: Mapping[str, Any]) -> Scenario:
    """Combine the scenario file with the flags, which take precedence."""
    given: SettingValues = flags["given"]
    model = given.make(EngineModelSettings)
    table = _table(flags["scenario_file"]) if flags["scenario_file"] else {}
    require_tables(table)
    kinds = table.get("instances", {})
    kinds = [kinds] if isinstance(kinds, Mapping) else list(kinds)
    engine = settings_in(given)
    for kind in kinds:
        kind["engine"] = {**kind.get("engine", {}), **engine}
        if given.was_set("profile") or "profile" not in kind:
            kind["profile"] = model.profile
    if flags["instances"] is not None or (len(kinds) == 1 and "count" not in kinds[0]):
        if len(kinds) > 1:
            raise ValueError("--instances: the scenario has several kinds of them, each with its count")
        kinds[0]["count"] = DEFAULT_INSTANCES if flags["instances"] is None else flags["instances"]
    traffic = {**table.get("traffic", {}), **_set_in(flags, TRAFFIC)}
    if trace is not None:
        traffic["trace"] = trace
    conditions = {**table.get("conditions", {}), **_set_in(flags, CONDITIONS)}
    if flags["reservations"] is not None:
        conditions["reservations"] = flags["reservations"]
    tags = tags_in(flags["tags"]) if flags["tags"] else table.get("tags", {})
    return scenario_from(
        {**table, "instances": kinds, "traffic": traffic, "conditions": conditions, "tags": tags}
    )  # fmt: skip


def tags_in(text: str) -> dict[str, Any]:
    """Read a kind of tags with its parameter."""
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


def _set_in(flags: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: flags[name] for name in names if flags.get(name) is not None}


def _table(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def runner_for(workers: int | None, ray: str | None) -> AbstractContextManager[Runner]:
    """Run trials in processes of this machine, or on a Ray cluster."""
    return processes(workers) if ray is None else ray_cluster(ray)
