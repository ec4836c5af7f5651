"""The facts of one request that never change: lengths, service level, class, priority, weight, tenant, session."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from predictor.config import require_count
from predictor.lengths import DEFAULT_RESIDUAL, Tag, expected_tokens, quantile_medians
from predictor.suggestions import unknown_choice

REAL_TIME, BEST_EFFORT = "real-time", "best-effort"
CLASSES = (REAL_TIME, BEST_EFFORT)  # a class's number in the engine model and in state files is its index here
# The part of a request that one engine serves: all of it; its prompt and one token, whose KV blocks are then held until
# another engine has fetched them; or its response, from KV blocks that are fetched. A leg's number is its index here.
SERVE, PREFILL, DECODE = "serve", "prefill", "decode"
LEGS = (SERVE, PREFILL, DECODE)
MAX_PRIORITY = 2**31
MAX_QUANTILES = 9  # of a response's length
NO_TENANT = 0  # the tenant number of a request without a client id
NO_ADAPTER = NO_TENANT  # the adapter number of a request for a base model


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """An image, or another input of an encoder, in a prompt: the range of its tokens, and what it is equal to.

    Inputs with the same `identity` share one output of the encoder; without one an input is equal to no other.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    position: int
    tokens: int
    identity: int | str | None = None

    def __post_init__(self) -> None:
        """Refuse impossible ranges."""
        require_count("position", self.position, at_least=0)
        require_count("tokens", self.tokens, at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets for the time to the first token and the time per token after it; None where there is no target."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse targets that are not positive."""
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be above 0, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """Everything about one request that does not change from its client to the engine model.

    The response has `output_tokens` tokens where its length is known, else as many as its `tag` predicts. The engine
    knows only `max_tokens`, at which it cuts the response, and `min_tokens`, before which it does not end it.
    `prefix_hashes` are the names of the contents of the leading full blocks; each name stands for all tokens up to
    the end of its block. `client_id` is the tenant, `session_id` is shared by the requests of one conversation, and
    `weight` is the value of each token that is delivered by its deadline. `arrival_s` is on an engine's clock; `in_s`
    is above 0 for a request that will arrive at the engine this long after it is forecast, or reserved. Deadlines count
    from `waited_s` before it is forecast, reserved or added: the time that it has been in the system by then.

    `leg` is the part that this engine serves. The blocks of a prefill leg are held for `held_s` after its end, None
    for as long as the engine's lease. The KV blocks of a decode leg are fetched within `transfer_s`, None as the
    engine's configuration says.

    `adapter` is the name of the LoRA adapter that serves it, empty for the base model. `encoder_inputs` are its images
    and other inputs of an encoder, by position; hashes of blocks stand for them, and for the adapter, too.

    `length_quantiles` is the number of equally likely lengths of its tag with which it is forecast: an odd one, so that
    the median is among them.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    request_id: str
    prompt_tokens: int
    output_tokens: int | None = None
    tag: Tag | float | None = None
    arrival_s: float = 0.0
    max_tokens: int | None = None
    priority: int = 0
    prefix_hashes: tuple[int | str, ...] = ()
    request_class: str = REAL_TIME
    slo: Slo | None = None
    weight: float = 1.0
    client_id: str = ""
    session_id: str = ""
    model: str = ""
    min_tokens: int | None = None
    in_s: float = 0.0
    waited_s: float = 0.0
    leg: str = SERVE
    held_s: float | None = None
    transfer_s: float | None = None
    length_quantiles: int = 1
    adapter: str = ""
    encoder_inputs: tuple[EncoderInput, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that no engine could serve."""
        require_count("prompt_tokens", self.prompt_tokens, at_least=1)
        for name in ("output_tokens", "max_tokens"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), at_least=1)
        if self.min_tokens is not None:
            require_count("min_tokens", self.min_tokens, at_least=0)
        if isinstance(self.tag, int | float):
            try:
                object.__setattr__(self, "tag", Tag(median_tokens=self.tag))
            except ValueError as error:
                raise ValueError(f"tag.{error}") from None
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ValueError(f"arrival_s: must be a time from 0 on, not {self.arrival_s}")
        if abs(self.priority) > MAX_PRIORITY:
            raise ValueError(f"priority: must lie within 32 bits, not {self.priority}")
        if self.request_class not in CLASSES:
            raise ValueError(f"request_class: {self.request_class!r} is neither {REAL_TIME} nor {BEST_EFFORT}")
        for name in ("in_s", "waited_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}: must be a time from 0 on, not {getattr(self, name)}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight: must be above 0, not {self.weight}")
        require_quantiles(self.length_quantiles)
        self._check_leg()
        self._check_encoder_inputs()

    def _check_leg(self) -> None:
        if self.leg not in LEGS:
            raise unknown_choice("leg", self.leg, LEGS)
        for name in ("held_s", "transfer_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: must be a time from 0 on, not {value}")

    def _check_encoder_inputs(self) -> None:
        end = 0
        for index, one in enumerate(self.encoder_inputs):
            if one.position < end:
                raise ValueError(
                    f"encoder_inputs[{index}].position: {one.position} is before the end of the one before it"
                )
            end = one.position + one.tokens
        if end > self.prompt_tokens:
            raise ValueError(f"encoder_inputs: end at token {end}, after the {self.prompt_tokens} of the prompt")

    def length(self, tokens_so_far: int = 0, residual: str = DEFAULT_RESIDUAL) -> int | None:
        """Return the known or predicted length of the response after `tokens_so_far` tokens; None without either."""
        if self.output_tokens is not None:
            return max(self.output_tokens, tokens_so_far + 1)
        if isinstance(self.tag, Tag):
            return expected_tokens(self.tag, tokens_so_far, residual)
        return None

    def at_quantiles(self) -> tuple[RequestFacts, ...]:
        """Return the request once for each length with which it is forecast, with an id of its own; at least itself."""
        tag, num = self.tag, self.length_quantiles
        if num == 1 or self.leg == PREFILL or self.output_tokens is not None:
            return (self,)
        if not isinstance(tag, Tag) or tag.spread == 0:
            return (self,)
        return tuple(
            replace(self, request_id=f"{self.request_id}/{number}", tag=Tag(median_tokens=median), length_quantiles=1)
            for number, median in enumerate(quantile_medians(tag.median_tokens, tag.spread, num))
        )


def require_quantiles(num: int) -> int:
    """Return a number of quantiles of a length; ValueError unless it is odd and small."""
    if type(num) is not int or not (1 <= num <= MAX_QUANTILES and num % 2):
        raise ValueError(f"length_quantiles: must be an odd number from 1 to {MAX_QUANTILES}, not {num}")
    return num


@lru_cache(maxsize=1 << 14)
def tenant_number(client_id: str) -> int:
    """Number a tenant, the same in every process: the first eight bytes of the BLAKE2b hash of its client id.

    `services.engine_state.writer` numbers tenants in the same way; a test compares both.
    """
    if not client_id:
        return NO_TENANT
    digest = hashlib.blake2b(client_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def adapter_number(adapter: str) -> int:
    """Number a LoRA adapter, the same in every process; NO_ADAPTER for the base model."""
    return tenant_number(adapter)


def identity_number(identity: int | str) -> int:
    """Number an input of an encoder, the same in every process; equal inputs have the same number."""
    return identity if isinstance(identity, int) else tenant_number(identity)
