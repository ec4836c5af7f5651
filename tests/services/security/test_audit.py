"""The audit log: its lines, its file, and what happens where it cannot be written."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.security.access_metrics import AccessMetrics
from services.security.audit import MAX_REFUSALS_PER_MINUTE, MAX_WAITING, AuditLog, auditing
from tests.services.waiting import run

LINE = {"actor": "alice", "role": "operator", "peer": "10.0.0.9:5", "subject": "jsq", "result": "ok"}
AS_WRITTEN = {"actor": "alice", "role": "operator", "peer": "10.0.0.9:5", "object": "jsq", "result": "ok"}


def lost(registry: CollectorRegistry, reason: str) -> float | None:
    """Read the counter of lost lines."""
    return registry.get_sample_value("block_audit_lines_lost_total", {"reason": reason})


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Read a file of lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_go_to_the_log_and_to_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file has mode 0600, is appended to, and may be renamed meanwhile."""
    path = tmp_path / "audit.jsonl"

    async def test() -> None:
        async with auditing(str(path), AccessMetrics(CollectorRegistry())) as audit:
            audit.record("use_policy", **LINE)
            while not path.read_text():
                await asyncio.sleep(0.01)
            path.rename(tmp_path / "rotated")
            audit.record("explain", **LINE)
        async with auditing(str(path), AccessMetrics(CollectorRegistry())) as audit:
            audit.record("tail", **LINE)

    root = logging.getLogger()
    before, root.level = root.level, logging.ERROR  # on which the audit log does not depend
    try:
        run(test)
    finally:
        root.level = before
    (first,) = lines_of(tmp_path / "rotated")
    assert first.pop("time").endswith("Z")
    assert first == {"event": "use_policy", **AS_WRITTEN}
    assert [line["event"] for line in lines_of(path)] == ["explain", "tail"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("block.audit", "use_policy"), ("block.audit", "explain"), ("block.audit", "tail"),
    ]  # fmt: skip
    assert caplog.records[0].fields == AS_WRITTEN  # type: ignore[attr-defined]


def test_fields_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A caller cannot make a line long."""
    AuditLog().record("explain", **{**LINE, "subject": "x" * 10_000})
    assert len(caplog.records[0].fields["object"]) == 200  # type: ignore[attr-defined]


def test_refusals_are_limited() -> None:
    """Beyond the limit they are counted; other lines are written still."""
    registry, now = CollectorRegistry(), [0.0]
    audit = AuditLog(metrics=AccessMetrics(registry), clock=lambda: now[0])
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    log = logging.getLogger("block.audit")
    log.addHandler(handler)
    try:
        for _ in range(3 * MAX_REFUSALS_PER_MINUTE):
            audit.record("use_policy", **{**LINE, "result": "refused"})
        audit.record("use_policy", **LINE)
        assert len(seen) == MAX_REFUSALS_PER_MINUTE + 1
        assert lost(registry, "rate") == 2 * MAX_REFUSALS_PER_MINUTE
        now[0] = 1.0
        audit.record("use_policy", **{**LINE, "result": "refused"})
        assert len(seen) == MAX_REFUSALS_PER_MINUTE + 2
    finally:
        log.removeHandler(handler)


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the start it is an error; later, lines are counted as lost, one line says so, and the next ones are written."""
    with pytest.raises(ValueError, match="^audit_log: .* cannot be written: No such file"):
        AuditLog(str(tmp_path / "nowhere" / "audit"))
    folder, registry = tmp_path / "logs", CollectorRegistry()
    folder.mkdir()

    async def test() -> None:
        audit = AuditLog(str(folder / "audit"), AccessMetrics(registry))
        (folder / "audit").unlink()
        folder.rmdir()
        for _ in range(3):
            audit.record("tail", **LINE)
            await audit.flush()
        assert lost(registry, "failed") == 3
        assert [record.getMessage() for record in caplog.records].count("audit log cannot be written") == 1
        folder.mkdir()
        audit.record("explain", **LINE)
        await audit.flush()
        assert [line["event"] for line in lines_of(folder / "audit")] == ["explain"]

    run(test)


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    """While nothing is written, lines beyond the bound are counted as lost, and recording never waits."""
    registry = CollectorRegistry()

    async def test() -> None:
        audit = AuditLog(str(tmp_path / "audit"), AccessMetrics(registry))
        for _ in range(MAX_WAITING + 5):
            audit.record("tail", **LINE)
        assert lost(registry, "full") == 5
        await audit.flush()

    run(test)
    assert len(lines_of(tmp_path / "audit")) == MAX_WAITING
