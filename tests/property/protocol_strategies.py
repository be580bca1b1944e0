"""Hypothesis strategies for every message that the protocol's codecs know."""

from __future__ import annotations

from hypothesis import strategies as st

from pubsub.protocol import copyboth as cb
from pubsub.protocol import pgoutput as pg
from pubsub.protocol.lsn import Lsn

# Edge values come first: those that a wrong width or sign would break.
u32 = st.sampled_from([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]) | st.integers(0, 0xFFFFFFFF)
oids = u32.map(pg.Oid)
xids = u32.map(pg.Xid)
set_xids = st.integers(1, 0xFFFFFFFF).map(pg.Xid)
lsns = (st.sampled_from([0, 1, 0xFFFFFFFF, 1 << 32, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1)).map(Lsn)
set_lsns = lsns.filter(bool)
times = st.sampled_from([-(1 << 63), -1, 0, (1 << 63) - 1]) | st.integers(-(1 << 63), (1 << 63) - 1)
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
namespaces = st.just("pg_catalog") | names.filter(bool)
gids = names.filter(lambda gid: len(gid.encode()) <= pg.MAX_GID_BYTES)

values: st.SearchStrategy[pg.Value] = (
    st.none() | st.just(pg.UNCHANGED) | st.binary(max_size=12) | st.binary(max_size=12).map(pg.Binary)
)
tuples = st.lists(values, max_size=6).map(tuple)
old_kinds: st.SearchStrategy[pg.OldKind] = st.sampled_from(["K", "O"])
columns = st.builds(pg.Column, st.integers(0, 1), names, oids, st.integers(-(1 << 31), (1 << 31) - 1))
identities: st.SearchStrategy[pg.ReplicaIdentity] = st.sampled_from(["d", "n", "f", "i"])
no_flags = st.just(0)


def changes(xid: st.SearchStrategy[pg.Xid | None]) -> st.SearchStrategy[pg.Message]:
    """Draw the messages that carry a transaction's id in a stream block."""
    return st.one_of(
        st.builds(
            pg.Relation,
            oids,
            namespaces,
            names,
            identities,
            st.lists(columns, max_size=4, unique_by=lambda one: one.name).map(tuple),
            xid,
        ),
        st.builds(pg.Type, oids, namespaces, names, xid),
        st.builds(pg.Insert, oids, tuples, xid),
        st.builds(pg.Update, oids, st.none(), st.none(), tuples, xid),
        st.builds(pg.Update, oids, old_kinds, tuples, tuples, xid),
        st.builds(pg.Delete, oids, old_kinds, tuples, xid),
        st.builds(pg.Truncate, st.lists(oids, max_size=4).map(tuple), st.booleans(), st.booleans(), xid),
        st.builds(pg.LogicalMessage, st.booleans(), lsns, names, st.binary(max_size=12), xid),
    )


controls: st.SearchStrategy[pg.Message] = st.one_of(
    st.builds(pg.Begin, set_lsns, times, xids),
    st.builds(pg.Commit, no_flags, lsns, lsns, times),
    st.builds(pg.Origin, lsns, names),
    st.builds(pg.StreamStart, set_xids, st.booleans()),
    st.just(pg.StreamStop()),
    st.builds(pg.StreamCommit, set_xids, no_flags, lsns, lsns, times),
    st.builds(pg.BeginPrepare, set_lsns, set_lsns, times, xids, gids),
    st.builds(pg.Prepare, no_flags, set_lsns, set_lsns, times, xids, gids),
    st.builds(pg.StreamPrepare, no_flags, set_lsns, set_lsns, times, xids, gids),
    st.builds(pg.CommitPrepared, no_flags, set_lsns, set_lsns, times, xids, gids),
    st.builds(pg.RollbackPrepared, no_flags, set_lsns, set_lsns, times, times, xids, gids),
)


@st.composite
def messages(draw: st.DrawFn) -> tuple[pg.Message, bool, bool]:
    """Draw a message and how to read it: (message, streaming, parallel)."""
    streaming, parallel = draw(st.booleans()), draw(st.booleans())
    abort = st.builds(
        pg.StreamAbort, set_xids, set_xids, lsns if parallel else st.none(), times if parallel else st.none()
    )
    message = draw(st.one_of(controls, abort, changes(set_xids if streaming else st.none())))
    return message, streaming, parallel


server_messages: st.SearchStrategy[cb.ServerMessage] = st.one_of(
    st.builds(cb.XLogData, lsns, lsns, times, st.binary(max_size=30)),
    st.builds(cb.Keepalive, lsns, times, st.booleans()),
)
client_messages: st.SearchStrategy[cb.ClientMessage] = st.one_of(
    st.builds(cb.StatusUpdate, lsns, lsns, lsns, times, st.booleans()),
    st.builds(cb.HotStandbyFeedback, times, xids, u32, xids, u32),
    st.builds(cb.PrimaryStatusRequest, times),
)


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Return `data` with a few bytes overwritten, inserted or removed."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(result)))
        match draw(st.sampled_from(["overwrite", "insert", "remove"])):
            case "overwrite" if position < len(result):
                result[position] = draw(st.integers(0, 255))
            case "insert":
                result[position:position] = draw(st.binary(min_size=1, max_size=4))
            case _:
                del result[position : position + draw(st.integers(1, 4))]
    return bytes(result)
