"""Errors as the clients of other APIs than OpenAI's completions expect them: Anthropic's, and events of responses."""

from __future__ import annotations

import json
from dataclasses import dataclass

from services.http.errors import HttpError

# Anthropic's types by status; any other status from 500 on is an `api_error`.
ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How an error is written, as a reply or as the last event of a stream."""

    def body(self, error: HttpError) -> bytes:
        """Write the reply."""
        return error.body()

    def event(self, error: HttpError) -> bytes:
        """Write the event."""
        return error.event()


class AnthropicErrors(ErrorShape):
    """Errors of /v1/messages."""

    def body(self, error: HttpError) -> bytes:
        """Write the reply."""
        kind = ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return _json({"type": "error", "error": {"type": kind, "message": error.message}})

    def event(self, error: HttpError) -> bytes:
        """Write the event."""
        return b"event: error\ndata: " + self.body(error) + b"\n\n"


class ResponsesErrors(ErrorShape):
    """Errors of /v1/responses, whose streams have typed events; clients look for `error` in them, too."""

    def event(self, error: HttpError) -> bytes:
        """Write the event."""
        whole = json.loads(error.body())
        about = whole["error"]
        more = {"code": about.get("code"), "message": about.get("message"), "param": about.get("param")}
        return b"event: error\ndata: " + _json({"type": "error", **more, **whole}) + b"\n\n"


PLAIN_ERRORS, ANTHROPIC_ERRORS, RESPONSES_ERRORS = ErrorShape(), AnthropicErrors(), ResponsesErrors()


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
