"""Conditions of breakpoints: expressions over named figures. They are parsed and walked, never evaluated.

Numbers, figures, arithmetic, comparisons, ``and``, ``or``, ``not``, ``abs``, ``isnan`` and ``isfinite`` are
all that there is. A figure that is not known yet is NaN, and so is a division by zero: what is compared with
it does not hold.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from picotron_ray.errors import ConfigError

FIGURES = (
    *("step", "rank", "loss", "grad_norm", "learning_rate", "step_s", "tokens", "eval_loss", "bad_steps"),
    *("allocated_bytes", "reserved_bytes", "pending_operations"),
)
"""Figures that a condition may name; losses and norms are those of the newest update."""
MOST_LETTERS, MOST_PARTS = 200, 100
_ARITHMETIC: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.AST], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[[float], float]] = {"abs": abs, "isnan": math.isnan, "isfinite": math.isfinite}


class BreakCondition:
    """Expression over `FIGURES`.

    >>> spike = BreakCondition("loss > 9 and step % 2 == 0")
    >>> spike.holds({"loss": 9.5, "step": 4}), spike.holds({"loss": 9.5, "step": 5}), spike.holds({"step": 4})
    (True, False, False)
    """

    def __init__(self, text: str) -> None:
        """Parse.

        Raises:
            ConfigError: it is no such expression, or names what is no figure, or none at all.
        """
        self.text = text.strip()
        if len(self.text) > MOST_LETTERS:
            raise ConfigError(f"--if: saw {len(self.text)} letters, expected at most {MOST_LETTERS}")
        try:
            self._root = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise _refusal(self.text, "an expression such as 'loss > 9'") from None
        parts = list(ast.walk(self._root))
        if len(parts) > MOST_PARTS:
            raise _refusal(self.text, f"at most {MOST_PARTS} parts")
        functions = {id(part.func) for part in parts if isinstance(part, ast.Call)}
        names = [part.id for part in parts if isinstance(part, ast.Name) and id(part) not in functions]
        for part in parts:
            _check(part, self.text, id(part) in functions)
        if not names:
            raise _refusal(self.text, f"a figure in it: {', '.join(FIGURES)}")

    def holds(self, figures: Mapping[str, float]) -> bool:
        """Whether it holds for these figures."""
        value = _value(self._root, figures)
        return bool(value) and not math.isnan(value)


def _refusal(text: str, expected: str) -> ConfigError:
    return ConfigError(f"--if: saw {text!r}, expected {expected}")


def _check(part: ast.AST, text: str, called: bool) -> None:
    """Refuse whatever is not on the list."""
    if isinstance(part, ast.Name) and not called and part.id not in FIGURES:
        near = difflib.get_close_matches(part.id, FIGURES, 1, 0.0)[0]
        raise ConfigError(
            f"--if: saw {part.id!r} in {text!r}, which is no figure; nearest: {near} (there are"
            f" {', '.join(FIGURES)})"
        )
    number = (
        isinstance(part, ast.Constant) and isinstance(part.value, int | float) and abs(part.value) < 1e300
    )
    call = (
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Name)
        and part.func.id in _FUNCTIONS
        and len(part.args) == 1
        and not part.keywords
    )
    plain = (ast.Name, ast.Load, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd)
    listed = isinstance(part, (*plain, ast.BinOp, ast.Compare, *_ARITHMETIC, *_COMPARE))
    if not (number or call or listed):
        kind = type(part).__name__.lower()
        raise _refusal(text, f"numbers, figures, + - * / %, comparisons, and, or, not, and no {kind}")


def _value(part: Any, figures: Mapping[str, float]) -> float:
    if isinstance(part, ast.Constant):
        return float(part.value)  # type: ignore[arg-type]
    if isinstance(part, ast.Name):
        return float(figures.get(part.id, math.nan))
    if isinstance(part, ast.BoolOp):
        held = (_truth(each, figures) for each in part.values)
        return float(all(held) if isinstance(part.op, ast.And) else any(held))
    if isinstance(part, ast.UnaryOp):
        if isinstance(part.op, ast.Not):
            return float(not _truth(part.operand, figures))
        value = _value(part.operand, figures)
        return -value if isinstance(part.op, ast.USub) else value
    if isinstance(part, ast.BinOp):
        try:
            return _ARITHMETIC[type(part.op)](_value(part.left, figures), _value(part.right, figures))
        except ZeroDivisionError:
            return math.nan
    if isinstance(part, ast.Call):
        return float(_FUNCTIONS[part.func.id](_value(part.args[0], figures)))  # type: ignore[attr-defined]
    values = [_value(each, figures) for each in (part.left, *part.comparators)]
    pairs = zip(part.ops, values, values[1:], strict=False)
    return float(all(_compare(type(op), left, right) for op, left, right in pairs))


def _compare(kind: type[ast.AST], left: float, right: float) -> bool:
    return not (math.isnan(left) or math.isnan(right)) and _COMPARE[kind](left, right)


def _truth(part: Any, figures: Mapping[str, float]) -> bool:
    value = _value(part, figures)
    return bool(value) and not math.isnan(value)
