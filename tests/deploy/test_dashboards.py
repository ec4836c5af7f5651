"""Dashboards and rules: generated, complete, without overlaps; every metric, label, variable and runbook exists."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import generate_dashboards
from scripts.dashboards import DASHBOARDS
from scripts.dashboards.dashboard import TPOT_SLO, TTFT_SLO
from scripts.dashboards.known_metrics import faults_of, known_series
from services.latency_buckets import LATENCIES_S, TOKEN_GAPS_S
from tests.deploy.prometheus_programs import ROOT, RULE_FILES
from tests.docs.pages import anchors_of

FILES = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
VARIABLE = re.compile(r"\$\{?(\w+)")
BUILT_IN = {"__rate_interval", "__value", "__url_time_range", "__all"}
ALWAYS_THERE = {"datasource", "filters"}


def panels_of(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels, rows and those in closed rows among them."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def rules() -> Iterator[dict[str, Any]]:
    """All recording rules and alerts."""
    for file in RULE_FILES:
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """All series that Prometheus has, recorded ones among them, and their labels."""
    found = dict(known_series())
    for rule in rules():
        if "record" in rule:
            found[rule["record"]] = {"model", "instance", "quantity", "leg"}
    return found


def test_files_are_what_the_script_writes() -> None:
    """Each dashboard has a file, and no other file is there."""
    assert list(generate_dashboards.faults_of_files(dict(generate_dashboards.written()))) == []
    assert {path.name for path in FILES} == {dashboard.file for dashboard in DASHBOARDS}


def test_outdated_and_unknown_files_are_noticed(tmp_path: Path) -> None:
    """Both are named, with what to do."""
    files = {path: text for path, text in generate_dashboards.written([tmp_path]) if path.parent == tmp_path}
    for path, text in files.items():
        path.write_text(text)
    first = next(iter(files))
    first.write_text("{}")
    (tmp_path / "own.json").write_text("{}")
    faults = list(generate_dashboards.faults_of_files(files))
    assert faults == [
        f"{first} is out of date; run scripts/generate_dashboards.py",
        f"{tmp_path / 'own.json'} is not written by scripts/generate_dashboards.py; remove it",
    ]


def test_a_chart_has_the_same_files() -> None:
    """The chart links to the files, so that nothing exists twice."""
    chart = generate_dashboards.ROOT / "deploy" / "helm" / "block"
    assert (chart / "dashboards").resolve() == generate_dashboards.FOLDER
    assert {path.name for path in (chart / "prometheus").iterdir()} >= {"alerts.yml", "recording.yml"}


def test_queries_name_what_there_is() -> None:
    """Every metric is in a registry of Block's or of an emulated engine, with these labels."""
    assert list(generate_dashboards.faults_of_queries()) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(rate(block_decision_total[5m]))", "there is no metric block_decision_total"),
        ("sum(block_gateway_ttft_seconds)", "there is no metric block_gateway_ttft_seconds"),
        ("vllm:num_requests_sleeping", "there is no metric vllm:num_requests_sleeping"),
        ('block_engine_up{instanze="a"}', "block_engine_up has no label instanze"),
        ("sum by (model) (block_engine_up)", "no metric of 'sum by (model) (block_engine_up)' has a label model"),
    ],
)
def test_wrong_queries_are_noticed(expression: str, fault: str, known: dict[str, set[str]]) -> None:
    """Of metrics, of the samples of a histogram, of labels in matchers and in groupings."""
    assert list(faults_of(expression, known)) == [fault]


def test_rules_name_what_there_is(known: dict[str, set[str]]) -> None:
    """As queries of dashboards do; recorded series count."""
    for rule in rules():
        assert list(faults_of(rule["expr"], known)) == [], rule
        for name in re.findall(r"\bblock:\w+:\w+", rule["expr"]):
            assert name in known, f"{rule}: {name} is not recorded"


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_layout(file: Path) -> None:
    """Panels are inside the grid, do not overlap, have ids of their own, a title and a description."""
    dashboard = json.loads(file.read_text(encoding="utf-8"))
    panels = list(panels_of(dashboard))
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"]
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
    for one, other in itertools.combinations((panel["gridPos"] for panel in panels), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (file.stem, one, other)


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_variables(file: Path) -> None:
    """Those that are used are defined, and the others are left out; every panel has the data source that is chosen."""
    dashboard = json.loads(file.read_text(encoding="utf-8"))
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names[0] == "datasource"
    assert names[-1] == "filters"
    queries = [target for panel in panels_of(dashboard) for target in panel.get("targets", ())]
    used = {name for target in queries for name in VARIABLE.findall(target["expr"])} - BUILT_IN
    assert used == set(names) - ALWAYS_THERE
    written = {name for name in VARIABLE.findall(file.read_text(encoding="utf-8")) if not name.startswith("__")}
    assert written <= set(names)
    for panel in panels_of(dashboard):
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_dashboards_are_told_apart_and_link_to_each_other() -> None:
    """Each has its uid and its title; links go to dashboards that exist."""
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len(DASHBOARDS)
    assert len({dashboard.title for dashboard in DASHBOARDS}) == len(DASHBOARDS)
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"/d/([\w-]+)", text)) <= {dashboard.uid for dashboard in DASHBOARDS}
        dashboard = json.loads(text)
        assert 39 <= dashboard["schemaVersion"] <= 41
        assert dashboard["id"] is None


def test_targets_that_can_be_chosen_are_bounds_of_buckets() -> None:
    """Otherwise the share within a target would be empty."""
    for variable, bounds in ((TTFT_SLO, LATENCIES_S), (TPOT_SLO, TOKEN_GAPS_S)):
        for option in variable["options"]:
            assert float(option["value"]) in bounds
            assert option["value"] == str(float(option["value"])), "as prometheus_client writes the label"


def test_each_alert_has_a_runbook() -> None:
    """Its page has a heading of the alert's name, and no heading of an alert that does not exist."""
    page = ROOT / "docs" / "runbooks.md"
    alerts = [rule for rule in rules() if "alert" in rule]
    for rule in alerts:
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")
    named = {anchor for anchor in anchors_of(page) if anchor.startswith("block")}
    assert named == {rule["alert"].lower() for rule in alerts}
