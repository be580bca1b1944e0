"""The catalog between a daemon and the commands of other processes: requests, the change counter, one daemon."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from catalog import schema
from catalog.records import Request, Subscription
from catalog.requests import RequestTimeoutError
from catalog.store import Catalog
from pubsub.errors import DuplicateObject, ObjectInUse, PubsubError, UndefinedObject
from pubsub.protocol.lsn import Lsn
from tests.support.catalog import new, with_table

HOME = Path("/home")


@pytest.fixture
def location(tmp_path: Path) -> Path | str:
    """The catalog's location; scenario 065 runs the same tests on a PostgreSQL database."""
    return tmp_path / "catalog.db"


@pytest.fixture
async def catalog(location: Path | str) -> AsyncIterator[Catalog]:
    async with await Catalog.open(location) as opened:
        yield opened


async def test_commands_are_taken_once_and_in_order(catalog: Catalog) -> None:
    before = await catalog.change_counter()
    for number in range(3):
        await catalog.note_command("ALTER SUBSCRIPTION", f"ALTER SUBSCRIPTION s{number} ENABLE")
    assert await catalog.change_counter() > before
    taken = await catalog.take_commands()
    assert [one.statement for one in taken] == [f"ALTER SUBSCRIPTION s{number} ENABLE" for number in range(3)]
    assert await catalog.take_commands() == []
    await catalog.note_command("DROP SUBSCRIPTION", "DROP SUBSCRIPTION s")
    assert [one.tag for one in await catalog.take_commands()] == ["DROP SUBSCRIPTION"]


async def test_only_the_latest_commands_are_kept_if_none_are_taken(catalog: Catalog) -> None:
    for number in range(103):
        await catalog.note_command("ALTER SUBSCRIPTION", str(number))
    assert [one.statement for one in await catalog.take_commands()] == [str(number) for number in range(3, 103)]


async def test_the_change_counter_ignores_positions_and_statistics(catalog: Catalog) -> None:
    counter = await catalog.change_counter()
    sub = await with_table(catalog)
    moved = await catalog.change_counter()
    assert moved > counter
    await catalog.advance_origin(sub.oid, Lsn(5))
    await catalog.put_worker_stats(sub.oid, None, {"pid": 1})
    await catalog.add_counters(sub.oid, commits=1)
    assert await catalog.change_counter() == moved
    await catalog.begin_copy(sub.oid, 1)
    assert await catalog.change_counter() > moved


async def test_a_refused_change_does_not_move_the_counter(catalog: Catalog) -> None:
    await with_table(catalog)
    counter = await catalog.change_counter()
    with pytest.raises(DuplicateObject):
        await with_table(catalog)
    assert await catalog.change_counter() == counter


async def wait_for_request(catalog: Catalog) -> list[Request]:
    while True:
        if pending := await catalog.pending_requests():
            return pending


async def answer_next(catalog: Catalog, error: PubsubError | None = None) -> str:
    pending = await wait_for_request(catalog)
    assert await catalog.answer(pending[0].id, error)
    assert not await catalog.answer(pending[0].id)
    return f"{pending[0].kind} {pending[0].subid} {pending[0].payload}"


async def test_a_request_is_answered(catalog: Catalog, location: Path | str) -> None:
    async with await Catalog.open(location) as command:
        counter = await catalog.change_counter()
        daemon = asyncio.create_task(answer_next(catalog))
        await command.request("drop subscription", 16385, {"slot": "x"})
        assert await daemon == "drop subscription 16385 {'slot': 'x'}"
        assert await catalog.change_counter() > counter
        assert await catalog.pending_requests() == []


async def test_a_request_s_error_comes_back_whole(catalog: Catalog) -> None:
    error = PubsubError("no", sqlstate="55006", detail="d", hint="h", context="c")
    daemon = asyncio.create_task(answer_next(catalog, error))
    with pytest.raises(PubsubError) as caught:
        await catalog.request("drop subscription", 1)
    await daemon
    assert caught.value.report(verbose=True) == error.report(verbose=True)


async def test_what_a_killed_command_has_asked_for_is_not_kept(catalog: Catalog) -> None:
    """It takes no answer, and its payload may have keys of rows."""
    request_id = await catalog._ask("repair", 1, {"tables": [{"keys": "a secret"}]})
    assert await catalog.answer(request_id)
    async with catalog._read() as connection:
        (row,) = await connection.execute(select(schema.request))
    assert (row.id, row.answered, row.payload) == (request_id, True, {})


async def test_a_request_that_is_given_up_is_withdrawn(catalog: Catalog) -> None:
    with pytest.raises(RequestTimeoutError):
        await catalog.request("resync", 1, timeout=0.01)
    assert await catalog.pending_requests() == []
    asking = asyncio.create_task(catalog.request("resync", 1))
    pending = await wait_for_request(catalog)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await catalog.pending_requests() == []
    assert not await catalog.answer(pending[0].id)


async def test_the_daemon_s_row(catalog: Catalog) -> None:
    assert (await catalog.state()).daemons == ()
    await catalog.hold(HOME)
    (found,) = (await catalog.state()).daemons
    assert (found.pid, found.home) == (os.getpid(), str(HOME))
    await catalog.clear_daemon()
    assert (await catalog.state()).daemons == ()
    await catalog.let_go()


async def test_a_cancelled_task_leaves_the_catalog_usable(catalog: Catalog) -> None:
    """A worker may be cancelled at any await: no lock may remain, and its change must be stored fully or not at all."""
    sub = await with_table(catalog)
    for steps in range(40):
        task = asyncio.create_task(catalog.advance_origin(sub.oid, Lsn(1000 + steps)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    async with asyncio.timeout(20):
        assert await catalog.advance_origin(sub.oid, Lsn(5000)) == 5000


async def test_concurrent_writers_lose_no_count(catalog: Catalog, location: Path | str) -> None:
    sub = await with_table(catalog)
    async with await Catalog.open(location) as other:
        await asyncio.gather(*(each.add_counters(sub.oid, commits=1) for each in [catalog, other] * 20))
    (stats,) = await catalog.subscription_stats()
    assert stats.commits == 40


_OTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from catalog.records import NewSubscription
from catalog.store import Catalog
from pubsub.sql.options import SubscriptionOptions

async def main(path, name):
    async with await Catalog.open(path if "://" in path else Path(path)) as catalog:
        for place in range(10):
            new = NewSubscription(f"{name}{place}", "", (), SubscriptionOptions(), "t", None)
            await catalog.create_subscription(new)
        print((await catalog.node()).node_id)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_processes_that_open_a_new_catalog_at_once(location: Path | str) -> None:
    """They create one schema and one identity, and assign no oid twice."""
    command = [sys.executable, "-c", _OTHER_PROCESS, str(location)]
    pipe = asyncio.subprocess.PIPE
    processes = [await asyncio.create_subprocess_exec(*command, name, stdout=pipe) for name in ("a", "b", "c")]
    printed = {(await process.communicate())[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(printed) == 1
    async with await Catalog.open(location) as catalog:
        oids = [sub.oid for sub in await catalog.subscriptions()]
        assert sorted(oids) == list(range(16384, 16384 + 30))


async def test_a_catalog_has_one_daemon_whichever_home_it_is_of(catalog: Catalog, location: Path | str) -> None:
    await catalog.hold(HOME, 4711)
    async with await Catalog.open(location) as second:
        with pytest.raises(ObjectInUse, match="a daemon is already running on catalog") as caught:
            await second.hold(HOME)
        assert caught.value.sqlstate == "55006"
        assert "process id is" in (caught.value.detail or "")
        assert "a catalog of its own" in (caught.value.hint or "")
        # It is no daemon, and writes as any command does.
        await second.create_subscription(new())
        await catalog.prove()
        await catalog.let_go()
        await second.hold(HOME)
        await second.prove()
        await second.let_go()


async def test_a_pause_is_seen_and_excludes_another(catalog: Catalog, location: Path | str) -> None:
    sub = await with_table(catalog)
    order = []

    async def second() -> None:
        async with await Catalog.open(location) as other, other.pause(sub.oid, "SECOND"):
            order.append((await other.subscription(sub.oid)).paused)

    before = await catalog.change_counter()
    async with catalog.pause(sub.oid, "FIRST"):
        assert await catalog.change_counter() > before
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0.3)
        order.append((await catalog.subscription(sub.oid)).paused)
        # The daemon ends no pause whose command is at work.
        assert await catalog.end_abandoned_pause(sub.oid) is None
        async with catalog.pause((await catalog.create_subscription(new("other"))).oid, "ANOTHER SUBSCRIPTION'S"):
            pass
    await waiting
    assert [str(paused).partition(" ")[0] for paused in order] == ["FIRST", "SECOND"]
    assert f"of process {os.getpid()} on host" in str(order[0])
    after = await catalog.subscription(sub.oid)
    assert (after.paused, after.generation) == (None, sub.generation + 4)
    assert await catalog.end_abandoned_pause(sub.oid) is None


_PAUSES = """
import asyncio, sys
from pathlib import Path
from catalog.store import Catalog

async def main(location, oid):
    async with await Catalog.open(location) as catalog, catalog.pause(oid, "RESYNC"):
        print("paused", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main(Path(sys.argv[1]) if sys.argv[1][0] == "/" else sys.argv[1], int(sys.argv[2])))
"""


async def test_a_killed_command_s_pause_is_ended(catalog: Catalog, location: Path | str) -> None:
    """It once stayed, without a word: no worker ran any more, and the slot retained WAL."""
    sub = await with_table(catalog)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PAUSES, str(location), str(sub.oid), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"paused\n"
    assert await catalog.end_abandoned_pause(sub.oid) is None
    process.kill()
    await process.wait()
    async with asyncio.timeout(60):
        # The kernel, or the server, lets go of its lock.
        while (ended := await catalog.end_abandoned_pause(sub.oid)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert f"RESYNC of process {process.pid} on host" in ended
    assert (await catalog.subscription(sub.oid)).paused is None
    async with catalog.pause(sub.oid, "NEXT"):
        pass


async def test_one_at_a_time_verifies_a_subscription(catalog: Catalog, location: Path | str) -> None:
    """From whichever home: what it leaves on the way, such as its pin, has one name a subscription."""
    sub, neighbour = await catalog.create_subscription(new()), await catalog.create_subscription(new("other"))
    async with await Catalog.open(location) as other:
        async with catalog.verifying(sub.oid, sub.name):
            with pytest.raises(ObjectInUse, match=f'"{sub.name}" is being verified by another process'):
                async with other.verifying(sub.oid, sub.name):
                    pass
            async with other.verifying(neighbour.oid, neighbour.name), other.pause(sub.oid, "RESYNC"):
                pass
            with pytest.raises(ObjectInUse):
                async with other.verifying(sub.oid, sub.name):
                    pass
        async with other.verifying(sub.oid, sub.name):
            pass


async def test_a_command_interrupted_while_its_pause_is_stored(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction goes on, and the command ends the pause: without a daemon nobody else would."""
    sub = await catalog.create_subscription(new())
    alter, stored = catalog.alter_subscription, asyncio.Event()

    async def then_wait(oid: int, **changes: Any) -> Subscription:
        altered = await alter(oid, **changes)
        if changes["paused"] is not None:
            stored.set()
            await asyncio.Event().wait()
        return altered

    async def command() -> None:
        async with catalog.pause(sub.oid, "RESYNC"):
            pytest.fail("it was interrupted before")

    monkeypatch.setattr(catalog, "alter_subscription", then_wait)
    running = asyncio.create_task(command())
    await stored.wait()
    assert (await catalog.subscription(sub.oid)).paused is not None
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await catalog.subscription(sub.oid)).paused is None


async def test_the_pause_of_a_dropped_subscription(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    async with catalog.pause(sub.oid, "DROP SUBSCRIPTION"):
        await catalog.drop_subscription(sub.oid)
    with pytest.raises(UndefinedObject):
        async with catalog.pause(sub.oid, "DROP SUBSCRIPTION"):
            pass
    assert await catalog.end_abandoned_pause(sub.oid) is None
