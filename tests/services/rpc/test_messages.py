"""Messages to values and back: values survive, bad ones are named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.forecast_result import Forecast
from predictor.prefix import block_hashes
from predictor.request import RequestFacts, Slo
from protos.block.v1 import common_pb2
from services.rpc import messages
from tests.predictor.test_request import FACTS, KNOWN_LENGTH

HASHES = block_hashes(range(48), 16)

REQUEST = replace(FACTS, prefix_hashes=HASHES)
FORECAST = Forecast(
    request_id="r", ttft_s=0.2, e2e_s=2.0, tpot_s=0.01, queue_s=0.1, output_tokens=9, num_preemptions=1,
    prefix_hit_tokens=32, others_preempted=-1, delay_sum_s=0.5, delay_worst_s=-0.1,
    attained=0.25, others_missed=2, gain_before=9.0, gain_after=7.5, least_slack_s=-0.3,
)  # fmt: skip


def request(**fields: Any) -> common_pb2.Request:
    """A valid request with other values of some fields."""
    return common_pb2.Request(**{"request_id": "r", "prompt_tokens": 48, **fields})


def forecast(**fields: Any) -> common_pb2.Forecast:
    """A valid forecast with other values of some fields."""
    message = messages.forecast_message(FORECAST)
    for name, value in fields.items():
        setattr(message, name, value)
    return message


@pytest.mark.parametrize("facts", [FACTS, KNOWN_LENGTH])
def test_a_request_arrives_as_it_was_sent(facts: RequestFacts) -> None:
    """All facts survive; the age is carried over to the receiver's clock."""
    sent = replace(facts, prefix_hashes=HASHES, transfer_s=None)  # which engines alone know
    message = messages.request_message(sent, now_s=5.0, block_size=16)
    assert (message.model, message.waited_s, message.prefix_block_tokens) == ("m", 2.0, 16)
    read = messages.request_from(common_pb2.Request.FromString(message.SerializeToString()), now_s=5.0, block_size=16)
    assert read == replace(sent, waited_s=2.0)


def test_spans_are_converted_to_the_engines_clock() -> None:
    """On a clock that counts ten seconds per second, the age and the targets are ten times as long."""
    message = messages.request_message(REQUEST, now_s=5.0, block_size=16)
    read = messages.request_from(message, now_s=50.0, clock_rate=10.0, block_size=16)
    assert (read.arrival_s, read.slo, read.in_s) == (30.0, Slo(ttft_s=5.0, tpot_s=0.4), 1.25)


def test_a_bare_request_stays_bare() -> None:
    """Absent fields are unknown, not zero."""
    bare = RequestFacts(request_id="r", prompt_tokens=1)
    assert messages.request_from(messages.request_message(bare)) == bare


def test_a_fixed_length_is_a_known_length() -> None:
    """With ignore_eos the answer ends at max_tokens; a given length has precedence."""
    assert messages.request_from(request(max_tokens=7, ignore_eos=True)).output_tokens == 7
    assert messages.request_from(request(max_tokens=7, ignore_eos=True, output_tokens=5)).output_tokens == 5
    assert messages.request_from(request(max_tokens=7)).output_tokens is None


def test_prefix_names_count_for_blocks_of_their_size_only() -> None:
    """Names of blocks of another size are ignored."""
    message = messages.request_message(REQUEST, block_size=16)
    assert messages.request_from(message, block_size=32).prefix_hashes == ()
    assert messages.request_from(message).prefix_hashes == HASHES


def test_names_of_blocks_have_one_form() -> None:
    """Hexadecimal strings become bytes; numbers become distinct bytes."""
    assert messages.prefix_bytes(HASHES) == [bytes.fromhex(name) for name in HASHES]
    numbers = [0, 1, -1, 255, 2**63, -(2**63), 2**70]
    assert len(set(messages.prefix_bytes(numbers))) == len(numbers)
    assert messages.prefix_bytes([1]) == [bytes(7) + b"\x01"]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (request(request_id=""), "request_id: is missing"),
        (request(request_id="x" * 257), "request_id: must be at most"),
        (request(request_id="a\nb"), "request_id: must be at most"),
        (request(model="m" * 257), "model"),
        (request(prompt_tokens=0), "prompt_tokens"),
        (request(output_tokens=0), "output_tokens"),
        (request(max_tokens=0), "max_tokens"),
        (request(waited_s=math.nan), "waited_s"),
        (request(waited_s=-1.0), "waited_s"),
        (request(waited_s=math.inf), "waited_s"),
        (request(in_s=-1.0), "in_s"),
        (request(in_s=math.nan), "in_s"),
        (request(held_s=-1.0), "held_s"),
        (request(held_s=math.nan), "held_s"),
        (request(weight=0.0), "weight"),
        (request(weight=math.nan), "weight"),
        (request(slo=common_pb2.Slo(ttft_s=0.0)), "slo.ttft_s"),
        (request(slo=common_pb2.Slo(tpot_s=math.nan)), "slo.tpot_s"),
        (request(tag=common_pb2.Tag()), "tag.median_tokens"),
        (request(tag=common_pb2.Tag(median_tokens=math.nan)), "tag.median_tokens"),
        (request(tag=common_pb2.Tag(median_tokens=5, spread=-1)), "tag.spread"),
        (request(tag=common_pb2.Tag(median_tokens=5, confidence=math.nan)), "tag.confidence"),
        (request(tag=common_pb2.Tag(median_tokens=5, confidence=2)), "tag.confidence"),
        (request(prefix_hashes=[b"a"]), "prefix_block_tokens: is missing"),
        (request(prefix_hashes=[b"a", b""], prefix_block_tokens=16), r"prefix_hashes\[1\]"),
        (request(prefix_hashes=[bytes(65)], prefix_block_tokens=16), r"prefix_hashes\[0\]"),
    ],
)
def test_a_bad_request_is_named(message: common_pb2.Request, named: str) -> None:
    """The error for a NaN, negative or missing field names it."""
    with pytest.raises(ValueError, match=f"^{named}"):
        messages.request_from(message)


def test_bad_names_of_blocks_are_refused() -> None:
    """A name that is not hexadecimal, and names without the size of their blocks."""
    with pytest.raises(ValueError, match=r"^prefix_hashes\[0\]: 'zz' is not hexadecimal"):
        messages.request_message(RequestFacts(request_id="r", prompt_tokens=9, prefix_hashes=("zz",)), block_size=8)
    with pytest.raises(ValueError, match="^block_size"):
        messages.request_message(REQUEST)


def test_a_forecast_arrives_as_it_was_sent() -> None:
    """Delays that were not requested stay absent; an infinite time stays infinite."""
    never = Forecast(
        request_id="r", ttft_s=math.inf, e2e_s=math.inf, tpot_s=math.inf, queue_s=0.0, output_tokens=3,
        num_preemptions=0, prefix_hit_tokens=0,
    )  # fmt: skip
    for value in (FORECAST, never):
        sent = messages.forecast_message(value).SerializeToString()
        assert messages.forecast_from(common_pb2.Forecast.FromString(sent)) == value


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (forecast(ttft_s=math.nan), "ttft_s"),
        (forecast(e2e_s=math.nan), "e2e_s"),
        (forecast(tpot_s=math.nan), "tpot_s"),
        (forecast(queue_s=math.nan), "queue_s"),
        (forecast(queue_s=-0.5), "queue_s"),
        (forecast(tpot_s=-math.inf), "tpot_s"),
        (forecast(e2e_s=0.1), "ttft_s: 0.2 is after the last token"),
        (forecast(queue_s=0.3), "queue_s: 0.3 is after the first token"),
        (forecast(output_tokens=0), "output_tokens: is missing"),
        (forecast(delay_sum_s=math.nan), "delay_sum_s"),
        (forecast(delay_worst_s=math.nan), "delay_worst_s"),
        (common_pb2.Forecast(request_id="r"), "output_tokens"),
        (common_pb2.Forecast(output_tokens=1), "e2e_s: must be above 0"),
    ],
)
def test_a_bad_forecast_is_named(message: common_pb2.Forecast, named: str) -> None:
    """An inconsistent or empty forecast is refused by name."""
    with pytest.raises(ValueError, match=rf"^forecast\.{named}"):
        messages.forecast_from(message)


def test_indicators_arrive_as_they_were_sent() -> None:
    """Zero differs from absent, times may be infinite, and names without a field of their own pass too."""
    values = {"num_running": 0, "num_free_blocks": 7, "kv_hit_ratio": 0.25, "drained_s": math.inf, "mine": -3.5}
    message = messages.indicators_message(values, age_s=0.5, source=common_pb2.STATE_SOURCE_EXPORTED)
    assert (message.age_s, message.source) == (0.5, common_pb2.STATE_SOURCE_EXPORTED)
    assert messages.indicators_from(common_pb2.Indicators.FromString(message.SerializeToString())) == values
    assert messages.indicators_from(common_pb2.Indicators()) == {}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"age_s": math.nan}, "age_s"),
        ({"age_s": -1.0}, "age_s"),
        ({"pace": math.nan}, "pace"),
        ({"step_s": -0.1}, "step_s"),
        ({"drained_s": math.nan}, "drained_s"),
        ({"requests_per_minute": math.inf}, "requests_per_minute: is infinite"),
        ({"kv_hit_ratio": 1.5}, "kv_hit_ratio"),
        ({"more": {"mine": math.nan}}, r"more\['mine'\]"),
    ],
)
def test_bad_indicators_are_named(fields: dict[str, Any], named: str) -> None:
    """The error for a NaN or negative number names it."""
    with pytest.raises(ValueError, match=rf"^indicators\.{named}"):
        messages.indicators_from(common_pb2.Indicators(**fields))


@pytest.mark.parametrize("values", [{"num_running": -1.0}, {"pace": math.nan}, {"step_s": math.inf}, {"x": math.nan}])
def test_bad_indicators_are_not_sent(values: dict[str, float]) -> None:
    """Values that a receiver refuses are refused by the sender."""
    with pytest.raises(ValueError, match=r"^indicators\."):
        messages.indicators_message(values, age_s=0.0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    raw=st.binary(max_size=60),
    kind=st.sampled_from(
        [
            (common_pb2.Request, messages.request_from),
            (common_pb2.Forecast, messages.forecast_from),
            (common_pb2.Indicators, messages.indicators_from),
        ]
    ),
)
def test_garbage_is_read_or_refused_in_one_line(raw: bytes, kind: tuple[Any, Callable[[Any], Any]]) -> None:
    """Any bytes are read, or refused in one line."""
    message, read = kind
    try:
        read(message.FromString(raw))
    except DecodeError:
        pass
    except ValueError as error:
        assert "\n" not in str(error)
