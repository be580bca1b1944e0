"""A publisher that lies about lengths, LSNs, types, names and order, sends forever or not at all.

Whatever it says, the node names an error that it knows, keeps its rows and memory, writes nothing outside the warehouse, and
goes on when the publisher behaves again.
"""

from __future__ import annotations

import itertools
import random
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from deltalake import DeltaTable, QueryBuilder

from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import PubsubError
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.hostile_publisher import (
    HostilePublisher,
    Lie,
    data_row,
    fields,
    instead,
    message,
    of_stream,
    patched,
    raw,
)
from tests.support.replica import Replica, RunningNode, read, wait_until

_numbers = itertools.count(1)
#: What Python's and Spark's own errors look like once they are texts.
UNFORESEEN = re.compile(r"^(\w*(Error|Exception|Warning)|KeyError|StopIteration)\b")
LIMIT = 1 << 20


class Lied(Replica):
    """A subscription by way of a publisher that lies."""

    def __init__(self, node: RunningNode, database: Database, hostile: HostilePublisher) -> None:
        super().__init__(node, database)
        self.hostile = hostile

    @property
    def conninfo(self) -> str:
        return self.database.server.conninfo(
            self.database.name, port=self.hostile.port, sslmode="disable", gssencmode="disable"
        )


@pytest.fixture(scope="module")
def node(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    home = tmp_path_factory.mktemp("hostile") / "outer" / "node"
    home.mkdir(parents=True)
    settings = {
        "wal_receiver_timeout": "2s",
        "max_message_size": f"{LIMIT >> 10}kB",
        "logical_decoding_work_mem": "1MB",
    }
    with RunningNode(home, spark, **settings) as node:
        yield node


@pytest.fixture(scope="module")
def hostile(publisher: EmbeddedPostgres) -> Iterator[HostilePublisher]:
    with HostilePublisher(publisher.port) as hostile:
        yield hostile


@pytest.fixture
def replica(node: RunningNode, database: Database, hostile: HostilePublisher) -> Iterator[Lied]:
    replica = Lied(node, database, hostile)
    replica.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (0, 'copied')")
    replica.execute("CREATE PUBLICATION p FOR TABLE t")
    yield replica
    hostile.behave()
    if replica.created:
        replica.drop()
    assert replica.slots() == []


@pytest.fixture(autouse=True)
def nothing_outside(node: RunningNode) -> Iterator[None]:
    """Nothing is made outside the warehouse and the node's own directory."""
    outer = node.home.parents[1]
    yield
    assert {str(path.relative_to(outer)) for path in outer.glob("*/*")} == {"outer/node"}
    assert not Path("/tmp/hostile").exists()


def relation(
    name: bytes = b"t", schema: bytes = b"public", columns: Iterable[tuple[bytes, int]] = ()
) -> Callable[[bytes], bytes]:
    """A Relation message with the true oid, and these names and types."""

    def change(true: bytes) -> bytes:
        listed = list(columns) or [(b"id", 23), (b"v", 25)]
        body = b"".join(
            struct.pack(">B", not at) + one + b"\0" + struct.pack(">Ii", oid, -1)
            for at, (one, oid) in enumerate(listed)
        )
        return true[:5] + schema + b"\0" + name + b"\0d" + struct.pack(">H", len(listed)) + body

    return change


def error(**more: bytes) -> bytes:
    known = {"S": b"ERROR", "V": b"ERROR", "C": b"55000", "M": b"no"}
    return b"".join(name.encode() + value + b"\0" for name, value in {**known, **more}.items()) + b"\0"


I_OID, I_COLUMNS, I_LENGTH = 1, 6, 9  # where an Insert has its relation, its count of columns, its first value's length
STREAM: dict[str, Lie] = {
    "a relation that was never named": instead(b"I", patched(I_OID, ">I", 4_000_000_000)),
    "more columns than there are": instead(b"I", patched(I_COLUMNS, ">H", 65_535)),
    "fewer columns than there are": instead(b"I", patched(I_COLUMNS, ">H", 1)),
    "no column": instead(b"I", patched(I_COLUMNS, ">H", 0)),
    "a value of 2 GB": instead(b"I", patched(I_LENGTH, ">i", 0x7FFFFFFF)),
    "a value of a negative length": instead(b"I", patched(I_LENGTH, ">i", -5)),
    "a value that is no number": instead(b"I", patched(I_LENGTH + 4, ">c", b"x")),
    "a value that is no text": instead(b"I", patched(-1, ">c", b"\xff")),
    "a kind of value that there is not": instead(b"I", patched(I_LENGTH - 1, ">c", b"Z")),
    "an unknown kind of message": instead(b"I", lambda true: b"\x07" + true[1:]),
    "an empty message": instead(b"I", b""),
    "half a message": instead(b"I", lambda true: true[: len(true) // 2]),
    "a message and more": instead(b"I", lambda true: true + b"more"),
    "an update of a key that is not there": instead(b"I", lambda true: b"U" + true[1:5] + b"X" + true[5:]),
    "a truncation of what was never named": instead(b"I", b"T" + struct.pack(">IBI", 1, 0, 4_000_000_000)),
    "a truncation of four billion tables": instead(b"I", b"T" + struct.pack(">IBI", 0xFFFFFFFF, 0, 1)),
    "no begin": instead(b"B"),
    "two begins": instead(b"B", lambda true: true, lambda true: true),
    "a commit before the begin": instead(b"B", b"C\0" + bytes(24), lambda true: true),
    "a commit of another transaction": instead(b"C", patched(2, ">Q", 5)),
    "a commit at LSN 0": instead(b"C", patched(2, ">QQ", 0, 0)),
    "a commit far in the future": instead(b"C", patched(10, ">Q", (1 << 64) - 1)),
    "a stream's end without its begin": instead(b"I", b"E"),
    "a stream in a transaction": instead(b"I", b"S" + struct.pack(">IB", 7, 1)),
    "a commit of a stream that never was": instead(b"I", b"c" + struct.pack(">IBQQQ", 7, 0, 8, 9, 0)),
    "an abort of a stream that never was": instead(b"B", b"A" + struct.pack(">II", 7, 7)),
    "a prepared transaction in a transaction": instead(b"I", b"b" + struct.pack(">QQQI", 8, 9, 0, 7) + b"gid\0"),
    "a commit of what was not prepared": instead(b"I", b"K\0" + struct.pack(">QQQI", 8, 9, 0, 7) + b"../../x\0"),
    "a relation with no columns": instead(b"R", lambda true: relation()(true)[:15] + b"\0\0"),
    "a relation of 65535 columns": instead(b"R", lambda true: relation()(true)[:15] + b"\xff\xff"),
    "two columns of one name": instead(b"R", relation(columns=[(b"id", 23), (b"id", 25)])),
    "a column of a type that there is not": instead(b"R", relation(columns=[(b"id", 23), (b"v", 4_000_000_000)])),
    "a column whose name is a megabyte": instead(b"R", relation(columns=[(b"id", 23), (b"v" * 1_000_000, 25)])),
    "a column whose name is no text": instead(b"R", relation(columns=[(b"id", 23), (b"\xff\xfe", 25)])),
    "a column without a name": instead(b"R", relation(columns=[(b"id", 23), (b"", 25)])),
    "a name that leads out of the warehouse": instead(b"R", relation(name=b"../../../../../../tmp/hostile")),
    "a schema that leads out of the warehouse": instead(b"R", relation(schema=b"../../..")),
    "a message past the limit": instead(b"I", lambda true: true[:I_LENGTH] + struct.pack(">i", 2 * LIMIT) + bytes(2 * LIMIT)),
    "a frame of an unknown kind": of_stream(lambda _, true: [message(b"d", b"?")] if true[:1] == b"I" else None),
    "a frame that is cut": of_stream(lambda head, true: [message(b"d", head[:9])] if true[:1] == b"I" else None),
    "a message of a length below 4": raw(b"I", b"d\0\0\0\0"),
    "a message of a length of 2 GB, of which nothing comes": raw(b"I", b"d\x7f\xff\xff\xff"),
    "a message of an unknown kind": raw(b"I", message(b"\x01", b"what?")),
    "an error with a field of a megabyte": raw(b"I", message(b"E", error(M=b"m" * 1_000_000, D=b"d" * 1_000_000))),
    "an error without fields": raw(b"I", message(b"E", b"\0")),
    "an error with a SQLSTATE of another length": raw(b"I", message(b"E", error(C=b"not a sqlstate at all"))),
    "an error that is no text": raw(b"I", message(b"E", error(M=b"\xff\xfe\xfd"))),
    "an end of the copy": raw(b"I", message(b"c", b""), message(b"C", b"COPY 0\0")),
    "bytes that are no messages": raw(b"I", bytes(range(256)) * 64),
}  # fmt: skip


def known(text: str) -> str:
    """Assert that an error is one that the program knows, and of a size that can be shown; return it."""
    assert not UNFORESEEN.match(text), text
    assert len(text) < 10_000
    return text


def answered(replica: Lied) -> bool:
    """Return whether a worker has failed, with an error that the program knows, or the row is there."""
    if failure := replica.node.statistics(replica.name)["error"]:
        return bool(known(failure))
    (relation,) = replica.node.relations(replica.name)  # a lie may have renamed it
    found = QueryBuilder().register("t", DeltaTable(relation.path)).execute("SELECT id FROM t WHERE id = 1")
    return bool(read(found))


@pytest.mark.parametrize(
    "lie", [one if one.startswith("a value that") else pytest.param(one, marks=pytest.mark.full) for one in STREAM]
)
def test_a_lie_in_a_stream(replica: Lied, lie: str) -> None:
    replica.subscribe()
    replica.assert_equal("t")
    before = psutil.Process().memory_info().rss
    replica.hostile.tell(STREAM[lie])
    replica.execute("INSERT INTO t VALUES (1, 'one')")
    wait_until(lambda: replica.hostile.told, "the lie to be told")
    wait_until(lambda: answered(replica), "the node to answer", 30)
    # libpq takes a message as it comes: never more than what was sent.
    assert psutil.Process().memory_info().rss - before < 300 << 20
    replica.hostile.behave()
    replica.execute("INSERT INTO t VALUES (2, 'two')")
    replica.assert_equal("t")


ENDLESS: dict[str, Callable[[HostilePublisher], Lie]] = {
    "silence": lambda hostile: of_stream(lambda _, true: hostile.silence() if true[:1] == b"I" else None),
    "half a message, then silence": lambda hostile: of_stream(
        lambda _, true: itertools.chain([b"d\0\0\1\0w12345"], hostile.silence()) if true[:1] == b"I" else None
    ),
    "a value that never ends": lambda _: of_stream(
        lambda head, true: (
            itertools.chain([b"d\x7f\xff\xff\xff" + head + true[:I_LENGTH]], itertools.repeat(bytes(1000), 200_000))
            if true[:1] == b"I"
            else None
        )
    ),
    "keepalives for ever": lambda _: of_stream(
        lambda _, true: itertools.repeat(message(b"d", b"k" + bytes(16) + b"\1")) if true[:1] == b"I" else None
    ),
    "notices for ever": lambda _: of_stream(
        lambda _, true: itertools.repeat(message(b"N", error(M=b"n" * 10_000))) if true[:1] == b"I" else None
    ),
    "begins for ever": lambda _: of_stream(
        lambda head, true: itertools.repeat(message(b"d", head + true)) if true[:1] == b"B" else None
    ),
    "one insert for ever": lambda _: of_stream(
        lambda head, true: (
            itertools.islice(itertools.repeat(message(b"d", head + true)), 300_000) if true[:1] == b"I" else None
        )
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("lie", ENDLESS)
def test_what_never_ends_holds_up_nobody_else(replica: Lied, publisher: EmbeddedPostgres, lie: str) -> None:
    """Another subscription of the node goes on meanwhile, and memory does not grow with what is sent."""
    replica.execute("CREATE TABLE u (id int PRIMARY KEY)", "CREATE PUBLICATION other FOR TABLE u")
    beside = Replica(replica.node, replica.database)
    replica.subscribe()
    beside.subscribe("other")
    try:
        replica.assert_equal("t")
        before = psutil.Process().memory_info().rss
        replica.hostile.tell(ENDLESS[lie](replica.hostile))
        replica.execute("INSERT INTO t VALUES (1, 'one')", "INSERT INTO u SELECT generate_series(1, 1000)")
        wait_until(lambda: replica.hostile.told, "the lie to be told")
        beside.assert_equal("u")
        assert psutil.Process().memory_info().rss - before < 500 << 20
        replica.hostile.behave()
        replica.execute("INSERT INTO t VALUES (2, 'two')")
        replica.assert_equal("t")
        if failure := replica.node.statistics(replica.name)["error"]:
            known(failure)
    finally:
        replica.hostile.behave()
        beside.drop()


GARBAGE = (
    None, b"", b"x", b"-1", b"0", b"99999999999999999999999", b"../../../../../../tmp/hostile", b"/tmp/hostile", b"a\0b",
    b"\xff\xfe", b"n" * 100_000, b"{", b"{{{1,2", b"0/", b"f", b"\n", b"'; DROP TABLE t; --",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_garbage_in_the_answers_to_queries(replica: Lied, seed: int) -> None:
    """CREATE SUBSCRIPTION works, or says what is wrong; the copies and the stream do, too."""
    chance = random.Random(seed)
    for _ in range(12):
        target, garbage, whole = chance.randrange(25), chance.choice(GARBAGE), chance.random() < 0.2
        seen = itertools.count()

        def lie(kind: bytes, body: bytes) -> Iterable[bytes] | None:
            if kind != b"D" or next(seen) != target:  # noqa: B023 (used within this pass alone)
                return None
            values = fields(body)
            if whole or not values:  # noqa: B023
                return [data_row([garbage] * chance.randrange(5))]  # noqa: B023
            values[chance.randrange(len(values))] = garbage  # noqa: B023
            return [data_row(values)]

        replica.hostile.tell(lie)
        try:
            replica.subscribe()
        except PubsubError as failure:
            known(failure.message)
        else:
            wait_until(lambda: replica.hostile.told or set(replica.states().values()) == {"r"}, "the lie or a copy")
            if failure := replica.node.statistics(replica.name)["error"]:
                known(failure)
        replica.hostile.behave()
        if replica.created:
            replica.drop()
        for slot in replica.slots():  # a lie may have hidden a slot from the node that made it
            replica.database.server.drop_slot(slot)
