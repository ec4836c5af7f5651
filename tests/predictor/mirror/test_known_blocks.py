"""A mirror with KV events beside an engine that caches prefixes, on a virtual clock: its forecasts are the engine's."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import pytest

from predictor.approximations import OFFLOADED_PREFIXES, PARTLY_KNOWN_PREFIXES, UNKNOWN_PREFIXES
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.kv_events.events import BlocksStored, KvEventBatch
from predictor.kv_events.stream import KvEventStream
from predictor.mirror.events import MetricsScraped, RequestArrived, RequestEnded, TokensReceived
from predictor.mirror.mirror import EngineMirror
from predictor.mirror.models import MirrorOptions
from predictor.mirror.request_correction import SURPLUS_SCRAPES
from predictor.mirror.scraped_metrics import ScrapedMetrics
from predictor.request import RequestFacts
from predictor.reserved_requests import ReportedLengths
from predictor.state import FINISHED, NONE
from services.emulator.content_hashes import ContentHashes
from services.emulator.kv_events import EmulatedKvEvents
from services.emulator.tokens import content_hashes
from services.kv_events.settings import KvEventSettings
from services.kv_events.subscriber import stream_of
from tests.predictor.mirror.tracked_engine import A30, DELAY_S, RECORDS

CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, num_gpu_blocks=97, max_model_len=512)
SIZE = CONFIG.block_size
NUM_REQUESTS, COMPARED, VIEWED = 24, 0.2, 0.2  # the latter are shares of the steps


def mirror_of(config: EngineConfig, stream: KvEventStream | None) -> EngineMirror:
    """Return a mirror of an engine whose settings are known."""
    settings = {
        name: getattr(config, name)
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks", "max_model_len")
    }
    options = MirrorOptions(
        profile=A30, records=RECORDS, engine=settings, residual="conditional_median", speed=1.0, forget_s=30.0,
        max_requests=64,
    )  # fmt: skip
    return EngineMirror(options, ReportedLengths(), 0.0, stream)


@dataclass(slots=True)
class Beside:
    """An engine that runs random requests with common beginnings, and a mirror that sees what a sidecar sees."""

    seed: int
    has_events: bool = True
    draw: random.Random = field(init=False)
    hits: list[tuple[int, int]] = field(default_factory=list)  # of candidates: the engine's, and the mirror's
    errors: list[float] = field(default_factory=list)  # of candidates' ends

    def prompt(self, stems: list[list[int]]) -> list[int]:
        """Draw a prompt that begins as others do."""
        tail = [self.draw.randint(0, 9999) for _ in range(self.draw.randint(1, 80))]
        stem = self.draw.choice(stems)
        return stem[: self.draw.randint(0, len(stem))] + tail

    def run(self) -> None:
        """Run until all requests have ended, and compare forecasts at some of the steps."""
        self.draw = random.Random(self.seed)
        engine = Engine(CONFIG, A30.step_time)
        contents = ContentHashes(engine)
        events = EmulatedKvEvents(engine, contents, None)  # type: ignore[arg-type]  # publishes nothing here
        stream = stream_of(KvEventSettings(endpoint="ipc://unused"))
        mirror = mirror_of(CONFIG, stream if self.has_events else None)
        stems = [[self.draw.randint(0, 9999) for _ in range(200)] for _ in range(4)]
        tokens: dict[str, tuple[list[int], list[int]]] = {}
        arrivals = sorted(round(self.draw.uniform(0.0, 6.0), 6) for _ in range(NUM_REQUESTS))
        for number in range(len(arrivals)):
            prompt, answer = self.prompt(stems), [self.draw.randint(0, 9999) for _ in range(self.draw.randint(2, 80))]
            tokens[f"r{number}"] = prompt, answer
            stems = [*stems[-12:], prompt + answer]
        seen: dict[str, int] = {}
        waiting = list(zip(arrivals, tokens, strict=True))
        head, number = engine.state.engine[0], 0
        for _ in range(20000):
            before = int(head.num_steps)
            next_s = waiting[0][0] if waiting else float("inf")
            head.steady = 0
            engine.drive(engine.state, next_s, before + 1, NONE)
            now_s = float(head.now_s)
            if found := events.take():
                stream.receive(
                    number, KvEventBatch(published_s=now_s, events=tuple(found), digest=str(number).encode())
                )
                number += 1
            self.report(engine, mirror, tokens, seen, now_s + DELAY_S)
            if int(head.num_steps) == before:
                if not waiting:
                    return
                arrival_s, name = waiting.pop(0)
                self.add(engine, contents, events, mirror, name, tokens[name], arrival_s)
            elif self.draw.random() < COMPARED:
                self.compare(engine, mirror, stems, max(now_s + DELAY_S, float(head.now_s)))
        raise AssertionError("the engine does not end")

    def add(
        self, engine: Engine, contents: ContentHashes, events: EmulatedKvEvents, mirror: EngineMirror, name: str,
        tokens: tuple[list[int], list[int]], arrival_s: float,
    ) -> None:  # fmt: skip
        """Let a request arrive at both."""
        prompt, answer = tokens
        hashes = content_hashes([*prompt, *answer], SIZE)
        contents.learn(hashes)
        events.learn([*prompt, *answer])
        engine.add(
            RequestFacts(
                request_id=name, prompt_tokens=len(prompt), output_tokens=len(answer), arrival_s=arrival_s,
                prefix_hashes=hashes,
            )
        )  # fmt: skip
        mirror.record(
            RequestArrived(
                name=name, request_id=name, prompt_tokens=len(prompt), known_tokens=len(answer), max_tokens=200,
                streamed=True, token_ids=tuple(prompt),
            ),
            arrival_s,
        )  # fmt: skip

    def report(
        self, engine: Engine, mirror: EngineMirror, tokens: dict[str, tuple[list[int], list[int]]],
        seen: dict[str, int], at_s: float,
    ) -> None:  # fmt: skip
        """Let the mirror see the tokens that have come."""
        for name in list(engine.slots):
            row = engine.state.requests[engine.slots[name]]
            count = int(row.output_tokens)
            if count > seen.get(name, 0):
                seen[name] = count
                mirror.record(TokensReceived(name=name, num_tokens=count, exact=True), at_s)
            if row.status == FINISHED and seen.get(name) is not None:
                mirror.record(RequestEnded(name=name, num_tokens=count, completed=True), at_s)
                del seen[name]
        engine.forget_finished()
        if self.draw.random() < VIEWED:
            mirror.view(at_s)

    def compare(self, engine: Engine, mirror: EngineMirror, stems: list[list[int]], now_s: float) -> None:
        """Forecast a candidate by both."""
        prompt = self.prompt(stems)
        names = content_hashes(prompt, SIZE)
        candidate = RequestFacts(request_id="new", prompt_tokens=len(prompt), output_tokens=20, prefix_hashes=names)
        (theirs,) = Forecaster(engine).forecast([candidate], now_s, delays=False)
        view = mirror.view(now_s)
        (ours,) = view.forecaster.forecast([candidate], view.now_s, delays=False)
        self.hits.append((theirs.prefix_hit_tokens, ours.prefix_hit_tokens))
        self.errors.append(abs(ours.e2e_s - theirs.e2e_s) / theirs.e2e_s)


@pytest.mark.parametrize("seed", range(2))
def test_its_forecasts_contain_the_hits_and_evictions_of_the_engine(seed: int) -> None:
    """Of candidates at random moments of a full engine; without events it knows none of them."""
    known, unknown = Beside(seed), Beside(seed, has_events=False)
    known.run()
    unknown.run()
    assert len(known.hits) > 20
    equal = np.mean([theirs == ours for theirs, ours in known.hits])
    assert equal >= 0.9, equal
    assert sum(theirs for theirs, _ in known.hits) > 0
    assert sum(ours for _, ours in unknown.hits) == 0
    assert median(known.errors) < 0.05
    assert median(known.errors) < median(unknown.errors)


def named(mirror: EngineMirror) -> tuple[str, ...]:
    """Return the approximations of a mirror's forecasts."""
    return mirror.view(1.0).approximations


def test_what_it_does_not_know_of_the_cache_is_named() -> None:
    """Nothing, a part, or the blocks of off-loading tiers, which are an indicator and hits of their own."""
    stream = stream_of(KvEventSettings(endpoint="ipc://unused"))
    mirror = mirror_of(CONFIG, stream)
    assert UNKNOWN_PREFIXES in named(mirror)
    tokens = tuple(range(3 * SIZE))
    stored = BlocksStored(hashes=(1, 2, 3), parent=None, token_ids=tokens, block_size=SIZE)
    stream.receive(5, KvEventBatch(published_s=0.0, events=(stored,)))
    assert PARTLY_KNOWN_PREFIXES in named(mirror)
    assert mirror.view(1.0).offloaded_hits is None
    copied = replace(stored, medium="CPU", hashes=(2, 3, 4), token_ids=tuple(range(SIZE, 4 * SIZE)), parent=1)
    stream.receive(6, KvEventBatch(published_s=1.0, events=(copied,)))
    view = mirror.view(2.0)
    assert OFFLOADED_PREFIXES in view.approximations
    assert view.counters["num_offloaded_blocks"] == 3
    assert view.offloaded_hits is not None
    assert view.offloaded_hits(content_hashes([*tokens, *range(3 * SIZE, 5 * SIZE)], SIZE)) == 1
    without_cache = mirror_of(CONFIG, None)
    assert UNKNOWN_PREFIXES in named(without_cache)


def test_requests_that_the_engine_no_longer_has_leave_no_names() -> None:
    """Their clients may never end them, or end them later."""
    stream = stream_of(KvEventSettings(endpoint="ipc://unused"))
    mirror = mirror_of(CONFIG, stream)
    mirror.record(MetricsScraped(metrics=ScrapedMetrics(running=0, waiting=0)), 0.5)
    silent = RequestArrived(name="silent", request_id="silent", prompt_tokens=64, token_ids=tuple(range(64)))
    mirror.record(replace(silent, max_tokens=400, streamed=True), 1.0)
    models = mirror._apply_events(2.0)
    assert models.blocks is not None
    assert len(models.blocks.names_of("silent")) == 4
    for scrape in range(SURPLUS_SCRAPES + 1):
        mirror.record(MetricsScraped(metrics=ScrapedMetrics(running=0, waiting=0)), 4.0 + scrape)
        mirror.view(4.0 + scrape)
    assert "silent" not in models.tracker
    mirror.record(RequestEnded(name="silent", num_tokens=0, completed=False), 20.0)
    mirror.view(20.0)
    assert models.blocks.names_of("silent") == []
