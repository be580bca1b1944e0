"""RelationCache: which Relation message holds for the next rows, whatever became of the transaction that it came in."""

from __future__ import annotations

import pytest

from apply.pipeline.relation_cache import Announced, RelationCache, moves_keys
from pubsub.protocol.pgoutput import Relation
from tests.support.frames import relation

A, B = relation(16384, "a"), relation(16385, "b")
WIDER = relation(A.oid, "a", (("id", 20), ("v", 25), ("w", 25)))
RENAMED = relation(A.oid, "a_new")


def plain(cache: RelationCache, *messages: Relation) -> list[bool]:
    """Receive the messages in a transaction that commits; return which say something new."""
    news = [cache.received(message) for message in messages]
    cache.committed({message.oid for message in messages})
    return news


def prepared(cache: RelationCache, xid: int, *messages: Relation) -> list[Relation]:
    for message in messages:
        cache.received(message)
    return cache.prepared(xid, {message.oid for message in messages})


def in_stream(cache: RelationCache, *messages: Relation) -> list[Announced]:
    return [Announced(7, message, cache.received_in_stream()) for message in messages]


def test_a_message_holds_from_its_transaction_s_commit_on() -> None:
    cache = RelationCache()
    assert cache.received(A)
    assert not cache.known
    cache.committed([A.oid])
    assert cache.known == {A.oid: A}
    assert plain(cache, A, WIDER, WIDER, A) == [False, True, False, True]
    assert cache.known == {A.oid: A}


def test_a_prepared_transaction_s_message_holds_from_then_on() -> None:
    cache = RelationCache()
    plain(cache, A)
    assert {one.oid: one for one in prepared(cache, 2, WIDER, B)} == {A.oid: WIDER, B.oid: B}
    assert cache.known == {A.oid: WIDER, B.oid: B}
    assert set(cache.unnamed) == {A.oid, B.oid}


def test_one_that_says_nothing_new_leaves_the_name_as_it_is() -> None:
    cache = RelationCache()
    plain(cache, A)
    assert prepared(cache, 2, A) == []
    assert not cache.unnamed


def test_what_is_undone_again_in_the_prepared_transaction_is_not_new() -> None:
    cache = RelationCache()
    plain(cache, A)
    assert prepared(cache, 2, WIDER, A) == []
    assert (cache.known, set(cache.unnamed)) == ({A.oid: A}, set())


@pytest.mark.parametrize(
    "of", ["its commit", "another's", "another's that commits", "a streamed transaction's", "outside"]
)
def test_a_prepared_name_holds_once_it_is_another_s(of: str) -> None:
    cache = RelationCache()
    streamed = in_stream(cache, A)
    plain(cache, A)
    prepared(cache, 2, RENAMED)
    if of == "its commit":
        cache.ended(3)
        assert set(cache.unnamed) == {A.oid}
        cache.ended(2)
    elif of == "another's":
        plain(cache, RENAMED)
    elif of == "another's that commits":
        prepared(cache, 3, WIDER)
        cache.ended(2)
        assert set(cache.unnamed) == {A.oid}, "the message is that of 3 now"
        cache.ended(3)
    elif of == "a streamed transaction's":
        assert cache.stream_committed(streamed) == {A.oid}
        assert set(cache.unnamed) == {A.oid}, "it is older"
        cache.stream_committed(in_stream(cache, RENAMED))
    else:
        cache.received(A)
        cache.committed([A.oid])
    assert not cache.unnamed


@pytest.mark.parametrize("by", [plain, lambda cache, message: prepared(cache, 2, message)])
def test_a_streamed_transaction_s_message_does_not_replace_a_newer_one(by: object) -> None:
    cache = RelationCache()
    early = in_stream(cache, A, B)
    by(cache, WIDER)  # type: ignore[operator]
    assert cache.known == {A.oid: WIDER}, "nothing of it holds before its commit"
    assert cache.stream_committed(early) == {A.oid}
    assert cache.known == {A.oid: WIDER, B.oid: B}
    late = in_stream(cache, A)
    assert cache.stream_committed(late) == set()
    assert cache.known[A.oid] == A
    assert not cache.received(A), "it is the last one"
    assert cache.stream_committed(late[:1]) == {A.oid}


def test_of_two_streamed_transactions_the_later_message_holds() -> None:
    cache = RelationCache()
    one, other = in_stream(cache, A), in_stream(cache, WIDER)
    assert (cache.stream_committed(other), cache.stream_committed(one)) == (set(), {A.oid})
    assert cache.known == {A.oid: WIDER}


def test_keys_that_move() -> None:
    by_v, full = relation(A.oid, "a", key=("v",)), relation(A.oid, "a", identity="f")
    cache = RelationCache()
    assert not cache.moves_keys([A, B]), "rows before would have had a message"
    plain(cache, A)
    assert [cache.moves_keys([message]) for message in (A, WIDER, B, by_v, full)] == [False, False, False, True, True]
    assert cache.moves_keys([WIDER, by_v, A])
    assert not moves_keys([A], {})
    assert moves_keys([A, by_v], {})
    assert not moves_keys([full, full], {A.oid: full})
