"""Translated expressions, and the part that Python computes once the rows are there.

DataFusion lacks a numeric whose scale follows from its values, jsonb, and PostgreSQL's text of floats and times.  If
such an expression is a column of the outermost SELECT, DataFusion gives its leaves and Python does the rest (`Exact`).
Elsewhere `sql` is used, and an expression without it is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any, Final

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select.types import UNKNOWN, Type


@dataclass(frozen=True, slots=True)
class Exact:
    """What Python computes: `apply` takes DataFusion's values of `leaves`, one for each, and returns the result."""

    leaves: tuple[str, ...]
    apply: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Value:
    """An expression: its type, DataFusion's SQL, and how Python computes it exactly.

    `sql` is None if only Python has the value.  `literal` is the text of an untyped literal, or an interval's months,
    days and microseconds.
    """

    type: Type
    sql: str | None
    exact: Exact | None = None
    literal: str | tuple[int, int, int] | None = None

    @property
    def engine(self) -> str:
        """DataFusion's SQL.  Raises FeatureNotSupported if only Python has the value."""
        if self.sql is None:
            raise FeatureNotSupported(
                "this expression is supported only among the columns of the outermost SELECT",
                detail="It is worked out after the rows are found: no condition, grouping or order can go by it.",
            )
        return self.sql

    def typed(self, type_: Type) -> Value:
        return replace(self, type=type_)


NULL: Final = Value(UNKNOWN, "NULL")
#: PostgreSQL refuses such a pattern for some texts, and lets others not match (like_match.c: MatchText).
UNFINISHED: Final = "a LIKE pattern that ends with the escape character is not supported"
_CONTEXT: Final = Context(prec=1100)


def quoted(text: str) -> str:
    """Return a string literal in DataFusion's SQL."""
    return "'" + text.replace("'", "''") + "'"


def name(text: str) -> str:
    """Return an identifier in DataFusion's SQL."""
    return '"' + text.replace('"', '""') + '"'


def composed(function: Callable[..., Any], *values: Value) -> Exact:
    """Return an Exact that calls `function` with the values, or gives None if one of them is None."""
    parts = [value.exact or Exact((value.engine,), _first) for value in values]
    leaves = tuple(leaf for part in parts for leaf in part.leaves)

    def apply(given: Sequence[Any]) -> Any:
        place, found = 0, []
        for part in parts:
            found.append(part.apply(given[place : place + len(part.leaves)]))
            place += len(part.leaves)
        return None if any(one is None for one in found) else function(*found)

    return Exact(leaves, apply)


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def add(one: Any, other: Any) -> Any:
    return _CONTEXT.add(Decimal(one), Decimal(other))


def subtract(one: Any, other: Any) -> Any:
    return _CONTEXT.subtract(Decimal(one), Decimal(other))


def multiply(one: Any, other: Any) -> Any:
    return _signed(_CONTEXT.multiply(Decimal(one), Decimal(other)))


def _signed(value: Decimal) -> Decimal:
    """Return a numeric, whose zero has no sign."""
    return value or value.copy_abs()


def rounded(value: Any, digits: int) -> Decimal:
    """Round half away from zero (numeric.c: numeric_round)."""
    shown = _signed(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP, _CONTEXT))
    return shown if digits >= 0 else shown.quantize(Decimal(1))


def divide(one: Any, other: Any) -> Decimal:
    """Divide (numeric.c: numeric_div), with the scale of select_div_scale: at least 16 significant digits."""
    left, right = Decimal(one), Decimal(other)
    if not right:
        raise PubsubError("division by zero", sqlstate="22012")
    (weight, first), (other_weight, other_first) = _leading(left), _leading(right)
    quotient = weight - other_weight - (1 if first <= other_first else 0)
    scale = max(16 - quotient * 4, _scale(left), _scale(right), 0)
    return _signed(_CONTEXT.divide(left, right).quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP, _CONTEXT))


#: Operators of doubles.  Where they raise an error, DataFusion has raised it before.
FLOATS: Final[dict[str, Callable[[float, float], float]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda one, other: one / other if other else math.nan,
}


def _leading(value: Decimal) -> tuple[int, int]:
    """Return the weight and the value of numeric's first digit, in base 10000; 0, 0 for zero."""
    if not value:
        return 0, 0
    weight = value.adjusted() // 4
    return weight, int(abs(value).scaleb(-4 * weight, _CONTEXT))


def _scale(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)
    return max(-exponent, 0)
