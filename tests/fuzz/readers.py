"""The readers of files and texts, each with samples that it reads; what protocols and WAL send has tests in tests/property.

A reader may refuse its input with a PubsubError or what else its docstring promises (`allowed`), and returns otherwise.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyroaring import BitMap64

from pubsub.backend import messages, users
from pubsub.backend.scram import Verifier
from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.table_log import TableLog
from pubsub.errors import PubsubError
from pubsub.protocol import pgoutput
from pubsub.protocol.copyboth import read_client_message, read_server_message
from pubsub.protocol.timeline import parse_history
from pubsub.settings import Settings
from pubsub.sql.parser import parse
from tests.support import frames
from walsender import repl_gram

TABLE = Path(__file__).parents[1] / "data" / "damaged_by_alter"


@dataclass(frozen=True)
class Reader:
    """`read` takes a directory of its own and the bytes."""

    samples: tuple[bytes, ...]
    read: Callable[[Path, bytes], object]
    allowed: tuple[type[Exception], ...] = (PubsubError,)


def _messages() -> tuple[bytes, ...]:
    sent = frames.transaction(
        100,
        frames.relation(7, "t"),
        frames.insert(7, 1, "x"),
        frames.update(7, 1, "y", old=(1, None)),
        frames.delete(7, 1, None),
        frames.truncate(7),
    )
    return tuple(one[25:] for one in sent)


def _commit(directory: Path, data: bytes) -> None:
    log = directory / "_delta_log"
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_bytes(data)
    TableLog(str(directory)).refresh()


def _checkpoint(directory: Path, data: bytes) -> None:
    log = directory / "_delta_log"
    shutil.rmtree(log, ignore_errors=True)
    shutil.copytree(TABLE / "_delta_log", log)
    (log / f"{0:020}.json").unlink()
    (log / f"{2:020}.checkpoint.parquet").write_bytes(data)
    TableLog(str(directory)).refresh()


def _vector() -> bytes:
    return deletion_vectors._MAGIC + BitMap64([1, 5, 1 << 33, *range(100, 3000)]).serialize()


def _settings(directory: Path, data: bytes) -> None:
    (directory / "pubsub.toml").write_bytes(data)
    Settings.load(directory)


def _users(directory: Path, data: bytes) -> None:
    path = directory / "users"
    path.touch(0o600)
    path.write_bytes(data)
    users.read(path)


def _text(read: Callable[[str], object]) -> Callable[[Path, bytes], object]:
    return lambda _, data: read(data.decode("utf-8", "replace"))


SETTINGS = b"""
warehouse = "s3://a/b"
wal_receiver_timeout = "60s"
[catalog]
url = "postgresql://a:b@c/d"
[housekeeping]
window = "01:00-02:00"
[walsender]
listen = "127.0.0.1:6432"
max_wal_senders = 3
[spark.conf]
spark.driver.memory = "2g"
"""

READERS: dict[str, Reader] = {
    "pgoutput": Reader(_messages(), lambda _, data: pgoutput.read_message(data)),
    "server-frames": Reader(
        (*frames.transaction(100, frames.insert(7, 1, "x")), frames.keepalive(5)),
        lambda _, data: read_server_message(data),
    ),
    "client-frames": Reader((b"r" + bytes(33), b"h" + bytes(24)), lambda _, data: read_client_message(data)),
    "startup": Reader(
        (b"user\0me\0database\0d\0replication\0database\0\0",), lambda _, data: messages.parameters(data)
    ),
    "replication-commands": Reader(
        (
            b"CREATE_REPLICATION_SLOT \"s\" LOGICAL pgoutput (SNAPSHOT 'export', TWO_PHASE true)",
            b"START_REPLICATION SLOT s LOGICAL 0/16B3748 (proto_version '4', publication_names '\"p\"')",
            b"ALTER_REPLICATION_SLOT s (FAILOVER true)",
        ),
        _text(repl_gram.parse_command),
    ),
    "sql": Reader(
        (
            b"CREATE SUBSCRIPTION s CONNECTION 'host=h password=x' PUBLICATION p, q WITH (streaming = parallel, origin = none)",
            b"ALTER SUBSCRIPTION s SKIP (lsn = '0/16B3748'); DROP SUBSCRIPTION IF EXISTS s",
        ),
        _text(parse),
    ),
    "timeline-history": Reader(
        (b"1\t0/3000158\tno recovery target specified\n2\t0/5000000\tx\n",), _text(lambda text: parse_history(3, text))
    ),
    "settings": Reader((SETTINGS,), _settings),
    "users": Reader((users.line("me", Verifier.of_password("word", iterations=1), "replication").encode(),), _users),
    "delta-commit": Reader(((TABLE / "_delta_log" / f"{0:020}.json").read_bytes(),), _commit),
    "delta-checkpoint": Reader(((TABLE / "_delta_log" / f"{2:020}.checkpoint.parquet").read_bytes(),), _checkpoint),
    "deletion-vector": Reader((_vector(),), lambda _, data: deletion_vectors._decode(data, "x")),
}
