"""Parses a formula to a tree that has only allowed nodes and whose size and depth are bounded."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from predictor.suggestions import did_you_mean
from scheduler.indicators import INDICATORS

MAX_CHARACTERS = 2000
MAX_NODES = 300
MAX_DEPTH = 30
MAX_NUMBER = 1e15  # of a literal
MAX_POWER = 4

# The minimum and maximum number of arguments of each function.
FUNCTIONS = {
    "min": (2, 16),
    "max": (2, 16),
    "abs": (1, 1),
    "sqrt": (1, 1),
    "log": (1, 1),
    "otherwise": (2, 2),
    "lowest": (1, 1),
    "highest": (1, 1),
    "mean": (1, 1),
}
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
SYMBOLS = {ast.Pow: "**", ast.FloorDiv: "//", ast.Mod: "%", ast.MatMult: "@", ast.LShift: "<<", ast.RShift: ">>"}


def parse(text: str, field: str) -> ast.expr:
    """Parse and check a formula; ValueError names the field that has the formula."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{field}: is longer than {MAX_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it cannot be read"
        raise ValueError(f"{field}: is no formula: {reason}") from None
    try:
        _require_small(tree)
        _require_allowed(tree)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    return tree


def names_in(tree: ast.expr) -> Iterator[str]:
    """Yield the indicators that a checked formula reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in INDICATORS:
            yield node.id


def _require_small(tree: ast.expr) -> None:
    """Refuse a large or deep tree, level by level: recursion is safe only after this check."""
    num_nodes, depth, level = 0, 0, [tree]
    while level:
        num_nodes, depth = num_nodes + len(level), depth + 1
        if num_nodes > MAX_NODES:
            raise ValueError(f"is larger than {MAX_NODES} terms")
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
        level = [child for node in level for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _require_allowed(node: ast.expr) -> None:
    check = CHECKS.get(type(node))
    if check is None:
        raise ValueError(f"{type(node).__name__} is not allowed")
    check(node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and not (isinstance(node, ast.Call) and child is node.func):
            _require_allowed(child)


def _require_operator(node: ast.BinOp) -> None:
    if isinstance(node.op, ast.Pow):
        _require_low(node.right)
    elif not isinstance(node.op, OPERATORS):
        raise ValueError(f"{SYMBOLS.get(type(node.op), type(node.op).__name__)} is not allowed")


def _require_sign(node: ast.UnaryOp) -> None:
    if isinstance(node.op, ast.Invert):
        raise ValueError("~ is not allowed; write not")


def _require_comparison(node: ast.Compare) -> None:
    if not all(isinstance(operator, COMPARISONS) for operator in node.ops):
        raise ValueError("of comparisons, only <, <=, >, >=, == and != are allowed")


def _require_call(node: ast.Call) -> None:
    if not isinstance(node.func, ast.Name) or node.keywords:
        raise ValueError(f"of calls, only those of {', '.join(FUNCTIONS)} are allowed, without keywords")
    _require_function(node.func.id, len(node.args))


def _refuse_attribute(node: ast.Attribute) -> None:
    raise ValueError(f".{node.attr:.40} is not allowed; indicators have no attributes")


def _require_number(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r:.40} is no number")
    if not abs(value) <= MAX_NUMBER:
        raise ValueError(f"numbers may not be above {MAX_NUMBER:g}")


def _require_low(exponent: ast.expr) -> None:
    if not (
        isinstance(exponent, ast.Constant)
        and isinstance(exponent.value, int | float)
        and 0 <= exponent.value <= MAX_POWER
    ):
        raise ValueError(f"powers must be numbers from 0 to {MAX_POWER}")


def _require_known(name: str) -> None:
    if name in INDICATORS:
        return
    if name in FUNCTIONS:
        raise ValueError(f"{name} is a function and needs arguments")
    raise ValueError(f"{name} is no known indicator{did_you_mean(name, INDICATORS)}")


def _require_function(name: str, num_arguments: int) -> None:
    if name not in FUNCTIONS:
        hint = did_you_mean(name, FUNCTIONS, otherwise=f"; there are {', '.join(FUNCTIONS)}")
        raise ValueError(f"{name} is no known function{hint}")
    fewest, most = FUNCTIONS[name]
    if not fewest <= num_arguments <= most:
        raise ValueError(f"{name} takes {fewest if fewest == most else f'{fewest} to {most}'} arguments")


CHECKS: dict[type[ast.expr], Callable[[Any], None]] = {
    ast.Constant: lambda node: _require_number(node.value),
    ast.Name: lambda node: _require_known(node.id),
    ast.BinOp: _require_operator,
    ast.UnaryOp: _require_sign,
    ast.Compare: _require_comparison,
    ast.Call: _require_call,
    ast.Attribute: _refuse_attribute,
    ast.BoolOp: lambda _: None,
    ast.IfExp: lambda _: None,
}
