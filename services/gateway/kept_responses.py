"""Which instance keeps a response (/v1/responses): a request for it, or for its continuation, goes there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.gateway.destinations import Destination
from services.http.origin import Origin

MAX_KEPT = 65_536  # the oldest are forgotten first
HEAD_BYTES = 4096  # of a reply, which contain its id

_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w.-]{1,300})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """Where a response is, and whose it is: the tenant of a key, where keys are set."""

    instance_id: str
    origin: Origin
    owner: str
    rank: int | None = None  # the data-parallel rank that computed it


class KeptResponses:
    """The instances of responses by id, in memory; another gateway does not know them."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        """Know none yet."""
        self._kept: dict[str, KeptResponse] = {}
        self._max_kept = max_kept

    def __len__(self) -> int:
        """Return how many are known."""
        return len(self._kept)

    def note(self, reply: bytes, destination: Destination, owner: str) -> None:
        """Note a response by the start of the engine's reply, unless another client has one of this id."""
        found = _ID.search(reply[:HEAD_BYTES])
        if found is None:
            return
        response_id = found[1].decode()
        known = self._kept.pop(response_id, None)
        if known is not None and known.owner != owner:  # a request may name its response as it likes
            self._kept[response_id] = known
            return
        if len(self._kept) >= self._max_kept:
            del self._kept[next(iter(self._kept))]
        self._kept[response_id] = KeptResponse(
            instance_id=destination.instance_id, origin=destination.origin, owner=owner, rank=destination.rank
        )

    def find(self, response_id: str, owner: str) -> KeptResponse | None:
        """Return where a response is; None where it is not known, or another client's."""
        found = self._kept.get(response_id)
        return found if found is not None and found.owner == owner else None
