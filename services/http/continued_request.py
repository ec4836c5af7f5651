"""The request for the rest of an answer, as schedulers see it, and the outcome of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from predictor.suggestions import require_choice
from protos.block.v1 import common_pb2
from services.http.stream_continuation import Continuation
from services.settings import Option

BY_TOKEN_IDS, BY_TEXT, OFF = CONTINUE_STREAMS = ("token-ids", "text", "off")
MIN_TTFT_S = 1e-3

ContinueStreams = Annotated[
    str,
    Option(
        "What a stream continues from on another engine after its own has failed: the token ids of the answer so far, "
        "which engines are asked for and clients do not see, or its text, from which another engine may make other "
        "tokens. off: it ends with an error.",
        choices=CONTINUE_STREAMS,
    ),
]
MaxMigrations = Annotated[
    int,
    "Maximum number of times that one stream continues on another engine. One request may be under way on one more "
    "engine that dies; then no other one gets it.",
]
MigrationRatio = Annotated[
    float,
    "Migration budget: streams that continue on another engine per request in the long run; one per request in "
    "progress is free.",
]


def require_continue_streams(continue_streams: str, max_migrations: int, migration_ratio: float) -> None:
    """Refuse settings that do not exist."""
    require_choice("continue_streams", continue_streams, CONTINUE_STREAMS)
    if max_migrations < 1:
        raise ValueError(f"max_migrations: must be at least 1, not {max_migrations}; to continue none, use off")
    if not (math.isfinite(migration_ratio) and migration_ratio >= 0):
        raise ValueError(f"migration_ratio: must be a number from 0 on, not {migration_ratio}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierPart:
    """What the client received of an answer from engines that failed."""

    arrived_s: float  # of the client's request, monotonic
    ttft_s: float | None
    prompt_tokens: int
    num_tokens: int

    def after(self, num_tokens: int) -> EarlierPart:
        """Return the part up to a later failure."""
        return replace(self, num_tokens=num_tokens)

    def whole(self, outcome: common_pb2.Outcome, arrived_s: float) -> common_pb2.Outcome:
        """Return the outcome of the whole answer; `outcome` is that of a request for the rest, which came later."""
        whole = common_pb2.Outcome()
        whole.CopyFrom(outcome)
        whole.prompt_tokens = self.prompt_tokens
        whole.output_tokens += self.num_tokens
        whole.e2e_s += arrived_s - self.arrived_s
        whole.ClearField("tpot_s")
        if self.ttft_s is not None:
            whole.ttft_s = self.ttft_s
            if whole.output_tokens > 1:
                whole.tpot_s = (whole.e2e_s - whole.ttft_s) / (whole.output_tokens - 1)
        return whole


def continued_request(
    first: common_pb2.Request,
    rest: Continuation,
    *,
    number: int,
    elapsed_s: float,
    tag: common_pb2.Tag | None,
) -> common_pb2.Request:
    """Return the request for the rest of an answer, `elapsed_s` after the arrival of the client's request.

    `tag` is the predicted length of the whole answer.
    """
    request = common_pb2.Request()
    request.CopyFrom(first)
    first_id = first.continues_request_id or first.request_id
    request.request_id, request.continues_request_id = f"{first_id}-c{number}", first_id
    request.prompt_tokens = rest.num_sent + (rest.num_prompt or first.prompt_tokens)
    for name in ("tag", "leg", "in_s", "held_s", "max_tokens"):
        request.ClearField(name)
    if first.arrival_unix_s:
        request.arrival_unix_s += elapsed_s
    if rest.max_tokens is not None:
        request.max_tokens = rest.max_tokens
    if first.HasField("min_tokens"):
        request.min_tokens = max(0, first.min_tokens - rest.num_sent)
    if first.HasField("output_tokens"):
        request.output_tokens = max(1, first.output_tokens - rest.num_sent)
    if tag is not None:
        request.expected_output_tokens = max(1, round(tag.median_tokens - rest.num_sent))
    if first.slo.HasField("ttft_s"):
        if rest.num_sent and not first.slo.HasField("tpot_s"):
            request.slo.ClearField("ttft_s")  # which the answer has met, or missed
        else:  # the deadline of the next token
            due_s = first.slo.ttft_s + rest.num_sent * first.slo.tpot_s
            request.slo.ttft_s = max(MIN_TTFT_S, due_s - elapsed_s)
    return request
