"""Tables of objectives, as files have them."""

from __future__ import annotations


def chat_table(when_late: str) -> str:
    """A table with one objective, `chat`."""
    return f"""
[[objective]]
name = "chat"
ttft_slo_s = 0.5
tpot_slo_s = 0.05
priority = 2
weight = 3
when_late = "{when_late}"
"""
