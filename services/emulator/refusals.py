"""What an emulated engine refuses, and the words and statuses in which vLLM does."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

MOST_REPORTED = 10
LONGEST_INPUT = 200


class VllmError(ValueError):
    """A request that is refused: with a status, and an error of OpenAI's shape."""

    def __init__(self, message: str, *, status: int = 400, kind: str | None = None, param: str | None = None) -> None:
        """Keep what the client will be told."""
        super().__init__(message)
        self.status = status
        self.kind = kind or HTTPStatus(status).phrase
        self.param = param

    def body(self) -> bytes:
        """The error as vLLM writes it."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}, separators=(",", ":")).encode()


def bad_value(message: str, param: str | None = None, value: Any = None) -> VllmError:
    """Refuse a value that is of the right type and yet wrong."""
    told = [f"parameter={param}"] if param else []
    told += [f"value={value}"] if value is not None else []
    text = f"{message} ({', '.join(told)})" if told else message
    return VllmError(text, kind="BadRequestError", param=param)


def unavailable(message: str) -> VllmError:
    """Refuse what the engine cannot take now."""
    return VllmError(message, status=503)


def busy() -> VllmError:
    """Refuse what would make the queue too long."""
    return unavailable(
        "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
        "instance."
    )


def malformed(error: ValueError) -> VllmError:
    """Refuse what is not JSON."""
    place = f"body.{error.pos}" if isinstance(error, json.JSONDecodeError) else "body"
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return invalid(
        [{"type": "json_invalid", "loc": place, "msg": "JSON decode error", "input": {}, "ctx": {"error": reason}}]
    )


def mistyped(error: ValidationError) -> VllmError:
    """Refuse a body whose fields are not of their types."""
    return invalid(
        [
            {
                "type": one["type"],
                "loc": ".".join(("body", *(str(step) for step in one["loc"] if not _is_type(step)))),
                "msg": one["msg"],
                "input": one["input"],
            }
            for one in error.errors(include_url=False, include_context=False)
        ]
    )


def invalid(errors: list[dict[str, Any]]) -> VllmError:
    """Refuse a body, telling of each error where it is and what was there."""
    label = "error" if len(errors) == 1 else "errors"
    lines = [f"{len(errors)} validation {label}:"]
    lines += [f"  { {**error, 'input': _shortened(error['input'])} }" for error in errors[:MOST_REPORTED]]
    if len(errors) > MOST_REPORTED:
        lines.append(f"  ...and {len(errors) - MOST_REPORTED} more {label}")
    return VllmError("\n".join(lines), param=errors[0]["loc"])


def _is_type(step: int | str) -> bool:
    """Tell a branch of a union from a field."""
    return isinstance(step, str) and (step in ("str", "int", "float", "bool") or "[" in step)


def _shortened(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= LONGEST_INPUT else text[:LONGEST_INPUT] + "...[truncated]"
