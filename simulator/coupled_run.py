"""One run of a simulated cluster whose instances have roles: requests have one leg, or two on two engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from predictor.config import RECOMPUTE
from predictor.loop import FOREVER
from predictor.request import DECODE, LEGS, PREFILL
from predictor.state import NONE
from scheduler.columns import Column
from scheduler.decision import Decision
from scheduler.intentions import Ask, AskLegs, Intention, Reserve, Shed, Wait
from simulator import coupled
from simulator.events import WAKE
from simulator.fleet import with_more_slots
from simulator.request_slots import FULL
from simulator.run import ROWS, Simulation

UNKNOWN = (np.nan, np.nan, np.nan)


@dataclass(slots=True)
class CoupledSimulation(Simulation):
    """A cluster with prefill and decode engines in motion.

    A decision reserves both legs of a request. The prefill leg is sent. The decode leg arrives when that has ended, and
    until then counts at its engine as a reservation for the predicted time.
    """

    # TTFT, e2e and the end of the fetch, as they were forecast for the request that is being decided
    predicted: dict[tuple[str, int], tuple[float, float, float]] = field(default_factory=dict)

    def refresh(self, now_s: float) -> None:
        """Advance all engines, and write their indicators."""
        coupled.refresh_directly(self.fleet, self.requests, now_s, self.conditions.hop_s, ROWS, self.reported)
        self.observe(now_s)

    def run_out(self) -> None:
        """Advance all engines until nothing is left to do."""
        coupled.advance_coupled(self.fleet, self.requests, FOREVER, self.conditions.hop_s)

    # Decisions.

    def _drive(self, decision: Decision, intention: Intention, which: int, now_s: float) -> None:
        """Carry out a decision's intentions at this moment of the virtual clock; every reservation is made."""
        self.predicted.clear()
        while isinstance(intention, Ask | AskLegs | Reserve):
            self._apply_objective(decision)
            if isinstance(intention, Reserve):
                self._reserve(decision, intention, which, now_s)
                intention = decision.reserved(0.0, now_s)
            else:
                columns = [self._forecast_legs(ask, decision.request.number, now_s) for ask in intention.asks]
                intention = decision.answers_in_columns(columns, now_s)
        if isinstance(intention, Shed):
            self._shed(decision.request.number, intention, now_s)
        if isinstance(intention, Wait) and intention.until_s < FOREVER:
            self.events.schedule(max(now_s, intention.until_s), WAKE, (which, decision))
        if self.holds:
            self._tick_ready(which, now_s)

    def _forecast_legs(self, ask: Ask, number: int, now_s: float) -> dict[str, Column]:
        """Forecast a leg on some instances; keep what may be needed for the one that will be chosen."""
        found = self.forecasts.forecast(self.fleet, self.requests, ask, number, now_s)
        columns = {name: column.copy() for name, column in found.items()}  # the next forecasts overwrite them
        rows = range(len(self.specs)) if ask.candidates.rows is None else ask.candidates.rows.tolist()
        results = self.forecasts.results[: len(rows)]
        kept = zip(*(results[name].tolist() for name in ("first_token_s", "finished_s", "fetched_s")), strict=True)
        self.predicted.update(zip(((ask.leg, row) for row in rows), kept, strict=True))
        return columns

    def _reserve(self, decision: Decision, reserve: Reserve, which: int, now_s: float) -> None:
        """Reserve one leg; it arrives after the decision and the network, or a decode leg after its other leg."""
        number, index, conditions = decision.request.number, reserve.row, self.conditions
        reserved_s = now_s + conditions.decision_s
        arrives_s = reserved_s + conditions.network_s
        visible_s = reserved_s if conditions.reservations else arrives_s
        made = self.decisions[number]
        if reserve.leg == PREFILL:
            made.prefill_instance = index
            self.send_by(coupled.send_prefill, number, index, arrives_s, visible_s, self._held_s(made.instance, index))
        else:
            made.instance, made.scheduler, made.prefill_instance = index, which, NONE
            made.num_sends += 1
            made.decided_s, made.admitted_in_time = now_s, decision.is_admitted_in_time
            made.predicted_ttft_s, made.predicted_e2e_s, _ = self.predicted.get((reserve.leg, index), UNKNOWN)
            if reserve.leg == DECODE:
                self.send_by(coupled.await_decode, number, index, visible_s, arrives_s + reserve.in_s)
            else:
                self.send_by(coupled.send_whole, number, index, arrives_s, visible_s)
        self._note_sent(self.schedulers[which], number, index, visible_s)

    def _held_s(self, decode: int, prefill: int) -> float:
        """Return for how long the blocks of a prefill leg are predicted to be held; the lease where that is unknown."""
        _, _, fetched_s = self.predicted.get((DECODE, decode), UNKNOWN)
        _, ended_s, _ = self.predicted.get((PREFILL, prefill), UNKNOWN)
        held_s = fetched_s - ended_s
        return max(0.0, held_s) if np.isfinite(held_s) else self.specs[prefill].config.kv_lease_s

    def send_by(self, kernel: Callable[..., int], number: int, index: int, *times_s: float) -> None:
        """Send a leg to an engine by one of the kernels in coupled.py."""
        while kernel(self.fleet, self.requests, number, index, *times_s) == FULL:
            self.fleet = with_more_slots(self.fleet)

    # Failures.

    def lose(self, number: int, row: Any, index: int, time_s: float) -> None:
        """Start a request again, unless its other leg goes on, or its client has received a part of the response."""
        legs = self.requests.legs[number]
        if legs.decode == index:
            coupled.lose_decode(self.fleet, self.requests, number, time_s)
        elif legs.prefill == index and int(row.leg) == LEGS.index(PREFILL):
            recomputes = self.specs[legs.decode].config.kv_load_failure_policy == RECOMPUTE
            if not coupled.lose_prefill(self.fleet, self.requests, number, time_s, recomputes):
                return
            row.first_token_s = NONE  # that of the prefill leg reaches no client
        elif int(row.leg) == LEGS.index(PREFILL):
            return  # the request was started again before
        Simulation.lose(self, number, row, index, time_s)
