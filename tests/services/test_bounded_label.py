"""Labels whose values others choose."""

from __future__ import annotations

from services.bounded_label import BoundedLabel


def test_values_beyond_the_limit_share_one_label() -> None:
    """The first values keep their names, also later on."""
    label = BoundedLabel(2)
    assert [label(value) for value in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]
