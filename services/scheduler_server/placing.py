"""From a request to the instance that it goes to: lengths, forecasts, a policy, a promise."""

from __future__ import annotations

import time

import numpy as np

from scheduler.policies import Policy, PolicyEntry, policy_named
from services.scheduler_server.asking import Asker, candidates_among
from services.scheduler_server.choosing import Choice
from services.scheduler_server.fleet import Fleet
from services.scheduler_server.lengths import Lengths
from services.scheduler_server.measures import Measures
from services.scheduler_server.settings import SchedulerSettings
from services.scheduler_server.wish import BASES, Placement, Wish
from services.wire import request_from


class Placer:
    """Decides for one request after the other, any number at once. It remembers nothing that a restart must keep."""

    def __init__(self, settings: SchedulerSettings, fleet: Fleet, lengths: Lengths, measures: Measures) -> None:
        """Decide over a fleet."""
        self._settings = settings
        self._fleet = fleet
        self._lengths = lengths
        self._measures = measures
        self._asker = Asker(settings, measures)
        self._policies: dict[str, tuple[PolicyEntry, Policy]] = {}
        self._policy(settings.policy)

    def _policy(self, name: str) -> tuple[PolicyEntry, Policy]:
        if name not in self._policies:
            entry = policy_named(name)
            self._policies[name] = (entry, entry.make(np.random.default_rng(self._settings.seed)))
        return self._policies[name]

    async def place(self, wish: Wish) -> Placement:
        """Decide where a request goes, and reserve there.

        ConnectionError where there is no instance that could take it, ValueError where none ever will.
        """
        start_s = time.monotonic()
        name = wish.policy or self._settings.policy
        entry, policy = self._policy(name)
        sidecars = {sidecar.name: sidecar for sidecar in self._fleet.serving(wish.request.model)}
        await self._complete(wish, for_forecasts=entry.needs_forecast or self._settings.forecast_always)
        candidates = candidates_among(sidecars.values(), wish.excluded)
        if entry.needs_forecast:
            await self._asker.ask(wish, sidecars, candidates)
        choice = Choice(
            wish=wish,
            policy_name=name,
            policy=policy,
            blind=not entry.needs_forecast,
            sidecars=sidecars,
            candidates=candidates,
            settings=self._settings,
            measures=self._measures,
        )
        placement = await choice.settled(self._asker)
        placement.decision_s = time.monotonic() - start_s
        self._measures.decision_s.labels(name).observe(placement.decision_s)
        self._measures.decisions.labels(name, BASES[placement.basis]).inc()
        return placement

    async def _complete(self, wish: Wish, *, for_forecasts: bool) -> None:
        """Find out what forecasts need to know of the request, and refuse one that makes no sense."""
        await self._lengths.settle(wish.request, wish.prompt, ask=for_forecasts)
        try:
            request_from(wish.request)
        except ValueError as error:
            raise ValueError(f"request.{error}") from None
