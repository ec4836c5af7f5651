"""The mirror as a state machine: events in, views and reports out."""

from __future__ import annotations

from typing import Any

import pytest

from predictor.engine_view import EndedRequest
from predictor.lengths import Tag
from predictor.mirror.events import (
    EngineRestarted,
    MetricsScraped,
    MirrorEvent,
    MirrorStarted,
    ModelLengthRead,
    PromptCounted,
    RequestArrived,
    RequestEnded,
    RequestShown,
    TokensReceived,
    UnknownRequestsChanged,
)
from predictor.mirror.mirror import EngineMirror, InconsistentModelError, NoModelError
from predictor.mirror.models import MirrorOptions
from predictor.mirror.request_correction import SURPLUS_SCRAPES
from predictor.mirror.scraped_metrics import ScrapedMetrics
from predictor.mirror.unknown_requests import NUM_SCRAPES
from predictor.request import RequestFacts
from predictor.reserved_requests import ReportedLengths
from tests.predictor.mirror.tracked_engine import A30, RECORDS
from tests.python_process import run_python

START_S = 100.0
ENGINE = {"num_gpu_blocks": 257, "max_model_len": 1024, "enable_prefix_caching": False}


def mirror_with(lengths: ReportedLengths | None = None, **changes: Any) -> EngineMirror:
    """Make a mirror whose engine's settings are all given, unless changed."""
    options = {"engine": ENGINE, "speed": 1.0, "forget_s": 30.0, "max_requests": 64, **changes}
    return EngineMirror(
        MirrorOptions(profile=A30, records=RECORDS, residual="conditional_median", **options),
        lengths or ReportedLengths(),
        START_S,
    )


def arrival(name: str, **fields: Any) -> RequestArrived:
    """Make the arrival of a streamed request."""
    values = {"request_id": name, "prompt_tokens": 40, "max_tokens": 20, "streamed": True, **fields}
    return RequestArrived(name=name, **values)


def scraped(**fields: Any) -> MetricsScraped:
    """Make a scrape of an engine's metrics."""
    return MetricsScraped(metrics=ScrapedMetrics(**fields))


def queues(mirror: EngineMirror, at_s: float) -> tuple[int, int]:
    """Return how many requests run and wait in a view."""
    head = mirror.view(at_s).engine.state.engine[0]
    return int(head.num_running), int(head.num_waiting)


def test_a_request_is_followed_from_arrival_to_end() -> None:
    """The view has it while it lasts, and the reports have its times as its client saw them."""
    mirror = mirror_with()
    events: list[tuple[float, MirrorEvent]] = [
        (101.0, arrival("a")),
        (101.5, TokensReceived(name="a", num_tokens=1)),
        (102.0, TokensReceived(name="a", num_tokens=2)),
    ]
    for at_s, event in events:
        mirror.record(event, at_s)
    assert queues(mirror, 102.0) == (1, 0)
    assert [type(report) for report in mirror.take_reports()] == [MirrorStarted, RequestShown]
    mirror.record(RequestEnded(name="a", num_tokens=3, completed=True), 103.0)
    assert queues(mirror, 103.0) == (0, 0)
    assert mirror.take_reports() == [
        EndedRequest(request_id="a", output_tokens=3, ttft_s=0.5, e2e_s=2.0, completed=True)
    ]
    assert mirror.take_reports() == []


def test_events_wait_until_their_time() -> None:
    """A view shows the past only, even if later events are known."""
    mirror = mirror_with()
    mirror.record(arrival("a"), 101.0)
    mirror.record(arrival("b"), 105.0)
    assert sum(queues(mirror, 104.0)) == 1
    assert sum(queues(mirror, 105.0)) == 2


def test_without_settings_there_is_no_model() -> None:
    """Requests wait for the first scrape, which is applied before them."""
    mirror = mirror_with(engine={})
    mirror.record(arrival("a"), 101.0)
    with pytest.raises(NoModelError, match="settings are not known"):
        mirror.view(101.0)
    settings = {"num_gpu_blocks": 257, "block_size": 16}
    mirror.record(ModelLengthRead(max_model_len=512), 101.5)
    mirror.record(scraped(settings=settings, running=1, waiting=0), 102.0)
    assert sum(queues(mirror, 102.0)) == 1
    started, shown = mirror.take_reports()
    assert isinstance(started, MirrorStarted)
    assert (started.config.num_gpu_blocks, started.config.max_model_len) == (257, 512)
    assert shown == RequestShown(request_id="a")


def test_requests_that_end_before_there_is_a_model_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose metrics are never served costs no more memory than the requests on it."""
    monkeypatch.setattr("predictor.mirror.event_backlog.PRUNED_EVENTS", 8)
    mirror = mirror_with(engine={})
    mirror.record(arrival("stays"), 100.5)
    for number in range(200):
        mirror.record(arrival(f"r{number}", token_ids=(1, 2, 3)), 101.0 + number)
        mirror.record(TokensReceived(name=f"r{number}", num_tokens=1), 101.2 + number)
        mirror.record(RequestEnded(name=f"r{number}", num_tokens=2, completed=True), 101.5 + number)
        with pytest.raises(NoModelError):
            mirror.view(101.9 + number)
        assert len(mirror._events) < 30
    mirror.record(scraped(settings={"num_gpu_blocks": 257, "block_size": 16}, running=1, waiting=0), 400.0)
    assert sum(queues(mirror, 400.0)) == 1


def test_a_restarted_engine_has_the_settings_that_it_reports_now() -> None:
    """What it no longer reports, such as speculative decoding, is forgotten; what its other replies say is not."""
    mirror = mirror_with(engine={})
    pool = {"num_gpu_blocks": 257, "block_size": 16}
    mirror.record(ModelLengthRead(max_model_len=512), 100.5)
    speculative = {"speculative_method": "eagle", "num_speculative_tokens": 2}
    mirror.record(scraped(settings={**pool, **speculative}, generation_tokens=50.0), 101.0)
    assert mirror.view(101.0).engine.config.num_speculative_tokens == 2
    mirror.record(scraped(settings=pool, generation_tokens=60.0), 102.0)
    assert mirror.view(102.0).engine.config.num_speculative_tokens == 2
    mirror.record(scraped(settings=pool, generation_tokens=1.0), 103.0)
    config = mirror.view(103.0).engine.config
    assert (config.speculative_method, config.num_speculative_tokens, config.max_model_len) == ("", 0, 512)


def test_invalid_settings_are_named() -> None:
    """The error names the setting, and the mirror starts once the settings are valid."""
    mirror = mirror_with(engine={})
    mirror.record(scraped(settings={"num_gpu_blocks": 0}), 101.0)
    with pytest.raises(NoModelError, match="engine settings: num_gpu_blocks"):
        mirror.view(101.0)
    mirror.record(scraped(settings={"num_gpu_blocks": 257}), 102.0)
    assert queues(mirror, 102.0) == (0, 0)


def test_a_request_that_follows_new_settings_is_kept() -> None:
    """Settings that change between two views discard the model; a request that arrives after them needs a new one."""
    mirror = mirror_with(engine={"num_gpu_blocks": 257})
    mirror.record(arrival("a"), 101.0)
    assert sum(queues(mirror, 101.0)) == 1
    mirror.record(ModelLengthRead(max_model_len=512), 102.0)
    mirror.record(arrival("b"), 103.0)
    mirror.record(TokensReceived(name="b", num_tokens=1), 103.5)
    assert queues(mirror, 104.0) == (1, 0)
    assert mirror.view(104.0).engine.config.max_model_len == 512


def test_a_restart_drops_all_requests() -> None:
    """Counters that went back belong to a new process, which has none of the old requests."""
    mirror = mirror_with()
    mirror.record(scraped(generation_tokens=50, running=0, waiting=0), 101.0)
    mirror.record(arrival("a"), 101.5)
    assert sum(queues(mirror, 102.0)) == 1
    mirror.take_reports()
    mirror.record(scraped(generation_tokens=3, running=0, waiting=0), 103.0)
    assert queues(mirror, 103.0) == (0, 0)
    reports = mirror.take_reports()
    assert [type(report) for report in reports] == [EngineRestarted, MirrorStarted]
    assert reports[0] == EngineRestarted(num_requests=1)


def test_requests_that_bypass_the_proxy_are_reported_when_they_appear_and_disappear() -> None:
    """A few scrapes must show them."""
    mirror = mirror_with()
    for number in range(NUM_SCRAPES):
        mirror.record(scraped(generation_tokens=number, running=2, waiting=0, kv_usage=0.1), 101.0 + number)
    assert queues(mirror, 110.0) == (2, 0)
    assert UnknownRequestsChanged(before=0, now=2) in mirror.take_reports()
    assert mirror.view(110.0).counters["num_unknown"] == 2
    mirror.record(scraped(generation_tokens=9, running=0, waiting=0, kv_usage=0.0), 111.0)
    assert queues(mirror, 111.0) == (0, 0)
    assert mirror.take_reports() == [UnknownRequestsChanged(before=2, now=0)]


def test_requests_that_the_engine_no_longer_has_are_removed() -> None:
    """If scrapes in a row count fewer requests than are known, the ones without events for the longest time go."""
    mirror = mirror_with()
    mirror.record(scraped(running=0, waiting=0), 100.5)
    for name, at_s in (("silent", 101.0), ("loud", 101.1)):
        mirror.record(arrival(name, max_tokens=900), at_s)
    for scrape in range(SURPLUS_SCRAPES):
        at_s = 104.0 + scrape
        assert sum(queues(mirror, at_s)) == 2
        mirror.record(TokensReceived(name="loud", num_tokens=1 + scrape, exact=True), at_s)
        mirror.record(scraped(running=1, waiting=0), at_s + 0.1)
    assert sum(queues(mirror, 112.0)) == 1
    snapshot = mirror.snapshot(112.0)
    assert [one.request.request_id for one in (*snapshot.running, *snapshot.waiting)] == ["loud"]


def test_reserved_requests_are_part_of_the_view_until_they_arrive() -> None:
    """A reservation counts as a pending request, and survives a restart of the model."""
    mirror = mirror_with(engine={"num_gpu_blocks": 257})
    mirror.reserve(RequestFacts(request_id="a", prompt_tokens=30, output_tokens=5), 101.0)
    mirror.reserve(RequestFacts(request_id="b", prompt_tokens=30, output_tokens=5), 101.0)
    before = mirror.view(101.0).serial
    assert mirror.view(101.0).engine.state.engine[0].num_pending == 2
    mirror.release("b")
    assert mirror.view(101.0).serial > before + 1
    mirror.record(ModelLengthRead(max_model_len=512), 102.0)
    assert mirror.view(102.0).engine.state.engine[0].num_pending == 1
    mirror.record(arrival("a"), 103.0)
    view = mirror.view(103.0)
    assert (sum(queues(mirror, 103.0)), view.engine.state.engine[0].num_pending) == (1, 0)
    with pytest.raises(ValueError, match="prompt_tokens"):
        mirror.reserve(RequestFacts(request_id="long", prompt_tokens=4000, output_tokens=5), 103.0)


def test_the_best_known_length_is_used() -> None:
    """The length that a scheduler reported replaces the one that the request carries."""
    lengths = ReportedLengths()
    lengths.add("reported", tokens=None, tag=Tag(median_tokens=15.0))
    mirror = mirror_with(lengths)
    for name in ("reported", "carried", "known"):
        tokens = 7 if name == "known" else None
        mirror.record(arrival(name, max_tokens=None, tag=Tag(median_tokens=9.0), known_tokens=tokens), 101.0)
    snapshot = mirror.snapshot(101.0)
    requests = {one.request.request_id: one.request for one in (*snapshot.running, *snapshot.waiting)}
    assert requests["reported"].tag == Tag(median_tokens=15.0)
    assert requests["carried"].tag == Tag(median_tokens=9.0)
    assert requests["known"].output_tokens == 7


def test_a_counted_prompt_corrects_the_view() -> None:
    """The count of the engine's tokenizer replaces the estimate."""
    mirror = mirror_with()
    mirror.record(arrival("a", prompt_tokens=200), 101.0)
    mirror.record(PromptCounted(name="a", prompt_tokens=30), 101.0)
    assert [one.request.prompt_tokens for one in mirror.snapshot(101.0).running] == [30]


def test_no_progress_makes_the_view_overdue() -> None:
    """Neither clients nor metrics see a token; a sign of either ends that."""
    mirror = mirror_with()
    mirror.record(arrival("a"), 101.0)
    assert mirror.view(111.0).overdue_s > 8
    mirror.record(TokensReceived(name="a", num_tokens=1), 112.0)
    assert mirror.view(112.0).overdue_s == 0


def test_an_inconsistent_model_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next view starts with an idle engine."""
    mirror = mirror_with()
    mirror.record(arrival("a"), 101.0)
    assert sum(queues(mirror, 101.0)) == 1
    assert mirror._models is not None
    with monkeypatch.context() as patch:
        patch.setattr(mirror._models.tracker, "advance", lambda _: (_ for _ in ()).throw(ValueError("steps: wrong")))
        with pytest.raises(InconsistentModelError, match="steps: wrong"):
            mirror.view(102.0)
    assert queues(mirror, 103.0) == (0, 0)


CONNECTED = {**ENGINE, "kv_role": "kv_both", "kv_transfer_base_s": 2.0}


def test_a_decode_leg_is_fetched_in_the_model() -> None:
    """It holds blocks meanwhile, runs after the predicted time, or at its first token, and leaves nothing behind."""
    mirror = mirror_with(engine=CONNECTED)
    mirror.record(arrival("a", leg="decode"), 101.0)
    mirror.record(arrival("b", leg="decode"), 101.0)
    assert queues(mirror, 101.5) == (0, 2)
    engine = mirror.view(101.5).engine
    assert engine.num_blocks - engine.state.engine[0].num_free_blocks == 2 * 3
    mirror.record(TokensReceived(name="b", num_tokens=1), 101.6)  # the transfer was faster
    assert queues(mirror, 101.7) == (1, 1)
    mirror.record(RequestEnded(name="b", num_tokens=1, completed=True), 101.8)
    assert queues(mirror, 103.9)[0] <= 1
    mirror.record(TokensReceived(name="a", num_tokens=1), 106.0)
    assert queues(mirror, 106.0) == (1, 0)
    mirror.record(RequestEnded(name="a", num_tokens=1, completed=True), 106.1)
    assert queues(mirror, 107.0) == (0, 0)
    engine = mirror.view(107.0).engine
    assert engine.state.engine[0].num_free_blocks == engine.num_blocks


def test_a_decode_leg_whose_client_leaves_during_the_fetch_leaves_nothing_behind() -> None:
    """Its slot is used again once the transfer has ended."""
    mirror = mirror_with(engine=CONNECTED)
    for number in range(3):
        at_s = 101.0 + 5.0 * number
        mirror.record(arrival("a", leg="decode"), at_s)
        assert queues(mirror, at_s + 0.1) == (0, 1)
        mirror.record(RequestEnded(name="a", num_tokens=0, completed=False), at_s + 0.2)
        assert queues(mirror, at_s + 0.3) == (0, 0)
        assert queues(mirror, at_s + 4.0) == (0, 0)
    engine = mirror.view(120.0).engine
    assert engine.state.engine[0].num_free_blocks == engine.num_blocks


def test_without_a_connector_a_leg_is_a_whole_request() -> None:
    """An engine that fetches nothing computes the prompt."""
    mirror = mirror_with()
    mirror.record(arrival("a", leg="decode"), 101.0)
    assert queues(mirror, 101.01) == (1, 0)


def test_a_mirror_runs_with_interpreted_kernels() -> None:
    """For a debugger."""
    name = test_a_request_is_followed_from_arrival_to_end.__name__
    run_python("-c", f"from {__name__} import {name}; {name}()", interpreted=True)
