"""Classes for vLLM's `--scheduler-cls`, one for each batching rule: `block_vllm_export.schedulers.slide_batching`."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from .predictor.batching import BATCHERS
from .rule_scheduler import RuleScheduler

RULES = tuple(name for name, batcher in BATCHERS.items() if batcher.plans)
_CLASSES = {
    name: type(name, (RuleScheduler, Scheduler), {"block_rule": name, "__module__": __name__}) for name in RULES
}


def __getattr__(name: str) -> Any:
    """Return the class of a rule."""
    if name in _CLASSES:
        return _CLASSES[name]
    raise AttributeError(f"there is no rule {name!r}; there are {', '.join(RULES)}")
