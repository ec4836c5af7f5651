"""An engine's state at a moment, as plain values that can be stored, sent, and read by a later version."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from predictor.config import EngineConfig, require_count
from predictor.request import RequestFacts
from predictor.speculation import MAX_SPECULATIVE_TOKENS
from predictor.suggestions import require_choice

# 2: requests carry service level, weight, tenant, session and model; 3: what a local scheduler remembers; 4: legs;
# 5: draft tokens, LoRA adapters, encoder inputs
VERSION = 5
OLDEST_VERSION = 1  # that `simulator.codec` still reads
STAGES = ("", "to_fetch", "fetching", "fetched", "failed", "held")
STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """A request on an engine, and its progress.

    `block_ids` are the KV blocks of a running request; of a preempted one, its former blocks that still hold its
    tokens. `full_blocks` of them have their content registered for prefix hits.
    """

    __pydantic_config__: ClassVar = STRICT

    request: RequestFacts
    produced_tokens: int = 0
    computed_tokens: int = 0
    placeholders: int = 0
    in_flight_tokens: int = 0
    stale_tokens: int = 0
    num_blocks: int = 0
    full_blocks: int = 0
    block_ids: tuple[int, ...] = ()
    num_preemptions: int = 0
    prefill_tokens: int | None = None  # to be computed, as of its admission, before it decodes; None: unknown
    first_token_s: float | None = None  # None: not yet, or unknown
    tokens_on_time: int | None = None  # tokens that came by their deadlines; None: no deadlines, or unknown
    stage: str = ""  # of the transfer of its KV blocks, as in `STAGES`
    draft_tokens: int = 0  # proposed for its next step
    # Seconds until its transfer ends, if no other one shares the link, or until its blocks are held no longer.
    transfer_left_s: float | None = None
    referenced_inputs: tuple[int, ...] = ()  # of `request.encoder_inputs`, those whose outputs it refers to

    def __post_init__(self) -> None:
        """Refuse impossible counts."""
        for name in (
            "produced_tokens", "computed_tokens", "placeholders", "in_flight_tokens", "stale_tokens", "num_blocks",
            "full_blocks", "num_preemptions", "draft_tokens",
        ):  # fmt: skip
            require_count(name, getattr(self, name), at_least=0)
        if self.prefill_tokens is not None:
            require_count("prefill_tokens", self.prefill_tokens, at_least=0)
        if self.tokens_on_time is not None:
            require_count("tokens_on_time", self.tokens_on_time, at_least=0)
            if self.tokens_on_time > self.produced_tokens:
                raise ValueError(f"tokens_on_time: {self.tokens_on_time} are more than its produced_tokens")
        if self.first_token_s is not None and not (math.isfinite(self.first_token_s) and self.first_token_s >= 0):
            raise ValueError(f"first_token_s: must be a time from 0 on, not {self.first_token_s}")
        if any(not 0 <= index < len(self.request.encoder_inputs) for index in self.referenced_inputs):
            raise ValueError(f"referenced_inputs: are not among the {len(self.request.encoder_inputs)} of the request")
        require_choice("stage", self.stage, STAGES[1:], or_empty=True)
        if self.transfer_left_s is not None and not (math.isfinite(self.transfer_left_s) and self.transfer_left_s >= 0):
            raise ValueError(f"transfer_left_s: must be a time from 0 on, not {self.transfer_left_s}")
        # draft tokens in flight count as computed until they are rejected
        drafts = min(max(0, self.in_flight_tokens - 1), MAX_SPECULATIVE_TOKENS)
        known = self.request.prompt_tokens + self.produced_tokens + self.placeholders + drafts
        if self.computed_tokens > known:
            raise ValueError(f"computed_tokens: {self.computed_tokens} is more than its {known} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUnderWay:
    """A step that the engine has planned and not finished: its requests in order, and which of them will sample.

    `drafts` are the draft tokens among those of each request that has some.
    """

    __pydantic_config__: ClassVar = STRICT

    start_s: float
    scheduled: dict[str, int]
    sampled: tuple[str, ...] = ()
    swapped_tokens: int = 0  # whose KV it copies to host memory, or back
    extra_s: float = 0.0  # of its duration, what loading adapters and the encoder take
    drafts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse impossible steps."""
        if not math.isfinite(self.start_s):
            raise ValueError(f"start_s: must be a time, not {self.start_s}")
        require_count("swapped_tokens", self.swapped_tokens, at_least=0)
        if not (math.isfinite(self.extra_s) and self.extra_s >= 0):
            raise ValueError(f"extra_s: must be a time from 0 on, not {self.extra_s}")
        for name, tokens in self.scheduled.items():
            require_count(f"scheduled.{name}", tokens, at_least=1)
        for name, tokens in self.drafts.items():
            require_count(f"drafts.{name}", tokens, at_least=1)
            if tokens >= self.scheduled.get(name, 0):
                raise ValueError(f"drafts.{name}: {tokens} must be fewer than its tokens in the step")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The contents of KV blocks, and the order in which the free ones will be reused.

    `contents` maps a block's id to the hash of its content; `own_contents` maps a block whose content only one request
    can hit to that request's id and the block's position in it.
    """

    __pydantic_config__: ClassVar = STRICT

    free_block_ids: tuple[int, ...]
    contents: dict[int, int | str] = field(default_factory=dict)
    own_contents: dict[int, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedClient:
    """A client whose tokens a local scheduler counts: a tenant's number, and one weight of its requests."""

    __pydantic_config__: ClassVar = STRICT

    tenant: int
    weight: float
    tokens: float  # served so far, by weight
    waits: bool = False  # it had a waiting request when the last step was planned

    def __post_init__(self) -> None:
        """Refuse counts that cannot be."""
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight: must be above 0, not {self.weight}")
        if not (math.isfinite(self.tokens) and self.tokens >= 0):
            raise ValueError(f"tokens: must be at least 0, not {self.tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What an engine's local scheduler remembers between steps.

    `correction` is the factor of its estimates of step times, which differ from step to step by the number of steps
    planned so far; `numbers` are those of its own.
    """

    __pydantic_config__: ClassVar = STRICT

    num_steps: int = 0
    correction: float = 1.0
    numbers: tuple[float, ...] = ()
    clients: tuple[ServedClient, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no local scheduler can have stored."""
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 0:
            raise ValueError(f"num_steps: must be a whole number from 0 on, not {self.num_steps!r}")
        if not (math.isfinite(self.correction) and self.correction > 0):
            raise ValueError(f"correction: must be above 0, not {self.correction}")
        if not all(math.isfinite(number) for number in self.numbers):
            raise ValueError("numbers: must be finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """A LoRA adapter in host memory, by `request.adapter_number`, and whether it is in a GPU slot too."""

    __pydantic_config__: ClassVar = STRICT

    number: int
    is_active: bool = True

    def __post_init__(self) -> None:
        """Refuse the number of the base model."""
        if isinstance(self.number, bool) or not isinstance(self.number, int) or not 0 < abs(self.number) <= 2**63:
            raise ValueError(f"number: must be a number of 64 bits other than 0, not {self.number!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOutput:
    """An output of the encoder that the engine keeps, by `request.identity_number` of its input.

    `num_refs` requests refer to it; of those without one, the one with the least `unused_since` is removed first.
    """

    __pydantic_config__: ClassVar = STRICT

    identity: int
    tokens: int
    num_refs: int = 0
    unused_since: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible counts."""
        require_count("tokens", self.tokens, at_least=1)
        for name in ("num_refs", "unused_since"):
            require_count(name, getattr(self, name), at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoEndedBlock:
    """A KV block that a real-time request fills from the left and a best-effort request from the right.

    `checkpointed_tokens` of the right are in host memory.
    """

    __pydantic_config__: ClassVar = STRICT

    block_id: int
    left: str | None = None
    left_tokens: int = 0
    right: str | None = None
    right_tokens: int = 0
    checkpointed_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible counts."""
        for name in ("block_id", "left_tokens", "right_tokens", "checkpointed_tokens"):
            require_count(name, getattr(self, name), at_least=0)
        for name in ("left", "right"):
            if (getattr(self, name) is None) != (getattr(self, f"{name}_tokens") == 0):
                raise ValueError(f"{name}_tokens: must be above 0 where a request has this side, else 0")
        if self.checkpointed_tokens > self.right_tokens:
            raise ValueError(f"checkpointed_tokens: {self.checkpointed_tokens} are more than right_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An engine's state at `taken_s`; times are on the engine's clock.

    `held` are requests that have ended, and whose blocks are held until they are fetched, or have been fetched.
    `reserved` are requests that are reserved for the engine and that it does not report yet. Without `kv_cache` the
    contents of blocks are unknown, and forecasts contain no prefix hits. `two_ended_blocks` are those in use with
    kv_layout bidirectional. `adapters` are in host memory, the least recently used one first.
    """

    __pydantic_config__: ClassVar = STRICT

    version: int
    taken_s: float
    config: EngineConfig
    num_free_blocks: int
    running: tuple[LiveRequest, ...] = ()
    waiting: tuple[LiveRequest, ...] = ()
    held: tuple[LiveRequest, ...] = ()
    reserved: tuple[RequestFacts, ...] = ()
    steps: tuple[StepUnderWay, ...] = ()
    kv_cache: KvCache | None = None
    decodes_since_look: int = 0
    memory: Memory = Memory()
    two_ended_blocks: tuple[TwoEndedBlock, ...] = ()
    adapters: tuple[LoadedAdapter, ...] = ()
    encoder_outputs: tuple[EncoderOutput, ...] = ()

    def __post_init__(self) -> None:
        """Refuse other versions, and states that no engine can have."""
        if self.version != VERSION:
            raise ValueError(f"version: {self.version} is not {VERSION}, the one that can be read here")
        if not (math.isfinite(self.taken_s) and self.taken_s >= 0):
            raise ValueError(f"taken_s: must be a time from 0 on, not {self.taken_s}")
        require_count("num_free_blocks", self.num_free_blocks, at_least=0)
        require_count("decodes_since_look", self.decodes_since_look, at_least=0)
        if len(self.running) > self.config.max_num_seqs:
            raise ValueError(f"running: {len(self.running)} requests are more than max_num_seqs allows")
        seen: set[str] = set()
        live = [item.request for item in (*self.running, *self.waiting, *self.held)]
        for request in (*live, *self.reserved):
            if request.request_id in seen:
                raise ValueError(f"request_id: {request.request_id!r} is a duplicate")
            seen.add(request.request_id)
        if len(self.steps) > 2:
            raise ValueError(f"steps: at most 2 can be in flight, not {len(self.steps)}")
