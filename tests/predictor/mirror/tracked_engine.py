"""An engine for a tracker to follow, on a virtual clock: its state after every step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from predictor.config import EngineConfig
from predictor.editable_engine import ShownRecords
from predictor.engine import Engine
from predictor.profile import load_profile
from predictor.request import RequestFacts
from predictor.state import FINISHED, NONE
from services.engine_state.layout import LIVE, REQUEST

A30 = load_profile("llama-2-7b-a30")
CONFIG = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=256, num_gpu_blocks=129, max_model_len=512, enable_prefix_caching=False
)
ROOMY = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=256, num_gpu_blocks=513, max_model_len=512, enable_prefix_caching=False
)
RECORDS = ShownRecords(live=LIVE, facts=REQUEST)
DELAY_S = 0.001  # from a step's end to the proxy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMoment:
    """An engine just after a step's end and the planning of the next."""

    at_s: float
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    output_tokens: dict[str, int]
    num_free_blocks: int
    num_ended: int


def random_requests(seed: int, num: int = 30, within_s: float = 12.0) -> list[RequestFacts]:
    """Draw requests; their answers end before their limits, so only the engine knows when."""
    draw = random.Random(seed)
    return [
        RequestFacts(
            request_id=f"r{number}",
            prompt_tokens=draw.randint(5, 300),
            output_tokens=draw.randint(2, 100),
            arrival_s=round(draw.uniform(0.0, within_s), 6),
            max_tokens=200,
        )
        for number in range(num)
    ]


def moments_of(config: EngineConfig, requests: list[RequestFacts], pace: float) -> Iterator[EngineMoment]:
    """Run an engine until all requests have ended."""
    engine = Engine(config, A30.step_time, track_blocks=False)
    engine.set_pace(pace)
    for request in requests:
        engine.add(request)
    state = engine.state
    head = state.engine[0]
    while True:
        before = int(head.num_steps)
        head.steady = 0
        engine.drive(state, float("inf"), before + 1, NONE)
        rows = {one.request_id: state.requests[engine.slots[one.request_id]] for one in requests}
        yield EngineMoment(
            at_s=float(head.now_s),
            running=tuple(engine.running()),
            waiting=tuple(engine.waiting()),
            output_tokens={name: int(row.output_tokens) for name, row in rows.items()},
            num_free_blocks=int(head.num_free_blocks),
            num_ended=sum(row.status == FINISHED for row in rows.values()),
        )
        if int(head.num_steps) == before:
            return


def as_seen_by_proxy(request: RequestFacts) -> RequestFacts:
    """Return a request without the length of its answer."""
    return RequestFacts(
        request_id=request.request_id, prompt_tokens=request.prompt_tokens, max_tokens=request.max_tokens,
        arrival_s=request.arrival_s,
    )  # fmt: skip
