"""Batching: wherever a stream is cut or breaks, the tables become the publisher's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from apply.batch import Batch
from apply.pipeline.dispatch import Dispatcher
from apply.staging.destination import Destination
from apply.staging.stage_batch import stage_batch
from apply.staging.staged_table import StagedTable
from pubsub.delta.writers.spark_writer import Staged
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import UNCHANGED, Message, Relation
from tests.support.frames import delete, insert, keepalive, relation, transaction, truncate, update
from tests.support.memory import MemoryDelta, target

#: Two tables with a key, and one without a key under REPLICA IDENTITY FULL.
RELATIONS = {
    "a": relation(16384, "a"),
    "b": relation(16385, "b"),
    "full": relation(16386, "full", identity="f"),
}
TARGETS = [target("a"), target("b"), target("full", key=())]

#: A change to make: (table, kind, key, other key, value).
Wish = tuple[str, str, int, int, int]
wishes = st.tuples(
    st.sampled_from(["a", "a", "b", "full"]),
    st.sampled_from("iiiuuukdt"),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 2),
)
histories = st.lists(st.lists(wishes, max_size=6), min_size=1, max_size=10)


class Publisher:
    """A publisher that carries out the wishes it can; `sent` holds the transactions, `tables` the resulting rows."""

    def __init__(self, history: Sequence[Sequence[Wish]]) -> None:
        self.tables: dict[str, dict[int, str] | Counter[tuple[int, str]]] = {"a": {}, "b": {}, "full": Counter()}
        self.sent: list[list[bytes]] = []
        self.ends: list[Lsn] = []
        self._known: set[str] = set()
        end = 1000
        for number, wanted in enumerate(history):
            # A commit record may begin exactly where the one before it ended.
            begins, end = end + (number % 2) * 8, end + (number % 2) * 8 + 10
            messages: list[Message] = []
            for wish in wanted:
                messages += self.change(*wish)
            self.sent.append(transaction(end, *messages, final=begins, xid=700 + number))
            self.ends.append(Lsn(end))

    def change(self, name: str, kind: str, key: int, other: int, value: int) -> list[Message]:
        sent: Relation = RELATIONS[name]
        oid, text = sent.oid, f"value {value}"
        messages: list[Message] = []
        table = self.tables[name]
        if kind == "t":
            names = ["a", "b"] if name == "a" else [name]
            for each in names:
                self.tables[each].clear()
            messages = [truncate(*(RELATIONS[each].oid for each in names))]
            return [*self.relations(*names), *messages]
        if isinstance(table, Counter):
            rows = sorted(table.elements())
            row = rows[key % len(rows)] if rows else None
            if kind == "i" or row is None:
                table[key, text] += 1
                messages = [insert(oid, key, text)]
            elif kind == "d":
                table[row] -= 1
                messages = [delete(oid, *row, kind="O")]
            else:
                table[row] -= 1
                unchanged = value == 0
                table[other, row[1] if unchanged else text] += 1
                messages = [update(oid, other, UNCHANGED if unchanged else text, old=row, kind="O")]
        elif kind == "i" and key not in table:
            table[key] = text
            messages = [insert(oid, key, text)]
        elif kind == "d" and key in table:
            del table[key]
            messages = [delete(oid, key, None)]
        elif kind == "u" and key in table:
            if value:
                table[key] = text
            messages = [update(oid, key, text if value else UNCHANGED)]
        elif kind == "k" and key in table and other not in table:
            table[other] = table.pop(key) if not value else text
            table.pop(key, None)
            messages = [update(oid, other, text if value else UNCHANGED, old=(key, None))]
        return [*self.relations(name), *messages] if messages else []

    def relations(self, *names: str) -> list[Message]:
        new = [name for name in names if name not in self._known]
        self._known.update(new)
        return [RELATIONS[name] for name in new]

    def rows(self, name: str) -> Counter[Any]:
        table = self.tables[name]
        return +table if isinstance(table, Counter) else Counter(table.items())


def stream(publisher: Publisher, after: Lsn) -> list[list[bytes]]:
    """Return the transactions of a stream from `after`; a new stream first sends every Relation message again."""
    told = transaction(publisher.ends[0] - 100 if not after else after + 1, *RELATIONS.values(), final=after or Lsn(1))
    return [told, *(frames for end, frames in zip(publisher.ends, publisher.sent, strict=True) if end > after)]


#: Bytes of a batch that are decoded at once: from one part per change to everything in one part.
wholes = st.sampled_from([2, 100, 400, 1 << 20])


def commit(
    delta: MemoryDelta, batch: Batch, versions: dict[str, Lsn], only: set[str] | None = None, *, whole: int = 1 << 20
) -> None:
    """Commit as the pipeline does: all tables are staged before any is committed.  `only` names those committed."""
    batch.read_messages()
    tables = stage_batch(batch, [destinations(versions)], delta, "pg_1", whole=whole)  # type: ignore[arg-type]
    commit_staged(delta, tables, versions, only)


def destinations(versions: Mapping[str, Lsn]) -> dict[tuple[str, str], Destination]:
    return {
        ("public", t.path): Destination(RELATIONS[t.path].oid, t, "app", versions.get(t.path, INVALID_LSN))
        for t in TARGETS
    }


def commit_staged(
    delta: MemoryDelta, tables: Sequence[StagedTable], versions: dict[str, Lsn], only: set[str] | None = None
) -> None:
    for table in tables:
        name = table.staged.table.path
        assert isinstance(table.staged, Staged)
        if only is None or name in only:
            delta.commit(table.staged, table.commit)
            versions[name] = delta.tables[name].versions["app"]
        delta.discard(table.staged)


def shape(batch: Batch) -> Any:
    blocks = [block for _, some in batch.chunks() for block in some]
    data, lengths = b"".join(b.data for b in blocks), [n for b in blocks for n in b.lengths.tolist()]
    return batch.transactions, batch.truncations, batch.relations, batch.rows, data, lengths


@settings(max_examples=100)
@given(histories, st.data())
def test_reads_cut_anywhere_give_the_same_batch(history: list[list[Wish]], data: st.DataObject) -> None:
    publisher = Publisher(history)
    frames = [frame for sent in publisher.sent for frame in sent]
    whole = Dispatcher(INVALID_LSN)
    whole.feed(frames, 0.0)
    cut = Dispatcher(INVALID_LSN)
    edges = sorted(data.draw(st.lists(st.integers(0, len(frames)), max_size=8)))
    for first, end in zip([0, *edges], [*edges, len(frames)], strict=True):
        cut.feed(frames[first:end], 0.0)
        if data.draw(st.booleans()):
            cut.feed([keepalive(1)], 0.0)
    assert shape(cut.batch) == shape(whole.batch)
    assert (cut.decided, cut.position, cut.idle) == (whole.decided, whole.position, whole.idle)


@settings(max_examples=150)
@given(histories, st.data())
def test_batches_of_any_size_make_the_same_tables(history: list[list[Wish]], data: st.DataObject) -> None:
    publisher = Publisher(history)
    delta = MemoryDelta(*TARGETS)
    versions: dict[str, Lsn] = {}
    dispatcher = Dispatcher(INVALID_LSN)
    whole = data.draw(wholes)
    with delta.installed():
        for sent in publisher.sent:
            # A batch taken in the middle of a transaction ends before that transaction.
            half = data.draw(st.integers(0, len(sent)))
            dispatcher.feed(sent[:half], 0.0)
            if half < len(sent) and dispatcher.batch.transactions and data.draw(st.booleans()):
                commit(delta, dispatcher.take(), versions, whole=whole)
            dispatcher.feed(sent[half:], 0.0)
        if dispatcher.batch.transactions:
            commit(delta, dispatcher.take(), versions, whole=whole)
    for name in RELATIONS:
        assert delta.tables[name].rows == publisher.rows(name), name


def lives(publisher: Publisher, data: st.DataObject, commit: Callable[[Batch, set[str] | None], None]) -> Iterator[int]:
    """Follow the publisher to its end; yield after each life, its number.

    `commit` commits a batch, to some tables only if a life ends there.  The next one starts at the origin, and cuts other batches.
    """
    origin, number = INVALID_LSN, 0
    while origin < publisher.ends[-1]:
        number += 1
        dispatcher = Dispatcher(origin)
        for frames in stream(publisher, origin):
            dispatcher.feed(frames, 0.0)
            if not dispatcher.batch.transactions or not data.draw(st.booleans()):
                continue
            batch = dispatcher.take()
            if number <= 4 and data.draw(st.integers(0, 2)) == 0:
                commit(batch, data.draw(st.sets(st.sampled_from(sorted(RELATIONS)))))
                break
            commit(batch, None)
            origin = batch.last_lsn
        else:
            if dispatcher.batch.transactions:
                commit(dispatcher.take(), None)
            origin = dispatcher.decided
        yield number


@settings(max_examples=150)
@given(histories, st.data())
def test_after_crashes_between_commits_each_transaction_is_there_once(
    history: list[list[Wish]], data: st.DataObject
) -> None:
    """Commit only some tables of a batch, then crash; the next life starts at the origin and cuts other batches."""
    publisher = Publisher(history)
    delta = MemoryDelta(*TARGETS)
    versions: dict[str, Lsn] = {}
    whole = data.draw(wholes)
    with delta.installed():
        for _ in lives(publisher, data, lambda batch, only: commit(delta, batch, versions, only, whole=whole)):
            assert versions == {name: held.versions["app"] for name, held in delta.tables.items() if held.versions}
    for name in RELATIONS:
        assert delta.tables[name].rows == publisher.rows(name), name
        lasts = [record.last for record in delta.tables[name].log]
        assert lasts == sorted(set(lasts)), "a version twice, or backwards"
