"""What replies to prefill legs name, as vLLM 0.32 with NIXL (pull) writes it."""

from __future__ import annotations

from typing import Any


def held_params(num: int, **fields: Any) -> dict[str, Any]:
    """Return the `kv_transfer_params` of an engine's reply number `num`, each with other blocks, and other fields."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[num, num + 1]],
        "remote_engine_id": "engine",
        "remote_request_id": f"cmpl-{num}",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        **fields,
    }
