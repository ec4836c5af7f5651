"""Parts of an emulated engine."""

from __future__ import annotations

import itertools
from unittest.mock import Mock, create_autospec, patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.profile import constant_profile
from predictor.request import RequestFacts
from services.emulator import answers
from services.emulator.answers import IDS, PIECES, StopRule, answer, stretch
from services.emulator.app import write_chunk
from services.emulator.clock import EngineClock, Pace
from services.emulator.content_hashes import ContentHashes, forget_contents
from services.emulator.metrics import one_two_five
from services.emulator.tokens import chat_text, content_hashes, text_of, token_ids

OFFSETS = st.integers(0, 20_000)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_tokens_spell_their_text(text: str) -> None:
    """Any text survives its tokens, except for NUL bytes at the start of a token."""
    if "\0" not in text:
        assert text_of(token_ids(text)) == text
    assert all(0 <= token < 2**40 for token in token_ids(text))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(before=st.text(st.characters(codec="ascii"), max_size=40), offset=OFFSETS, num_tokens=st.integers(1, 50))
def test_an_answer_keeps_its_tokens_in_the_next_prompt(before: str, offset: int, num_tokens: int) -> None:
    """A continued conversation starts with the tokens of its prompt and its answer."""
    prompt = chat_text([("user", before)])
    given_answer = answer(offset, num_tokens, 100, StopRule())
    again = token_ids(prompt + given_answer.text(0, num_tokens) + "\n")
    assert again[:-1] == token_ids(prompt) + given_answer.token_ids()


def test_every_word_is_one_token() -> None:
    """The endless text has one token per word."""
    assert [token_ids(piece) for piece in PIECES[:500]] == [[token] for token in IDS[:500]]
    assert stretch(8190, 5) == "".join(PIECES[place % 8192] for place in range(8190, 8195))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    offset=OFFSETS,
    num_tokens=st.integers(1, 60),
    max_tokens=st.integers(1, 60),
    min_tokens=st.integers(0, 10),
    stops=st.lists(st.sampled_from([" the", "e", "at", "h i", "zzz", "a b"]), max_size=3),
    shows=st.booleans(),
)
def test_an_answer_stops_where_a_plain_search_finds_it(
    offset: int, num_tokens: int, max_tokens: int, min_tokens: int, stops: list[str], *, shows: bool
) -> None:
    """A search token by token, as engines search for stop strings, finds the same end."""
    min_tokens = min(min_tokens, max_tokens)
    made = answer(offset, num_tokens, max_tokens, StopRule(strings=stops, min_tokens=min_tokens, shows=shows))
    text, reason, stopped_by, count = "", "length", None, 0
    end = min(max_tokens, max(num_tokens, min_tokens))
    while count < end and stopped_by is None:
        piece = PIECES[(offset + count) % 8192]
        count += 1
        text += piece
        if count > min_tokens:
            found = [(text.find(stop, max(0, len(text) - len(piece) - len(stop) + 1)), stop) for stop in stops]
            ends = [(at + len(stop), order, at, stop) for order, (at, stop) in enumerate(found) if at >= 0]
            if ends:
                last, _, at, stopped_by = min(ends)
                text = text[: last if shows else at]
    if stopped_by is not None or end < max_tokens:
        reason = "stop"
    assert (made.num_tokens, made.finish_reason, made.stop_reason) == (count, reason, stopped_by)
    assert made.text(0, count) == text
    assert "".join(made.text(place, place + 1) for place in range(count)) == text


def test_lengths_are_drawn_from_their_distribution() -> None:
    """The median is the median, and the spread that of the logarithm."""
    lengths = answers.AnswerLengths(median_tokens=300, spread=0.5)
    draws = [lengths.draw(answers.seeded_draw([number], 7)[0]) for number in range(4000)]
    assert 285 < np.median(draws) < 315
    assert 0.47 < np.std(np.log(draws)) < 0.53
    assert answers.AnswerLengths(median_tokens=30, spread=0).draw(0.999) == 30


def test_a_held_clock_continues_where_it_was() -> None:
    """Engine time passes at its speed, stops while held, and can be set back."""
    wall_s = 100.0
    with patch("services.emulator.clock.time.monotonic", lambda: wall_s):
        clock = EngineClock(50.0)
        wall_s += 1.0
        assert clock.now_s() == pytest.approx(50)
        clock.hold()
        wall_s += 7.0
        assert clock.now_s() == pytest.approx(50)
        clock.release()
        wall_s += 0.5
        assert clock.now_s() == pytest.approx(75)
        assert clock.wall_s(clock.now_s()) == pytest.approx(wall_s)
        clock.set_back(2.0)
        assert clock.now_s() == pytest.approx(2)
        wall_s += 1.0
        assert clock.now_s() == pytest.approx(52)
        assert clock.wall_s(2.0) == pytest.approx(wall_s - 1)


def test_noise_is_seeded_and_has_mean_one() -> None:
    """The same seed gives the same noise, of the given size; a fault multiplies it."""
    one, other = Pace(0.1, 4), Pace(0.1, 4)
    draws = [one.next() for _ in range(4000)]
    assert draws == [other.next() for _ in range(4000)]
    assert np.mean(draws) == pytest.approx(1, abs=0.01)
    assert np.std(draws) == pytest.approx(0.1, abs=0.01)
    calm = Pace(0.0, 4)
    calm.slow = 3.0
    assert calm.next() == 3.0


def test_bounds_of_token_counts() -> None:
    """The bounds of histograms of tokens are 1, 2, 5, 10, … as vLLM has them."""
    assert one_two_five(60) == [1, 2, 5, 10, 20, 50]


@pytest.mark.parametrize("seed", range(6))
def test_forgetting_contents_changes_nothing(seed: int) -> None:
    """An engine whose contents are renumbered now and then behaves like one whose contents are not."""
    draw = np.random.default_rng(seed)
    config = EngineConfig(max_num_seqs=4, num_gpu_blocks=24, block_size=4, max_model_len=64, max_num_batched_tokens=32)
    prompts = [draw.integers(0, 3, draw.integers(1, 30)).tolist() for _ in range(40)]
    engines = [Engine(config, constant_profile().step_time) for _ in range(2)]
    names = ContentHashes(engines[1])
    for number, prompt in enumerate(prompts):
        hashes = content_hashes(prompt, 4)
        names.learn(hashes)
        for engine in engines:
            engine.add(
                RequestFacts(
                    request_id=str(number), prompt_tokens=len(prompt), output_tokens=int(draw.integers(1, 2)) + 9,
                    arrival_s=number * 2.0, prefix_hashes=hashes,
                )
            )  # fmt: skip
        if number % 7 == 6:
            for engine in engines:
                engine.advance(number * 2.0)
                engine.forget_finished()
            known = len(engines[1].contents)
            forget_contents(engines[1])
            assert len(engines[1].contents) <= known
            assert sorted(engines[1].contents.values()) == list(range(len(engines[1].contents)))
    for engine in engines:
        engine.advance()
    assert engines[0].forget_finished() == engines[1].forget_finished()
    assert engines[0].state.engine[0].num_free_blocks == engines[1].state.engine[0].num_free_blocks


def test_hashes_follow_renumbered_contents() -> None:
    """With too many contents the unused are dropped, and blocks keep their hashes."""
    config = EngineConfig(max_num_seqs=4, num_gpu_blocks=9, block_size=4, max_model_len=64)
    engine = Engine(config, constant_profile().step_time)
    names = ContentHashes(engine)
    names.learn((7, 8))
    engine.add(RequestFacts(request_id="r", prompt_tokens=8, output_tokens=1, prefix_hashes=(7, 8)))
    engine.advance()

    def held() -> list[int]:
        return sorted(int(names.hash_of[content]) for content in engine.state.blocks["content"] if content >= 0)

    assert held() == [7, 8]
    fresh = itertools.count(100)
    for _ in range(80):
        names.learn([next(fresh) for _ in range(1000)])
    assert len(engine.contents) < 80_000
    assert held() == [7, 8]


def test_nothing_is_written_to_a_disconnected_or_slow_client() -> None:
    """Such a connection would raise, and the driver must not fail for one client."""
    for paused, closing, written in ((False, False, [b"2\r\nhi\r\n"]), (True, False, []), (False, True, [])):
        connection = create_autospec(HttpToolsProtocol, instance=True)
        connection.flow, connection.transport = Mock(write_paused=paused), Mock()
        connection.transport.is_closing.return_value = closing
        assert write_chunk(connection, b"hi") == bool(written)
        assert [call.args[0] for call in connection.transport.write.mock_calls] == written
