"""Text, bytes, bits, addresses, uuids, jsonb and the text search types.

Follows varlena.c, bytea.c, varbit.c, network.c (network_out, network_send), inet_net_ntop.c, mac.c, mac8.c, uuid.c,
json.c (escape_json), jsonb.c (JsonbToCString), jsonb_util.c, tsvector.c, tsquery.c, xid8funcs.c, pg_lsn.c.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from struct import Struct
from typing import Final

from pubsub.errors import DataCorrupted, FeatureNotSupported
from pubsub.protocol.output.numbers import numeric_out

_I4: Final = Struct("<i")
_U4: Final = Struct("<I")
_U8: Final = Struct("<Q")
_NOT_PRINTABLE: Final = re.compile(rb"[^ -\[\]-~]")
"""Matches the backslash too."""


def as_is(value: bytes) -> bytes:
    return value


def char_out(value: bytes) -> bytes:
    """Write "char": one byte; nothing for 0, an octal escape for non-ASCII bytes (char.c: charout)."""
    if value == b"\0":
        return b""
    return b"\\%03o" % value[0] if value[0] >= 0x80 else value


def name_out(value: bytes) -> bytes:
    end = value.find(b"\0")
    return value if end < 0 else value[:end]


def bytea_out(value: bytes) -> bytes:
    return b"\\x" + value.hex().encode()


def bytea_escape_out(value: bytes) -> bytes:
    """Write bytea with bytea_output escape."""
    return _NOT_PRINTABLE.sub(_octal, value)


def _octal(match: re.Match[bytes]) -> bytes:
    byte = match[0]
    return b"\\\\" if byte == b"\\" else b"\\%03o" % byte[0]


def uuid_out(value: bytes) -> bytes:
    text = value.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}".encode()


def bit_out(value: bytes) -> bytes:
    (count,) = _I4.unpack_from(value)
    if not 0 <= count <= (len(value) - 4) * 8:
        raise DataCorrupted("a bit string is too short")
    if not count:
        return b""
    return format(int.from_bytes(value[4:], "big"), f"0{(len(value) - 4) * 8}b")[:count].encode()


def bit_send(value: bytes) -> bytes:
    return value[3::-1] + value[4:]


def macaddr_out(value: bytes) -> bytes:
    return value.hex(":").encode()


def pg_lsn_out(value: bytes) -> bytes:
    (lsn,) = _U8.unpack(value)
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}".encode()


def pg_lsn_out_19(value: bytes) -> bytes:
    """Write the low half with all of its digits, as 19 and later do."""
    (lsn,) = _U8.unpack(value)
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:08X}".encode()


def tid_parts(value: bytes) -> tuple[int, int]:
    high, low, offset = struct.unpack("<HHH", value)
    return high << 16 | low, offset


def tid_out(value: bytes) -> bytes:
    return b"(%d,%d)" % tid_parts(value)


def tid_send(value: bytes) -> bytes:
    return struct.pack(">IH", *tid_parts(value))


def snapshot_out(value: bytes) -> bytes:
    (count,) = _U4.unpack_from(value)
    xmin, xmax, *running = struct.unpack_from(f"<{count + 2}Q", value, 4)
    return f"{xmin}:{xmax}:{','.join(map(str, running))}".encode()


def snapshot_send(value: bytes) -> bytes:
    (count,) = _U4.unpack_from(value)
    return struct.pack(f">I{count + 2}Q", count, *struct.unpack_from(f"<{count + 2}Q", value, 4))


def inet_out(value: bytes) -> bytes:
    return _network(value, cidr=False)


def cidr_out(value: bytes) -> bytes:
    return _network(value, cidr=True)


def _network(value: bytes, *, cidr: bool) -> bytes:
    family, bits = value[0], value[1]
    if family == 2:
        text = ".".join(str(byte) for byte in value[2:6])
        full = 32
    else:
        text = _ipv6(value[2:18])
        full = 128
    return f"{text}/{bits}".encode() if cidr or bits != full else text.encode()


def _ipv6(address: bytes) -> str:
    words = struct.unpack(">8H", address)
    best = (0, 0)
    start = 0
    while start < 8:
        if words[start]:
            start += 1
            continue
        end = start
        while end < 8 and not words[end]:
            end += 1
        if end - start > best[1] and end - start >= 2:
            best = (start, end - start)
        start = end
    first, length = best
    # An embedded IPv4 address is written as such, but not after seven zero words: inet_net_ntop.c skips word 6 as part
    # of the zeros before it tests for one.
    if first == 0 and (length == 6 or (length == 5 and words[5] == 0xFFFF)):
        dotted = ".".join(str(byte) for byte in address[12:])
        head = "::" + "".join(f"{word:x}:" for word in words[length:6])
        return head + dotted
    if not length:
        return ":".join(f"{word:x}" for word in words)
    return ":".join(f"{w:x}" for w in words[:first]) + "::" + ":".join(f"{w:x}" for w in words[first + length :])


def inet_send(value: bytes) -> bytes:
    return _network_send(value, 0)


def cidr_send(value: bytes) -> bytes:
    return _network_send(value, 1)


def _network_send(value: bytes, is_cidr: int) -> bytes:
    size = 4 if value[0] == 2 else 16
    return bytes((value[0], value[1], is_cidr, size)) + value[2 : 2 + size]


# jsonb

_JB_FSCALAR: Final = 0x10000000
_JB_FOBJECT: Final = 0x20000000
_JB_CMASK: Final = 0x0FFFFFFF
_JE_OFFLENMASK: Final = 0x0FFFFFFF
_JE_HAS_OFF: Final = 0x80000000
_JE_TYPE: Final = 0x70000000
_JE_STRING: Final = 0x00000000
_JE_NUMERIC: Final = 0x10000000
_JE_FALSE: Final = 0x20000000
_JE_TRUE: Final = 0x30000000
_JE_NULL: Final = 0x40000000
_JE_CONTAINER: Final = 0x50000000

_ESCAPES: Final = {
    **{i: rf"\u{i:04x}".encode() for i in range(32)},
    8: rb"\b",
    9: rb"\t",
    10: rb"\n",
    12: rb"\f",
    13: rb"\r",
    34: rb"\"",
    92: rb"\\",
}


def escape_json(text: bytes) -> bytes:
    if not any(byte < 32 or byte in {34, 92} for byte in text):
        return b'"' + text + b'"'
    return b'"' + b"".join([_ESCAPES.get(byte) or bytes((byte,)) for byte in text]) + b'"'


def jsonb_out(value: bytes) -> bytes:
    try:
        parts: list[bytes] = []
        _container(value, 0, parts, 0)
        return b"".join(parts)
    except (struct.error, IndexError) as error:
        raise DataCorrupted("a jsonb value is too short") from error


def jsonb_send(value: bytes) -> bytes:
    return b"\1" + jsonb_out(value)


def _container(data: bytes, at: int, out: list[bytes], depth: int) -> None:
    if depth > 6000:
        raise DataCorrupted("a jsonb value is nested too deeply")
    (header,) = _U4.unpack_from(data, at)
    count = header & _JB_CMASK
    is_object = bool(header & _JB_FOBJECT)
    entries = struct.unpack_from(f"<{count * 2 if is_object else count}I", data, at + 4)
    base = at + 4 + 4 * len(entries)
    ends: list[int] = []
    offset = 0
    for entry in entries:
        offset = entry & _JE_OFFLENMASK if entry & _JE_HAS_OFF else offset + (entry & _JE_OFFLENMASK)
        ends.append(offset)
    starts = [0, *ends[:-1]]
    scalar = bool(header & _JB_FSCALAR)
    if not scalar:
        out.append(b"{" if is_object else b"[")
    for index in range(count):
        if index:
            out.append(b", ")
        if is_object:
            out.append(escape_json(data[base + starts[index] : base + ends[index]]))
            out.append(b": ")
            _element(data, base, starts[count + index], ends[count + index], entries[count + index], out, depth)
        else:
            _element(data, base, starts[index], ends[index], entries[index], out, depth)
    if not scalar:
        out.append(b"}" if is_object else b"]")


def _element(data: bytes, base: int, start: int, end: int, entry: int, out: list[bytes], depth: int) -> None:
    kind = entry & _JE_TYPE
    if kind == _JE_STRING:
        out.append(escape_json(data[base + start : base + end]))
    elif kind == _JE_NULL:
        out.append(b"null")
    elif kind == _JE_TRUE:
        out.append(b"true")
    elif kind == _JE_FALSE:
        out.append(b"false")
    elif kind == _JE_NUMERIC:
        # Alignment counts from the container's start, itself aligned.  The varlena has a header of 4 bytes or of 1.
        position = base + ((start + 3) & ~3)
        first = data[position]
        if first & 1:
            out.append(numeric_out(data[position + 1 : position + (first >> 1)]))
        else:
            (header,) = _U4.unpack_from(data, position)
            out.append(numeric_out(data[position + 4 : position + (header >> 2)]))
    elif kind == _JE_CONTAINER:
        _container(data, base + ((start + 3) & ~3), out, depth + 1)
    else:
        raise DataCorrupted("a jsonb value has an element of an unknown kind")


# Text search

_WEIGHTS: Final = "DCBA"


def tsvector_parts(value: bytes) -> list[tuple[bytes, list[int]]]:
    """Return each lexeme with its positions, whose two highest bits are the weight."""
    (count,) = _I4.unpack_from(value)
    entries = struct.unpack_from(f"<{count}I", value, 4)
    base = 4 + 4 * count
    found = []
    for entry in entries:
        length, position = (entry >> 1) & 0x7FF, entry >> 12
        start = base + position
        lexeme = value[start : start + length]
        places: list[int] = []
        if entry & 1:
            # Aligned to two bytes from the start of the strings.
            at = base + ((position + length + 1) & ~1)
            (number,) = struct.unpack_from("<H", value, at)
            places = list(struct.unpack_from(f"<{number}H", value, at + 2))
        found.append((lexeme, places))
    return found


def tsvector_out(value: bytes) -> bytes:
    return tsvector_text(tsvector_parts(value))


def tsvector_text(lexemes: Sequence[tuple[bytes, Sequence[int]]]) -> bytes:
    """Return the text of lexemes with their positions, in the form of `tsvector_parts`."""
    parts = []
    for lexeme, places in lexemes:
        text = b"'" + lexeme.replace(b"\\", b"\\\\").replace(b"'", b"''") + b"'"
        if places:
            text += (
                b":"
                + ",".join(
                    f"{place & 0x3FFF}{_WEIGHTS[place >> 14] if place >> 14 else ''}" for place in places
                ).encode()
            )
        parts.append(text)
    return b" ".join(parts)


def tsvector_send(value: bytes) -> bytes:
    parts = [struct.pack(">I", len(tsvector_parts(value)))]
    for lexeme, places in tsvector_parts(value):
        parts.append(lexeme + b"\0" + struct.pack(f">H{len(places)}H", len(places), *places))
    return b"".join(parts)


_QI_VAL: Final = 1
_OP_NOT: Final = 1
_OP_AND: Final = 2
_OP_OR: Final = 3
_OP_PHRASE: Final = 4
_PRIORITY: Final = {_OP_OR: 1, _OP_AND: 2, _OP_PHRASE: 3, _OP_NOT: 4}
_QUERY_ITEM: Final = 12


def tsquery_out(value: bytes) -> bytes:
    (count,) = _I4.unpack_from(value)
    if not count:
        return b""
    return _query(value, 0, count, 0, right_of_phrase=False)[0]


def _query(value: bytes, item: int, count: int, parent: int, *, right_of_phrase: bool) -> tuple[bytes, int]:
    """Return the item's text, and the number of the item after it (tsquery.c: infix)."""
    if item >= count:
        raise DataCorrupted("a tsquery ends within")
    at = 4 + item * _QUERY_ITEM
    operands = 4 + count * _QUERY_ITEM
    if value[at] == _QI_VAL:
        weight, prefix = value[at + 1], value[at + 2]
        (packed,) = _U4.unpack_from(value, at + 8)
        length, distance = packed & 0xFFF, packed >> 12
        lexeme = value[operands + distance : operands + distance + length]
        text = b"'" + lexeme.replace(b"\\", b"\\\\").replace(b"'", b"''") + b"'"
        if weight or prefix:
            text += b":" + (b"*" if prefix else b"")
            for bit, letter in ((8, b"A"), (4, b"B"), (2, b"C"), (1, b"D")):
                if weight & bit:
                    text += letter
        return text, item + 1
    operator = value[at + 1]
    (distance,) = struct.unpack_from("<h", value, at + 2)
    priority = _PRIORITY.get(operator, 0)
    if operator == _OP_NOT:
        inner, after = _query(value, item + 1, count, priority, right_of_phrase=False)
        text = b"!" + inner
        return (b"( " + text + b" )" if priority < parent else text), after
    # The right operand comes first.
    right, after = _query(value, item + 1, count, priority, right_of_phrase=operator == _OP_PHRASE)
    left, after = _query(value, after, count, priority, right_of_phrase=False)
    if operator == _OP_PHRASE:
        sign = b" <-> " if distance == 1 else f" <{distance}> ".encode()
    elif operator == _OP_AND:
        sign = b" & "
    elif operator == _OP_OR:
        sign = b" | "
    else:
        raise FeatureNotSupported(f"operator {operator} of a tsquery is not known")
    text = left + sign + right
    if priority < parent or (operator == _OP_PHRASE and right_of_phrase):
        text = b"( " + text + b" )"
    return text, after


def tsquery_send(value: bytes) -> bytes:
    (count,) = _I4.unpack_from(value)
    operands = 4 + count * _QUERY_ITEM
    parts = [struct.pack(">I", count)]
    for item in range(count):
        at = 4 + item * _QUERY_ITEM
        if value[at] == _QI_VAL:
            (packed,) = _U4.unpack_from(value, at + 8)
            length, distance = packed & 0xFFF, packed >> 12
            lexeme = value[operands + distance : operands + distance + length]
            parts.append(bytes((_QI_VAL, value[at + 1], value[at + 2])) + lexeme + b"\0")
        else:
            parts.append(value[at : at + 2])
            if value[at + 1] == _OP_PHRASE:
                parts.append(value[at + 3 : at + 1 : -1])
    return b"".join(parts)
