"""Estimators give finite, bounded lengths for any query, and learn from outcomes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from length_tagger import DEFAULT_ORDER, TAGGERS, chained
from length_tagger.client import ClientTagger
from length_tagger.estimate import MAX_TOKENS, Estimate, LengthOutcome, Query, chance_within_factor_two
from length_tagger.history import HistoryTagger, Window
from length_tagger.keys import TEMPLATE_CHARACTERS, prompt_keys
from length_tagger.settings import TaggerSettings
from predictor.lengths import Tag

TOKENS = st.integers(1, MAX_TOKENS)
TEXT = st.text(st.characters(exclude_categories=()), max_size=400)  # lone surrogates too
CLIENT = ClientTagger(hint_spread=0.3)


def history(window: int = 512, enough: int = 8, max_windows: int = 4096) -> HistoryTagger:
    """An empty history."""
    return HistoryTagger(window=window, enough=enough, max_windows=max_windows)


def known(estimate: Estimate | None) -> Estimate:
    """Return an estimate that must not be None."""
    assert estimate is not None
    return estimate


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    model=TEXT,
    prompt=TEXT,
    session_id=TEXT,
    bounds=st.tuples(st.none() | TOKENS, st.none() | TOKENS).map(
        lambda pair: pair if None in pair else tuple(sorted(pair))  # type: ignore[type-var]
    ),
    ignore_eos=st.booleans(),
    expected_tokens=st.none() | TOKENS,
    lengths=st.lists(TOKENS, max_size=20),
)
def test_any_query_gets_a_tag_that_forecasts_can_use(
    model: str,
    prompt: str,
    session_id: str,
    bounds: tuple[int | None, int | None],
    ignore_eos: bool,
    expected_tokens: int | None,
    lengths: list[int],
) -> None:
    """For any query after any outcomes, the engine model accepts the estimate as a tag."""
    chain = chained(DEFAULT_ORDER)
    keys = prompt_keys(model, prompt)
    for length in lengths:
        chain.observe(LengthOutcome(output_tokens=length, model=model, session_id=session_id, keys=keys))
    estimate = known(
        chain.estimate(
            Query(
                model=model,
                prompt=prompt,
                session_id=session_id,
                keys=keys,
                min_tokens=bounds[0],
                max_tokens=bounds[1],
                ignore_eos=ignore_eos,
                expected_tokens=expected_tokens,
            )
        )
    )
    Tag(median_tokens=estimate.median_tokens, spread=estimate.spread)
    assert (bounds[0] or 0) <= estimate.median_tokens <= (bounds[1] or MAX_TOKENS)


def test_the_client_fixes_the_length() -> None:
    """A response that can only end at max_tokens has that length with certainty."""
    for query in (
        Query(max_tokens=77, ignore_eos=True),
        Query(max_tokens=77, min_tokens=77),
        Query(max_tokens=1),
    ):
        estimate = known(CLIENT.estimate(query))
        assert (estimate.median_tokens, estimate.spread, estimate.confidence) == (query.max_tokens, 0.0, 1.0)


def test_the_client_s_hint_is_a_hint() -> None:
    """A hint has a spread; max_tokens alone gives no estimate."""
    estimate = known(CLIENT.estimate(Query(expected_tokens=300)))
    assert (estimate.median_tokens, estimate.spread) == (300, 0.3)
    assert estimate.confidence == chance_within_factor_two(0.3) < 1
    assert CLIENT.estimate(Query(max_tokens=300)) is None
    assert CLIENT.estimate(Query(ignore_eos=True)) is None


def test_a_chain_returns_the_first_estimate() -> None:
    """The order is that of the names; min_tokens and max_tokens bound the estimate."""
    chain = chained(["client", "history", "constant"])
    assert known(chain.estimate(Query(model="m"))).estimator == "constant"
    for _ in range(8):
        chain.observe(LengthOutcome(output_tokens=40, model="m"))
    assert known(chain.estimate(Query(model="m"))).estimator == "history"
    assert known(chain.estimate(Query(model="m", max_tokens=10))).median_tokens == 10
    assert known(chain.estimate(Query(model="m", min_tokens=60))).median_tokens == 60
    assert known(chain.estimate(Query(model="m", expected_tokens=9))).estimator == "client"
    assert chained(["client"]).estimate(Query(model="m")) is None


def test_history_recovers_a_log_normal() -> None:
    """With enough samples the median and the spread are found, despite a few very short responses."""
    draw = random.Random(7)
    tagger = history(window=4000)
    for n in range(4000):
        length = 1 if n % 100 == 0 else round(math.exp(draw.gauss(math.log(300), 0.7)))
        tagger.observe(LengthOutcome(output_tokens=max(1, length), model="m"))
    estimate = known(tagger.estimate(Query(model="m")))
    assert estimate.median_tokens == pytest.approx(300, rel=0.05)
    assert estimate.spread == pytest.approx(0.7, rel=0.07)
    assert estimate.confidence == pytest.approx(chance_within_factor_two(estimate.spread), abs=0.01)


def test_history_uses_the_most_specific_key() -> None:
    """The order is session, template, client, model, all requests."""
    template = prompt_keys("m", "x" * TEMPLATE_CHARACTERS)
    assert template[0] == prompt_keys("m", "x" * TEMPLATE_CHARACTERS + "and then another question")[0]
    tagger = history(enough=4)

    def learn(length: int, keys: tuple[int, ...] = (), **of: str) -> None:
        for _ in range(4):
            tagger.observe(LengthOutcome(output_tokens=length, keys=keys, **of))

    learn(10, model="another")
    assert known(tagger.estimate(Query(model="m"))).median_tokens == 10
    for _ in range(30):
        learn(20, model="m")
    assert known(tagger.estimate(Query(model="m", client_id="c"))).median_tokens == 20
    learn(30, model="m", client_id="c")
    assert known(tagger.estimate(Query(model="m", client_id="c", keys=template))).median_tokens == 30
    learn(40, template, model="m")
    assert known(tagger.estimate(Query(model="m", client_id="c", keys=template))).median_tokens == 40
    learn(50, model="m", session_id="s")
    assert known(tagger.estimate(Query(model="m", session_id="s", client_id="c", keys=template))).median_tokens == 50
    assert known(tagger.estimate(Query(model="another", session_id="s"))).median_tokens == 10


def test_history_is_bounded() -> None:
    """New lengths replace old ones, and the least recently used keys are dropped."""
    tagger = history(window=16, max_windows=10)
    for length in (1000, 50):
        for _ in range(16):
            tagger.observe(LengthOutcome(output_tokens=length, model="m"))
    assert known(tagger.estimate(Query(model="m"))).median_tokens == 50
    for n in range(5000):
        tagger.observe(LengthOutcome(output_tokens=5, model="m", session_id=str(n)))
    assert len(tagger) == 10
    assert known(tagger.estimate(Query(model="m"))).median_tokens == 5


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths=st.lists(TOKENS, min_size=1, max_size=40), size=st.integers(1, 20))
def test_a_window_equals_the_last_of_a_list(lengths: list[int], size: int) -> None:
    """The ring buffer has the last entries of a list."""
    window, plain = Window(size), Window(40)
    for length in lengths:
        window.add(length)
        assert window.summary()[1] >= 0
    for length in lengths[-size:]:
        plain.add(length)
    assert len(window) == min(size, len(lengths))
    assert window.summary() == plain.summary()


def test_keys_are_stable() -> None:
    """Keys are the same in every process and depend on the model; short prompts have no template."""
    assert prompt_keys("m", "a" * 300) == (6448183594718145978, 1671362278952576943)
    assert prompt_keys("m", "a" * 300) != prompt_keys("n", "a" * 300)
    assert prompt_keys("ma", "a" * 300) != prompt_keys("m", "a" * 300)
    assert prompt_keys("m", "\ud800" * 300) != ()
    assert len(prompt_keys("m", "hello")) == 1
    assert prompt_keys("m", "") == ()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "estimator: name at least one"),
        (["clint"], "estimator: must be one of client, cached, linear"),
        (["history", "history"], "estimator: 'history' is a duplicate"),
    ],
)
def test_bad_orders_are_refused(names: list[str], message: str) -> None:
    """The error says what is wrong with the order."""
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        chained(names)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("constant_tokens", 0.0),
        ("constant_tokens", math.nan),
        ("constant_spread", 11.0),
        ("hint_spread", -0.1),
        ("history_window", 0),
        ("history_enough", 513),
        ("history_windows", 10_000_000),
    ],
)
def test_bad_settings_name_their_field(field: str, value: float) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=f"^{field}: "):
        TaggerSettings(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt_tokens", {"prompt_tokens": 0}),
        ("max_tokens", {"max_tokens": 2**31}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("expected_tokens", {"expected_tokens": 0}),
    ],
)
def test_bad_queries_name_their_field(field: str, values: dict[str, int]) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=f"^{field}: "):
        Query(**values)  # type: ignore[arg-type]


def test_the_table_has_the_default_order() -> None:
    """Every estimator of the default order is in the table, and its estimates have its name."""
    assert {name for entry in DEFAULT_ORDER for name in entry.split("|")} <= set(TAGGERS)
    precomputed = Estimate(median_tokens=5, spread=0.1, confidence=1, estimator="roberta")
    keys = prompt_keys("", "hello")
    for name, make in TAGGERS.items():
        tagger = make(TaggerSettings(history_enough=1))
        tagger.observe(LengthOutcome(output_tokens=3, keys=keys))
        query = Query(max_tokens=3, ignore_eos=True, prompt="hello", keys=keys, precomputed=(precomputed,))
        assert known(tagger.estimate(query)).estimator == name
