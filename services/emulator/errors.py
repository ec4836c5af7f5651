"""Errors of an emulated engine, with the messages and statuses of vLLM 0.32."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from services.http.errors import HttpError

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_REPORTED = 10
LONGEST_INPUT = 200


DONE = b"data: [DONE]\n\n"


class VllmError(HttpError):
    """A refused request, in vLLM's variant of OpenAI's shape."""

    @staticmethod
    def usual(status: int, message: str) -> tuple[str | None, str | int | None, str | None]:  # noqa: ARG004
        """Return the status's phrase as the type, and the status as the code."""
        return HTTPStatus(status).phrase, status, None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the reply; the rest of a body that is too large is not read."""
        return [*super().headers(), *([(b"connection", b"close")] if self.status == 413 else [])]

    def event(self) -> bytes:
        """Write the events that end a stream whose engine has failed."""
        return super().event() + DONE


class DetailError(VllmError):
    """An error of vLLM's web framework: a path or a method that it does not serve."""

    def body(self) -> bytes:
        """Write the detail alone."""
        return json.dumps({"detail": self.message}, separators=(",", ":")).encode()


def bad_value(message: str, param: str | None = None, value: Any = None) -> VllmError:
    """Refuse a value of the right type that is out of range."""
    details = [f"parameter={param}"] if param else []
    details += [f"value={value}"] if value is not None else []
    text = f"{message} ({', '.join(details)})" if details else message
    return VllmError(400, text, kind="BadRequestError", param=param)


def unavailable(message: str) -> VllmError:
    """Refuse a request that the engine cannot take now."""
    return VllmError(503, message)


def busy() -> VllmError:
    """Refuse a request beyond the limit of the queue."""
    return unavailable(
        "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
        "instance."
    )


def not_fetched() -> VllmError:
    """Fail a request whose KV blocks cannot be fetched."""
    return VllmError(500, "Internal server error", kind="InternalServerError")


def malformed(error: ValueError) -> VllmError:
    """Refuse a body that is not JSON."""
    place = f"body.{error.pos}" if isinstance(error, json.JSONDecodeError) else "body"
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return invalid(
        [{"type": "json_invalid", "loc": place, "msg": "JSON decode error", "input": {}, "ctx": {"error": reason}}]
    )


def mistyped(error: ValidationError) -> VllmError:
    """Refuse a body with fields of wrong types."""
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
    """Refuse a body, with the place and the value of each error."""
    label = "error" if len(errors) == 1 else "errors"
    lines = [f"{len(errors)} validation {label}:"]
    lines += [f"  { {**error, 'input': _shortened(error['input'])} }" for error in errors[:MAX_REPORTED]]
    if len(errors) > MAX_REPORTED:
        lines.append(f"  ...and {len(errors) - MAX_REPORTED} more {label}")
    return VllmError(400, "\n".join(lines), param=errors[0]["loc"])


def _is_type(step: int | str) -> bool:
    """Tell whether a step of a location is a branch of a union, not a field."""
    return isinstance(step, str) and (step in ("str", "int", "float", "bool") or "[" in step)


def _shortened(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= LONGEST_INPUT else text[:LONGEST_INPUT] + "...[truncated]"
