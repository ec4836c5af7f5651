"""Local schedulers: the rules with which engines fill their steps, one per file, in one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from numba.core import types
from numba.extending import is_jitted

from predictor.batching import (
    bros,
    bros_round_robin,
    deadline_forecast,
    decode_then_edf,
    density,
    edf,
    fair_batching,
    faster_transformer,
    generic,
    lightllm,
    orca,
    sarathi,
    sarathi_fcfs,
    sarathi_priority,
    sglang,
    sjf,
    slide_batching,
    vllm_limits,
    vllm_v0,
    vllm_v1,
    weighted_vtc,
)
from predictor.compiled import inner_kernel
from predictor.config import BIDIRECTIONAL, FETCHING_ROLES, PLAIN, SWAP, EngineConfig
from predictor.kernel_addresses import by_address
from predictor.state import State
from predictor.state_allocation import state_type
from predictor.suggestions import require_known, unknown_choice


@dataclass(frozen=True, slots=True)
class BatcherOption:
    """A number with which a configuration changes a local scheduler."""

    name: str
    default: float
    help: str
    minimum: float = 0.0
    maximum: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Batcher:
    """A local scheduler: `schedule` fills one step.

    It returns whether the next step will decode all running requests, provided that no request ends or arrives and
    blocks suffice: the loop then repeats that step without calling `schedule`. False is always correct, and slower.

    A kernel runs within the compiled loop; a Python function works as well, slower. `defaults` apply to rules that a
    configuration leaves at None, `fixed` are the rules that a configuration cannot change.
    """

    schedule: Callable[[State], bool]
    null_blocks: int = 0  # KV blocks that the engine keeps for itself
    sorts_arrivals: bool = True  # with priorities, the waiting queue is always sorted by them
    orders_queue: bool = False  # it orders the waiting requests itself, and may read all of them
    requeues: bool = False  # a preempted request goes to the end of the queue
    is_sglang: bool = False  # the engine around it behaves as SGLang: see `is_sglang` of the engine's state
    fetches: bool = False  # it serves decode legs, whose KV blocks are fetched
    speculates: bool = False  # it schedules draft tokens
    plans: bool = False  # a real vLLM can carry its plans out
    estimates: bool = False  # it estimates step times
    has_inputs: bool = False  # it limits the adapters, and the inputs of an encoder, in a step as vLLM does
    max_clients: int = 0  # whose tokens it counts
    count_served: Callable[[State], None] | None = None  # counts what a step serves; where it only plans, called after
    options: tuple[BatcherOption, ...] = ()  # in the order in which the engine's state has them
    kv_layouts: tuple[str, ...] = (PLAIN,)  # that it works with
    decode_reserve: int = 0  # blocks that must be free before each decode
    defaults: Mapping[str, bool | float | str] = field(default_factory=dict)
    fixed: Mapping[str, bool | float | str] = field(default_factory=dict)
    longest_response: Callable[[EngineConfig, int], int] | None = None  # by prompt tokens; None: max_model_len decides
    check: Callable[[EngineConfig], None] | None = None  # refuses a configuration with which the engine does not start


def _ordered(
    schedule: Callable[[State], bool],
    *options: BatcherOption,
    max_clients: int = 0,
    count_served: Callable[[State], None] | None = None,
    plans: bool = True,
    kv_layouts: tuple[str, ...] = (PLAIN, SWAP),
    **fixed: bool,
) -> Batcher:
    """Return a local scheduler that orders all requests and manages memory as vLLM v1 does."""
    return Batcher(
        schedule=schedule,
        null_blocks=1,
        orders_queue=True,
        plans=plans,
        estimates=True,
        max_clients=max_clients,
        count_served=count_served,
        options=options,
        kv_layouts=kv_layouts,
        defaults={"enable_prefix_caching": True, "async_scheduling": False, "watermark": 0.0},
        fixed={"enable_chunked_prefill": True, **fixed},
        check=vllm_limits.check,
    )


def _switch(name: str, default: float, help_: str, maximum: float = 1.0) -> BatcherOption:
    return BatcherOption(name, default, help_, maximum=maximum)


def _eta(default: float, what: str = "limit of a step's time; 0: no limit") -> BatcherOption:
    return BatcherOption("eta", default, f"Fraction of the shortest TPOT target that is the {what}.")


FIRST_TOKEN_WEIGHT = BatcherOption(
    "first_token_weight", 1.0, "Weight of a first token, as a multiple of a later one's.", minimum=1e-6
)
FROM_FIRST_TOKEN = _switch(
    "from_first_token", 0.0, "1: where a first token is early, the others are due from then; 0: from its target."
)
TOKEN_BUDGET = BatcherOption("token_budget", 0.0, "Maximum number of tokens of a step; 0: max_num_batched_tokens.")
NO_ERRORS = EngineConfig()
NO_CACHE = {"enable_prefix_caching": False, "async_scheduling": False}

# Rules that a KV layout fixes.
LAYOUT_RULES: Mapping[str, Mapping[str, bool | float]] = {
    PLAIN: {},
    SWAP: NO_CACHE,
    BIDIRECTIONAL: {**NO_CACHE, "watermark": 0.0},
}

VLLM_V0 = Batcher(
    schedule=vllm_v0.schedule,
    sorts_arrivals=False,
    decode_reserve=1,
    defaults={"enable_chunked_prefill": False, "watermark": 0.01},
    fixed=NO_CACHE,
    check=vllm_limits.check,
)

BATCHERS = {
    "vllm_v1": Batcher(
        schedule=vllm_v1.schedule,
        fetches=True,
        has_inputs=True,
        speculates=True,
        null_blocks=1,
        defaults={
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "async_scheduling": False,
            "watermark": 0.0,
        },
        kv_layouts=(PLAIN, SWAP),
        check=vllm_limits.check,
    ),
    "vllm_v0": VLLM_V0,
    # the default of vLLM v0, under the name that ProServe gives it
    "vllm_fcfs": replace(VLLM_V0, fixed={**NO_CACHE, "enable_chunked_prefill": False, "scheduling_policy": "fcfs"}),
    "sarathi": Batcher(
        schedule=sarathi.schedule,
        decode_reserve=1,
        defaults={"watermark": 0.01},
        fixed={**NO_CACHE, "enable_chunked_prefill": True},
    ),
    "orca": Batcher(schedule=orca.schedule, fixed={**NO_CACHE, "enable_chunked_prefill": False, "watermark": 0.0}),
    "lightllm": Batcher(
        schedule=lightllm.schedule, fixed={**NO_CACHE, "enable_chunked_prefill": False, "watermark": 0.0}
    ),
    "faster_transformer": Batcher(
        schedule=faster_transformer.schedule,
        fixed={**NO_CACHE, "enable_chunked_prefill": False, "watermark": 0.0},
    ),
    "sglang": Batcher(
        schedule=sglang.schedule,
        requeues=True,
        is_sglang=True,
        sorts_arrivals=False,
        defaults={"enable_prefix_caching": True, "enable_chunked_prefill": True, "async_scheduling": True},
        fixed={"watermark": 0.0, "scheduling_policy": "fcfs"},
        options=(
            BatcherOption(
                "schedule_conservativeness", 1.0, "Factor of what is reserved for the rest of running responses."
            ),
            _switch("longest_prefix_match", 0.0, "1: SGLang's schedule_policy lpm, 0: fcfs."),
            BatcherOption(
                "max_prefill_tokens",
                16384.0,
                "Tokens of a prefill after which no further request is admitted; max_num_batched_tokens is SGLang's "
                "chunked_prefill_size, or without chunked prefill its max_prefill_tokens.",
                minimum=1.0,
            ),
            _switch("mixed_chunk", 0.0, "1: SGLang's enable_mixed_chunk, decodes in the same step as prefills."),
            BatcherOption("init_new_token_ratio", 0.7, "Share of the rest of a response that is reserved at first."),
            BatcherOption("min_new_token_ratio_factor", 0.14, "Part of that share to which it decays.", maximum=1.0),
            BatcherOption("new_token_ratio_decay_steps", 600.0, "Decodes in which it decays.", minimum=1.0),
            BatcherOption("retract_decode_steps", 20.0, "Decodes for which a retraction makes room."),
            BatcherOption(
                "clip_max_new_tokens", 4096.0, "Most tokens of a response for which room is reserved.", minimum=1.0
            ),
        ),
        longest_response=sglang.longest_response,
        check=sglang.check,
    ),
    "generic": Batcher(
        schedule=generic.schedule,
        fixed={**NO_CACHE, "enable_chunked_prefill": True, "watermark": 0.0, "scheduling_policy": "fcfs"},
        options=(_switch("prefill_first", 0.0, "1: prefills interrupt decodes, 0: both share steps."),),
    ),
    "edf": _ordered(edf.schedule, _eta(0.0), FROM_FIRST_TOKEN),
    "sjf": _ordered(sjf.schedule, _eta(0.0)),
    "density": _ordered(density.schedule, _eta(0.5), FIRST_TOKEN_WEIGHT),
    "slide_batching": _ordered(
        slide_batching.schedule,
        BatcherOption("gamma", 1.0, "Aggressiveness: with more, more requests are urgent and go by density."),
        _eta(0.5, "least time budget of a step"),
        _switch(
            "phi",
            0.0,
            "Estimate of the load: 0 by all requests (φ_a), 1 by those before each (φ_c), 2 by all, one in each step "
            "(φ_p, for engines that only prefill).",
            maximum=2.0,
        ),
        FIRST_TOKEN_WEIGHT,
        FROM_FIRST_TOKEN,
        _switch("order", 0.0, "0: sliding boundary, 1: only by deadline, 2: only by density.", maximum=2.0),
        BatcherOption("eta_max", 0.0, "Fraction of the shortest TPOT target that limits a step's time; 0: no limit."),
        _switch("skip_overdue", 0.0, "1: tokens that are late already do not shorten a step."),
        _switch("estimator", 1.0, "0: without the step-time estimator, by numbers of tokens."),
        TOKEN_BUDGET,
    ),
    "decode_then_edf": _ordered(decode_then_edf.schedule, FROM_FIRST_TOKEN),
    "deadline_forecast": _ordered(
        deadline_forecast.schedule,
        _eta(0.6, "least limit of a step's time; 0: no limit"),
        replace(FIRST_TOKEN_WEIGHT, default=20.0),
        replace(FROM_FIRST_TOKEN, default=1.0),
        BatcherOption(
            "age_limit", 10.0, "A request that has waited this often its TTFT target goes before others; 0: none does."
        ),
        _switch("age_share", 0.05, "Part of the time in which requests beyond the age limit go before others."),
    ),
    "fair_batching": _ordered(
        fair_batching.schedule, _eta(1.0, "least time budget of a step that has decodes"), FROM_FIRST_TOKEN
    ),
    "sarathi_fcfs": _ordered(sarathi_fcfs.schedule, TOKEN_BUDGET),
    "sarathi_priority": _ordered(sarathi_priority.schedule, TOKEN_BUDGET),
    "weighted_vtc": _ordered(
        weighted_vtc.schedule,
        BatcherOption("decode_cost", 2.0, "Service that a decoded token counts as; one of a prompt counts as 1."),
        TOKEN_BUDGET,
        max_clients=weighted_vtc.MAX_CLIENTS,
        count_served=weighted_vtc.count_tokens,
    ),
    "bros": _ordered(
        bros.schedule,
        BatcherOption("base_batch_size", 128.0, "Number of requests of a step to which it falls back.", minimum=1.0),
        _eta(0.0, "least time budget of a step"),
        plans=False,
        kv_layouts=(PLAIN, SWAP, BIDIRECTIONAL),
        async_scheduling=False,
    ),
    "bros_round_robin": _ordered(bros_round_robin.schedule, plans=False, async_scheduling=False),
}


def settled(config: EngineConfig) -> EngineConfig:  # noqa: C901, PLR0912 - one check after the other
    """Return the configuration with its local scheduler's rules filled in; refuse rules that it does not support."""
    batcher = batcher_named(config.batcher)
    for name, value in batcher.fixed.items():
        if getattr(config, name) not in (None, value):
            raise ValueError(f"{name}: {config.batcher} supports only {value}, not {getattr(config, name)}")
    for name in ("estimator_factor", "estimator_noise", "estimator_momentum"):
        if not batcher.estimates and getattr(config, name) != getattr(NO_ERRORS, name):
            raise ValueError(f"{name}: {config.batcher} does not estimate step times")
    if config.kv_layout not in batcher.kv_layouts:
        supported = ", ".join(batcher.kv_layouts)
        raise ValueError(f"kv_layout: {config.batcher} supports only {supported}, not {config.kv_layout}")
    if config.kv_role in FETCHING_ROLES and not batcher.fetches:
        raise ValueError(f"kv_role: {config.batcher} serves no decode legs, so it must be empty or kv_producer")
    for name in ("max_loras", "max_num_encoder_input_tokens"):
        if getattr(config, name) and not batcher.has_inputs:
            raise ValueError(f"{name}: {config.batcher} does not limit it, so it must be 0")
    if config.max_num_encoder_input_tokens and config.kv_layout != PLAIN:
        raise ValueError(f"max_num_encoder_input_tokens: needs kv_layout plain, not {config.kv_layout}")
    if config.max_num_encoder_input_tokens and config.num_prefill_lookahead_tokens:
        raise ValueError("num_prefill_lookahead_tokens: is not modelled with max_num_encoder_input_tokens")
    if config.speculative_method and not batcher.speculates:
        raise ValueError(f"speculative_method: {config.batcher} does not schedule draft tokens, so it must be empty")
    fixed_by_layout = LAYOUT_RULES[config.kv_layout]
    for name, value in fixed_by_layout.items():
        if getattr(config, name) not in (None, value):
            raise ValueError(f"{name}: kv_layout {config.kv_layout} supports only {value}, not {getattr(config, name)}")
    rules: dict[str, Any] = {**batcher.defaults, **batcher.fixed, **fixed_by_layout}
    complete = replace(
        config,
        **{name: value for name, value in rules.items() if getattr(config, name) is None},
        batcher_options=_settled_options(config, batcher),
    )
    if batcher.check is not None:
        batcher.check(complete)
    return complete


def _settled_options(config: EngineConfig, batcher: Batcher) -> dict[str, float]:
    """Return all options of a local scheduler; refuse one that it does not have, or that is out of range."""
    try:
        require_known(
            config.batcher_options, [option.name for option in batcher.options], f"option of {config.batcher}"
        )
    except ValueError as error:
        raise ValueError(f"batcher_options.{error}") from None
    settled_options = {}
    for option in batcher.options:
        value = float(config.batcher_options.get(option.name, option.default))
        if value < option.minimum:
            raise ValueError(f"batcher_options.{option.name}: must be at least {option.minimum:g}, not {value:g}")
        if value > option.maximum:
            raise ValueError(f"batcher_options.{option.name}: must be at most {option.maximum:g}, not {value:g}")
        settled_options[option.name] = value
    return settled_options


def batcher_named(name: str) -> Batcher:
    """Return a local scheduler by name; the error for an unknown one suggests the closest."""
    if name in BATCHERS:
        return BATCHERS[name]
    raise unknown_choice("batcher", name, BATCHERS)


def number_of(name: str) -> int:
    """Return the number of a local scheduler in the compiled loop."""
    return list(BATCHERS).index(name)


def is_compiled(batcher: Batcher) -> bool:
    """Return whether a local scheduler can run within the compiled loop."""
    return bool(is_jitted(batcher.schedule))


_call_rule = by_address(
    "local_schedulers", [batcher.schedule for batcher in BATCHERS.values()], types.boolean, lambda: (state_type(),)
)


@inner_kernel
def fill(state: State) -> bool:
    """Fill a step by the local scheduler with the number in the state; return whether the step will repeat itself."""
    return bool(_call_rule(state.engine[0].batcher, state))
