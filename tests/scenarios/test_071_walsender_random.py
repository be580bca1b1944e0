"""Random DDL and DML in concurrent sessions, decoded and compared, in three ways.

    bytes      pgoutput's, or test_decoding's lines, against those of a logical slot on the same server
    streams    with logical_decoding_work_mem at 64kB on both sides: transactions are compared whole, because where a
               server breaks its streams under concurrent DDL depends on what it still knows of transactions that have
               ended; where its own walsender fails (walsender_decodings.py: ServerStream), it goes on without streaming
    replay     no slot anywhere, so that pruning and VACUUM take effect: the changes applied, against the tables

The request to both (plugin, protocol, two_phase, publications and so on) is drawn from the seed
(walsender_options.py).  Each round prints its seed; PUBSUB_SEED repeats it, as far as concurrent sessions can be
repeated.  `make soak` lets them run for PUBSUB_SOAK_SECONDS (3600) together; it keeps a round that fails, to be decoded
again (walsender_evidence.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections import Counter
from typing import NamedTuple

import pytest

from pubsub.protocol.lsn import Lsn
from pubsub.testing.servers import EmbeddedPostgres
from tests.support import walsender_random
from tests.support.walsender_compare import differences, inconsistency
from tests.support.walsender_decodings import Decoding, ServerStream, as_sent, create_slot, flush_lsn
from tests.support.walsender_evidence import Evidence, Run
from tests.support.walsender_options import KINDS, Kind, draw


class Done(NamedTuple):
    """The figures of one round."""

    statements: int
    messages: int


def run(version: str, kind: Kind, seed: int, seconds: float, evidence: Evidence | None = None) -> Done:
    """Run one round; if it fails, leave everything in `evidence`."""
    r = random.Random(seed)
    asked = draw(version, kind, r)
    print(f"version {version}, {kind}, seed {seed}: {asked}", flush=True)
    settings: dict[str, str | int] = {
        "max_prepared_transactions": 20,
        "max_wal_size": "64MB",
        "min_wal_size": "64MB",
        "wal_keep_size": "2GB",
        "autovacuum_naptime": "1s",
        "wal_compression": r.choice(("off", "pglz")),
        "logical_decoding_work_mem": "64kB" if kind == "streams" else "64MB",
    }
    pgoutput = asked.plugin == "pgoutput"
    with (
        EmbeddedPostgres(version, settings=settings, data_dir=evidence.data if evidence else None) as server,
        contextlib.ExitStack() as stack,
    ):
        server.create_database("db")
        walsender_random.set_up(server, "db", asked.publications)
        start = evidence.begin(server, "db") if evidence else ""
        stream = None
        if kind != "replay":
            create_slot(server, "db", "compare", asked.plugin, two_phase=asked.two_phase)
            stream = stack.enter_context(ServerStream(server, "db", "compare", asked.of_slot()))
        decoding = stack.enter_context(Decoding(server, "db", asked=asked))
        end = 0
        try:
            decoding.wait_consistent()
            done = walsender_random.run(
                server, "db", seed, seconds, replayed=kind == "replay", publications=asked.publications
            )
            end = flush_lsn(server, "db")
            decoding.wait_for(end, 300.0)
            ours = decoding.stop()
            print(f"{done} statements, {len(ours)} messages", flush=True)
            assert len(ours) > 10
            if pgoutput:
                parallel = asked.options.get("streaming") == "parallel"
                only_local = asked.options.get("origin") == "none"
                assert inconsistency(ours, parallel=parallel, only_local=only_local) == ""
            if stream is None:
                replica = walsender_random.Replica()
                replica.apply(ours)
                assert replica.difference(server, "db") == ""
            else:
                theirs = stream.wait_for(end, 300.0)
                found = differences(
                    as_sent(ours, pgoutput=pgoutput),
                    as_sent(theirs, pgoutput=pgoutput),
                    pgoutput=pgoutput,
                    whole=kind == "streams",
                    stopped=stream.stopped,
                )
                if stream.failed:
                    ended = f", for good after {len(theirs)} messages" if stream.stopped else ""
                    print(f"the server's own walsender had failed: {stream.failed}{ended}", flush=True)
                if found:
                    pytest.fail(found[:10_000])
        except BaseException:
            if evidence is not None:
                sent = None if stream is None else stream.found
                what = Run(version, kind, seed, tuple(asked.arguments()), start, str(Lsn(end)) if end else "")
                evidence.keep(what, decoding.output.read_bytes(), decoding.errors, sent)
            raise
    return Done(done, len(ours))


def _seed() -> int:
    return int(os.environ.get("PUBSUB_SEED") or random.randrange(1 << 30))


@pytest.mark.parametrize(
    ("version", "kind"), [("18", "bytes"), ("16", "streams"), ("15", "replay"), *itertools.product(("19",), KINDS)]
)
def test_random_changes(version: str, kind: Kind) -> None:
    run(version, kind, _seed(), 4.0)


@pytest.mark.soak
def test_random_changes_for_long() -> None:
    begun = time.monotonic()
    deadline = begun + float(os.environ.get("PUBSUB_SOAK_SECONDS", "3600"))
    rounds: Counter[tuple[str, Kind]] = Counter()
    statements = messages = 0
    for version, kind in itertools.cycle(itertools.product(("18", "15", "17", "16", "19"), KINDS)):
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
