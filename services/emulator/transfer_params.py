"""`kv_transfer_params` of requests and replies, as vLLM 0.32's NIXL connector (pull) reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from predictor.request import DECODE
from services.http.kv_transfer import leg_of

MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBlocks:
    """The KV blocks of a prompt on the engine that computed it, and that engine's side channel.

    `cached_tokens` of the prompt were in that engine's prefix cache, None where it does not say.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    num_blocks: int
    cached_tokens: int | None = None


def leg_and_blocks(params: Mapping[str, Any] | None) -> tuple[str, RemoteBlocks | None]:
    """Return the leg that a request asks for, and the blocks to fetch; ValueError names an invalid field."""
    leg = leg_of(params)
    return leg, _remote_blocks(params) if params and leg == DECODE else None


def _remote_blocks(params: Mapping[str, Any]) -> RemoteBlocks:
    groups = params["remote_block_ids"]
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise ValueError("remote_block_ids: must be a list of lists of block ids")
    port = params.get("remote_port")
    if type(port) is not int or not 0 < port <= MAX_PORT:
        raise ValueError(f"remote_port: must be a port, not {port!r}")
    host = _text(params, "remote_host")
    if not (host.isascii() and host.isprintable()):
        raise ValueError(f"remote_host: must be a host's name or address, not {host!r}")
    cached = params.get("remote_prefill_cached_tokens")
    return RemoteBlocks(
        engine_id=_text(params, "remote_engine_id"),
        request_id=_text(params, "remote_request_id"),
        host=host,
        port=port,
        num_blocks=len(groups[0]) if groups else 0,
        cached_tokens=cached if type(cached) is int and cached >= 0 else None,
    )


def _text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: must be a string, not {value!r}")
    return value


def held_params(  # noqa: PLR0913 - the fields of the reply
    *, engine_id: str, request_id: str, host: str, port: int, block_ids: Sequence[int], num_tokens: int,
    cached_tokens: int,
) -> dict[str, Any]:  # fmt: skip
    """Write what the reply to a prefill leg says about its blocks, for the decode leg's request."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(block_ids)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }
