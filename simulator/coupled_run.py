"""One run of a simulated cluster whose instances have roles: requests have one leg, or two on two engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from predictor.request import DECODE, LEGS, PREFILL
from predictor.state import NONE
from scheduler.decision import Ask, AskLegs, Decision, Intention, Reserve, Wait
from scheduler.indicators import Column
from simulator import coupled, kernels
from simulator.fleet import restart, with_more_slots
from simulator.result import RunResult
from simulator.run import FOREVER, ROWS, WAKE, Simulation


@dataclass(slots=True)
class CoupledSimulation(Simulation):
    """A cluster with prefill and decode engines in motion.

    A decision reserves both legs of a request. The prefill leg is sent. The decode leg arrives when that has ended, and
    until then counts at its engine as a reservation for the predicted time.
    """

    predicted: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)  # TTFT and e2e of legs

    def refresh(self, now_s: float) -> None:
        """Advance all engines, and write their indicators."""
        coupled.refresh_directly(self.fleet, self.requests, now_s, self.conditions.hop_s, ROWS, self.reported)
        self.observe(now_s)

    def _drive(self, decision: Decision, intention: Intention, which: int, now_s: float) -> None:
        """Carry out a decision's intentions at this moment of the virtual clock; every reservation is made."""
        self.predicted.clear()
        while isinstance(intention, Ask | AskLegs | Reserve):
            if isinstance(intention, Reserve):
                self._reserve(decision, intention, which, now_s)
                intention = decision.reserved(0.0, now_s)
            else:
                columns = [self._forecast_legs(ask, decision.request.number, now_s) for ask in intention.asks]
                intention = decision.answers_in_columns(columns, now_s)
        if isinstance(intention, Wait) and intention.until_s < FOREVER:
            self.schedule(max(now_s, intention.until_s), WAKE, (which, decision))
        if self.holds:
            self._tick_ready(which, now_s)

    def _forecast_legs(self, ask: Ask, number: int, now_s: float) -> dict[str, Column]:
        """Forecast a leg on some instances, and keep what is forecast for the one that will be chosen."""
        columns = self._forecast(ask.candidates, number, now_s, ask.with_delays, LEGS.index(ask.leg), ask.in_s)
        rows = np.arange(len(self.specs)) if ask.candidates.rows is None else ask.candidates.rows
        results = self.results[: len(rows)]
        pairs = zip(results["first_token_s"].tolist(), results["finished_s"].tolist(), strict=True)
        self.predicted.update(zip([(ask.leg, row) for row in rows.tolist()], pairs, strict=True))
        return columns

    def _reserve(self, decision: Decision, reserve: Reserve, which: int, now_s: float) -> None:
        """Reserve one leg, which reaches its engine after the decision and the network, or after its other leg."""
        number, index, conditions = decision.request.number, reserve.row, self.conditions
        reserved_s = now_s + conditions.decision_s
        arrives_s = reserved_s + conditions.network_s
        visible_s = reserved_s if conditions.reservations else arrives_s
        fleet, requests, made = self.fleet, self.requests, self.decisions[number]
        if reserve.leg == PREFILL:
            held_s = np.inf if reserve.held_s is None else reserve.held_s
            made.prefill_instance = index
            self._send_by(coupled.send_prefill, number, index, arrives_s, visible_s, held_s)
        else:
            made.instance, made.scheduler, made.prefill_instance = index, which, NONE
            made.num_sends += 1
            made.predicted_ttft_s, made.predicted_e2e_s = self.predicted.get(
                (reserve.leg, index), (np.nan, np.nan)
            )
            if reserve.leg == DECODE:
                self._send_by(coupled.await_decode, number, index, arrives_s + reserve.in_s, visible_s)
            else:
                self._send_by(coupled.send_whole, number, index, arrives_s, visible_s)
        self._note_sent(self.schedulers[which], number, index, visible_s)

    def _send_by(self, kernel: Callable[..., int], number: int, index: int, *times_s: float) -> None:
        while kernel(self.fleet, self.requests, number, index, *times_s) == kernels.FULL:
            self.fleet = with_more_slots(self.fleet)
            self.workspace = None
