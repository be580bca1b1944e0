"""What must be so after a round, when the node has caught up."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from pubsub.sql.identifiers import quote_qualified
from pubsub.testing.compare import compare_tables
from tests.crash import beside
from tests.crash.machine import Daemon, anonymous, javas, workers
from tests.crash.settle import FailedRound
from tests.crash.world import World
from tests.support.replica import wait_until

#: The last line of a traceback that no fault explains.
_OWN: Final = re.compile(
    r"(\w+\.)*(Assertion|Attribute|Index|Key|Name|Type|Value|Runtime|Recursion|InvalidState)Error\b"
)


def compare(world: World) -> int:
    """Compare every published table with its Delta tables; return the number of rows.  Raises FailedRound."""
    published = {
        (schema, table): condition
        for schema, table, condition in world.query(
            "SELECT schemaname, tablename, rowfilter FROM pg_publication_tables"
        )
    }
    known = world.relations()
    relations = {(one.schema, one.name): one for one in known if one.beside is None}
    if set(relations) != set(published):
        raise FailedRound(f"published are {sorted(published)}, subscribed {sorted(relations)}")
    rows = 0
    for name, relation in relations.items():
        difference = compare_tables(world.conninfo, quote_qualified(*name), relation.path)
        if difference is not None:
            raise FailedRound(f"{difference}\n{relation}")
        rows += world.query(f"SELECT count(*) FROM {quote_qualified(*name)}")[0][0]
    for relation in known:
        if relation.beside is not None:
            beside.compare(world, relation)
    states = {one.qualified_name: one.state.value for one in known if one.state.value != "r"}
    if states:
        raise FailedRound(f"tables are not ready: {states}")
    return rows


def nothing_left(world: World) -> None:
    """Look for slots, files and processes: before DROP SUBSCRIPTION, which this runs, and after it.  Raises FailedRound."""
    node = world.node
    try:
        wait_until(lambda: world.slots() == [world.name], f"slots but {world.name}: {world.slots()}", 30)
        for daemon in node.daemons:
            _wait_for_no_files(daemon.home, "spill")
            _wait_for("JVMs", daemon, javas, (0, 1))
            _wait_for("worker processes", daemon, workers, (node.workers,))
        world.drop()
        wait_until(lambda: not world.slots(), f"slots after DROP SUBSCRIPTION: {world.slots()}", 30)
        for daemon in node.daemons:
            _wait_for_no_files(daemon.home, "prepared")
    except AssertionError as error:
        raise FailedRound(str(error)) from error


def _wait_for(
    what: str, daemon: Daemon, find: Callable[[psutil.Process], list[psutil.Process]], counts: tuple[int, ...]
) -> None:
    """Wait until a daemon has that many processes; those of one that was killed end by themselves."""
    wait_until(lambda: len(find(daemon.process)) in counts, f"{counts} {what}: {find(daemon.process)}", 60)


def _wait_for_no_files(home: Path, *directories: str) -> None:
    for name in directories:
        wait_until(
            lambda name=name: not _files(home / name),  # type: ignore[misc]
            f"files are left: {_files(home / name)}",
            30,
        )


def _files(directory: Path) -> list[str]:
    """Return the files in a directory, but what the living JVM keeps there."""
    return [str(path) for path in directory.rglob("*") if path.is_file() and "spark" not in path.parts]


def memory(world: World) -> dict[str, int]:
    """Return the MB that the daemon, its worker processes and its JVM have of their own."""
    processes = [one.process for one in world.node.daemons]
    return {
        "daemon": sum(map(anonymous, processes)),
        "workers": sum(anonymous(worker) for one in processes for worker in workers(one)),
        "jvm": sum(anonymous(java) for one in processes for java in javas(one)),
    }


def said(logs: Mapping[Path, int]) -> tuple[Counter[str], list[str]]:
    """Return how often the daemons have warned or failed, by event, and what they logged of errors of their own.

    `logs`: from which byte on each is read.

    A traceback of Spark's, or of a connection to a JVM that was killed, is none.
    """
    counts: Counter[str] = Counter()
    defects: list[str] = []
    for raw in _written(logs):
        try:
            line: dict[str, Any] = json.loads(raw)
        except ValueError:
            text = raw.decode(errors="replace").rstrip()
            # Py4J and PySpark write of each connection to a JVM that was killed.
            if text.startswith(("Exception ignored", "Task exception")) or _OWN.match(text):
                defects.append(text)
            continue
        if line.get("level") in {"warning", "error", "critical"}:
            counts[str(line.get("event"))[:80]] += 1
            if _OWN.match(str(line.get("exception", "")).rstrip().rpartition("\n")[2]):
                defects.append(f"{line.get('event')}: {line['exception']}")
    return counts, defects


def _written(logs: Mapping[Path, int]) -> Iterator[bytes]:
    for log, began in logs.items():
        with log.open("rb") as file:
            file.seek(began)
            yield from file
