"""What has to hold after a chaos run."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.chaos.clients import ClientRecord, RequestEnd
from scripts.chaos.cluster import ChaosCluster
from scripts.chaos.conservation import end_problems, pairing, with_reasons
from scripts.chaos.faults import FaultWindow
from scripts.chaos.machine import SmallDisk, WallClocks
from scripts.chaos.plan import ChaosSettings
from services.cluster.child import Child

KILLED = FaultWindow(kind="kill", part="scheduler-1", start_s=100.0, end_s=103.0)


def ended(end: str = "complete", *, kind: str = "completion", at_s: float = 50.0, **more: str) -> RequestEnd:
    """A request that took two seconds."""
    return RequestEnd(request_id=more.pop("request_id", "r"), kind=kind, end=end, start_s=at_s, end_s=at_s + 2, **more)


def test_ends_that_no_request_may_have_are_problems() -> None:
    """With an example of each; what could not continue is counted, and is none."""
    record = ClientRecord()
    record.add(ended("complete"), "")
    record.add(ended("left"), "")
    record.add(ended("not continued: tools"), "")
    record.add(ended("error event", sent_to="gateway-1"), "data: no_instance")
    (problem,) = end_problems(with_reasons(record.ends, []), record.samples)
    assert problem == "1 requests: error event\n    completion r at gateway-1 after 2.00 s: data: no_instance"


def test_a_stream_of_a_killed_scheduler_could_not_continue() -> None:
    """Only of the scheduler that was killed, and only while the stream was under way."""
    ends = [
        ended("generate: UNAVAILABLE", kind="generate", sent_to="scheduler-1", at_s=99.0),
        ended("generate: UNAVAILABLE", kind="generate", sent_to="scheduler-2", at_s=99.0),
        ended("generate: UNAVAILABLE", kind="generate", sent_to="scheduler-1", at_s=50.0),
        ended("error event", sent_to="gateway-1", at_s=99.0),
    ]
    assert with_reasons(ends, [KILLED]) == {
        "not continued: scheduler kill": 1,
        "generate: UNAVAILABLE": 2,
        "error event": 1,
    }


def cluster_with(folder: Path, *lines: dict[str, object], torn: bytes = b"") -> ChaosCluster:
    """A cluster that does not run, whose scheduler recorded some lines."""
    disk = SmallDisk(folder)
    cluster = ChaosCluster(settings=ChaosSettings(), folder=folder, disk=disk, clocks=WallClocks(folder / "clocks"))
    cluster.children["scheduler-0"] = Child("scheduler-0")
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    cluster.recording("scheduler-0").write_bytes(text[:-1] + torn + b"\n" if torn else text)
    return cluster


def outcome(request_id: str, reason: str = "FINISH_REASON_LENGTH") -> dict[str, object]:
    """A line of a recording."""
    return {"event": "outcome", "outcome": {"request_id": request_id, "finish_reason": reason}}


def test_every_complete_answer_has_an_outcome_or_a_reason(tmp_path: Path) -> None:
    """An answer that continued has that of its last part; others are missing, unless a fault explains it."""
    lines = [outcome("whole"), outcome("moved", "FINISH_REASON_FAILED"), outcome("moved-c1"), outcome("cut")]
    ends = [
        ended(request_id="whole"),
        ended(request_id="moved"),
        ended(request_id="unplaced", policy="next_best"),
        ended(request_id="unlucky", at_s=104.0),
        ended("left", request_id="gone"),
    ]
    counts, problems = pairing(cluster_with(tmp_path, *lines), ends, [KILLED])
    assert problems == []
    assert counts == {"outcome recorded": 2, "placed without a decision": 1, "not recorded: kill scheduler": 1}
    counts, problems = pairing(cluster_with(tmp_path, *lines), [*ends, ended(request_id="lost")], [KILLED])
    assert problems == ["1 complete answers: no outcome in any recording"]


def test_a_failed_outcome_is_none_of_a_complete_answer(tmp_path: Path) -> None:
    """The part that completed it has to be there."""
    counts, problems = pairing(
        cluster_with(tmp_path, outcome("moved", "FINISH_REASON_FAILED")), [ended(request_id="moved")], []
    )
    assert counts == {"missing": 1}
    assert problems


def test_a_recording_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    """As a line that was cut off and continued."""
    cluster = cluster_with(tmp_path, outcome("whole"), torn=b'{"event": "out')
    _, problems = pairing(cluster, [], [])
    assert len(problems) == 1
    assert "cannot be read" in problems[0]
