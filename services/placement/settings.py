"""What a scheduler can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from length_tagger.settings import TaggerSettings
from scheduler.circuit import CircuitState
from scheduler.core import DecisionRules
from scheduler.policy import policy_from
from scheduler.prefix.kv_block_hash import SEED
from services.instances import require_address

LONGEST_RESERVATION_S = 600.0
MOST_MIB = 2.0**20
LEAST = {"most_conflicts": 0, "most_held": 0, "max_deciding": 1, "failures_to_open": 1, "attempts": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """By which rule to decide, how long to wait for whom, and what to do without them."""

    policy: str = "block"  # as scheduler/spec.py reads it
    seed: int | None = None  # of policies that draw; None: another one for each process
    scheduler_id: str = ""
    forecast_always: bool = False  # have the choice of a policy that needs no forecast foretold as well

    sidecar_deadline_s: float = 0.05
    watch_s: float = 0.1  # between two messages of a sidecar about itself, for policies that read indicators
    reservation_s: float = 10.0
    most_conflicts: int = 10  # of one request with those who decide at the same time; then it reserves regardless
    most_held: int = 1000  # requests of one model, by policies that hold; the first goes as it is when there are more
    max_deciding: int = 8  # fan-outs under way at once: more would only make each other late
    failures_to_open: int = 2  # of a part, in a row, until it is left alone for a while
    first_pause_s: float = 0.25
    longest_pause_s: float = 8.0

    provisioners: tuple[str, ...] = ()  # host:port of each; all are told
    tagger: str = ""  # host:port
    tagger_deadline_s: float = 0.01
    without_tagger: TaggerSettings = field(default_factory=TaggerSettings)  # what lengths are, while no tagger answers

    record: str = ""  # a file for decisions and outcomes; none without
    record_share: float = 1.0  # of requests
    record_mib: float = 256.0  # how large the file and the one before it may be together
    record_candidates: bool = False  # also write all candidates of each decision

    tokenizer: str = ""  # the model's tokenizer.json: sizes Generate's prompts, and names their blocks as engines do
    chat_template: str = ""  # a file; else the one beside the tokenizer
    block_tokens: int = 16  # of an engine's KV block
    hash_seed: str = SEED  # the engines' PYTHONHASHSEED, where they have one
    attempts: int = 3  # engines that Generate tries
    first_token_s: float = 120.0  # from sending to the first piece of a stream
    idle_s: float = 60.0  # between two pieces

    def __post_init__(self) -> None:
        """Refuse what no scheduler could do, by its name."""
        policy_from(self.policy)
        for name in (
            "sidecar_deadline_s",
            "watch_s",
            "reservation_s",
            "first_pause_s",
            "longest_pause_s",
            "tagger_deadline_s",
            "first_token_s",
            "idle_s",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a time above 0, not {value}")
        if self.reservation_s > LONGEST_RESERVATION_S:
            raise ValueError(f"reservation_s: must be at most {LONGEST_RESERVATION_S:g}, not {self.reservation_s}")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be at least {least}, not {getattr(self, name)}")
        if not 0 < self.record_share <= 1:
            raise ValueError(f"record_share: must be above 0 and at most 1, not {self.record_share}")
        if not 0 < self.record_mib < MOST_MIB:
            raise ValueError(f"record_mib: must be above 0 and below {MOST_MIB:g}, not {self.record_mib}")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed: must be at least 0, not {self.seed}")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens: must be at least 1, not {self.block_tokens}")
        if self.tagger:
            require_address("tagger", self.tagger)
        for address in self.provisioners:
            require_address("provisioner", address)

    def circuit(self) -> CircuitState:
        """Make a circuit for a part that may fail."""
        return CircuitState(
            failures_to_open=self.failures_to_open,
            first_pause_s=self.first_pause_s,
            longest_pause_s=self.longest_pause_s,
        )

    def rules(self) -> DecisionRules:
        """Make the rules by which decisions deal with conflicts and waiting requests."""
        return DecisionRules(
            max_conflicts=self.most_conflicts, max_held=self.most_held, forecast_always=self.forecast_always
        )
