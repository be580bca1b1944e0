"""Integers with units, as in PostgreSQL's settings: "64MB", "5s", "1.5min" (guc.c: parse_int, convert_to_base_unit).

The texts of errors and hints are those of guc.c.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pubsub.errors import PubsubError

INT_MAX: Final = 2**31 - 1
#: guc.c: memory_unit_conversion_table, in bytes; time_unit_conversion_table, in microseconds.  Largest first.
_MEMORY: Final = {"TB": 1 << 40, "GB": 1 << 30, "MB": 1 << 20, "kB": 1 << 10, "B": 1}
_TIME: Final = {"d": 86_400_000_000, "h": 3_600_000_000, "min": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}
_HINTS: Final = {
    "memory": 'Valid units for this parameter are "B", "kB", "MB", "GB", and "TB".',
    "time": 'Valid units for this parameter are "us", "ms", "s", "min", "h", and "d".',
}
_NUMBER: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Parameter:
    """An integer parameter; `unit` is a bare number's unit ("" for a count); the bounds are in that unit, inclusive."""

    name: str
    unit: str
    low: int
    high: int = INT_MAX

    def parse(self, value: object) -> int:
        """Return the value in the parameter's unit, rounded as in PostgreSQL.  Raises PubsubError (22023)."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._invalid(value, _HINTS.get(self._kind))
        match = _NUMBER.fullmatch(str(value))
        if match is None:
            # PostgreSQL gives the hint for a wrong unit alone; what is no number lacks the same knowledge.
            raise self._invalid(value, _HINTS.get(self._kind))
        number, unit = float(match[1]), match[2]
        if unit:
            family = self._family
            if unit not in family:
                raise self._invalid(value, _HINTS.get(self._kind))
            number = number * family[unit] / family[self.unit]
        if not abs(number) <= max(INT_MAX, self.high):
            raise self._invalid(value, "Value exceeds integer range.")
        result = round(number)
        if not self.low <= result <= self.high:
            unit = f" {self.unit}" if self.unit else ""
            raise PubsubError(
                f'{result}{unit} is outside the valid range for parameter "{self.name}" '
                f"({self.low}{unit} .. {self.high}{unit})",
                sqlstate="22023",
            )
        return result

    def show(self, value: int) -> str:
        """Write the value with the largest unit that keeps it whole (guc.c: convert_int_from_base_unit)."""
        if not self.unit or value <= 0:
            return str(value)
        family = self._family
        amount = value * family[self.unit]
        return next(f"{amount // size}{unit}" for unit, size in family.items() if amount % size == 0)

    @property
    def factor(self) -> float:
        """The bytes, or seconds, in the parameter's unit; 1 for a count."""
        return self._family[self.unit] / (1_000_000 if self._kind == "time" else 1) if self.unit else 1

    @property
    def is_time(self) -> bool:
        """Whether the value is a time, not a size or a count."""
        return self._kind == "time"

    @property
    def _kind(self) -> str:
        return "memory" if self.unit in _MEMORY else "time" if self.unit in _TIME else "count"

    @property
    def _family(self) -> dict[str, int]:
        return {"memory": _MEMORY, "time": _TIME, "count": {}}[self._kind]

    def _invalid(self, value: object, hint: str | None = None) -> PubsubError:
        return PubsubError(f'invalid value for parameter "{self.name}": "{value}"', sqlstate="22023", hint=hint)
