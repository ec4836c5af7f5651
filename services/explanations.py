"""Decisions explained: in one header, in a table, and as they were recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from protos.block.v1 import common_pb2
from services.rpc.messages import indicators_from

MOST_READ = 6  # columns of what else a policy read
MOST_IN_SHORT = 16  # candidates in a header
SHOWN = ("num_running", "num_waiting", "num_reserved", "num_free_blocks", "queued_prefill_tokens")  # in a table


def fate_of(candidate: common_pb2.Candidate) -> str:
    """Say in a word what became of a candidate."""
    return common_pb2.CandidateFate.Name(candidate.fate).removeprefix("CANDIDATE_FATE_").lower()


def ranked(decision: common_pb2.Decision) -> list[common_pb2.Candidate]:
    """Put the chosen instance first, then by score, then those without one."""
    chosen = decision.instance.instance_id

    def place(one: common_pb2.Candidate) -> tuple[bool, float, str]:
        return one.instance_id != chosen, one.score if one.HasField("score") else math.inf, one.instance_id

    return sorted(decision.candidates, key=place)


def in_short(decision: common_pb2.Decision) -> str:
    """Put into one line of JSON, in ASCII, what a decision rests on: as a header's value."""
    candidates = ranked(decision)
    told: dict[str, Any] = {
        "policy": decision.policy,
        "why": decision.why,
        "candidates": [_short(one) for one in candidates[:MOST_IN_SHORT]],
    }
    if len(candidates) > MOST_IN_SHORT:
        told["more_candidates"] = len(candidates) - MOST_IN_SHORT
    return json.dumps(told, separators=(",", ":"))


def _short(candidate: common_pb2.Candidate) -> dict[str, Any]:
    told: dict[str, Any] = {"instance": candidate.instance_id, "fate": fate_of(candidate)}
    if candidate.HasField("score"):
        told["score"] = round(candidate.score, 4)
    if candidate.HasField("forecast"):
        told["ttft_ms"] = _milliseconds(candidate.forecast.ttft_s)
        told["e2e_ms"] = _milliseconds(candidate.forecast.e2e_s)
    if candidate.HasField("indicators"):
        told["age_ms"] = _milliseconds(candidate.indicators.age_s)
    if candidate.note:
        told["note"] = candidate.note
    return told


def _milliseconds(seconds: float) -> float | None:
    return round(seconds * 1e3, 1) if math.isfinite(seconds) else None


def table_of(decision: common_pb2.Decision) -> Iterator[str]:
    """Write an explanation as lines for people."""
    yield f"{decision.request_id} -> {decision.instance.instance_id}"
    yield f"  {decision.why}"
    basis = common_pb2.DecisionBasis.Name(decision.basis).removeprefix("DECISION_BASIS_").lower()
    yield f"  by {decision.policy}, on {basis}, in {decision.decision_s * 1e3:.1f} ms, by {decision.scheduler_id}"
    if decision.HasField("tag"):
        yield f"  length {decision.tag.median_tokens:g} tokens, says {decision.tag.estimator or 'the request'}"
    read = sorted({name for one in decision.candidates for name in one.indicators.more} - set(SHOWN))[:MOST_READ]
    shown = (*SHOWN, *read)
    rows = [_row(one, shown) for one in ranked(decision)]
    if rows:
        yield from aligned(("instance", "fate", "score", "ttft", "e2e", "age", *shown, "note"), rows)


def _row(candidate: common_pb2.Candidate, shown: Sequence[str]) -> tuple[str, ...]:
    forecast = candidate.forecast if candidate.HasField("forecast") else None
    values = indicators_from(candidate.indicators) if candidate.HasField("indicators") else {}
    return (
        candidate.instance_id,
        fate_of(candidate),
        f"{candidate.score:.4g}" if candidate.HasField("score") else "",
        f"{forecast.ttft_s:.3f} s" if forecast else "",
        f"{forecast.e2e_s:.3f} s" if forecast else "",
        f"{candidate.indicators.age_s * 1e3:.0f} ms" if values else "",
        *(f"{values[name]:g}" if name in values else "" for name in shown),
        candidate.note,
    )


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Set a table in columns: names to the left, all else to the right."""
    whole = [head, *rows]
    widths = [max(len(row[place]) for row in whole) for place in range(len(head))]
    for row in whole:
        cells = [
            cell.ljust(width) if place in (0, 1, len(head) - 1) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
