"""Files in the live page."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.live_page import recorded
from services.live_page.recorded import frames_of_file
from tests.services.cli.running import refusal

DECISION = {
    "event": "decision",
    "request": {"request_id": "r1", "model": "m", "prompt_tokens": 9, "waited_s": 0.5, "client_id": "team"},
    "decision": {
        "request_id": "r1", "instance": {"instance_id": "b"}, "policy": "block", "decided_unix_s": 100.5,
        "forecast": {"ttft_s": 0.1, "e2e_s": 2.0}, "num_candidates": 2,
        "candidates": [{"instance_id": "a", "score": 3.0}, {"instance_id": "b", "score": 2.0}],
    },
}  # fmt: skip
OUTCOME = {
    "event": "outcome",
    "outcome": {
        "request_id": "r1",
        "instance_id": "b",
        "finish_reason": "FINISH_REASON_STOP",
        "e2e_s": 2.4,
        "ttft_s": 0.6,
    },
}
CSV = """number,arrival_s,prompt_tokens,fate,instance,finished_s,ttft_s,e2e_s,predicted_ttft_s,predicted_e2e_s
0,1.0,9,finished,engine-0,3.0,0.5,2.0,,2.5
1,1.5,9,shed,,,,,,
2,2.0,9,lost,engine-1,2.5,,,0.1,1.0
"""


def frame_of(path: Path) -> dict[str, Any]:
    """Return the frame of a file."""

    async def read() -> bytes:
        with frames_of_file(str(path)).watched() as reader:
            return await anext(reader.frames())

    frame: dict[str, Any] = json.loads(asyncio.run(read()))
    return frame


def test_a_recording(tmp_path: Path) -> None:
    """Predicted times count from the arrival, as the actual ones do; the decision has its candidates."""
    path = tmp_path / "decisions.jsonl"
    path.write_text(f"{json.dumps(DECISION)}\n{json.dumps(OUTCOME)}\n", encoding="utf-8")
    frame = frame_of(path)
    (one,) = frame["placed"]
    assert (one["id"], one["instance"], one["client"], one["end"]) == ("r1", "b", "team", "stop")
    assert (one["arrived"], one["decided"], one["ended"]) == (100.0, 100.5, 102.4)
    assert (one["predicted_e2e_s"], one["e2e_s"]) == (2.5, 2.4)
    assert frame["recorded"] == {"from": 100.0, "to": 102.4}
    decision = asyncio.run(frames_of_file(str(path)).explain("r1"))
    assert [candidate.instance_id for candidate in decision.candidates] == ["a", "b"]


def test_requests_of_a_simulation(tmp_path: Path) -> None:
    """Rows with an instance become requests, with the way in which they ended."""
    path = tmp_path / "block.csv"
    path.write_text(CSV, encoding="utf-8")
    frame = frame_of(path)
    assert [(one["id"], one["end"], one["ended"]) for one in frame["placed"]] == [
        ("0", "stop", 3.0),
        ("2", "lost", 2.5),
    ]
    assert [one["id"] for one in frame["instances"]] == ["engine-0", "engine-1"]
    assert frame["placed"][0]["predicted_ttft_s"] is None


def test_a_large_file_is_cut_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says how many of the requests it shows."""
    monkeypatch.setattr(recorded, "MAX_REQUESTS", 1)
    path = tmp_path / "block.csv"
    path.write_text(CSV, encoding="utf-8")
    assert frame_of(path)["source"] == "block.csv, the first 1 of 2 requests"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.jsonl", None, "no such file"),
        ("summary.json", '{"policies": []}', "is neither a recording"),
        ("other.csv", "a,b\n1,2\n", "has no column arrival_s or due_s"),
        ("bad.csv", "arrival_s,e2e_s,instance\nsoon,1,a\n", "bad.csv:2: arrival_s: must be a number, not 'soon'"),
        ("wide.csv", f"arrival_s,e2e_s,instance\n0,1,{'x' * 200_000}\n", "cannot be read: field larger"),
        ("empty.csv", "arrival_s,e2e_s,instance\n", "has no decision"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    """The error is one line that says what the file must be."""
    path = tmp_path / name
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert message in refusal("ui", str(path))
