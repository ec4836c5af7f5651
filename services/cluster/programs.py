"""The programs of a cluster, Block's servers and vLLM: their command lines, and how their output is read."""

from __future__ import annotations

import json
import logging
import re
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

LOCAL = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - where a server that listens on all interfaces is reached
ERROR_PREFIX = "block: "  # of the one line of a command that fails on bad input

# vLLM 0.32: `(EngineCore pid=7) ERROR 11-21 12:22:14 [core.py:1510] message`
VLLM_LINE = re.compile(r"(?:\(\w+ pid=\d+\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^]]*\] (.*)")
VLLM_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ")
EXCEPTION = re.compile(r"(?:\b[\w.]*(?:Error|Exception|Interrupt)|^vllm[\w ]*: error): \S.*")
NO_NIXL = "NIXL is not available"
WHAT_NIXL_NEEDS = "install it in vLLM's environment: pip install nixl"
FOLLOWING = ("Engine core initialization failed", "WorkerProc initialization failed")  # of an earlier exception


class OutputLine(NamedTuple):
    """A line of output: an event with its fields, or a text that is of use only to find an error."""

    level: int
    event: str
    fields: Mapping[str, Any]


class Program(Protocol):
    """How a part is started, and how its output is read."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables in addition to those of this process."""

    @property
    def start_s(self) -> float:
        """The maximum time until it serves."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """By which its health is polled."""

    def health_url(self, port: int) -> str:
        """The URL whose /health is polled; empty if the program logs that it serves."""

    def command_line(self, port: int, proxy_port: int | None) -> Sequence[str]:
        """The command line."""

    def parsed(self, line: str) -> OutputLine:
        """Parse a line of output."""

    def error_in(self, lines: Sequence[str]) -> str:
        """Find the error in the last lines of output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockServer:
    """`block serve …`: it takes any free port for 0, and logs lines of JSON."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 120.0  # the first start compiles the kernels
    tls: ssl.SSLContext | None = None

    def health_url(self, port: int) -> str:  # noqa: ARG002 - as programs have it
        """Return nothing: the server logs that it serves."""
        return ""

    def command_line(self, port: int, proxy_port: int | None) -> Sequence[str]:
        """Run the server with this interpreter."""
        proxy = () if proxy_port is None else ("--proxy-port", str(proxy_port))
        command = (sys.executable, "-m", "services.cli", "serve", *self.arguments)
        return (*command, "--port", str(port), *proxy, "--log-format", "json")

    def parsed(self, line: str) -> OutputLine:
        """Take JSON for an event, and any other line for a warning; the line of an error is reported by `error_in`."""
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event:
            return OutputLine(logging.DEBUG if line.startswith(ERROR_PREFIX) else logging.WARNING, line, {})
        level = logging.getLevelNamesMapping().get(str(event.get("level", "info")).upper(), logging.INFO)
        fields = {name: value for name, value in event.items() if name not in ("time", "logger", "event", "level")}
        return OutputLine(level, str(event["event"]), fields)

    def error_in(self, lines: Sequence[str]) -> str:
        """Return the last line: a command that fails on bad input writes one line."""
        return self.parsed(lines[-1]).event.removeprefix(ERROR_PREFIX) if lines else "no output"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """`vllm serve MODEL …`: it takes minutes to load, and its health is polled."""

    command: str
    model: str
    host: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    start_s: float = 1800.0
    tls: ssl.SSLContext | None = None

    def health_url(self, port: int) -> str:
        """Return the address of the server."""
        return f"{'http' if self.tls is None else 'https'}://{LOCAL.get(self.host, self.host)}:{port}"

    def command_line(self, port: int, proxy_port: int | None) -> Sequence[str]:
        """Serve the model at this port; vLLM has no proxy."""
        assert proxy_port is None
        return (self.command, "serve", self.model, "--host", self.host, "--port", str(port), *self.arguments)

    def parsed(self, line: str) -> OutputLine:
        """Keep the level of warnings and errors; other lines, tracebacks among them, are for debugging."""
        found = VLLM_LINE.fullmatch(line)
        if found is None:
            return OutputLine(logging.DEBUG, line, {})
        level = logging.getLevelNamesMapping()[found[1]]
        return OutputLine(level if level >= logging.WARNING else logging.DEBUG, found[2], {})

    def error_in(self, lines: Sequence[str]) -> str:
        """Find the exception that caused the others; otherwise return the last line."""
        events = [VLLM_PREFIX.sub("", self.parsed(line).event).strip() for line in lines]
        for index in range(len(events) - 1, -1, -1):
            found = EXCEPTION.search(events[index])
            if found is not None and not any(one in found[0] for one in FOLLOWING):
                more = events[index + 1] if "validation error" in found[0] and index + 1 < len(events) else ""
                remedy = f"; {WHAT_NIXL_NEEDS}" if NO_NIXL in found[0] else ""
                return " ".join(f"{found[0]} {more}".split()) + remedy
        return next((one for one in reversed(events) if one), "no output")
