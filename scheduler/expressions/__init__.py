"""Formulas over indicators, as users write them: parsed, checked, compiled to functions, never run as Python."""

from scheduler.expressions.compiling import Expression, condition, number

__all__ = ["Expression", "condition", "number"]
