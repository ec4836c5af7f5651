"""The requests of a prefill and a decode leg, and the reply between them, as vLLM 0.32 has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from predictor.request import DECODE, PREFILL, SERVE
from predictor.suggestions import require_choice
from services.http.continuable import IDS_FIELD
from services.http.json_fields import with_fields
from services.http.openai_body import KV_TRANSFER_PARAMS
from services.settings import Option

LIMITS = ("max_tokens", "max_completion_tokens")
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens", IDS_FIELD)
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
NAMES = ("remote_engine_id", "remote_request_id", "remote_host")

_KEY = b'"%s"' % KV_TRANSFER_PARAMS.encode()
_CACHED = re.compile(rb'("prompt_tokens_details"\s*:\s*\{[^{}]*?"cached_tokens"\s*:\s*)\d+')


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConnector:
    """A kind of KV connector, as far as a router sees it."""

    # In the reply to a prefill leg; empty: the reply carries nothing, and decode engines find the blocks by the prompt.
    transfer_mode: str


KV_CONNECTORS = {
    "nixl": KvConnector(transfer_mode="pull"),
    "nixl-push": KvConnector(transfer_mode="push"),
    "shared-storage": KvConnector(transfer_mode=""),
}

KvConnectorName = Annotated[
    str,
    Option(
        "KV connector of the engines where prefill and decode are disaggregated: nixl (NixlConnector), nixl-push "
        "(NixlPushConnector) or shared-storage (ExampleConnector).",
        choices=tuple(KV_CONNECTORS),
    ),
]
HandOverDeadline = Annotated[
    float,
    "Maximum time from the reply to a prefill leg to the request to the decode instance, in seconds; after that the "
    "prompt is prefilled again. Keep it far below the time for which engines hold KV blocks (30 s).",
]


def require_kv_connector(name: str) -> None:
    """Refuse a connector whose protocol is not known."""
    require_choice("kv_connector", name, KV_CONNECTORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefilledPrompt:
    """What the reply to a prefill leg says."""

    params: bytes | None = None  # as JSON, for the decode leg; None: nothing needs to be named
    cached_tokens: int | None = None  # the prefix hits of the prefill instance, where they are known


def leg_of(params: Any) -> str:
    """Return the leg that a request's `kv_transfer_params` ask for.

    Parameters without blocks ask for the whole request, as after a prefill that held nothing.
    """
    if not isinstance(params, dict):
        return SERVE
    if params.get("do_remote_prefill") and params.get("remote_block_ids"):
        return DECODE
    return PREFILL if params.get("do_remote_decode") else SERVE


def prefill_body(body: bytes, connector: KvConnector) -> bytes:
    """Write the body of a prefill leg: the prompt and one token, in one piece."""
    data = json.loads(body)
    for name in NOT_FOR_PREFILL:
        data.pop(name, None)
    data["stream"] = False
    for name in LIMITS:
        if name == LIMITS[0] or data.get(name) is not None:
            data[name] = 1
    data.pop(KV_TRANSFER_PARAMS, None)
    if connector.transfer_mode:
        data[KV_TRANSFER_PARAMS] = REMOTE_DECODE
    return json.dumps(data, separators=(",", ":")).encode()


def read_prefill_reply(reply: bytes, connector: KvConnector) -> PrefilledPrompt | None:
    """Read the reply to a prefill leg; None where no blocks are held, ValueError where it is not as expected."""
    try:
        data = json.loads(reply)
    except (ValueError, RecursionError):
        raise ValueError("the reply is not JSON") from None
    if not isinstance(data, dict):
        raise ValueError("the reply is not a JSON object")
    if not connector.transfer_mode:
        return PrefilledPrompt(cached_tokens=_hits_in(data.get("usage")))
    params = data.get(KV_TRANSFER_PARAMS)
    if params is None:
        return None
    if not isinstance(params, dict):
        raise ValueError(f"{KV_TRANSFER_PARAMS}: is not an object")
    if not _holds_blocks(params, connector):
        return None
    hits = params.get("remote_prefill_cached_tokens")
    return PrefilledPrompt(
        params=json.dumps(params, separators=(",", ":")).encode(),
        cached_tokens=hits if type(hits) is int else _hits_in(data.get("usage")),
    )


def _holds_blocks(params: Mapping[str, Any], connector: KvConnector) -> bool:
    """Check what a decode instance needs to fetch blocks; return whether there are any."""
    blocks = params.get("remote_block_ids")
    if not isinstance(blocks, list) or not all(isinstance(group, list) for group in blocks):
        raise ValueError(f"{KV_TRANSFER_PARAMS}.remote_block_ids: is not a list of lists")
    if not any(blocks):
        return False
    if params.get("do_remote_prefill") is not True:
        raise ValueError(f"{KV_TRANSFER_PARAMS}.do_remote_prefill: is not true")
    for name in NAMES:
        if not (isinstance(params.get(name), str) and params[name]):
            raise ValueError(f"{KV_TRANSFER_PARAMS}.{name}: is missing")
    if type(params.get("remote_port")) is not int:
        raise ValueError(f"{KV_TRANSFER_PARAMS}.remote_port: is missing")
    mode = params.get("transfer_mode", connector.transfer_mode)
    if mode != connector.transfer_mode:
        raise ValueError(f"{KV_TRANSFER_PARAMS}.transfer_mode: is {mode!r}, not {connector.transfer_mode!r}")
    return True


def _hits_in(usage: Any) -> int | None:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    hits = details.get("cached_tokens") if isinstance(details, dict) else None
    return hits if type(hits) is int else None


def decode_body(body: bytes, prefilled: PrefilledPrompt) -> bytes:
    """Write the body of a decode leg: the original, and what the reply to the prefill leg said, unchanged."""
    if prefilled.params is None:
        return body
    present = (KV_TRANSFER_PARAMS,) if _KEY in body else ()  # perhaps a null of the client's
    return with_fields(body, {KV_TRANSFER_PARAMS: prefilled.params}, present)


def with_cached_tokens(reply: bytes, num: int) -> bytes:
    """Set the prefix hits in the usage of a reply or of events; to a decode instance, all of a prompt is cached."""
    return _CACHED.sub(rb"\g<1>%d" % num, reply) if b'"cached_tokens"' in reply else reply
