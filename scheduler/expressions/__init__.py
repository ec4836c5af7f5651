"""Formulas over indicators, as users write them: parsed, checked, and made into functions; never evaluated as code."""

from scheduler.expressions.compiling import Expression, condition, number

__all__ = ["Expression", "condition", "number"]
