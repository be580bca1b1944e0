"""Python's names for the encodings of databases (encnames.c)."""

from __future__ import annotations

from typing import Final

from pubsub.errors import FeatureNotSupported

_ENCODINGS: Final = {
    "UTF8": "utf-8",
    "SQL_ASCII": "latin-1",
    "LATIN1": "latin-1",
    "LATIN2": "iso8859-2",
    "LATIN5": "iso8859-9",
    "LATIN9": "iso8859-15",
    "WIN1250": "cp1250",
    "WIN1251": "cp1251",
    "WIN1252": "cp1252",
    "KOI8R": "koi8-r",
    "KOI8U": "koi8-u",
    "EUC_JP": "euc-jp",
    "EUC_KR": "euc-kr",
    "EUC_CN": "gb2312",
}


def python_encoding(server_encoding: str) -> str:
    """The codec of a database in `server_encoding` (SQL_ASCII: bytes as they are).  Raises FeatureNotSupported."""
    found = _ENCODINGS.get(server_encoding)
    if found is None:
        raise FeatureNotSupported(f"databases in encoding {server_encoding} are not supported")
    return found
