"""What engines get of a request beside its body: arguments (`vllm_xargs`) that vLLM's plug-in reads."""

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
LONG_WAIT_S = 0.05
LEAST_TTFT_S = 1e-3  # the engine refuses targets of 0
TTFT, TPOT = TARGETS = ("block_ttft_s", "block_tpot_s")


def with_arguments(own: Mapping[str, Any], request: common_pb2.Request, waited_s: float = 0.0) -> dict[str, Any]:
    """Return a client's own arguments with those of the request, which contains what the client's own say.

    Targets that the request does not have any more are left out.
    """
    return {**{name: value for name, value in own.items() if name not in TARGETS}, **arguments_of(request, waited_s)}


def arguments_of(request: common_pb2.Request, waited_s: float = 0.0) -> dict[str, Any]:
    """Write the facts of a request as arguments; a vLLM without Block's plug-in ignores them.

    The engine counts from when it gets the request: the TTFT target is what is left after `waited_s`, if that is long.
    """
    arguments: dict[str, Any] = {}
    if request.HasField("slo"):
        if request.slo.HasField("ttft_s"):
            ttft_s = request.slo.ttft_s
            arguments[TTFT] = ttft_s if waited_s < LONG_WAIT_S else max(LEAST_TTFT_S, ttft_s - waited_s)
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
