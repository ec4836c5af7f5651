"""When a part that fails is left alone, and tried again."""

from __future__ import annotations

from scheduler.circuit import CircuitState


def test_a_circuit_opens_tries_again_and_closes() -> None:
    """Two failures open it, one trial per pause, pauses double, a success closes it."""
    circuit = CircuitState(first_pause_s=1.0, longest_pause_s=3.0)
    assert not circuit.failed(0.0)
    assert circuit.allows(0.0)
    assert circuit.failed(0.0)
    assert circuit.is_open()
    assert not circuit.allows(0.5)
    assert circuit.may_try(1.0)
    assert circuit.allows(1.0)
    assert not circuit.allows(1.5)
    circuit.failed(1.5)
    assert not circuit.allows(3.0)
    assert circuit.allows(3.5)
    circuit.failed(3.5)
    assert circuit.pause_s() == 3.0
    circuit.succeeded()
    assert circuit.allows(3.6)


def test_calls_that_fail_with_the_one_that_opened_a_circuit_do_not_count() -> None:
    """A hundred streams of one engine die together: that is one death, and the pause is the first one."""
    circuit = CircuitState(first_pause_s=1.0)
    assert [circuit.failed(0.0) for _ in range(100)] == [False, True, *[False] * 98]
    assert circuit.pause_s() == 1.0
    assert circuit.allows(1.0)
    assert not circuit.failed(1.1)
    assert circuit.pause_s() == 2.0
    assert not circuit.failed(1.2)
    assert circuit.pause_s() == 2.0
