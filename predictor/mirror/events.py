"""The events that a mirror receives about its engine, and the reports that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from predictor.config import EngineConfig
from predictor.engine_view import EndedRequest
from predictor.lengths import Tag
from predictor.mirror.scraped_metrics import ScrapedMetrics
from predictor.request import SERVE


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArrived:
    """A request was sent to the engine; `name` is unique, `request_id` is the client's."""

    name: str
    request_id: str
    prompt_tokens: int
    max_tokens: int | None = None
    known_tokens: int | None = None  # the length of the answer, where it is certain
    tag: Tag | None = None
    priority: int = 0
    streamed: bool = False
    leg: str = SERVE  # as far as the request says
    token_ids: tuple[int, ...] = ()  # of the prompt, where the client sent them
    cached_at: int | None = None  # the moment of the index of cached blocks
    prompt: int = 0  # the number of its prompt, where the client's request has several
    sequence: int = 0  # the number of its response to that prompt
    model: str = ""  # that it names; a LoRA adapter has its own name


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounted:
    """The real prompt length of a request became known, and its tokens where they matter."""

    name: str
    prompt_tokens: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensReceived:
    """The client of a request has received `num_tokens` tokens so far.

    A count that is not `exact` may be too low, as one event of a stream may bring several tokens.
    """

    name: str
    num_tokens: int
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded:
    """A request ended with `num_tokens` tokens; one that is not `completed` was aborted or failed.

    `prompt_tokens` are those that the engine has counted, where its reply says so.
    """

    name: str
    num_tokens: int
    completed: bool
    exact: bool = True
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsScraped:
    """The engine's /metrics were read."""

    metrics: ScrapedMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersRead:
    """The LoRA adapters that the engine lists became known."""

    adapters: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLengthRead:
    """The engine's max_model_len became known."""

    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentified:
    """The engine's kind became known, with the settings that it reports, and what forecasts approximate with them."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    approximations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRead:
    """The version of vLLM that the engine runs became known."""

    version: str


MirrorEvent = (
    RequestArrived
    | PromptCounted
    | TokensReceived
    | RequestEnded
    | MetricsScraped
    | ModelLengthRead
    | VersionRead
    | EngineIdentified
    | AdaptersRead
)
OF_REQUESTS = (RequestArrived, PromptCounted, TokensReceived, RequestEnded)
# these may have to be applied before any request
SETTINGS_EVENTS = (EngineIdentified, MetricsScraped, ModelLengthRead, VersionRead)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStarted:
    """The mirror made a model of the engine with these settings; an update has other ones, or other step times."""

    config: EngineConfig
    is_update: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRestarted:
    """The metrics show that the engine restarted and lost `num_requests` requests."""

    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownRequestsChanged:
    """The number of requests that bypass the proxy changed."""

    before: int
    now: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShown:
    """A request reached the engine."""

    request_id: str


MirrorReport = MirrorStarted | EngineRestarted | UnknownRequestsChanged | RequestShown | EndedRequest
