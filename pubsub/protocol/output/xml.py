"""xml: the text as it was entered, except for its declaration.

Follows xml.c (xml_out_internal, xml_send, parse_xml_decl, print_xml_decl).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_DECLARATION: Final = re.compile(
    rb"""<\?xml[ \t\r\n]+version[ \t\r\n]*=[ \t\r\n]*(?:'([^']*)'|"([^"]*)")"""
    rb"""(?:[ \t\r\n]+encoding[ \t\r\n]*=[ \t\r\n]*(?:'[^']*'|"[^"]*"))?"""
    rb"""(?:[ \t\r\n]+standalone[ \t\r\n]*=[ \t\r\n]*(?:'(yes|no)'|"(yes|no)"))?[ \t\r\n]*\?>"""
)
_BLANKS: Final = b" \t\r\n"


def xml_out(value: bytes) -> bytes:
    """Write without the declaration's encoding, and without the declaration if nothing else is in it."""
    return _written(value, b"")


def xml_send(encoding: str) -> Callable[[bytes], bytes]:
    """Return the send function for an encoding; the declaration names the encoding unless it is UTF8 or SQL_ASCII."""
    encoding_attribute = b"" if encoding in {"UTF8", "SQL_ASCII"} else b' encoding="%s"' % encoding.encode()
    return lambda value: _written(value, encoding_attribute)


def _written(value: bytes, encoding: bytes) -> bytes:
    version, standalone, rest = b"1.0", b"", value
    if value[:5] == b"<?xml" and value[5:6] in _BLANKS:
        found = _DECLARATION.match(value)
        if found is None or not found[0].isascii():
            return value
        version = found[1] or found[2] or b""
        standalone = found[3] or found[4] or b""
        rest = value[found.end() :]
    if version == b"1.0" and not standalone and not encoding:
        return rest.removeprefix(b"\n")
    if standalone:
        standalone = b' standalone="%s"' % standalone
    return b'<?xml version="%s"%s%s?>%s' % (version, encoding, standalone, rest)
