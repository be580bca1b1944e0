"""Functions of texts and bytea that need no collation, or one that compares bytes (varlena.c, oracle_compat.c)."""

from __future__ import annotations

import base64
import hashlib
import operator
import re
from collections.abc import Callable
from typing import Any, Final

from pubsub.errors import PubsubError
from walsender.rowfilter.functions.values import FixedFunction, Maker, Settings, fixed

_TEXTS: Final = frozenset({19, 25, 1042, 1043})
_BYTEA: Final = 17
_BIT: Final = frozenset({1560, 1562})

_UPPER: Final = bytes.maketrans(bytes(range(97, 123)), bytes(range(65, 91)))
LOWER: Final = bytes.maketrans(bytes(range(65, 91)), bytes(range(97, 123)))


def _characters(function: Callable[..., Any]) -> Maker:
    """Wrap a function of str: decode bytes before it, encode strings after it."""

    def make(types: tuple[int, ...], settings: Settings) -> FixedFunction | None:
        if types[0] not in _TEXTS:
            return None
        encoding = settings.encoding

        def applied(*values: Any) -> Any:
            value = function(*[one.decode(encoding) if isinstance(one, bytes) else one for one in values])
            return value.encode(encoding) if isinstance(value, str) else value

        return applied

    return make


def _in_bytes(function: FixedFunction) -> Maker:
    """Wrap a function that folds only ASCII letters; it is supported only if the collation is bytewise."""
    return lambda types, settings: function if types[0] in _TEXTS and settings.bytewise else None


def _length(types: tuple[int, ...], settings: Settings) -> FixedFunction | None:
    if types[0] == _BYTEA:
        return len
    if types[0] in _BIT:
        return operator.itemgetter(1)
    return _characters(len)(types, settings)


def _octets(factor: int) -> Maker:
    def make(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
        return (lambda value: factor * len(value)) if types[0] == _BYTEA or types[0] in _TEXTS - {1042} else None

    return make


def _substring(types: tuple[int, ...], settings: Settings) -> FixedFunction | None:
    if types[1:2] != (23,):
        return None  # substring by a pattern

    def part(value: Any, start: int, length: int | None = None) -> Any:
        if length is not None and length < 0:
            raise PubsubError("negative substring length not allowed", sqlstate="22011")
        end = len(value) if length is None else start - 1 + length
        return value[max(start - 1, 0) : max(end, 0)]

    return part if types[0] == _BYTEA else _characters(part)(types, settings)


def _right(text: str, count: int) -> str:
    return text[max(len(text) - count, 0) :] if count >= 0 else text[-count:]


def _replace(text: str, old: str, new: str) -> str:
    return text.replace(old, new) if old else text


def _translate(text: str, old: str, new: str) -> str:
    # The first of several equal characters counts.
    table = {ord(one): new[place : place + 1] for place, one in reversed(list(enumerate(old)))}
    return text.translate(table)


def _padding(text: str, length: int, fill: str) -> str:
    missing = length - len(text)
    return (fill * (missing // len(fill) + 1))[:missing] if fill and missing > 0 else ""


def _lpad(text: str, length: int, fill: str = " ") -> str:
    length = max(length, 0)
    return _padding(text, length, fill) + text[:length]


def _rpad(text: str, length: int, fill: str = " ") -> str:
    length = max(length, 0)
    return text[:length] + _padding(text, length, fill)


def _split_part(text: str, separator: str, number: int) -> str:
    if number == 0:
        raise PubsubError("field position must not be zero", sqlstate="22023")
    if not text:
        return ""
    parts = text.split(separator) if separator else [text]
    place = number - 1 if number > 0 else len(parts) + number
    return parts[place] if 0 <= place < len(parts) else ""


def _overlay(text: str, new: str, start: int, length: int | None = None) -> str:
    if start <= 0:
        raise PubsubError("negative substring length not allowed", sqlstate="22011")
    end = start + (len(new) if length is None else length)
    return text[: start - 1] + new + text[max(end - 1, 0) :]


def _ascii(types: tuple[int, ...], settings: Settings) -> FixedFunction | None:
    def first(text: bytes) -> int:
        if not text:
            return 0
        return ord(text.decode()[0]) if settings.utf8 else text[0]

    return first


def _chr(types: tuple[int, ...], settings: Settings) -> FixedFunction | None:
    if not settings.utf8:
        return None

    def character(number: int) -> bytes:
        if number == 0:
            raise PubsubError("null character not permitted", sqlstate="54000")
        if not 0 < number <= 0x10FFFF:
            raise PubsubError(f"requested character too large for encoding: {number}", sqlstate="54000")
        try:
            return chr(number).encode()
        except UnicodeEncodeError:
            raise PubsubError(f"requested character not valid for encoding: {number}", sqlstate="54000") from None

    return character


def _initcap(text: bytes) -> bytes:
    return re.sub(rb"[0-9A-Za-z]+", lambda word: word[0][:1].translate(_UPPER) + word[0][1:].translate(LOWER), text)


def _encode(value: bytes, form: bytes) -> bytes:
    name = form.decode("latin-1").lower()
    if name == "hex":
        return value.hex().encode()
    if name == "base64":
        text = base64.b64encode(value)
        return b"\n".join(text[at : at + 76] for at in range(0, len(text), 76))
    if name == "escape":
        return b"".join(
            b"\\%03o" % byte if byte == 0 or byte > 127 else b"\\\\" if byte == 92 else bytes((byte,)) for byte in value
        )
    raise PubsubError(f'unrecognized encoding: "{name}"', sqlstate="22023")


def _to_varchar(types: tuple[int, ...], settings: Settings) -> FixedFunction | None:
    """Make the length coercion of varchar and bpchar."""
    if len(types) != 3:
        return None

    def cut(text: bytes, modifier: int, explicit: bool) -> bytes:
        decoded = text.decode(settings.encoding)
        length = modifier - 4
        if length < 0 or len(decoded) <= length:
            return text
        if not explicit and decoded[length:].strip(" "):
            kind = "character" if types[0] == 1042 else "character varying"
            raise PubsubError(f"value too long for type {kind}({length})", sqlstate="22001")
        kept = decoded[:length].encode(settings.encoding)
        return kept.rstrip(b" ") if types[0] == 1042 else kept

    return cut


def _to_text(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    return (lambda value: value) if len(types) == 1 and types[0] in {18, 19, 1042} else None


def _strip(strip: Callable[[str, str], str]) -> Maker:
    return _characters(lambda text, which=" ": strip(text, which) if which else text)


_POSITION: Final = _characters(lambda text, wanted: text.find(wanted) + 1)

FUNCTIONS: Final[dict[str, Maker]] = {
    "length": _length,
    "char_length": _characters(len),
    "character_length": _characters(len),
    "octet_length": _octets(1),
    "bit_length": _octets(8),
    "textcat": fixed(operator.add),
    "byteacat": fixed(operator.add),
    "substr": _substring,
    "substring": _substring,
    "left": _characters(lambda text, count: text[:count]),
    "right": _characters(_right),
    "btrim": _strip(str.strip),
    "ltrim": _strip(str.lstrip),
    "rtrim": _strip(str.rstrip),
    "starts_with": fixed(bytes.startswith),
    "strpos": _POSITION,
    "position": _POSITION,
    "replace": _characters(_replace),
    "translate": _characters(_translate),
    "reverse": _characters(lambda text: text[::-1]),
    "repeat": _characters(operator.mul),
    "lpad": _characters(_lpad),
    "rpad": _characters(_rpad),
    "split_part": _characters(_split_part),
    "overlay": _characters(_overlay),
    "ascii": _ascii,
    "chr": _chr,
    "lower": _in_bytes(lambda text: text.translate(LOWER)),
    "upper": _in_bytes(lambda text: text.translate(_UPPER)),
    "initcap": _in_bytes(_initcap),
    "md5": fixed(lambda value: hashlib.md5(value, usedforsecurity=False).hexdigest().encode()),
    "sha256": fixed(lambda value: hashlib.sha256(value).digest()),
    "encode": fixed(_encode),
    "varchar": _to_varchar,
    "bpchar": _to_varchar,
    "text": _to_text,
}
