"""Literals of types that are kept as PostgreSQL's text, in the text that their type's output function gives them.

Only then are they equal to a column's text.  A literal in a form that is not known here is refused.  Follows time
(datetime.c), inet_net_pton.c and inet_net_ntop.c, mac.c, varbit.c, pg_lsn.c and rangetypes.c.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from typing import Any, Final

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.protocol.lsn import Lsn

_TIME: Final = re.compile(r"\s*(\d{1,2}):(\d{2})(?::(\d{2})(?:\.(\d{0,6}))?)?\s*")
_IPV4: Final = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_NETWORK: Final = re.compile(r"([\d.]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*)(?:/(\d{1,3}))?")
_HEX: Final = "([0-9a-fA-F]{2})"
_MACADDR: Final = tuple(
    re.compile(r"\s*" + pattern.replace("h", _HEX) + r"\s*")
    for pattern in (
        "h:h:h:h:h:h",
        "h-h-h-h-h-h",
        "hhh:hhh",
        "hhh-hhh",
        r"hh\.hh\.hh",
        "hh-hh-hh",
        "hhhhhh",
    )
)
_RANGE: Final = re.compile(r"\s*([\[(])\s*([^,\"\[\]()\s]*)\s*,\s*([^,\"\[\]()\s]*)\s*([\])])\s*")
_DATE: Final = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})")
_PLAIN_NUMBER: Final = re.compile(r"0|[1-9]\d*")


def canonical(text: str, type_: str) -> str:
    """Return the text of the value that a literal of the type denotes.

    Raises PubsubError in the words of the type's input function; FeatureNotSupported for a form that is not read here.
    """
    found = _CANONICAL.get(type_)
    return text if found is None else found(text, type_)


def _uuid(text: str, type_: str) -> str:
    try:
        return str(uuid.UUID(text.strip()))
    except ValueError as error:
        raise _invalid(text, type_) from error


def _time(text: str, _: str) -> str:
    match = _TIME.fullmatch(text)
    if match is None:
        raise _unread(text, "time", "HH:MM, HH:MM:SS and HH:MM:SS.ffffff")
    hours, minutes, seconds = int(match[1]), int(match[2]), int(match[3] or 0)
    fraction = (match[4] or "").rstrip("0")
    if seconds == 60:
        raise _unread(text, "time", "seconds below 60")
    if hours > 24 or minutes > 59 or seconds > 60 or (hours == 24 and (minutes or seconds or fraction)):
        raise PubsubError(f'date/time field value out of range: "{text}"', sqlstate="22008")
    return f"{hours:02}:{minutes:02}:{seconds:02}" + (f".{fraction}" if fraction else "")


def _network(text: str, type_: str) -> str:
    # A cidr has no operators of its own: what it is compared with is an inet.
    match = _NETWORK.fullmatch(text)
    if match is None:
        raise _invalid(text, "inet")
    address, bits = match[1], match[2]
    if ":" not in address and not _IPV4.fullmatch(address):
        raise _unread(text, type_, "all four parts of an address")
    try:
        found = ipaddress.ip_address(_without_zeros(address))
    except ValueError as error:
        raise _invalid(text, "inet") from error
    length = found.max_prefixlen if bits is None else int(bits)
    if length > found.max_prefixlen:
        raise _invalid(text, "inet")
    shown = _shown(found)
    return shown if type_ == "inet" and length == found.max_prefixlen else f"{shown}/{length}"


def _without_zeros(address: str) -> str:
    """Python refuses parts with leading zeros, which PostgreSQL reads as decimal."""
    return ".".join(str(int(part)) for part in address.split(".")) if _IPV4.fullmatch(address) else address


def _shown(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Return an address's text; PostgreSQL writes an IPv4 address within an IPv6 one with points."""
    number = int(address)
    if address.version == 6 and number >> 16:
        inner = str(ipaddress.IPv4Address(number & 0xFFFFFFFF))
        if number >> 32 == 0:
            return f"::{inner}"
        if number >> 32 == 0xFFFF:
            return f"::ffff:{inner}"
    return str(address)


def _macaddr(text: str, type_: str) -> str:
    match = next((found for pattern in _MACADDR if (found := pattern.fullmatch(text))), None)
    if match is None:
        raise _unread(text, type_, "two digits for each part")
    return ":".join(match.groups()).lower()


def _bits(text: str, _: str) -> str:
    digits = text[1:] if text[:1] in ("b", "B", "x", "X") else text
    is_hex = text[:1] in ("x", "X")
    wrong = next((one for one in digits if one not in ("0123456789abcdefABCDEF" if is_hex else "01")), None)
    if wrong is not None:
        kind = "hexadecimal" if is_hex else "binary"
        raise PubsubError(f'"{wrong}" is not a valid {kind} digit', sqlstate="22P02")
    return "".join(f"{int(one, 16):04b}" for one in digits) if is_hex else digits


def _lsn(text: str, _: str) -> str:
    return str(Lsn.parse(text))


def _number(text: str, type_: str) -> str:
    if not _PLAIN_NUMBER.fullmatch(text.strip()):
        raise _unread(text, type_, "decimal digits")
    return text.strip()


def _refused(text: str, type_: str) -> str:
    raise FeatureNotSupported(f"a literal of type {type_} is not supported", hint="Compare its text: …::text = '…'.")


def _json(text: str, type_: str) -> str:
    from walsender.rowfilter.functions.json_values import read_document, written

    if "\\u0000" in text:
        raise _unread(text, type_, "text without \\u0000")
    try:
        value = read_document(text.encode()).value
    except ValueError as error:
        raise PubsubError("invalid input syntax for type json", sqlstate="22P02") from error
    return text if type_ == "json" else written(_in_order(value))


def _in_order(value: Any) -> Any:
    """Return a document with its keys as jsonb has them (jsonb_util.c: lengthCompareJsonbStringValue)."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (len(key.encode()), key.encode()))
        return {key: _in_order(value[key]) for key in keys}
    return [_in_order(one) for one in value] if isinstance(value, list) else value


def _range(text: str, type_: str) -> str:
    if text.strip().lower() == "empty":
        return "empty"
    match = _RANGE.fullmatch(text)
    if match is None:
        raise _unread(text, type_, "[a,b), without quotes")
    bound = _day if type_ == "daterange" else _whole(31 if type_ == "int4range" else 63)
    low, high = (bound(one) if one else None for one in (match[2], match[3]))
    if low is not None and high is not None and low > high:
        raise PubsubError("range lower bound must be less than or equal to range upper bound", sqlstate="22000")
    first = None if low is None else low + (match[1] == "(")
    end = None if high is None else high + (match[4] == "]")
    if first is not None and end is not None and first >= end:
        return "empty"
    shown: Callable[[int], str] = str
    if type_ == "daterange":
        shown = lambda day: (date.min + timedelta(day)).isoformat()  # noqa: E731
    return f"{'(' if first is None else '[' + shown(first)},{'' if end is None else shown(end)})"


def _whole(bits: int) -> Callable[[str], int]:
    name = "integer" if bits == 31 else "bigint"

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text):
            raise _invalid(text, name)
        value = int(text)
        if not -(1 << bits) <= value < (1 << bits) - 1:
            # The largest one, too: a bound past it has no canonical form.
            raise PubsubError(f'value "{text}" is out of range for type {name}', sqlstate="22003")
        return value

    return read


def _day(text: str) -> int:
    match = _DATE.fullmatch(text)
    if match is None:
        raise _unread(text, "date", "YYYY-MM-DD")
    try:
        return (date(int(match[1]), int(match[2]), int(match[3])) - date.min).days
    except ValueError as error:
        raise PubsubError(f'date/time field value out of range: "{text}"', sqlstate="22008") from error


def _invalid(text: str, type_: str) -> PubsubError:
    return PubsubError(f'invalid input syntax for type {type_}: "{text}"', sqlstate="22P02")


def _unread(text: str, type_: str, forms: str) -> FeatureNotSupported:
    return FeatureNotSupported(f'the literal "{text}" of type {type_} is not supported', hint=f"Supported: {forms}.")


_CANONICAL: Final[Mapping[str, Callable[[str, str], str]]] = {
    "uuid": _uuid,
    "time without time zone": _time,
    "inet": _network,
    "cidr": _network,
    "macaddr": _macaddr,
    "macaddr8": _refused,
    "money": _refused,
    "bit": _bits,
    "bit varying": _bits,
    "pg_lsn": _lsn,
    "xid": _number,
    "xid8": _number,
    "cid": _number,
    "tid": _refused,
    "json": _json,
    "jsonb": _json,
    "int4range": _range,
    "int8range": _range,
    "daterange": _range,
}
