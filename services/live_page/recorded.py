"""What the live page shows of a file: a scheduler's recording, or the requests of a simulation or a load test."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from protos.block.v1 import common_pb2
from services.decision_recordings import is_recording, outcomes_in, placements_in
from services.placement.tail_records import Record, ended_record, number, placed_record
from services.rpc.errors import UnknownNameError
from simulator.progress import followed

MAX_REQUESTS = 20_000  # that a page gets: the first ones
COLUMNS = ("arrival_s", "due_s"), ("e2e_s",), ("instance",)  # one of each, in a file of requests
ENDS = {"finished": "stop", "": "stop", "unfinished": None}  # by fate or failure; others are ends themselves


class RecordedFrames:
    """One frame with everything, and the decisions that the file has."""

    def __init__(self, name: str, records: Mapping[str, Record], decisions: Mapping[str, common_pb2.Decision]) -> None:
        """Show requests by id, and explain decisions by request id; ValueError where there is no request."""
        if not records:
            raise ValueError(f"{name}: has no decision")
        shown = list(records.values())[:MAX_REQUESTS]
        self._decisions = decisions
        names = {one[leg] for one in shown for leg in ("instance", "prefill") if one.get(leg)}
        ends = [one.get("ended") or one["arrived"] + (one.get("predicted_e2e_s") or 0.0) for one in shown]
        start_s = min(one["arrived"] for one in shown)
        left_out = f", the first {MAX_REQUESTS} of {len(records)} requests" if len(records) > len(shown) else ""
        self._frame = json.dumps(
            {
                "reset": True,
                "now": time.time(),
                "source": f"{name}{left_out}",
                "recorded": {"from": start_s, "to": max(*ends, start_s + 1.0)},
                "instances": [{"id": one, "state": "ready"} for one in sorted(names)],
                "placed": shown,
            },
            allow_nan=False,
        ).encode()

    @contextmanager
    def watched(self) -> Iterator[RecordedFrames]:
        """Watch while the block runs."""
        yield self

    async def frames(self) -> AsyncGenerator[bytes]:
        """Yield the frame."""
        yield self._frame

    async def explain(self, request_id: str) -> common_pb2.Decision:
        """Return the last decision about a request."""
        if request_id not in self._decisions:
            raise UnknownNameError(f"request_id: the file has no decision about {request_id!r}")
        return self._decisions[request_id]


def frames_of_file(path: str) -> RecordedFrames:
    """Read a recording (JSON lines), or a file of requests (CSV); ValueError for any other file."""
    name = Path(path).name
    if is_recording(path):
        return _recording(path, name)
    if Path(path).suffix == ".csv":
        return RecordedFrames(name, _requests(path), {})
    if not Path(path).exists():
        raise ValueError(f"{path}: no such file")
    raise ValueError(
        f"{path}: is neither a recording (block serve scheduler --record) nor a CSV of requests (block simulate --csv, "
        "block bench --csv)"
    )


def _recording(path: str, name: str) -> RecordedFrames:
    records: dict[str, Record] = {}
    decisions: dict[str, common_pb2.Decision] = {}
    for request, decision in placements_in(path):
        records.pop(decision.request_id, None)
        records[decision.request_id] = placed_record(request, decision, request.waited_s)
        decisions[decision.request_id] = decision
    for outcome in outcomes_in(path):
        record = records.get(outcome.request_id)
        if record is not None:
            record.update(ended_record(outcome))
            if record["ended"] is None:
                record["ended"] = record["arrived"] + (record["e2e_s"] or 0.0)
    return RecordedFrames(name, records, decisions)


def _requests(path: str) -> dict[str, Record]:
    """Read the requests of a CSV, by id."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            num_bytes = Path(path).stat().st_size
            rows = csv.DictReader(followed(file, f"reading {Path(path).name}", num_bytes, size=len))
            for names in COLUMNS:
                if not set(names) & set(rows.fieldnames or ()):
                    raise ValueError(f"{path}: has no column {' or '.join(names)}")
            records = [_record(f"{path}:{line}", row) for line, row in enumerate(rows, 2) if row["instance"]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    return {record["id"]: record for record in sorted(records, key=lambda one: one["arrived"])}


def _record(place: str, row: Mapping[str, str]) -> Record:
    def value(*names: str) -> float | None:
        for name in names:
            if text := row.get(name) or "":
                try:
                    return number(float(text))
                except ValueError:
                    raise ValueError(f"{place}: {name}: must be a number, not {text[:40]!r}") from None
        return None

    arrived_s, e2e_s = value("arrival_s", "due_s"), value("e2e_s")
    if arrived_s is None:
        raise ValueError(f"{place}: arrival_s: is missing")
    fate = row.get("fate", row.get("failure")) or ""
    end = ENDS.get(fate, fate)
    record: Record = {
        "id": row.get("request_id") or row.get("number") or place.rpartition(":")[2],
        "instance": row["instance"],
        "arrived": arrived_s,
        "decided": arrived_s,
        "prompt_tokens": value("prompt_tokens"),
        "tag_tokens": value("tag_median_tokens"),
        "predicted_ttft_s": value("predicted_ttft_s"),
        "predicted_e2e_s": value("predicted_e2e_s"),
        "ttft_s": value("ttft_s"),
        "e2e_s": e2e_s,
    }
    if row.get("prefill_instance"):
        record["prefill"] = row["prefill_instance"]
    ended_s = value("finished_s") or (None if e2e_s is None else arrived_s + e2e_s)
    if end is not None and ended_s is not None and math.isfinite(ended_s):
        record |= {"end": end, "ended": ended_s}
    return record
