"""Connection strings, parsed by libpq itself, so that a string means the same here as in every other client.

This module adds two things: host names are looked up without blocking the event loop, and error messages never show a
secret from the string.

Follows fe-connect.c (conninfo_parse, connectOptions2) and libpqwalreceiver.c (libpqrcv_check_conninfo).
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import psycopg
from psycopg import pq

from pubsub.errors import ConnectionFailure, PubsubError
from pubsub.sql.conninfo import SECRETS

MASK: Final = "********"
"""Replaces a secret in a message, as in pg_stat_wal_receiver.conninfo."""

_QUOTED: Final = re.compile(r'"([^"]+)"')
_PLAIN_VALUE: Final = re.compile(r"[A-Za-z0-9_./:@,+*-]+")
_USER_INFO: Final = re.compile(r"://[^/]*@")


@dataclass(frozen=True, slots=True)
class Host:
    """One place to connect to.  `address` is numeric, or "" where libpq uses `name` as it is (a socket's directory)."""

    name: str
    address: str
    port: str


def parse_conninfo(conninfo: str) -> dict[str, str]:
    """Parse a connection string or URI with libpq; defaults are not filled in.

    Names of databases and roles are bytes of any encoding: what is no UTF-8 stays as it is (surrogateescape).  Raises
    PubsubError (42601) in CREATE SUBSCRIPTION's words.
    """
    if "\0" in conninfo:
        raise PubsubError("invalid connection string syntax: it holds a null character", sqlstate="42601")
    try:
        options = pq.Conninfo.parse(conninfo.encode("utf-8", "surrogateescape"))
    except psycopg.Error as error:
        # The cause quotes pieces of the string, and may quote half a password.
        text = _without_secrets(str(error).strip(), conninfo)
        raise PubsubError(f"invalid connection string syntax: {text}", sqlstate="42601") from None
    return {
        option.keyword.decode(): option.val.decode("utf-8", "surrogateescape")
        for option in options
        if option.val is not None
    }


def format_conninfo(parameters: Mapping[str, str]) -> str:
    """Format the parameters as one connection string: parse_conninfo's inverse."""
    return " ".join(f"{keyword}={_quote(value)}" for keyword, value in parameters.items())


def without_secrets(conninfo: str) -> str:
    """Return the connection string without passwords and keys; as it is if it has none.  Raises PubsubError (42601)."""
    parameters = parse_conninfo(conninfo)
    kept = {name: value for name, value in parameters.items() if name not in SECRETS}
    return conninfo if kept == parameters else format_conninfo(kept)


@cache
def secret_keywords() -> frozenset[str]:
    """Return the parameters that libpq says not to show."""
    return frozenset(o.keyword.decode() for o in pq.Conninfo.get_defaults() if o.dispchar == b"*")


async def resolve_hosts(parameters: Mapping[str, str]) -> list[Host]:
    """Look up the hosts that `parameters` name: one Host for each address of each name; [] leaves the lookup to libpq.

    libpq would block the event loop during a lookup.  A name that cannot be resolved is left out as long as another
    can.  Raises ConnectionFailure in libpq's words if none can.
    """
    names = parameters.get("host") or os.environ.get("PGHOST", "")
    addressed = parameters.get("hostaddr") or os.environ.get("PGHOSTADDR")
    by_service = "service" in parameters or "PGSERVICE" in os.environ or "PGSERVICEFILE" in os.environ
    if not names or addressed or (by_service and "host" not in parameters):
        return []
    hosts = names.split(",")
    ports = (parameters.get("port") or os.environ.get("PGPORT", "")).split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) != len(hosts):
        return []  # libpq says what is wrong
    found: list[Host] = []
    failed: list[str] = []
    for name, port in zip(hosts, ports, strict=True):
        try:
            found += [Host(name, address, port) for address in await _addresses(name)]
        except OSError as error:
            failed.append(f'could not translate host name "{name}" to address: {error.strerror}')
    if not found:
        raise ConnectionFailure(failed[0], detail="\n".join(failed[1:]) or None)
    return found


def with_hosts(parameters: Mapping[str, str], hosts: Sequence[Host]) -> dict[str, str]:
    """Return `parameters` with exactly these hosts to try, in order."""
    if not hosts:
        return dict(parameters)
    return {
        **parameters,
        "host": ",".join(host.name for host in hosts),
        "hostaddr": ",".join(host.address for host in hosts),
        "port": ",".join(host.port for host in hosts),
    }


def split_report(text: str) -> tuple[str, str | None, str | None]:
    """Split libpq's error text into (message, detail, hint): first line, other lines, and the advice in those."""
    message = ""
    detail: list[str] = []
    hint: list[str] = []
    for line in text.strip().splitlines():
        stripped = line.strip()
        if not message:
            message = stripped
        elif stripped.startswith("DETAIL:"):
            detail.append(stripped.removeprefix("DETAIL:").strip())
        elif stripped.startswith("HINT:"):
            hint.append(stripped.removeprefix("HINT:").strip())
        elif line.startswith("\t"):
            hint.append(stripped)
        elif stripped and stripped != message and stripped not in detail:
            detail.append(stripped)  # the other hosts; sslmode=prefer reports the same twice
    return message, "\n".join(detail) or None, " ".join(dict.fromkeys(hint)) or None


async def _addresses(name: str) -> list[str]:
    if not name or name.startswith(("/", "@")):
        return [""]
    try:
        return [str(ipaddress.ip_address(name))]
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def _quote(value: str) -> str:
    if _PLAIN_VALUE.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _without_secrets(text: str, conninfo: str) -> str:
    """Mask the quoted pieces of an error that may hold a secret: those that end, in `conninfo`, after the first one begins."""
    starts = [conninfo.find(keyword) for keyword in secret_keywords()]
    if user_info := _USER_INFO.search(conninfo):
        starts.append(user_info.start())
    start = min((at for at in starts if at >= 0), default=None)
    if start is None:
        return text

    def masked(match: re.Match[str]) -> str:
        if match[1] == "=":  # from libpq's message, not from the string
            return match[0]
        at = conninfo.rfind(match[1])
        return f'"{MASK}"' if at >= 0 and at + len(match[1]) > start else match[0]

    # The message may quote the whole string, with its quotation marks.
    return _QUOTED.sub(masked, text.replace(conninfo, MASK))
