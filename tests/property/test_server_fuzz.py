"""What a peer may send to a server of ours, at random: startup messages, SASL, queries, copy-both; only protocol errors come of it.

A real listener takes the bytes, whole and cut, on a loopback socket; whatever they are, it answers with a FATAL or an ERROR of a
SQLSTATE of its own, closes the connection where PostgreSQL does, and is there for the next client.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from struct import pack

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pubsub.backend import authentication, users
from pubsub.backend import messages as m
from pubsub.backend.listener import Client, Listener
from pubsub.backend.scram import MECHANISM, PLUS, Exchange, Verifier
from pubsub.errors import ProtocolViolation, PubsubError
from pubsub.protocol.copyboth import read_client_message
from pubsub.server import statements
from pubsub.server.session import _read_bind
from walsender import repl_gram
from walsender.server import slot_edits, slot_sql, slot_statements

VERIFIER = Verifier.of_password("secret", iterations=1)

text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
anything = st.binary(max_size=200)
names = st.sampled_from([*slot_sql.VIEWS, *slot_sql.FUNCTIONS, "pg_get_replication_slots", "pg_catalog", "x"])
_WORDS = "SELECT FROM JOIN TABLE ONLY LATERAL WITH AS ( ) , . * ; 'a' $1 $2 NULL := => VARIADIC ARRAY[ ] -- /* */ \" ' E'\\ $$ ::"
words = st.sampled_from(_WORDS.split())
sql = st.lists(st.one_of(names, words, text), max_size=25).map(" ".join)
startups = st.one_of(
    anything,
    st.builds(
        lambda version, pairs, rest: pack(">I", 8 + len(rest) + sum(len(one) + 1 for one in pairs)) + pack(">I", version)
        + b"".join(one + b"\0" for one in pairs) + rest,
        st.sampled_from([3 << 16, 3 << 16 | 2, 3 << 16 | 9999, 2 << 16, m.SSL_REQUEST, m.GSS_REQUEST, m.CANCEL_REQUEST]),
        st.lists(st.sampled_from([b"user", b"me", b"database", b"replication", b"_pq_.x", b"", b"\xff"]), max_size=6),
        st.sampled_from([b"", b"\0", b"\0\0", b"x"]),
    ),
)  # fmt: skip
frames = st.lists(
    st.one_of(
        anything,
        st.builds(lambda kind, body: m.message(bytes([kind]), body), st.integers(0, 255), anything),
        st.builds(
            lambda kind, size: bytes([kind]) + pack(">I", size), st.integers(0, 255), st.integers(0, 1 << 32 - 1)
        ),
    ),
    max_size=6,
).map(b"".join)


@contextlib.contextmanager
def only(*sqlstates: str) -> Iterator[None]:
    """Let errors pass whose SQLSTATEs begin with one of these, and no others."""
    try:
        yield
    except PubsubError as error:
        if not error.sqlstate.startswith(sqlstates):
            raise


class _Backend:
    """Asks for a password, and reads on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def serve(self, client: Client) -> None:
        client.negotiate()
        await authentication.by_password(client, self._path)
        raise PubsubError("nobody gets here", sqlstate="XX001")

    async def cancel(self, request: bytes) -> bool:
        return False


async def _said(port: int, pieces: list[bytes]) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(startups, frames, st.integers(0, 50)), min_size=1, max_size=5))
def test_a_listener_survives_whatever_comes(tmp_path: Path, peers: list[tuple[bytes, bytes, int]]) -> None:
    path = tmp_path / "users"
    path.touch(0o600)
    path.write_text(users.line("me", VERIFIER))

    async def run() -> None:
        backend = _Backend(path)
        listener = Listener(lambda _: backend, lambda: [backend], timeout=5)
        port = await listener.listen("127.0.0.1", 0)
        try:
            for startup, rest, cut in peers:
                data = startup + rest
                said = await _said(port, [data[:cut], data[cut:]])
                for error in re.findall(rb"VFATAL\0C([0-9A-Z]{5})", said):
                    assert error not in (b"XX000", b"XX001"), (data, said)
            # The next one is served.
            fine = await _said(port, [m.startup(3 << 16, {"user": "me"})])
            assert fine[:1] == b"R"
        finally:
            await listener.stop()

    asyncio.run(run())


@given(
    st.sampled_from([MECHANISM, PLUS, "", "PLAIN"]), st.one_of(anything, text.map(str.encode)), anything, st.booleans()
)
def test_sasl_messages(mechanism: str, first: bytes, final: bytes, tls: bool) -> None:
    exchange = Exchange(VERIFIER, b"hash" if tls else None)
    with only("08P01", "0A000", "28000"):
        exchange.first(mechanism, first)
        assert exchange.final(final) is None


@given(st.sampled_from(["n,,", "y,,", "p=tls-server-end-point,,"]), text, st.binary(max_size=40))
def test_sasl_messages_that_are_nearly_right(header: str, name: str, proof: bytes) -> None:
    from base64 import b64encode

    plus = header.startswith("p")
    exchange = Exchange(VERIFIER, b"hash" if plus else None)
    with only("08P01", "0A000", "28000"):
        answer = exchange.first(PLUS if plus else MECHANISM, f"{header}n={name},r=abc".encode())
        nonce = answer.split(b",")[0]
        bound = b64encode(header.encode() + (b"hash" if plus else b""))
        assert exchange.final(b"c=" + bound + b"," + nonce + b",p=" + b64encode(proof)) is None


@given(sql)
def test_sql_about_slots(script: str) -> None:
    """Whatever stands in it, places are found within the text, and editing keeps the rest."""
    with only("42601", "42883", "0A000", "22021", "22025", "42622", "54000", "22019"):
        pieces = slot_sql.statements(script)
        assert "".join(script[start:end] for start, end in pieces) == script
        for start, end in pieces:
            statement = script[start:end]
            views, calls = slot_sql.find(statement)
            for one in (*views, *calls):
                assert 0 <= one.start < one.end <= len(statement)
            edits = [slot_edits.view_edit(view, "v") for view in views] + [
                slot_edits.call_edit(call, "c") for call in calls
            ]
            slot_edits.edited(statement, edits)


@given(sql)
def test_statements_of_a_node(script: str) -> None:
    with only("42", "22", "54"):
        statement = statements.Statement.parse(script)
        assert statement.is_empty in (True, False)


@given(st.one_of(anything, st.builds(lambda a, b, rest: a + b"\0" + b + b"\0" + rest, anything, anything, anything)))
def test_bind_messages(body: bytes) -> None:
    for read in (_read_bind, lambda data: slot_statements._read_bind(data)):
        with contextlib.suppress(ProtocolViolation):
            read(body)


@given(st.binary(max_size=60), st.sampled_from([b"r", b"h", b"", b"x"]))
def test_copy_both_messages(body: bytes, kind: bytes) -> None:
    with contextlib.suppress(ProtocolViolation):
        read_client_message(kind + body)


_COMMANDS = (
    "CREATE_REPLICATION_SLOT START_REPLICATION DROP_REPLICATION_SLOT ALTER_REPLICATION_SLOT SLOT LOGICAL PHYSICAL ( ) , 0/0 ; "
    "pgoutput 'x' \"x\" TEMPORARY SNAPSHOT WAIT IDENTIFY_SYSTEM SHOW TIMELINE_HISTORY 1 READ_REPLICATION_SLOT"
)


@given(st.lists(st.sampled_from(_COMMANDS.split()), max_size=12).map(" ".join))
def test_replication_commands(command: str) -> None:
    with only("42", "22", "0A", "53", "08"):
        repl_gram.parse_command(command)
