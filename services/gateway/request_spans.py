"""The spans of a request at the gateway: how its own and that of a decision end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.gateway.destinations import Destination
from services.http.application import Call, ClientLeftError
from services.http.errors import HttpError
from services.tracing.attributes import decision_attributes
from services.tracing.request_spans import STATUS, RequestSpans, error_name

if TYPE_CHECKING:
    from services.tracing.spans import ActiveSpan

CLIENT_LEFT, CANCELLED = "client_left", "cancelled"


@contextmanager
def recorded(spans: RequestSpans, call: Call) -> Iterator[None]:
    """End the request's own span with the block, by how the block ends."""
    status, error = 0, ""
    if not spans.is_recorded:
        yield
        return
    try:
        yield
    except HttpError as refused:
        status = refused.status
        raise
    except ClientLeftError:
        error = CLIENT_LEFT
        raise
    except asyncio.CancelledError:
        error = CANCELLED
        raise
    except Exception as defect:
        error = type(defect).__name__
        raise
    finally:
        status = call.status or status
        spans.set({STATUS: status or None})
        spans.end(error or (str(status) if status >= 500 else ""))


def end_scheduling(span: ActiveSpan, destination: Destination | None, error: BaseException | None) -> None:
    """End the span of a decision, or of one that failed."""
    if destination is not None:
        found = {"block.instance": destination.instance_id, "block.policy": destination.policy}
        span.set(found if destination.decision is None else decision_attributes(destination.decision))
    span.end("" if error is None else error_name(error))
