"""Each alert fires on what it is for, and does not where all is well; by promtool, on series written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.deploy.prometheus_programs import RULE_FILES, RULES, promtool

MINUTES = 420  # of each series; six hours are the longest window of a rule


def steady(value: float) -> str:
    """A gauge that does not change."""
    return f"{value}x{MINUTES}"


def per_minute(increase: float) -> str:
    """A counter that grows evenly."""
    return f"0+{increase}x{MINUTES}"


class Case(NamedTuple):
    """Series by which an alert fires, series by which it does not, and after how many minutes to look."""

    bad: dict[str, str]
    good: dict[str, str]
    minutes: int


def replies(status: str, increase: float) -> dict[str, str]:
    """A counter of replies."""
    return {f'block_gateway_requests_total{{path="/v1/completions",status="{status}"}}': per_minute(increase)}


def targets(missed: float) -> dict[str, str]:
    """Requests with targets, of which a share misses them."""
    labels = '{client="a",tpot_slo="0.05"}'
    return {
        f"block_gateway_slo_requests_total{labels}": per_minute(100),
        f"block_gateway_slo_attained_total{labels}": per_minute(100 - 100 * missed),
    }


def picks(increase: float) -> dict[str, str]:
    """A counter of requests for which a picker chose endpoints."""
    return {'block_picker_picks_total{how="placed"}': per_minute(increase)}


def refused(status: str, reason: str, increase: float) -> dict[str, str]:
    """A counter of requests that a picker answers itself."""
    return {f'block_picker_refused_total{{status="{status}",reason="{reason}"}}': per_minute(increase)}


def decision_times(bound_s: float) -> dict[str, str]:
    """Decisions of a picker within a bound, the half of them within a much lower one."""
    return {
        f'block_picker_decision_seconds_bucket{{le="{le}"}}': per_minute(60 if float(le) >= bound_s else 30)
        for le in ("0.01", "0.2", "0.5", "1", "+Inf")
    }


def first_tokens(bound_s: float) -> dict[str, str]:
    """Requests whose first token comes within a bound."""
    return {
        f'block_gateway_ttft_seconds_bucket{{model="m",le="{le}"}}': per_minute(60 if float(le) >= bound_s else 0)
        for le in ("5", "10", "20", "+Inf")
    }


def errors(bound: float, bias: float, rate: float = 60) -> dict[str, str]:
    """Forecasts whose error is below a bound."""
    labels = 'instance="one",quantity="e2e"'
    buckets = {
        f'block_forecast_error_ratio_bucket{{{labels},le="{le}"}}': per_minute(rate if float(le) >= bound else 0)
        for le in ("0.1", "0.3", "0.5", "+Inf")
    }
    return {
        **buckets,
        f"block_forecast_error_ratio_count{{{labels}}}": per_minute(rate),
        f"block_forecast_bias_ratio{{{labels}}}": steady(bias),
    }


def expiry(days: float) -> dict[str, str]:
    """A certificate that expires so many days after the beginning of the series."""
    return {'block_tls_certificate_not_after_timestamp_seconds{use="cert"}': steady(days * 86400)}


def handshakes(reason: str, increase: float) -> dict[str, str]:
    """A counter of failed handshakes."""
    return {f'block_tls_handshake_failures_total{{side="server",reason="{reason}"}}': per_minute(increase)}


def legs(result: str, increase: float) -> dict[str, str]:
    """A counter of prefill legs."""
    return {f'block_gateway_prefill_legs_total{{result="{result}"}}': per_minute(increase)}


def pool(desired: int, ready: int, maximum: int) -> dict[str, str]:
    """The sizes of a pool, as two provisioners report them."""
    return {
        f'{name}{{pool="p"{more},instance="{provisioner}"}}': steady(value)
        for provisioner in ("a", "b")
        for name, more, value in (
            ("block_desired_instances", "", desired),
            ("block_provisioner_max_instances", "", maximum),
            ("block_provisioner_instances", ',state="ready"', ready),
        )
    }


DECISIONS = {'block_decisions_total{policy="block",basis="forecast"}': per_minute(60)}
CASES = {
    "BlockGatewayErrors": Case(replies("200", 80) | replies("502", 20), replies("200", 99) | replies("502", 1), 15),
    "BlockStreamsBroken": Case(
        replies("200", 60) | {"block_gateway_streams_broken_total": per_minute(6)},
        replies("200", 60) | {"block_gateway_streams_broken_total": per_minute(0.1)},
        15,
    ),
    "BlockTimeToFirstTokenHigh": Case(first_tokens(20), first_tokens(5), 15),
    "BlockSloBurnRateFast": Case(targets(0.2), targets(0.05), 75),
    "BlockSloBurnRateSlow": Case(targets(0.1), targets(0.05), 400),
    "BlockPickerFails": Case(
        picks(60) | refused("503", "rejected-no-endpoints", 6),
        picks(60) | refused("503", "rejected-no-endpoints", 1) | refused("429", "rejected-saturated", 60),
        15,
    ),
    "BlockPickerSlow": Case(decision_times(1), decision_times(0.5), 15),
    "BlockSchedulerDown": Case(
        {'up{job="block-scheduler",instance="s"}': steady(0)}, {'up{job="block-scheduler",instance="s"}': steady(1)}, 5
    ),
    "BlockPartDown": Case(
        {'up{job="block-tagger",instance="t"}': steady(0)}, {'up{job="other",instance="t"}': steady(0)}, 5
    ),
    "BlockPlacedWithoutScheduler": Case(
        {'block_gateway_last_resort_total{how="last_resort"}': per_minute(6)},
        {'block_gateway_last_resort_total{how="last_resort"}': steady(8)},
        15,
    ),
    "BlockEngineDown": Case(
        {'block_engine_up{instance="one"}': steady(0)}, {'block_engine_up{instance="one"}': steady(1)}, 5
    ),
    "BlockSidecarLate": Case(
        DECISIONS | {'block_sidecar_failures_total{instance="one",kind="late"}': per_minute(6)},
        DECISIONS | {'block_sidecar_failures_total{instance="one",kind="late"}': per_minute(1)},
        15,
    ),
    "BlockSidecarCircuitOpen": Case(
        {"block_sidecar_circuits_open": steady(1)}, {"block_sidecar_circuits_open": steady(0)}, 10
    ),
    "BlockForecastError": Case(errors(0.5, 0.1), errors(0.3, 0.1), 45),
    "BlockForecastBias": Case(errors(0.1, -0.3), errors(0.1, -0.1), 45),
    "BlockProfileDoesNotHold": Case(
        {'block_profile_holds{instance="one"}': steady(0)}, {'block_profile_holds{instance="one"}': steady(1)}, 40
    ),
    "BlockLengthDrift": Case(
        {'block_tagger_drift{estimator="knn",model="m"}': steady(1)},
        {'block_tagger_drift{estimator="knn",model="m"}': steady(0)},
        40,
    ),
    "BlockAdmissionQueueLong": Case(
        {"block_held_requests": steady(20), "block_instances": steady(4)},
        {"block_held_requests": steady(10), "block_instances": steady(4)},
        10,
    ),
    "BlockRequestsShed": Case(
        DECISIONS | {'block_scheduler_shed_total{reason="late",class="real_time"}': per_minute(10)},
        DECISIONS | {'block_scheduler_shed_total{reason="late",class="real_time"}': per_minute(1)},
        15,
    ),
    "BlockEnginePreempts": Case(
        {'vllm:num_preemptions_total{instance="one"}': per_minute(120)},
        {'vllm:num_preemptions_total{instance="one"}': per_minute(6)},
        20,
    ),
    "BlockProvisionerAtMaximum": Case(pool(5, 5, 5), pool(4, 4, 5), 20),
    "BlockInstancesMissing": Case(pool(4, 3, 5), pool(4, 4, 5), 20),
    "BlockInstancesGivenUp": Case(
        {"block_instances_given_up_total": f"0x5 1x{MINUTES}"}, {"block_instances_given_up_total": steady(3)}, 10
    ),
    "BlockNoProvisionerLeads": Case(
        {'block_provisioner_leads{instance="a"}': steady(0), 'block_provisioner_leads{instance="b"}': steady(0)},
        {'block_provisioner_leads{instance="a"}': steady(0), 'block_provisioner_leads{instance="b"}': steady(1)},
        5,
    ),
    "BlockPrefillLegsFail": Case(legs("held", 60) | legs("no_blocks", 20), legs("held", 60) | legs("skipped", 20), 15),
    "BlockCertificateExpiresSoon": Case(expiry(13), expiry(20), 90),
    "BlockCertificateExpires": Case(expiry(1.9), expiry(2.5), 10),
    "BlockCertificateNotReloaded": Case(
        {"block_tls_reload_failures_total": per_minute(1)}, {"block_tls_reload_failures_total": steady(3)}, 30
    ),
    "BlockTlsHandshakesFail": Case(handshakes("expired", 30), handshakes("plain_text", 30), 20),
    "BlockApiKeyFileInvalid": Case(
        {"block_api_key_file_valid": steady(0)}, {"block_api_key_file_valid": steady(1)}, 10
    ),
    "BlockAuditLinesLost": Case(
        {'block_audit_lines_lost_total{reason="failed"}': per_minute(1)},
        {'block_audit_lines_lost_total{reason="rate"}': per_minute(1)},
        10,
    ),
}
# A few forecasts say nothing: neither alert fires.
FEW = errors(0.5, -0.5, rate=0.5)


def alerts() -> list[dict[str, Any]]:
    """The alerts that ship."""
    groups = yaml.safe_load((RULES / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_each_alert_has_a_case() -> None:
    """And no case is of an alert that does not exist."""
    assert [rule["alert"] for rule in alerts()] == list(CASES)


@pytest.mark.prometheus
def test_rules_and_configuration_are_valid() -> None:
    """Both are accepted by promtool."""
    promtool("check", "rules", *(str(file) for file in RULE_FILES))
    promtool("check", "config", "--syntax-only", str(RULES / "prometheus.yml"))


@pytest.mark.prometheus
def test_alerts_fire_and_do_not_fire(tmp_path: Path) -> None:
    """All cases in one run; in each quiet one, no alert at all fires."""
    tests = []
    for name, case in CASES.items():
        tests.append(
            checked(case.bad, case.minutes, f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) > bool 0', 1)
        )
        tests.append(checked(case.good, case.minutes, 'count(ALERTS{alertstate="firing"})', None))
    tests.append(checked(FEW, 45, 'count(ALERTS{alertstate="firing"})', None))
    run_cases(tmp_path, tests)


@pytest.mark.prometheus
def test_a_case_that_does_not_hold_is_noticed(tmp_path: Path) -> None:
    """What promtool is asked about alerts can fail."""
    case = CASES["BlockEngineDown"]
    with pytest.raises(AssertionError, match="FAILED"):
        run_cases(tmp_path, [checked(case.bad, case.minutes, 'count(ALERTS{alertstate="firing"})', None)])


def checked(series: dict[str, str], minutes: int, expression: str, value: float | None) -> dict[str, Any]:
    """Write a test of promtool: what an expression is after so many minutes; None where it has no value."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": f"{minutes}m",
                "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
            }
        ],
    }


def run_cases(folder: Path, tests: list[dict[str, Any]]) -> None:
    """Have promtool run tests."""
    file = folder / "tests.yml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(one) for one in RULE_FILES], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", str(file))
