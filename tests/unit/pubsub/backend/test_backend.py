"""A server's side of a connection, before anybody has authenticated: messages, SCRAM, users, TLS, and what a listener bounds."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import shutil
import ssl
import subprocess
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import pq

from pubsub.backend import authentication, users
from pubsub.backend import messages as m
from pubsub.backend.cancel_keys import CancelKeys
from pubsub.backend.listener import Client, Listener
from pubsub.backend.scram import MECHANISM, PLUS, Exchange, Login, Proven, Verifier, prepared
from pubsub.backend.socket_paths import SOCKET_NAME
from pubsub.backend.tls import Tls
from pubsub.errors import ProtocolViolation, PubsubError


def test_messages_that_lie() -> None:
    assert m.parameters(b"user\0me\0\0") == {"user": "me"}
    for body in (b"", b"user\0me", b"user\0me\0", b"user\0\0"):
        with pytest.raises(ProtocolViolation):
            m.parameters(body)
    error = PubsubError("text", sqlstate="42601", hint="do")
    for name in ("me", "caf\udce9"):
        assert m.parameters(m.startup(3 << 16, {"user": name})[8:]) == {"user": name}
    back = m.read_error(m.error(error)[5:])
    assert (back.message, back.sqlstate, back.hint) == ("text", "42601", "do")
    assert m.read_row(m.row(["a", None, ""])[5:]) == ["a", None, ""]


# SCRAM

# RFC 7677's example: user "user", password "pencil".
SALT, NONCE = "W22ZaJ0SNY7soEsUEjb6gQ==", "rOprNGfwEbeRWgbNEkqO"


def test_a_verifier_is_postgresql_s() -> None:
    for password in ("pencil", "Passwort mit ü", "a\u00a0b", "I\u00adX", "\u0007bell", "ﬁ"):
        theirs = (
            pq.PGconn.connect(b"host=/nonexistent")
            .encrypt_password(password.encode(), b"me", b"scram-sha-256")
            .decode()
        )
        verifier = Verifier.parse(theirs)
        assert str(verifier) == theirs
        proven = exchanged(password, verifier)
        assert proven is not None, password
        assert exchanged(password + "x", verifier) is None
    assert exchanged("secret", Verifier.of_password("secret")) is not None
    assert "secret" not in repr(verifier)
    for wrong in ("", "md5abc", "SCRAM-SHA-256$0:AAAA$AAAA:AAAA", theirs[:-4], "SCRAM-SHA-256$4096:!$A:A"):
        with pytest.raises(PubsubError, match="invalid SCRAM verifier"):
            Verifier.parse(wrong)


def exchanged(password: str, verifier: Verifier) -> Proven | None:
    """Let a client with this password authenticate."""
    own = Verifier.parse(str(verifier))
    salted = hashlib.pbkdf2_hmac("sha256", prepared(password), own.salt, own.iterations)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    stored = hashlib.sha256(client_key).digest()
    server_key = hmac.digest(salted, b"Server Key", "sha256")
    client = Login(Proven(Verifier(own.iterations, own.salt, stored, server_key), client_key))
    server = Exchange(verifier, None)
    found = server.final(client.final(server.first(MECHANISM, client.first())))
    if found is None:
        return None
    client.check(found[0])
    assert found[1].client_key == client_key
    return found[1]


def users_password(password: str) -> bytes:
    from pubsub.backend.scram import prepared

    return prepared(password)


@pytest.mark.parametrize(
    ("mechanism", "first", "binding", "text"),
    [
        (MECHANISM, b"n,,n=,r=abc", None, None),
        (MECHANISM, b"y,,n=,r=abc", None, None),
        (MECHANISM, b"y,,n=,r=abc", b"hash", "SCRAM channel binding negotiation error"),
        (PLUS, b"p=tls-server-end-point,,n=,r=abc", b"hash", None),
        (PLUS, b"p=tls-unique,,n=,r=abc", b"hash", "unsupported SCRAM channel-binding type"),
        (PLUS, b"n,,n=,r=abc", b"hash", "malformed SCRAM message"),
        (PLUS, b"p=tls-server-end-point,,n=,r=abc", None, "client selected an invalid SASL authentication mechanism"),
        (MECHANISM, b"p=tls-server-end-point,,n=,r=abc", b"hash", "malformed SCRAM message"),
        (MECHANISM, b"n,a=other,n=,r=abc", None, "client uses authorization identity"),
        (MECHANISM, b"n,,m=x,n=,r=abc", None, "client requires an unsupported SCRAM extension"),
        (MECHANISM, b"n,,n=caf\xe9,r=abc", None, None),
        (MECHANISM, b"n,,n=", None, "malformed SCRAM message"),
        (MECHANISM, b"\xff\0", None, "malformed SCRAM message"),
        ("PLAIN", b"", None, "client selected an invalid SASL authentication mechanism"),
    ],
)
def test_a_client_s_first_message(mechanism: str, first: bytes, binding: bytes | None, text: str | None) -> None:
    exchange = Exchange(Verifier.of_password("x"), binding)
    if text is None:
        assert exchange.first(mechanism, first).startswith(b"r=abc")
    else:
        with pytest.raises(PubsubError, match=text):
            exchange.first(mechanism, first)


def test_a_client_s_last_message() -> None:
    exchange = Exchange(Verifier.of_password("x"), b"hash")
    nonce = exchange.first(PLUS, b"p=tls-server-end-point,,n=,r=abc").split(b",")[0]
    bound = b64encode(b"p=tls-server-end-point,,hash")
    proof = b64encode(bytes(32))
    assert exchange.final(b"c=" + bound + b"," + nonce + b",p=" + proof) is None
    for wrong in (
        b"c=biws," + nonce + b",p=" + proof,
        b"c=" + bound + b"," + nonce + b",p=" + proof[:-8],
        b"c=" + bound + b"," + nonce,
        b"",
    ):
        with pytest.raises(ProtocolViolation):
            exchange.final(wrong)
    assert exchange.final(b"c=" + bound + b",r=other,p=" + proof) is None
    login = Login(Proven(Verifier.of_password("x"), bytes(32)))
    login.first()
    with pytest.raises(PubsubError, match="malformed SCRAM message"):
        login.final(b"r=another,s=AAAA,i=4096")


def test_names_that_are_no_utf_8_are_signed_as_they_came() -> None:
    exchange = Exchange(Verifier.of_password("x"), None)
    nonce = exchange.first(MECHANISM, b"n,,n=caf\xe9,r=abc").split(b",")[0]
    proof = b64encode(bytes(32))
    assert exchange.final(b"c=biws," + nonce + b",x=\xff,p=" + proof) is None
    login = Login(Proven(Verifier.of_password("x"), bytes(32)))
    ours = login.first().split(b"r=")[1]
    salt = b64encode(login._proven.verifier.salt)
    assert b"r=" + ours + b"\xff" in login.final(b"r=" + ours + b"\xff,s=" + salt + b",i=4096")
    with pytest.raises(PubsubError, match="malformed SCRAM message"):
        login.check(b"v=\xff")


def test_users_and_what_they_may_do(tmp_path: Path) -> None:
    path = tmp_path / "users"
    verifier = Verifier.of_password("secret")
    lines = [
        "# people",
        "",
        users.line("me", verifier, "superuser"),
        f'"A ""b"""\t"{verifier}"',
        users.line("f", verifier, "replication"),
    ]
    path.write_text("\n".join(lines))
    path.chmod(0o644)
    with pytest.raises(PubsubError, match="has group or world access"):
        users.read(path)
    path.chmod(0o600)
    found = users.read(path)
    assert {one.name: (one.is_superuser, one.may_replicate) for one in found.values()} == {
        "me": (True, True),
        'A "b"': (False, False),
        "f": (False, True),
    }
    for wrong in ("me", "me secret", f"me {verifier} root", "me md5abcdef", f"me {str(verifier)[:-3]}"):
        path.write_text(f"# x\n{wrong}\n")
        with pytest.raises(PubsubError) as caught:
            users.read(path)
        assert "secret" not in caught.value.report()
        assert "2" in caught.value.report()


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-sha384",
    ]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


def test_what_channels_bind_to(certificate: tuple[Path, Path]) -> None:
    path, key = certificate
    der = ssl.PEM_cert_to_DER_cert(path.read_text())
    assert Tls.load(path, key).end_point == hashlib.sha384(der).digest()
    key.chmod(0o644)
    with pytest.raises(PubsubError, match="has group or world access"):
        Tls.load(path, key)
    key.chmod(0o600)
    with pytest.raises(PubsubError, match="could not load server certificate file"):
        Tls.load(key, key)


# The listener


class Echo:
    """A backend that lets everybody in who is in a file, and waits for messages."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.cancelled: list[bytes] = []
        self.seen: list[Client] = []

    async def serve(self, client: Client) -> None:
        self.seen.append(client)
        client.negotiate()
        if self.path is not None:
            await authentication.by_password(client, self.path)
        client.authenticated()
        client.writer.write(m.message(b"R", authentication.OK) + m.ready(b"I"))
        while True:
            kind, body = await m.read_message(client.reader, 100)
            client.writer.write(m.message(kind, body))

    async def cancel(self, request: bytes) -> bool:
        self.cancelled.append(request)
        return True


@asynccontextmanager
async def listening(
    echo: Echo, *, tls: Tls | None = None, timeout: float = 60.0, limit: int = 100, require_tls: bool = False
) -> AsyncIterator[int]:
    listener = Listener(
        lambda _: echo, lambda: [echo], tls=tls, require_tls=require_tls, timeout=timeout, max_connections=limit
    )
    port = await listener.listen("127.0.0.1", 0)
    try:
        yield port
    finally:
        await listener.stop()


def hello(minor: int = 0, **more: str) -> bytes:
    return m.startup(3 << 16 | minor, {"user": "me", "database": "d", **more})


async def answers(port: int, data: bytes) -> bytes:
    """Send bytes, and return everything that comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((10_001).to_bytes(4, "big"), b"invalid length of startup packet"),
        ((1 << 30).to_bytes(4, "big"), b"invalid length of startup packet"),
        ((7).to_bytes(4, "big"), b"invalid length of startup packet"),
        (m.startup(2 << 16, {}), b"unsupported frontend protocol 2.0: server supports 3.0 to 3.2"),
        (m.startup(4 << 16, {}), b"unsupported frontend protocol 4.0"),
        (m.startup(3 << 16, {"database": "d"}), b"no PostgreSQL user name specified in startup packet"),
        (b"\0\0\0\x0a" + (3 << 16).to_bytes(4, "big") + b"ab", b"invalid startup packet layout"),
        # A second SSL request is no request any more.
        (bytes.fromhex("0000000804d2162f") * 2, b"unsupported frontend protocol 1234.5679"),
        (bytes.fromhex("0000000804d21630") * 2, b"unsupported frontend protocol 1234.5680"),
    ],
)
async def test_a_beginning_that_is_refused(data: bytes, text: bytes) -> None:
    async with listening(Echo()) as port:
        got = await answers(port, data)
        assert text in got
        assert b"VFATAL" in got


async def test_the_protocol_s_version_is_negotiated() -> None:
    echo = Echo()
    async with listening(echo) as port:
        for minor, more, expected in (
            (0, {}, None),
            (2, {}, None),
            (9999, {}, m.negotiate(3 << 16 | 2, [])),
            (0, {"_pq_.nope": "1"}, m.negotiate(3 << 16, ["_pq_.nope"])),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(hello(minor, **more))
            if expected is not None:
                assert await reader.readexactly(len(expected)) == expected
            assert await reader.readexactly(9) == m.message(b"R", authentication.OK)
            writer.close()
        assert [one.version & 0xFFFF for one in echo.seen] == [0, 2, 2, 0]


async def test_who_does_not_say_who_it_is_has_to_go(tmp_path: Path) -> None:
    """The deadline holds for each step before a client has authenticated, and no longer after that."""
    path = tmp_path / "users"
    path.write_text(users.line("me", Verifier.of_password("x")))
    path.chmod(0o600)
    async with listening(Echo(path), timeout=0.3) as port:
        assert await answers(port, b"") == b""
        assert await answers(port, b"\0\0") == b""
        assert await answers(port, bytes.fromhex("0000000804d2162f")) == b"N"
        assert b"canceling authentication due to timeout" in await answers(port, hello())
    async with listening(Echo(), timeout=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(hello())
        await reader.readexactly(15)
        await asyncio.sleep(0.6)  # twice the deadline
        writer.write(m.message(b"H"))
        assert await reader.readexactly(5) == m.message(b"H")
        writer.close()


async def test_sasl_messages_are_bounded_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text(users.line("me", Verifier.of_password("x")))
    path.chmod(0o600)
    async with listening(Echo(path)) as port:
        for length in (1_029, 1 << 30):
            got = await answers(port, hello() + b"p" + length.to_bytes(4, "big"))
            assert b"invalid message length" in got
        for wrong in (
            m.message(b"Q", b"SELECT 1\0"),
            m.message(b"p", b""),
            m.message(b"p", b"SCRAM-SHA-256\0\0\0\0\x09n"),
            m.message(b"p", b"SCRAM-SHA-256\0\xff\xff\xff\xff") + m.message(b"p", b"n,,n=,r="),
        ):
            got = await answers(port, hello() + wrong)
            assert b"VFATAL" in got
            assert b"XX000" not in got
        # Neither the answers nor their number tell whether there is such a user.
        first = b"n,,n=,r=abc"
        initial = m.message(b"p", b"SCRAM-SHA-256\0" + len(first).to_bytes(4, "big") + first)
        for name in ("me", "nobody"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(hello(user=name) + initial)
            await m.read_message(reader)
            _, challenge = await m.read_message(reader)
            nonce = challenge[4:].split(b",")[0]
            writer.write(m.message(b"p", b"c=biws," + nonce + b",p=" + b64encode(bytes(32))))
            _, body = await m.read_message(reader)
            assert m.read_error(body).message == f'password authentication failed for user "{name}"'
            salt = [b64decode(challenge[4:].split(b",")[1][2:])]
            writer.close()
            assert len(salt[0]) == 16


async def test_quotas() -> None:
    """Those that have not authenticated share a quota per address; those that have, max_connections."""
    async with listening(Echo(), limit=3) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(32)]
        await asyncio.sleep(0)
        for _ in range(100):
            if await answers(port, hello()) == b"":
                break
        else:
            pytest.fail("the thirty-third was let in")
        for _, writer in silent:
            writer.close()
        served = []
        while len(served) < 3:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(hello())
            if await reader.read(9) == m.message(b"R", authentication.OK):
                served.append(writer)
        assert b"sorry, too many clients already" in await answers(port, hello())
        served.pop().close()
        for _ in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(hello())
            if await reader.read(9) == m.message(b"R", authentication.OK):
                break
        else:
            pytest.fail("the place of one that has left was not given away")


async def test_a_message_is_bounded_once_somebody_is_in() -> None:
    async with listening(Echo()) as port:
        assert b"invalid message length" in await answers(port, hello() + b"Q" + (1 << 30).to_bytes(4, "big"))
        assert b"invalid message length" in await answers(port, hello() + b"Q\0\0\0\3")


async def test_cancel_requests_need_the_key() -> None:
    echo = Echo()
    request = (16).to_bytes(4, "big") + m.CANCEL_REQUEST.to_bytes(4, "big") + b"pid!" + b"key!"
    async with listening(echo) as port:
        assert await answers(port, request) == b""
    assert echo.cancelled == [b"pid!key!"]
    keys = CancelKeys()
    called: list[int] = []
    short, long = keys.new(3 << 16, lambda: called.append(1)), keys.new(3 << 16 | 2, lambda: called.append(2))
    assert (len(short), len(long)) == (8, 36)
    assert [keys.cancel(one) for one in (short, long, short[:-1], b"", long[:8])] == [True, True, False, False, False]
    keys.forget(short)
    assert (keys.cancel(short), called) == (False, [1, 2])


async def test_tls_is_asked_for_once_and_nothing_comes_before_it(certificate: tuple[Path, Path]) -> None:
    path, key = certificate
    tls = Tls.load(path, key)
    request = bytes.fromhex("0000000804d2162f")
    async with listening(Echo(), tls=tls) as port:
        got = await answers(port, request + hello())
        assert got[:1] == b"S"
        assert b"AuthenticationOk" not in got
        assert m.message(b"R", authentication.OK) not in got
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        assert await reader.readexactly(1) == b"S"
        context = ssl.create_default_context(cafile=str(path))
        context.check_hostname = False
        await writer.start_tls(context)
        writer.write(request)
        assert b"unsupported frontend protocol 1234.5679" in await reader.read()
        writer.close()


async def test_tls_without_asking(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    """sslnegotiation=direct, whose clients must name the protocol (backend_startup.c: ProcessSSLStartup)."""
    path, key = certificate

    async def answer(port: int, protocols: list[str]) -> bytes:
        context = ssl.create_default_context(cafile=str(path))
        context.check_hostname = False
        if protocols:
            context.set_alpn_protocols(protocols)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(hello())
        try:
            async with asyncio.timeout(30):
                return await reader.read(9)
        except (ConnectionError, ssl.SSLError):
            return b""
        finally:
            writer.transport.abort()

    echo = Echo()
    async with listening(echo, tls=Tls.load(path, key), require_tls=True) as port:
        where = f"host=127.0.0.1 port={port} user=me dbname=d sslmode=require sslnegotiation=direct"
        async with await psycopg.AsyncConnection.connect(where, autocommit=True) as connection:
            assert connection.pgconn.ssl_in_use
        assert [client.end_point is not None for client in echo.seen] == [True]
        assert await answer(port, ["postgresql"]) == m.message(b"R", authentication.OK)
        for protocols in ([], ["http/1.1"]):
            assert await answer(port, protocols) == b""
        assert len(echo.seen) == 2
    async with listening(echo) as port:
        assert await answers(port, b"\x16\x03\x01") == b""
        assert len(echo.seen) == 2
    listener = Listener(lambda _: echo, list, tls=Tls.load(path, key))
    await listener.listen_locally(tmp_path)
    try:
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET_NAME)
        writer.write(b"\x16\x03\x01")
        assert await reader.read() == b""
        writer.close()
    finally:
        await listener.stop()


async def test_where_tls_is_required_nothing_else_gets_in_by_tcp(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    path, key = certificate
    echo = Echo()
    async with listening(echo, tls=Tls.load(path, key), require_tls=True) as port:
        got = await answers(port, hello())
        error = m.read_error(got[5:])
        assert (m.read_fields(got[5:])["S"], error.sqlstate) == ("FATAL", "28000")
        words = 'no pg_hba.conf entry for host "127.0.0.1", user "me", database "d", no encryption'
        assert error.message == words
        assert echo.seen == []
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes.fromhex("0000000804d2162f"))
        assert await reader.readexactly(1) == b"S"
        context = ssl.create_default_context(cafile=str(path))
        context.check_hostname = False
        await writer.start_tls(context)
        writer.write(hello())
        assert await reader.readexactly(9) == m.message(b"R", authentication.OK)
        writer.close()
    listener = Listener(lambda _: echo, list, require_tls=True)
    await listener.listen_locally(tmp_path)
    try:
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET_NAME)
        writer.write(hello())
        assert await reader.readexactly(9) == m.message(b"R", authentication.OK)
        writer.close()
    finally:
        await listener.stop()


async def test_a_unix_socket_is_its_user_s_alone(tmp_path: Path) -> None:
    """Also in a directory whose name is too long for a socket's address."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    for directory in (tmp_path, deep):
        echo = Echo()
        listener = Listener(lambda _, echo=echo: echo, list)  # type: ignore[misc]
        path = await listener.listen_locally(directory)
        try:
            assert path == directory / SOCKET_NAME
            assert path.stat().st_mode & 0o777 == 0o700
            number = os.open(directory, os.O_PATH)
            reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{number}/{SOCKET_NAME}")
            os.close(number)
            writer.write(hello())
            assert await reader.readexactly(9) == m.message(b"R", authentication.OK)
            assert echo.seen[0].is_local
            assert authentication.by_trust(echo.seen[0]).is_superuser
            writer.close()
        finally:
            await listener.stop()
        assert not path.exists()


async def test_a_client_that_never_reads_does_not_keep_its_connection() -> None:
    """Closing drops what it has not read, after a moment."""
    echo = Echo()
    async with listening(echo) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(hello())
        await reader.readexactly(15)
        (client,) = echo.seen
        client.writer.write(bytes(64 << 20))
        client.end()
        await asyncio.wait({client.task}, timeout=20)
        transport = client.writer.transport
        for _ in range(400):
            if transport.is_closing() and not transport.get_write_buffer_size():
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("what it does not read is still kept")
        writer.close()
