"""What the parts of a cluster run, our own servers or vLLM: how each is begun, and what its lines tell."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

LOCAL = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - where a server that listens everywhere is asked
REFUSAL = "block: "  # begins the one line of a command that cannot do what it was told

# vLLM 0.32: `(EngineCore pid=7) ERROR 11-21 12:22:14 [core.py:1510] what there is to say`
VLLM_LINE = re.compile(r"(?:\(\w+ pid=\d+\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^]]*\] (.*)")
VLLM_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ")
COMPLAINT = re.compile(r"(?:\b[\w.]*(?:Error|Exception|Interrupt)|^vllm[\w ]*: error): \S.*")
CONSEQUENCES = ("Engine core initialization failed", "WorkerProc initialization failed")  # of another complaint


class Said(NamedTuple):
    """What a line tells: an event with its fields, or words that are of use only when something has gone wrong."""

    level: int
    event: str
    fields: Mapping[str, Any]


class Program(Protocol):
    """How a part is begun, and understood."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables beyond those of this process."""

    @property
    def start_s(self) -> float:
        """The longest wait until it serves."""

    def asked_at(self, port: int) -> str:
        """Where it is asked whether it serves; nowhere if it says so by itself."""

    def words(self, port: int, proxy_port: int | None) -> Sequence[str]:
        """Spell its command line."""

    def understood(self, line: str) -> Said:
        """Read a line of its output."""

    def complaint(self, lines: Sequence[str]) -> str:
        """Find in its last lines what was wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OurServer:
    """`block serve …`: it takes any free port for 0, and tells of itself line by line as JSON."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 120.0  # the first one ever compiles the kernels

    def asked_at(self, port: int) -> str:  # noqa: ARG002 - as programs have it
        """Give nothing: it says so by itself."""
        return ""

    def words(self, port: int, proxy_port: int | None) -> Sequence[str]:
        """Run it by this very interpreter."""
        proxy = () if proxy_port is None else ("--proxy-port", str(proxy_port))
        command = (sys.executable, "-m", "services.cli", "serve", *self.arguments)
        return (*command, "--port", str(port), *proxy, "--log-format", "json")

    def understood(self, line: str) -> Said:
        """Take JSON for an event, and the rest for a complaint; a refusal is told when the start has failed."""
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict) or "event" not in said:
            return Said(logging.DEBUG if line.startswith(REFUSAL) else logging.WARNING, line, {})
        level = logging.getLevelNamesMapping().get(str(said.get("level", "info")).upper(), logging.INFO)
        known = {name: value for name, value in said.items() if name not in ("time", "logger", "event", "level")}
        return Said(level, str(said["event"]), known)

    def complaint(self, lines: Sequence[str]) -> str:
        """Give its last line: a command that refuses says why in one."""
        return self.understood(lines[-1]).event.removeprefix(REFUSAL) if lines else "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """`vllm serve MODEL …`: it takes minutes to load, and is asked whether it has."""

    command: str
    model: str
    host: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    start_s: float = 1800.0

    def asked_at(self, port: int) -> str:
        """Give its own address."""
        return f"http://{LOCAL.get(self.host, self.host)}:{port}"

    def words(self, port: int, proxy_port: int | None) -> Sequence[str]:
        """Tell it where to serve what; it stands behind no proxy of its own."""
        assert proxy_port is None
        return (self.command, "serve", self.model, "--host", self.host, "--port", str(port), *self.arguments)

    def understood(self, line: str) -> Said:
        """Let warnings and worse through, and keep the rest, tracebacks among it, for those who look closely."""
        found = VLLM_LINE.fullmatch(line)
        if found is None:
            return Said(logging.DEBUG, line, {})
        level = logging.getLevelNamesMapping()[found[1]]
        return Said(level if level >= logging.WARNING else logging.DEBUG, found[2], {})

    def complaint(self, lines: Sequence[str]) -> str:
        """Find the exception that others came of; else give the last line."""
        said = [VLLM_PREFIX.sub("", self.understood(line).event).strip() for line in lines]
        for place in range(len(said) - 1, -1, -1):
            found = COMPLAINT.search(said[place])
            if found is not None and not any(one in found[0] for one in CONSEQUENCES):
                more = said[place + 1] if "validation error" in found[0] and place + 1 < len(said) else ""
                return " ".join(f"{found[0]} {more}".split())
        return next((one for one in reversed(said) if one), "nothing")
