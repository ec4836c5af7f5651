"""Kernels that are called by their addresses: by number, once compiled, from the cache, and with their errors."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import types
from numba.core.errors import TypingError

from predictor import kernel_addresses
from predictor.compiled import inner_kernel
from predictor.kernel_addresses import by_address
from tests.python_process import run_python

NUMBERS = types.Array(types.float64, 1, "C")


def adding(number: int) -> Callable[..., Any]:
    """Make a kernel that adds its number to the first of an array; a negative one is refused."""

    @inner_kernel
    def add(numbers: np.ndarray, times: float) -> bool:
        if times < 0:
            raise ValueError("times: must not be negative")
        numbers[0] += number * times
        return number % 2 == 1

    return add


def test_each_of_twenty_kernels_is_called_by_its_number() -> None:
    """Numbers may be literals or variables, and arguments are converted as in any other call."""
    kernels = [adding(number) for number in range(20)]
    call = by_address("twenty", kernels, types.boolean, lambda: (NUMBERS, types.float64))

    @inner_kernel
    def call_all(numbers: np.ndarray, count: int) -> int:
        odd = int(call(3, numbers, 1))  # an integer
        for number in range(count):
            odd += call(number, numbers, 0.5)
        return odd

    numbers = np.zeros(1)
    assert call_all(numbers, 20) == 11
    assert numbers[0] == 3 + sum(range(20)) / 2


def test_only_kernels_that_are_called_are_compiled() -> None:
    """A process loads the one local scheduler that its engine has."""
    kernels: list[Any] = [adding(number) for number in range(3)]
    call = by_address("three", kernels, types.boolean, lambda: (NUMBERS, types.float64))
    assert call(1, np.zeros(1), 1.0)
    assert [len(one.overloads) for one in kernels] == [0, 1, 0]


def test_an_error_of_a_kernel_reaches_the_caller() -> None:
    """As if it had been called directly."""
    call = by_address("failing", [adding(1)], types.boolean, lambda: (NUMBERS, types.float64))
    with pytest.raises(ValueError, match="times: must not be negative"):
        call(0, np.zeros(1), -1.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_kernel_that_cannot_be_compiled_is_an_error() -> None:
    """The process goes on, and the reason is printed."""

    @inner_kernel
    def wrong(numbers: np.ndarray) -> bool:
        return bool(numbers.no_such_attribute)

    call = by_address("wrong", [wrong], types.boolean, lambda: (NUMBERS,))
    with pytest.raises(RuntimeError, match=r"no kernel in predictor\.kernel_addresses\.wrong"):
        call(0, np.zeros(1))


def test_arguments_of_other_types_are_refused() -> None:
    """When the caller is compiled."""
    call = by_address("typed", [adding(1)], types.boolean, lambda: (NUMBERS, types.float64))
    with pytest.raises(TypingError):
        call(0, np.zeros((2, 2)), 1.0)


def test_python_functions_are_called_directly() -> None:
    """As where nothing is compiled."""
    call = by_address(
        "python", [lambda number: number + 1, lambda number: -number], types.int64, lambda: (types.int64,)
    )
    assert (call(0, 4), call(1, 4)) == (5, -4)


def test_two_copies_of_the_engine_model_keep_their_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in for vLLM has one; a process may have both, of different versions."""
    spec = importlib.util.spec_from_file_location("copied.kernel_addresses", kernel_addresses.__file__)
    assert spec is not None
    assert spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, copied)
    spec.loader.exec_module(copied)
    calls = [
        module.by_address("same", [adding(number)], types.boolean, lambda: (NUMBERS, types.float64))
        for number, module in ((1, kernel_addresses), (2, copied))
    ]
    numbers = np.zeros(1)
    assert [call(0, numbers, 1.0) for call in calls] == [True, False]
    assert numbers[0] == 3


SCRIPT = """
import numpy as np
from numba.core import types
from predictor.compiled import kernel
from predictor.kernel_addresses import by_address

@kernel
def double(numbers):
    numbers[0] *= 2
    return True

call = by_address("cached", [double], types.boolean, lambda: (types.Array(types.float64, 1, "C"),))

@kernel
def caller(numbers):
    return call(0, numbers)

numbers = np.ones(1)
assert caller(numbers) and numbers[0] == 2
print(sum(caller.stats.cache_hits.values()), sum(double.stats.cache_hits.values()))
"""


def test_a_caller_from_the_cache_finds_the_kernel(tmp_path: Path) -> None:
    """Addresses differ between processes; the cached code of the caller has none."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    outputs = [run_python(str(script), NUMBA_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2)]
    assert [output.split() for output in outputs] == [["0", "0"], ["1", "1"]]
