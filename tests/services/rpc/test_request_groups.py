"""Messages of requests with several prompts and responses."""

from __future__ import annotations

from typing import Any

import pytest

from predictor.approximations import GRAMMAR_COMPILATION, MANY_RESPONSES, MERGED_PROMPTS
from predictor.forecast_result import Forecast
from predictor.request import RequestFacts
from predictor.request_group import RequestGroup
from protos.block.v1 import common_pb2
from services.rpc.messages import forecast_from, forecast_message
from services.rpc.request_groups import approximations_of, num_responses_of, placeable_from, with_delay


def message(**fields: Any) -> common_pb2.Request:
    """A request with a known length, unless fields say otherwise."""
    return common_pb2.Request(**{"request_id": "r", "prompt_tokens": 20, "max_tokens": 5, "ignore_eos": True, **fields})


def prompts(*tokens: int) -> list[common_pb2.Prompt]:
    """Prompts of these lengths."""
    return [common_pb2.Prompt(prompt_tokens=one, prefix_hashes=[bytes([one]) * 8]) for one in tokens]


def group_from(one: common_pb2.Request, **how: Any) -> RequestGroup:
    """Read a request that is a group."""
    found = placeable_from(one, **how)
    assert isinstance(found, RequestGroup)
    return found


def test_a_request_with_one_response_is_itself() -> None:
    """As are prompts of which only their number is known."""
    assert isinstance(placeable_from(message()), RequestFacts)
    merged = message(num_prompts=3)
    found = placeable_from(merged, longest_prompt=15)
    assert isinstance(found, RequestFacts)
    assert found.prompt_tokens == 15
    assert approximations_of(merged, found) == (MERGED_PROMPTS,)


def test_all_responses_to_all_prompts_are_read() -> None:
    """Each with its prompt's length and hashes; in order of choices."""
    several = group_from(
        message(prompts=prompts(4, 9), num_sequences=2, prefix_block_tokens=4), block_size=4, known_as="candidate/7"
    )
    assert [one.request_id for one in several.members] == [f"candidate/7/{index}" for index in range(4)]
    assert [one.prompt_tokens for one in several.members] == [4, 4, 9, 9]
    assert [one.prefix_hashes for one in several.members[1:3]] == [("04" * 8,), ("09" * 8,)]
    assert approximations_of(message(num_sequences=2), several) == ()
    assert num_responses_of(message(prompts=prompts(4, 9), num_sequences=2)) == 4


def test_responses_share_unknown_blocks_of_their_prompt() -> None:
    """The full blocks beyond the known ones get names, the same for all responses to a prompt."""
    how: dict[str, Any] = {"block_size": 4, "shares_prompts": True}
    several = group_from(message(prompts=prompts(9, 9), num_sequences=2, prefix_block_tokens=4), **how)
    one, two, other, _ = (member.prefix_hashes for member in several.members)
    assert one == two
    assert (one[0], other[0], one[1] == other[1]) == ("09" * 8, "09" * 8, False)
    assert [len(one), len(other)] == [2, 2]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"num_sequences": 5000}, "n: 1 prompts with n = 5000 ask for 5000 responses, more than the limit of 4096"),
        ({"prompts": [common_pb2.Prompt()]}, r"prompts\[0\].prompt_tokens: must be at least 1, not 0"),
        ({"prompts": prompts(4, 9)}, "prefix_block_tokens: is missing, and prefix_hashes need it"),
        ({"grammar": b"x" * 65}, "grammar: must have at most 64 bytes, not 65"),
    ],
)
def test_refusals(fields: dict[str, Any], error: str) -> None:
    """One line names the field."""
    with pytest.raises(ValueError, match=f"^{error}"):
        placeable_from(message(**fields))


def test_what_is_approximated_is_named() -> None:
    """Unknown lengths of several responses, and grammars."""
    tagged = message(num_sequences=3, grammar=b"g", ignore_eos=False, tag=common_pb2.Tag(median_tokens=20, spread=0.5))
    assert approximations_of(tagged, placeable_from(tagged)) == (MANY_RESPONSES, GRAMMAR_COMPILATION)


def test_a_request_is_delayed_with_all_its_responses() -> None:
    """By the compilation of its grammar."""
    assert with_delay(placeable_from(message(in_s=1.0)), 0.5).in_s == 1.5  # type: ignore[union-attr]
    several = with_delay(group_from(message(num_sequences=2)), 0.5)
    assert isinstance(several, RequestGroup)
    assert [one.in_s for one in (several.whole, *several.members)] == [0.5, 0.5, 0.5]


def test_forecasts_carry_approximations() -> None:
    """Both ways; too many, or too long ones, are refused."""
    forecast = Forecast(
        request_id="r", ttft_s=1.0, e2e_s=2.0, tpot_s=0.1, queue_s=0.5, output_tokens=3, num_preemptions=0,
        prefix_hit_tokens=0, approximations=("one", "two"),
    )  # fmt: skip
    assert forecast_from(forecast_message(forecast)) == forecast
    for wrong in (["x"] * 17, ["x" * 257]):
        many = forecast_message(forecast)
        del many.approximations[:]
        many.approximations.extend(wrong)
        with pytest.raises(ValueError, match=r"^forecast\.approximations: must be at most 16 of 256 characters$"):
            forecast_from(many)
