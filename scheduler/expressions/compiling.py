"""Compiles a checked tree to a function over columns.

An unknown value (NaN) makes the results of arithmetic, comparisons and conditionals unknown; `and` and `or` are known
if one side decides them, and `otherwise(x, y)` is y where x is unknown. A condition is 1, 0, or NaN. Division by zero
is an infinity, and 0 / 0 is unknown.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.expressions.checking import names_in, parse

Value = Column | np.float64
Part = Callable[[Candidates], Value]

NUMBER, CONDITION = "a number", "a condition"


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled formula, and the indicators that it reads."""

    text: str
    needs: tuple[str, ...]
    part: Part
    truth: Part  # of a condition

    def __call__(self, candidates: Candidates) -> Column:
        """Return the value for each candidate."""
        with np.errstate(all="ignore"):
            value = self.part(candidates)
        return value if isinstance(value, np.ndarray) and value.ndim else np.full(len(candidates), value)

    def holds(self, candidates: Candidates) -> npt.NDArray[np.bool_]:
        """Return for which candidates a condition is true; an unknown one counts as false."""
        with np.errstate(all="ignore"):
            value = self.truth(candidates)
        return np.asarray(value) if np.ndim(value) else np.full(len(candidates), bool(value))


def number(text: str, field: str = "expr") -> Expression:
    """Compile a formula for a number per instance."""
    return _expression(text, field, NUMBER)


def condition(text: str, field: str = "filter") -> Expression:
    """Compile a formula for a condition per instance."""
    return _expression(text, field, CONDITION)


def _expression(text: str, field: str, kind: str) -> Expression:
    tree = parse(text, field)
    try:
        part = _part(tree, kind)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    truth = part if kind == NUMBER else _truth(tree)
    return Expression(text.strip(), tuple(dict.fromkeys(names_in(tree))), part, truth)


def _truth(node: ast.expr) -> Part:
    """Compile a condition that nothing depends on where it is unknown, which costs less."""
    if isinstance(node, ast.BoolOp):
        truths = [_truth(value) for value in node.values]
        return _until_decided(*DECIDED_BY[type(node.op)], truths)
    if isinstance(node, ast.Compare) and not any(isinstance(op, ast.NotEq) for op in node.ops):
        sides = [_part(side, NUMBER) for side in (node.left, *node.comparators)]
        compared = zip(node.ops, sides, sides[1:], strict=False)
        return _chained(operator.and_, [_joined(PLAIN[type(op)], left, right) for op, left, right in compared])
    part = _part(node, CONDITION)
    return lambda candidates: part(candidates) == 1.0


def _until_decided(
    join: Callable[[Value, Value], Any], is_decided: Callable[[Value], bool], truths: list[Part]
) -> Part:
    """Join conditions; those behind the one that decides for all candidates are not computed."""

    def part(candidates: Candidates) -> Value:
        holds = truths[0](candidates)
        for truth in truths[1:]:
            if is_decided(holds):
                break
            holds = join(holds, truth(candidates))
        return holds

    return part


def _part(node: ast.expr, kind: str) -> Part:
    """Compile a node to a number or a condition."""
    if isinstance(node, ast.IfExp):
        return _conditional(_part(node.test, CONDITION), _part(node.body, kind), _part(node.orelse, kind))
    is_condition = isinstance(node, ast.Compare | ast.BoolOp) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )
    if is_condition != (kind == CONDITION):
        raise ValueError(f"{ast.unparse(node):.60} is not {kind}")
    return COMPILERS[type(node)](node)


def _constant(node: ast.Constant) -> Part:
    value = np.float64(cast("float", node.value))
    return lambda _: value


def _name(node: ast.Name) -> Part:
    name = node.id
    return lambda candidates: candidates[name]


def _unary(node: ast.UnaryOp) -> Part:
    if isinstance(node.op, ast.Not):
        condition_part = _part(node.operand, CONDITION)
        return lambda candidates: 1.0 - condition_part(candidates)
    part = _part(node.operand, NUMBER)
    return part if isinstance(node.op, ast.UAdd) else lambda candidates: -part(candidates)


def _binary(node: ast.BinOp) -> Part:
    return _joined(ARITHMETIC[type(node.op)], _part(node.left, NUMBER), _part(node.right, NUMBER))


def _boolean(node: ast.BoolOp) -> Part:
    return _chained(LOGIC[type(node.op)], [_part(value, CONDITION) for value in node.values])


def _compare(node: ast.Compare) -> Part:
    sides = [_part(side, NUMBER) for side in (node.left, *node.comparators)]
    compared = zip(node.ops, sides, sides[1:], strict=False)
    return _chained(_and, [_joined(COMPARISONS[type(op)], left, right) for op, left, right in compared])


def _call(node: ast.Call) -> Part:
    name, parts = cast("ast.Name", node.func).id, [_part(argument, NUMBER) for argument in node.args]
    if name in JOINING:
        return _chained(JOINING[name], parts)
    function, (part,) = APPLYING[name], parts
    return lambda candidates: function(part(candidates))


def _chained(join: Callable[[Value, Value], Value], parts: list[Part]) -> Part:
    return reduce(lambda one, other: _joined(join, one, other), parts)


def _joined(join: Callable[[Value, Value], Value], left: Part, right: Part) -> Part:
    return lambda candidates: join(left(candidates), right(candidates))


def _conditional(test: Part, body: Part, orelse: Part) -> Part:
    def part(candidates: Candidates) -> Value:
        holds = test(candidates)
        otherwise = np.where(holds == 0.0, orelse(candidates), np.nan)
        return np.where(holds == 1.0, body(candidates), otherwise)

    return part


def _comparison(compare: Callable[[Value, Value], Any]) -> Callable[[Value, Value], Value]:
    def compared(left: Value, right: Value) -> Value:
        return np.where(np.isnan(left) | np.isnan(right), np.nan, compare(left, right))

    return compared


def _and(left: Value, right: Value) -> Value:
    return np.where((left == 0.0) | (right == 0.0), 0.0, left * right)


def _or(left: Value, right: Value) -> Value:
    return 1.0 - _and(1.0 - left, 1.0 - right)


def _otherwise(value: Value, instead: Value) -> Value:
    return np.where(np.isnan(value), instead, value)


def _over_all(reduction: Callable[[Column], Value]) -> Callable[[Value], Value]:
    """Reduce the known values of all candidates to one value; unknown if none is known."""

    def reduced(values: Value) -> Value:
        column = np.atleast_1d(values)
        known = column[~np.isnan(column)]
        return np.float64(reduction(known) if known.size else np.nan)

    return reduced


ARITHMETIC: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: np.power,
}
LOGIC: dict[type[ast.boolop], Callable[[Value, Value], Value]] = {ast.And: _and, ast.Or: _or}
DECIDED_BY: dict[type[ast.boolop], tuple[Callable[[Value, Value], Any], Callable[[Value], bool]]] = {
    ast.And: (np.logical_and, lambda holds: not holds.any()),
    ast.Or: (np.logical_or, lambda holds: bool(holds.all())),
}
PLAIN: dict[type[ast.cmpop], Callable[[Value, Value], Any]] = {  # false where a side is unknown, but for the last
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Value, Value], Value]] = {
    kind: _comparison(compare) for kind, compare in PLAIN.items()
}
JOINING: dict[str, Callable[[Value, Value], Value]] = {"min": np.minimum, "max": np.maximum, "otherwise": _otherwise}
APPLYING: dict[str, Callable[[Value], Value]] = {
    "abs": np.abs,
    "sqrt": np.sqrt,
    "log": np.log,
    "lowest": _over_all(np.min),
    "highest": _over_all(np.max),
    "mean": _over_all(np.mean),
}
COMPILERS: dict[type[ast.expr], Callable[[Any], Part]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.BoolOp: _boolean,
    ast.Compare: _compare,
    ast.Call: _call,
}
