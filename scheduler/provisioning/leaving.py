"""Which instances go: those whose loss the forecasts mind least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def leavers(instance_ids: Sequence[str], losses: Mapping[str, tuple[float, float]], num: int) -> tuple[str, ...]:
    """Choose by how much later requests would have ended without one, then by what it has left, then by name."""
    unknown = (0.0, 0.0)
    order = sorted(instance_ids, key=lambda name: (*losses.get(name, unknown), name))
    return tuple(order[:num])
