"""Python's names for the encodings of databases (encnames.c)."""

from __future__ import annotations

from typing import Final

from pubsub.errors import FeatureNotSupported

_ENCODINGS: Final = {
    "UTF8": "utf-8",
    "SQL_ASCII": "latin-1",
    "LATIN1": "latin-1",
    "LATIN2": "iso8859-2",
    "LATIN3": "iso8859-3",
    "LATIN4": "iso8859-4",
    "LATIN5": "iso8859-9",
    "LATIN6": "iso8859-10",
    "LATIN7": "iso8859-13",
    "LATIN8": "iso8859-14",
    "LATIN9": "iso8859-15",
    "LATIN10": "iso8859-16",
    "ISO_8859_5": "iso8859-5",
    "ISO_8859_6": "iso8859-6",
    "ISO_8859_7": "iso8859-7",
    "ISO_8859_8": "iso8859-8",
    "WIN866": "cp866",
    "WIN874": "cp874",
    **{f"WIN{page}": f"cp{page}" for page in range(1250, 1259)},
    "KOI8R": "koi8-r",
    "KOI8U": "koi8-u",
    "EUC_JP": "euc-jp",
    "EUC_JIS_2004": "euc_jis_2004",
    "EUC_KR": "euc-kr",
    "EUC_CN": "gb2312",
}


def python_encoding(server_encoding: str) -> str:
    """Return the codec of a database in `server_encoding` (SQL_ASCII: bytes as they are).

    Raises FeatureNotSupported.
    """
    found = _ENCODINGS.get(server_encoding)
    if found is None:
        raise FeatureNotSupported(f"databases in encoding {server_encoding} are not supported")
    return found


def encoded(name: str, server_encoding: str) -> bytes | None:
    """Encode a name given to this process as the catalogs store it; None if the encoding cannot hold it.

    In SQL_ASCII the result is the bytes that were given.
    """
    if server_encoding == "SQL_ASCII":
        return name.encode("utf-8", "surrogateescape")
    try:
        return name.encode(python_encoding(server_encoding))
    except UnicodeEncodeError:
        return None
