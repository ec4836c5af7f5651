"""The header by which vLLM sends a request to one of its data-parallel ranks."""

from __future__ import annotations

from protos.block.v1 import common_pb2
from services.http.headers import Headers

RANK_HEADER = b"x-data-parallel-rank"


def rank_of(instance: common_pb2.Instance) -> int | None:
    """Return the data-parallel rank of an instance, if requests have to name it."""
    return instance.data_parallel_rank if instance.HasField("data_parallel_rank") else None


def with_rank(headers: Headers, rank: int | None) -> Headers:
    """Return headers that name the rank, whatever the client named; without a rank, as they are."""
    if rank is None:
        return headers
    return [*(pair for pair in headers if pair[0] != RANK_HEADER), (RANK_HEADER, b"%d" % rank)]


def rank_in(headers: Headers) -> int | None:
    """Read the rank as vLLM does: a header that is no number counts as none."""
    value = next((value for name, value in headers if name == RANK_HEADER), None)
    try:
        return None if value is None else int(value)
    except ValueError:
        return None
