"""Observes an engine by its traffic, as a proxy before it or a client of it sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from predictor.config import EngineConfig
from predictor.mirror.events import MirrorEvent, PromptCounted, RequestArrived, RequestEnded, TokensReceived
from predictor.profile import Profile
from predictor.request import RequestFacts
from simulator.accuracy.window import (
    ABORT,
    CLIENT,
    ERROR,
    LENGTH,
    STOP,
    ObservedRequest,
    ObservedWindow,
    WindowHeader,
)
from simulator.load_report import RequestResult

MAX_REQUESTS = 200_000


@dataclass(slots=True)
class _Request:
    """A request that passes, and when its tokens did."""

    arrived: RequestArrived
    arrival_s: float
    prompt_tokens: int
    num_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    ended: str = ""


class TrafficObservation:
    """An observation that goes on: it takes the events of a proxy, at the time at which they happen."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic, *, clock_rate: float = 1.0) -> None:
        """Start now; the window's clock is that many times as fast."""
        self._now_s = now_s
        self._begin_s = now_s()
        self._clock_rate = clock_rate
        self._requests: dict[str, _Request] = {}
        self.num_ended = 0

    @property
    def is_full(self) -> bool:
        """Return whether the observation has as many requests as it may keep."""
        return len(self._requests) >= MAX_REQUESTS

    reads_tokens = False  # of prompts

    def record(self, event: MirrorEvent) -> None:
        """Take an event that happens now."""
        now_s = self._since_s()
        if isinstance(event, RequestArrived):
            if not self.is_full:
                self._requests[event.name] = _Request(event, now_s, event.prompt_tokens)
            return
        request = self._requests.get(getattr(event, "name", ""))
        if request is None:
            return
        match event:
            case PromptCounted(prompt_tokens=prompt_tokens):
                request.prompt_tokens = prompt_tokens
            case TokensReceived(num_tokens=num_tokens):
                request.first_s = now_s if request.first_s is None else request.first_s
                request.num_tokens, request.last_s = num_tokens, now_s
            case RequestEnded():
                self._end(request, event, now_s)

    def _end(self, request: _Request, event: RequestEnded, now_s: float) -> None:
        self.num_ended += 1
        request.num_tokens = max(request.num_tokens, event.num_tokens)
        request.prompt_tokens = event.prompt_tokens or request.prompt_tokens
        if request.last_s is None:  # a reply in one piece
            request.last_s = now_s
        if not event.completed:
            request.ended = ABORT
        elif request.num_tokens < 1:
            request.ended = ERROR
        else:
            cut = request.arrived.max_tokens is not None and request.num_tokens >= request.arrived.max_tokens
            request.ended = LENGTH if cut else STOP

    def window(  # noqa: PLR0913 - what a window consists of
        self,
        config: EngineConfig,
        *,
        profile: Profile | str = "",
        instance: str = "",
        model: str = "",
        source: str,
        warm_up_s: float = 0.0,
    ) -> ObservedWindow:
        """Return what has been observed so far, of an engine with these settings.

        Requests that arrived within `warm_up_s` are in the window, but before its beginning.
        """
        window = window_of_client(
            [_observed(name, one, config) for name, one in self._requests.items()],
            config,
            end_s=self._since_s(),
            profile=profile,
            instance=instance,
            model=model,
            source=source,
            clock_rate=self._clock_rate,
        )
        begin_s = min(warm_up_s * self._clock_rate, window.header.end_s)
        return replace(window, header=replace(window.header, begin_s=begin_s))

    def _since_s(self) -> float:
        return (self._now_s() - self._begin_s) * self._clock_rate


def _observed(name: str, one: _Request, config: EngineConfig) -> ObservedRequest:
    facts = RequestFacts(
        request_id=name,
        prompt_tokens=min(max(1, one.prompt_tokens), config.max_model_len - 1),
        output_tokens=one.num_tokens or None,
        arrival_s=one.arrival_s,
        max_tokens=one.arrived.max_tokens or None,
        priority=one.arrived.priority,
        leg=one.arrived.leg,
    )
    last_s = one.last_s if one.ended else None
    return ObservedRequest(facts=facts, ended=one.ended, first_token_s=one.first_s, last_token_s=last_s)


def window_of_client(  # noqa: PLR0913 - what a header consists of
    requests: Sequence[ObservedRequest],
    config: EngineConfig,
    *,
    end_s: float,
    profile: Profile | str,
    instance: str,
    model: str,
    source: str,
    clock_rate: float = 1.0,
) -> ObservedWindow:
    """Return a window of what a client saw; it begins at 0."""
    return ObservedWindow(
        header=WindowHeader(
            engine=config,
            begin_s=0.0,
            end_s=end_s,
            clock=CLIENT,
            clock_rate=clock_rate,
            profile=profile.name if isinstance(profile, Profile) else profile,
            instance=instance,
            model=model,
            source=source,
        ),
        requests=tuple(sorted(requests, key=lambda one: (one.facts.arrival_s, one.facts.request_id))),
        profile=profile if isinstance(profile, Profile) else None,
    )


def sent_requests(results: Sequence[RequestResult]) -> list[ObservedRequest]:
    """Convert the requests of a load that were answered."""
    return [_sent(one) for one in results if one.failure is None and one.e2e_s is not None]


def _sent(one: RequestResult) -> ObservedRequest:
    plan = one.plan
    due_s = plan.due_s + one.retried_after_s
    arrival_s = due_s + one.sent_s
    first_s = None if one.ttft_s is None else max(arrival_s, due_s + one.ttft_s)
    last_s = None if one.e2e_s is None else max(first_s or arrival_s, due_s + one.e2e_s)
    cut = one.output_tokens >= plan.output_tokens
    return ObservedRequest(
        facts=RequestFacts(
            request_id=plan.request_id,
            prompt_tokens=plan.prompt_tokens,
            output_tokens=one.output_tokens,
            arrival_s=arrival_s,
            max_tokens=max(plan.output_tokens, one.output_tokens),
            priority=plan.priority,
            request_class=plan.request_class,
            slo=plan.slo,
            weight=plan.weight,
            client_id=plan.tenant,
        ),
        ended=LENGTH if cut else STOP,
        first_token_s=first_s,
        last_token_s=last_s,
    )
