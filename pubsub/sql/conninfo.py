"""Connection strings, to show them without their secrets (fe-connect.c: conninfo_parse, conninfo_uri_parse).

What libpq would read as a password or a key never shows; what can not be read at all is not shown at all.
"""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "********"
_SECRETS: Final = frozenset({"password", "sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret"})
_PAIR: Final = re.compile(
    r"\s*(?P<name>[^\s=]+)\s*=\s*(?P<value>'(?:[^'\\]|\\.)*+'|(?:[^\s'\\]|\\.)(?:[^\s\\]|\\.)*+|(?=\s|$))", re.DOTALL
)


def mask_conninfo(conninfo: str) -> str:
    """The string with every secret replaced by asterisks; asterisks alone when it is malformed."""
    if re.match(r"postgres(?:ql)?://", conninfo):
        return _mask_uri(conninfo)
    parts: list[str] = []
    place = 0
    while conninfo[place:].strip():
        match = _PAIR.match(conninfo, place)
        if match is None or (match.end() < len(conninfo) and not conninfo[match.end()].isspace()):
            return MASK
        value = MASK if match["name"] in _SECRETS else match["value"] or "''"
        parts.append(f"{match['name']}={value}")
        place = match.end()
    return " ".join(parts)


def _mask_uri(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    # A password may hold any character but those that end the authority, so the last @ before a slash or a
    # question mark counts; a raw slash in it makes libpq misread the string: then nothing of it is shown.
    authority = re.match(r"[^/?]*", rest)
    assert authority is not None
    before, at, hosts = authority[0].rpartition("@")
    tail = rest[authority.end() :]
    path, question, query = tail.partition("?")
    if "@" in path:
        return f"{scheme}://{MASK}"
    if at:
        user, colon, _ = before.partition(":")
        before = f"{user}:{MASK}" if colon else user
    shown = "&".join(_mask_parameter(part) for part in query.split("&")) if question else ""
    return f"{scheme}://{before}{at}{hosts}{path}{question}{shown}"


def _mask_parameter(parameter: str) -> str:
    """A parameter whose name is not plain may be a secret's name in percent signs."""
    name, equals, _ = parameter.partition("=")
    plain = re.fullmatch(r"\w+", name) is not None
    return parameter if plain and name not in _SECRETS else f"{name if plain else MASK}{equals}{MASK}"
