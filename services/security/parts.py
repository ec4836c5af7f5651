"""The parts of Block as certificates name them."""

from __future__ import annotations

PARTS = ("gateway", "scheduler", "picker", "predictor", "tagger", "provisioner", "engine", "client")
DOMAIN = "block.internal"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def part_name(part: str) -> str:
    """Return the DNS name of a part, which `--tls-peer` of other parts can allow."""
    return f"{part}.{DOMAIN}"
