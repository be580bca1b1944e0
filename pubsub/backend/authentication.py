"""Authenticate a client here: SCRAM with the verifiers of a file, or trust on the Unix socket (auth.c, auth-sasl.c)."""

from __future__ import annotations

import pwd
import secrets
from pathlib import Path
from struct import Struct
from typing import Final

from pubsub.backend import messages as m
from pubsub.backend import scram, users
from pubsub.backend.listener import Client, no_entry
from pubsub.errors import ProtocolViolation, PubsubError

OK: Final = (0).to_bytes(4, "big")
_SASL: Final = (10).to_bytes(4, "big")
_SASL_CONTINUE: Final = (11).to_bytes(4, "big")
_SASL_FINAL: Final = (12).to_bytes(4, "big")
_LENGTH: Final = Struct(">i")
_MOCK: Final = secrets.token_bytes(32)


async def by_password(client: Client, path: Path) -> tuple[users.User, scram.Proven]:
    """Let a client prove that it knows its user's password; AuthenticationOk is the caller's to send.

    Raises PubsubError (28P01) if it does not, after the same messages whether or not there is such a user.
    """
    user = users.read(path).get(client.user)
    known = user.verifier if user is not None else None
    exchange = scram.Exchange(known or scram.Verifier.mock(client.user, _MOCK), client.end_point)
    offered = b"".join(name.encode() + b"\0" for name in exchange.mechanisms())
    client.writer.write(m.message(b"R", _SASL + offered + b"\0"))
    answer = await _answer(client)
    mechanism, _, rest = answer.partition(b"\0")
    if len(rest) < _LENGTH.size:
        raise ProtocolViolation("insufficient data left in message")
    (length,) = _LENGTH.unpack_from(rest)
    first = rest[_LENGTH.size :]
    if length < 0:
        # RFC 4422: the client waits for an empty challenge before it says anything.
        client.writer.write(m.message(b"R", _SASL_CONTINUE))
        first = await _answer(client)
    elif length != len(first):
        raise ProtocolViolation("invalid message format")
    client.writer.write(m.message(b"R", _SASL_CONTINUE + exchange.first(mechanism.decode("ascii", "replace"), first)))
    proven = exchange.final(await _answer(client))
    if proven is None or user is None:
        raise PubsubError(f'password authentication failed for user "{client.user}"', sqlstate="28P01")
    client.writer.write(m.message(b"R", _SASL_FINAL + proven[0]))
    return user, proven[1]


async def _answer(client: Client) -> bytes:
    await client.writer.drain()
    kind, body = await m.read_message(client.reader, m.MAX_SASL)
    if kind != b"p":
        raise ProtocolViolation(f"expected SASL response, got message type {kind[0]}")
    return body


def by_trust(client: Client) -> users.User:
    """Return the user of a client on the Unix socket, which only this program's own user can open.

    Raises PubsubError (28000) if another user than that, or root, has opened it all the same.
    """
    import os
    import socket

    sock = client.writer.get_extra_info("socket")
    if not client.is_local or sock is None:
        raise refused(client)
    _, uid, _ = Struct("iII").unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in {os.geteuid(), 0}:
        name = pwd.getpwuid(uid).pw_name
        raise PubsubError(
            f'Peer authentication failed for user "{client.user}"',
            sqlstate="28000",
            detail=f'The socket was opened by "{name}", and may be by the user of the daemon only.',
        )
    return users.User(client.user, None, users.PRIVILEGES)


def refused(client: Client) -> PubsubError:
    """Return the error of a client that nothing lets in (auth.c: ClientAuthentication)."""
    return no_entry(client, "Name a file of users with their SCRAM verifiers: auth_file in [walsender] of pubsub.toml.")
