"""Settings of the component that places requests: the scheduler, and a gateway that decides in its own process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from length_tagger.settings import TaggerSettings
from predictor.config import MAX_COUNT
from scheduler.admission.order import ARRIVAL_TURN, TURNS
from scheduler.circuit import CircuitState
from scheduler.core import DecisionRules
from scheduler.disaggregation import SERVE_WHOLE
from scheduler.policies import POLICIES
from scheduler.policy import policy_from
from scheduler.prefix.kv_block_hash import SEED
from services.http.continued_request import (
    BY_TOKEN_IDS,
    ContinueStreams,
    MaxMigrations,
    MigrationRatio,
    require_continue_streams,
)
from services.http.kv_transfer import HandOverDeadline, KvConnectorName, require_kv_connector
from services.http.prompt_tokens import BlockTokens, ChatTemplateFile, HashSeed, TokenizerFile
from services.instances.instance import require_address
from services.objectives import ObjectivesFile, PassObjectivePriority
from services.security.key_file import tenant_weights_from_file
from services.security.own_key import PartKeyFile
from services.settings import Nested, Option

MAX_RESERVATION_S = 600.0
BY_BLOCK, BY_ENGINE = "block", "engine"  # who chooses among the data-parallel ranks of an engine
MAX_RECORD_MIB = 2.0**20
MINIMA = {
    "max_conflicts": 0,
    "max_held": 0,
    "max_deciding": 1,
    "max_explained": 1,
    "max_responses": 1,
    "failures_to_open": 1,
    "attempts": 1,
}
TIMES = (
    "sidecar_deadline_s",
    "watch_s",
    "reservation_s",
    "first_pause_s",
    "longest_pause_s",
    "tagger_deadline_s",
    "hand_over_s",
    "first_token_s",
    "idle_s",
    "hand_over_deadline_s",
)
POLICY_HELP = (
    "Policy that ranks instances, with its parameters: 'linear: lambda = 0.3', 'block: k = 8', or a formula: "
    f"'expr: p_tokens * batch_size'. Known policies: {', '.join(POLICIES)}; `block policies` describes them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The policy, the deadlines of other components, and the fallbacks without them."""

    policy: Annotated[str, POLICY_HELP] = "block"
    seed: Annotated[int | None, Option("Seed of policies that draw random numbers.", unset="random")] = None
    scheduler_id: Annotated[str, Option("Name of this scheduler in decisions.", unset="HOSTNAME/PID")] = ""
    forecast_always: Annotated[
        bool, "Request a forecast of the chosen instance also for policies that need no forecasts."
    ] = False

    objectives: ObjectivesFile = ""
    pass_objective_priority: PassObjectivePriority = False
    registered_file: Annotated[
        str,
        Option(
            "File that keeps the instances that are registered by HTTP, and the orders to drain, over a restart. "
            "Schedulers that name the same file share them.",
            metavar="FILE",
        ),
    ] = ""
    part_key_file: PartKeyFile = ""

    sidecar_deadline_s: Annotated[
        float, Option("Deadline of calls to sidecars, in milliseconds.", name="sidecar_deadline_ms", unit="ms")
    ] = 0.05
    watch_s: Annotated[
        float, "Interval between indicator updates of a sidecar, in seconds, for policies that read indicators."
    ] = 0.1
    reservation_s: Annotated[
        float, "Lifetime of a reservation whose request the engine has not shown yet, in seconds."
    ] = 10.0
    max_conflicts: Annotated[
        int,
        Option(
            "Maximum number of times that a request is decided again because another scheduler was faster; then it "
            "reserves regardless.",
            deprecated=("most_conflicts",),
        ),
    ] = 10
    without_pool: Annotated[
        str,
        "What happens to a request when no instance with role prefill, or none that decodes, can take it: whole serves "
        "it as a whole on the instances that are left, refuse answers 503.",
    ] = SERVE_WHOLE
    data_parallel_balancing: Annotated[
        str,
        Option(
            "Who chooses among the data-parallel ranks of an engine that serves several at one URL: block names the "
            "chosen rank in each request; engine leaves requests to the engine's own balancing, and follows them to "
            "the rank that shows them.",
            choices=(BY_BLOCK, BY_ENGINE),
        ),
    ] = "block"
    hand_over_s: Annotated[
        float,
        Option(
            "Time from the reply of a prefill instance to the request to the decode instance, in milliseconds, until "
            "it has been measured.",
            name="hand_over_ms",
            unit="ms",
        ),
    ] = 0.003
    max_held: Annotated[
        int,
        Option(
            "Maximum number of requests of a model in the admission queue.",
            deprecated=("most_held",),
        ),
    ] = 1000
    max_held_tokens: Annotated[
        int | None, Option("Maximum number of their tokens, prompts and predicted responses.", unset="any number")
    ] = None
    max_held_of_tenant: Annotated[
        int | None, Option("Maximum number of requests of one client in the admission queue.", unset="any number")
    ] = None
    max_held_best_effort: Annotated[
        int | None, Option("Maximum number of best-effort requests in the admission queue.", unset="any number")
    ] = None
    max_held_real_time: Annotated[
        int | None, Option("Maximum number of real-time requests in the admission queue.", unset="any number")
    ] = None
    admission_turn: Annotated[
        str,
        Option(
            "Order of requests with the same target in the admission queue: arrival, deadline, shortest (the fewest "
            "tokens), priority (ten seconds of waiting count as one step), or fair (the client that got the fewest "
            "tokens first).",
            choices=tuple(TURNS),
        ),
    ] = ARRIVAL_TURN
    tenants: Annotated[
        str,
        Option(
            "TOML file with a table [[tenant]] for each tenant that has a weight, by name; a gateway's key file is "
            "one. With --admission-turn fair a tenant gets tokens in proportion to its weight, 1 without one. It is "
            "read at the start.",
            unset="in a gateway that decides in-process, its key file",
            metavar="FILE",
        ),
    ] = ""
    best_effort_share: Annotated[
        float, "Share of the admitted tokens that best effort gets even where that makes other requests late."
    ] = 0.05
    deadline_margin_s: Annotated[
        float,
        Option(
            "Time by which requests with deadlines are admitted earlier than forecasts need it, in milliseconds: for "
            "the gateway, the network, and errors of forecasts.",
            name="deadline_margin_ms",
            unit="ms",
            may_be_zero=True,
        ),
    ] = 0.02
    max_responses: Annotated[
        int, "Maximum number of responses of one request, its prompts times n; more are refused with status 400."
    ] = 1024
    max_deciding: Annotated[int, "Maximum number of forecast fan-outs in progress; further requests wait."] = 8
    max_explained: Annotated[
        int, "Number of the last decisions that can be explained; each takes about 1 KiB per candidate."
    ] = 4096
    failures_to_open: int = 2  # consecutive failures of a component that open its circuit
    first_pause_s: float = 0.25  # how long a circuit stays open at first
    longest_pause_s: float = 8.0

    provisioners: Annotated[
        tuple[str, ...],
        Option(
            "host:port of a provisioner that receives forecasts and outcomes. Repeatable: name every replica.",
            name="provisioner",
            metavar="ADDRESS",
        ),
    ] = ()
    tagger: Annotated[str, Option("host:port of the length tagger.", metavar="ADDRESS")] = ""
    tagger_deadline_s: Annotated[
        float, Option("Deadline of calls to the length tagger, in milliseconds.", name="tagger_deadline_ms", unit="ms")
    ] = 0.01
    without_tagger: Annotated[TaggerSettings, Nested(only=("constant_tokens", "constant_spread"))] = field(
        default_factory=TaggerSettings
    )  # response lengths without a tagger

    record: Annotated[str, Option("File to record decisions and outcomes in, as JSON lines.", metavar="FILE")] = ""
    record_share: Annotated[float, "Share of the requests that are recorded, selected by request id."] = 1.0
    record_mib: Annotated[float, "Maximum size of the recording and its predecessor FILE.1 together, in mebibytes."] = (
        256.0
    )
    record_candidates: Annotated[bool, "Record all candidates of each decision."] = False

    tokenizer: TokenizerFile = ""
    chat_template: ChatTemplateFile = ""
    block_tokens: BlockTokens = 16
    hash_seed: HashSeed = SEED
    kv_events_insecure: Annotated[
        bool, "Follow the KV events of engines on other machines, which contain prompts, in plain text."
    ] = False
    continue_streams: ContinueStreams = BY_TOKEN_IDS
    max_migrations: MaxMigrations = 2
    migration_ratio: MigrationRatio = 0.2
    attempts: Annotated[int, "Maximum number of engines that Generate tries for one request."] = 3
    first_token_s: Annotated[
        float, "Maximum time that Generate waits for the first token, or for the reply to a prefill leg, in seconds."
    ] = 120.0
    kv_connector: KvConnectorName = "nixl"
    hand_over_deadline_s: HandOverDeadline = 5.0
    idle_s: Annotated[float, "Maximum pause between two tokens of a stream, in seconds."] = 60.0

    def __post_init__(self) -> None:
        """Refuse settings that no scheduler can have."""
        policy_from(self.policy)
        self._require_times()
        require_kv_connector(self.kv_connector)
        require_continue_streams(self.continue_streams, self.max_migrations, self.migration_ratio)
        if self.reservation_s > MAX_RESERVATION_S:
            raise ValueError(f"reservation_s: must be at most {MAX_RESERVATION_S:g}, not {self.reservation_s}")
        if self.data_parallel_balancing not in (BY_BLOCK, BY_ENGINE):
            raise ValueError(
                f"data_parallel_balancing: must be {BY_BLOCK} or {BY_ENGINE}, not {self.data_parallel_balancing!r}"
            )
        self.rules()
        for name, minimum in MINIMA.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}: must be at least {minimum}, not {getattr(self, name)}")
        if not 0 < self.record_share <= 1:
            raise ValueError(f"record_share: must be above 0 and at most 1, not {self.record_share}")
        if not 0 < self.record_mib < MAX_RECORD_MIB:
            raise ValueError(f"record_mib: must be above 0 and below {MAX_RECORD_MIB:g}, not {self.record_mib}")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed: must be at least 0, not {self.seed}")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens: must be at least 1, not {self.block_tokens}")
        if self.tagger:
            require_address("tagger", self.tagger)
        for address in self.provisioners:
            require_address("provisioner", address)

    def _require_times(self) -> None:
        for name in TIMES:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a time above 0, not {value}")
        if not 0 <= self.deadline_margin_s < math.inf:
            raise ValueError(f"deadline_margin_s: must be a time from 0 on, not {self.deadline_margin_s}")

    def circuit(self) -> CircuitState:
        """Make the circuit of a component that may fail."""
        return CircuitState(
            failures_to_open=self.failures_to_open,
            first_pause_s=self.first_pause_s,
            longest_pause_s=self.longest_pause_s,
        )

    def rules(self) -> DecisionRules:
        """Make the rules by which decisions deal with conflicts and waiting requests."""
        return DecisionRules(
            max_conflicts=self.max_conflicts,
            max_held=self.max_held,
            max_held_tokens=math.inf if self.max_held_tokens is None else self.max_held_tokens,
            max_held_of_tenant=MAX_COUNT if self.max_held_of_tenant is None else self.max_held_of_tenant,
            max_held_best_effort=MAX_COUNT if self.max_held_best_effort is None else self.max_held_best_effort,
            max_held_real_time=MAX_COUNT if self.max_held_real_time is None else self.max_held_real_time,
            admission_turn=self.admission_turn,
            tenant_weights=tenant_weights_from_file(self.tenants) if self.tenants else {},
            best_effort_share=self.best_effort_share,
            forecast_always=self.forecast_always,
            without_pool=self.without_pool,
            hand_over_s=self.hand_over_s,
        )
