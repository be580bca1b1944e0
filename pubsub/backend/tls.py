"""TLS for clients, with a certificate of the user's (be-secure-openssl.c)."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pubsub.errors import PubsubError

_WEAK: Final = {"md5", "sha1"}


@dataclass(frozen=True, slots=True)
class Tls:
    """What a listener needs for TLS.  `end_point`: what SCRAM's channel binding binds to (tls-server-end-point)."""

    context: ssl.SSLContext
    end_point: bytes | None

    @classmethod
    def load(cls, certificate: Path, key: Path | None) -> Self:
        """Load PEM files; the key may be in the certificate's file.  Raises PubsubError (F0000)."""
        held = key or certificate
        try:
            mode = held.stat()
            # be-secure-common.c: check_ssl_key_file_permissions
            if mode.st_mode & (0o027 if mode.st_uid == 0 else 0o077):
                raise PubsubError(
                    f'private key file "{held}" has group or world access',
                    sqlstate="F0000",
                    detail="File must have permissions u=rw (0600) or less if owned by the database user, "
                    "or permissions u=rw,g=r (0640) or less if owned by root.",
                )
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.options |= ssl.OP_NO_RENEGOTIATION
            context.set_alpn_protocols(["postgresql"])
            context.load_cert_chain(certificate, key)
            end_point = _end_point(ssl.PEM_cert_to_DER_cert(_first(certificate.read_text("ascii"))))
        except (OSError, ssl.SSLError, ValueError) as error:
            raise PubsubError(
                f'could not load server certificate file "{certificate}": {error}', sqlstate="F0000"
            ) from error
        return cls(context, end_point)


async def start_tls_behind(writer: asyncio.StreamWriter, context: ssl.SSLContext, begun: bytes, timeout: float) -> None:
    """Start TLS as a server where the reader has taken `begun`, the first bytes of the handshake, already.

    Raises OSError (ssl.SSLError); `timeout` is in seconds.
    """
    transport: Any = writer.transport
    before = transport.get_protocol()
    starting = asyncio.ensure_future(writer.start_tls(context, ssl_handshake_timeout=timeout))
    try:
        await asyncio.sleep(0)
        # start_tls has had the loop call connection_made, and read on after that; this comes next, before anything is read.
        if transport.get_protocol() is not before:
            asyncio.get_running_loop().call_soon(_feed, transport, begun)
        await starting
    finally:
        starting.cancel()


def _feed(transport: Any, data: bytes) -> None:
    protocol: asyncio.BufferedProtocol = transport.get_protocol()
    while data and not transport.is_closing():
        room = memoryview(protocol.get_buffer(len(data)))
        size = min(len(room), len(data))
        room[:size] = data[:size]
        protocol.buffer_updated(size)
        data = data[size:]


def _first(text: str) -> str:
    start, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if not 0 <= start < end:
        raise ValueError("there is no certificate in it")
    return text[start : end + len(ssl.PEM_FOOTER)]


def _end_point(certificate: bytes) -> bytes | None:
    """Return the certificate's hash, by its signature's own algorithm (be_tls_get_certificate_hash); None if that is unknown."""
    name = _signature_hash(certificate)
    return None if name is None else hashlib.new("sha256" if name in _WEAK else name, certificate).digest()


#: Object identifiers of signatures, in DER, with their hash: RSA and ECDSA.
_SIGNATURES: Final = {
    bytes.fromhex("2a864886f70d010104"): "md5",
    bytes.fromhex("2a864886f70d010105"): "sha1",
    bytes.fromhex("2a864886f70d01010b"): "sha256",
    bytes.fromhex("2a864886f70d01010c"): "sha384",
    bytes.fromhex("2a864886f70d01010d"): "sha512",
    bytes.fromhex("2a864886f70d01010e"): "sha224",
    bytes.fromhex("2a8648ce3d0401"): "sha1",
    bytes.fromhex("2a8648ce3d040302"): "sha256",
    bytes.fromhex("2a8648ce3d040303"): "sha384",
    bytes.fromhex("2a8648ce3d040304"): "sha512",
}


def _signature_hash(certificate: bytes) -> str | None:
    """Return the hash of Certificate ::= SEQUENCE { tbsCertificate, SEQUENCE { OBJECT IDENTIFIER … } … }."""
    start, _ = _content(certificate, 0)
    _, after = _content(certificate, start)
    start, _ = _content(certificate, after)
    begin, end = _content(certificate, start)
    return _SIGNATURES.get(certificate[begin:end])


def _content(data: bytes, at: int) -> tuple[int, int]:
    """Return where the content of the DER value at `at` begins and ends."""
    length, start = data[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(data[start : start + size], "big"), start + size
    return start, start + length
