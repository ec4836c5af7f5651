"""Readers of state files: valid ones, those of engines that have ended, and other files."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictor import state
from predictor.engine_from_snapshot import engine_from
from predictor.lengths import Tag
from predictor.profile import constant_profile
from predictor.request import CLASSES, DECODE, LEGS, PREFILL, REAL_TIME, SERVE, RequestFacts, tenant_number
from predictor.snapshot import Memory, ServedClient, Snapshot
from predictor.state import CLIENT, MEMORY_SIZE
from services.engine_state import layout, process, xargs
from services.engine_state.identity import client_id, short_hash
from services.engine_state.reader import Reader
from services.engine_state.snapshot import snapshot_from_view
from services.engine_state.view import BUSY, CORRUPT, ENDED, FOREIGN, MISSING, UnreadableError
from services.engine_state.writer import IS_ORDERED, Writer, short_id
from services.engine_state.writer import tenant_number as written_tenant_number
from tests.predictor.test_request import FACTS, KNOWN_LENGTH
from tests.services.engine_state.files import CONFIG, VTC, busy, counting, writer_at
from tests.services.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of an engine's file."""
    return tmp_path / "shared" / "engine.state"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    """A busy engine's file."""
    writer = busy(writer_at(path))
    yield writer
    writer.close()


def refused(path: Path, patience_s: float = 0.0) -> UnreadableError:
    """Return the error of a reader; its message is one line and names the file."""
    reader = Reader(str(path), patience_s=patience_s)
    with pytest.raises(UnreadableError) as caught:
        reader.read(contents=True)
    reader.close()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def snapshot(path: Path) -> Snapshot:
    """Return the file's snapshot, with contents."""
    return snapshot_from_view(Reader(str(path)).read(contents=True))


def test_what_was_written_is_read(writer: Writer) -> None:
    """Order, counts, times, blocks and contents arrive; the true length, unknown to an engine, does not."""
    seen = snapshot(writer.path)
    assert [item.request.request_id for item in seen.running] == ["cmpl-r1-0-00000001", "cmpl-r0-0-00000000"]
    assert [item.request.request_id for item in seen.waiting] == ["cmpl-r5-0-00000005"]
    first = seen.running[1]
    assert (first.produced_tokens, first.computed_tokens, first.in_flight_tokens) == (3, 43, 1)
    assert (first.block_ids, first.full_blocks, first.request.prefix_hashes) == ((0, 1, 2), 2, (11, 12))
    assert (first.request.prompt_tokens, first.request.max_tokens, first.request.output_tokens) == (40, 30, None)
    assert (first.prefill_tokens, first.first_token_s) == (None, None)
    assert seen.running[0].request.tag == Tag(median_tokens=12.0, spread=0.25)
    assert seen.steps[0].start_s == 4.5
    assert seen.steps[0].scheduled == {"cmpl-r1-0-00000001": 1, "cmpl-r0-0-00000000": 1}
    assert seen.kv_cache is not None
    assert seen.kv_cache.free_block_ids == tuple(range(5, 32))
    assert seen.kv_cache.contents == {0: 11, 1: 12, 3: 2**64 - 1, 9: 77}
    assert seen.config == CONFIG


def test_the_engine_model_continues_from_a_file(writer: Writer) -> None:
    """A snapshot read from a file makes an engine that finishes its requests."""
    engine = engine_from(snapshot(writer.path), constant_profile().step_time)
    engine.advance()
    assert engine.outcome("cmpl-r5-0-00000005").finished_s is not None


def test_tags_of_schedulers_override_those_of_requests(writer: Writer) -> None:
    """Tags are given by the client's id, because the engine's ids are not known outside."""
    view = Reader(str(writer.path)).read()
    seen = snapshot_from_view(view, {"r1": Tag(median_tokens=99), "r5": Tag(median_tokens=5)})
    assert [item.request.tag for item in (*seen.running, *seen.waiting)] == [
        Tag(median_tokens=99), None, Tag(median_tokens=5),
    ]  # fmt: skip


@pytest.mark.parametrize("facts", [FACTS, KNOWN_LENGTH])
def test_all_facts_of_a_request_are_read(path: Path, facts: RequestFacts) -> None:
    """Only a certain length arrives as a tag, because an engine does not know it."""
    writer = writer_at(path)
    tag = facts.tag if isinstance(facts.tag, Tag) else Tag(median_tokens=float(facts.output_tokens or 0))
    assert facts.slo is not None
    writer.put_request(
        3, serial=1, request_id=facts.request_id, arrival_s=facts.arrival_s, prompt_tokens=facts.prompt_tokens,
        max_tokens=facts.max_tokens or 0, min_tokens=facts.min_tokens or 0, priority=facts.priority,
        tag_tokens=tag.median_tokens, tag_spread=tag.spread, ttft_slo_s=facts.slo.ttft_s or np.nan,
        tpot_slo_s=facts.slo.tpot_s or np.nan, request_class=CLASSES.index(facts.request_class), weight=facts.weight,
        client_id=facts.client_id, session_id=facts.session_id, leg=LEGS.index(facts.leg),
        adapter=facts.adapter,
    )  # fmt: skip
    writer.put_hashes(3, np.array([11, 12], np.uint64))
    writer.live["num_hashes"][3] = 2
    writer.waiting[0], writer.state["num_waiting"] = 3, 1
    writer.publish()
    (read,) = snapshot(path).waiting
    seen = replace(facts, model="tiny", output_tokens=None, tag=tag, prefix_hashes=(11, 12), in_s=0.0)
    seen = replace(
        seen, held_s=None, transfer_s=None, waited_s=0.0, length_quantiles=1, encoder_inputs=()
    )  # schedulers know these
    assert read.request == seen
    view = Reader(str(path)).read()
    assert view.requests["tenant"][3] == tenant_number(facts.client_id)


def test_what_a_local_scheduler_remembers_is_read(path: Path) -> None:
    """Clients in their order, numbers, correction and steps; a larger file has them too, and later ones replace them."""
    writer = counting(writer_at(path, VTC, num_clients=4))
    memory = Memory(
        num_steps=7,
        correction=1.25,
        numbers=(10.0, 0.5),
        clients=(
            ServedClient(tenant=tenant_number("a"), weight=1.0, tokens=4000.0, waits=True),
            ServedClient(tenant=tenant_number("b"), weight=2.0, tokens=10.0),
            ServedClient(tenant=0, weight=1.0, tokens=0.0),
        ),
    )
    assert snapshot(path).memory == memory
    writer.grow(64)
    assert snapshot(path).memory == memory
    counting(writer, [("b", 2.0, 11.0, 0)])
    fewer = (ServedClient(tenant=tenant_number("b"), weight=2.0, tokens=11.0),)
    assert snapshot(path).memory == replace(memory, clients=fewer)
    writer.close()


def test_a_local_scheduler_that_remembers_nothing_has_no_memory(path: Path) -> None:
    """Its file has no room for clients, and what else is in it has no effect."""
    writer = counting(writer_at(path), ())
    assert Reader(str(path)).read().clients.size == writer.clients.size == 0
    assert snapshot(path).memory == Memory()
    writer.close()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("correction", 0.0, "memory.correction: must be above 0"),
        ("correction", np.nan, "memory.correction: must be above 0"),
        ("memory", np.inf, "memory.numbers: must be finite"),
        ("weight", np.nan, "memory.weight: must be above 0"),
        ("weight", 0.0, "memory.weight: must be above 0"),
        ("tokens", -1.0, "memory.tokens: must be at least 0"),
        ("tokens", np.inf, "memory.tokens: must be at least 0"),
    ],
)
def test_an_impossible_memory_is_refused(path: Path, name: str, value: float, message: str) -> None:
    """The message names the value."""
    writer = counting(writer_at(path, VTC, num_clients=4))
    (writer.clients if name in layout.CLIENT.names else writer.state)[name][0] = value
    writer.publish()
    with pytest.raises(ValueError, match=message):
        snapshot(path)
    writer.close()


def test_more_clients_than_the_file_has_room_for_are_refused(path: Path) -> None:
    """The file is inconsistent."""
    writer = counting(writer_at(path, VTC, num_clients=4))
    writer.state["num_clients"] = 5
    writer.publish()
    error = refused(path)
    assert error.reason == CORRUPT
    assert "inconsistent in num_clients" in str(error)
    writer.close()


def test_facts_that_are_not_given_have_their_defaults(writer: Writer) -> None:
    """A request whose client gave nothing else has no targets, a weight of 1 and no tenant."""
    request = snapshot(writer.path).running[0].request
    bare = RequestFacts(request_id="r", prompt_tokens=1)
    for name in ("slo", "weight", "request_class", "client_id", "session_id", "min_tokens"):
        assert getattr(request, name) == getattr(bare, name)


def test_impossible_facts_are_left_out(path: Path) -> None:
    """Invalid values in these columns do not make the engine unreadable."""
    writer = writer_at(path)
    writer.put_request(
        0, serial=1, request_id="r", arrival_s=0.0, prompt_tokens=4, max_tokens=4, min_tokens=-3, ttft_slo_s=-1.0,
        tpot_slo_s=np.inf, request_class=9, weight=np.nan, client_id="t" * 100, session_id="\ud800",
    )  # fmt: skip
    writer.waiting[0], writer.state["num_waiting"] = 0, 1
    writer.publish()
    request = snapshot(path).waiting[0].request
    assert (request.slo, request.request_class, request.weight, request.min_tokens) == (None, REAL_TIME, 1.0, None)
    assert request.client_id == short_id("t" * 100, layout.NAME_BYTES).decode()


def test_the_plug_in_and_the_engine_model_agree_on_numbers() -> None:
    """The writer's part needs only numpy, so it repeats definitions of the engine model."""
    assert xargs.CLASSES == CLASSES
    assert [LEGS.index(leg) for leg in (SERVE, PREFILL, DECODE)] == [layout.SERVE, layout.PREFILL, layout.DECODE]
    for name in ("NO_TRANSFER", "TO_FETCH", "FETCHING", "FETCHED", "FETCH_FAILED", "ARRIVED", "LOST"):
        assert getattr(layout, name) == getattr(state, name)
    assert layout.BLOCKS_HELD == state.HELD
    assert layout.MEMORY_SIZE == MEMORY_SIZE
    assert CLIENT.names is not None
    assert layout.CLIENT.names == CLIENT.names[: len(layout.CLIENT)]
    for name in ("", "alice", "\ud800", "x" * 300):
        assert written_tenant_number(name) == tenant_number(name)


@pytest.mark.parametrize(
    ("given", "columns", "errors"),
    [
        ({}, {}, []),
        (
            {
                "block_tag_tokens": 5, "block_tag_spread": 0.5, "block_ttft_s": "0.25", "block_tpot_s": 0.05,
                "block_class": "best-effort", "block_weight": 3, "block_client_id": "alice", "block_session_id": "s",
            },
            {
                "tag_tokens": 5.0, "tag_spread": 0.5, "ttft_slo_s": 0.25, "tpot_slo_s": 0.05, "request_class": 1,
                "weight": 3.0, "client_id": "alice", "session_id": "s",
            },
            [],
        ),
        ({"block_ttft_s": 0, "block_weight": 2}, {"weight": 2.0}, ["block_ttft_s must be above 0, not 0"]),
        ({"block_tag_tokens": "x"}, {}, ["block_tag_tokens must be a number, not 'x'"]),
        ({"block_tag_tokens": True}, {}, ["block_tag_tokens must be a number, not True"]),
        ({"block_class": "urgent"}, {}, ["block_class must be one of real-time, best-effort, not 'urgent'"]),
        ({"block_client_id": 7, "other": 1}, {}, ["block_client_id must be a string, not 7"]),
        ({"block_tpot_s": None, "block_class": [1]}, {}, ["block_class must be one of real-time, best-effort, not [1]"]),
    ],
)  # fmt: skip
def test_facts_are_read_from_vllm_xargs(given: dict[str, Any], columns: dict[str, Any], errors: list[str]) -> None:
    """Valid values fill their columns, errors name the others, and other arguments are ignored."""
    assert xargs.facts_in(given) == (columns, errors)


@pytest.mark.parametrize(("tokens", "spread"), [(-3.0, 0.0), (np.inf, 0.0), (5.0, np.nan), (5.0, 99.0)])
def test_an_impossible_tag_is_ignored(path: Path, tokens: float, spread: float) -> None:
    """A client's tag cannot make the engine unreadable."""
    writer = writer_at(path)
    writer.put_request(
        0, serial=1, request_id="r", arrival_s=-5.0, prompt_tokens=4, max_tokens=4, priority=2**40,
        tag_tokens=tokens, tag_spread=spread,
    )  # fmt: skip
    writer.waiting[0], writer.state["num_waiting"] = 0, 1
    writer.publish()
    assert snapshot(path).waiting[0].request.tag is None


def test_times_are_on_the_engines_clock(path: Path) -> None:
    """An engine at ten times the speed is ten times as far from its origin."""
    writer = writer_at(path)
    writer.state["clock_origin_s"], writer.state["clock_rate"] = time.monotonic() - 5, 10.0
    writer.publish()
    view = Reader(str(path)).read()
    assert 50 <= view.now_s < 150
    assert 0 <= view.age_s < 10
    assert view.clock_rate == 10.0


def test_each_record_is_returned_once(writer: Writer) -> None:
    """Steps and outcomes are returned in order; the oldest are lost where a reader is too late."""
    reader = Reader(str(writer.path))
    assert reader.new_steps()["number"].tolist() == [6]
    assert reader.new_steps().tolist() == []
    (old,) = reader.new_outcomes()
    assert (old["request_id"], old["finished_s"], old["reason"]) == (b"chatcmpl-old-00000009", -1.0, 2)
    for number in range(layout.NUM_STEPS + 40):
        writer.add_step((number, 0.0, 0.125, 1, 1, 1, 0, 9, 9, 0.0, 0.0))
    writer.publish()
    assert reader.new_steps()["number"].tolist() == list(range(40, layout.NUM_STEPS + 40))
    assert reader.new_outcomes().tolist() == []
    assert float(reader.read().state["last_step_s"]) == 0.125


def test_a_request_that_runs_again_has_its_new_blocks(path: Path, writer: Writer) -> None:
    """The new blocks are as many as its former ones."""
    reader = Reader(str(path))
    writer.state["num_running"], writer.state["num_waiting"] = 1, 2
    writer.waiting[:2] = (0, 5)
    writer.live["num_blocks"][0] = 0
    writer.live["num_preemptions"][0] = 1
    writer.publish()
    left = reader.read(contents=True)
    assert left.contents is not None
    assert left.contents.tables[1].tolist() == [0, 1]
    writer.state["num_running"], writer.state["num_waiting"] = 2, 1
    writer.running[:2], writer.waiting[:1] = (1, 0), 5
    writer.live["num_blocks"][0] = 2
    writer.put_blocks(0, np.array([7, 8]))
    writer.publish()
    again = reader.read(contents=True)
    assert again.contents is not None
    assert again.contents.tables[1].tolist() == [7, 8]
    reader.close()


def test_a_reader_continues_with_a_larger_file(writer: Writer) -> None:
    """Requests, tables, hashes and records are kept, and records are not returned twice."""
    reader = Reader(str(writer.path))
    before = snapshot_from_view(reader.read(contents=True))
    reader.new_steps()
    assert not reader.has_news()
    old = writer.path.stat().st_ino
    writer.grow(64)
    assert writer.path.stat().st_ino != old
    assert reader.has_news()
    view = reader.read(contents=True)
    assert not reader.has_news()
    assert (view.generation, len(view.live)) == (2, 64)
    after = snapshot_from_view(view)
    assert (after.running, after.waiting, after.kv_cache) == (before.running, before.waiting, before.kv_cache)
    assert reader.new_steps().tolist() == []
    assert len(reader.new_outcomes()) == 1


def test_a_reader_continues_after_a_restart(path: Path) -> None:
    """A new engine at the same path is read instead of the old one, with all its records."""
    writer = busy(writer_at(path))
    reader = Reader(str(path))
    life = reader.read().life
    assert len(reader.new_steps()) == 1
    writer.close()
    assert refused(path).reason == MISSING
    with pytest.raises(UnreadableError, match="closed") as caught:
        reader.read()
    assert caught.value.reason == ENDED
    writer = writer_at(path)
    for number in range(3):
        writer.add_step((number, 0.0, 1.0, 1, 1, 1, 0, 9, 9, 0.0, 0.0))
    writer.publish()
    assert reader.read().life != life
    assert reader.new_steps()["number"].tolist() == [0, 1, 2]


def test_a_writer_leaves_others_alone(path: Path, writer: Writer) -> None:
    """Two engines cannot write one file, and other files are not replaced."""
    with pytest.raises(ValueError, match="another engine"):
        writer_at(path)
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    precious = path.with_name("precious")
    precious.write_text("data")
    with pytest.raises(ValueError, match="is no state file"):
        writer_at(precious)
    assert precious.read_text() == "data"
    assert writer.path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written completely does not appear at the path."""

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        writer_at(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.skipif(not IS_ORDERED, reason="the file is written by system calls, which fail by themselves")
def test_memory_that_runs_out_later_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the file is written only after memory has been allocated for it."""
    writer = writer_at(path, num_slots=4096)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        writer.publish()
        writer.put_blocks(4095, np.array([7]))
        with pytest.raises(OSError, match="No space"):
            writer.publish()
    writer.put_blocks(4095, np.array([7]))
    writer.publish()
    assert Reader(str(path)).read().state["num_free_blocks"] == 32
    writer.close()


WRITE_FOR_EVER = """
import sys
import time
from tests.services.engine_state.files import busy, writer_at
import numpy as np
writer = busy(writer_at(sys.argv[1]))
print("ready", flush=True)
number = 0
while True:
    number += 1
    for name in ("output_tokens", "computed_tokens", "num_preemptions"):
        writer.live[name][:] = number
    writer.state["num_preemptions"] = writer.state["num_planned"] = number
    writer.blocks["content"][:] = number
    writer.publish()
    next_s = time.perf_counter() + 0.001  # a far faster engine than any; still faster, and no reader would ever get through
    while time.perf_counter() < next_s:
        pass
"""

WRITE_HALF = """
import os, sys, time
from services.engine_state import layout
from tests.services.engine_state.files import busy, writer_at
writer = busy(writer_at(sys.argv[1]))
os.pwrite(writer._descriptor, layout.SEQUENCE.pack(5), layout.SEQUENCE_AT)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other_process(path: Path) -> Iterator[Start]:
    """Start another process that writes a file, and wait until it is ready."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def test_no_mixture_of_publications_is_ever_seen(path: Path, other_process: Start) -> None:
    """While another process writes continuously, every view is of one publication."""
    other_process(WRITE_FOR_EVER)
    reader = Reader(str(path), patience_s=PATIENCE_S)
    last = 0
    for _ in range(1500):
        view = reader.read(contents=True)
        number = int(view.state["num_planned"])
        assert number >= last
        last = number
        if number == 0:
            continue
        assert int(view.state["num_preemptions"]) == number
        for name in ("output_tokens", "computed_tokens", "num_preemptions"):
            assert (view.live[name] == number).all()
        assert view.contents is not None
        assert (view.contents.blocks["content"] == number).all()
    assert last > 0


def test_an_engine_that_was_killed_is_known_to_have_ended(path: Path, other_process: Start) -> None:
    """The kernel releases the lock of a killed writer, so its last state is not used."""
    child = other_process(WRITE_FOR_EVER)
    reader = Reader(str(path), patience_s=PATIENCE_S)
    reader.read()
    child.kill()
    child.wait()
    with pytest.raises(UnreadableError) as caught:
        reader.read()
    assert caught.value.reason == ENDED
    busy(writer_at(path))  # the file of the killed engine is replaced
    assert len(reader.read().running) == 2


def test_a_reader_waits_for_a_writer_that_stops_half_way(path: Path, other_process: Start) -> None:
    """An odd sequence is reported as busy while its writer runs, and as ended afterwards."""
    child = other_process(WRITE_HALF)
    start_s = time.monotonic()
    assert refused(path, patience_s=0.05).reason == BUSY
    assert 0.05 <= time.monotonic() - start_s < PATIENCE_S
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert refused(path).reason == ENDED


def test_a_process_is_recognised_by_when_it_started() -> None:
    """A reused process id is not the process that wrote the file."""
    ticks = process.start_ticks(os.getpid())
    assert ticks is not None
    parent = os.getppid()
    started = process.start_ticks(parent)
    assert started is not None
    assert not process.has_ended(parent, started, process.pid_namespace())
    assert process.has_ended(parent, started + 1, process.pid_namespace())
    assert not process.has_ended(parent, started + 1, 1)  # process ids of another container are unknown
    assert process.start_ticks(2**22 + 1) is None


def held(path: Path, data: bytes) -> int:
    """Write bytes as a state file, locked as by a running writer."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    process.lock_as_writer(descriptor)
    return descriptor


def sample(path: Path) -> bytes:
    """Return the bytes of a valid file."""
    writer = busy(writer_at(path))
    data = path.read_bytes()
    writer.close()
    return data


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", CORRUPT), (b"BLKSTATE", CORRUPT), (b"x" * 5000, FOREIGN), (b"BLKSTATE" + b"\xff" * 5000, FOREIGN)],
)
def test_other_files_are_refused(path: Path, data: bytes, reason: str) -> None:
    """The reason distinguishes a foreign file from a corrupt one."""
    path.parent.mkdir()
    path.write_bytes(data)
    assert refused(path).reason == reason


def test_paths_without_a_file_are_refused(path: Path) -> None:
    """A missing file, a directory, a pipe and a device neither block nor crash a reader."""
    assert refused(path).reason == MISSING
    assert refused(path.parent.parent).reason == FOREIGN
    path.parent.mkdir()
    os.mkfifo(path)
    assert refused(path).reason == FOREIGN
    assert refused(Path("/dev/zero")).reason == FOREIGN
    assert refused(Path("/proc/self/mem")).reason in (FOREIGN, CORRUPT, MISSING)


@pytest.mark.parametrize(
    ("offset", "patch", "reason", "message"),
    [
        (8, struct.pack("<I", 4), FOREIGN, "format version 4, older than the 5 read here: install"),
        (8, struct.pack("<I", 6), FOREIGN, "format version 6, newer than the 5 read here: update"),
        (56, bytes(16), ENDED, "before this machine started"),
        (80, struct.pack("<Q", 1), CORRUPT, "bytes long"),
        (88, struct.pack("<Q", 1 << 40), CORRUPT, "table"),
        (100, struct.pack("<I", 2**32 - 1), CORRUPT, "table"),
        (328, bytes(4), CORRUPT, "header"),
        (512, struct.pack("<Q", 0), BUSY, "half written"),
        (512, struct.pack("<Q", 7), BUSY, "half written"),
        (512, struct.pack("<Q", 2**62), BUSY, "half written"),
        (520, struct.pack("<I", 1), ENDED, "ended"),
        (520, struct.pack("<I", 2), ENDED, "ended"),
        (1024 + 32, struct.pack("<I", 2**32 - 1), CORRUPT, "num_running"),
        (1024 + 40, struct.pack("<I", 3), CORRUPT, "num_in_flight"),
        (1024 + 16, struct.pack("<d", float("nan")), CORRUPT, "clock"),
        (1024 + 24, struct.pack("<d", -1.0), CORRUPT, "clock"),
    ],
)
def test_damage_has_its_own_error(path: Path, offset: int, patch: bytes, reason: str, message: str) -> None:
    """Each kind of damage has its own error."""
    data = bytearray(sample(path))
    data[offset : offset + len(patch)] = patch
    descriptor = held(path, bytes(data))
    error = refused(path)
    os.close(descriptor)
    assert error.reason == reason
    assert message in str(error)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    patches=st.lists(st.tuples(st.integers(0, 6000), st.binary(min_size=1, max_size=12)), max_size=4),
    cut=st.none() | st.integers(0, 400_000),
)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, patches: list[tuple[int, bytes]], cut: int | None) -> None:
    """No damage crashes a reader or delays it for long; the result is a valid snapshot or an error."""
    path = tmp_path / "damaged.state"
    data = bytearray(SAMPLE or _keep_sample(tmp_path))
    for offset, patch in patches:
        data[offset : offset + len(patch)] = patch
    descriptor = held(path, bytes(data[:cut]))
    start_s, start_cpu_s = time.monotonic(), time.thread_time()
    try:
        snapshot_from_view(Reader(str(path), patience_s=0.001).read(contents=True))
    except ValueError as error:
        assert "\n" not in str(error)
    finally:
        os.close(descriptor)
    assert time.thread_time() - start_cpu_s < 2
    assert time.monotonic() - start_s < PATIENCE_S


SAMPLE = b""


def _keep_sample(folder: Path) -> bytes:
    global SAMPLE  # noqa: PLW0603 - made once for all examples
    SAMPLE = sample(folder / "sample.state")
    return SAMPLE


def test_a_file_cut_off_while_it_is_open_is_refused(writer: Writer) -> None:
    """Truncating an open file raises an error, and does not kill the process."""
    reader = Reader(str(writer.path), patience_s=0.0)
    reader.read()
    os.truncate(writer.path, 1500)
    with pytest.raises(UnreadableError) as caught:
        reader.read()
    assert caught.value.reason == CORRUPT


@pytest.mark.parametrize(
    ("engine_id", "expected"),
    [
        ("cmpl-abc-0-1a2b3c4d", "abc"),
        ("cmpl-a-b-0-7-1a2b3c4d", "a-b-0"),
        ("chatcmpl-abc-1a2b3c4d", "abc"),
        ("chatcmpl-x-0-1a2b3c4d", "x-0"),
        ("embd-abc-3-1a2b3c4d", "abc"),
        ("resp_a_b_0a1b2c3d_0-1a2b3c4d", "a_b"),
        ("transcribe-abc-1a2b3c4d", "abc"),
        ("mine", "mine"),
        ("cmpl-abc", "cmpl-abc"),
    ],
)
def test_the_clients_id_is_recovered(engine_id: str, expected: str) -> None:
    """Engines extend the X-Request-Id, which identifies reservations."""
    assert client_id(engine_id) == expected


def test_long_ids_stay_different() -> None:
    """Ids that are too long keep their beginning, and differ where the whole ids differ."""
    assert short_id("x" * 120) == b"x" * 120
    one, other = short_id("x" * 121), short_id("x" * 122)
    assert one != other
    assert len(one) == len(other) == 120
    assert short_id("a\0b") == b"a?b"


def test_no_content_has_the_hash_zero() -> None:
    """0 means that a block has no content."""
    assert short_hash(bytes(16)) == 1
    assert short_hash(bytes([1, 1]) + bytes(14)) == 257
