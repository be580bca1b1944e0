"""Text in a client's encoding (mbutils.c: pg_server_to_any).

A walsender converts all text that it sends, also inside values in binary transfer, to the client_encoding of its
session.  A subscriber asks for its own database's encoding (libpqwalreceiver.c: libpqrcv_connect).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pubsub.errors import PubsubError
from walsender.historic.encodings import python_encoding

Convert = Callable[[bytes], bytes]

_CLIENT_ONLY: Final = {
    "SJIS": "cp932",
    "SHIFT_JIS_2004": "shift_jis_2004",
    "BIG5": "cp950",
    "GBK": "gbk",
    "UHC": "cp949",
    "GB18030": "gb18030",
    "JOHAB": "johab",
}
_ANY: Final = "SQL_ASCII"


def client_codec(encoding: str) -> str:
    """Return Python's name for a client's encoding, as the server names it.  Raises FeatureNotSupported."""
    return _CLIENT_ONLY.get(encoding) or python_encoding(encoding)


def converter(server: str, client: str) -> Convert | None:
    """Return the function that converts text from the database's encoding; None if it stays as it is.

    Both are the server's names.  Text of a database in SQL_ASCII is only checked.  Raises FeatureNotSupported.
    """
    if client in {"", _ANY, server}:
        return None
    target = client_codec(client)
    if server == _ANY:
        return _checked(client, target)
    source = python_encoding(server)

    def convert(text: bytes) -> bytes:
        if text.isascii():
            return text
        try:
            decoded = text.decode(source)
        except UnicodeDecodeError as error:
            raise _invalid(server, error) from error
        try:
            return decoded.encode(target)
        except UnicodeEncodeError as error:
            character = decoded[error.start].encode(source)
            raise PubsubError(
                f'character with byte sequence {_listed(character)} in encoding "{server}" has no equivalent in '
                f'encoding "{client}"',
                sqlstate="22P05",
            ) from error

    return convert


def _checked(client: str, target: str) -> Convert:
    def check(text: bytes) -> bytes:
        try:
            text.decode(target)
        except UnicodeDecodeError as error:
            raise _invalid(client, error) from error
        return text

    return check


def _invalid(encoding: str, error: UnicodeDecodeError) -> PubsubError:
    found = _listed(error.object[error.start : max(error.end, error.start + 1)])
    return PubsubError(f'invalid byte sequence for encoding "{encoding}": {found}', sqlstate="22021")


def _listed(data: bytes) -> str:
    return " ".join(f"0x{byte:02x}" for byte in data)
