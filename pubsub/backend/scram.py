"""SCRAM-SHA-256: verifiers as pg_authid has them, a server's side of the exchange, and a client's side without the password.

    SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>

A client's proof tells the server the ClientKey.  Whoever has it and a verifier of the same salt can authenticate with it
elsewhere: so a server that authenticates clients here can log in for them at the upstream server, and knows no password.

Follows auth-scram.c, scram-common.c and RFC 5802 and 7677.  Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from pubsub.errors import ProtocolViolation, PubsubError

MECHANISM: Final = "SCRAM-SHA-256"
PLUS: Final = "SCRAM-SHA-256-PLUS"
"""With channel binding."""
_ITERATIONS: Final = 4096
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 18
_KEY_BYTES: Final = 32
_VERIFIER: Final = re.compile(r"SCRAM-SHA-256\$(\d{1,9}):([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+):([A-Za-z0-9+/=]+)")
_FIRST: Final = re.compile(r"(p=[^,]*|n|y),(a=[^,]*)?,((m=[^,]*,)?n=([^,]*),r=([\x21-\x2b\x2d-\x7e]+).*)", re.DOTALL)
_FINAL: Final = re.compile(r"(c=([A-Za-z0-9+/=]+),r=([\x21-\x2b\x2d-\x7e]+)(?:,.*)?),p=([A-Za-z0-9+/=]+)", re.DOTALL)
_BINDING: Final = "tls-server-end-point"


@dataclass(frozen=True, slots=True, repr=False)
class Verifier:
    """A role's verifier."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse rolpassword's text.  Raises PubsubError (22023) without repeating it."""
        match = _VERIFIER.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            found = cls(int(match[1]), *(b64decode(part, validate=True) for part in match.groups()[1:]))
        except ValueError:
            found = None
        if found is None or not found.iterations or {len(found.stored_key), len(found.server_key)} != {_KEY_BYTES}:
            raise PubsubError(
                "invalid SCRAM verifier",
                sqlstate="22023",
                hint='Copy it from "rolpassword" of pg_authid, or make one with python -m pubsub.backend.users NAME.',
            )
        return found

    @classmethod
    def of_password(cls, password: str, *, iterations: int = _ITERATIONS) -> Self:
        """Make a verifier for a password (scram_build_secret)."""
        salt = os.urandom(_SALT_BYTES)
        salted = hashlib.pbkdf2_hmac("sha256", prepared(password), salt, iterations)
        client_key = _hmac(salted, b"Client Key")
        return cls(iterations, salt, hashlib.sha256(client_key).digest(), _hmac(salted, b"Server Key"))

    @classmethod
    def mock(cls, name: str, secret: bytes) -> Self:
        """Make a verifier that no password fits, always the same for a name: nobody learns which names exist."""
        salt = _hmac(secret, name.encode("utf-8", "surrogateescape"))[:_SALT_BYTES]
        return cls(_ITERATIONS, salt, secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES))

    def __str__(self) -> str:
        salt, stored, server = (b64encode(one).decode() for one in (self.salt, self.stored_key, self.server_key))
        return f"{MECHANISM}${self.iterations}:{salt}${stored}:{server}"

    def __repr__(self) -> str:
        return "Verifier(…)"


@dataclass(frozen=True, slots=True, repr=False)
class Proven:
    """What a client has proven: enough to log in elsewhere with the same verifier."""

    verifier: Verifier
    client_key: bytes


class Exchange:
    """A server's side: `first` takes the client's first message, `final` its last.

    `binding`: what to bind to (tls-server-end-point's hash of our certificate); None without TLS.
    """

    def __init__(self, verifier: Verifier, binding: bytes | None) -> None:
        self._verifier = verifier
        self._binding = binding
        self._bare = self._server_first = ""
        self._nonce = ""
        self._header = b""

    def mechanisms(self) -> tuple[str, ...]:
        """Return the mechanisms to offer, the best first."""
        return (PLUS, MECHANISM) if self._binding is not None else (MECHANISM,)

    def first(self, mechanism: str, message: bytes) -> bytes:
        """Return the answer to client-first.  Raises ProtocolViolation (read_client_first_message)."""
        if mechanism not in self.mechanisms():
            raise ProtocolViolation("client selected an invalid SASL authentication mechanism")
        match = _FIRST.fullmatch(_text(message))
        if match is None:
            raise _malformed("The message could not be parsed.")
        flag = match[1]
        if match[2]:
            raise PubsubError("client uses authorization identity, but it is not supported", sqlstate="0A000")
        if match[4]:
            raise PubsubError("client requires an unsupported SCRAM extension", sqlstate="0A000")
        if mechanism == PLUS:
            if not flag.startswith("p="):
                raise _malformed(
                    "The client selected SCRAM-SHA-256-PLUS, but the SCRAM message does not include channel binding data."
                )
            if flag != f"p={_BINDING}":
                raise ProtocolViolation(f'unsupported SCRAM channel-binding type "{flag[2:]}"')
        elif flag.startswith("p="):
            raise _malformed(
                "The client selected SCRAM-SHA-256 without channel binding, but the SCRAM message includes channel binding data."
            )
        elif flag == "y" and self._binding is not None:
            raise PubsubError(
                "SCRAM channel binding negotiation error",
                sqlstate="28000",
                detail="The client supports SCRAM channel binding but thinks the server does not.  "
                "However, this server does support channel binding.",
            )
        bound = self._binding or b"" if mechanism == PLUS else b""
        self._header = _bytes(f"{flag},,") + bound
        self._bare = match[3]
        self._nonce = match[6] + b64encode(secrets.token_bytes(_NONCE_BYTES)).decode()
        salt = b64encode(self._verifier.salt).decode()
        self._server_first = f"r={self._nonce},s={salt},i={self._verifier.iterations}"
        return self._server_first.encode()

    def final(self, message: bytes) -> tuple[bytes, Proven] | None:
        """Return server-final and what was proven; None if the proof is wrong.  Raises ProtocolViolation."""
        match = _FINAL.fullmatch(_text(message))
        if match is None:
            raise _malformed("The message could not be parsed.")
        if _decoded(match[2]) != self._header:
            if self._header[:1] == b"p":
                raise ProtocolViolation("SCRAM channel binding check failed")
            raise ProtocolViolation("unexpected SCRAM channel-binding attribute in client-final-message")
        proof = _decoded(match[4])
        if len(proof) != _KEY_BYTES:
            raise _malformed("Malformed proof in client-final-message.")
        signed = _bytes(f"{self._bare},{self._server_first},{match[1]}")
        verifier = self._verifier
        client_key = _xor(proof, _hmac(verifier.stored_key, signed))
        proven = hmac.compare_digest(hashlib.sha256(client_key).digest(), verifier.stored_key)
        if not hmac.compare_digest(match[3], self._nonce) or not proven:
            return None
        signature = b64encode(_hmac(verifier.server_key, signed)).decode()
        return f"v={signature}".encode(), Proven(verifier, client_key)


class Login:
    """A client's side, with what another client has proven here.  Raises PubsubError where the server's verifier differs."""

    def __init__(self, proven: Proven) -> None:
        self._proven = proven
        self._nonce = b64encode(secrets.token_bytes(_NONCE_BYTES)).decode()
        self._bare = f"n=,r={self._nonce}"
        self._signature = b""

    def first(self) -> bytes:
        """Return client-first."""
        return f"n,,{self._bare}".encode()

    def final(self, server_first: bytes) -> bytes:
        """Return client-final."""
        match = re.fullmatch(r"r=([^,]+),s=([A-Za-z0-9+/=]+),i=(\d{1,9})", _text(server_first))
        verifier = self._proven.verifier
        if match is None or not match[1].startswith(self._nonce):
            raise _malformed("The server's first message could not be parsed.")
        if (_decoded(match[2]), int(match[3])) != (verifier.salt, verifier.iterations):
            raise PubsubError(
                "the upstream server has another password for this role",
                sqlstate="28P01",
                hint='Copy the role\'s "rolpassword" from pg_authid of the upstream server into auth_file again.',
            )
        without_proof = f"c=biws,r={match[1]}"
        signed = _bytes(f"{self._bare},{_text(server_first)},{without_proof}")
        self._signature = _hmac(verifier.server_key, signed)
        proof = _xor(self._proven.client_key, _hmac(verifier.stored_key, signed))
        return _bytes(f"{without_proof},p={b64encode(proof).decode()}")

    def check(self, server_final: bytes) -> None:
        """Raise PubsubError unless the server has the verifier, too."""
        text = _text(server_final)
        if not text.startswith("v=") or not hmac.compare_digest(_decoded(text[2:]), self._signature):
            raise PubsubError("incorrect server signature", sqlstate="28000")


def prepared(password: str) -> bytes:
    """Return a password as SCRAM takes it: normalized by SASLprep's rules, or as it is where these prohibit it."""
    import stringprep
    import unicodedata

    if password.isascii():
        return password.encode()
    mapped = "".join(
        " " if stringprep.in_table_c12(one) else "" if stringprep.in_table_b1(one) else one for one in password
    )
    found = unicodedata.normalize("NFKC", mapped)
    prohibited: tuple[Callable[[str], bool], ...] = (
        stringprep.in_table_c12, stringprep.in_table_c21_c22, stringprep.in_table_c3, stringprep.in_table_c4,
        stringprep.in_table_c5, stringprep.in_table_c6, stringprep.in_table_c7, stringprep.in_table_c8,
        stringprep.in_table_c9, stringprep.in_table_a1,
    )  # fmt: skip
    if not found or any(test(one) for one in found for test in prohibited):
        return password.encode()
    right = [one for one in found if stringprep.in_table_d1(one)]
    if right and (any(stringprep.in_table_d2(one) for one in found) or found[0] not in right or found[-1] not in right):
        return password.encode()
    return found.encode()


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _text(message: bytes) -> str:
    return message.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise _malformed("Malformed base64.") from error


def _malformed(detail: str) -> ProtocolViolation:
    return ProtocolViolation("malformed SCRAM message", detail=detail)
