"""Whether a store refuses to replace an object: the request, its signature, and what each answer means."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pubsub import object_stores
from pubsub.delta.conditional_put import Keys, require_conditional_put, signed
from pubsub.delta.places import StorePath
from pubsub.delta.warehouse_check import require_writable
from pubsub.errors import PubsubError

KEYS = {"spark.hadoop.fs.s3a.access.key": "me", "spark.hadoop.fs.s3a.secret.key": "secret"}
NOT_KNOWN = b"<Error><Code>NotImplemented</Code></Error>"


class Store:
    """Answers each PUT with the next of `answers`, and the last one again; keeps what was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = [(412, b"")]
        self.asked: list[dict[str, str]] = []
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                store.asked.append({"path": self.path, **{name.lower(): at for name, at in self.headers.items()}})
                status, answer = store.answers[0] if len(store.answers) == 1 else store.answers.pop(0)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    found = Store()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    object_stores.configure({**KEYS, "spark.hadoop.fs.s3a.endpoint": found.endpoint})
    yield found
    object_stores.configure({})
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def test_the_signature_of_amazon_s_example() -> None:
    """From "Authenticating Requests: Using the Authorization Header", Amazon S3's API reference."""
    keys = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", None, "us-east-1")
    found = signed(
        "PUT",
        "https://examplebucket.s3.amazonaws.com/test%24file.text",
        {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
        b"Welcome to Amazon S3.",
        keys,
        datetime(2013, 5, 24, tzinfo=UTC),
    )
    assert found["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class, "
        "Signature=98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"
    )


def test_a_store_that_refuses(store: Store) -> None:
    assert require_conditional_put("s3a://lake/a b/_probe") is None
    (asked,) = store.asked
    assert (asked["path"], asked["if-none-match"]) == ("/lake/a%20b/_probe", "*")
    assert "Credential=me/" in asked["authorization"]
    assert "if-none-match;" in asked["authorization"]


@pytest.mark.parametrize(
    ("answer", "how"),
    [((200, b""), "replaced"), ((501, NOT_KNOWN), "does not know"), ((400, NOT_KNOWN), "does not know")],
)
def test_a_store_without_conditional_puts(store: Store, answer: tuple[int, bytes], how: str) -> None:
    store.answers = [answer]
    with pytest.raises(PubsubError, match="has no conditional puts") as caught:
        require_conditional_put("s3a://lake/_probe")
    assert how in (caught.value.detail or "")
    assert caught.value.hint


def test_a_store_that_is_busy_is_asked_again(store: Store) -> None:
    store.answers = [(503, b"SlowDown"), (200, b"")]
    with pytest.raises(PubsubError, match="has no conditional puts"):
        require_conditional_put("s3a://lake/_probe")
    store.answers = [(503, b"SlowDown")]
    assert require_conditional_put("s3a://lake/_probe") == "The store answered 503: SlowDown"


def test_an_answer_that_tells_nothing_is_passed_on(store: Store) -> None:
    store.answers = [(403, b"AccessDenied")]
    assert require_conditional_put("s3a://lake/_probe") == "The store answered 403: AccessDenied"
    object_stores.configure({**KEYS, "spark.hadoop.fs.s3a.endpoint": "http://127.0.0.1:1"})
    assert "refused" in (require_conditional_put("s3a://lake/_probe") or "")


def test_keys_of_the_environment_and_of_a_profile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    object_stores.configure({"spark.hadoop.fs.s3a.endpoint": store.endpoint})
    assert "a profile or a role" in (require_conditional_put("s3a://lake/_probe") or "")
    assert store.asked == []
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "for a while")
    assert require_conditional_put("s3a://lake/_probe") is None
    (asked,) = store.asked
    assert asked["x-amz-security-token"] == "for a while"
    assert "Credential=of-the-environment/" in asked["authorization"]


def test_a_warehouse_in_such_a_store_cannot_be_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[StorePath] = []
    monkeypatch.setattr(StorePath, "write_bytes", lambda self, _: written.append(self))
    monkeypatch.setattr(StorePath, "iterdir", lambda _: iter(written))
    monkeypatch.setattr(StorePath, "read_bytes", lambda _: b"probe")
    monkeypatch.setattr(StorePath, "unlink", lambda self, **_: written.remove(self))
    assert require_writable("s3a://lake/t") is None
    assert store.asked[-1]["path"].startswith("/lake/t/_pubsub_")
    store.answers = [(200, b"")]
    with pytest.raises(PubsubError, match="has no conditional puts"):
        require_writable("s3a://lake/t")
    assert written == []


def test_amazon_s_own_store_is_not_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anybody asked where the bucket lies, which takes seconds without a network."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    object_stores.configure(KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(object_stores, "_region_at_amazon", lambda bucket: pytest.fail(bucket))
        assert require_conditional_put("s3a://lake/_probe") is None
    assert store.asked == []
