"""Explanations of decisions: in a reply's header, and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from protos.block.v1 import common_pb2
from services.http.headers import Headers
from services.rpc.messages import indicators_from

MAX_COLUMNS = 6  # of further indicators that the policy read
MAX_CANDIDATES = 16  # candidates in a header
SHOWN = ("num_running", "num_waiting", "num_reserved", "num_free_blocks", "queued_prefill_tokens")  # in a table


def decision_headers(decision: common_pb2.Decision, *, explain: bool) -> Headers:
    """Write what the reply to a client says about the decision: the forecast, a demotion, all reasons on request."""
    headers: Headers = []
    if decision.HasField("forecast"):
        forecast = decision.forecast
        headers += (
            (b"x-block-predicted-ttft-ms", b"%.1f" % (forecast.ttft_s * 1000)),
            (b"x-block-predicted-e2e-ms", b"%.1f" % (forecast.e2e_s * 1000)),
        )
    if decision.demoted:
        headers.append((b"x-block-demoted", b"true"))
    if explain:
        headers.append((b"x-block-explanation", in_short(decision).encode()))
    return headers


def status_name(candidate: common_pb2.Candidate) -> str:
    """Return a candidate's status in a word."""
    return common_pb2.CandidateFate.Name(candidate.fate).removeprefix("CANDIDATE_FATE_").lower()


def ranked(decision: common_pb2.Decision) -> list[common_pb2.Candidate]:
    """Order candidates: the chosen one first, then by score, then those without a score."""
    chosen = decision.instance.instance_id

    def key(one: common_pb2.Candidate) -> tuple[bool, float, str]:
        return one.instance_id != chosen, one.score if one.HasField("score") else math.inf, one.instance_id

    return sorted(decision.candidates, key=key)


def in_short(decision: common_pb2.Decision) -> str:
    """Write the reasons of a decision as one line of JSON in ASCII, for a header."""
    candidates = ranked(decision)
    summary: dict[str, Any] = {
        "policy": decision.policy,
        "why": decision.why,
        "candidates": [_short(one) for one in candidates[:MAX_CANDIDATES]],
    }
    if decision.forecast.approximations:
        summary["approximations"] = list(decision.forecast.approximations)
    if len(candidates) > MAX_CANDIDATES:
        summary["more_candidates"] = len(candidates) - MAX_CANDIDATES
    return json.dumps(summary, separators=(",", ":"))


def _short(candidate: common_pb2.Candidate) -> dict[str, Any]:
    summary: dict[str, Any] = {"instance": candidate.instance_id, "fate": status_name(candidate)}
    if candidate.HasField("score"):
        summary["score"] = round(candidate.score, 4)
    if candidate.HasField("forecast"):
        summary["ttft_ms"] = _milliseconds(candidate.forecast.ttft_s)
        summary["e2e_ms"] = _milliseconds(candidate.forecast.e2e_s)
    if candidate.HasField("indicators"):
        summary["age_ms"] = _milliseconds(candidate.indicators.age_s)
    if candidate.note:
        summary["note"] = candidate.note
    return summary


def _milliseconds(seconds: float) -> float | None:
    return round(seconds * 1e3, 1) if math.isfinite(seconds) else None


def table_of(decision: common_pb2.Decision) -> Iterator[str]:
    """Write an explanation as a table."""
    yield f"{decision.request_id} -> {decision.instance.instance_id}"
    yield f"  {decision.why}"
    basis = common_pb2.DecisionBasis.Name(decision.basis).removeprefix("DECISION_BASIS_").lower()
    yield f"  by {decision.policy}, on {basis}, in {decision.decision_s * 1e3:.1f} ms, by {decision.scheduler_id}"
    if decision.HasField("tag"):
        yield f"  length {decision.tag.median_tokens:g} tokens, by {decision.tag.estimator or 'the request'}"
    for sentence in decision.forecast.approximations:
        yield f"  approximation: {sentence}"
    read = sorted({name for one in decision.candidates for name in one.indicators.more} - set(SHOWN))[:MAX_COLUMNS]
    shown = (*SHOWN, *read)
    rows = [_row(one, shown) for one in ranked(decision)]
    if rows:
        yield from aligned(("instance", "fate", "score", "ttft", "e2e", "age", *shown, "note"), rows)


def _row(candidate: common_pb2.Candidate, shown: Sequence[str]) -> tuple[str, ...]:
    forecast = candidate.forecast if candidate.HasField("forecast") else None
    values = indicators_from(candidate.indicators) if candidate.HasField("indicators") else {}
    return (
        candidate.instance_id,
        status_name(candidate),
        f"{candidate.score:.4g}" if candidate.HasField("score") else "",
        f"{forecast.ttft_s:.3f} s" if forecast else "",
        f"{forecast.e2e_s:.3f} s" if forecast else "",
        f"{candidate.indicators.age_s * 1e3:.0f} ms" if values else "",
        *(f"{values[name]:g}" if name in values else "" for name in shown),
        candidate.note,
    )


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Align a table: names to the left, numbers to the right."""
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        cells = [
            cell.ljust(width) if column in (0, 1, len(head) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
