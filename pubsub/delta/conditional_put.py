"""Try whether a store that speaks S3 refuses to replace an object (If-None-Match), by which a commit gets its version.

A store that takes the header and ignores it would let two writers make the same version, and one of the commits would
be lost without an error.  Neither Arrow nor deltalake can put an object so by name, so the request is made here, and
signed as S3 asks for it (AWS Signature Version 4).  It blocks.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote, urlsplit

from pubsub import object_stores
from pubsub.errors import PubsubError

_SECONDS: Final = 10.0
_ATTEMPTS: Final = 3
#: What a store may answer of its error, in bytes.
_ANSWER: Final = 2000
# 409: two conditional requests at once, one of which was refused.
_REFUSED: Final = (409, 412)
_UNKNOWN: Final = (400, 501)
_HINT: Final = (
    "Amazon's S3, MinIO, Ceph and versitygw have conditional puts in their present versions. With another store, two "
    "writers of one table lose each other's commits."
)


@dataclass(frozen=True, slots=True)
class Keys:
    """What requests are signed with."""

    access: str
    secret: str
    token: str | None
    region: str


def require_conditional_put(uri: str) -> str | None:
    """Put the object at `uri`, which exists, as if it must not.  Raises PubsubError if the store replaces it.

    Returns why that could not be tried; None if the store refused.  Amazon's own store is not asked: it does.
    """
    endpoint = object_stores.endpoint(uri)
    if endpoint is None:
        return None
    keys = _keys(object_stores.options(uri) or {})
    if keys is None:
        return "The keys come from a profile or a role, where Spark and Arrow alone look for them."
    try:
        status, answer = _put(f"{endpoint.rstrip('/')}/{quote(uri.partition('://')[2])}", keys)
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    if status in _REFUSED:
        return None
    if status < 300 or (status in _UNKNOWN and "NotImplemented" in answer):
        how = "replaced an object that was there" if status < 300 else "does not know this header"
        raise PubsubError(
            f'the store at "{endpoint}" has no conditional puts',
            sqlstate="0A000",
            detail=f"With If-None-Match it {how}.",
            hint=_HINT,
        )
    return f"The store answered {status}: {answer}"


def _keys(found: Mapping[str, str]) -> Keys | None:
    if "AWS_SKIP_SIGNATURE" in found:
        return None
    # The token belongs to the keys: those of the settings are not mixed with the environment's.
    source = found if "AWS_ACCESS_KEY_ID" in found else os.environ
    access, secret = source.get("AWS_ACCESS_KEY_ID"), source.get("AWS_SECRET_ACCESS_KEY")
    if not access or not secret:
        return None
    return Keys(access, secret, source.get("AWS_SESSION_TOKEN") or None, found["AWS_REGION"])


def _put(url: str, keys: Keys) -> tuple[int, str]:
    """Return the status and the beginning of the answer; a store that is busy is asked again."""
    split = urlsplit(url)
    kind = http.client.HTTPSConnection if split.scheme == "https" else http.client.HTTPConnection
    status, answer = 0, ""
    for _ in range(_ATTEMPTS):
        connection = kind(split.hostname or "", split.port, timeout=_SECONDS)
        try:
            headers = signed("PUT", url, {"if-none-match": "*"}, b"again", keys, datetime.now(UTC))
            connection.request("PUT", split.path, b"again", headers)
            response = connection.getresponse()
            status, answer = response.status, response.read(_ANSWER).decode(errors="replace")
        finally:
            connection.close()
        if status < 500 or status == 501:
            break
    return status, answer


def signed(method: str, url: str, headers: Mapping[str, str], body: bytes, keys: Keys, at: datetime) -> dict[str, str]:
    """Return the headers of a request, signed.  The URL is quoted and has no query; names of headers are in lower case."""
    split = urlsplit(url)
    moment, day = f"{at:%Y%m%dT%H%M%SZ}", f"{at:%Y%m%d}"
    digest = hashlib.sha256(body).hexdigest()
    whole = {**headers, "host": split.netloc, "x-amz-content-sha256": digest, "x-amz-date": moment}
    if keys.token is not None:
        whole["x-amz-security-token"] = keys.token
    names = ";".join(sorted(whole))
    lines = [f"{name}:{whole[name].strip()}\n" for name in sorted(whole)]
    request = "\n".join([method, split.path, "", "".join(lines), names, digest])
    scope = f"{day}/{keys.region}/s3/aws4_request"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{keys.secret}".encode()
    for part in (*scope.split("/"), to_sign):
        key = hmac.digest(key, part.encode(), "sha256")
    credential = f"Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    return {**whole, "authorization": f"AWS4-HMAC-SHA256 {credential}"}
