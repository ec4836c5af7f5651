"""Makes a vLLM scheduler class that fills its steps by a batching rule of the engine model.

The plan is carried out by vLLM's own loop: before it, the chosen victims are preempted and the running requests are put
into the plan's order; in it, `_reserve_prefill_lookahead`, which vLLM asks for each request's tokens, gives the planned
ones; the waiting queue shows only the requests that the plan admits, then those that the rule does not plan.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from .planned_queue import PlannedQueue
from .planner import Plan, StepPlanner, wall_clock
from .rule_settings import rule_config, rule_settings, step_time_for

log = logging.getLogger("vllm.block_export")


class RuleScheduler:
    """What is derived together with vLLM's `Scheduler`; `block_rule` is the rule's name."""

    block_rule: str
    block_clock = staticmethod(wall_clock)
    block_planner: StepPlanner | None = None
    _block_plan: Plan | None = None

    def __new__(cls, vllm_config: Any, *_: Any, **__: Any) -> Any:
        """Derive from vLLM's `AsyncScheduler` where the engine schedules asynchronously."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        if vllm_config.scheduler_config.async_scheduling and not issubclass(cls, AsyncScheduler):
            cls = type(cls.__name__, (cls, AsyncScheduler), {"__module__": cls.__module__})  # noqa: PLW0642
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what the rule does not support, and compile it."""
        super().__init__(*args, **kwargs)
        try:
            settings = rule_settings(self.vllm_config.additional_config)
            config = rule_config(self, self.block_rule, settings)
            step_time = step_time_for(config, settings.profile)
        except ValueError as error:
            raise ValueError(f"block-vllm-export: {self.block_rule}: {error}") from None
        self.block_planner = StepPlanner(
            self, config, step_time, corrected=settings.correction and settings.profile is not None,
            clock=self.block_clock,
        )  # fmt: skip
        self.waiting = PlannedQueue(self.waiting, by_priority=self.policy.value == "priority")
        self.block_num_unplanned = 0  # preemptions and refusals of vLLM's own
        log.info("block-vllm-export: steps are filled by %s", self.block_rule)

    def add_request(self, request: Any) -> None:
        """Add a request, and let the rule know of it."""
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new and self.block_planner is not None:
            self.block_planner.followed.added(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step by the rule."""
        plan = self._block_guarded("plan") if self._pause_state.name == "UNPAUSED" else None
        if plan is None:
            output = super().schedule(*args, **kwargs)
        elif plan.tokens is None:
            self.waiting.show(plan.unknown)
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                self.waiting.show(None)
        else:
            output = self._block_carry_out(plan, *args, **kwargs)
        self._block_guarded("launched", output, plan)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Process a step's output, and let the rule know of it."""
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        self._block_guarded("retired", scheduler_output)
        return outputs

    def _block_carry_out(self, plan: Plan, *args: Any, **kwargs: Any) -> Any:
        now_s = time.monotonic()
        for victim in plan.victims:
            self.running.remove(victim)
            self._preempt_request(victim, now_s)
        before = self.running
        planned = set(plan.running)
        self.running = plan.running + [one for one in before if one not in planned]
        self._block_plan = plan
        self.waiting.show([*plan.admitted, *plan.unknown])
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self._block_plan = None
            self.waiting.show(None)
            admitted = self.running[len(before) :]
            if len(self.running) != len(before) + len(plan.admitted):
                old, still = set(before), set(self.running)
                admitted = [one for one in self.running if one not in old]  # vLLM has admitted streaming sessions too
                self.block_num_unplanned += not still.issuperset((*before, *plan.admitted))
                before = [one for one in before if one in still]
            self.running = before + admitted

    def _reserve_prefill_lookahead(self, request: Any, _: int, num_new_tokens: int) -> int:
        """Return how many tokens a request gets: the planned ones."""
        if (plan := self._block_plan) is None:
            return num_new_tokens
        planned = plan.tokens.get(request.request_id)
        if planned is None:
            return 0 if self.block_planner.followed.knows(request) else num_new_tokens
        return planned if planned < num_new_tokens else num_new_tokens  # noqa: FURB136 - asked for each request

    def _block_guarded(self, action: str, *args: Any) -> Any:
        """Call the planner; after its first failure, which is logged, vLLM decides alone."""
        if (planner := self.block_planner) is None:
            return None
        try:
            return getattr(planner, action)(*args)
        except Exception:  # whatever fails, the engine must continue
            log.exception("block-vllm-export: %s has failed; vLLM's own order is used from now on", self.block_rule)
            self.block_planner = None
            return None
