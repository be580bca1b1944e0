"""SELECT on the views."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from catalog.beside import relid_of
from catalog.records import NewRelation, NewSubscription, SubscriptionSequence
from catalog.states import RelState
from catalog.store import Catalog
from catalog.system_views import VIEWS
from pubsub.errors import FeatureNotSupported, PubsubError, SqlSyntaxError, UndefinedTable
from pubsub.node.query import Rows, select_and_reset
from pubsub.protocol.lsn import Lsn
from pubsub.server.system_catalogs import contents
from pubsub.sql.layout_rules import name_beside
from pubsub.sql.options import SubscriptionOptions

TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[Catalog]:
    """Two subscriptions; the running one has LSNs that sort the other way round as text."""
    async with await Catalog.open(tmp_path / "catalog.db") as opened:
        for name, enabled, publications in (("one", True, ("p", "q")), ("two", False, ("q",))):
            new = NewSubscription(
                name, "host=h password=secret", publications, SubscriptionOptions(), name, name, enabled
            )
            relation = NewRelation(100, "public", "Orders", f"/w/{name}/public/Orders", estimated_rows=50)
            sub = await opened.create_subscription(new, [relation])
            await opened.begin_copy(sub.oid, 100)
            await opened.put_copy_progress(sub.oid, 100, 10, 50, 1000)
            received = Lsn.parse("F/0" if enabled else "10/0")
            await opened.put_worker_stats(
                sub.oid,
                None,
                {"pid": 7, "received_lsn": received, "flush_lsn": Lsn.parse("A/0"), "latest_end_time": TIME},
            )
        yield opened


async def select(catalog: Catalog, sql: str) -> Rows:
    return await select_and_reset(await catalog.state(), sql, catalog.reset_statistics)


@pytest.mark.parametrize(
    ("view", "first"),
    [
        (
            "pg_subscription",
            (
                "oid subdbid subskiplsn subname subowner subenabled subbinary substream subtwophasestate subdisableonerr "
                "subpasswordrequired subrunasowner subfailover subconninfo subslotname subsynccommit subpublications "
                "suborigin"
            ),
        ),
        ("pg_subscription_rel", "srsubid srrelid srsubstate srsublsn relation"),
        (
            "pg_stat_subscription",
            (
                "subid subname worker_type pid relid leader_pid received_lsn last_msg_send_time last_msg_receipt_time "
                "latest_end_lsn latest_end_time"
            ),
        ),
        (
            "pg_stat_subscription_stats",
            (
                "subid subname apply_error_count sync_error_count confl_insert_exists confl_update_origin_differs "
                "confl_update_exists confl_update_missing confl_delete_origin_differs confl_delete_missing "
                "confl_multiple_unique_conflicts stats_reset"
            ),
        ),
        ("pg_replication_origin_status", "local_id external_id remote_lsn local_lsn"),
        (
            "pg_stat_progress_copy",
            (
                "pid datid datname relid command type bytes_processed bytes_total tuples_processed tuples_excluded "
                "tuples_skipped"
            ),
        ),
        ("pg_prepared_xacts", "transaction gid prepared owner database"),
    ],
)
async def test_postgresql_s_columns_come_first(catalog: Catalog, view: str, first: str) -> None:
    result = await select(catalog, f"SELECT * FROM {view}")
    names = first.split()
    assert list(result.columns[: len(names)]) == names
    assert all(len(row) == len(result.columns) for row in result.rows)
    assert (len(result.rows) > 0) == (view != "pg_prepared_xacts")


async def test_sequences_have_as_many_columns(catalog: Catalog) -> None:
    """Their rows are made apart from those of the tables."""
    state = await catalog.state()
    sequence = SubscriptionSequence(
        state.subscriptions[0].oid, 7, "public", "q", RelState.READY, 0, False, "/w/q", "{}", 1, True, Lsn(1)
    )
    found = replace(state, sequences=(sequence,))
    assert {name: {len(row) for row in view.rows(found)} - {len(view.columns)} for name, view in VIEWS.items()} == {
        name: set() for name in VIEWS
    }
    selected = await select_and_reset(
        found, "SELECT relation, srsubstate FROM pg_subscription_rel", catalog.reset_statistics
    )
    assert ("public.q", "r") in selected.rows


def test_every_view_is_tested() -> None:
    assert len(VIEWS.keys() - {"pubsub_verification", "pubsub_sequences", "pubsub_daemons"}) == 7, (
        "PostgreSQL's; the others are in scenarios"
    )


async def rows(catalog: Catalog, sql: str) -> list[tuple[object, ...]]:
    return list((await select(catalog, sql)).rows)


async def test_columns_keep_their_types(catalog: Catalog) -> None:
    sql = "SELECT subname, subenabled, subpublications, batch_age, subconninfo FROM pg_subscription WHERE oid = 16384"
    assert await rows(catalog, sql) == [("one", True, ["p", "q"], 1.0, "host=h password=********")]
    sql = "SELECT received_lsn, latest_end_time, last_msg_send_time FROM pg_stat_subscription WHERE subname = 'one'"
    assert await rows(catalog, sql) == [("F/0", TIME, None)]


async def test_lsns_compare_as_positions(catalog: Catalog) -> None:
    names = "SELECT subname FROM pg_stat_subscription"
    assert await rows(catalog, f"{names} WHERE received_lsn > 'F/FFFFFFFF'") == [("two",)]
    assert await rows(catalog, f"{names} WHERE received_lsn = '0F/00'") == [("one",)]
    assert await rows(catalog, f"{names} ORDER BY received_lsn DESC") == [("two",), ("one",)]
    assert await rows(catalog, "SELECT max(received_lsn) FROM pg_stat_subscription") == [("10/0",)]
    lag = await select(catalog, "SELECT received_lsn - flush_lsn AS lag FROM pg_stat_subscription ORDER BY lag")
    assert lag == (("lag",), [(5 << 32,), (6 << 32,)])


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT count(*) FROM pg_catalog.pg_subscription WHERE NOT subenabled", [(1,)]),
        ("SELECT subname FROM PG_Subscription WHERE subenabled = false", [("two",)]),
        ("SELECT subname FROM pg_subscription WHERE 'p' = ANY (subpublications)", [("one",)]),
        ("SELECT subname = 'one' AS x FROM pg_subscription ORDER BY subname", [(True,), (False,)]),
        ("SELECT subname FROM pg_subscription WHERE subname LIKE 'ONE'", []),
        ("SELECT subname FROM pg_subscription WHERE subname ILIKE 'ONE'", [("one",)]),
        ("SELECT subname FROM pg_subscription WHERE subname ~ '^t'", [("two",)]),
        (
            (
                "SELECT s.subname, r.relation, p.tuples_total FROM pg_subscription s "
                "JOIN pg_subscription_rel r ON s.oid = r.srsubid "
                "JOIN pg_stat_progress_copy p ON (p.subid, p.relid) = (r.srsubid, r.srrelid) WHERE s.subenabled"
            ),
            [("one", 'public."Orders"', 50)],
        ),
        ("WITH x AS (SELECT subname n FROM pg_subscription) SELECT max(n) FROM x", [("two",)]),
        ("SELECT 7 / 2, -7 / 2, 7 % 3, -7 % 3, 7 / 2.0, 1 + NULL", [(3, -3, 1, -1, 3.5, None)]),
        ("SELECT subname FROM pg_subscription UNION ALL SELECT 'three' ORDER BY 1 LIMIT 2", [("one",), ("three",)]),
    ],
)
async def test_queries(catalog: Catalog, sql: str, expected: list[tuple[object, ...]]) -> None:
    assert await rows(catalog, sql) == expected


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("count(*)", "count"),
        ("1 + 1", "?column?"),
        ("max(subname)::text", "max"),
        ("coalesce(NULL, 1)", "coalesce"),
        ("CASE WHEN true THEN 1 END", "case"),
        ("(SELECT max(oid) FROM pg_subscription)", "max"),
        ("string_agg(subname, ',')", "string_agg"),
        ("now()", "now"),
        ("1 AS x", "x"),
    ],
)
async def test_columns_are_named_as_postgresql_names_them(catalog: Catalog, expression: str, name: str) -> None:
    assert (await select(catalog, f"SELECT {expression} FROM pg_subscription")).columns == (name,)


async def test_a_subscription_without_a_worker_has_a_row(catalog: Catalog) -> None:
    await catalog.clear_worker_stats()
    await catalog.set_subscription_error(16384, PubsubError("broken", hint="mend"))
    sql = "SELECT subname, pid, error, error_hint FROM pg_stat_subscription ORDER BY subname"
    assert await rows(catalog, sql) == [("one", None, "broken", "mend"), ("two", None, None, None)]


async def test_a_finished_copy_is_no_longer_in_progress(catalog: Catalog) -> None:
    await catalog.put_copy_progress(16384, 100, 50, 50, finished=True)
    assert await rows(catalog, "SELECT subid FROM pg_stat_progress_copy") == [(16385,)]


@pytest.mark.parametrize(
    ("sql", "kind", "message"),
    [
        ("SELECT * FROM nope", UndefinedTable, 'relation "nope" does not exist'),
        ("SELECT * FROM public.pg_subscription", UndefinedTable, 'relation "public.pg_subscription" does not exist'),
        ("SELECT nope FROM pg_subscription", PubsubError, 'column "nope" does not exist'),
        ("SELECT nope(1)", PubsubError, "function nope(integer) does not exist"),
        ("SELECT oid FROM pg_subscription a, pg_subscription b", PubsubError, 'column reference "oid" is ambiguous'),
        ("SELECT 1 / 0", PubsubError, "division by zero"),
        ("SELECT subname - 1 FROM pg_subscription", PubsubError, "operator does not exist: text - integer"),
        ("SELECT * FROM pg_subscription FOR UPDATE", FeatureNotSupported, "FOR UPDATE is not supported"),
        ("SELECT FROM WHERE", SqlSyntaxError, "syntax error at end of input"),
        ("DELETE FROM pg_subscription", FeatureNotSupported, "only plain queries are supported"),
        ("SELECT 1; SELECT 2", FeatureNotSupported, "only plain queries are supported"),
        ("PRAGMA foreign_keys", FeatureNotSupported, "only plain queries are supported"),
    ],
)
async def test_errors(catalog: Catalog, sql: str, kind: type[PubsubError], message: str) -> None:
    with pytest.raises(PubsubError) as caught:
        await select(catalog, sql)
    assert (type(caught.value), caught.value.message) == (kind, message)


async def test_options_of_19_stand_at_the_end_of_pg_subscription(catalog: Catalog) -> None:
    shown = "SELECT subwalrcvtimeout, subretaindeadtuples, submaxretention FROM pg_subscription WHERE oid = 16384"
    assert await rows(catalog, shown) == [("-1", False, 0)]
    changes = replace(SubscriptionOptions(), wal_receiver_timeout=90.0, max_retention_duration=5)
    await catalog.alter_subscription(16384, options=changes)
    assert await rows(catalog, shown) == [("90s", False, 5)]


async def test_what_stands_beside_a_mirror_has_an_oid_of_its_own(tmp_path: Path) -> None:
    """One of 32 bits, by which views can be joined, and the server's pg_class."""
    async with await Catalog.open(tmp_path / "catalog.db") as opened:
        relations = [
            NewRelation(relid_of(20_000, mode), "public", name_beside("t", mode), f"/w/{mode}", estimated_rows=rows)
            for mode, rows in ((None, 1), ("history", 2), ("scd2", 3))
        ]
        new = NewSubscription("one", "host=h", ("p",), SubscriptionOptions(), "one", "one")
        sub = await opened.create_subscription(new, relations)
        for one in relations:
            await opened.begin_copy(sub.oid, one.relid)
            await opened.put_copy_progress(sub.oid, one.relid, 1, one.estimated_rows, 1)
        joined = await rows(
            opened,
            "SELECT r.relation, r.srrelid, r.mode, p.tuples_total FROM pg_subscription_rel r "
            "JOIN pg_stat_progress_copy p ON (p.subid, p.relid) = (r.srsubid, r.srrelid) ORDER BY r.relation",
        )
        assert [(relation, mode, total) for relation, _, mode, total in joined] == [
            ("public.t", None, 1),
            ("public.t_history", "history", 2),
            ("public.t_scd2", "scd2", 3),
        ]
        shown = [oid for _, oid, _, _ in joined]
        assert shown[0] == 20_000
        assert len(set(shown)) == 3
        assert max(shown) < 1 << 32
        assert sorted(contents.oids(await opened.state()).values()) == sorted(shown)
        assert {one.oid for one in (await opened.state()).relations} == {20_000}
