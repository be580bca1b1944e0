"""kill -9 of the daemon around the commit of a repair: nothing is lost or doubled, and another repair does the rest."""

from __future__ import annotations

import asyncio

import pytest

from pubsub.errors import PubsubError
from pubsub.node.node import Node
from tests.fault.daemon import Daemon, Subscribed
from tests.support import foreign_statements
from tests.support.replica import Faults, wait_until

pytestmark = pytest.mark.full


def spoil(subscribed: Subscribed) -> None:
    """Lose some rows of Delta's, and double others, as another program may."""
    a, keyless = (f"delta.`{subscribed.relations()[table].path}`" for table in ("a", "keyless"))
    foreign_statements.run(
        f"DELETE FROM {a} WHERE id % 50 = 3",
        f"DELETE FROM {keyless} WHERE n = 3",
        f"INSERT INTO {keyless} VALUES (1), (1)",
    )


@pytest.mark.parametrize(
    "point", ["standing at a point", "repair public.a", "repaired public.a", "repaired public.keyless"]
)
def test_killed_around_a_repair(subscribed: Subscribed, daemon: Daemon, fault: Faults, point: str) -> None:
    subscribed.subscribe()
    subscribed.caught_up()
    spoil(subscribed)
    subscribed.write(3)

    async def repair(node: Node) -> str:
        return (await node.verify(subscribed.name, repair=True)).outcome

    fault.arm(point, "kill")
    with pytest.raises(PubsubError):
        daemon.client(repair)
    daemon.killed_by_fault()
    subscribed.write(3)
    fault.clear()
    daemon.start()
    subscribed.caught_up()
    subscribed.write()
    assert daemon.client(repair) == "equal", daemon.tail()
    subscribed.write()
    subscribed.assert_equal()


def test_rows_go_on_being_written_while_they_are_repaired(
    subscribed: Subscribed, daemon: Daemon, fault: Faults
) -> None:
    """The very rows that are copied anew change at the publisher before, within and after the halt."""
    subscribed.subscribe()
    subscribed.caught_up()
    spoil(subscribed)
    subscribed.write(2)
    fault.arm("repair public.a")

    async def repair(node: Node) -> str:
        repairing = asyncio.create_task(node.verify(subscribed.name, ["a"], repair=True))
        await asyncio.to_thread(fault.wait, "repair public.a")
        await asyncio.to_thread(subscribed.database.execute, "UPDATE a SET n = n + 1000 WHERE id % 50 = 3")
        await asyncio.to_thread(subscribed.database.execute, "DELETE FROM a WHERE id % 100 = 3")
        fault.release("repair public.a")
        return (await repairing).outcome

    assert daemon.client(repair) == "equal", daemon.tail()
    wait_until(lambda: subscribed.state("a") == "r", "the table to be ready")
    subscribed.assert_equal(("a",))
