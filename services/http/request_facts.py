"""What a client's request asks for: its headers and body read, a message for placing it, and the body for engines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from protos.block.v1 import common_pb2
from services.engine_state.xargs import CLASSES as CLASS_NAMES
from services.engine_state.xargs import facts_in
from services.http.application import REQUEST_ID
from services.http.engine_arguments import CLASSES, with_arguments
from services.http.headers import Headers
from services.http.json_fields import LONGEST_NAME, bounded, with_fields
from services.http.media_parts import encoder_inputs
from services.http.openai_body import OpenAIRequest
from services.objectives import ObjectiveTable
from services.rpc.objectives import WHEN_LATE_VALUES, fill_from

# Header names with the same meaning; of llm-d, the newer and the older spelling.
SLO_TTFT = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
SLO_TPOT = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
SESSION = (b"x-session-id", b"x-block-session-id")
FAIRNESS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
OBJECTIVE = (b"x-block-objective", b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
PRIORITY = b"x-block-priority"
CLASS = b"x-block-class"
WEIGHT = b"x-block-weight"
WHEN_LATE = b"x-block-when-late"
EXPLAIN = b"x-block-explain"
READ = frozenset((*SLO_TTFT, *SLO_TPOT, *SESSION, *FAIRNESS, *OBJECTIVE, PRIORITY, CLASS, WEIGHT, WHEN_LATE, EXPLAIN))
TRUE, FALSE = ("1", "true"), ("", "0", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeaders:
    """The values that a request's headers add to its body."""

    slo: common_pb2.Slo | None
    session_id: str
    fairness_id: str
    priority: int | None
    request_class: common_pb2.RequestClass.ValueType
    weight: float | None = None
    objective: str = ""
    objective_header: str = ""  # that named it
    when_late: common_pb2.WhenLate.ValueType = common_pb2.WHEN_LATE_UNSPECIFIED
    explain: bool = False


NO_HEADERS = RequestHeaders(
    slo=None,
    session_id="",
    fairness_id="",
    priority=None,
    request_class=common_pb2.REQUEST_CLASS_UNSPECIFIED,
)


def request_id_of(headers: Headers) -> str:
    """Read the id that a client gives its request; empty where it gives none."""
    return next((_as_text(name, value) for name, value in headers if name == REQUEST_ID), "")


def read_headers(headers: Headers) -> RequestHeaders:
    """Read the headers that placing needs."""
    given = {name: value for name, value in headers if name in READ}
    if not given:
        return NO_HEADERS
    ttft_s, tpot_s = _milliseconds(given, SLO_TTFT), _milliseconds(given, SLO_TPOT)
    request_class, when_late = common_pb2.REQUEST_CLASS_UNSPECIFIED, common_pb2.WHEN_LATE_UNSPECIFIED
    if CLASS in given:
        request_class = CLASSES[_word(given, CLASS, CLASSES)]
    if WHEN_LATE in given:
        when_late = WHEN_LATE_VALUES[_word(given, WHEN_LATE, WHEN_LATE_VALUES)]
    return RequestHeaders(
        slo=None if ttft_s is None and tpot_s is None else common_pb2.Slo(ttft_s=ttft_s, tpot_s=tpot_s),
        session_id=_text(given, SESSION),
        fairness_id=_text(given, FAIRNESS),
        priority=_whole(given, PRIORITY),
        request_class=request_class,
        weight=_positive(given, WEIGHT),
        objective=_text(given, OBJECTIVE),
        objective_header=next((name.decode() for name in OBJECTIVE if name in given), ""),
        when_late=when_late,
        explain=_flag(given, EXPLAIN),
    )


def _word(given: Mapping[bytes, bytes], name: bytes, known: Iterable[str]) -> str:
    text = _text(given, (name,))
    if text not in known:
        raise ValueError(f"{name.decode()}: must be one of {', '.join(known)}, not {text!r}")
    return text


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


def _milliseconds(given: Mapping[bytes, bytes], names: Sequence[bytes]) -> float | None:
    name = next((name for name in names if name in given), names[0])
    number = _positive(given, name, "a number of milliseconds above 0")
    if number is not None and number / 1000 == 0:
        raise ValueError(f"{name.decode()}: must be a number of milliseconds above 0")
    return None if number is None else number / 1000


def _positive(given: Mapping[bytes, bytes], name: bytes, expected: str = "a number above 0") -> float | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name.decode()}: must be {expected}")
    return number


def _whole(given: Mapping[bytes, bytes], name: bytes) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{name.decode()}: must be a whole number") from None
    return bounded(number, name.decode())


# What schedulers and engines receive.


def request_message(  # noqa: PLR0913 - what a request is read from
    openai: OpenAIRequest,
    headers: RequestHeaders,
    objectives: ObjectiveTable,
    *,
    request_id: str,
    prompt_tokens: int,
    client_id: str = "",
    objective: str = "",
) -> common_pb2.Request:
    """Write a request as a message for schedulers; ValueError where `vllm_xargs` has an impossible value.

    What `vllm_xargs` says has precedence over headers, but not over `client_id`. Both have precedence over an
    objective, by default the one given; without a table of objectives its name is left to the scheduler.
    """
    xargs, errors = facts_in(openai.xargs or {})
    if errors:
        raise ValueError(f"vllm_xargs.{errors[0].replace(' ', ': ', 1)}")
    slo = headers.slo or common_pb2.Slo()
    if "ttft_slo_s" in xargs:
        slo.ttft_s = xargs["ttft_slo_s"]
    if "tpot_slo_s" in xargs:
        slo.tpot_s = xargs["tpot_slo_s"]
    request_class = headers.request_class
    if "request_class" in xargs:
        request_class = CLASSES[CLASS_NAMES[xargs["request_class"]]]
    priority = priority_of(openai, headers)
    request = common_pb2.Request(
        request_id=request_id,
        model=openai.model,
        prompt_tokens=prompt_tokens,
        max_tokens=openai.max_tokens,
        output_tokens=1 if openai.prefill_only else None,  # the step that ends the prompt
        num_prompts=openai.num_prompts if openai.num_prompts > 1 else 0,
        num_sequences=openai.num_samples if openai.num_samples > 1 else 0,
        prompts=prompt_messages(openai, prompt_tokens) if openai.prompt_sizes else (),
        grammar=openai.grammar,
        min_tokens=openai.min_tokens,
        ignore_eos=openai.ignore_eos,
        expected_output_tokens=openai.expected_tokens,
        priority=priority or 0,
        request_class=request_class,
        slo=slo if slo.HasField("ttft_s") or slo.HasField("tpot_s") else None,
        weight=xargs.get("weight", headers.weight),
        session_id=xargs.get("session_id", headers.session_id),
        client_id=client_id or xargs.get("client_id", headers.fairness_id),
        objective=headers.objective or objective,
        when_late=headers.when_late,
    )
    if openai.media:
        request.encoder_inputs.extend(encoder_inputs(openai.media, openai.model, prompt_tokens or 0))
    if request.objective and objectives:
        field = headers.objective_header or "objective of the API key"
        fill_from(request, objectives.named(request.objective, field), has_priority=priority is not None)
    return request


def prompt_messages(openai: OpenAIRequest, prompt_tokens: int) -> list[common_pb2.Prompt]:
    """Divide the tokens of several prompts among them, by their sizes."""
    sizes = openai.prompt_sizes
    share = prompt_tokens / sum(sizes)  # 1 where the client sent token ids
    return [common_pb2.Prompt(prompt_tokens=max(1, round(size * share))) for size in sizes]


def priority_of(openai: OpenAIRequest, headers: RequestHeaders) -> int | None:
    """Take the body's priority, else the header's, else a hint's; lower runs first."""
    given = (openai.priority, headers.priority, openai.hinted_priority)
    return next((priority for priority in given if priority is not None), None)


def body_to_pass(
    body: bytes,
    openai: OpenAIRequest,
    request: common_pb2.Request,
    waited_s: float = 0.0,
    *,
    passes_priority: bool,
) -> bytes:
    """Return the body for the engine, with what it does not say itself: priority, service level, class, weight, ids.

    A vLLM with Block's plug-in reads them, and any other ignores them, except for the priority: an engine that does not
    order by priority may refuse it. So it is added only with `passes_priority`.
    """
    if not openai.is_object:
        return body
    added: dict[str, bytes] = {}
    if passes_priority and openai.priority is None and request.priority != 0:
        added["priority"] = b"%d" % request.priority
    own = openai.xargs or {}
    xargs = with_arguments(own, request, waited_s)
    if xargs != own:
        added["vllm_xargs"] = json.dumps(xargs, separators=(",", ":")).encode()
    return with_fields(body, added, openai.fields) if added else body
