"""An engine's configuration: its limits and rules, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar

from predictor.speculation import (
    MAX_SPECULATIVE_TOKENS,
    METHODS,
    NO_METHOD,
    ExpectedDrafts,
    SpeculativeMethod,
    configured_drafts,
)
from predictor.suggestions import require_choice
from predictor.vllm_versions import release_of

SCHEDULING_POLICIES = ("fcfs", "priority")
MAX_NOISE = 10  # of the logarithm of an estimate
PLAIN, SWAP, BIDIRECTIONAL = "plain", "swap", "bidirectional"
KV_LAYOUTS = (PLAIN, SWAP, BIDIRECTIONAL)  # a layout's number in the engine model is its index here
PRODUCER, CONSUMER, PRODUCER_AND_CONSUMER = "kv_producer", "kv_consumer", "kv_both"
KV_ROLES = ("", PRODUCER, CONSUMER, PRODUCER_AND_CONSUMER)
HOLDING_ROLES, FETCHING_ROLES = (PRODUCER, PRODUCER_AND_CONSUMER), (CONSUMER, PRODUCER_AND_CONSUMER)
FAIL, RECOMPUTE = "fail", "recompute"
KV_LOAD_FAILURE_POLICIES = (FAIL, RECOMPUTE)
MAX_LORAS = 4096  # in host memory
MAX_ENCODER_CACHE = 2**22  # tokens
MAX_COUNT = 2**31 - 1  # counts are kept in 32-bit block tables


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """An engine's limits and batching rules; the error for an invalid one names it.

    For rules that are None the default of the local scheduler (`batcher`) holds.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    batcher: Annotated[str, "Local scheduler of the engine."] = "vllm_v1"
    vllm_version: Annotated[
        str, "Version of vLLM whose rules the local scheduler vllm_v1 has, such as 0.31.0; empty: 0.32."
    ] = ""
    max_num_seqs: Annotated[int, "Maximum number of requests that run at once."] = 256
    max_num_batched_tokens: Annotated[int, "Maximum number of tokens of a step."] = 2048
    block_size: Annotated[int, "Tokens per KV block."] = 16
    num_gpu_blocks: Annotated[int, "Number of KV blocks, as vLLM counts them: its null block is included."] = 4096
    max_model_len: Annotated[int, "Maximum number of tokens of a request, its response included."] = 4096
    scheduling_policy: Annotated[str, "Order of the waiting queue: fcfs or priority."] = "fcfs"
    enable_prefix_caching: Annotated[bool | None, "Keep KV blocks for requests with the same prefix, as in vLLM."] = (
        None
    )
    enable_chunked_prefill: Annotated[bool | None, "Split prompts over several steps, as in vLLM."] = None
    async_scheduling: Annotated[bool | None, "Schedule a step while the one before it runs, as in vLLM."] = None
    long_prefill_token_threshold: Annotated[
        int, "Maximum number of prompt tokens of a request in a step with others; 0: no limit."
    ] = 0
    long_prefill_token_threshold_adaptive: Annotated[
        bool,
        "The threshold is at least max_num_batched_tokens over the number of running and waiting requests, as in vLLM "
        "from 0.31 on.",
    ] = False
    watermark: Annotated[float | None, "Fraction of the KV blocks that admissions leave free."] = None
    scheduler_reserve_full_isl: Annotated[
        bool, "Admit a request only when all its prompt's KV blocks are free, as in vLLM."
    ] = True
    kv_layout: Annotated[
        str,
        "KV memory: plain (a preempted request is computed again), swap (it is copied to host memory and back), or "
        "bidirectional (a KV block is shared by a real-time and a best-effort request).",
    ] = PLAIN
    host_link_bytes_per_s: Annotated[
        float, "Bandwidth between the GPU and host memory, for kv_layout swap and bidirectional."
    ] = 25e9
    kv_bytes_per_token: Annotated[
        int,
        "Bytes of KV cache per token that one link copies, to host memory or to another engine; 0: unknown, which only "
        "kv_layout plain allows.",
    ] = 0
    kv_role: Annotated[
        str,
        "Part of the engine's KV connector in disaggregated prefill and decode, as in vLLM: kv_producer, kv_consumer "
        "or kv_both; empty: no connector.",
    ] = ""
    kv_load_failure_policy: Annotated[
        str, "What happens to a request whose KV blocks cannot be fetched, as in vLLM: fail or recompute."
    ] = FAIL
    kv_lease_s: Annotated[
        float, "Time for which the KV blocks of a finished prefill are held unless they are fetched, in seconds."
    ] = 30.0
    kv_transfer_base_s: Annotated[float, "Time that every transfer of KV blocks takes, in seconds."] = 0.0005
    kv_transfer_bytes_per_s: Annotated[float, "Bandwidth of transfers of KV blocks between engines."] = 25e9
    kv_transfer_block_s: Annotated[
        float, "Additional time per KV block that is transferred, for its descriptors, in seconds."
    ] = 0.0
    kv_transfer_shared: Annotated[bool, "Transfers to an engine that overlap share its bandwidth."] = True
    max_loras: Annotated[
        int, "Maximum number of LoRA adapters in a step, and in GPU memory, as in vLLM; 0: adapters are not modelled."
    ] = 0
    max_cpu_loras: Annotated[
        int, "Maximum number of LoRA adapters in host memory, as in vLLM; 0: as many as max_loras."
    ] = 0
    lora_load_s: Annotated[float, "Time to load a LoRA adapter from disk into host memory, in seconds."] = 0.0
    lora_activate_s: Annotated[float, "Time to copy a LoRA adapter from host to GPU memory, in seconds."] = 0.0
    max_num_encoder_input_tokens: Annotated[
        int,
        "Maximum number of tokens of images and audio that the encoder computes in a step, as in vLLM; 0: there is no "
        "encoder.",
    ] = 0
    encoder_cache_size: Annotated[int, "Tokens whose encoder outputs the engine keeps, as in vLLM."] = 0
    disable_chunked_mm_input: Annotated[bool, "Compute the tokens of an image in one step, as in vLLM."] = False
    encoder_token_s: Annotated[float, "Time that the encoder takes for a token of an image, in seconds."] = 0.0
    speculative_method: Annotated[
        str,
        "Speculative decoding: ngram, draft_model, eagle or mtp, as in vLLM's speculative configuration; empty: none.",
    ] = ""
    num_speculative_tokens: Annotated[int, "Draft tokens per request and step, with a speculative_method; else 0."] = 0
    num_prefill_lookahead_tokens: Annotated[
        int, "Prompt tokens that the last chunk of a prompt has at least, for MTP with several modules; 0: no limit."
    ] = 0
    speculative_acceptance: Annotated[
        float,
        "Probability that a draft token is accepted after the ones before it, until it is learnt from the engine.",
    ] = 0.6
    speculative_proposals: Annotated[
        float, "Share of requests and steps with a draft, for a method that does not always propose one, until learnt."
    ] = 1.0
    draft_step_s: Annotated[float, "Additional time of a step in which draft tokens are proposed, in seconds."] = 0.0
    batcher_options: Annotated[dict[str, float], "Options of the local scheduler, by name."] = field(
        default_factory=dict, hash=False
    )
    estimator_factor: Annotated[
        float, "Step times that the local scheduler estimates, as a multiple of the real ones."
    ] = 1.0
    estimator_noise: Annotated[
        float,
        "Standard deviation of the logarithm of the local scheduler's estimates of step times; each step has its own "
        "error.",
    ] = 0.0
    estimator_momentum: Annotated[
        float,
        "Weight of the old correction factor when the local scheduler corrects its estimates after each step; 0: no "
        "correction, as it knows the engine's pace.",
    ] = 0.0
    estimator_seed: Annotated[int, "Seed of the errors that estimator_noise adds."] = 0

    def __post_init__(self) -> None:
        """Refuse values that no engine can run with."""
        self._check_version()
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len"):
            require_count(name, getattr(self, name), at_least=1)
        require_count("num_gpu_blocks", self.num_gpu_blocks, at_least=2)
        require_count("long_prefill_token_threshold", self.long_prefill_token_threshold, at_least=0)
        require_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"{name}: must be true or false, not {getattr(self, name)!r}")
        if self.watermark is not None and not (math.isfinite(self.watermark) and 0 <= self.watermark < 1):
            raise ValueError(f"watermark: must be at least 0 and below 1, not {self.watermark}")
        self._check_estimator()
        require_choice("kv_layout", self.kv_layout, KV_LAYOUTS)
        if not (math.isfinite(self.host_link_bytes_per_s) and self.host_link_bytes_per_s > 0):
            raise ValueError(f"host_link_bytes_per_s: must be above 0, not {self.host_link_bytes_per_s}")
        require_count("kv_bytes_per_token", self.kv_bytes_per_token, at_least=0)
        if self.kv_layout != PLAIN and self.kv_bytes_per_token == 0:
            raise ValueError(f"kv_bytes_per_token: must be above 0 with kv_layout {self.kv_layout}")
        self._check_transfers()
        self._check_adapters()
        self._check_encoder()
        self._check_speculation()
        if not isinstance(self.batcher_options, Mapping):
            raise ValueError(f"batcher_options: must be numbers by name, not {self.batcher_options!r}")
        for name, value in self.batcher_options.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"batcher_options.{name}: must be a number, not {value!r}")

    def _check_version(self) -> None:
        if not isinstance(self.vllm_version, str):
            raise ValueError(f"vllm_version: must be a text such as 0.32.0, not {self.vllm_version!r}")
        if self.vllm_version:
            try:
                release_of(self.vllm_version)
            except ValueError as error:
                raise ValueError(f"vllm_version: {error}") from None
        if self.long_prefill_token_threshold_adaptive not in (True, False):
            raise ValueError(
                "long_prefill_token_threshold_adaptive: must be true or false, not "
                f"{self.long_prefill_token_threshold_adaptive!r}"
            )

    def _check_transfers(self) -> None:
        require_choice("kv_role", self.kv_role, KV_ROLES[1:], or_empty=True)
        if self.kv_role and self.kv_layout != PLAIN:
            raise ValueError(f"kv_role: {self.kv_role} needs kv_layout plain, not {self.kv_layout}")
        if self.kv_load_failure_policy not in KV_LOAD_FAILURE_POLICIES:
            raise ValueError(f"kv_load_failure_policy: {self.kv_load_failure_policy!r} is neither fail nor recompute")
        for name in ("kv_lease_s", "kv_transfer_bytes_per_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}: must be above 0, not {getattr(self, name)}")
        for name in ("kv_transfer_base_s", "kv_transfer_block_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}: must be at least 0, not {getattr(self, name)}")
        if self.kv_transfer_shared not in (True, False):
            raise ValueError(f"kv_transfer_shared: must be true or false, not {self.kv_transfer_shared!r}")

    def _check_adapters(self) -> None:
        for name in ("max_loras", "max_cpu_loras"):
            require_count(name, getattr(self, name), at_least=0)
        if self.max_cpu_loras and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras: {self.max_cpu_loras} is below max_loras {self.max_loras}")
        if self.num_cpu_loras > MAX_LORAS:
            raise ValueError(f"max_cpu_loras: must be at most {MAX_LORAS}, not {self.num_cpu_loras}")
        if self.max_cpu_loras and not self.max_loras:
            raise ValueError("max_cpu_loras: needs max_loras above 0")
        for name in ("lora_load_s", "lora_activate_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}: must be at least 0, not {getattr(self, name)}")

    def _check_encoder(self) -> None:
        for name in ("max_num_encoder_input_tokens", "encoder_cache_size"):
            require_count(name, getattr(self, name), at_least=0)
        if (self.max_num_encoder_input_tokens > 0) != (self.encoder_cache_size > 0):
            raise ValueError("encoder_cache_size: must be above 0 where max_num_encoder_input_tokens is, else 0")
        if self.encoder_cache_size > MAX_ENCODER_CACHE:
            raise ValueError(f"encoder_cache_size: must be at most {MAX_ENCODER_CACHE}, not {self.encoder_cache_size}")
        if self.disable_chunked_mm_input not in (True, False):
            raise ValueError(f"disable_chunked_mm_input: must be true or false, not {self.disable_chunked_mm_input!r}")
        if not (math.isfinite(self.encoder_token_s) and self.encoder_token_s >= 0):
            raise ValueError(f"encoder_token_s: must be at least 0, not {self.encoder_token_s}")

    def _check_speculation(self) -> None:
        require_choice("speculative_method", self.speculative_method, METHODS, or_empty=True)
        require_count("num_speculative_tokens", self.num_speculative_tokens, at_least=0)
        if bool(self.speculative_method) != (self.num_speculative_tokens > 0):
            needed = f"at least 1 with speculative_method {self.speculative_method}"
            raise ValueError(
                f"num_speculative_tokens: must be {needed if self.speculative_method else '0 without one'}"
            )
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens: must be at most {MAX_SPECULATIVE_TOKENS}, not {self.num_speculative_tokens}"
            )
        require_count("num_prefill_lookahead_tokens", self.num_prefill_lookahead_tokens, at_least=0)
        if self.num_prefill_lookahead_tokens > self.num_speculative_tokens:
            raise ValueError(
                f"num_prefill_lookahead_tokens: {self.num_prefill_lookahead_tokens} are more than "
                f"num_speculative_tokens {self.num_speculative_tokens}"
            )
        for name in ("speculative_acceptance", "speculative_proposals"):
            if not (math.isfinite(getattr(self, name)) and 0 <= getattr(self, name) <= 1):
                raise ValueError(f"{name}: must lie between 0 and 1, not {getattr(self, name)}")
        if not (math.isfinite(self.draft_step_s) and self.draft_step_s >= 0):
            raise ValueError(f"draft_step_s: must be a time from 0 on, not {self.draft_step_s}")
        if self.speculative_method and self.kv_layout != PLAIN:
            raise ValueError(
                f"speculative_method: {self.speculative_method} needs kv_layout plain, not {self.kv_layout}"
            )
        if self.speculative_method and self.kv_role:
            raise ValueError(
                f"speculative_method: {self.speculative_method} is not modelled with kv_role {self.kv_role}"
            )

    def _check_estimator(self) -> None:
        for name in ("estimator_factor", "estimator_noise", "estimator_momentum"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name}: must be a number, not {value!r}")
        if not self.estimator_factor > 0:
            raise ValueError(f"estimator_factor: must be above 0, not {self.estimator_factor}")
        if not 0 <= self.estimator_noise <= MAX_NOISE:
            raise ValueError(f"estimator_noise: must be at least 0 and at most {MAX_NOISE}, not {self.estimator_noise}")
        if not 0 <= self.estimator_momentum < 1:
            raise ValueError(f"estimator_momentum: must be at least 0 and below 1, not {self.estimator_momentum}")
        require_count("estimator_seed", self.estimator_seed, at_least=0)

    @property
    def speculation(self) -> SpeculativeMethod:
        """What the method of speculative decoding reserves."""
        return METHODS.get(self.speculative_method, NO_METHOD)

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens after those of a step for which KV blocks are allocated with it."""
        return self.num_speculative_tokens if self.speculation.looks_ahead else 0

    @property
    def most_draft_tokens(self) -> int:
        """The maximum number of tokens after those of a request for which it can hold KV blocks: of steps in flight."""
        if not self.num_speculative_tokens:
            return 0
        return self.pipeline_depth * (1 + self.num_speculative_tokens) + self.num_lookahead_tokens

    @property
    def configured_drafts(self) -> ExpectedDrafts:
        """What forecasts assume of draft tokens before anything is learnt."""
        return configured_drafts(self.num_speculative_tokens, self.speculative_acceptance, self.proposal_share)

    @property
    def proposal_share(self) -> float:
        """The share of requests and steps with a draft, before anything is learnt."""
        return 1.0 if self.speculation.proposes_always else self.speculative_proposals

    @property
    def pipeline_depth(self) -> int:
        """The maximum number of steps in flight: async scheduling plans one ahead."""
        return 2 if self.async_scheduling else 1

    @property
    def overlaps_fetches(self) -> bool:
        """Whether it plans steps ahead, and fetches KV blocks meanwhile."""
        return self.pipeline_depth > 1 and self.kv_role in FETCHING_ROLES

    @property
    def num_cpu_loras(self) -> int:
        """How many LoRA adapters are in host memory at most."""
        return self.max_cpu_loras or self.max_loras

    @property
    def swap_token_s(self) -> float:
        """Seconds that a token's KV takes between the GPU and host memory."""
        return self.kv_bytes_per_token / self.host_link_bytes_per_s

    def transfer_s(self, num_tokens: int, num_blocks: int) -> float:
        """Return the seconds in which KV blocks are fetched from another engine, if no transfer shares the link."""
        seconds = self.kv_transfer_base_s + num_blocks * self.kv_transfer_block_s
        return seconds + num_tokens * self.kv_bytes_per_token / self.kv_transfer_bytes_per_s

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admissions leave free while a request runs."""
        return int((self.watermark or 0.0) * self.num_gpu_blocks)


FIELD_NAMES = tuple(field.name for field in fields(EngineConfig))


def require_count(name: str, value: object, *, at_least: int = 1) -> None:
    """Refuse values other than a whole number in the allowed range; the error names the field."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: must be a whole number, not {value!r}")
    if not at_least <= value <= MAX_COUNT:
        raise ValueError(f"{name}: must be at least {at_least} and at most {MAX_COUNT}, not {value}")
