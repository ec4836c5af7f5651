"""Local schedulers: the rules by which engines fill their steps, one per file, in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from numba.extending import is_jitted

from predictor.batching import faster_transformer, lightllm, orca, sarathi, vllm_limits, vllm_v0, vllm_v1
from predictor.compiled import inner_kernel
from predictor.config import EngineConfig
from predictor.state import State
from predictor.suggestions import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Batcher:
    """A local scheduler: `schedule` fills one step and looks ahead.

    It returns whether the next step will be a decode of all that run, were nothing to end, arrive or run short: the
    loop then repeats that without asking. False is always right, and slower.


    Where it is a kernel it runs within the compiled loop; written in Python only it works all the same, slower.
    `defaults` are for rules that a configuration leaves open, `fixed` are those that it cannot change.
    """

    schedule: Callable[[State], bool]
    null_blocks: int = 0  # KV blocks that the engine keeps for itself
    sorts_arrivals: bool = True  # under priorities the waiting queue is always in their order
    decode_reserve: int = 0  # blocks that must be free before a decode, whether it needs one or not
    defaults: Mapping[str, bool | float] = field(default_factory=dict)
    fixed: Mapping[str, bool | float] = field(default_factory=dict)
    check: Callable[[EngineConfig], None] | None = None  # refuses what the engine would refuse at start


PLAIN = {"enable_prefix_caching": False, "async_scheduling": False}

BATCHERS = {
    "vllm_v1": Batcher(
        schedule=vllm_v1.schedule,
        null_blocks=1,
        defaults={
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "async_scheduling": False,
            "watermark": 0.0,
        },
        check=vllm_limits.check,
    ),
    "vllm_v0": Batcher(
        schedule=vllm_v0.schedule,
        sorts_arrivals=False,
        decode_reserve=1,
        defaults={"enable_chunked_prefill": False, "watermark": 0.01},
        fixed=PLAIN,
        check=vllm_limits.check,
    ),
    "sarathi": Batcher(
        schedule=sarathi.schedule,
        decode_reserve=1,
        defaults={"watermark": 0.01},
        fixed={**PLAIN, "enable_chunked_prefill": True},
    ),
    "orca": Batcher(schedule=orca.schedule, fixed={**PLAIN, "enable_chunked_prefill": False, "watermark": 0.0}),
    "lightllm": Batcher(schedule=lightllm.schedule, fixed={**PLAIN, "enable_chunked_prefill": False, "watermark": 0.0}),
    "faster_transformer": Batcher(
        schedule=faster_transformer.schedule,
        fixed={**PLAIN, "enable_chunked_prefill": False, "watermark": 0.0},
    ),
}


def settled(config: EngineConfig) -> EngineConfig:
    """Fill in what the configuration leaves to its local scheduler; refuse what that one cannot do."""
    batcher = batcher_named(config.batcher)
    for name, value in batcher.fixed.items():
        if getattr(config, name) not in (None, value):
            raise ValueError(f"{name}: {config.batcher} cannot have it at {getattr(config, name)}, only at {value}")
    rules: dict[str, Any] = {**batcher.defaults, **batcher.fixed}
    complete = replace(config, **{name: value for name, value in rules.items() if getattr(config, name) is None})
    if batcher.check is not None:
        batcher.check(complete)
    return complete


def batcher_named(name: str) -> Batcher:
    """Look a local scheduler up; an unknown name is refused with the nearest known one."""
    if name in BATCHERS:
        return BATCHERS[name]
    raise ValueError(f"batcher: {name!r} is none of {', '.join(BATCHERS)}{did_you_mean(name, BATCHERS)}")


def number_of(name: str) -> int:
    """Give the number by which the compiled loop knows a local scheduler."""
    return list(BATCHERS).index(name)


def is_compiled(batcher: Batcher) -> bool:
    """Tell whether a local scheduler can run within the compiled loop."""
    return bool(is_jitted(batcher.schedule))


def dispatcher_of(rules: Mapping[int, Callable[[State], bool]]) -> Callable[[State], bool]:
    """Compile the function that calls the rule with the number that the engine carries.

    It is written as source, one `if` for each rule: with a closure for each, the compiler would optimise the inner
    ones again for every outer one.
    """
    *others, last = rules
    lines = [f"    if number == {number}:\n        return rule_{number}(state)" for number in others]
    source = "\n".join(
        ("def dispatch(state):", "    number = state.engine[0].batcher", *lines, f"    return rule_{last}(state)")
    )
    names: dict[str, Any] = {f"rule_{number}": rule for number, rule in rules.items()}
    exec(compile(source, "<local schedulers>", "exec"), names)  # noqa: S102 - of numbers alone
    return inner_kernel(names["dispatch"])


def _compiled_rules() -> dict[int, Callable[[State], bool]]:
    """Return the rules that can run within the compiled loop, by number; all of them where nothing is compiled."""
    numbered = dict(enumerate(BATCHERS.values()))
    compiled = {number: batcher for number, batcher in numbered.items() if is_compiled(batcher)}
    return {number: batcher.schedule for number, batcher in (compiled or numbered).items()}


fill = dispatcher_of(_compiled_rules())
