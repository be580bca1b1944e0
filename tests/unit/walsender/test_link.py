"""A client's connection to the upstream server: where it goes, and what it believes."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from pubsub.errors import ConnectionFailure, PubsubError
from walsender.server.link import Upstream

VARIABLES = (
    *("PGHOST", "PGHOSTADDR", "PGPORT", "PGSSLMODE", "PGSSLROOTCERT", "PGSSLCRL", "PGSERVICE", "PGSERVICEFILE"),
    *("PGSSLCERT", "PGSSLKEY", "PGSSLCERTMODE"),
)
SSL_REQUEST = bytes.fromhex("0000000804d2162f")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def made_certificate(folder: Path) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate of another server."""
    return made_certificate(tmp_path_factory.mktemp("other"))[0]


class Server:
    """A server that notes what comes first, and answers a request for TLS with `S` and `injected`."""

    def __init__(self, certificate: tuple[Path, Path] | None = None, injected: bytes = b"") -> None:
        self.certificate = certificate
        self.injected = injected
        self.authority: Path | None = None
        """Whose certificates it wants of its clients."""
        self.first: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(8)
        self.first.put_nowait(first)
        try:
            if self.certificate is not None and first == SSL_REQUEST:
                writer.write(b"S" + self.injected)
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.load_cert_chain(*self.certificate)
                if self.authority is not None:
                    context.load_verify_locations(self.authority)
                    context.verify_mode = ssl.CERT_REQUIRED
                await writer.start_tls(context)
                writer.write(b"encrypted")
            else:
                writer.write(b"N")
            await writer.drain()
            await reader.read()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
            async with asyncio.timeout(60):
                yield server.sockets[0].getsockname()[1]


async def first_bytes(upstream: Upstream, server: Server) -> bytes:
    """Connect, say something, and return what the server got first."""
    _, writer = await upstream.connect()
    writer.write(b"no TLS!!")
    first = await server.first.get()
    writer.close()
    return first


async def test_what_comes_before_the_handshake_is_not_believed(certificate: tuple[Path, Path]) -> None:
    """It could be AuthenticationOk, from somebody in the middle (CVE-2021-23222)."""
    server = Server(certificate)
    async with server.listening() as port:
        upstream = Upstream(f"host=127.0.0.1 port={port} sslmode=require")
        reader, writer = await upstream.connect()
        assert await reader.read(9) == b"encrypted"
        writer.close()
        server.injected = b"R\0\0\0\x08\0\0\0\0"
        with pytest.raises(ConnectionFailure, match="received unencrypted data after SSL response"):
            await upstream.connect()


async def test_a_root_certificate_is_looked_at_as_libpq_does(
    certificate: tuple[Path, Path], other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sslmode=require is verify-ca where there is one; it may be named in the environment."""
    server = Server(certificate)
    async with server.listening() as port:
        monkeypatch.setenv("PGSSLMODE", "require")
        monkeypatch.setenv("PGSSLROOTCERT", str(other))
        with pytest.raises(ConnectionFailure, match="certificate verify failed"):
            await Upstream(f"host=127.0.0.1 port={port}").connect()
        for mode in ("require", "verify-full"):
            monkeypatch.setenv("PGSSLMODE", mode)
            monkeypatch.setenv("PGSSLROOTCERT", str(certificate[0]))
            reader, writer = await Upstream(f"host=127.0.0.1 port={port}").connect()
            assert await reader.read(9) == b"encrypted"
            writer.close()


async def shown(conninfo: str) -> tuple[bool, bytes]:
    """Return whether a certificate is shown, and what a server says that wants one of its own authority."""
    upstream = Upstream(conninfo)
    reader, writer = await upstream.connect()
    shows = upstream.shows_certificate(writer)
    try:
        with suppress(OSError):
            return shows, await reader.read(9)
        return shows, b""
    finally:
        writer.transport.abort()


async def test_the_certificate_of_the_connection_string_is_shown(
    certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pg_hba.conf may want one of everyone (clientcert=verify-ca); clients could not log in, this program's own sessions could."""
    server = Server(certificate)
    server.authority = certificate[0]
    file, key = certificate
    async with server.listening() as port:
        plain = f"host=127.0.0.1 port={port} sslmode=require"
        given = f"{plain} sslcert={file} sslkey={key}"
        assert await shown(given) == (True, b"encrypted")
        # As libpq does it: one that is not there is none, nor one that is not wanted.
        for conninfo in (plain, f"{plain} sslcert=/nowhere sslkey={key}", f"{given} sslcertmode=disable"):
            assert await shown(conninfo) == (False, b"")
        with pytest.raises(ConnectionFailure, match='certificate present, but not private key file "/nowhere"'):
            await shown(f"{plain} sslcert={file} sslkey=/nowhere")
        monkeypatch.setenv("PGSSLCERT", str(file))
        monkeypatch.setenv("PGSSLKEY", str(key))
        assert await shown(plain) == (True, b"encrypted")
        monkeypatch.delenv("PGSSLCERT")
        monkeypatch.delenv("PGSSLKEY")
        home = tmp_path / ".postgresql"
        home.mkdir()
        shutil.copy(file, home / "postgresql.crt")
        readable = home / "postgresql.key"
        shutil.copy(key, readable)
        readable.chmod(0o644)
        with pytest.raises(ConnectionFailure, match="has group or world access"):
            await shown(plain)
        readable.chmod(0o600)
        assert await shown(plain) == (True, b"encrypted")


@pytest.fixture(scope="module")
def locked(certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate's key, with the password `secret`."""
    locked = tmp_path_factory.mktemp("locked") / "key.pem"
    command = ["openssl", "pkey", "-in", str(certificate[1]), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    return locked


async def test_a_key_with_a_password_is_not_asked_for_on_a_terminal(
    certificate: tuple[Path, Path], locked: Path
) -> None:
    server = Server(certificate)
    server.authority = certificate[0]
    async with server.listening() as port:
        given = f"host=127.0.0.1 port={port} sslmode=require sslcert={certificate[0]} sslkey={locked}"
        assert await shown(f"{given} sslpassword=secret") == (True, b"encrypted")
        for wrong in ("", "sslpassword=wrong"):
            with pytest.raises(ConnectionFailure, match="could not load certificate"):
                await shown(f"{given} {wrong}")


def revoked(folder: Path) -> tuple[Path, Path, Path, Path]:
    """Return an authority's certificate, one of its for a server, that one's key, and the list in which it is revoked."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificates")
    authority, key, certificate, server_key = (folder / f"{name}.pem" for name in ("ca", "key", "server", "server_key"))
    request, crl, database = folder / "request.pem", folder / "crl.pem", folder / "index.txt"
    database.touch()
    (folder / "ca.conf").write_text(
        f"[ca]\ndefault_ca=c\n[c]\ndatabase={database}\nprivate_key={key}\ncertificate={authority}\n"
        "default_md=sha256\ndefault_crl_days=2\n"
    )

    def run(*arguments: str) -> str:
        return subprocess.run([openssl, *arguments], check=True, capture_output=True, text=True).stdout

    new = ["-newkey", "rsa:2048", "-nodes"]
    run("req", "-x509", *new, "-days", "2", "-subj", "/CN=authority", "-keyout", str(key), "-out", str(authority))
    run("req", *new, "-subj", "/CN=localhost", "-keyout", str(server_key), "-out", str(request))
    signed = ["-in", str(request), "-CA", str(authority), "-CAkey", str(key), "-CAcreateserial", "-days", "2"]
    run("x509", "-req", *signed, "-out", str(certificate))
    run("ca", "-config", str(folder / "ca.conf"), "-revoke", str(certificate))
    run("ca", "-config", str(folder / "ca.conf"), "-gencrl", "-out", str(crl))
    # A directory of lists has them by their issuer's hash.
    shutil.copy(crl, folder / f"{run('crl', '-hash', '-noout', '-in', str(crl)).strip()}.r0")
    return authority, certificate, server_key, crl


async def test_a_certificate_that_was_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sslcrl, and the file that libpq takes without it: this program's own sessions look at them, too."""
    folder = tmp_path / "made"
    folder.mkdir()
    authority, certificate, key, crl = revoked(folder)
    server = Server((certificate, key))
    async with server.listening() as port:
        conninfo = f"host=127.0.0.1 port={port} sslmode=verify-ca sslrootcert={authority}"
        reader, writer = await Upstream(f"{conninfo} sslcrl={tmp_path}/not_there").connect()
        assert await reader.read(9) == b"encrypted"
        writer.close()
        with pytest.raises(ConnectionFailure, match="certificate revoked"):
            await Upstream(f"{conninfo} sslcrl={crl}").connect()
        with pytest.raises(ConnectionFailure, match="certificate revoked"):
            await Upstream(f"{conninfo} sslcrldir={crl.parent}").connect()
        (tmp_path / ".postgresql").mkdir()
        shutil.copy(crl, tmp_path / ".postgresql" / "root.crl")
        with pytest.raises(ConnectionFailure, match="certificate revoked"):
            await Upstream(conninfo).connect()
        monkeypatch.setenv("PGSSLCRL", str(crl))
        with pytest.raises(ConnectionFailure, match="certificate revoked"):
            await Upstream(conninfo).connect()


async def test_tls_without_asking(certificate: tuple[Path, Path]) -> None:
    """sslnegotiation=direct of the upstream connection."""
    chosen: asyncio.Queue[str | None] = asyncio.Queue()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chosen.put_nowait(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    context.set_alpn_protocols(["postgresql"])
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as listener, asyncio.timeout(60):
        port = listener.sockets[0].getsockname()[1]
        _, writer = await Upstream(f"host=127.0.0.1 port={port} sslmode=require sslnegotiation=direct").connect()
        assert await chosen.get() == "postgresql"
        writer.close()


async def test_the_environment_says_what_the_string_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: tuple[Path, Path]
) -> None:
    """The clients' sessions go where this program's own go, and as safely."""
    server = Server(certificate)
    async with server.listening() as port:
        monkeypatch.setenv("PGHOST", "127.0.0.1")
        monkeypatch.setenv("PGPORT", str(port))
        assert await first_bytes(Upstream("dbname=d"), server) == b"no TLS!!"
        monkeypatch.setenv("PGSSLMODE", "require")
        assert await first_bytes(Upstream("dbname=d"), server) == SSL_REQUEST
        assert await first_bytes(Upstream("dbname=d sslmode=disable"), server) == b"no TLS!!"
    for name in ("PGHOST", "PGPORT", "PGSSLMODE"):
        monkeypatch.delenv(name)
    async with server.listening() as port:
        services = tmp_path / "services"
        services.write_text(f"[theirs]\nhostaddr=127.0.0.1\nport={port}\nsslmode=require\n")
        monkeypatch.setenv("PGSERVICEFILE", str(services))
        monkeypatch.setenv("PGSERVICE", "theirs")
        assert await first_bytes(Upstream("dbname=d"), server) == SSL_REQUEST


def test_a_service_in_the_string_is_refused() -> None:
    """The file is libpq's to read, and clients' sessions would go elsewhere."""
    with pytest.raises(PubsubError, match="cannot name a service") as caught:
        Upstream("service=theirs dbname=d")
    assert (caught.value.sqlstate, "PGSERVICE" in (caught.value.hint or "")) == ("22023", True)


async def test_several_addresses_are_tried_in_turn() -> None:
    server = Server()
    async with server.listening() as port:
        upstream = Upstream(f"host=a.invalid,b.invalid hostaddr=127.0.0.1,127.0.0.1 port=1,{port}")
        assert await first_bytes(upstream, server) == b"no TLS!!"
        with pytest.raises(ConnectionFailure, match="could not match 2 host names"):
            await Upstream(f"host=a.invalid,b.invalid hostaddr=127.0.0.1 port={port}").connect()


@pytest.mark.parametrize(
    ("given", "kept"), [("", True), (" keepalives=1 keepalives_idle=7", True), (" keepalives=0", False)]
)
async def test_the_system_finds_that_the_server_is_gone(given: str, kept: bool) -> None:
    async with Server().listening() as port:
        _, writer = await Upstream(f"host=127.0.0.1 port={port} tcp_user_timeout=9000{given}").connect()
        sock = writer.get_extra_info("socket")
        assert bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) == kept
        assert (sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 7) == ("idle" in given)
        assert (sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 9000) == kept
        writer.close()


async def test_a_server_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConnectionFailure, match="could not connect to the upstream server: timeout expired"):
            await Upstream(f"host=127.0.0.1 port={port} sslmode=require connect_timeout=2").connect()
