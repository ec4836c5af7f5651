"""Promises end when the engine shows them, when they are taken back, or by themselves."""

from __future__ import annotations

from predictor.request import RequestFacts
from scheduler.reservations import Promise, Reservations


def promise(name: str, until_s: float = 5.0) -> Promise:
    """A promise to a request of this name."""
    return Promise(request=RequestFacts(request_id=name, prompt_tokens=1), until_s=until_s)


def test_reservations_are_idempotent_and_end_by_themselves() -> None:
    """Twice reserved counts once; shown, released and expired ones are gone."""
    held = Reservations(most=3)
    assert [held.reserve(promise(name)) for name in ("a", "a", "b", "c")] == [True, False, True, True]
    assert held.is_full
    assert held.version == 3
    assert list(held.held()) == ["a", "b", "c"]
    assert held.release("b") == promise("b")
    assert held.release("b") is None
    assert held.shown({"a", "zzz"}) == [promise("a")]
    assert len(held) == 1
    assert held.expire(4.9) == []
    assert held.expire(5.0) == [promise("c")]
    assert len(held) == 0
    assert held.version == 3


def test_reserving_again_extends() -> None:
    """The later promise counts, at the earlier one's place."""
    held = Reservations()
    for name, until_s in (("a", 5.0), ("b", 5.0), ("a", 9.0)):
        held.reserve(promise(name, until_s))
    assert held.expire(6.0) == [promise("b")]
    assert "a" in held
