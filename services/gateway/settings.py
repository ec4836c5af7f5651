"""Settings of the gateway."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from predictor.suggestions import require_choice
from scheduler.prefix.kv_block_hash import SEED
from services.http.continued_request import (
    BY_TOKEN_IDS,
    ContinueStreams,
    MaxMigrations,
    MigrationRatio,
    require_continue_streams,
)
from services.http.kv_transfer import HandOverDeadline, KvConnectorName, require_kv_connector
from services.http.limits import HttpLimits
from services.http.openai_body import OpenAIRequest
from services.http.origin import origin_of
from services.http.prompt_tokens import BlockTokens, ChatTemplateFile, HashSeed, TokenizerFile
from services.instances.instance import require_address
from services.objectives import ObjectivesFile, PassObjectivePriority
from services.placement.decision_time import DECIDE_S, require_schedule_s
from services.security.own_key import PartKeyFile
from services.settings import Nested, Option

BY_SCHEDULER, IN_PROCESS = DECIDE = ("scheduler", "in-process")
TIMES = ("connect_s", "first_byte_s", "idle_s", "answer_s", "hand_over_deadline_s")
COUNTS = (
    "attempts",
    "max_body_bytes",
    "max_answer_bytes",
    "max_concurrency",
    "block_tokens",
    "releases_kept",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Schedulers and engines, timeouts and limits."""

    decide: Annotated[
        str,
        Option(
            "Where requests are placed: by schedulers, or in-process by the gateway itself, which then needs instances "
            "(--instance, --instances-file or --instances-dns) and takes the scheduler's settings.",
            choices=DECIDE,
        ),
    ] = BY_SCHEDULER
    scheduler_port: Annotated[
        int | None,
        Option(
            "Port on which a gateway that decides in-process serves block.v1.Scheduler: for gRPC clients, "
            "`block explain` and `block policies use`.",
            unset="none is served",
        ),
    ] = None
    schedulers: Annotated[
        tuple[str, ...], Option("host:port of a scheduler. Repeatable.", name="scheduler", separator=",")
    ] = ()
    engine_urls: Annotated[
        tuple[str, ...],
        Option(
            "URL of an engine to send requests to while no scheduler is available. Repeatable: used in turn.",
            name="engine_url",
            separator=",",
        ),
    ] = ()
    models: Annotated[
        tuple[str, ...],
        Option(
            "Name of a served model; its LoRA adapters are served too. Repeatable.",
            name="model",
            separator=",",
            unset="the models of the instances",
        ),
    ] = ()
    part_key_file: PartKeyFile = ""
    objectives: ObjectivesFile = ""
    pass_objective_priority: PassObjectivePriority = False

    schedule_s: Annotated[
        float | None,
        Option(
            "Maximum time that a scheduler may take to decide, in seconds. A request that a policy such as slo or hold "
            "keeps waiting is refused, or sent to the best instance, before that. Remote schedulers say in their log "
            "which time their policy needs.",
            unset=f"{DECIDE_S:g}; in-process with a policy that holds requests, as long as it may: 75 with slo",
        ),
    ] = None
    connect_s: Annotated[float, "Maximum time to connect to an engine, in seconds."] = 2.0
    first_byte_s: Annotated[
        float,
        "Maximum time from sending a request to the first event of its stream, or from sending a prefill leg to its "
        "reply, in seconds.",
    ] = 60.0
    idle_s: Annotated[float, "Maximum pause between two tokens of a stream, in seconds."] = 60.0
    answer_s: Annotated[float, "Maximum time for a response that is not streamed, in seconds."] = 600.0

    kv_connector: KvConnectorName = "nixl"
    hand_over_deadline_s: HandOverDeadline = 5.0
    allow_kv_transfer_params: Annotated[
        bool,
        "Pass kv_transfer_params of clients on to engines, where they can name the KV blocks of other clients; such "
        "requests are served by one engine.",
    ] = False

    continue_streams: ContinueStreams = BY_TOKEN_IDS
    max_migrations: MaxMigrations = 2
    migration_ratio: MigrationRatio = 0.2
    attempts: Annotated[int, "Maximum number of engines tried for one request before its first byte."] = 4
    retry_ratio: Annotated[
        float, "Retry budget: retries per request in the long run; one retry per request in progress is free."
    ] = 0.2
    http: Annotated[HttpLimits, Nested()] = field(default_factory=HttpLimits)
    max_body_bytes: int = 16 * 2**20
    max_answer_bytes: int = 64 * 2**20  # of a response that is not streamed
    max_concurrency: int = 1024
    bytes_per_token: Annotated[
        float, "Bytes per prompt token, used until the engines' own counts give a better estimate."
    ] = 4.0
    tokenizer: TokenizerFile = ""
    chat_template: ChatTemplateFile = ""
    block_tokens: BlockTokens = 16
    hash_seed: HashSeed = SEED
    releases_kept: int = 4096  # releases that wait to be sent to a scheduler

    def asks_for_token_ids(self, openai: OpenAIRequest) -> bool:
        """Return whether the gateway asks engines for the token ids of a stream in its client's place."""
        may_continue = openai.stream and not openai.why_not_continuable
        return self.continue_streams == BY_TOKEN_IDS and may_continue and not openai.returns_token_ids

    def __post_init__(self) -> None:
        """Refuse settings that no gateway can have."""
        for address in self.schedulers:
            require_address("scheduler", address)
        for url in self.engine_urls:
            try:
                origin_of(url)
            except ValueError as error:
                raise ValueError(f"engine_url: {error}") from None
        require_choice("decide", self.decide, DECIDE)
        require_continue_streams(self.continue_streams, self.max_migrations, self.migration_ratio)
        if self.decide == BY_SCHEDULER and not self.schedulers and not self.engine_urls:
            raise ValueError("scheduler: name at least one (or an engine_url)")
        require_kv_connector(self.kv_connector)
        require_schedule_s(self.schedule_s)
        for name in (*TIMES, "bytes_per_token"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a number above 0, not {value}")
        if not (math.isfinite(self.retry_ratio) and self.retry_ratio >= 0):
            raise ValueError(f"retry_ratio: must be a number from 0 on, not {self.retry_ratio}")
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
