"""Estimators give finite, bounded lengths for anything, and learn what they should."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from length_tagger import DEFAULT_ORDER, TAGGERS, chained
from length_tagger.client import ClientTagger
from length_tagger.estimate import MOST_TOKENS, Estimate, LengthOutcome, Query, chance_within_factor_two
from length_tagger.history import HistoryTagger, Window
from length_tagger.keys import TEMPLATE_CHARACTERS, prompt_keys
from length_tagger.settings import TaggerSettings
from predictor.lengths import Tag

TOKENS = st.integers(1, MOST_TOKENS)
TEXT = st.text(st.characters(exclude_categories=()), max_size=400)  # lone surrogates too
CLIENT = ClientTagger(hint_spread=0.3)


def history(window: int = 512, enough: int = 8, most_windows: int = 4096) -> HistoryTagger:
    """A history that knows nothing yet."""
    return HistoryTagger(window=window, enough=enough, most_windows=most_windows)


def known(estimate: Estimate | None) -> Estimate:
    """An estimate that must be there."""
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
    """Whatever is asked after whatever was learned, the estimate is one that the engine model accepts as a tag."""
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
    assert (bounds[0] or 0) <= estimate.median_tokens <= (bounds[1] or MOST_TOKENS)


def test_the_client_fixes_the_length() -> None:
    """An answer that cannot end but at max_tokens has that length for certain."""
    for query in (
        Query(max_tokens=77, ignore_eos=True),
        Query(max_tokens=77, min_tokens=77),
        Query(max_tokens=1),
    ):
        estimate = known(CLIENT.estimate(query))
        assert (estimate.median_tokens, estimate.spread, estimate.confidence) == (query.max_tokens, 0.0, 1.0)


def test_the_client_s_hint_is_a_hint() -> None:
    """An expected length is taken with a spread; a plain max_tokens tells nothing."""
    estimate = known(CLIENT.estimate(Query(expected_tokens=300)))
    assert (estimate.median_tokens, estimate.spread) == (300, 0.3)
    assert estimate.confidence == chance_within_factor_two(0.3) < 1
    assert CLIENT.estimate(Query(max_tokens=300)) is None
    assert CLIENT.estimate(Query(ignore_eos=True)) is None


def test_the_first_of_the_chain_that_knows_answers() -> None:
    """The order is that of the names; what max_tokens cuts is cut."""
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
    """From enough draws the median and the spread are found, a few very short answers notwithstanding."""
    draw = random.Random(7)
    tagger = history(window=4000)
    for n in range(4000):
        length = 1 if n % 100 == 0 else round(math.exp(draw.gauss(math.log(300), 0.7)))
        tagger.observe(LengthOutcome(output_tokens=max(1, length), model="m"))
    estimate = known(tagger.estimate(Query(model="m")))
    assert estimate.median_tokens == pytest.approx(300, rel=0.05)
    assert estimate.spread == pytest.approx(0.7, rel=0.07)
    assert estimate.confidence == pytest.approx(chance_within_factor_two(estimate.spread), abs=0.01)


def test_history_speaks_for_the_nearest_kin_it_knows_enough_of() -> None:
    """Session before template before client before model before everything."""
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


def test_history_forgets() -> None:
    """Old lengths make room for new ones, and names not heard of for longest for others."""
    tagger = history(window=16, most_windows=10)
    for length in (1000, 50):
        for _ in range(16):
            tagger.observe(LengthOutcome(output_tokens=length, model="m"))
    assert known(tagger.estimate(Query(model="m"))).median_tokens == 50
    for n in range(5000):
        tagger.observe(LengthOutcome(output_tokens=5, model="m", session_id=str(n)))
    assert len(tagger) == 10
    assert known(tagger.estimate(Query(model="m"))).median_tokens == 5


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths=st.lists(TOKENS, min_size=1, max_size=40), most=st.integers(1, 20))
def test_a_window_equals_the_last_of_a_list(lengths: list[int], most: int) -> None:
    """The ring holds what a list cut to its last entries would."""
    window, plain = Window(most), Window(40)
    for length in lengths:
        window.add(length)
        assert window.summary()[1] >= 0
    for length in lengths[-most:]:
        plain.add(length)
    assert len(window) == min(most, len(lengths))
    assert window.summary() == plain.summary()


def test_keys_do_not_depend_on_the_process_and_keep_parts_apart() -> None:
    """Another tagger gives the same names; the model belongs to them; short prompts have no template."""
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
        (["clint"], "estimator: 'clint' is none of client, cached, linear"),
        (["history", "history"], "estimator: 'history' is there twice"),
    ],
)
def test_bad_orders_are_refused(names: list[str], message: str) -> None:
    """An order that cannot be meant says why."""
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
    """Settings that no estimator could work with are refused by name."""
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
    """Lengths that no answer could have are refused by name."""
    with pytest.raises(ValueError, match=f"^{field}: "):
        Query(**values)  # type: ignore[arg-type]


def test_the_table_has_the_default_order() -> None:
    """Every estimator of the default order is in the table, and calls itself by its name there."""
    assert {name for place in DEFAULT_ORDER for name in place.split("|")} <= set(TAGGERS)
    said = Estimate(median_tokens=5, spread=0.1, confidence=1, estimator="roberta")
    keys = prompt_keys("", "hello")
    for name, make in TAGGERS.items():
        tagger = make(TaggerSettings(history_enough=1))
        tagger.observe(LengthOutcome(output_tokens=3, keys=keys))
        query = Query(max_tokens=3, ignore_eos=True, prompt="hello", keys=keys, foretold=(said,))
        assert known(tagger.estimate(query)).estimator == name
