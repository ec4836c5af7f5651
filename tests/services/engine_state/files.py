"""State files for tests, with a plausible state of a small engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from predictor.config import EngineConfig
from predictor.request import tenant_number
from services.engine_state.writer import Writer

CONFIG = EngineConfig(max_num_seqs=8, num_gpu_blocks=33, max_model_len=256, enable_prefix_caching=True)
VTC = replace(CONFIG, batcher="weighted_vtc")
CLIENTS = (("a", 1.0, 4000.0, 1), ("b", 2.0, 10.0, 0), ("", 1.0, 0.0, 0))


def writer_at(path: object, config: EngineConfig = CONFIG, **sizes: int) -> Writer:
    """Create an idle engine's file for eight requests, with the contents of blocks."""
    sizes = {"num_slots": 8, "num_blocks": 32, "blocks_per_request": 16, **sizes}
    writer = Writer(str(path), {"engine": asdict(config), "model": "tiny"}, **sizes)
    writer.state["num_blocks"] = writer.state["num_free_blocks"] = 32
    return writer


def busy(writer: Writer) -> Writer:
    """Publish a state with two running requests, a waiting one, and a step in flight."""
    for slot, prompt_tokens in ((0, 40), (1, 20), (5, 70)):
        writer.put_request(
            slot, serial=slot + 1, request_id=f"cmpl-r{slot}-0-0000000{slot}", arrival_s=slot / 8,
            prompt_tokens=prompt_tokens, max_tokens=30, tag_tokens=12.0 if slot == 1 else np.nan, tag_spread=0.25,
        )  # fmt: skip
    writer.running[:2] = (1, 0)
    writer.waiting[:1] = 5
    writer.live["output_tokens"][[0, 1]] = (3, 1)
    writer.live["computed_tokens"][[0, 1]] = (43, 21)
    writer.live["in_flight_tokens"][[0, 1]] = 1
    writer.live["num_blocks"][[0, 1]] = (3, 2)
    writer.live["full_blocks"][[0, 1]] = (2, 1)
    writer.live["num_hashes"][[0, 1]] = (2, 1)
    writer.batch[0, :2] = [(1, 1, 0, 1), (0, 1, 0, 1)]
    state = writer.state
    state["num_running"], state["num_waiting"], state["num_in_flight"], state["num_free_blocks"] = 2, 1, 1, 27
    state["num_scheduled"][0, 0] = 2
    state["start_s"][0, 0] = 4.5
    writer.put_blocks(0, np.array([0, 1, 2]))
    writer.put_blocks(1, np.array([3, 4]))
    writer.put_hashes(0, np.array([11, 12], np.uint64))
    writer.put_hashes(1, np.array([2**64 - 1], np.uint64))
    writer.blocks["content"][[0, 1, 3, 9]] = (11, 12, 2**64 - 1, 77)
    writer.blocks["reuse"][5:] = np.arange(1, 28)
    writer.add_step((6, 4.25, 0.25, 60, 2, 0, 2, 0, 0, 2000.0, 0.0))
    writer.add_outcome(
        serial=9, request_id="chatcmpl-old-00000009", arrival_s=1.0, scheduled_s=1.5, first_token_s=2.0,
        finished_s=None, prompt_tokens=7, output_tokens=4, hit_tokens=0, num_preemptions=0, reason="abort",
    )  # fmt: skip
    writer.publish()
    return writer


def counting(writer: Writer, clients: Sequence[tuple[str, float, float, int]] = CLIENTS) -> Writer:
    """Publish what a local scheduler remembers: the clients that it has counted, and numbers of its own."""
    writer.clients[: len(clients)] = [(tenant_number(name), *others) for name, *others in clients]
    state = writer.state
    state["num_clients"], state["num_planned"], state["correction"] = len(clients), 7, 1.25
    state["memory"][0, :2] = (10.0, 0.5)
    writer.publish()
    return writer
