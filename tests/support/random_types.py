"""Random types and values as SQL, for tables that look like those of strangers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

Value = Callable[[], str]
"""Returns an SQL expression of the type, a different one at each call."""

_ALPHABET = "aB0 ,'\"\\{}()[]\n\t:;=>.\u00e4\u20ac\U0001f600\U0010fffd"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@dataclass
class RandomTypes:
    """Makes types; `declared` has the statements that create them, in order; their names begin with `prefix`."""

    rnd: random.Random
    prefix: str = "r"
    declared: list[str] = field(default_factory=list)
    _count: int = 0

    def make(self, depth: int = 2) -> tuple[str, Value]:
        """Make a type; return its SQL name and its values."""
        kind = self.rnd.choice(["scalar"] * 5 + ["array", "composite", "enum", "domain", "range", "multirange"])
        if depth and kind == "array":
            return self._array(depth)
        if depth and kind == "composite":
            return self._composite(depth)
        if kind == "enum":
            return self._enum()
        if depth and kind == "domain":
            base, value = self.make(depth - 1)
            name = self._name()
            self.declared.append(f"CREATE DOMAIN {name} AS {base}")
            return name, lambda: f"{value()}::{name}"
        if kind in {"range", "multirange"}:
            return self._range(kind)
        return self._scalar()

    def _name(self) -> str:
        self._count += 1
        return f"{self.prefix}{self._count}"

    def _scalar(self) -> tuple[str, Value]:
        name = self.rnd.choice(list(_SCALARS))
        make = _SCALARS[name]
        return name, lambda: f"{quoted(make(self.rnd))}::{name}"

    def _or_null(self, value: Value) -> str:
        return "NULL" if self.rnd.random() < 0.2 else value()

    def _array(self, depth: int) -> tuple[str, Value]:
        element, value = self.make(depth - 1)
        if element.endswith("[]"):
            return element, value
        type_ = f"{element}[]"

        def make() -> str:
            length = self.rnd.choice([0, 1, 2, 3, 17])
            row = f"ARRAY[{', '.join(self._or_null(value) for _ in range(length))}]::{type_}"
            shape = self.rnd.choice(["plain", "plain", "bounds", "nested"])
            if not length or shape == "plain":
                return row
            if shape == "nested":
                return f"ARRAY[{row}, {row}]::{type_}"
            low = self.rnd.randint(-3, 3)
            return f"('[{low}:{low + length - 1}]=' || regexp_replace(({row})::text, '^\\[[0-9:-]+\\]=', ''))::{type_}"

        return type_, make

    def _composite(self, depth: int) -> tuple[str, Value]:
        parts = [self.make(depth - 1) for _ in range(self.rnd.randint(1, 4))]
        name = self._name()
        self.declared.append(
            f"CREATE TYPE {name} AS ({', '.join(f'f{i} {part}' for i, (part, _) in enumerate(parts))})"
        )
        return name, lambda: f"ROW({', '.join(self._or_null(value) for _, value in parts)})::{name}"

    def _enum(self) -> tuple[str, Value]:
        name = self._name()
        labels = ["a", "B c", 'q"', "\u00e4,", "null"]
        self.declared.append(f"CREATE TYPE {name} AS ENUM ({', '.join(map(quoted, labels))})")
        return name, lambda: f"{quoted(self.rnd.choice(labels))}::{name}"

    def _range(self, kind: str) -> tuple[str, Value]:
        if self.rnd.random() < 0.5:
            name, subtype = self.rnd.choice(
                [("int4range", "int4"), ("numrange", "numeric"), ("tstzrange", "timestamptz"), ("daterange", "date")]
            )
            multi = name.replace("range", "multirange")
        else:
            subtype = self.rnd.choice(["float8", "text", "inet", "uuid", "interval"])
            name = self._name()
            multi = f"{name}m"
            self.declared.append(f"CREATE TYPE {name} AS RANGE (subtype = {subtype}, multirange_type_name = {multi})")
        make = _SCALARS[subtype]

        def one() -> str:
            if self.rnd.random() < 0.2:
                return f"'empty'::{name}"
            a, b = ("NULL" if self.rnd.random() < 0.2 else f"{quoted(make(self.rnd))}::{subtype}" for _ in range(2))
            edges = self.rnd.choice(["[]", "[)", "(]", "()"])
            if "NULL" in {a, b}:
                return f"{name}({a}, {b}, '{edges}')"
            return f"{name}(least({a}, {b}), greatest({a}, {b}), '{edges}')"

        if kind == "range":
            return name, one
        return multi, lambda: f"{multi}({', '.join(one() for _ in range(self.rnd.randint(0, 3)))})"


def _text(rnd: random.Random) -> str:
    return "".join(rnd.choice(_ALPHABET) for _ in range(rnd.choice([0, 1, 4, 12, 300])))


def _digits(rnd: random.Random, most: int) -> str:
    return str(rnd.randrange(10 ** rnd.randint(1, most)))


def _numeric(rnd: random.Random) -> str:
    sign = rnd.choice(["", "-"])
    return (
        f"{sign}{_digits(rnd, 30)}.{_digits(rnd, 20)}"
        if rnd.random() < 0.8
        else f"{sign}{_digits(rnd, 5)}e{rnd.randint(-60, 60)}"
    )


def _float(rnd: random.Random, digits: int, power: int) -> str:
    if rnd.random() < 0.1:
        return rnd.choice(["NaN", "Infinity", "-Infinity", "-0", "0"])
    return f"{rnd.choice(['', '-'])}{_digits(rnd, digits)}.{_digits(rnd, digits)}e{rnd.randint(-power, power)}"


def _date(rnd: random.Random) -> str:
    return f"{rnd.randint(1, 9999):04d}-{rnd.randint(1, 12):02d}-{rnd.randint(1, 28):02d}"


def _time(rnd: random.Random) -> str:
    fraction = rnd.choice(["", f".{rnd.randrange(1_000_000):06d}", f".{rnd.randrange(10)}"])
    return f"{rnd.randint(0, 23):02d}:{rnd.randint(0, 59):02d}:{rnd.randint(0, 59):02d}{fraction}"


def _json(rnd: random.Random, depth: int = 3) -> str:
    kind = rnd.choice(["null", "true", "1.50", "string", "array", "object"][: 6 if depth else 4])
    if kind == "array":
        return f"[{', '.join(_json(rnd, depth - 1) for _ in range(rnd.randint(0, 3)))}]"
    if kind == "object":
        return "{" + ", ".join(f'"k{i} \u20ac": {_json(rnd, depth - 1)}' for i in range(rnd.randint(0, 3))) + "}"
    return '"a \\" \\\\ \\n \u00e4"' if kind == "string" else kind


_SCALARS: dict[str, Callable[[random.Random], str]] = {
    "bool": lambda r: r.choice("tf"),
    "int2": lambda r: str(r.randint(-32768, 32767)),
    "int4": lambda r: str(r.randint(-(2**31), 2**31 - 1)),
    "int8": lambda r: str(r.randint(-(2**63), 2**63 - 1)),
    "oid": lambda r: str(r.randrange(2**32)),
    "xid8": lambda r: str(r.randrange(2**64)),
    "float4": lambda r: _float(r, 4, 30),
    "float8": lambda r: _float(r, 9, 280),
    "numeric": _numeric,
    "numeric(9,3)": lambda r: f"{r.choice(['', '-'])}{_digits(r, 6)}.{_digits(r, 3)}",
    "numeric(30,10)": lambda r: f"{_digits(r, 20)}.{_digits(r, 10)}",
    "text": _text,
    "varchar": _text,
    "char(12)": lambda r: _text(r)[:12],
    "bytea": lambda r: "\\x" + r.randbytes(r.choice([0, 1, 20])).hex(),
    "uuid": lambda r: r.randbytes(16).hex(),
    "date": _date,
    "time": _time,
    "timetz": lambda r: f"{_time(r)}{r.choice('+-')}{r.randint(0, 15):02d}:{r.randint(0, 59):02d}",
    "timestamp": lambda r: f"{_date(r)} {_time(r)}",
    "timestamptz": lambda r: f"{_date(r)} {_time(r)}+00",
    "interval": lambda r: (
        f"{r.randint(-500, 500)} mons {r.randint(-50, 50)} days {r.randint(-(10**12), 10**12)} microseconds"
    ),
    "json": _json,
    "jsonb": _json,
    "inet": lambda r: r.choice(
        [f"10.{r.randint(0, 255)}.0.1/{r.randint(0, 32)}", f"{r.randrange(65536):x}::{r.randrange(65536):x}"]
    ),
    "macaddr": lambda r: r.randbytes(6).hex(),
    "bit varying": lambda r: "".join(r.choice("01") for _ in range(r.choice([0, 1, 8, 19]))),
    "point": lambda r: f"({_float(r, 5, 20)},{_float(r, 5, 20)})",
    "polygon": lambda r: "(" + ",".join(f"({_digits(r, 3)},{_digits(r, 3)})" for _ in range(r.randint(1, 4))) + ")",
    "tsvector": lambda r: " ".join(
        f"w{r.randint(0, 9)}:{r.randint(1, 99)}{r.choice('ABCD')}" for _ in range(r.randint(0, 4))
    ),
    "pg_lsn": lambda r: f"{r.randrange(2**32):X}/{r.randrange(2**32):X}",
}
