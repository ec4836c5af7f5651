"""KV events between the mirrored engines of a cluster and their sidecars: sockets in the cluster's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

OPTION = "--kv-events-config"
LONGEST_ENDPOINT = 100
WITHOUT_CACHE = "--no-enable-prefix-caching"


def publishing_flags(state_file: Path, arguments: Sequence[str] = ()) -> list[str]:
    """Write the flags of an engine that publishes its KV events; none where its own arguments decide about them."""
    if not _are_ours(state_file, arguments):
        return []
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": _endpoint(state_file, "events"),
        "replay_endpoint": _endpoint(state_file, "replay"),
    }
    return [OPTION, json.dumps(config)]


def following_flags(state_file: Path, arguments: Sequence[str] = ()) -> list[str]:
    """Write the flags of the sidecar that follows them."""
    if not _are_ours(state_file, arguments):
        return []
    return ["--kv-events", _endpoint(state_file, "events"), "--kv-events-replay", _endpoint(state_file, "replay")]


def _are_ours(state_file: Path, arguments: Sequence[str]) -> bool:
    if len(_endpoint(state_file, "replay")) > LONGEST_ENDPOINT:
        return False  # the system allows no socket of this name
    return not any(word.partition("=")[0] in (OPTION, WITHOUT_CACHE) for word in arguments)


def _endpoint(state_file: Path, suffix: str) -> str:
    return f"ipc://{state_file.with_suffix('.' + suffix)}"
