"""Reservations end when the engine shows them, when they are released, or by themselves."""

from __future__ import annotations

from predictor.request import RequestFacts
from scheduler.reservations import Reservation, Reservations


def reservation(name: str, until_s: float = 5.0) -> Reservation:
    """A reservation of a request of this name."""
    return Reservation(request=RequestFacts(request_id=name, prompt_tokens=1), until_s=until_s)


def test_reservations_are_idempotent_and_end_by_themselves() -> None:
    """Twice reserved counts once; shown, released and expired ones are gone."""
    held = Reservations(most=3)
    assert [held.reserve(reservation(name)) for name in ("a", "a", "b", "c")] == [True, False, True, True]
    assert held.is_full
    assert held.version == 3
    assert list(held.held()) == ["a", "b", "c"]
    assert held.release("b") == reservation("b")
    assert held.release("b") is None
    assert held.shown({"a", "zzz"}) == [reservation("a")]
    assert len(held) == 1
    assert held.expire(4.9) == []
    assert held.expire(5.0) == [reservation("c")]
    assert len(held) == 0
    assert held.version == 3


def test_reserving_again_extends() -> None:
    """The later reservation counts, at the earlier one's place."""
    held = Reservations()
    for name, until_s in (("a", 5.0), ("b", 5.0), ("a", 9.0)):
        held.reserve(reservation(name, until_s))
    assert held.expire(6.0) == [reservation("b")]
    assert "a" in held
