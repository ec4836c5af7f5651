"""Where an engine publishes its KV events."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from scheduler.prefix.kv_block_hash import SEED
from services.security.exposure import is_on_loopback
from services.settings import Option

MAX_PORT = 65535
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\s*]+):(\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventSettings:
    """The engine's endpoints, as its `--kv-events-config` has them; without `endpoint` there are no events.

    `check_s` is the time without an event after which the engine is asked whether the last ones were lost.
    """

    endpoint: Annotated[
        str,
        Option(
            "Where the engine publishes its KV events, from which prefix hits are known: ipc://PATH or "
            "tcp://HOST:PORT, as in the engine's --kv-events-config.",
            name="kv_events",
            metavar="ENDPOINT",
        ),
    ] = ""
    replay_endpoint: Annotated[
        str,
        Option(
            "Where the engine repeats its KV events: its replay_endpoint. Without it, lost events are not repaired.",
            name="kv_events_replay",
            metavar="ENDPOINT",
        ),
    ] = ""
    topic: Annotated[str, Option("Topic of the engine's KV events.", name="kv_events_topic", unset="any")] = ""
    hash_seed: Annotated[
        str,
        Option("--hash-seed of the routers, by which they name the KV blocks of prompts.", name="kv_events_hash_seed"),
    ] = SEED
    check_s: float = 2.0
    gap_s: float = 0.5  # for which late events are waited for where nothing can be replayed

    def __post_init__(self) -> None:
        """Refuse addresses that no engine publishes at."""
        for name in ("endpoint", "replay_endpoint"):
            if getattr(self, name):
                require_endpoint(name, getattr(self, name))
        if not self.endpoint:
            for name in ("replay_endpoint", "topic"):
                if getattr(self, name):
                    raise ValueError(f"{name}: goes with kv_events only")
        if self.replay_endpoint and self.replay_endpoint == self.endpoint:
            raise ValueError("replay_endpoint: is the same as that of the events, and must be another one")
        if not (self.check_s > 0 and self.gap_s >= 0):
            raise ValueError(f"check_s: must be above 0, and gap_s at least 0, not {self.check_s} and {self.gap_s}")

    def require_local(self, *, insecure: bool) -> None:
        """Refuse events that come from another machine, unless the network is trusted."""
        for flag, endpoint in (("kv_events", self.endpoint), ("kv_events_replay", self.replay_endpoint)):
            found = _TCP.fullmatch(endpoint)
            if found is not None and not insecure and not is_on_loopback(found[1]):
                raise ValueError(
                    f"{flag}: {endpoint} is on another machine, and KV events, which contain prompts, are "
                    "sent in plain text: use ipc:// or the loopback address, or --insecure where the network is trusted"
                )


def require_endpoint(field: str, endpoint: str) -> None:
    """Raise ValueError for an endpoint to which nothing can connect."""
    found = _TCP.fullmatch(endpoint)
    is_path = endpoint.startswith("ipc://") and len(endpoint) > len("ipc://")
    if not (is_path or (found is not None and 0 < int(found[2]) <= MAX_PORT)):
        raise ValueError(f"{field}: {endpoint!r} must be ipc://PATH or tcp://HOST:PORT")
