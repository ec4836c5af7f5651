"""What a request's headers say beside its body: ids, service levels, priority."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protos.block.v1 import common_pb2
from services.http.client import Headers
from services.http.headers import REQUEST_ID
from services.http.openai_body import LONGEST_NAME, bounded

CLASSES = {"real-time": common_pb2.REQUEST_CLASS_REAL_TIME, "best-effort": common_pb2.REQUEST_CLASS_BEST_EFFORT}

# Headers that say the same; of llm-d, the newer and the older spelling.
SLO_TTFT = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
SLO_TPOT = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
SESSION = (b"x-session-id", b"x-block-session-id")
FAIRNESS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
PRIORITY = b"x-block-priority"
CLASS = b"x-block-class"
EXPLAIN = b"x-block-explain"
READ = frozenset((*SLO_TTFT, *SLO_TPOT, *SESSION, *FAIRNESS, PRIORITY, CLASS, EXPLAIN))
TRUE, FALSE = ("1", "true"), ("", "0", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeaders:
    """What a request's headers add to its body."""

    slo: common_pb2.Slo | None
    session_id: str
    fairness_id: str
    priority: int | None
    request_class: common_pb2.RequestClass.ValueType
    explain: bool = False


NO_HEADERS = RequestHeaders(
    slo=None,
    session_id="",
    fairness_id="",
    priority=None,
    request_class=common_pb2.REQUEST_CLASS_UNSPECIFIED,
)


def request_id_of(headers: Headers) -> str:
    """Read the name that a client gives its request; empty where it gives none."""
    return next((_as_text(name, value) for name, value in headers if name == REQUEST_ID), "")


def read_headers(headers: Headers) -> RequestHeaders:
    """Read the headers that placing needs."""
    given = {name: value for name, value in headers if name in READ}
    if not given:
        return NO_HEADERS
    ttft_s, tpot_s = _milliseconds(given, SLO_TTFT), _milliseconds(given, SLO_TPOT)
    request_class = common_pb2.REQUEST_CLASS_UNSPECIFIED
    if CLASS in given:
        name = _text(given, (CLASS,))
        if name not in CLASSES:
            raise ValueError(f"{CLASS.decode()}: must be one of {', '.join(CLASSES)}, not {name!r}")
        request_class = CLASSES[name]
    return RequestHeaders(
        slo=None if ttft_s is None and tpot_s is None else common_pb2.Slo(ttft_s=ttft_s, tpot_s=tpot_s),
        session_id=_text(given, SESSION),
        fairness_id=_text(given, FAIRNESS),
        priority=_whole(given, PRIORITY),
        request_class=request_class,
        explain=_flag(given, EXPLAIN),
    )


def _flag(given: Mapping[bytes, bytes], name: bytes) -> bool:
    text = _text(given, (name,)).lower()
    if text not in (*TRUE, *FALSE):
        raise ValueError(f"{name.decode()}: must be true or false, not {text!r}")
    return text in TRUE


def _text(given: Mapping[bytes, bytes], names: Iterable[bytes]) -> str:
    for name in names:
        value = given.get(name)
        if value is not None:
            return _as_text(name, value)
    return ""


def _as_text(name: bytes, value: bytes) -> str:
    text = value.decode("latin-1").strip()
    if len(text) > LONGEST_NAME or not text.isascii() or not text.isprintable():
        raise ValueError(f"{name.decode()}: must be at most {LONGEST_NAME} printable ASCII characters")
    return text


def _milliseconds(given: Mapping[bytes, bytes], names: Iterable[bytes]) -> float | None:
    for name in names:
        value = given.get(name)
        if value is not None:
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name.decode()}: must be a number of milliseconds above 0")
            return number / 1000
    return None


def _whole(given: Mapping[bytes, bytes], name: bytes) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{name.decode()}: must be a whole number") from None
    return bounded(number, name.decode())
