"""Connection strings with their secrets hidden, for display (fe-connect.c: conninfo_parse, conninfo_uri_parse).

Values that libpq reads as a password or a key are masked; a string that cannot be parsed is masked as a whole.
"""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "********"
SECRETS: Final = frozenset({"password", "sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret"})
"""The parameters that hold a secret."""
_PAIR: Final = re.compile(
    r"\s*(?P<name>[^\s=]+)\s*=\s*(?P<value>'(?:[^'\\]|\\.)*+'|(?:[^\s'\\]|\\.)(?:[^\s\\]|\\.)*+|(?=\s|$))", re.DOTALL
)


def mask_conninfo(conninfo: str) -> str:
    """Replace every secret by asterisks; return only asterisks for a malformed string."""
    if re.match(r"postgres(?:ql)?://", conninfo):
        return _mask_uri(conninfo)
    parts: list[str] = []
    place = 0
    while conninfo[place:].strip():
        match = _PAIR.match(conninfo, place)
        if match is None or (match.end() < len(conninfo) and not conninfo[match.end()].isspace()):
            return MASK
        value = MASK if match["name"] in SECRETS else match["value"] or "''"
        parts.append(f"{match['name']}={value}")
        place = match.end()
    return " ".join(parts)


def _mask_uri(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    # libpq takes everything before an @ for user and password, unless a slash comes first: a question mark belongs to the
    # password, too.  An @ after a slash means a raw slash in the password, which libpq misreads: show nothing then.
    authority, slash, tail = rest.partition("/")
    before, at, hosts = authority.rpartition("@")
    path, question, query = f"{hosts}{slash}{tail}".partition("?")
    if "@" in path or ("@" in query and "?" in authority and not at):
        return f"{scheme}://{MASK}"
    if at:
        user, colon, _ = before.partition(":")
        before = f"{user}:{MASK}" if colon else user
    shown = "&".join(_mask_parameter(part) for part in query.split("&")) if question else ""
    return f"{scheme}://{before}{at}{path}{question}{shown}"


def _mask_parameter(parameter: str) -> str:
    """Mask a secret's value; mask name and value if the name is not plain: it may be a percent-encoded secret's."""
    name, equals, _ = parameter.partition("=")
    plain = re.fullmatch(r"\w+", name) is not None
    return parameter if plain and name not in SECRETS else f"{name if plain else MASK}{equals}{MASK}"
