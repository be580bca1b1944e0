"""One round, from its plan to its result."""

from __future__ import annotations

import shutil
import time
import traceback
from typing import Any

from pubsub.testing.bad_network import BadNetwork
from tests.crash import check
from tests.crash.faults import Faults
from tests.crash.load import Load
from tests.crash.machine import Machine, kind_here
from tests.crash.plan import Plan
from tests.crash.settle import PATIENCE, FailedRound, settle
from tests.crash.world import World


def run(machine: Machine, plan: Plan) -> dict[str, Any]:
    """Run a round; return its result, with `difference` and `kept`, where its logs are, if it has failed."""
    began = time.monotonic()
    result: dict[str, Any] = {"seed": plan.seed, "version": plan.version, "kind": kind_here(plan.kind)}
    server = machine.server(plan.version)
    node = machine.node(kind_here(plan.kind))
    name = f"crash_{plan.seed}"
    server.create_database(name)
    logs = {one.log: one.log.stat().st_size for one in node.daemons}
    with BadNetwork(server.port) as network:
        world = World(plan, machine, server, node, network, name)
        load = Load(plan, world.connect, node.directory / f"load_{plan.seed}.sql")
        faults = Faults(world, PATIENCE)
        try:
            _live(world, load, faults)
            result["rows"] = check.compare(world)
            result["memory"] = check.memory(world)
            check.nothing_left(world)
            counts, defects = check.said(logs)
            result["said"] = dict(counts)
            if defects:
                raise FailedRound(f"the daemon's log has exceptions:\n{defects[0]}")
        except BaseException as error:
            known = isinstance(error, FailedRound)
            result["difference"] = str(error) if known else traceback.format_exc()
            if not isinstance(error, Exception):
                raise
        finally:
            load.close()
            result["done"] = dict(load.done)
            result["faults"] = [f"{one.at:.2f} {one.what}" for one in plan.faults]
    if "difference" in result:
        (node.directory / "story.txt").write_text("\n".join([plan.story(), *faults.story, result["difference"], ""]))
        result["kept"] = str(machine.give_up())
    else:
        (node.directory / f"load_{plan.seed}.sql").unlink()
        server.drop_database(name)
        shutil.rmtree(node.warehouse / name, ignore_errors=True)
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


def _live(world: World, load: Load, faults: Faults) -> None:
    """Subscribe, write, break things; then let everything work, and wait for the catch-up.  Raises FailedRound."""
    load.create()
    if world.plan.early:
        load.start()
    world.subscribe()
    if not world.plan.copies:
        # Tables that are not copied are equal only from an empty beginning.
        world.node.daemon.client(lambda node: node.wait_for_catchup(world.name, timeout=PATIENCE))
    if not world.plan.early:
        load.start()
    try:
        faults.run(world.plan.faults, world.plan.seconds)
    finally:
        load.end()
    if faults.failures:
        raise FailedRound("; ".join(faults.failures))
    settle(world, load)
