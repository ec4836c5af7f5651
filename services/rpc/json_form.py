"""Messages read from JSON, whatever it contains."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def message_from(data: Any, message: M) -> M:
    """Fill a message from an object of JSON, without fields that it does not have; ValueError where that is wrong."""
    if not isinstance(data, dict):
        raise ValueError("is not an object")
    try:
        return ParseDict(data, message, ignore_unknown_fields=True)
    except (ParseError, TypeError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from None
    except (SystemError, RecursionError):  # of half a surrogate pair as a name, and of deep structures
        raise ValueError("has texts or structures that no message can have") from None
