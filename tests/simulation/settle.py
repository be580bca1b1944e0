"""The end of a history: no more trouble, an operator who does what the errors' hints say, and everything comes to rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from tests.simulation.steps import Steps
from tests.simulation.world import PUBLICATION, World

#: How long everything may take to come to rest, in virtual seconds.
_PATIENCE: Final = 400.0
#: When the operator looks for the first time, and how often then.
_FIRST_LOOK: Final = 20.0
_LOOKS: Final = 30.0


async def settle(world: World, steps: Steps) -> None:
    """End what is open, and wait until everything has arrived; then check it."""
    world.chance.trouble = world.chance.seconds = 0.0
    world.lake.fates.clear()
    world.lake.interlopers.clear()
    world.end_transactions()
    _end_poison(world)
    steps.do_write([("insert", 0, 1)])
    world.tell("no more trouble from here on")
    began = asyncio.get_running_loop().time()
    look = began + _FIRST_LOOK
    while next(world.unrest(), None) is not None and not world.oracle.violations:
        await asyncio.sleep(1.0)
        now = asyncio.get_running_loop().time()
        if now > look:
            await _help(world, steps, failed=world.failed_at > look - _LOOKS)
            look = asyncio.get_running_loop().time() + _LOOKS
        if now - began > _PATIENCE:
            world.oracle.require(False, f"no progress any more: {'; '.join(world.unrest())}; {world.failure()}")
    if not world.oracle.violations:
        await world.oracle.settled()


def _end_poison(world: World) -> None:
    transaction = world.server.begin()
    for oid in world.tables:
        transaction.purge(oid)
    world.finish(transaction, commits=True)


async def _help(world: World, steps: Steps, *, failed: bool) -> None:
    """Do what the errors' hints say.  `failed`: a worker has failed since the operator looked last."""
    if not world.enabled():
        await world.alter("ENABLE")
    if {relid for relid, *_ in world.relations()} != world.server.publications[PUBLICATION]:
        await _refresh(world)
    error, hint = world.failure()
    if failed and hint is not None and "every table" in hint:
        allowed = world.excuses & {"failover", "slot"}
        world.oracle.require(allowed, f"every table is to be copied again, for no reason: {error}")
        await _resync(world, [name for _, name, *_ in world.relations()])
        return
    stopped = [name for _, name, _, _, _, stopped in world.relations() if stopped]
    world.oracle.require(not stopped or world.excuses, f"tables have stopped for no reason: {', '.join(stopped)}")
    differing = [name for _, name, path, *_ in world.relations() if path in world.oracle.differs]
    again = list(dict.fromkeys([*stopped, *differing]))
    if again and (failed or stopped or all(state == "r" for _, _, _, state, *_ in world.relations())):
        await _resync(world, again)
    elif failed and error is not None:
        origin = world.oracle.stored_origin()
        for finish, tables in world.poisoned:
            if finish >= origin and await steps.skip(finish, tables):
                return


async def _refresh(world: World) -> None:
    error = await world.alter("REFRESH PUBLICATION")
    if error is not None and "copy_data = false" in (error.hint or ""):
        known = {relid for relid, *_ in world.relations()}
        await world.alter("REFRESH PUBLICATION WITH (copy_data = false)")
        world.oracle.differs.update(world.paths_of({relid for relid, *_ in world.relations()} - known))


async def _resync(world: World, names: Sequence[str]) -> None:
    error = await world.alter(f"RESYNC TABLE {', '.join(names)}")
    if error is not None and "REFRESH PUBLICATION" in (error.hint or ""):
        await _refresh(world)
