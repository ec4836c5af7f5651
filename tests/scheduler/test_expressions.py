"""Formulas say what the built-in policies say, know what they do not know, and refuse what is no formula."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from scheduler.candidates import RequestIndicators
from scheduler.expressions import condition, number
from scheduler.expressions.checking import FUNCTIONS, MAX_CHARACTERS, MAX_DEPTH, MAX_NODES
from scheduler.indicators import roots_of
from scheduler.policy import policy_from
from tests.fleets import fleet, random_fleet

NUM_STATES = 10_000

RESTATED = {
    "lmetric: detector = 0, tie_break = ''": "p_tokens * batch_size",
    "lmetric: detector = 0": "score = 'p_tokens * batch_size', tie_break = 'p_tokens'",
    "lmetric_hits": "(1 - prefix_hit_ratio) * batch_size",
    "lmetric_tokens: tie_break = ''": "p_tokens * total_tokens",
    "llumnix": "-(num_free_blocks - num_needed_blocks) / max(num_running, 1)",
    "infaas": "-num_free_blocks / max(num_running, 1)",
    "llumnix_paper": "(num_used_blocks + num_needed_blocks) / max(num_running, 1)",
    "infaas_paper": "num_used_blocks / max(num_running, 1)",
    "jsq": "4 * num_queued + num_running",
    "linear: lambda = 0.4": "0.4 * (1 - prefix_hit_ratio) + 0.6 * (batch_size / max(highest(batch_size), 1))",
    "dynamo": "0.5 * p_tokens / max(highest(p_tokens), 1) + 0.5 * total_tokens / max(highest(total_tokens), 1)",
    "filter: tie_break = '', range = 3": (
        "batch_size if highest(batch_size) - lowest(batch_size) > 3 else 1 - prefix_hit_ratio + 0 * batch_size"
    ),
    "least_loaded": "num_running + num_waiting + num_reserved",
    "min_qpm": "requests_per_minute",
    "jsq: filter = 'age_s < 30 and num_waiting < 4', tie_break = '-num_free_blocks'": (
        "score = '4 * num_queued + num_running', filter = 'age_s < 30 and num_waiting < 4', "
        "tie_break = '-num_free_blocks'"
    ),
    "block": "predicted_e2e_s",
    "block_mean": "predicted_e2e_s + delay_sum_s",
    "marginal": "predicted_e2e_s + 0.05 * delay_sum_s",
}


@pytest.mark.parametrize("built_in", RESTATED)
def test_a_formula_equals_the_policy_that_it_restates(built_in: str) -> None:
    """On random states, with ties and with holes: the same scores, to the last bit, and the same choice."""
    rng = np.random.default_rng(11)
    ours, theirs = policy_from(built_in), policy_from(f"expr: {RESTATED[built_in]}")
    for _ in range(NUM_STATES):
        candidates = random_fleet(rng)
        one, other = ours.shortlist(candidates), theirs.shortlist(candidates)
        assert one.instance_ids == other.instance_ids
        scores, theirs_scores = ours.scores(one), theirs.scores(other)
        assert np.array_equal(scores, theirs_scores, equal_nan=True)
        assert ours.best(one, scores) == theirs.best(other, theirs_scores)
    assert {root.name for root in roots_of(ours.needs)} == {root.name for root in roots_of(theirs.needs)}


VALUES = fleet(
    request=RequestIndicators(prompt_tokens=10, tag_tokens=50.0),
    num_running=[0, 2, 3, 4],
    num_waiting=[0, 1, 0, 5],
    step_s=[0.5, None, 2.0, 1.0],
)

RESULTS = {
    "num_running + 2 * num_waiting": [0, 4, 3, 14],
    "-num_running - -1": [1, -1, -2, -3],
    "+num_running": [0, 2, 3, 4],
    "num_running / 2": [0, 1, 1.5, 2],
    "num_running ** 2": [0, 4, 9, 16],
    "min(num_running, 2, 3)": [0, 2, 2, 2],
    "max(num_running, num_waiting)": [0, 2, 3, 5],
    "abs(num_running - 3)": [3, 1, 0, 1],
    "sqrt(num_running) ** 2 < 2.5 and num_running != 2": None,
    "sqrt(num_running + 1) * 0 + log(1)": [0, 0, 0, 0],
    "1 if num_running > 2 else num_waiting": [0, 1, 1, 1],
    "1 if 1 < num_running <= 3 else 0": [0, 1, 1, 0],
    "1 if num_running == 0 or num_waiting >= 5 else 0": [1, 0, 0, 1],
    "1 if num_running > 0 and not num_waiting == 0 else 0": [0, 1, 0, 1],
    "num_running / highest(num_running)": [0, 0.5, 0.75, 1],
    "num_running - lowest(num_running) - mean(num_running)": [-2.25, -0.25, 0.75, 1.75],
    "step_s": [0.5, math.nan, 2, 1],
    "otherwise(step_s, 9)": [0.5, 9, 2, 1],
    "otherwise(step_s, highest(step_s))": [0.5, 2, 2, 1],
    "min(step_s, 0)": [0, math.nan, 0, 0],
    "1 if step_s > 1 else 0": [0, math.nan, 1, 0],
    "1 if step_s > 1 or num_running == 2 else 0": [0, 1, 1, 0],
    "1 if step_s > 1 and num_running == 0 else 0": [0, 0, 0, 0],
    "1 if not step_s > 1 else 0": [1, math.nan, 0, 1],
    "1 if step_s != step_s else 0": [0, math.nan, 0, 0],
    "1 / num_running": [math.inf, 0.5, 1 / 3, 0.25],
    "num_running / num_running": [math.nan, 1, 1, 1],
    "num_reserved": [0, 0, 0, 0],
    "drained_s": [math.nan] * 4,
    "prompt_tokens + tag_tokens": [60] * 4,
    "7": [7] * 4,
    "1 / 0": [math.inf] * 4,
    "highest(7)": [7] * 4,
}


@pytest.mark.parametrize("text", [text for text, values in RESULTS.items() if values is not None])
def test_formulas_compute(text: str) -> None:
    """Arithmetic, comparisons and conditionals, and what is not known through all of them."""
    assert number(text)(VALUES).tolist() == pytest.approx(RESULTS[text], nan_ok=True)


def test_conditions_hold_fail_or_are_not_known() -> None:
    """As filters read them."""
    assert condition("sqrt(num_running) ** 2 < 2.5 and num_running != 2")(VALUES).tolist() == [1, 0, 0, 0]
    assert condition("step_s < 1.5")(VALUES).tolist() == pytest.approx([1, math.nan, 0, 1], nan_ok=True)
    assert condition("step_s < 1 if num_running < 1 else num_waiting > 0")(VALUES).tolist() == [1, 1, 0, 1]


CONDITIONS = [text.removeprefix("1 if ").removesuffix(" else 0") for text in RESULTS if text.endswith(" else 0")]


@pytest.mark.parametrize("text", [*CONDITIONS, "1 < 2", "2 < 1 or step_s < 1", "not (step_s < 1 or num_waiting > 0)"])
def test_a_condition_holds_where_it_is_known_to_be_true(text: str) -> None:
    """Also where what is compared is not known, and for conditions that are the same everywhere."""
    compiled = condition(text)
    assert compiled.holds(VALUES).tolist() == (compiled(VALUES) == 1.0).tolist()


MALICIOUS = [
    "().__class__.__bases__[0].__subclasses__()",
    "num_running.__class__",
    "num_running.real",
    "__import__('os').system('true')",
    "open('/etc/passwd')",
    "eval('1')",
    "exec",
    "(lambda: 1)()",
    "lambda: 1",
    "[num_running for _ in range(10)]",
    "{num_running for _ in (1,)}",
    "{'a': 1}",
    "[1, 2]",
    "(1, 2)",
    "num_running[0]",
    "f'{num_running}'",
    "'text'",
    "b'bytes'",
    "None",
    "...",
    "True",
    "1j",
    "num_running := 3",
    "(num_running := 3)",
    "yield 1",
    "await num_running",
    "num_running; num_waiting",
    "num_running = 3",
    "import os",
    "max(*num_running, 1)",
    "max(num_running, key=1)",
    "max(num_running)",
    "abs()",
    "min.__call__(1, 2)",
    "min",
    "sorted(num_running)",
    "num_running is num_waiting",
    "num_running in num_waiting",
    "num_running // 2",
    "num_running % 2",
    "num_running @ num_waiting",
    "num_running << 400",
    "num_running & 1",
    "~num_running",
    "9 ** 9 ** 9 ** 9",
    "2 ** num_running",
    "num_running ** 99",
    "num_running ** -1",
    "num_running ** (1 + 1)",
    "9" * 400,
    "9" * 5000,
    "1e999",
    "1e300 * 1e300",
    "(" * 150 + "1" + ")" * 150,
    "(" * 950 + "1" + ")" * 950,
    "-" * 1900 + "1",
    "not " * 400 + "1 > 0",
    "1" + " + 1" * 450,
    "abs(" * 90 + "1" + ")" * 90,
    "1 if 1 > 0 else " * 100 + "1",
    "num_running" + " " * MAX_CHARACTERS,
    "num_running\0",
    "num_running\n+\nnum_waiting",
    "num_running #",
    "",
    " ",
    "\\",
    "1if 1>0else 2",
    "0_0_",
    "num_running > 2",
    "not num_running",
    "num_running and num_waiting",
    "num_waiting if num_running else 1",
    "1 if (1 if num_running else 2) else 3",
    "(num_running > 1) + 1",
    "max(num_running > 1, 1)",
]


@pytest.mark.parametrize("text", MALICIOUS)
def test_what_is_no_formula_is_refused_in_a_line(text: str) -> None:
    """By its field, at once, and without having been run; harmless oddities may also be understood."""
    start_s = time.process_time()
    try:
        result = number(text)(VALUES)
    except ValueError as error:
        assert str(error).startswith("expr: ")
        assert len(str(error)) < 300
        assert "\n" not in str(error)
    else:
        assert text in HARMLESS
        assert len(result) == len(VALUES)
    assert time.process_time() - start_s < 10


HARMLESS = ("(" * 150 + "1" + ")" * 150, "num_running #", "num_running\n+\nnum_waiting", "0_0_")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("p_token * batch_size", "p_token is no known indicator; did you mean p_tokens?"),
        ("num_runing + 1", "did you mean num_running?"),
        ("maximum(num_running, 1)", "maximum is no known function"),
        ("minn(num_running, 1)", "did you mean min?"),
        ("num_running.x", ".x is not allowed"),
        ("num_running > 2", "num_running > 2 is not a number"),
        ("9 ** 9 ** 9", "powers must be numbers from 0 to 4"),
        ("+".join(["1"] * 40), f"is nested deeper than {MAX_DEPTH} levels"),
        ("max(" + ",".join(["1"] * 17) + ")", "max takes 2 to 16 arguments"),
        ("num_running" + " " * MAX_CHARACTERS, f"is longer than {MAX_CHARACTERS} characters"),
    ],
)
def test_a_refusal_says_why(text: str, hint: str) -> None:
    """A typing mistake is helped, a limit named."""
    with pytest.raises(ValueError, match="^expr: ") as caught:
        number(text)
    assert hint in str(caught.value)


def test_a_formula_can_be_too_large() -> None:
    """In terms, when it is neither long nor deep."""
    inner = "max(" + ",".join(["1"] * 16) + ")"
    with pytest.raises(ValueError, match=f"is larger than {MAX_NODES} terms"):
        number("max(" + ",".join([inner, *["max(" + ",".join([inner] * 9) + ")"] * 2]) + ")")


def test_every_function_is_there() -> None:
    """What the checker lets through, the compiler knows."""
    for name, (least, most) in FUNCTIONS.items():
        for count in {least, most}:
            assert len(number(f"{name}({', '.join(['num_running'] * count)})")(VALUES)) == 4


def test_random_formulas_are_understood_or_refused() -> None:
    """Whatever is put together from the pieces of formulas, nothing but a ValueError comes out."""
    rng = np.random.default_rng(2)
    pieces = ["num_running", "step_s", "1", "0.5", "+", "-", "*", "/", "**", "(", ")", "max(", "min(", ",", "if",
              "else", "and", "or", "not", "<", ">=", "==", "otherwise(", "highest(", ".", "[", "]", ":", "x", "'"]  # fmt: skip
    understood = 0
    for _ in range(5_000):
        text = " ".join(rng.choice(pieces, rng.integers(1, 12)))
        try:
            assert len(number(text)(VALUES)) == 4
            understood += 1
        except ValueError:
            pass
    assert understood > 20


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("num_running > 9 and num_waiting < 9", False),
        ("num_running < 9 and num_waiting < 9", True),
        ("num_running < 9 or num_waiting < 9", False),
        ("num_running > 9 or num_waiting < 9", True),
        ("num_running > 0 or num_waiting < 9", True),  # one instance has none
    ],
)
def test_a_side_that_decides_nothing_is_not_computed(text: str, reads: bool) -> None:
    """The condition is the same, also where numbers are unknown."""
    candidates = fleet(num_running=[0, 1, 2], num_waiting=[0, 9, math.nan])
    holds = condition(text).holds(candidates)
    assert ("num_waiting" in candidates.columns) is reads
    whole = number(f"1 if {text} else 0")(candidates)  # computes both sides
    assert holds.tolist() == (whole == 1.0).tolist()
