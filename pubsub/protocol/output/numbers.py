"""Numbers: integers, floats, numeric, money.

Each function takes a value's bytes as stored in a tuple (little-endian, no varlena header) and returns the text of the
server's output function, or the bytes of its send function.  Follows int.c, int8.c, float.c (float8out with
extra_float_digits > 0), ryu_common.h, numeric.c.
"""

from __future__ import annotations

import math
import struct
from struct import Struct
from typing import Final

import numpy as np

from pubsub.errors import DataCorrupted

_I2: Final = Struct("<h").unpack
_I4: Final = Struct("<i").unpack
_I8: Final = Struct("<q").unpack
_U4: Final = Struct("<I").unpack
_U8: Final = Struct("<Q").unpack
_F4: Final = Struct("<f")
_F8: Final = Struct("<d")


def int2out(value: bytes) -> bytes:
    return b"%d" % _I2(value)[0]


def int4out(value: bytes) -> bytes:
    return b"%d" % _I4(value)[0]


def int8out(value: bytes) -> bytes:
    return b"%d" % _I8(value)[0]


def oidout(value: bytes) -> bytes:
    return b"%d" % _U4(value)[0]


def xid8out(value: bytes) -> bytes:
    return b"%d" % _U8(value)[0]


def boolout(value: bytes) -> bytes:
    return b"f" if value == b"\0" else b"t"


def reversed_bytes(value: bytes) -> bytes:
    """Send a number of fixed length: the same bytes, most significant first."""
    return value[::-1]


def float8out(value: bytes) -> bytes:
    """Write the shortest digits that read back as the value, but never a number exactly halfway between two floats."""
    (number,) = _F8.unpack(value)
    if number != number:
        return b"NaN"
    if number in {math.inf, -math.inf}:
        return b"Infinity" if number > 0 else b"-Infinity"
    if number == 0:
        return b"-0" if math.copysign(1.0, number) < 0 else b"0"
    digits, exponent = _digits(repr(abs(number)))
    if abs(number) >= 1 << 53 and _is_midpoint(int(digits), exponent - len(digits) + 1, number, 53):
        for count in range(len(digits), 17):
            digits, exponent = _digits(f"{abs(number):.{count}e}")
            same = float(f"{digits[0]}.{digits[1:] or '0'}e{exponent}") == abs(number)
            if same and not _is_midpoint(int(digits), exponent - len(digits) + 1, number, 53):
                break
    return _layout(digits, exponent, number < 0, 15)


def float4out(value: bytes) -> bytes:
    """Write like float8out, for single precision."""
    (number,) = _F4.unpack(value)
    if number != number:
        return b"NaN"
    if number in {math.inf, -math.inf}:
        return b"Infinity" if number > 0 else b"-Infinity"
    if number == 0:
        return b"-0" if math.copysign(1.0, number) < 0 else b"0"
    single = np.float32(abs(number))
    digits, exponent = _digits(np.format_float_scientific(single, unique=True, trim="-"))
    if abs(number) >= 1 << 24 and _is_midpoint(int(digits), exponent - len(digits) + 1, number, 24):
        for count in range(len(digits), 9):
            digits, exponent = _digits(f"{abs(number):.{count}e}")
            text = f"{digits[0]}.{digits[1:] or '0'}e{exponent}"
            if np.float32(text) == single and not _is_midpoint(int(digits), exponent - len(digits) + 1, number, 24):
                break
    return _layout(digits, exponent, number < 0, 6)


def _digits(text: str) -> tuple[str, int]:
    """Return a positive number's significant digits, and the exponent of the first."""
    mantissa, _, power = text.partition("e")
    exponent = int(power) if power else 0
    whole, _, fraction = mantissa.partition(".")
    digits = whole + fraction
    exponent += len(whole) - 1
    stripped = digits.lstrip("0")
    exponent -= len(digits) - len(stripped)
    return stripped.rstrip("0") or "0", exponent


def _is_midpoint(digits: int, power: int, number: float, bits: int) -> bool:
    """Whether digits * 10^power, at least 2^bits, is halfway from `number` to an adjacent float of `bits` bits."""
    if power < 0:
        return False
    value = digits * 10**power
    exact = int(abs(number))
    if value == exact:
        return False
    spacing = 1 << (exact.bit_length() - bits)
    return abs(value - exact) * 2 == spacing or (
        exact & (exact - 1) == 0 and value < exact and (exact - value) * 4 == spacing
    )


def _layout(digits: str, exponent: int, negative: bool, fixed_below: int) -> bytes:
    """Write in fixed notation for exponents from -4 to below `fixed_below`, else in scientific (d2s.c: to_chars)."""
    sign = "-" if negative else ""
    if -4 <= exponent < fixed_below:
        if exponent < 0:
            text = "0." + "0" * (-exponent - 1) + digits
        elif len(digits) <= exponent + 1:
            text = digits + "0" * (exponent + 1 - len(digits))
        else:
            text = digits[: exponent + 1] + "." + digits[exponent + 1 :]
    else:
        text = digits[0] + ("." + digits[1:] if len(digits) > 1 else "")
        text += f"e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
    return (sign + text).encode()


# numeric

_NUMERIC_SIGN_MASK: Final = 0xC000
_NUMERIC_NEG: Final = 0x4000
_NUMERIC_SHORT: Final = 0x8000
_NUMERIC_SPECIAL: Final = 0xC000
_NUMERIC_NAN: Final = 0xC000
_NUMERIC_PINF: Final = 0xD000
_NUMERIC_NINF: Final = 0xF000


def _numeric_parts(value: bytes) -> tuple[bool, int, int, tuple[int, ...]]:
    """Return whether it is negative, the weight, display scale and base-10000 digits (numeric.c: NumericChoice)."""
    try:
        (header,) = struct.unpack_from("<H", value)
        if header & _NUMERIC_SIGN_MASK == _NUMERIC_SHORT:
            negative = bool(header & 0x2000)
            scale = (header & 0x1F80) >> 7
            weight = header & 0x3F
            if header & 0x40:
                weight -= 0x40
            start = 2
        else:
            negative = header & _NUMERIC_SIGN_MASK == _NUMERIC_NEG
            scale = header & 0x3FFF
            (weight,) = struct.unpack_from("<h", value, 2)
            start = 4
        count = (len(value) - start) // 2
        return negative, weight, scale, struct.unpack_from(f"<{count}H", value, start)
    except struct.error as error:
        raise DataCorrupted("a numeric is too short") from error


def numeric_out(value: bytes) -> bytes:
    if len(value) >= 2 and value[1] & 0xC0 == 0xC0:
        special = int.from_bytes(value[:2], "little") & 0xF000
        return b"NaN" if special == _NUMERIC_NAN else b"Infinity" if special == _NUMERIC_PINF else b"-Infinity"
    negative, weight, scale, digits = _numeric_parts(value)
    if weight < 0:
        whole = "0"
    else:
        groups = digits[: weight + 1] + (0,) * (weight + 1 - len(digits))
        whole = "".join([f"{group:04d}" for group in groups]).lstrip("0") or "0"
    text = ("-" if negative else "") + whole
    if scale > 0:
        first = weight + 1
        needed = (scale + 3) // 4
        fraction = "".join(
            [f"{digits[i]:04d}" if 0 <= i < len(digits) else "0000" for i in range(first, first + needed)]
        )
        text += "." + fraction[:scale]
    return text.encode()


def numeric_send(value: bytes) -> bytes:
    if len(value) >= 2 and value[1] & 0xC0 == 0xC0:
        special = int.from_bytes(value[:2], "little") & 0xF000
        # PostgreSQL reads an infinity's flags as a display scale too (numeric.c: init_var_from_num).
        return struct.pack(">HhHH", 0, 0, special, (special & 0x1F80) >> 7)
    negative, weight, scale, digits = _numeric_parts(value)
    sign = _NUMERIC_NEG if negative else 0
    return struct.pack(f">HhHH{len(digits)}H", len(digits), weight, sign, scale, *digits)


def dollars_out(value: bytes) -> bytes:
    """Write money for lc_monetary C or that of the United States (cash.c: cash_out)."""
    cents = _I8(value)[0]
    sign = b"-" if cents < 0 else b""
    return sign + f"${abs(cents) // 100:,}.{abs(cents) % 100:02d}".encode()
