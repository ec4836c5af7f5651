"""Settings of an emulated engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from predictor.mirror.engine_kinds import SGLANG, VLLM
from predictor.suggestions import require_choice
from services.emulator.adapters import modules_from
from services.kv_events.publisher import KvEventsConfig, kv_events_config
from services.security.exposure import require_tls_beyond_loopback
from services.security.settings import NO_TLS, TlsSettings
from services.settings import PORTS, Option

EMULATED_KINDS = (VLLM, SGLANG)
MAX_RANKS = 64
STATE_FOLDER = "/dev/shm/block"  # noqa: S108 - where processes of one machine share memory


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorSettings:
    """The server, the traffic and the pace of an emulated engine; an empty `state_file` exports nothing."""

    host: Annotated[str, "Address to listen on; 0.0.0.0 listens on all interfaces."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0 selects any free port."] = PORTS["engine"]
    model: Annotated[str, Option("Name of the served model.", name="served_model_name", unset="the profile's model")]
    name: Annotated[
        str, Option(f"Name of the engine: its state file is {STATE_FOLDER}/NAME.state.", unset="engine-PORT")
    ] = ""
    state_file: Annotated[
        str,
        Option("State file that the engine exports; 'none' exports nothing.", metavar="FILE", unset="given by --name"),
    ] = ""
    engine_kind: Annotated[
        str, Option("Engine whose HTTP API is served; sglang also changes the local scheduler.", choices=EMULATED_KINDS)
    ] = VLLM
    export_contents: Annotated[
        bool, "Export the contents of KV blocks as well, so that sidecars predict prefix cache hits."
    ] = True
    speed: Annotated[float, "Engine seconds per second."] = 1.0
    noise: Annotated[float, "Relative standard deviation of step times."] = 0.0
    seed: Annotated[int, "Seed of the noise."] = 0
    output_seed: Annotated[
        int, "Seed of the answers and their lengths; engines with the same one answer a prompt alike, as replicas do."
    ] = 0
    output_median: Annotated[float, "Median response length in tokens, for requests that do not determine theirs."] = (
        200.0
    )
    output_spread: Annotated[float, "Standard deviation of the logarithm of the response length."] = 0.8
    grammar_compile_s: Annotated[
        float, "Time to compile the grammar of a structured output that the engine has not seen before, in seconds."
    ] = 0.05
    max_num_queued_reqs: Annotated[
        int, "Maximum number of unfinished requests; further requests are refused with status 503."
    ] = 10_000
    max_body_bytes: Annotated[int, "Maximum size of a request body; a larger one is refused with status 413."] = (
        32 << 20
    )
    kv_side_channel_host: Annotated[
        str, "Address of the side channel by which other engines fetch KV blocks; as they reach it."
    ] = "127.0.0.1"
    kv_side_channel_port: Annotated[
        int, "Port of the side channel, which engines with a kv_role have; 0 selects any free port."
    ] = 0
    kv_events_config: Annotated[
        str,
        Option(
            "KV events that the engine publishes, as vLLM's option: JSON with enable_kv_cache_events, endpoint, "
            "replay_endpoint and topic.",
            metavar="JSON",
        ),
    ] = ""
    enable_lora: Annotated[bool, "Serve LoRA adapters: max_loras of them, 1 by default, in one step."] = False
    lora_modules: Annotated[
        tuple[str, ...], Option("LoRA adapter that is served from the start, as NAME=PATH. Repeatable.")
    ] = ()
    data_parallel_size: Annotated[
        int,
        "Number of data-parallel ranks that it serves at its port, each with a state file of its own, as vLLM. A "
        "request names its rank (x-data-parallel-rank); others are balanced as by vLLM.",
    ] = 1
    data_parallel_lockstep: Annotated[
        bool, "Ranks step together, as those of a model with experts: the slowest one sets the pace."
    ] = False
    drain_s: Annotated[float, "Maximum time to wait at shutdown for requests in progress, in seconds."] = 30.0
    tls: TlsSettings = NO_TLS

    def __post_init__(self) -> None:
        """Refuse settings that no server can have."""
        for name in ("port", "kv_side_channel_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name}: must lie between 0 and 65535, not {getattr(self, name)}")
        for name in ("max_num_queued_reqs", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        require_choice("engine_kind", self.engine_kind, EMULATED_KINDS)
        if not 0 <= self.grammar_compile_s < math.inf:
            raise ValueError(f"grammar_compile_s: must be a time from 0 on, not {self.grammar_compile_s}")
        if not 1 <= self.data_parallel_size <= MAX_RANKS:
            raise ValueError(f"data_parallel_size: must lie between 1 and {MAX_RANKS}, not {self.data_parallel_size}")
        if self.data_parallel_lockstep and self.data_parallel_size == 1:
            raise ValueError("data_parallel_lockstep: needs a data_parallel_size above 1")
        if not self.drain_s >= 0:
            raise ValueError(f"drain_s: must be a time from 0 on, not {self.drain_s}")
        if modules_from(self.lora_modules) and not self.enable_lora:
            raise ValueError("lora_modules: need enable_lora")
        if not self.model:
            raise ValueError("model: must have a name")
        require_tls_beyond_loopback(self.host, self.tls)
        kv_events_config(self.kv_events_config)

    @property
    def kv_events(self) -> KvEventsConfig:
        """The KV events that the engine publishes."""
        return kv_events_config(self.kv_events_config)
