"""Groups of requests: their forecast equals what happens when all of them arrive, and their ends are joined."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.approximations import MANY_RESPONSES
from predictor.batching import BATCHERS
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_view import EndedRequest
from predictor.forecast import Forecaster
from predictor.forecast_result import Forecast, merged
from predictor.group_ends import GroupEnds
from predictor.lengths import Tag
from predictor.request import RequestFacts, Slo
from predictor.request_group import MAX_MEMBERS, PromptFacts, RequestGroup, group_of, members_of
from predictor.reserved_requests import PREFIX, SIBLINGS_S, ReservedRequests
from tests.predictor.test_forecast import CLOSE, LOADS, at_moment, attains, moments, on_time, split
from tests.strategies import AFFINE, Load, examples

CONFIG = EngineConfig(num_gpu_blocks=64, block_size=4, max_model_len=64, max_num_seqs=4, enable_prefix_caching=True)
WHOLE = RequestFacts(request_id="many", prompt_tokens=10, output_tokens=5)


def group(num_sequences: int = 3, prompts: tuple[int, ...] = (), whole: RequestFacts = WHOLE) -> RequestGroup:
    """Return a group of several requests."""
    made = group_of(
        whole,
        num_sequences=num_sequences,
        prompts=[PromptFacts(tokens=tokens) for tokens in prompts],
        block_size=CONFIG.block_size,
    )
    assert isinstance(made, RequestGroup)
    return made


def group_in(load: Load, candidate: RequestFacts, n: int, prompts: list[int]) -> RequestGroup:
    """Return a group with the facts of a candidate that the engine of a load can serve."""
    room = load.config.max_model_len - candidate.length()  # type: ignore[operator]  # it is known
    sizes = tuple(max(1, min(candidate.prompt_tokens, room, size)) for size in prompts)
    made = group_of(
        candidate,
        num_sequences=n,
        prompts=[PromptFacts(tokens=size) for size in sizes],
        block_size=load.config.block_size,
    )
    assert isinstance(made, RequestGroup)
    return made


@pytest.mark.parametrize("batcher", [name for name in BATCHERS if name in ("vllm_v1", "vllm_v0", "sarathi", "edf")])
def test_the_forecast_of_a_group_is_what_happens(batcher: str) -> None:
    """First and last token, hits, preemptions, deadlines and delays are those of an engine that gets all requests."""

    @examples(40)
    @given(LOADS[batcher], moments, st.integers(1, 5), st.lists(st.integers(1, 40), min_size=1, max_size=4))
    def check(load: Load, moment: float, n: int, prompts: list[int]) -> None:
        others, (candidate,) = split(load, 1)
        several = group_in(load, candidate, n, prompts)
        engine, now_s = at_moment(others, moment, reserve=False)
        without, _ = at_moment(others, moment, reserve=False)
        at_present, _ = at_moment(others, moment, reserve=False)
        there = [name for name in without.slots if without.outcome(name).finished_s is None]
        (forecast,) = Forecaster(engine).forecast([several], now_s)
        (quick,) = Forecaster(engine).forecast([several], now_s, delays=False)
        without.advance()
        for member in several.members:
            engine.add(replace(member, arrival_s=now_s))
        engine.advance()
        ends = [engine.outcome(member.request_id) for member in several.members]
        last = max(ends, key=lambda end: end.finished_s or 0.0)
        assert forecast.request_id == candidate.request_id
        assert forecast.ttft_s == close(min(end.first_token_s or 0.0 for end in ends) - now_s)
        assert forecast.queue_s == close(min(end.scheduled_s or 0.0 for end in ends) - now_s)
        assert forecast.e2e_s == close((last.finished_s or 0.0) - now_s)
        assert forecast.output_tokens == sum(end.output_tokens for end in ends)
        assert forecast.num_preemptions == sum(end.num_preemptions for end in ends)
        assert forecast.prefix_hit_tokens == sum(ends[leader].prefix_hit_tokens for leader in several.leaders)
        assert forecast.attained == min(attains(engine, member.request_id) for member in several.members)
        delays = [finished(engine, name) - finished(without, name) for name in there]
        assert forecast.delay_sum_s == close(sum(delays))
        assert forecast.delay_worst_s == close(max(0.0, *delays, 0.0))
        preempted = [engine.outcome(name).num_preemptions - without.outcome(name).num_preemptions for name in there]
        assert forecast.others_preempted == sum(preempted)
        assert forecast.others_missed == sum(attains(without, name) and not attains(engine, name) for name in there)
        weights = {one.request_id: one.weight for one in others.our_requests()}
        gained = sum(weights[name] * (on_time(engine, name) - on_time(at_present, name)) for name in there)
        gained += sum(candidate.weight * on_time(engine, member.request_id) for member in several.members)
        assert forecast.gain_after == close(gained)
        for name in ("ttft_s", "e2e_s", "tpot_s", "queue_s"):
            assert getattr(quick, name) == close(getattr(forecast, name))
        assert (quick.num_preemptions, quick.attained) == (forecast.num_preemptions, forecast.attained)

    check()


def close(value: float) -> object:
    """The value within rounding."""
    return pytest.approx(value, rel=CLOSE, abs=CLOSE)


def finished(engine: Engine, name: str) -> float:
    """When a request ended."""
    end_s = engine.outcome(name).finished_s
    assert end_s is not None
    return end_s


def test_groups_and_single_requests_are_forecast_together() -> None:
    """Each as if it alone arrived, in their order."""
    engine = Engine(CONFIG, AFFINE)
    engine.add(RequestFacts(request_id="there", prompt_tokens=8, output_tokens=9))
    engine.advance(0.01)
    tagged = RequestFacts(
        request_id="tagged", prompt_tokens=6, tag=Tag(median_tokens=8, spread=0.5), length_quantiles=3
    )
    candidates = [
        tagged,
        group(),
        replace(WHOLE, request_id="single"),
        group(2, (4, 7), replace(WHOLE, request_id="p")),
    ]
    forecaster = Forecaster(engine)
    together = forecaster.forecast(candidates, 0.01)
    assert [one.request_id for one in together] == ["tagged", "many", "single", "p"]
    assert together == [forecaster.forecast([one], 0.01)[0] for one in candidates]


def test_responses_share_the_blocks_of_their_prompt() -> None:
    """The second response computes only what is beyond the full blocks of the prompt."""
    engine = Engine(CONFIG, AFFINE)
    for member in group().members:
        engine.add(member)
    engine.advance()
    hits = [engine.outcome(member.request_id).prefix_hit_tokens for member in group().members]
    assert hits == [0, 8, 8]


def test_responses_of_unknown_length_have_equally_likely_lengths() -> None:
    """The last of four ends later than the tag's median, and the forecast says that this is an approximation."""
    whole = replace(WHOLE, output_tokens=None, tag=Tag(median_tokens=20, spread=0.5))
    several = group(4, whole=whole)
    lengths = [member.length() for member in several.members]
    assert lengths == sorted(lengths)
    assert lengths[0] < 20 < lengths[-1]  # type: ignore[operator]  # they are known
    assert several.approximations == (MANY_RESPONSES,)
    assert group(4).approximations == ()


def test_one_response_to_one_prompt_is_no_group() -> None:
    """It stays the request that it is; a list of one prompt is a group, as the engine names it by its number."""
    assert group_of(WHOLE) is WHOLE
    assert members_of(WHOLE) == (WHOLE,)
    assert len(members_of(group_of(WHOLE, prompts=[PromptFacts(tokens=3)]))) == 1


def test_too_many_responses_are_refused() -> None:
    """One line names the field."""
    with pytest.raises(ValueError, match=r"^num_sequences: 4097 responses are more than the limit of 4096$"):
        group_of(WHOLE, num_sequences=MAX_MEMBERS + 1)
    with pytest.raises(ValueError, match=r"^num_sequences: 3 responses are not 2 to each prompt$"):
        RequestGroup(whole=WHOLE, members=group(3).members, num_sequences=2)


def test_deadlines_hold_for_all_responses() -> None:
    """A group whose last response is late attains nothing, though its first token is early."""
    engine = Engine(replace(CONFIG, max_num_seqs=1), AFFINE)
    strict = replace(WHOLE, slo=Slo(ttft_s=0.1))
    (single,) = Forecaster(engine).forecast([strict], 0.0)
    (several,) = Forecaster(engine).forecast([group(4, whole=strict)], 0.0)
    assert (single.attained, several.attained) == (1.0, 0.0)
    assert several.ttft_s == single.ttft_s


# Reservations.


def reserved_names(engine: Engine) -> list[str]:
    """The reserved requests in the engine model."""
    return sorted(name.removeprefix(PREFIX) for name in engine.slots)


def test_a_group_is_reserved_and_shown_one_by_one() -> None:
    """All requests count; each leaves when the engine shows it, and the group when none is left."""
    engine, reserved = Engine(CONFIG, AFFINE), ReservedRequests()
    several = group(2, (4, 7))
    assert reserved.add(several, engine, 0.0)
    assert not reserved.add(several, engine, 0.0)
    assert reserved_names(engine) == ["many/0", "many/1", "many/2", "many/3"]
    assert [one.request_id for one in reserved.as_reserved()] == ["many/0", "many/1", "many/2", "many/3"]
    assert not reserved.show("many", 1, 0, engine, 0.0)
    assert reserved_names(engine) == ["many/0", "many/1", "many/3"]
    assert not reserved.show("many", 9, 9, engine, 0.1)  # of no known number: any of those that are left
    assert not reserved.show("many", 0, 1, engine, 0.1)
    assert reserved.show("many", 1, 1, engine, 0.1)
    assert reserved_names(engine) == []
    assert reserved.show("many", 0, 0, engine, 0.1)  # it is reserved no more
    assert reserved.as_reserved() == ()


def test_requests_that_the_engine_does_not_make_are_dropped() -> None:
    """Where it makes fewer than were reserved, the others count for a second more."""
    engine, reserved = Engine(CONFIG, AFFINE), ReservedRequests()
    reserved.add(group(3), engine, 0.0)
    assert reserved.drop_unshown(engine, 5.0) == []  # none has been shown: the reservation itself expires
    reserved.show("many", 0, 0, engine, 5.0)
    assert reserved.drop_unshown(engine, 5.0 + SIBLINGS_S) == []
    assert reserved.drop_unshown(engine, 5.1 + SIBLINGS_S) == ["many"]
    assert reserved_names(engine) == []


def test_a_group_is_withdrawn_as_a_whole() -> None:
    """A release removes all requests that are left."""
    engine, reserved = Engine(CONFIG, AFFINE), ReservedRequests()
    reserved.add(group(3), engine, 0.0)
    reserved.show("many", 0, 2, engine, 0.0)
    assert reserved.withdraw("many", engine)
    assert not reserved.withdraw("many", engine)
    assert reserved_names(engine) == []


def test_a_group_of_which_one_does_not_fit_is_not_reserved() -> None:
    """Nothing stays in the engine model."""
    engine, reserved = Engine(CONFIG, AFFINE), ReservedRequests()
    with pytest.raises(ValueError, match="^prompt_tokens: 70 leave no room"):
        reserved.add(group(1, (4, 70)), engine, 0.0)
    assert (reserved_names(engine), reserved.as_reserved()) == ([], ())


def test_a_group_moves_to_a_new_engine_model() -> None:
    """What is left of it is there as before."""
    engine, other, reserved = Engine(CONFIG, AFFINE), Engine(CONFIG, AFFINE), ReservedRequests()
    reserved.add(group(3), engine, 0.0)
    reserved.show("many", 0, 1, engine, 0.0)
    reserved.move_to(other)
    assert reserved_names(other) == ["many/0", "many/2"]


# Ends.


def ended(
    request_id: str, output_tokens: int, ttft_s: float | None, e2e_s: float, *, completed: bool = True
) -> EndedRequest:
    """One of the engine's requests that has ended."""
    return EndedRequest(
        request_id=request_id, output_tokens=output_tokens, ttft_s=ttft_s, e2e_s=e2e_s, completed=completed
    )


def test_the_ends_of_a_group_are_joined() -> None:
    """From the first token of any to the last of all; other requests pass at once."""
    ends = GroupEnds()
    ends.expect("many", 3)
    ends.expect("single", 1)
    assert ends.joined([ended("many", 4, 0.2, 1.0), ended("single", 7, 0.1, 0.5)]) == [ended("single", 7, 0.1, 0.5)]
    (whole,) = ends.joined([ended("many", 2, 0.1, 0.7), ended("many", 6, None, 2.0)])
    assert whole == replace(ended("many", 12, 0.1, 2.0), num_requests=3)
    assert len(ends) == 0
    ends.expect("many", 2)
    ends.forget("many")
    assert ends.joined([ended("many", 1, 0.1, 0.2)]) == [ended("many", 1, 0.1, 0.2)]


@pytest.mark.parametrize(("hits", "all_hits"), [((3, 4, 5), 8), ((3, 4, None), None), ((None, 4, 5), None)])
def test_prefix_hits_of_several_prompts_are_known_if_each_is(
    hits: tuple[int | None, ...], all_hits: int | None
) -> None:
    """The second sequence answers the same prompt as the first, which leads it."""
    one = Forecast(
        request_id="one", ttft_s=1.0, e2e_s=2.0, tpot_s=0.1, queue_s=0.0, output_tokens=5, num_preemptions=0,
        prefix_hit_tokens=None, delay_sum_s=None, delay_worst_s=None, others_preempted=None,
    )  # fmt: skip
    members = [replace(one, prefix_hit_tokens=hit) for hit in hits]
    assert merged(members, "all", (0, 2)).prefix_hit_tokens == all_hits
