"""The target that reads files of JSON: journals, rosters, recordings, lists of instances and of requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from protos.block.v1 import provisioner_pb2
from scripts.fuzzing.inputs import any_json, written
from scripts.fuzzing.parsers import Parser, changed_json
from services.decision_recordings import outcomes_in, placed_requests
from services.instances.instance import instances_from_file
from services.provisioner_server.journal import Journal, entries
from services.provisioner_server.roster import Roster
from simulator.codec import requests_from_file


@asynccontextmanager
async def open_journal(folder: Path) -> AsyncIterator[Parser]:
    """Read a provisioner's journal and roster, recordings of decisions, and lists of instances and of requests."""
    journal, roster, recording = folder / "journal", folder / "roster.json", folder / "recording"
    listed, requests = folder / "instances.json", folder / "requests.jsonl"
    action = {
        "action_id": "default-1", "kind": "ACTION_KIND_ADD", "state": "ACTION_STATE_WRITTEN", "num_instances": 1,
        "pool": "default", "why": "load", "numbers": {"a": 1.0},
    }  # fmt: skip
    names = [spec.name for spec in provisioner_pb2.Action.DESCRIPTOR.fields]
    member = {"instance_id": "a", "state": "ready", "engine_url": "http://a:1", "sidecar_address": "a:2"}
    decision = {"event": "decision", "at_unix_s": 1.0, "request": {"request_id": "a"}, "decision": {"request_id": "a"}}
    outcome = {"event": "outcome", "at_unix_s": 2.0, "outcome": {"request_id": "a", "output_tokens": 3}}
    samples: dict[bytes, list[Any]] = {
        b"journal": [{"at_unix_s": 1.0, "action": action}],
        b"roster": [[member]],
        b"recording": [decision, outcome],
        b"instances": [{"instances": [{name: member[name] for name in list(member) if name != "state"}]}],
        b"requests": [{"request_id": "a", "prompt_tokens": 3, "output_tokens": 4, "arrival_s": 0.5}],
    }

    def draw_one(draw: Random) -> bytes:
        kind = draw.choice(list(samples))
        lines = []
        for _ in range(draw.randrange(1, 4)):
            line = changed_json(draw, json.dumps(draw.choice(samples[kind])).encode())
            if kind == b"journal" and draw.random() < 0.3:
                line = written(draw, {"at_unix_s": 1.0, "action": {draw.choice(names): any_json(draw)}})
            lines.append(line.replace(b"\n", b" "))
        end = b"\n" if draw.random() < 0.9 else b""
        return kind + b"\n" + (b"\n".join(lines) if kind not in (b"roster", b"instances") else lines[0]) + end

    def read_journal(data: bytes) -> None:
        journal.write_bytes(data)
        with suppress(ValueError):
            entries(journal)
        read = Journal(journal)
        read.under_way()
        read.next_id("default")

    def read_roster(data: bytes) -> None:
        roster.write_bytes(data)
        list(Roster(roster, folder / "out.json"))

    def read_recording(data: bytes) -> None:
        recording.write_bytes(data)
        with suppress(ValueError):
            list(outcomes_in(str(recording)))
        list(placed_requests(str(recording), block_size=16))

    def read_listed(data: bytes) -> None:
        listed.write_bytes(data)
        instances_from_file(str(listed))

    def read_requests(data: bytes) -> None:
        requests.write_bytes(data)
        requests_from_file(str(requests), block_size=16)

    readers: Mapping[bytes, Callable[[bytes], None]] = {
        b"journal": read_journal, b"roster": read_roster, b"recording": read_recording, b"instances": read_listed,
        b"requests": read_requests,
    }  # fmt: skip

    def read(data: bytes) -> None:
        kind, _, rest = data.partition(b"\n")
        readers.get(kind, read_journal)(rest)

    yield Parser(name="journal", draw=draw_one, read=read, valid=b"roster\n" + json.dumps([member]).encode())
