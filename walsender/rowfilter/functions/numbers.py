"""Functions of integers, numeric and floats (int.c, int8.c, numeric.c, float.c)."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, ROUND_HALF_UP, Context, Decimal
from struct import Struct
from typing import Final

from pubsub.errors import PubsubError
from walsender.rowfilter.functions.values import (
    FixedFunction,
    Maker,
    Number,
    Settings,
    fixed,
    float_number,
    numeric_number,
    plain_float,
)

_INTEGERS: Final = frozenset({20, 21, 23, 26})
_NUMERIC: Final = 1700
_FLOATS: Final = frozenset({700, 701})
_F4: Final = Struct("<f")

_RANGES: Final = {2: (-(1 << 15), (1 << 15) - 1), 4: (-(1 << 31), (1 << 31) - 1), 8: (-(1 << 63), (1 << 63) - 1)}
_INTEGER_NAMES: Final = {2: "smallint", 4: "integer", 8: "bigint"}
_ARITHMETIC: Final = re.compile(r"int([248]{1,2})(pl|mi|mul|div|mod)")
_BITWISE: Final = re.compile(r"int([248])(and|or|xor|not|shl|shr|up|um|abs|larger|smaller)")


def _zero() -> PubsubError:
    return PubsubError("division by zero", sqlstate="22012")


def _overflow() -> PubsubError:
    return PubsubError("value out of range: overflow", sqlstate="22003")


def _underflow() -> PubsubError:
    return PubsubError("value out of range: underflow", sqlstate="22003")


# Integers


def in_range(value: int, width: int) -> int:
    """Return `value`.  Raises 22003 if it does not fit into `width` bytes."""
    low, high = _RANGES[width]
    if not low <= value <= high:
        raise PubsubError(f"{_INTEGER_NAMES[width]} out of range", sqlstate="22003")
    return value


def integers(name: str) -> FixedFunction | None:
    """Return a function like int4pl; None if `name` is none."""
    if found := _ARITHMETIC.fullmatch(name):
        return _arithmetic(max(int(w) for w in found[1]), found[2])
    if found := _BITWISE.fullmatch(name):
        return _bitwise(int(found[1]), found[2])
    return None


def _truncated(a: int, b: int) -> int:
    """Divide as C does: towards zero."""
    if b == 0:
        raise _zero()
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _arithmetic(width: int, what: str) -> FixedFunction:
    plain: Callable[[int, int], int] = {
        "pl": operator.add,
        "mi": operator.sub,
        "mul": operator.mul,
        "div": _truncated,
        "mod": lambda a, b: a - _truncated(a, b) * b,
    }[what]
    return lambda a, b: in_range(plain(a, b), width)


def _bitwise(width: int, what: str) -> FixedFunction:
    bits = 8 * width
    # Smaller integers are shifted as 32 bits, and a processor takes the count modulo the register's width.
    mask = max(bits, 32) - 1

    def shifted(a: int, count: int) -> int:
        value = (a << (count & mask)) & ((1 << bits) - 1)
        return value - (1 << bits) if value >> bits - 1 else value

    functions: dict[str, FixedFunction] = {
        "and": operator.and_,
        "or": operator.or_,
        "xor": operator.xor,
        "not": operator.invert,
        "shl": shifted,
        "shr": lambda a, count: a >> (count & mask),
        "up": operator.pos,
        "um": lambda a: in_range(-a, width),
        "abs": lambda a: in_range(abs(a), width),
        "larger": max,
        "smaller": min,
    }
    return functions[what]


def _of_integers(function: FixedFunction) -> Maker:
    def make(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
        if not set(types) <= _INTEGERS:
            return None
        width = {20: 8, 21: 2}.get(types[0], 4)
        return lambda *values: in_range(function(*values), width)

    return make


def _to_hex(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    mask = (1 << (64 if types[0] == 20 else 32)) - 1
    return (lambda value: b"%x" % (value & mask)) if types[0] in _INTEGERS else None


# Numeric: exact; a result's display scale matters where it is rounded.

EXACT: Final = Context(prec=300_000, Emax=10**6, Emin=-(10**6), rounding=ROUND_HALF_UP)
_MAX_SCALE: Final = 16383
_MIN_DIGITS: Final = 16
_MAX_DISPLAY_SCALE: Final = 1000
_NAN: Final[Number] = (2, Decimal(0))


def _special(function: Callable[[float, float], float]) -> Callable[[Number, Number], Number]:
    """Compute with infinities and NaN by the rules of floats."""

    def applied(a: Number, b: Number) -> Number:
        x, y = (math.copysign(bool(n[1]), n[1]) if n[0] == 0 else plain_float(n) for n in (a, b))
        kind, _ = float_number(function(x, y))
        return kind, Decimal(0)

    return applied


def _numerics(exact: Callable[[Decimal, Decimal], Decimal], special: Callable[[Number, Number], Number]) -> Maker:
    def applied(a: Number, b: Number) -> Number:
        return special(a, b) if a[0] or b[0] else (0, exact(a[1], b[1]))

    return fixed(applied)


def _product(a: Decimal, b: Decimal) -> Decimal:
    value = EXACT.multiply(a, b)
    return _rounded(value, _MAX_SCALE) if _scale(value) > _MAX_SCALE else value


def _scale(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _rounded(value: Decimal, scale: int, rounding: str = ROUND_HALF_UP) -> Decimal:
    found = value.quantize(Decimal(1).scaleb(-scale), rounding, EXACT)
    return found if scale >= 0 else found.quantize(Decimal(1), context=EXACT)


def _first_digit(value: Decimal) -> tuple[int, int]:
    """Return weight and value of the first digit to the base 10000."""
    if not value:
        return 0, 0
    weight = value.adjusted() // 4
    return weight, int(value.copy_abs().scaleb(-4 * weight, EXACT))


def quotient(a: Decimal, b: Decimal) -> Decimal:
    """Divide, with the scale that numeric's division has (numeric.c: select_div_scale, div_var)."""
    if not b:
        raise _zero()
    weight1, first1 = _first_digit(a)
    weight2, first2 = _first_digit(b)
    weight = weight1 - weight2 - (first1 <= first2)
    scale = min(max(_MIN_DIGITS - 4 * weight, _scale(a), _scale(b), 0), _MAX_DISPLAY_SCALE)
    return _divided(a, b, scale)


def _divided(a: Decimal, b: Decimal, scale: int) -> Decimal:
    numerator, denominator = a.as_integer_ratio()
    other, below = b.as_integer_ratio()
    top, bottom = abs(numerator) * below * 10**scale, denominator * abs(other)
    digits, rest = divmod(top, bottom)
    digits += 2 * rest >= bottom
    return Decimal(digits if (numerator < 0) == (other < 0) else -digits).scaleb(-scale, EXACT)


def _special_quotient(a: Number, b: Number) -> Number:
    if 2 in {a[0], b[0]} or (a[0] and b[0]):
        return _NAN
    if b[0]:
        return 0, Decimal(0)
    if not b[1]:
        raise _zero()
    return (a[0] if b[1] > 0 else -a[0]), Decimal(0)


def _special_remainder(a: Number, b: Number) -> Number:
    if 2 in {a[0], b[0]}:
        return _NAN
    if a[0]:
        if not b[0] and not b[1]:
            raise _zero()
        return _NAN
    return a


def _remainder(a: Decimal, b: Decimal) -> Decimal:
    if not b:
        raise _zero()
    return EXACT.remainder(a, b)


def _one(*, real: Callable[[float], float], exact: FixedFunction | None = None) -> Maker:
    """Make a function of one number, with a result of its type: `real` of a float, `exact` of a Decimal and a scale."""

    def make(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
        if types[0] in _FLOATS:
            return lambda a: float_number(real(plain_float(a)))
        if types[0] == _NUMERIC and exact is not None:
            return lambda a, *more: a if a[0] else (0, exact(a[1], *more))
        return None

    return make


def _to_scale(rounding: str) -> Callable[..., Decimal]:
    return lambda value, scale=0: _rounded(value, min(max(scale, -2000), 2000), rounding)


def _sign(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    def sign(number: Number) -> Number:
        kind, value = number
        return number if kind == 2 else (0, type(value)(kind or (value > 0) - (value < 0)))

    return sign if types[0] in _FLOATS | {_NUMERIC} else None


def _negative(a: Number) -> Number:
    # The operators of Decimal round to 28 digits.
    return (-a[0] if a[0] in {-1, 1} else a[0]), a[1].copy_negate() if isinstance(a[1], Decimal) else -a[1]


def _absolute(a: int | Number) -> int | Number:
    if isinstance(a, int):
        return abs(a)
    return (1 if a[0] in {-1, 1} else a[0]), a[1].copy_abs() if isinstance(a[1], Decimal) else abs(a[1])


# Floats


def _checked(result: float, *operands: float, may_underflow: bool = False) -> float:
    if math.isinf(result) and not any(map(math.isinf, operands)):
        raise _overflow()
    if may_underflow and result == 0 and all(operands) and not any(map(math.isinf, operands)):
        raise _underflow()
    return result


def _float_quotient(a: float, b: float) -> float:
    if b == 0 and not math.isnan(a):
        raise _zero()
    return a / b if b else math.nan


def _floats(what: str) -> FixedFunction:
    plain: Callable[[float, float], float] = {
        "pl": operator.add,
        "mi": operator.sub,
        "mul": operator.mul,
        "div": _float_quotient,
    }[what]

    def applied(a: Number, b: Number) -> Number:
        x, y = plain_float(a), plain_float(b)
        result = plain(x, y)
        if what == "div" and math.isinf(y):
            return float_number(result)
        # In a division only the dividend matters: 0 divided by something is 0.
        underflow = (x,) if what == "div" else (x, y)
        _checked(result, x, y)
        if what in {"mul", "div"}:
            _checked(result, *underflow, may_underflow=True)
        return float_number(result)

    return applied


def _to_float4(value: int | Number) -> Number:
    number = plain_float(value) if isinstance(value, tuple) else float(value)
    try:
        return float_number(_F4.unpack(_F4.pack(number))[0])
    except OverflowError:
        raise _overflow() from None


def _float_maker(widths: str, what: str) -> Maker:
    plain = _floats(what)
    return fixed((lambda a, b: _to_float4(plain(a, b))) if widths == "4" else plain)


def _computed(function: Callable[..., float], *values: float) -> float:
    try:
        return _checked(function(*values), *values)
    except OverflowError:
        raise _overflow() from None


def _mathematical(function: Callable[[float], float]) -> Callable[[float], float]:
    return lambda value: value if math.isnan(value) else _computed(function, value)


def _exponential(value: float) -> float:
    result = math.exp(value)
    if result == 0 and value != -math.inf:
        raise _underflow()
    return result


def _root(value: float) -> float:
    if value < 0:
        raise PubsubError("cannot take square root of a negative number", sqlstate="2201F")
    return math.sqrt(value)


def _logarithm(function: Callable[[float], float]) -> Callable[[float], float]:
    def applied(value: float) -> float:
        if value == 0:
            raise PubsubError("cannot take logarithm of zero", sqlstate="2201E")
        if value < 0:
            raise PubsubError("cannot take logarithm of a negative number", sqlstate="2201E")
        return function(value)

    return applied


def _power(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    def plain(a: float, b: float) -> float:
        if a == 0 and b < 0:
            raise PubsubError("zero raised to a negative power is undefined", sqlstate="2201F")
        if a < 0 and math.isfinite(b) and b != math.floor(b):
            raise PubsubError(
                "a negative number raised to a non-integer power yields a complex result", sqlstate="2201F"
            )
        result = math.pow(a, b)
        if result == 0 and a != 0 and math.isfinite(a) and math.isfinite(b):
            raise _underflow()
        return result

    def applied(a: Number, b: Number) -> Number:
        x, y = plain_float(a), plain_float(b)
        if math.isnan(x) or math.isnan(y):
            return float_number(1.0 if x == 1 or y == 0 else math.nan)
        return float_number(_computed(plain, x, y))

    return applied if types == (701, 701) else None


def _whole(function: Callable[[float], float]) -> Callable[[float], float]:
    return lambda value: function(value) if math.isfinite(value) else value


# Casts


def _to_integer(width: int) -> Maker:
    def of_number(number: Number) -> int:
        if number[0]:
            what = "NaN" if number[0] == 2 else "infinity"
            raise PubsubError(f"cannot convert {what} to {_INTEGER_NAMES[width]}", sqlstate="0A000")
        return in_range(int(_rounded(number[1], 0)), width)

    def of_float(number: Number) -> int:
        # rint rounds half to even; infinity and NaN are out of range.
        return in_range(round(number[1]) if number[0] == 0 else 1 << 64, width)

    def make(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
        if len(types) != 1:
            return None
        if types[0] in _INTEGERS:
            return lambda value: in_range(value, width)
        if types[0] == _NUMERIC:
            return of_number
        if types[0] in _FLOATS:
            return of_float
        return int if types[0] == 16 else None

    return make


def _to_numeric(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    if types == (_NUMERIC, 23):
        return _with_precision
    if len(types) != 1:
        return None
    if types[0] in _INTEGERS:
        return lambda value: (0, Decimal(value))
    if types[0] in _FLOATS:
        digits = 15 if types[0] == 701 else 6
        return lambda a: (a[0], Decimal(0)) if a[0] else numeric_number(f"{Decimal(f'{plain_float(a):.{digits}g}'):f}")
    return None


def _with_precision(number: Number, modifier: int) -> Number:
    """Apply a type modifier (numeric.c: apply_typmod)."""
    if modifier < 4 or number[0] == 2:
        return number
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, ((modifier - 4 & 0x7FF) ^ 1024) - 1024
    overflow = PubsubError("numeric field overflow", sqlstate="22003")
    if number[0]:
        raise overflow
    value = _rounded(number[1], scale)
    if value and value.adjusted() >= precision - scale:
        raise overflow
    return 0, value


def _to_float8(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    if len(types) != 1:
        return None
    if types[0] in _INTEGERS:
        return lambda value: float_number(float(value))
    return (lambda a: float_number(plain_float(a))) if types[0] in _FLOATS | {_NUMERIC} else None


def _to_float4_from(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    return _to_float4 if len(types) == 1 and types[0] in _FLOATS | _INTEGERS | {_NUMERIC} else None


def _mod(types: tuple[int, ...], settings: Settings) -> FixedFunction | None:
    if types[0] == _NUMERIC:
        return FUNCTIONS["numeric_mod"](types, settings)
    return _arithmetic({20: 8, 21: 2}.get(types[0], 4), "mod") if types[0] in _INTEGERS else None


_CEILING: Final = _one(real=_whole(math.ceil), exact=_to_scale(ROUND_CEILING))
_LOG10: Final = _one(real=_mathematical(_logarithm(math.log10)))
_LN: Final = _one(real=_mathematical(_logarithm(math.log)))
_SQRT: Final = _one(real=_mathematical(_root))
_EXP: Final = _one(real=_mathematical(_exponential))
_ROUND: Final = _one(real=_whole(round), exact=_to_scale(ROUND_HALF_UP))
_TRUNC: Final = _one(real=_whole(math.trunc), exact=_to_scale(ROUND_DOWN))
_FLOOR: Final = _one(real=_whole(math.floor), exact=_to_scale(ROUND_FLOOR))

FUNCTIONS: Final[dict[str, Maker]] = {
    "numeric_add": _numerics(EXACT.add, _special(operator.add)),
    "numeric_sub": _numerics(EXACT.subtract, _special(operator.sub)),
    "numeric_mul": _numerics(_product, _special(operator.mul)),
    "numeric_div": _numerics(quotient, _special_quotient),
    "numeric_mod": _numerics(_remainder, _special_remainder),
    "numeric_uminus": fixed(_negative),
    "numeric_uplus": fixed(lambda a: a),
    "numeric_abs": fixed(_absolute),
    "abs": fixed(_absolute),
    "mod": _mod,
    "gcd": _of_integers(math.gcd),
    "lcm": _of_integers(math.lcm),
    "to_hex": _to_hex,
    "round": _ROUND,
    "dround": _ROUND,
    "trunc": _TRUNC,
    "dtrunc": _TRUNC,
    "floor": _FLOOR,
    "dfloor": _FLOOR,
    "ceil": _CEILING,
    "ceiling": _CEILING,
    "dceil": _CEILING,
    "sign": _sign,
    "sqrt": _SQRT,
    "dsqrt": _SQRT,
    "exp": _EXP,
    "dexp": _EXP,
    "ln": _LN,
    "dlog1": _LN,
    "log": _LOG10,
    "log10": _LOG10,
    "dlog10": _LOG10,
    "power": _power,
    "pow": _power,
    "dpow": _power,
    "pi": fixed(lambda: (0, math.pi)),
    **{
        f"float{widths}{what}": _float_maker(widths, what)
        for widths in ("4", "8", "48", "84")
        for what in ("pl", "mi", "mul", "div")
    },
    **{f"float{width}um": fixed(_negative) for width in "48"},
    **{f"float{width}up": fixed(lambda a: a) for width in "48"},
    **{f"float{width}abs": fixed(_absolute) for width in "48"},
    "int2": _to_integer(2),
    "int4": _to_integer(4),
    "int8": _to_integer(8),
    "numeric": _to_numeric,
    "float4": _to_float4_from,
    "float8": _to_float8,
    "bool": lambda types, _: (lambda a: a != 0) if types == (23,) else None,
    "booland_statefunc": fixed(lambda a, b: a and b),
    "boolnot": fixed(operator.not_),
}
