"""launcher.subscriptioncmds, altersubscription, targets, session: the parts that need no publisher."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from catalog.beside import relid_of
from catalog.home_lock import DaemonLock
from catalog.records import NewRelation, Request, Subscription, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from launcher import altersubscription, option_effects
from launcher.altersubscription import _difference
from launcher.client_session import Session
from launcher.notices import Notice
from launcher.subscriptioncmds import execute
from launcher.sync_slots import slot_names
from pubsub.errors import ConnectionFailure, FeatureNotSupported, PubsubError
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.publisher.connection import Connection
from pubsub.publisher.publication import PublishedTable
from pubsub.settings import Settings
from pubsub.sql.layouts import Layouts
from pubsub.sql.options import SubscriptionOptions
from pubsub.sql.parser import parse_one
from pubsub.sql.statements import AlterSubscription, CreateSubscription, DropSubscription

UNCONNECTED = "CREATE SUBSCRIPTION s CONNECTION '{}' PUBLICATION p WITH (connect = false)"


@dataclass
class Client:
    """A session that keeps its notices."""

    session: Session
    notices: list[Notice] = field(default_factory=list)

    async def run(self, sql: str) -> str:
        statement = parse_one(sql)
        assert isinstance(statement, CreateSubscription | AlterSubscription | DropSubscription)
        return await execute(self.session, statement)

    async def fails(self, sql: str) -> PubsubError:
        with pytest.raises(PubsubError) as caught:
            await self.run(sql)
        return caught.value

    async def request(self) -> Request:
        """Wait for the command's request to the daemon."""
        async with asyncio.timeout(30):
            while not (pending := await self.session.catalog.pending_requests()):  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0)
        return pending[0]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with await Catalog.open(tmp_path / "catalog.db") as catalog:
        notices: list[Notice] = []
        yield Client(Session(Settings(home=tmp_path), catalog, notices.append), notices)


@pytest.fixture
def nowhere() -> str:
    """A connection string of an address where no one listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    return f"host=127.0.0.1 port={port} dbname=d user=u connect_timeout=5"


async def test_create_unconnected_stores_and_warns(client: Client, nowhere: str) -> None:
    assert await client.run(UNCONNECTED.format(nowhere)) == "CREATE SUBSCRIPTION"
    stored = await client.session.catalog.subscription("s")
    assert (stored.enabled, stored.slot_name, stored.target) == (False, "s", "")
    assert [(n.severity, n.message) for n in client.notices] == [
        ("WARNING", "subscription was created, but is not connected")
    ]


async def test_create_of_a_name_that_is_taken(client: Client, nowhere: str) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    error = await client.fails(UNCONNECTED.format(nowhere))
    assert (error.sqlstate, error.message) == ("42710", 'subscription "s" already exists')


async def test_create_with_an_unreachable_publisher_leaves_nothing(client: Client, nowhere: str) -> None:
    error = await client.fails(f"CREATE SUBSCRIPTION s CONNECTION '{nowhere}' PUBLICATION p")
    assert isinstance(error, ConnectionFailure)
    assert error.message.startswith('subscription "s" could not connect to the publisher: ')
    assert await client.session.catalog.subscriptions() == []


async def test_create_with_a_malformed_connection_string(client: Client) -> None:
    error = await client.fails(UNCONNECTED.format("no such thing"))
    assert error.sqlstate == "42601"
    assert error.message.startswith("invalid connection string syntax: ")
    assert await client.session.catalog.subscriptions() == []


async def test_drop_with_an_unreachable_publisher_leaves_it_as_it_was(client: Client, nowhere: str) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    before = await client.session.catalog.subscription("s")
    relation = NewRelation(7, "public", "t", "/w/t")
    await client.session.catalog.add_relations(before.oid, [relation])
    client.notices.clear()
    error = await client.fails("DROP SUBSCRIPTION s")
    assert error.message.startswith('could not connect to publisher when attempting to drop replication slot "s": ')
    assert error.hint is not None
    assert "SET (slot_name = NONE)" in error.hint
    node = await client.session.catalog.node()
    assert [n.report() for n in client.notices] == [
        f'WARNING:  could not drop tablesync replication slot "pg_{before.oid}_sync_7_{node.node_id}"'
    ]
    after = await client.session.catalog.subscription("s")
    assert (after.dropping, after.paused) == (False, None)
    assert (after.enabled, after.slot_name) == (before.enabled, before.slot_name)
    assert len(await client.session.catalog.relations(before.oid)) == 1


async def test_a_table_leaves_after_its_slot(client: Client, nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A REFRESH that was killed between the two left the slot, which nobody knew any more, and the publisher its WAL."""
    await client.run(UNCONNECTED.format(nowhere))
    catalog = client.session.catalog
    subscription = await catalog.subscription("s")
    await catalog.add_relations(subscription.oid, [NewRelation(7, "public", "t", "/w/t")])

    async def killed(*_: object) -> None:
        raise ConnectionFailure("killed here")

    monkeypatch.setattr(altersubscription, "drop_slots_of", killed)
    relations = await catalog.relations(subscription.oid)
    with pytest.raises(ConnectionFailure):
        async with altersubscription._without_slots(
            client.session, subscription, cast(Connection, None), relations, "REFRESH"
        ):
            await catalog.remove_relation(subscription.oid, 7)
    assert await catalog.relations(subscription.oid) == relations
    assert (await catalog.subscription("s")).paused is None


async def test_drop_without_a_slot_needs_no_publisher(client: Client, nowhere: str) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    await client.run("ALTER SUBSCRIPTION s SET (slot_name = NONE)")
    assert await client.run("DROP SUBSCRIPTION s") == "DROP SUBSCRIPTION"
    assert await client.session.catalog.subscriptions() == []


async def test_drop_of_nothing(client: Client) -> None:
    error = await client.fails("DROP SUBSCRIPTION s")
    assert (error.sqlstate, error.message) == ("42704", 'subscription "s" does not exist')
    assert await client.run("DROP SUBSCRIPTION IF EXISTS s") == "DROP SUBSCRIPTION"
    assert [n.report() for n in client.notices] == ['NOTICE:  subscription "s" does not exist, skipping']


async def test_alter(client: Client, nowhere: str) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    assert await client.run("ALTER SUBSCRIPTION s RENAME TO t") == "ALTER SUBSCRIPTION"
    await client.run("ALTER SUBSCRIPTION t SET (disable_on_error = true, batch_rows = 10)")
    await client.run("ALTER SUBSCRIPTION t ADD PUBLICATION q WITH (refresh = false)")
    await client.run("ALTER SUBSCRIPTION t CONNECTION 'host=elsewhere'")
    await client.run("ALTER SUBSCRIPTION t ENABLE")
    stored = await client.session.catalog.subscription("t")
    assert stored.publications == ("p", "q")
    assert stored.conninfo == "host=elsewhere"
    assert stored.enabled
    assert (stored.options.disable_on_error, stored.options.batch_rows) == (True, 10)
    await client.run("ALTER SUBSCRIPTION t DISABLE")
    assert not (await client.session.catalog.subscription("t")).enabled


@pytest.mark.parametrize(
    ("enabled", "action", "sqlstate", "message"),
    [
        (True, "SET (slot_name = NONE)", "55000", "cannot set slot_name = NONE for enabled subscription"),
        (True, "SET (failover = true)", "55000", 'cannot set option "failover" for enabled subscription'),
        (
            False,
            "REFRESH PUBLICATION",
            "55000",
            "ALTER SUBSCRIPTION ... REFRESH is not allowed for disabled subscriptions",
        ),
        (
            False,
            "SET PUBLICATION q",
            "55000",
            "ALTER SUBSCRIPTION with refresh is not allowed for disabled subscriptions",
        ),
        (False, "ADD PUBLICATION p", "42710", 'publication "p" is already in subscription "s"'),
        (
            False,
            "RESYNC TABLE t",
            "55000",
            "ALTER SUBSCRIPTION ... RESYNC TABLE is not allowed for disabled subscriptions",
        ),
        (True, "RESYNC TABLE s.t", "42P01", 'table "s.t" is not part of subscription "s"'),
        (False, "CONNECTION 'no such thing'", "42601", "invalid connection string syntax"),
    ],
)
async def test_alter_refused(
    client: Client, nowhere: str, enabled: bool, action: str, sqlstate: str, message: str
) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    if enabled:
        await client.run("ALTER SUBSCRIPTION s ENABLE")
    before = await client.session.catalog.subscription("s")
    error = await client.fails(f"ALTER SUBSCRIPTION s {action}")
    assert error.sqlstate == sqlstate
    assert error.message.startswith(message)
    assert await client.session.catalog.subscription("s") == before


@pytest.mark.parametrize(
    ("one", "other", "options", "publications"),
    [
        ("SET (disable_on_error = true)", "SET (batch_rows = 7)", (True, 7, False), ("p",)),
        ("SET (disable_on_error = true)", "CONNECTION 'host=h'", (True, 250_000, True), ("p",)),
        (
            "ADD PUBLICATION q WITH (refresh = false)",
            "ADD PUBLICATION r WITH (refresh = false)",
            (False, 250_000, False),
            ("p", "q", "r"),
        ),
    ],
)
async def test_two_at_once_both_have_their_effect(
    client: Client,
    nowhere: str,
    monkeypatch: pytest.MonkeyPatch,
    one: str,
    other: str,
    options: tuple[bool, int, bool],
    publications: tuple[str, ...],
) -> None:
    """Each has read the subscription before the other stores: the later one once stored what it had read."""
    await client.run(UNCONNECTED.format(nowhere))
    catalog = client.session.catalog
    read, both = catalog.subscription, asyncio.Barrier(2)

    async def subscription(name: str | int) -> Subscription:
        found = await read(name)
        await both.wait()
        return found

    monkeypatch.setattr(catalog, "subscription", subscription)
    await asyncio.gather(client.run(f"ALTER SUBSCRIPTION s {one}"), client.run(f"ALTER SUBSCRIPTION s {other}"))
    altered = await read("s")
    found = altered.options
    assert (found.disable_on_error, found.batch_rows, found.rebound) == options
    assert tuple(sorted(altered.publications)) == publications


async def test_skip_is_stored_and_taken_back(client: Client, nowhere: str) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    catalog = client.session.catalog
    subscription = await catalog.subscription("s")
    await client.run("ALTER SUBSCRIPTION s SKIP (lsn = '0/16B3748')")
    assert (await catalog.subscription("s")).skip_lsn == Lsn(0x16B3748)
    await client.run("ALTER SUBSCRIPTION s SKIP (lsn = NONE)")
    assert (await catalog.subscription("s")).skip_lsn == INVALID_LSN
    await catalog.advance_origin(subscription.oid, Lsn(0x100))
    error = await client.fails("ALTER SUBSCRIPTION s SKIP (lsn = '0/FF')")
    assert error.sqlstate == "22023"
    assert error.message == "skip WAL location (LSN 0/FF) must be greater than origin LSN 0/100"


async def test_enable_needs_a_slot_name(client: Client, nowhere: str) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    await client.run("ALTER SUBSCRIPTION s SET (slot_name = NONE)")
    error = await client.fails("ALTER SUBSCRIPTION s ENABLE")
    assert error.message == "cannot enable subscription that does not have a slot name"


async def test_owner_has_no_effect_and_says_so(client: Client, nowhere: str) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    client.notices.clear()
    await client.run("ALTER SUBSCRIPTION s OWNER TO bob")
    assert [n.message for n in client.notices] == ["OWNER TO has no effect"]


async def test_disable_waits_for_the_daemon(client: Client, nowhere: str, tmp_path: Path) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    with DaemonLock.acquire(tmp_path, file="catalog.db.pid"):
        disabling = asyncio.create_task(client.run("ALTER SUBSCRIPTION s DISABLE"))
        request = await client.request()
        assert (request.kind, disabling.done()) == ("stop", False)
        await client.session.catalog.answer(request.id)
        assert await disabling == "ALTER SUBSCRIPTION"


async def test_a_daemon_that_ends_is_waited_for_no_longer(client: Client, nowhere: str, tmp_path: Path) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    with DaemonLock.acquire(tmp_path, file="catalog.db.pid"):
        disabling = asyncio.create_task(client.run("ALTER SUBSCRIPTION s DISABLE"))
        await client.request()
    assert await disabling == "ALTER SUBSCRIPTION"
    assert await client.session.catalog.pending_requests() == []


async def test_drop_that_the_daemon_refuses_leaves_it_as_it_was(client: Client, nowhere: str, tmp_path: Path) -> None:
    await client.run(UNCONNECTED.format(nowhere))
    with DaemonLock.acquire(tmp_path, file="catalog.db.pid"):
        dropping = asyncio.create_task(client.run("DROP SUBSCRIPTION s"))
        request = await client.request()
        await client.session.catalog.answer(request.id, FeatureNotSupported("no"))
        with pytest.raises(PubsubError, match="no"):
            await dropping
    after = await client.session.catalog.subscription("s")
    assert (after.dropping, after.paused) == (False, None)


def test_refresh_knows_tables_by_name() -> None:
    relations = [
        _relation(1, "kept", RelState.READY),
        _relation(2, "made_again", RelState.READY),
        _relation(3, "made_again_before_its_copy", RelState.INIT),
        _relation(4, "gone", RelState.DATASYNC),
    ]
    published = {
        Oid(oid): _published(oid, name)
        for oid, name in [(1, "kept"), (12, "made_again"), (13, "made_again_before_its_copy"), (5, "new")]
    }
    gone, new, having = _difference(relations, published, Layouts())
    assert [r.name for r in gone] == ["made_again_before_its_copy", "gone"]
    assert sorted(t.name for t in new.values()) == ["made_again_before_its_copy", "new"]
    assert having == {1, 12}


def test_refresh_knows_what_stands_beside_a_mirror() -> None:
    """It joins and leaves as the option mode has it, and the mirror stays."""
    published = {Oid(oid): _published(oid, name) for oid, name in [(1, "one"), (12, "made_again"), (3, "none")]}
    relations = [
        _relation(1, "one", RelState.READY),
        _relation(relid_of(1, "history"), "one_history", RelState.DATASYNC),
        _relation(relid_of(1, "scd2"), "one_scd2", RelState.READY),
        _relation(2, "made_again", RelState.READY),
        _relation(relid_of(2, "history"), "made_again_history", RelState.READY),
        _relation(3, "none", RelState.READY),
    ]
    for mode, leaves, joins in (
        ("mirror + history", ["one_scd2"], ["none"]),
        ("public.one (mirror + scd2)", ["one_history", "made_again_history"], []),
        ("", ["one_history", "one_scd2", "made_again_history"], []),
        ("mirror + history + scd2", [], ["made_again", "none"]),
    ):
        layouts = Layouts.parse("", "", "", mode)
        gone, new, having = _difference(relations, published, layouts)
        assert [one.name for one in gone] == leaves, mode
        assert [one.name for one in new.values()] == joins, mode
        assert {1, 12, 3} <= having


def test_slots_that_sync_workers_may_have_left() -> None:
    relations = [
        _relation(1, "a", RelState.READY),
        _relation(2, "b", RelState.SYNCDONE, "recorded"),
        _relation(3, "c", RelState.INIT),
        _relation(4, "d", RelState.DATASYNC, "pg_9_sync_4_77"),
    ]
    assert slot_names(relations, "77") == ["recorded", "pg_9_sync_3_77", "pg_9_sync_4_77"]


def _relation(relid: int, name: str, state: RelState, slot: str | None = None) -> SubscriptionRel:
    return SubscriptionRel(
        subid=9,
        relid=relid,
        schema="public",
        name=name,
        state=state,
        lsn=Lsn(1),
        copy_generation=1,
        sync_slot=slot,
        path=f"/w/{name}",
        error=None,
        error_hint=None,
        definition=None,
        estimated_rows=None,
    )


def _published(oid: int, name: str) -> PublishedTable:
    return PublishedTable(Oid(oid), "public", name, None, None, "r", False, "d", False)


def test_options_without_effect_give_a_notice() -> None:
    said: list[str] = []

    class Listening:
        def notice(self, message: str, severity: str = "NOTICE", *, detail: str | None = None) -> None:
            said.append(message)

    session = cast(Session, Listening())
    option_effects.tell(session, SubscriptionOptions())
    assert said == []
    given = frozenset({"schema_changes", "run_as_owner"})
    option_effects.tell(session, SubscriptionOptions(specified=given))
    assert said == ["run_as_owner has no effect"]
    option_effects.tell(session, SubscriptionOptions(on_table_error="isolate", specified=frozenset({"on_table_error"})))
    assert len(said) == 1


async def test_each_command_is_noted_for_the_log_without_its_password(client: Client) -> None:
    secrets = ("host=h password=s3cr3t", "postgresql://u:s3cr3t@h/d")
    await client.run(UNCONNECTED.format(secrets[0]))
    for action in (
        f"CONNECTION '{secrets[1]}'",
        "SET (batch_rows = 7)",
        "ENABLE",
        "DISABLE",
        "ADD PUBLICATION q WITH (refresh = false)",
        "RENAME TO t",
    ):
        await client.run(f"ALTER SUBSCRIPTION s {action}")
    await client.run("ALTER SUBSCRIPTION t SET (slot_name = NONE)")
    await client.run("DROP SUBSCRIPTION t")
    await client.fails("DROP SUBSCRIPTION t")
    noted = await client.session.catalog.take_commands()
    assert [one.tag for one in noted] == ["CREATE SUBSCRIPTION", *["ALTER SUBSCRIPTION"] * 7, "DROP SUBSCRIPTION"]
    told = "\n".join(one.statement for one in noted)
    assert "s3cr3t" not in told
    for word in (
        "CONNECTION",
        "batch_rows",
        "ENABLE",
        "DISABLE",
        "ADD PUBLICATION q",
        "RENAME TO t",
        "DROP SUBSCRIPTION t",
    ):
        assert word in told


async def test_a_command_that_was_done_does_not_fail_because_it_could_not_be_noted(
    client: Client, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that it had failed, and whoever gave it again was told that the subscription exists."""

    async def full(*_: object) -> None:
        raise PubsubError("the catalog could not be written: database or disk is full", sqlstate="53100")

    monkeypatch.setattr(client.session.catalog, "note_command", full)
    woken: list[bool] = []
    client.session.wake = lambda: woken.append(True)
    assert await client.run(UNCONNECTED.format(nowhere)) == "CREATE SUBSCRIPTION"
    assert (await client.session.catalog.subscription("s")).name == "s"
    told = client.notices[-1]
    assert (told.severity, told.message) == (
        "WARNING",
        "CREATE SUBSCRIPTION was carried out, but could not be noted for the log",
    )
    assert told.detail == "the catalog could not be written: database or disk is full"
    assert woken
