"""A request in its wire form, and as the decision core has it."""

from __future__ import annotations

import math

from predictor.request import SERVE, adapter_number
from protos.block.v1 import common_pb2
from scheduler.candidates import RequestIndicators
from scheduler.intentions import Ask, Reserve
from scheduler.objectives import Objective
from scheduler.placement import PlacementRequest
from scheduler.prefix.prompt import NO_BLOCKS, PromptBlocks, blocks_of_text
from services.rpc.messages import LEG_NAMES, LEG_VALUES
from services.rpc.request_groups import num_responses_of


def placement_request_of(  # noqa: PLR0913 - what a request may ask for
    request: common_pb2.Request,
    objective: Objective,
    *,
    prompt: bytes,
    needs_prefix: bool,
    excluded: frozenset[str],
    dry_run: bool,
    arrived_s: float,
    max_wait_s: float,
    margin_s: float,
) -> PlacementRequest:
    """Convert a request from its wire form; deadlines count earlier by the margin."""
    return PlacementRequest(
        request_id=request.request_id,
        model=request.model,
        indicators=_indicators(request, objective, arrived_s, margin_s),
        blocks=_blocks(request, prompt) if needs_prefix else NO_BLOCKS,
        excluded=excluded,
        dry_run=dry_run,
        arrived_s=arrived_s,
        waited_s=request.waited_s,
        max_wait_s=max_wait_s,
        leg=LEG_NAMES.get(request.leg, SERVE),
        objective=objective,
        client_id=request.client_id,
        session_id=request.session_id,
        undivided=request.leg == common_pb2.LEG_SERVE,
    )


def _indicators(
    request: common_pb2.Request, objective: Objective, arrived_s: float, margin_s: float
) -> RequestIndicators:
    tokens = request.tag.median_tokens if request.HasField("tag") else float(request.output_tokens or "nan")
    slo = objective.slo
    return RequestIndicators(
        prompt_tokens=request.prompt_tokens,
        tag_tokens=tokens * num_responses_of(request),
        due_s=math.inf if slo.ttft_s is None else arrived_s - request.waited_s + slo.ttft_s - margin_s,
        tpot_slo_s=math.inf if slo.tpot_s is None else slo.tpot_s,
        adapter=adapter_number(request.adapter),
    )


def _blocks(request: common_pb2.Request, prompt: bytes) -> PromptBlocks:
    """Name a prompt's blocks: by tokens where the caller did so, else by text."""
    if request.prefix_hashes and request.prefix_block_tokens:
        names = tuple(request.prefix_hashes)
        return PromptBlocks(names=names, block_tokens=request.prefix_block_tokens, by_tokens=True)
    return blocks_of_text(prompt, request.prompt_tokens, request.adapter)


def set_leg(request: common_pb2.Request, of: Ask | Reserve | PlacementRequest) -> None:
    """Write into a request which leg an instance is asked about, or reserves, or which one is to be placed."""
    request.leg, request.in_s = LEG_VALUES[of.leg], getattr(of, "in_s", 0.0)
    request.ClearField("held_s")
    if isinstance(of, Reserve) and of.held_s is not None:
        request.held_s = of.held_s


def waited_s(of: PlacementRequest, now_s: float) -> float:
    """Return how long a request has been in the system."""
    return of.waited_s + now_s - of.arrived_s


def set_waited(request: common_pb2.Request, of: PlacementRequest, now_s: float, margin_s: float) -> None:
    """Set from when the deadlines of a request count at sidecars: its arrival, earlier by the margin."""
    request.waited_s = waited_s(of, now_s) + (0.0 if of.objective.slo.ttft_s is None else margin_s)
