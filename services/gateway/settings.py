"""What a gateway can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.prefix.kv_block_hash import SEED
from services.http.client import origin_of

TIMES = ("schedule_s", "connect_s", "first_byte_s", "idle_s", "answer_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Whom to ask, where to send, how long to wait, how much to bear."""

    schedulers: tuple[str, ...] = ()  # host:port
    engine_urls: tuple[str, ...] = ()  # the last resort, in turn, while no scheduler answers
    models: tuple[str, ...] = ()  # empty: those that the instances serve

    schedule_s: float = 1.0  # for one scheduler to decide
    connect_s: float = 2.0  # to an engine
    first_byte_s: float = 60.0  # from sending to the first event of a stream
    idle_s: float = 60.0  # between two pieces of a stream
    answer_s: float = 600.0  # for an answer that is not streamed

    attempts: int = 4  # engines tried for one request
    retry_ratio: float = 0.2  # retries per request in the long run; a burst of one per request under way is free
    max_body_bytes: int = 16 * 2**20
    max_answer_bytes: int = 64 * 2**20  # of one that is not streamed
    max_concurrency: int = 1024
    bytes_per_token: float = 4.0  # of prompts, until engines have told better
    tokenizer: str = ""  # the model's tokenizer.json: sizes prompts, and names their blocks as engines do
    chat_template: str = ""  # a file; else the one beside the tokenizer
    block_tokens: int = 16  # of an engine's KV block
    hash_seed: str = SEED  # the engines' PYTHONHASHSEED, where they have one
    releases_kept: int = 4096  # waiting to be told to a scheduler

    def __post_init__(self) -> None:
        """Refuse what no gateway could do, by its name."""
        for address in self.schedulers:
            host, colon, port = address.rpartition(":")
            if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
                raise ValueError(f"scheduler: {address!r} must be host:port")
        for url in self.engine_urls:
            try:
                origin_of(url)
            except ValueError as error:
                raise ValueError(f"engine_url: {error}") from None
        if not self.schedulers and not self.engine_urls:
            raise ValueError("scheduler: name at least one (or an engine_url)")
        for name in (*TIMES, "bytes_per_token"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a number above 0, not {value}")
        if not (math.isfinite(self.retry_ratio) and self.retry_ratio >= 0):
            raise ValueError(f"retry_ratio: must be a number from 0 on, not {self.retry_ratio}")
        for name in (
            "attempts",
            "max_body_bytes",
            "max_answer_bytes",
            "max_concurrency",
            "block_tokens",
            "releases_kept",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
