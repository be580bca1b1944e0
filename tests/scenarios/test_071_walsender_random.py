"""Random DDL and DML in concurrent sessions, decoded and compared, in three ways.

    bytes      pgoutput's, against those of a logical slot on the same server
    streams    with logical_decoding_work_mem at 64kB on both sides: transactions compared whole, for where a server under
               concurrent DDL breaks its streams depends on what it still knows of transactions that have ended; where its
               own walsender fails (walsender_compare.py: ServerStream), it goes on without streaming
    replay     no slot anywhere, so that pruning and VACUUM bite: the changes applied, against the tables

Each prints its seed; PUBSUB_SEED repeats it, as far as sessions beside each other can be.  `make soak` lets them run for
PUBSUB_SOAK_SECONDS (3600) together; a round that fails is kept there, to be decoded again (walsender_evidence.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections import Counter
from typing import Literal, NamedTuple

import pytest

from pubsub.protocol.lsn import Lsn
from pubsub.testing.servers import EmbeddedPostgres
from tests import walsender_random
from tests.walsender_compare import Decoding, ServerStream, create_slot, differences, flush_lsn, inconsistency
from tests.walsender_evidence import Evidence, Run


class Done(NamedTuple):
    """Of one round."""

    statements: int
    messages: int


Kind = Literal["bytes", "streams", "replay"]
KINDS: tuple[Kind, ...] = ("bytes", "streams", "replay")


def run(version: str, kind: Kind, seed: int, seconds: float, evidence: Evidence | None = None) -> Done:
    """One round.  `evidence` is where everything is left if it fails."""
    print(f"version {version}, {kind}, seed {seed}", flush=True)
    r = random.Random(seed)
    settings: dict[str, str | int] = {
        "max_prepared_transactions": 20,
        "max_wal_size": "64MB",
        "min_wal_size": "64MB",
        "wal_keep_size": "2GB",
        "autovacuum_naptime": "1s",
        "wal_compression": r.choice(("off", "pglz")),
        "logical_decoding_work_mem": "64kB" if kind == "streams" else "64MB",
    }
    options = {"messages": "true"} | ({"streaming": "on"} if kind == "streams" else {})
    proto = "2" if kind == "streams" else "1"
    more = ["--work-mem", "64kB" if kind == "streams" else "4MB"]
    with (
        EmbeddedPostgres(version, settings=settings, data_dir=evidence.data if evidence else None) as server,
        contextlib.ExitStack() as stack,
    ):
        server.create_database("db")
        with server.connect("db") as connection:
            for statement in walsender_random.SETUP.split(";\n"):
                if statement.strip():
                    connection.execute(statement.encode())
        start = evidence.begin(server, "db") if evidence else ""
        stream = None
        if kind != "replay":
            create_slot(server, "db", "compare", "pgoutput")
            stream = stack.enter_context(
                ServerStream(server, "db", "compare", {"proto_version": proto, **options, "publication_names": "p"})
            )
        given = [f"{name}={value}" for name, value in options.items()]
        decoding = stack.enter_context(Decoding(server, "db", proto_version=int(proto), options=given, more=more))
        end = 0
        try:
            decoding.wait_consistent()
            done = walsender_random.run(server, "db", seed, seconds, rewrite_types=kind != "replay")
            end = flush_lsn(server, "db")
            decoding.wait_for(end, 300.0)
            ours = decoding.stop()
            print(f"{done} statements, {len(ours)} messages", flush=True)
            assert len(ours) > 10
            assert inconsistency(ours) == ""
            if stream is None:
                replica = walsender_random.Replica()
                replica.apply(ours)
                assert replica.difference(server, "db") == ""
            else:
                theirs = stream.wait_for(end, 300.0)
                found = differences(ours, theirs, whole=kind == "streams", stopped=stream.stopped)
                if stream.failed:
                    ended = f", for good after {len(theirs)} messages" if stream.stopped else ""
                    print(f"the server's own walsender had failed: {stream.failed}{ended}", flush=True)
                if found:
                    pytest.fail(found[:10_000])
        except BaseException:
            if evidence is not None:
                arguments = ["--publication", "p", "--proto-version", proto, *more]
                for option in given:
                    arguments += ["--option", option]
                sent = None if stream is None else stream.found
                what = Run(version, kind, seed, tuple(arguments), start, str(Lsn(end)) if end else "")
                evidence.keep(what, decoding.output.read_bytes(), decoding.errors, sent)
            raise
    return Done(done, len(ours))


def _seed() -> int:
    return int(os.environ.get("PUBSUB_SEED") or random.randrange(1 << 30))


@pytest.mark.parametrize(("version", "kind"), [("18", "bytes"), ("16", "streams"), ("15", "replay")])
def test_random_changes(version: str, kind: Kind) -> None:
    run(version, kind, _seed(), 4.0)


@pytest.mark.soak
def test_random_changes_for_long() -> None:
    begun = time.monotonic()
    deadline = begun + float(os.environ.get("PUBSUB_SOAK_SECONDS", "3600"))
    rounds: Counter[tuple[str, Kind]] = Counter()
    statements = messages = 0
    for version, kind in itertools.cycle(itertools.product(("18", "15", "17", "16"), KINDS)):
        if time.monotonic() > deadline:
            break
        evidence = Evidence()
        done = run(version, kind, _seed(), random.choice((5.0, 30.0, 120.0)), evidence)
        evidence.discard()
        rounds[version, kind] += 1
        statements += done.statements
        messages += done.messages
        print(
            f"{time.monotonic() - begun:.0f} s, {statements} statements, {messages} messages; {dict(rounds)}",
            flush=True,
        )
