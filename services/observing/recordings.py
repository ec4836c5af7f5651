"""Observes an instance by a recording of schedulers and gateways: what was sent to it, and how that ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from predictor.config import EngineConfig
from predictor.profile import Profile
from predictor.request import RequestFacts
from predictor.suggestions import require_choice
from protos.block.v1 import common_pb2
from services.decision_recordings import placed_requests
from services.observing.traffic import window_of_client
from simulator.accuracy.window import ABORT, ERROR, LENGTH, STOP, ObservedRequest, ObservedWindow

ENDED = {
    common_pb2.FINISH_REASON_STOP: STOP,
    common_pb2.FINISH_REASON_LENGTH: LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: ABORT,
}


def window_of_recording(
    path: str, instance: str, config: EngineConfig, *, profile: Profile | str = ""
) -> ObservedWindow:
    """Return the window of one instance; ValueError where the recording has several, and none is named, or not it."""
    placed = list(placed_requests(path, block_size=config.block_size))
    instances = sorted({decision.instance.instance_id for _, decision, _ in placed})
    if not instance and len(instances) != 1:
        raise ValueError(f"instance: name one of {', '.join(instances) or 'none: the recording is empty'}")
    if instance:
        require_choice("instance", instance, instances)
    name = instance or instances[0]
    mine = [one for one in placed if one[1].instance.instance_id == name]
    first_s = min(decision.decided_unix_s for _, decision, _ in mine)
    requests = [_observed(*one, first_s) for one in mine]
    ends_s = [one.last_token_s or one.facts.arrival_s for one in requests]
    return window_of_client(
        requests, config, end_s=max(ends_s), profile=profile, instance=name, model=_model(mine), source="a recording"
    )  # fmt: skip


def _observed(
    facts: RequestFacts, decision: common_pb2.Decision, outcome: common_pb2.Outcome | None, first_s: float
) -> ObservedRequest:
    arrival_s = decision.decided_unix_s - first_s
    facts = replace(facts, arrival_s=arrival_s)
    if outcome is None:
        return ObservedRequest(facts=replace(facts, output_tokens=None))
    last_s = max(arrival_s, outcome.finished_unix_s - first_s)
    first_token_s = None
    if outcome.HasField("ttft_s") and outcome.HasField("e2e_s"):
        first_token_s = max(arrival_s, last_s - (outcome.e2e_s - outcome.ttft_s))
    tokens = outcome.output_tokens
    ended = ENDED.get(outcome.finish_reason, ERROR)
    return ObservedRequest(
        facts=replace(facts, output_tokens=tokens or None, prompt_tokens=outcome.prompt_tokens or facts.prompt_tokens),
        ended=ended if tokens or ended == ABORT else ERROR,
        cached_tokens=min(outcome.prefix_hit_tokens, outcome.prompt_tokens or facts.prompt_tokens),
        first_token_s=first_token_s,
        last_token_s=last_s,
    )


def _model(placed: Iterable[tuple[RequestFacts, common_pb2.Decision, common_pb2.Outcome | None]]) -> str:
    return next((facts.model for facts, _, _ in placed if facts.model), "")
