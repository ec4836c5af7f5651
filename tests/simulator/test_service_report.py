"""What each class, mix entry and tenant got, against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.gain import ServedRequests, ServiceLevels
from simulator.service_report import attained_table, service_report, service_table

NAN = np.nan


def served() -> ServedRequests:
    """Three real-time requests with targets, one of them late and one shed; two of best effort without, one demoted."""
    return ServedRequests(
        levels=ServiceLevels(
            ttft_slo_s=np.array([1.0, 1.0, 1.0, NAN, NAN]), tpot_slo_s=np.full(5, NAN), weight=np.ones(5),
            priority=np.zeros(5, np.int64), request_class=np.array([0, 0, 0, 1, 1]),
            mix_entry=np.array(["chat", "chat", "chat", "batch", "late"]),
        ),
        prompt_tokens=np.full(5, 10), output_tokens=np.full(5, 2),
        ttft_s=np.array([0.5, 3.0, NAN, 7.0, 9.0]), tpot_s=np.full(5, NAN),
        tokens_on_time=np.array([1, 0, 0, -1, -1]),
        finished=np.array([True, True, False, True, False]),
        shed=np.array([False, False, True, False, False]), demoted=np.array([False, False, False, False, True]),
    )  # fmt: skip


E2E_S = np.array([1.0, 4.0, NAN, 8.0, NAN])


def test_every_group_is_reported() -> None:
    """Also one without targets: what was served, shed and demoted, and when."""
    report = service_report(served(), E2E_S)
    best_effort, real_time = report["by_class"]["best-effort"], report["by_class"]["real-time"]
    assert best_effort == {
        "num_requests": 2, "num_served": 1, "num_shed": 0, "num_demoted": 1,
        "ttft_s": {"p50": 8.0, "p99": pytest.approx(8.98)}, "e2e_s": {"p50": 8.0, "p99": 8.0},
        "num_with_targets": 0, "slo_attained": None, "deadline_attained": None,
    }  # fmt: skip
    assert (real_time["num_requests"], real_time["num_served"], real_time["num_shed"]) == (3, 2, 1)
    assert real_time["deadline_attained"] == pytest.approx(1 / 3)
    assert real_time["e2e_s"]["p50"] == 2.5
    assert set(report["by_mix"]) == {"chat", "batch", "late"}
    assert report["by_mix"]["late"]["e2e_s"] == {"p50": None, "p99": None}
    assert "by_tenant" not in report


def test_the_table_has_a_row_for_each() -> None:
    """Columns that are zero everywhere are left out, and what was attained is shown of those with targets only."""
    report = service_report(served(), E2E_S)
    _, titles, *rows = service_table(report)
    assert titles.split()[:4] == ["requests", "served", "shed", "demoted"]
    assert [row.split()[:3] for row in rows] == [
        ["class", "best-effort", "2"], ["class", "real-time", "3"], ["mix", "batch", "1"], ["mix", "chat", "3"],
        ["mix", "late", "1"],
    ]  # fmt: skip
    assert rows[0].split()[-2:] == ["-", "-"]
    assert not any("best-effort" in line for line in attained_table(report))
    alone = served().chosen(np.array([3]))
    assert list(service_table(service_report(alone, E2E_S[3:4]))) == []
    assert list(attained_table(service_report(alone, E2E_S[3:4]))) == []
