"""Explanations: with the decision, afterwards, and from a recording."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2, scheduler_pb2
from services.decision_recordings import decisions_in, is_recording, outcomes_in, requests_in
from services.explanations import in_short, table_of
from services.placement.decision_log import DecisionLog
from services.placement.decision_recorder import MAX_PENDING, DecisionRecorder
from services.placement.metrics import SchedulerMetrics
from tests.services.scheduler_server.running import STOP, Client, refused, run, scheduler, statuses, until, until_seen
from tests.services.stub_sidecars import sidecars


async def explained(client: Client, request_id: str) -> common_pb2.Decision:
    """Call Explain."""
    decision: common_pb2.Decision = (
        await client.stub.Explain(scheduler_pb2.ExplainRequest(request_id=request_id))
    ).decision
    return decision


def test_a_decision_is_explained_afterwards() -> None:
    """Candidates, indicators and scores are those of the decision, not the current ones; unknown requests are named."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs) as client:
            stubs[0].e2e_s, stubs[0].load["num_running"] = 1.0, 3
            decision = await client.decide()
            assert not decision.candidates
            stubs[0].e2e_s, stubs[0].load["num_running"] = 9.0, 7
            await client.decide()
            explanation = await explained(client, decision.request_id)
            assert statuses(explanation) == dict.fromkeys("ab", "FORECAST")
            first = next(one for one in explanation.candidates if one.instance_id == "a")
            assert (first.score, first.indicators.num_running) == (1.0, 3)
            assert explanation.why == decision.why
            assert "unknown" in await refused(explained(client, "unknown"), grpc.StatusCode.NOT_FOUND)
            await client.decide(client.request(request_id="dry"), dry_run=True)
            await refused(explained(client, "dry"), grpc.StatusCode.NOT_FOUND)

    run(test)


def test_explanations_include_instances_that_were_not_forecast() -> None:
    """With the reason for which they were left out; or with score and indicators, if indicators were compared."""
    names = [f"i{number:02}" for number in range(12)]

    async def test() -> None:
        async with sidecars(*names) as stubs, scheduler(stubs, policy="jsq") as client:
            for number, stub in enumerate(stubs):
                stub.update_load(num_running=number + 1)
            await until_seen(client, lambda known: [known[name].num_running for name in names] == [*range(1, 13)])
            decision = await client.decide()
            stubs[11].update_load(num_running=99)
            before = await candidates_of(client, decision)
            assert list(before) == names
            assert all(one.fate == common_pb2.CANDIDATE_FATE_INDICATORS for one in before.values())
            assert (before["i11"].score, before["i11"].indicators.num_running) == (12, 12)
            assert 0 < before["i11"].indicators.age_s < 50

            async def left_out(policy: str) -> dict[str, int]:
                """Count the instances that were left out, by reason."""
                seen = (await candidates_of(client, await client.decide(policy=policy))).values()
                assert len(seen) == len(names)
                notes = [one.note for one in seen if one.fate == common_pb2.CANDIDATE_FATE_NOT_SHORTLISTED]
                return {note: notes.count(note) for note in notes}

            assert await left_out("block: k = 2, shortlist = 'jsq'") == {"is not on the shortlist": 10}
            assert await left_out("block: filter = 'num_running < 8', sample = 4, k = 1, shortlist = 'jsq'") == {
                "does not pass the filter": 5, "was not drawn": 3, "is not on the shortlist": 3,
            }  # fmt: skip
            assert await left_out("power_of_two") == {"was not drawn": 10}
            assert await left_out("round_robin") == {}

    run(test)


async def candidates_of(client: Client, decision: common_pb2.Decision) -> dict[str, common_pb2.Candidate]:
    """Call Explain; return the candidates by name, in the order of names."""
    seen = (await explained(client, decision.request_id)).candidates
    return {one.instance_id: one for one in sorted(seen, key=lambda one: str(one.instance_id))}


def test_the_decision_log_is_bounded() -> None:
    """The oldest decisions are dropped, earlier if they have many candidates; the last one is always kept."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs) as client:
            decisions = [await client.decide() for _ in range(3)]
            assert [(await explained(client, one.request_id)).request_id for one in decisions] == ["r1", "r2", "r3"]

    run(test)
    decision_log = DecisionLog(max_decisions=3, max_candidates=5)
    for number, num_candidates in enumerate((1, 1, 1, 1, 4, 9)):
        message = common_pb2.Decision(request_id=str(number), num_candidates=num_candidates)
        decision_log.on_placement(common_pb2.Request(request_id=str(number)), WithForecast(), message)  # type: ignore[arg-type]
        known = [name for name in map(str, range(number + 1)) if name in decision_log._logged]
        assert known == [["0"], ["0", "1"], ["0", "1", "2"], ["1", "2", "3"], ["3", "4"], ["5"]][number]


class WithForecast:
    """The part of a placement that its size depends on."""

    forecast = object()


def test_an_explanation_in_a_header_is_short() -> None:
    """The chosen instance is first, the others follow by score; the header of a large fleet stays small and ASCII."""
    decision = common_pb2.Decision(
        request_id="r", policy="block", why="ünusual", instance=common_pb2.Instance(instance_id="i9")
    )
    for number in range(40):
        decision.candidates.add(
            instance_id=f"i{number}", score=float(number % 10), fate=common_pb2.CANDIDATE_FATE_FORECAST
        )
    decision.candidates.add(instance_id="late", fate=common_pb2.CANDIDATE_FATE_LATE, note="no answer within 50 ms")
    text = in_short(decision)
    assert text.isascii()
    assert len(text) < 2000
    explanation = json.loads(text)
    assert [one["instance"] for one in explanation["candidates"][:3]] == ["i9", "i0", "i10"]
    assert explanation["more_candidates"] == 41 - 16
    lines = list(table_of(decision))
    assert lines[0] == "r -> i9"
    assert len(lines) == 3 + 1 + 41
    assert "no answer within 50 ms" in lines[-1]


def test_a_recording_can_be_replayed(tmp_path: Path) -> None:
    """It has requests with arrivals, tags, prefixes and actual lengths, and decisions with all candidates."""
    path = str(tmp_path / "logs" / "decisions.jsonl")

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, record=path, record_candidates=True) as client:
            tag = common_pb2.Tag(median_tokens=40, spread=0.5)
            first = client.request(output_tokens=None, tag=tag, prefix_hashes=[b"\x01\x02"], prefix_block_tokens=16)
            decision = await client.decide(first)
            await client.release(decision, STOP)
            await client.decide(client.request(output_tokens=None, tag=tag, prompt_tokens=33))
            await client.decide(dry_run=True)

    run(test)
    assert is_recording(path)
    ours, other = requests_in(path)
    assert (ours.request_id, ours.prompt_tokens, ours.output_tokens, ours.arrival_s) == ("r1", 10, 9, 0.0)
    assert ours.prefix_hashes == ("0102",)
    assert (other.prompt_tokens, other.output_tokens) == (33, None)
    assert other.tag is not None
    assert other.arrival_s > 0
    assert [statuses(one) for one in decisions_in(path)] == [dict.fromkeys("ab", "FORECAST")] * 2


def test_several_responses_are_replayed_as_the_engines_requests(tmp_path: Path) -> None:
    """Each with its prompt's length and the mean length of all responses."""
    path = str(tmp_path / "decisions.jsonl")

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, record=path) as client:
            prompts = [common_pb2.Prompt(prompt_tokens=4), common_pb2.Prompt(prompt_tokens=6)]
            decision = await client.decide(client.request(output_tokens=None, prompts=prompts, num_sequences=2))
            await client.release(decision, STOP)

    run(test)
    found = [(one.request_id, one.prompt_tokens, one.output_tokens) for one in requests_in(path)]
    assert found == [("r1/0", 4, 2), ("r1/1", 4, 2), ("r1/2", 6, 2), ("r1/3", 6, 2)]


def test_the_margin_of_deadlines_does_not_change_recorded_arrivals(tmp_path: Path) -> None:
    """Sidecars count deadlines from an earlier time; a request with deadlines is recorded when it arrived."""
    path = str(tmp_path / "decisions.jsonl")

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, record=path, deadline_margin_s=1000.0) as client:
            await client.decide(client.request())
            await client.decide(client.request(slo=common_pb2.Slo(ttft_s=2000.0)))

    run(test)
    assert [one.request_id for one in requests_in(path)] == ["r1", "r2"]


def test_recordings_are_sampled_by_request_and_bounded_in_size(tmp_path: Path) -> None:
    """About a share of the requests is recorded, each with its outcome; old lines are dropped, and no line is cut."""
    path = tmp_path / "decisions.jsonl"

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, record=str(path), record_share=0.5) as client:
            for _ in range(60):
                await client.release(await client.decide(), STOP)

    run(test)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    decided = [line["decision"]["request_id"] for line in lines if line["event"] == "decision"]
    ended = [line["outcome"]["request_id"] for line in lines if line["event"] == "outcome"]
    assert sorted(decided) == sorted(ended)
    assert 10 < len(decided) < 50
    path.unlink()

    async def small() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, record=str(path), record_mib=0.03) as client:
            for _ in range(100):
                await client.release(await client.decide(), STOP)

    run(small)
    older = Path(f"{path}.1")
    assert path.stat().st_size + older.stat().st_size <= 0.03 * 2**20
    assert 0 < len(list(decisions_in(str(path)))) < 100
    assert requests_in(str(path))[-1].request_id == "r100"


def test_no_decision_waits_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines beyond the queue of a slow disk are dropped and counted; the others are written."""
    path, registry, continues = tmp_path / "slow.jsonl", CollectorRegistry(), threading.Event()
    write = DecisionRecorder._write

    def held(recorder: DecisionRecorder, line: bytes) -> None:
        continues.wait()
        write(recorder, line)

    monkeypatch.setattr(DecisionRecorder, "_write", held)
    recorder = DecisionRecorder(str(path), share=1.0, max_bytes=2**30, metrics=SchedulerMetrics(registry))
    for number in range(MAX_PENDING + 10):
        recorder.on_outcome(common_pb2.Outcome(request_id=str(number)))
    lost = recorded(registry, "lost")
    assert lost in (9, 10)  # the writer may have taken one
    continues.set()
    recorder.close()
    assert len(path.read_text().splitlines()) == recorded(registry, "written") == MAX_PENDING + 10 - lost


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_lines_that_a_full_disk_refuses_are_counted() -> None:
    """The recorder continues."""
    registry = CollectorRegistry()
    recorder = DecisionRecorder("/dev/full", share=1.0, max_bytes=2**30, metrics=SchedulerMetrics(registry))
    for _ in range(3):
        recorder.on_outcome(common_pb2.Outcome(request_id="r"))
    recorder.close()
    assert (recorded(registry, "lost"), recorded(registry, "written")) == (3, 0)


def test_a_line_that_a_full_disk_cuts_off_is_removed(tmp_path: Path) -> None:
    """Lines that are written later make a recording that can be read."""
    path, registry = tmp_path / "full.jsonl", CollectorRegistry()
    recorder = DecisionRecorder(str(path), share=1.0, max_bytes=2**30, metrics=SchedulerMetrics(registry))
    recorder._write(b'{"event":"outcome","outcome":{"request_id":"one"}}\n')
    size, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="disk is full"):
            recorder._write(b'{"event":"outcome","outcome":{"request_id":"cut"}}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    recorder._write(b'{"event":"outcome","outcome":{"request_id":"two"}}\n')
    recorder.close()
    assert [one.request_id for one in outcomes_in(str(path))] == ["one", "two"]


@pytest.mark.parametrize("cut", [b'{"event"', b"x" * 200_000])
def test_a_line_that_a_crash_cut_off_is_removed_at_the_next_start(tmp_path: Path, cut: bytes) -> None:
    """However long it is."""
    path, registry = tmp_path / "cut.jsonl", CollectorRegistry()
    path.write_bytes(b'{"event":"outcome","outcome":{"request_id":"one"}}\n' + cut)
    recorder = DecisionRecorder(str(path), share=1.0, max_bytes=2**30, metrics=SchedulerMetrics(registry))
    recorder.on_outcome(common_pb2.Outcome(request_id="two"))
    recorder.close()
    assert [one.request_id for one in outcomes_in(str(path))] == ["one", "two"]


def recorded(registry: CollectorRegistry, result: str) -> float:
    """Return the number of lines with a result."""
    return registry.get_sample_value("block_recorded_lines_total", {"result": result}) or 0.0


def test_a_recording_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """Two schedulers cannot write one file; invalid sizes are named."""

    async def test() -> None:
        path = str(tmp_path / "one.jsonl")
        async with sidecars("a") as stubs, scheduler(stubs, record=path):
            with pytest.raises(ValueError, match="another scheduler"):
                async with scheduler(stubs, record=path):
                    pass
            with pytest.raises(ValueError, match="record: .* cannot be written"):
                async with scheduler(stubs, record=str(tmp_path)):
                    pass
        for settings in ({"record_share": 0.0}, {"record_share": 2.0}, {"record_mib": -1.0}):
            with pytest.raises(ValueError, match=next(iter(settings))):
                async with scheduler(stubs, **settings):
                    pass

    run(test)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense\n{}\n", "1: is not JSON"),
        ('{"event": "other"}\n', "1: event: must be one of"),
        ("[1]\n", "1: event"),
        ('{"event": "decision", "request": {"prompt_tokens": "x"}}\n', "1: "),
        ('{"event": "decision", "request": {"request_id": "r"}, "decision": {}}\n', "prompt_tokens"),
    ],
)
def test_an_invalid_recording_is_refused_by_line(tmp_path: Path, text: str, complaint: str) -> None:
    """The error names the file and the line."""
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        requests_in(str(path))
    assert str(path) in str(caught.value)


def test_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    """The complete lines before it count."""
    path = tmp_path / "cut.jsonl"
    whole = {"event": "decision", "request": {"request_id": "r", "prompt_tokens": 3}, "decision": {"request_id": "r"}}
    path.write_text(json.dumps(whole) + "\n" + json.dumps(whole)[:40])
    assert [one.request_id for one in requests_in(str(path))] == ["r"]


def test_the_policy_is_switched_without_losing_a_request() -> None:
    """Requests in progress keep the old policy, later ones use the new one; an invalid policy changes nothing."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs) as client:

            async def use(policy: str) -> scheduler_pb2.UsePolicyResponse:
                response: scheduler_pb2.UsePolicyResponse = await client.stub.UsePolicy(
                    scheduler_pb2.UsePolicyRequest(policy=policy)
                )
                return response

            stubs[0].hung = asyncio.Event()
            waiting = asyncio.create_task(client.decide())
            await until(lambda: bool(stubs[1].questions))
            response = await use("round_robin")
            assert (response.policy, response.before) == ("round_robin", "block")
            assert (await client.decide()).policy == "round_robin"
            stubs[0].hung.set()
            assert (await waiting).policy == "block"
            assert "policy" in await refused(use("best_of_all"))
            assert "policy" in await refused(use(""))
            assert (await client.decide()).policy == "round_robin"
            await use("lmetric")  # reads reported indicators
            await until(lambda: all(stub.num_watched for stub in stubs))
            assert (await client.decide()).policy == "lmetric"
            listed = await client.stub.ListInstances(scheduler_pb2.ListInstancesRequest())
            assert ([one.instance_id for one in listed.instances], listed.policy) == (["a", "b"], "lmetric")
            assert sum(len(stub.reserved_ids) for stub in stubs) >= 4

    run(test)
