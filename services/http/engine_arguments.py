"""What engines are told of a request beside its body: arguments (`vllm_xargs`) that vLLM's plug-in reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protos.block.v1 import common_pb2
from services.engine_state.xargs import CLASSES as CLASS_NAMES

CLASSES = {
    "real-time": common_pb2.REQUEST_CLASS_REAL_TIME,
    "best-effort": common_pb2.REQUEST_CLASS_BEST_EFFORT,
}
assert tuple(CLASSES) == CLASS_NAMES
TTFT, TPOT = TARGETS = ("block_ttft_s", "block_tpot_s")


def with_arguments(own: Mapping[str, Any], request: common_pb2.Request) -> dict[str, Any]:
    """Return a client's own arguments with those of the request, which contains what the client's own say.

    Targets that the request does not have any more are left out.
    """
    return {**{name: value for name, value in own.items() if name not in TARGETS}, **arguments_of(request)}


def arguments_of(request: common_pb2.Request) -> dict[str, Any]:
    """Write the facts of a request as arguments; a vLLM without Block's plug-in ignores them."""
    arguments: dict[str, Any] = {}
    if request.HasField("slo"):
        if request.slo.HasField("ttft_s"):
            arguments[TTFT] = request.slo.ttft_s
        if request.slo.HasField("tpot_s"):
            arguments[TPOT] = request.slo.tpot_s
    if request.request_class != common_pb2.REQUEST_CLASS_UNSPECIFIED:
        arguments["block_class"] = next(name for name, number in CLASSES.items() if number == request.request_class)
    if request.HasField("weight"):
        arguments["block_weight"] = request.weight
    if request.client_id:
        arguments["block_client_id"] = request.client_id
    if request.session_id:
        arguments["block_session_id"] = request.session_id
    return arguments
