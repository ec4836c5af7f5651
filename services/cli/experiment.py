"""`block experiment`: runs the experiments of the papers, and others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import click

from services.cli.first_use import say_if_compiling
from services.cli.progress_bars import bar
from services.cli.simulate_options import runner_for
from services.result_files import ResultCache, write_report
from simulator.experiments.attained_at_rates import attained_at, attained_table
from simulator.experiments.experiment import Experiment, ExperimentSetting, matching
from simulator.experiments.experiment_file import experiment_named, experiment_names
from simulator.experiments.findings import measure
from simulator.experiments.report import as_json as findings_json
from simulator.experiments.report import as_markdown


@click.command()
@click.argument("name", required=False)
@click.option("--out", "folder", metavar="DIR", default=None, help="Folder of the report.  [default: experiments/NAME]")
@click.option("--seeds", type=int, default=None, help="Number of seeds.  [default: the experiment's]")
@click.option(
    "--only",
    "settings",
    multiple=True,
    metavar="SETTING",
    help="Run this setting only, or those that a pattern such as `*.10` matches. Repeatable.",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="VARIANT",
    help="Run this variant of the experiment only, or those that a pattern matches. Repeatable.",
)
@click.option(
    "--rate",
    "rates",
    type=float,
    multiple=True,
    metavar="REQUESTS/S",
    help="Show which share of the requests attains its deadlines at this rate, without a search. Repeatable.",
)
@click.option("--workers", type=int, default=None, help="Number of processes.  [default: one per core]")
@click.option(
    "--ray", metavar="[ADDRESS]", is_flag=False, flag_value="local", default=None, help="Run on a Ray cluster."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def experiment(
    *,
    name: str | None,
    folder: str | None,
    seeds: int | None,
    settings: tuple[str, ...],
    variants: tuple[str, ...],
    rates: tuple[float, ...],
    workers: int | None,
    ray: str | None,
    as_json: bool,
) -> None:
    """Run the experiment NAME, or a TOML file, and write a report; without NAME, list the experiments.

    Results are cached beside the report: an interrupted run continues where it stopped, unless the code has changed.
    """
    if name is None:
        for known in experiment_names():
            print(f"{known:24} {experiment_named(known).title}")
        return
    say_if_compiling()
    wanted = experiment_named(name)
    if seeds is not None:
        if seeds < 1:
            raise ValueError(f"seeds: must be at least 1, not {seeds}")
        wanted = replace(wanted, seeds=seeds)
    with _named("--only"):
        wanted = replace(wanted, settings=_chosen(wanted, settings))
    if variants:
        with _named("--variant"):
            wanted = wanted.with_variants(variants)
    target = Path(folder or f"experiments/{wanted.name}")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: {target} cannot be made: {error.strerror}") from None
    cache = ResultCache(target / "measured.jsonl")
    with runner_for(workers, ray) as runner, bar(1000, wanted.name) as at:
        if rates:
            with _named("--rate"):
                rows = attained_at(wanted, rates, cache.cached(runner), lambda done, of: at(1000 * done // of))
            print(json.dumps([asdict(row) for row in rows]) if as_json else attained_table(rows))
            return
        findings = measure(wanted, cache.cached(runner), lambda done, of: at(1000 * done // of))
    write_report(wanted, findings, target)
    if as_json:
        print(json.dumps(findings_json(wanted, findings)))
    else:
        print(as_markdown(wanted, findings))
        click.echo(f"written to {target}/report.html, report.md, results.json", err=True)


def _chosen(experiment: Experiment, patterns: tuple[str, ...]) -> tuple[ExperimentSetting, ...]:
    """Return the settings that patterns match; without any, those that are not optional."""
    if not patterns:
        return tuple(one for one in experiment.settings if not one.optional)
    names = matching([one.name for one in experiment.settings], patterns)
    return tuple(one for one in experiment.settings if one.name in names)


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Name the option in the message of an error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
