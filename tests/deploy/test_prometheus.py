"""A real Prometheus scrapes live clusters: every panel's query and every rule has series, but for those listed here."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.dashboards import DASHBOARDS
from scripts.dashboards.known_metrics import NAME
from tests.deploy.scraped_clusters import Scraped, scraped
from tests.services.waiting import run

pytestmark = [pytest.mark.prometheus, pytest.mark.xdist_group("cluster")]

LIMIT_S = 600.0
EACH_FAULT_S = 8.0  # between two parts that are killed
VARIABLES = {
    "$__rate_interval": "30s",
    "$model": ".*",
    "$instance": ".*",
    "$pool": ".*",
    "$ttft_slo": "1.0",
    "$tpot_slo": "0.05",
    "$objective": "0.99",
}
# Metrics that these clusters do not have, and why.
EXCEPTIONS = {
    "block_tagger_encoder_batch": "only of the estimator roberta, whose runtime is an extra",
    "block_tagger_encoder_missed": "only of the estimator roberta, whose runtime is an extra",
    "block_tagger_reloads": "only after a checkpoint file changes; this tagger has none",
    "block_tls": "only with certificates; tests/services/security reads these metrics of servers that have some",
    "block_audit_lines": "only after the audit log could not be written",
}


def queries() -> dict[str, str]:
    """Every query of every panel, with the variables' values, by where it is."""
    found = {}
    for dashboard in DASHBOARDS:
        for row in dashboard.rows:
            for panel in row.panels:
                for number, query in enumerate(panel.queries):
                    expression = query.expression
                    for name, value in VARIABLES.items():
                        expression = expression.replace(name, value)
                    assert "$" not in expression, expression
                    found[f"{dashboard.title} / {panel.title} / {number}"] = expression
    return found


def is_excepted(expression: str) -> bool:
    """Return whether a query needs a metric that these clusters do not have."""
    return any(f"{name}_" in expression for name in EXCEPTIONS)


def has_value(series: list[dict[str, Any]]) -> bool:
    """Return whether any of the series is a number now."""
    return any(not math.isnan(float(one["value"][1])) for one in series)


async def without_value(here: Scraped, expressions: dict[str, str]) -> dict[str, str]:
    """Evaluate expressions; those without any value."""
    return {place: text for place, text in expressions.items() if not has_value(await here.query(text))}


def test_every_query_and_every_rule_has_series(tmp_path: Path) -> None:
    """Parts are killed one after the other meanwhile, so that failures are counted, too."""

    async def test() -> None:
        async with scraped(tmp_path) as here:
            open_queries = queries()
            for rule in await here.rules():
                if rule["type"] == "recording":
                    open_queries[f"rule {rule['name']}"] = rule["name"]
                else:
                    open_queries |= {f"{rule['name']}: {name}": name for name in NAME.findall(rule["query"])}
                    recorded = re.findall(r"\bblock:\w+:\w+", rule["query"])
                    open_queries |= {f"{rule['name']}: {name}": name for name in recorded}
            excepted = {place: text for place, text in open_queries.items() if is_excepted(text)}
            open_queries = {place: text for place, text in open_queries.items() if place not in excepted}
            number, until_s, killed_s = len(open_queries), time.monotonic() + LIMIT_S / 2, time.monotonic()
            while open_queries and time.monotonic() < until_s:
                here.write_targets()  # a part that was restarted has another port of metrics
                open_queries = await without_value(here, open_queries)
                if time.monotonic() - killed_s > EACH_FAULT_S:
                    here.kill_next()
                    killed_s = time.monotonic()
            assert open_queries == {}
            assert number > 150
            assert list(await without_value(here, excepted)) == list(excepted), "an exception that is none"
            for rule in await here.rules():
                assert rule["health"] == "ok", rule
                assert not rule.get("lastError"), rule

    run(test, LIMIT_S)
