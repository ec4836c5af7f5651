"""Log lines for people and machines: an event and its fields, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TextIO

from services.settings import Option

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What a program logs, and how."""

    log_level: Annotated[str, Option("Least severe level that is logged.", choices=LEVELS)] = "info"
    log_format: Annotated[str, Option("Format of log lines, which go to standard error.", choices=FORMATS)] = "text"

    def apply(self) -> None:
        """Set up the log of this process."""
        configure(self.log_level, self.log_format)


def log_event(log: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log an event with its fields."""
    log.log(level, event, extra={"fields": fields})


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Send everything that is logged to one stream, standard error by default, in one form."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextLines(logging.Formatter):
    """2026-11-21T03:29:01.123Z INFO services.rpc.server: serving host=127.0.0.1 port=50053."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as one line; a traceback follows on lines of its own."""
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {' '.join(record.getMessage().split())}{fields}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, event, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as one line."""
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _word(value: Any) -> str:
    """Write a value so that the line stays one line and its words stay apart."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and text and not set(text) & set(' "=') else json.dumps(text)
