"""Engines and requests for property tests: small, and often short of blocks, sequences and token budget."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from predictor.batching import BATCHERS, settled
from predictor.config import BIDIRECTIONAL, FIELD_NAMES, PLAIN, EngineConfig
from predictor.engine import Engine
from predictor.request import CLASSES, RequestFacts, Slo
from predictor.step_time import Curve, Grid, StepTime
from tests.oracle.engine import Part

MAX_STEPS = 400  # with priorities vLLM can preempt without end; runs are compared up to this step

# Sums of these are exact in binary, whatever their order, so that times can be compared with ==.
ONE_SECOND = StepTime(constant_s=1.0, empty_s=1.0)
# The time of a step depends on all its parts and grows with its contexts.
AFFINE = StepTime(
    constant_s=0.0071,
    empty_s=0.0013,
    token_s=0.00037,
    prefill_s=0.0019,
    prefill_token_s=0.00011,
    prefill_qq_s=0.0000131,
    prefill_qkv_s=0.0000057,
    by_sequences=Curve(x=(0.0, 3.0, 9.0), y=(0.0005, 0.0011, 0.0071)),
    decode_base=Curve(x=(1.0, 8.0), y=(0.0021, 0.0093)),
    decode_slope=Curve(x=(1.0, 8.0), y=(0.000031, 0.000011)),
    mixed_base=Curve(x=(1.0, 8.0), y=(0.0043, 0.0104)),
    mixed_slope=Curve(x=(1.0, 8.0), y=(0.000017, 0.000029)),
)
# Attention is interpolated, with slopes that change within a few tokens.
BENT = replace(
    AFFINE,
    decode_wait=Curve(x=(1.0, 4.0), y=(0.3, 0.1)),
    mixed_wait=Curve(x=(1.0, 4.0), y=(0.5, 0.0)),
    decode_attention=Grid(
        x=(1.0, 3.0, 8.0),
        y=(2.0, 5.0, 9.0, 14.0),
        z=((0.0011, 0.0023, 0.0024, 0.0051), (0.0017, 0.0041, 0.0059, 0.0083), (0.0029, 0.0071, 0.0121, 0.0122)),
    ),
    mixed_attention=Grid(x=(1.0, 8.0), y=(0.0, 7.0), z=((0.0013, 0.0037), (0.0041, 0.0193))),
    prefill_attention=Grid(x=(2.0, 6.0, 9.0), y=(0.0, 10.0), z=((0.001, 0.003), (0.002, 0.007), (0.005, 0.011))),
    mixed_overlap=Grid(x=(1.0, 8.0), y=(2.0, 9.0), z=((0.9, 0.4), (0.3, 0.1))),
)

CHUNKING = {
    "vllm_v1": (True, False),
    "sglang": (True, False),
    "vllm_v0": (True, False),
    "sarathi": (True,),
    "generic": (True,),
}
ORDERED = tuple(name for name, batcher in BATCHERS.items() if batcher.orders_queue)
PLANNED = tuple(name for name, batcher in BATCHERS.items() if batcher.plans)
# Values of their options that make a difference.
OPTIONS = {
    "eta": (0.0, 0.25, 0.5, 1.0, 4.0),
    "gamma": (0.0, 0.5, 1.0, 4.0),
    "phi": (0.0, 1.0, 2.0),
    "first_token_weight": (0.25, 1.0, 8.0),
    "from_first_token": (0.0, 1.0),
    "token_budget": (0.0, 1.0, 5.0, 16.0),
    "order": (0.0, 0.0, 1.0, 2.0),
    "eta_max": (0.0, 0.25, 1.0),
    "skip_overdue": (0.0, 1.0),
    "estimator": (1.0, 1.0, 0.0),
    "decode_cost": (0.0, 1.0, 2.0),
    "age_limit": (0.0, 0.5, 2.0, 8.0),
    "age_share": (0.1, 0.5, 1.0),
    "base_batch_size": (1.0, 2.0, 4.0, 128.0),
    "prefill_first": (0.0, 1.0),
    "schedule_conservativeness": (0.1, 1.0, 1.0, 2.0),
    "longest_prefix_match": (0.0, 1.0),
    "max_prefill_tokens": (1.0, 8.0, 64.0, 16384.0),
    "mixed_chunk": (0.0, 0.0, 1.0),
    "init_new_token_ratio": (0.0, 0.0, 0.7),
    "min_new_token_ratio_factor": (0.14, 0.14, 1.0),
    "new_token_ratio_decay_steps": (3.0, 600.0),
    "retract_decode_steps": (0.0, 2.0, 20.0),
    "clip_max_new_tokens": (1.0, 1.0, 4.0, 4096.0),
}
KEEPS_WATERMARK = ("vllm_v0", "vllm_fcfs", "sarathi")
ONLY_FCFS = ("vllm_fcfs", "sglang", "generic")
RESERVES = ("orca", "faster_transformer")


def examples(count: int) -> settings:
    """Run `count` examples, always the same ones; BLOCK_EXAMPLES multiplies them and draws new ones."""
    factor = int(os.environ.get("BLOCK_EXAMPLES", "1"))
    return settings(
        max_examples=count * factor,
        derandomize=factor == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


def affine_seconds(parts: list[Part]) -> float:
    """Compute the time of a step with the coefficients of `AFFINE`; a part of one token is a decode."""
    if not parts:
        return AFFINE.empty_s
    decodes = [before + 1 for tokens, before, _ in parts if tokens == 1]
    prefills = [(tokens, before) for tokens, before, _ in parts if tokens > 1]
    seconds = AFFINE.constant_s + AFFINE.token_s * sum(tokens for tokens, _, _ in parts)
    seconds += straight_lines(AFFINE.by_sequences, sum(samples for _, _, samples in parts))
    for tokens, before in prefills:
        seconds += AFFINE.prefill_token_s * tokens + AFFINE.prefill_qq_s * tokens**2
        seconds += AFFINE.prefill_qkv_s * tokens * before
    seconds += AFFINE.prefill_s if prefills else 0
    if decodes:
        base, slope = AFFINE.decode_base, AFFINE.decode_slope
        if prefills:
            base, slope = AFFINE.mixed_base, AFFINE.mixed_slope
        seconds += straight_lines(base, len(decodes)) + straight_lines(slope, len(decodes)) * sum(decodes)
    return seconds


def straight_lines(curve: Curve, count: int) -> float:
    """Evaluate a curve: constant before the first knot; a final negative slope is not extrapolated."""
    knots = list(zip(curve.x, curve.y, strict=True))
    if count <= knots[0][0] or len(knots) == 1:
        return knots[0][1]
    for (x0, y0), (x1, y1) in pairwise(knots):
        if count <= x1:
            return y0 + (y1 - y0) * (count - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = knots[-2:]
    return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (count - x1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An engine's settings, under vLLM's names, and its requests."""

    engine: dict[str, Any]
    requests: list[dict[str, Any]]

    @property
    def config(self) -> EngineConfig:
        """Return the settings as a configuration of the engine model."""
        return EngineConfig(**self.engine)

    def our_requests(self) -> list[RequestFacts]:
        """Return the requests as the engine model's, by arrival."""
        requests = []
        for spec in sorted(self.requests, key=lambda spec: spec["arrival_s"]):
            fields = {name: value for name, value in spec.items() if name not in ("id", "ttft_slo_s", "tpot_slo_s")}
            targets = spec.get("ttft_slo_s"), spec.get("tpot_slo_s")
            if targets != (None, None):
                fields["slo"] = Slo(ttft_s=targets[0], tpot_s=targets[1])
            fields["prefix_hashes"] = tuple(spec["prefix_hashes"])
            requests.append(RequestFacts(request_id=spec["id"], **fields))
        return requests

    def loaded(self, step_time: StepTime = ONE_SECOND) -> Engine:
        """Return an engine to which all requests have been added."""
        engine = Engine(self.config, step_time)
        for request, rank in zip(self.our_requests(), self.ranks(), strict=True):
            engine.add(request, tie_break=rank)
        return engine

    def ranks(self) -> list[int]:
        """Rank the requests of `our_requests` by id, which breaks ties in vLLM."""
        names = sorted(spec["id"] for spec in self.requests)
        return [names.index(request.request_id) for request in self.our_requests()]


def load_of(batcher: str, *requests: tuple[int, int], **settings: Any) -> Load:
    """Return a load of requests a, b, c, … with these prompt and response tokens, `arrivals`, `priorities` and so on."""
    arrivals = settings.pop("arrivals", [0.0] * len(requests))
    priorities = settings.pop("priorities", [0] * len(requests))
    hashes = settings.pop("hashes", [[]] * len(requests))
    slos = settings.pop("slos", None)
    weights = settings.pop("weights", None)
    clients = settings.pop("clients", None)
    specs = [
        {
            "id": "abcdefgh"[place],
            "arrival_s": float(arrivals[place]),
            "prompt_tokens": prompt,
            "output_tokens": answer,
            "max_tokens": answer,
            "priority": priorities[place],
            "prefix_hashes": list(hashes[place]),
            **({"ttft_slo_s": slos[place][0], "tpot_slo_s": slos[place][1]} if slos else {}),
            **({"weight": weights[place]} if weights else {}),
            **({"client_id": clients[place]} if clients else {}),
        }
        for place, (prompt, answer) in enumerate(requests)
    ]
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 64}
    complete = settled(EngineConfig(batcher=batcher, **{**small, "num_gpu_blocks": 64, **settings}))
    return Load(engine={name: getattr(complete, name) for name in FIELD_NAMES}, requests=specs)


@st.composite
def loads(
    draw: st.DrawFn,
    batcher: str,
    *,
    policy: str | None = None,
    chunked: bool | None = None,
    is_async: bool | None = None,
    ending: bool = False,
    layout: str | None = None,
    tick_s: float = 0.25,
    max_requests: int = 10,
) -> Load:
    """Draw an engine and requests that all fit into it, some of them barely.

    With `ending`, every run ends: no two requests arrive at the same time, which with priorities could preempt each other
    without end, and vLLM v0 has the spare block without which it recomputes a single prompt without end.
    """
    engine = draw(engines(batcher, policy=policy, chunked=chunked, is_async=is_async, layout=layout))
    requests = draw(request_lists(engine, ending=ending, tick_s=tick_s, max_requests=max_requests))
    size = engine["block_size"]
    largest = max(-(-_most_tokens(engine, request) // size) for request in requests)
    slack = draw(st.sampled_from((0, 0, 1, 2, 3, largest, 4 * largest)))
    num_blocks = max(2, largest + slack + BATCHERS[batcher].null_blocks)
    if batcher == "sglang":  # it reserves a page for each request, and one token
        num_blocks = min(num_blocks, 2 * largest) + 2
    if batcher in KEEPS_WATERMARK:
        while num_blocks - int(engine["watermark"] * num_blocks) < largest + ending:
            num_blocks += 1
    return Load(engine={**engine, "num_gpu_blocks": num_blocks}, requests=requests)


def crowded(load: Load) -> Load:
    """Let an SGLang engine admit short prompts with long responses, more than it has room for."""
    options = {**load.engine["batcher_options"], "init_new_token_ratio": 0.0, "clip_max_new_tokens": 1.0}
    size = load.engine["block_size"]
    requests = [
        {
            **spec,
            "prompt_tokens": 1 + spec["prompt_tokens"] % (2 * size),
            "output_tokens": 5 * size,
            "max_tokens": 6 * size,
        }
        for spec in load.requests
    ]
    changed = {"num_gpu_blocks": 12, "max_model_len": 10 * size, "max_num_seqs": 6, "batcher_options": options}
    if not load.engine["enable_chunked_prefill"]:
        changed["max_num_batched_tokens"] = 16 * size
    return Load(engine={**load.engine, **changed}, requests=requests)


def _most_tokens(engine: dict[str, Any], request: dict[str, Any]) -> int:
    answer = request["max_tokens"] if engine["batcher"] in RESERVES else request["output_tokens"]
    return int(min(request["prompt_tokens"] + answer, engine["max_model_len"]))


@st.composite
def engines(
    draw: st.DrawFn,
    batcher: str,
    *,
    policy: str | None,
    chunked: bool | None,
    is_async: bool | None,
    layout: str | None,
) -> dict[str, Any]:
    """Draw an engine's settings without its number of blocks; settings that its batcher ignores have their defaults."""
    block_size = draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    max_num_seqs = draw(st.integers(1, 6))
    max_model_len = block_size * draw(st.integers(3, 12)) + draw(st.integers(0, block_size - 1))
    chunking = draw(st.sampled_from(CHUNKING.get(batcher, (batcher in ORDERED,)))) if chunked is None else chunked
    lowest = max_num_seqs
    if batcher in ("vllm_v0", "vllm_v1", "vllm_fcfs") and not chunking:
        lowest = max(max_num_seqs, max_model_len)
    config = EngineConfig(
        batcher=batcher,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=lowest + draw(st.sampled_from((0, 1, 2, 5, 16, 64))),
        scheduling_policy=policy or draw(st.sampled_from(("fcfs", "priority")[: 1 if batcher in ONLY_FCFS else 2])),
        enable_chunked_prefill=chunking,
    )
    supports_async = "async_scheduling" not in BATCHERS[batcher].fixed
    if batcher in (*ORDERED, "vllm_v1"):
        config = replace(
            config,
            enable_prefix_caching=draw(st.booleans()),
            async_scheduling=supports_async
            and layout in (None, PLAIN)
            and (draw(st.booleans()) if is_async is None else is_async),
            long_prefill_token_threshold=draw(st.sampled_from((0, 0, 1, 3, block_size, max_model_len))),
            scheduler_reserve_full_isl=draw(st.booleans()),
        )
    if batcher == "sglang":
        budget = config.max_num_batched_tokens
        config = replace(
            config,
            enable_prefix_caching=draw(st.booleans()),
            async_scheduling=draw(st.booleans()) if is_async is None else is_async,
            max_num_batched_tokens=-(-budget // block_size) * block_size,
        )
    if batcher == "vllm_v1":
        config = replace(
            config,
            vllm_version=draw(st.sampled_from(("", "0.28.0", "0.31.0", "0.33.0"))),
            long_prefill_token_threshold_adaptive=draw(st.booleans()),
        )
    layouts = (PLAIN,) if config.async_scheduling else BATCHERS[batcher].kv_layouts
    layout = layout or draw(st.sampled_from(layouts))
    if layout != PLAIN:
        config = replace(
            config,
            enable_prefix_caching=False,
            kv_layout=layout,
            kv_bytes_per_token=draw(st.sampled_from((1, 1 << 20))),
            host_link_bytes_per_s=draw(st.sampled_from((2.0**20, 2.0**24, 2.0**30))),
        )
    if layout != BIDIRECTIONAL and batcher in (*ORDERED, "vllm_v1", *KEEPS_WATERMARK):
        config = replace(config, watermark=draw(st.sampled_from((0.0, 0.01, 0.1, 0.3))))
    if BATCHERS[batcher].estimates:
        config = replace(
            config,
            estimator_factor=draw(st.sampled_from((1.0, 1.0, 0.7, 1.3))),
            estimator_noise=draw(st.sampled_from((0.0, 0.0, 0.2))),
            estimator_momentum=draw(st.sampled_from((0.0, 0.0, 0.5, 0.9))),
            estimator_seed=draw(st.integers(0, 2)),
        )
    options = {option.name: draw(st.sampled_from(OPTIONS[option.name])) for option in BATCHERS[batcher].options}
    complete = settled(replace(config, batcher_options=options))
    return {name: getattr(complete, name) for name in FIELD_NAMES}


@st.composite
def request_lists(
    draw: st.DrawFn, engine: dict[str, Any], *, ending: bool, tick_s: float, max_requests: int
) -> list[dict[str, Any]]:
    """Draw requests in bursts and with gaps; some end early, some share prefixes."""
    longest_prompt = draw(st.sampled_from((engine["block_size"] + 1, engine["max_model_len"] // 2, 10**9)))
    longest_answer = draw(st.sampled_from((3, 12, 40)))
    least_pause = 1 if ending else 0
    num_priorities = draw(st.sampled_from((1, 2, 3)))
    num_requests = draw(st.integers(1, max_requests))
    names = draw(st.permutations([f"r{place:02}" for place in range(num_requests)]))
    tick = draw(st.integers(0, 3))
    requests = []
    for name in names:
        prompt = draw(st.integers(1, min(longest_prompt, engine["max_model_len"] - 1)))
        room = engine["max_model_len"] - prompt
        max_tokens = draw(st.integers(1, min(longest_answer, room + 2)))
        output = draw(st.sampled_from((max_tokens, max_tokens, draw(st.integers(1, max_tokens)))))
        requests.append(
            {
                "id": name,
                "arrival_s": tick * tick_s,
                "prompt_tokens": prompt,
                "output_tokens": output,
                "max_tokens": max_tokens,
                "priority": draw(st.integers(0, num_priorities - 1)),
                "prefix_hashes": draw(shared_prefixes(prompt // engine["block_size"])),
                **(draw(service_levels()) if engine["batcher"] in ORDERED else {}),
            }
        )
        tick += least_pause + draw(st.sampled_from((0, 0, 0, 1, 2, 5, 17, 90)))
    return requests


@st.composite
def service_levels(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a request's targets, from impossible to loose ones or none, its weight, class and tenant."""
    return {
        "ttft_slo_s": draw(st.sampled_from((None, 1 / 64, 1 / 8, 1.0, 8.0, 64.0))),
        "tpot_slo_s": draw(st.sampled_from((None, 1 / 64, 1 / 32, 1 / 16, 1 / 4, 2.0, 8.0))),
        "weight": draw(st.sampled_from((0.5, 1.0, 2.0, 3.0))),
        "request_class": draw(st.sampled_from(CLASSES)),
        "client_id": draw(st.sampled_from(("", "x", "y"))),
    }


@st.composite
def shared_prefixes(draw: st.DrawFn, num_blocks: int) -> list[int]:
    """Draw a path in a tree of prompt prefixes; a hash identifies the whole path to it."""
    depth = draw(st.integers(0, num_blocks))
    path, node = [], 0
    for _ in range(min(depth, 6)):
        node = 2 * node + draw(st.integers(1, 2)) if node < 7 else node + 100
        path.append(node)
    return path
