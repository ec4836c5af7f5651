"""The length tagger's process: loads and warms up its estimators, serves, and reloads changed checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector
from threadpoolctl import threadpool_limits

from length_tagger.chain import Chain
from length_tagger.estimate import Query
from protos.block.v1 import common_pb2, tagger_pb2_grpc
from services.rpc.server import serve_until_signalled
from services.rpc.settings import ServerSettings
from services.tagger_server.batches import Batches
from services.tagger_server.outcomes import recording
from services.tagger_server.reloading import Watched, linear_from, reloading
from services.tagger_server.service import TaggerService
from services.tagger_server.settings import EncoderSettings

NAME = "tagger"


def serve(
    chain: Chain,
    settings: ServerSettings,
    *,
    linear_model: str = "",
    encoder: EncoderSettings | None = None,
    record: str = "",
) -> None:
    """Run the service until SIGTERM or SIGINT; estimators are warm before it listens."""
    threadpool_limits(1)  # the matrices of one prompt are too small for several threads
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    chain.estimate(Query(prompt="Warm up."))
    batches = None
    if encoder is not None:
        batches = Batches(encoder.loaded(), registry, deadline_s=encoder.deadline_s)
        batches.warm_up()
    watched = []
    if linear_model:
        watched.append(Watched(path=linear_model, load=linear_from, use=partial(chain.replaced, "linear")))
    if encoder is not None and batches is not None:
        watched.append(Watched(path=encoder.file, load=lambda _: encoder.loaded(), use=batches.use))

    async def run(record_outcome: Callable[[common_pb2.Outcome], None]) -> None:
        service = TaggerService(chain, registry, batches, record_outcome)
        register = partial(tagger_pb2_grpc.add_LengthTaggerServicer_to_server, service)
        async with reloading(watched, registry):
            await serve_until_signalled(NAME, settings, [register], registry)

    with recording(record) as record_outcome:
        asyncio.run(run(record_outcome))
