"""Converts protobuf messages to the values of the pure packages, and back; errors name the field.

protos/block/v1/common.proto has the rules: absent differs from zero, infinite times are infinities, NaN is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from predictor.approximations import MAX_APPROXIMATIONS, MAX_LENGTH
from predictor.forecast_result import Forecast
from predictor.lengths import Tag
from predictor.request import BEST_EFFORT, DECODE, PREFILL, REAL_TIME, SERVE, EncoderInput, RequestFacts, Slo
from protos.block.v1 import common_pb2
from scheduler.adapters import ReportedAdapters

LONGEST_NAME = 256  # characters of ids and names
MAX_HASH_BYTES = 64
MAX_ENCODER_INPUTS = 256
NO_LIMIT = 2**32 - 1

CLASSES = {
    common_pb2.REQUEST_CLASS_UNSPECIFIED: REAL_TIME,
    common_pb2.REQUEST_CLASS_REAL_TIME: REAL_TIME,
    common_pb2.REQUEST_CLASS_BEST_EFFORT: BEST_EFFORT,
}
CLASS_VALUES = {
    REAL_TIME: common_pb2.REQUEST_CLASS_REAL_TIME,
    BEST_EFFORT: common_pb2.REQUEST_CLASS_BEST_EFFORT,
}
LEG_NAMES = {
    common_pb2.LEG_UNSPECIFIED: SERVE,
    common_pb2.LEG_SERVE: SERVE,
    common_pb2.LEG_PREFILL: PREFILL,
    common_pb2.LEG_DECODE: DECODE,
}
LEG_VALUES = {
    SERVE: common_pb2.LEG_UNSPECIFIED,  # so that the message stays small
    PREFILL: common_pb2.LEG_PREFILL,
    DECODE: common_pb2.LEG_DECODE,
}

# The fields of Indicators that are no indicators, and the indicators with bounds of their own.
NO_INDICATORS = ("age_s", "source", "more", "active_adapters", "cached_adapters")
INDICATOR_FIELDS = {
    field.name: field for field in common_pb2.Indicators.DESCRIPTOR.fields if field.name not in NO_INDICATORS
}
WHOLE_INDICATORS = frozenset(
    name for name, field in INDICATOR_FIELDS.items() if field.type in (field.TYPE_UINT32, field.TYPE_UINT64)
)
MAY_BE_INFINITE = frozenset({"drained_s", "least_tpot_slo_s", "efficient_step_s", "step_overhead_s"})


# Requests.


def request_from(  # noqa: PLR0913 - what an engine reads a request by
    message: common_pb2.Request,
    *,
    now_s: float = 0.0,
    clock_rate: float = 1.0,
    block_size: int | None = None,
    known_as: str = "",
    longest_prompt: int = NO_LIMIT,
) -> RequestFacts:
    """Read a request for an engine whose clock is at `now_s` and counts `clock_rate` seconds per second.

    `known_as` replaces its id. Prefix hashes are dropped where they were made for blocks of another `block_size`. The
    prompts of several requests together count as one of at most `longest_prompt` tokens.
    """
    require_name("request_id", message.request_id)
    if len(message.model) > LONGEST_NAME:
        raise ValueError(f"model: is longer than {LONGEST_NAME} characters")
    if not (math.isfinite(message.waited_s) and message.waited_s >= 0):
        raise ValueError(f"waited_s: must be a time from 0 on, not {message.waited_s}")
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    output_tokens = message.output_tokens if message.HasField("output_tokens") else None
    if output_tokens is None and message.ignore_eos and max_tokens is not None:
        output_tokens = max_tokens  # it ends there and nowhere else
    has_several = message.num_prompts > 1 or len(message.prompts) > 1
    return RequestFacts(
        request_id=known_as or message.request_id,
        model=message.model,
        prompt_tokens=min(message.prompt_tokens, longest_prompt) if has_several else message.prompt_tokens,
        output_tokens=output_tokens,
        tag=tag_from(message.tag) if message.HasField("tag") else None,
        arrival_s=max(0.0, now_s - message.waited_s * clock_rate),
        max_tokens=max_tokens,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else None,
        priority=message.priority,
        prefix_hashes=prefix_from(message.prefix_hashes, message.prefix_block_tokens, block_size),
        request_class=CLASSES.get(message.request_class, REAL_TIME),
        slo=_slo_from(message.slo, clock_rate) if message.HasField("slo") else None,
        weight=message.weight if message.HasField("weight") else 1.0,
        client_id=message.client_id,
        session_id=message.session_id,
        in_s=message.in_s * clock_rate,
        waited_s=message.waited_s * clock_rate,
        leg=LEG_NAMES.get(message.leg, SERVE),
        held_s=message.held_s * clock_rate if message.HasField("held_s") else None,
        length_quantiles=message.length_quantiles or 1,
        adapter=_adapter_from(message),
        encoder_inputs=_inputs_from(message),
    )


def request_message(request: RequestFacts, *, now_s: float | None = None, block_size: int = 0) -> common_pb2.Request:
    """Write a request as a message at `now_s` on its clock; its prefix hashes are for blocks of `block_size`."""
    if request.prefix_hashes and not block_size:
        raise ValueError("block_size: is missing, and prefix_hashes need it")
    slo = request.slo
    return common_pb2.Request(
        request_id=request.request_id,
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        tag=tag_message(request.tag) if isinstance(request.tag, Tag) else None,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        priority=request.priority,
        request_class=CLASS_VALUES[request.request_class],
        slo=None if slo is None else common_pb2.Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s),
        waited_s=0.0 if now_s is None else max(0.0, now_s - request.arrival_s),
        prefix_hashes=prefix_bytes(request.prefix_hashes),
        prefix_block_tokens=block_size if request.prefix_hashes else 0,
        weight=None if request.weight == 1.0 else request.weight,
        client_id=request.client_id,
        session_id=request.session_id,
        in_s=request.in_s,
        leg=LEG_VALUES[request.leg],
        held_s=request.held_s,
        length_quantiles=0 if request.length_quantiles == 1 else request.length_quantiles,
        adapter=request.adapter,
        encoder_inputs=[
            common_pb2.EncoderInput(position=one.position, tokens=one.tokens, identity=_identity_bytes(one.identity))
            for one in request.encoder_inputs
        ],
    )


def _slo_from(message: common_pb2.Slo, clock_rate: float) -> Slo | None:
    ttft_s = message.ttft_s * clock_rate if message.HasField("ttft_s") else None
    tpot_s = message.tpot_s * clock_rate if message.HasField("tpot_s") else None
    try:
        return None if ttft_s is None and tpot_s is None else Slo(ttft_s=ttft_s, tpot_s=tpot_s)
    except ValueError as error:
        raise ValueError(f"slo.{error}") from None


def _adapter_from(message: common_pb2.Request) -> str:
    if len(message.adapter) > LONGEST_NAME:
        raise ValueError(f"adapter: is longer than {LONGEST_NAME} characters")
    return message.adapter


def _inputs_from(message: common_pb2.Request) -> tuple[EncoderInput, ...]:
    if not message.encoder_inputs:
        return ()
    if len(message.encoder_inputs) > MAX_ENCODER_INPUTS:
        raise ValueError(f"encoder_inputs: {len(message.encoder_inputs)} are more than {MAX_ENCODER_INPUTS}")
    inputs = []
    for index, one in enumerate(message.encoder_inputs):
        if len(one.identity) > MAX_HASH_BYTES:
            raise ValueError(f"encoder_inputs[{index}].identity: has more than {MAX_HASH_BYTES} bytes")
        try:
            inputs.append(EncoderInput(position=one.position, tokens=one.tokens, identity=one.identity.hex() or None))
        except ValueError as error:
            raise ValueError(f"encoder_inputs[{index}].{error}") from None
    return tuple(inputs)


def _identity_bytes(identity: int | str | None) -> bytes:
    return b"" if identity is None else prefix_bytes([identity])[0]


def prefix_from(
    names: Sequence[bytes], block_tokens: int, block_size: int | None, field: str = "prefix_hashes"
) -> tuple[str, ...]:
    """Read the names of blocks of `block_tokens`; none where they were made for blocks of another `block_size`."""
    if not names:
        return ()
    if not block_tokens:
        raise ValueError("prefix_block_tokens: is missing, and prefix_hashes need it")
    for index, name in enumerate(names):
        if not 0 < len(name) <= MAX_HASH_BYTES:
            raise ValueError(f"{field}[{index}]: must have 1 to {MAX_HASH_BYTES} bytes, not {len(name)}")
    if block_size is not None and block_tokens != block_size:
        return ()
    return tuple(name.hex() for name in names)


def prefix_bytes(names: Iterable[int | str]) -> list[bytes]:
    """Encode block hashes: hexadecimal texts as their bytes, numbers in eight bytes or more."""
    encoded = []
    for index, name in enumerate(names):
        if isinstance(name, int):
            encoded.append(name.to_bytes(max(8, name.bit_length() // 8 + 1), "big", signed=True))
            continue
        try:
            encoded.append(bytes.fromhex(name))
        except ValueError:
            raise ValueError(f"prefix_hashes[{index}]: {name!r} is not hexadecimal") from None
    return encoded


def require_name(field: str, name: str) -> None:
    """Refuse a name that is missing, too long, or not printable in a log line or a header."""
    if not name:
        raise ValueError(f"{field}: is missing")
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise ValueError(f"{field}: must be at most {LONGEST_NAME} printable characters")


# Tags.


def tag_from(message: common_pb2.Tag) -> Tag:
    """Read a predicted length."""
    try:
        if not 0 <= message.confidence <= 1:
            raise ValueError(f"confidence: must lie between 0 and 1, not {message.confidence}")
        return Tag(median_tokens=message.median_tokens, spread=message.spread)
    except ValueError as error:
        raise ValueError(f"tag.{error}") from None


def tag_message(tag: Tag, *, estimator: str = "", confidence: float = 0.0, keys: Sequence[int] = ()) -> common_pb2.Tag:
    """Write a predicted length as a message."""
    return common_pb2.Tag(
        median_tokens=tag.median_tokens, spread=tag.spread, estimator=estimator, confidence=confidence, keys=keys
    )


# Forecasts.


def forecast_from(message: common_pb2.Forecast) -> Forecast:
    """Read a forecast; an inconsistent one is refused."""
    ttft_s, e2e_s, tpot_s, queue_s = message.ttft_s, message.e2e_s, message.tpot_s, message.queue_s
    if not (0 <= queue_s <= ttft_s <= e2e_s and e2e_s > 0 and tpot_s >= 0 and message.output_tokens > 0):  # NaN neither
        raise ValueError(f"forecast.{_error_in(message)}")
    others_preempted = message.others_preempted if message.HasField("others_preempted") else None
    return Forecast(
        request_id=message.request_id,
        ttft_s=ttft_s,
        e2e_s=e2e_s,
        tpot_s=tpot_s,
        queue_s=queue_s,
        output_tokens=message.output_tokens,
        num_preemptions=message.num_preemptions,
        prefix_hit_tokens=message.prefix_hit_tokens if message.HasField("prefix_hit_tokens") else None,
        others_preempted=others_preempted,
        delay_sum_s=_delay(message, "delay_sum_s"),
        delay_worst_s=_delay(message, "delay_worst_s"),
        fetched_s=_delay(message, "fetched_s"),
        attained=_attained(message),
        others_missed=_delay(message, "others_missed"),
        gain_before=_delay(message, "gain_before"),
        gain_after=_delay(message, "gain_after"),
        least_slack_s=_delay(message, "least_slack_s"),
        unmeasured=_unmeasured(message),
        approximations=_approximations(message) if message.approximations else (),
        offloaded_hit_tokens=message.offloaded_hit_tokens,
    )


def _attained(message: common_pb2.Forecast) -> float:
    if not message.HasField("attained"):
        return 1.0
    if not 0 <= message.attained <= 1:
        raise ValueError(f"forecast.attained: must be from 0 to 1, not {message.attained}")
    return message.attained


def _unmeasured(message: common_pb2.Forecast) -> float:
    if not 0 <= message.unmeasured <= 1:
        raise ValueError(f"forecast.unmeasured: must be from 0 to 1, not {message.unmeasured}")
    return message.unmeasured


def _approximations(message: common_pb2.Forecast) -> tuple[str, ...]:
    named = tuple(message.approximations)
    if len(named) > MAX_APPROXIMATIONS or max(map(len, named)) > MAX_LENGTH:
        raise ValueError(f"forecast.approximations: must be at most {MAX_APPROXIMATIONS} of {MAX_LENGTH} characters")
    return named


def _delay(message: common_pb2.Forecast, name: str) -> float | None:
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    value: float = getattr(message, name)
    if math.isnan(value):
        raise ValueError(f"forecast.{name}: is NaN")
    return value


def _error_in(message: common_pb2.Forecast) -> str:
    for name in ("queue_s", "ttft_s", "e2e_s", "tpot_s"):
        value = getattr(message, name)
        if not value >= 0:
            return f"{name}: must be a time from 0 on, not {value}"
    if message.output_tokens == 0:
        return "output_tokens: is missing"
    if message.e2e_s == 0:
        return "e2e_s: must be above 0"
    if message.ttft_s > message.e2e_s:
        return f"ttft_s: {message.ttft_s} is after the last token, {message.e2e_s}"
    return f"queue_s: {message.queue_s} is after the first token, {message.ttft_s}"


def forecast_message(forecast: Forecast) -> common_pb2.Forecast:
    """Write a forecast as a message."""
    return common_pb2.Forecast(
        request_id=forecast.request_id,
        ttft_s=forecast.ttft_s,
        e2e_s=forecast.e2e_s,
        tpot_s=forecast.tpot_s,
        queue_s=forecast.queue_s,
        output_tokens=forecast.output_tokens,
        num_preemptions=forecast.num_preemptions,
        prefix_hit_tokens=forecast.prefix_hit_tokens,
        others_preempted=forecast.others_preempted,
        delay_sum_s=forecast.delay_sum_s,
        delay_worst_s=forecast.delay_worst_s,
        fetched_s=forecast.fetched_s,
        attained=None if forecast.attained == 1.0 else forecast.attained,  # so that the message stays small
        others_missed=forecast.others_missed,
        gain_before=forecast.gain_before,
        gain_after=forecast.gain_after,
        least_slack_s=forecast.least_slack_s,
        unmeasured=forecast.unmeasured,
        approximations=forecast.approximations,
        offloaded_hit_tokens=forecast.offloaded_hit_tokens,
    )


# Indicators.


def indicators_from(message: common_pb2.Indicators) -> dict[str, float]:
    """Read the indicators that are present, by name; a field takes precedence over an entry of `more`."""
    if not (math.isfinite(message.age_s) and message.age_s >= 0):
        raise ValueError(f"indicators.age_s: must be a time from 0 on, not {message.age_s}")
    values: dict[str, float] = {}
    if message.more:  # iterating an empty map costs more than all the rest
        for name, value in message.more.items():
            if math.isnan(value):
                raise ValueError(f"indicators.more[{name!r}]: is NaN")
            values[name] = value
    for field, value in message.ListFields():
        name = field.name
        if name in INDICATOR_FIELDS:
            values[name] = value
            if type(value) is float and not (0 <= value < math.inf):
                _require_number(name, value)
    if values.get("kv_hit_ratio", 0.0) > 1:
        raise ValueError(f"indicators.kv_hit_ratio: must lie between 0 and 1, not {values['kv_hit_ratio']}")
    return values


def indicators_message(
    values: Mapping[str, float],
    *,
    age_s: float,
    source: common_pb2.StateSource.ValueType = common_pb2.STATE_SOURCE_UNSPECIFIED,
) -> common_pb2.Indicators:
    """Write indicators as a message; those without a field become entries of `more`."""
    message = common_pb2.Indicators(age_s=age_s, source=source)
    for name, value in values.items():
        if name in INDICATOR_FIELDS:
            _require_number(name, value)
            setattr(message, name, round(value) if name in WHOLE_INDICATORS else value)
        elif math.isnan(value):
            raise ValueError(f"indicators.more[{name!r}]: is NaN")
        else:
            message.more[name] = value
    return message


def adapters_from(message: common_pb2.Indicators) -> ReportedAdapters:
    """Read the LoRA adapters that an instance reports."""
    return ReportedAdapters(frozenset(message.active_adapters), frozenset(message.cached_adapters))


def _require_number(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"indicators.{name}: must be a number from 0 on, not {value}")
    if value == math.inf and name not in MAY_BE_INFINITE:
        raise ValueError(f"indicators.{name}: is infinite")
