"""Targets that read what a mirrored engine replies: SGLang's /server_info, and the metrics of both kinds."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from random import Random

from predictor.config import EngineConfig
from predictor.mirror.engine_kinds import ENGINE_KINDS, UNKNOWN_POOL, kind_of
from predictor.mirror.scraped_metrics import (
    LARGEST,
    ScrapedMetrics,
    parse_adapters,
    parse_max_model_len,
    parse_metrics,
    parse_version,
)
from predictor.mirror.sglang_metrics import SIZES, parse_server_info, parse_sglang_metrics
from scripts.fuzzing.inputs import NUMBERS, RAW, TEXTS, Values, any_json, document, mutated, written
from scripts.fuzzing.parsers import Parser
from scripts.fuzzing.targets import require

VALID_INFO = b'{"page_size": 16, "max_total_num_tokens": 4096, "schedule_policy": "lpm", "max_running_requests": 8}'
MAX_NOTE_CHARS = 256
COUNTS = ("max_running_requests", "max_prefill_tokens", "chunked_prefill_size", "page_size", "max_total_num_tokens")
SWITCHES = (
    "disable_radix_cache",
    "disable_overlap_schedule",
    "enable_priority_scheduling",
    "enable_mixed_chunk",
    "speculative_algorithm",
)
VLLM_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_kv_fetch_by_stage",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prompt_tokens_created",
    "cache_config_info",
    "lora_requests_info",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)
SGLANG_NAMES = (
    "num_running_reqs",
    "num_queue_reqs",
    "token_usage",
    "prompt_tokens_total",
    "cached_tokens_total",
    *SIZES,
)
LABELS = ("", "stage", "position", "max_lora", "num_gpu_blocks", "block_size", "enable_prefix_caching", "priority")
LABEL_VALUES = ("in_progress", "0", "1", "2", "True", "None", "16", "\u0661", "9" * 400, "9" * 4000, "-1", "a b", '\\"')
VALUES = (
    "0",
    "1",
    "2.0",
    "0.5",
    "1e308",
    "1.7e308",
    "-1",
    "-1e308",
    "1e999",
    "NaN",
    "+Inf",
    "e",
    "1-2",
    "..",
    "--",
    "7 12",
)


@asynccontextmanager
async def open_server_info(_: Path) -> AsyncIterator[Parser]:
    """Read what engines say about themselves."""
    optional: Values = {
        **{name: lambda draw: draw.choice(NUMBERS) for name in COUNTS},
        **{name: lambda draw: draw.choice((None, True, False, any_json(draw))) for name in SWITCHES},
        "schedule_policy": lambda draw: draw.choice(("fcfs", "lpm", "dfs-weight", any_json(draw))),
        "schedule_conservativeness": lambda draw: draw.choice((0.3, 1, 10**400, any_json(draw))),
        "internal_states": lambda draw: [{"effective_max_running_requests_per_dp": draw.choice(NUMBERS)}],
        "data": lambda draw: [any_json(draw), {"id": "a", "owned_by": any_json(draw), "max_model_len": any_json(draw)}],
        "version": any_json,
    }

    def draw_info(draw: Random) -> bytes:
        required = {"max_total_num_tokens": lambda one: one.choice((4096, 100_000, *NUMBERS))}
        return written(draw, document(draw, required, optional))

    def read(data: bytes) -> None:
        kind = kind_of(models=data, metrics=data, version=data, server_info=data)
        require(kind in ENGINE_KINDS, "an engine of another kind")
        require(parse_max_model_len(data) != 0, "a model without a length")
        require(all(isinstance(name, str) for name in parse_adapters(data)), "an adapter without a name")
        require(isinstance(parse_version(data), str), "a version that is no text")
        settings, notes = parse_server_info(data)
        require(all(0 < len(note) <= MAX_NOTE_CHARS for note in notes), "an approximation that is no short sentence")
        EngineConfig(**{**UNKNOWN_POOL, "batcher": "sglang", **settings})

    yield Parser(name="server_info", draw=draw_info, read=read, valid=VALID_INFO)


@asynccontextmanager
async def open_metrics(_: Path) -> AsyncIterator[Parser]:
    """Read what engines count; whatever is wrong is skipped."""

    def line(draw: Random) -> str:
        prefix, names = draw.choice((("vllm:", VLLM_NAMES), ("sglang:", SGLANG_NAMES)))
        label = draw.choice(LABELS)
        labels = f'{{{label}="{draw.choice(LABEL_VALUES)}",engine="{draw.choice(TEXTS)}"}}' if label else ""
        value = draw.choice(RAW) if draw.random() < 0.05 else draw.choice(VALUES)
        return f"{prefix}{draw.choice(names)}{labels} {value}"

    def draw_metrics(draw: Random) -> bytes:
        body = "\n".join(line(draw) for _ in range(draw.randrange(1, 12))).encode(errors="surrogatepass")
        return mutated(draw, body) if draw.random() < 0.2 else body

    def read(data: bytes) -> None:
        text, before = data.decode(errors="replace"), ScrapedMetrics()
        for parse in (parse_metrics, parse_sglang_metrics):
            try:
                metrics = parse(text)
            except ValueError as error:
                raise AssertionError("a line that is not skipped") from error
            for one in fields(metrics):
                value = getattr(metrics, one.name)
                if isinstance(value, float):
                    require(math.isfinite(value) and 0 <= value <= LARGEST, f"{one.name} that no engine has")
            for shows in (metrics.shows_restart_since, metrics.repeats, metrics.shows_progress_since):
                shows(before)

    yield Parser(name="metrics", draw=draw_metrics, read=read, valid=b'vllm:num_requests_running{engine="0"} 1.0')
