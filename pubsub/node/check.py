"""`pubsub check`, the node's own side: what the daemon needs of this machine, tried as the daemon would use it.

Nothing stays behind: what is written to try a directory is removed, and no catalog is made.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final

from pubsub import jars, object_stores
from pubsub.delta.warehouse_check import existing, failed_step, require_writable, try_directory
from pubsub.errors import NoCatalog, PubsubError
from pubsub.publisher import definitions, publication
from pubsub.publisher.check import Finding
from pubsub.publisher.connection import Connection
from pubsub.settings import Settings

#: Below this much free space a warning is due, and below the second an error, in bytes.
LITTLE_SPACE: Final = 10 << 30
NO_SPACE: Final = 1 << 30
#: A difference of clocks that is worth knowing, in seconds: lag is told in seconds.
CLOCKS_DIFFER: Final = 1.0
#: Descriptors: connections, files of a batch, and those that a Python process and its libraries hold anyway.
FEW_FILES: Final = 1024
#: How long one of a cluster's masters may take to accept a connection, in seconds.
MASTER_SECONDS: Final = 5.0


async def check_node(settings: Settings, published_bytes: int | None = None) -> list[Finding]:
    """Return all findings.  `published_bytes`: what the tables that will be copied take on the publisher."""
    findings = [*await asyncio.to_thread(_programs, settings), *await _master(settings)]
    findings += await asyncio.to_thread(_warehouse, settings, published_bytes)
    if settings.warehouse is not None:
        findings += await asyncio.to_thread(_space, settings.home, "the node's directory", None)
    return [*findings, await _catalog(settings), _open_files()]


async def published_bytes(conninfo: str, publications: list[str]) -> int:
    """Return what the tables of the publications (by default of all) take on the publisher.  Raises PubsubError."""
    async with await Connection.connect(conninfo, application_name="pubsub check") as connection:
        names = publications or [one.name for one in await publication.publications(connection)]
        tables = await publication.published_tables(connection, names)
        known = await definitions.table_definitions(connection, [table.oid for table in tables])
        return sum(definition.bytes for definition in known.values())


async def check_clock(conninfo: str) -> Finding:
    """Compare this machine's clock with the publisher's.  Raises PubsubError."""
    async with await Connection.connect(conninfo, application_name="pubsub check") as connection:
        before = time.time()
        (row,) = await connection.query("SELECT extract(epoch FROM clock_timestamp())")
        after = time.time()
    return clocks(before, after, float(row[0] or 0))


def clocks(before: float, after: float, theirs: float) -> Finding:
    """Judge a clock that showed `theirs` between `before` and `after` of ours, in seconds."""
    ahead = before - theirs if theirs < before else min(after - theirs, 0.0)
    if abs(ahead) < CLOCKS_DIFFER:
        return Finding("ok", "this machine's clock and the publisher's agree within a second")
    return Finding(
        "warning",
        f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the publisher's",
        detail="Lag in seconds, in status and metrics, is wrong by that much.  No decision depends on it.",
        hint="Let both follow a time server (NTP).",
    )


def _programs(settings: Settings) -> list[Finding]:
    findings = []
    try:
        findings.append(Finding("ok", f"Java {jars.require_java()}"))
    except PubsubError as error:
        findings.append(_failed(error))
    try:
        jars.class_path()
        if object_stores.is_s3(settings.warehouse_uri):
            jars.s3()
        spark = f"Spark {version('pyspark')}, and the jars of Delta {version('delta-spark')}"
        findings.append(Finding("ok", f"{spark} in {jars.directory()}"))
    except PubsubError as error:
        findings.append(_failed(error))
    if (open_to_others := settings.spark.unprotected) is not None:
        findings.append(Finding("warning", *open_to_others))
    return findings


async def _master(settings: Settings) -> list[Finding]:
    """Look whether one of a Spark cluster's masters listens.  YARN's and Kubernetes' are not looked for."""
    master = settings.spark.master
    if not master.startswith("spark://"):
        return []
    places = master.removeprefix("spark://").split(",")
    failed = {place: await _refusal(place) for place in places}
    if None in failed.values():
        return [Finding("ok", f'the master of "{master}" listens')]
    return [
        Finding(
            "error",
            f'no master of "{master}" can be reached',
            " ".join(f"{place}: {reason}." for place, reason in failed.items()),
            'Start it, or correct "master" in the table [spark]: without it the daemon can copy and commit nothing.',
        )
    ]


async def _refusal(place: str) -> str | None:
    """Return why nothing listens at HOST:PORT; None if something does."""
    host, _, port = place.rpartition(":")
    if not port.isdecimal():
        return "it has no port"
    try:
        async with asyncio.timeout(MASTER_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no answer within {MASTER_SECONDS:g} s"
    except (OSError, OverflowError) as error:
        # asyncio's own text names the address again; a name that is not found has no errno of the system's.
        number = getattr(error, "errno", None)
        return os.strerror(number) if number is not None and number > 0 else str(error)
    writer.close()
    return None


def _warehouse(settings: Settings, wanted: int | None) -> list[Finding]:
    where = settings.warehouse_uri
    object_stores.configure(settings.spark.conf)
    try:
        untried = require_writable(where)
    except PubsubError as error:
        return [_failed(error)]
    if object_stores.is_store(where):
        found = [Finding("ok", f'warehouse "{where}" can be written')]
        if untried is not None:
            hint = "A store without conditional puts (If-None-Match) is safe for one writer of a table alone."
            message = "it could not be tried whether the store refuses to replace an object"
            found.append(Finding("warning", message, untried, hint))
        return found
    directory = Path(where.removeprefix("file://"))
    return [
        Finding("ok", f'warehouse "{directory}" can be written durably'),
        *_space(directory, "the warehouse", wanted),
    ]


def _space(directory: Path, what: str, wanted: int | None) -> list[Finding]:
    free = shutil.disk_usage(existing(directory)).free
    left = f"{free / (1 << 30):,.1f} GB are free for {what}"
    if free < NO_SPACE:
        return [Finding("error", f"only {left}", hint="Make room, or put it on another disk.")]
    if wanted is not None and wanted > free:
        detail = f"The published tables take {wanted / (1 << 30):,.1f} GB on the publisher."
        return [Finding("warning", f"only {left}", detail, "Delta tables are smaller as a rule, but not always.")]
    if free < LITTLE_SPACE:
        hint = "Files that were replaced stay for housekeeping.deleted_file_retention: leave room for them."
        return [Finding("warning", f"only {left}", hint=hint)]
    return [Finding("ok", left)]


async def check_leftovers(settings: Settings, conninfo: str) -> list[Finding]:
    """Return a finding for each slot on the publisher that a sync worker of this node has left.  Raises PubsubError."""
    from catalog.store import Catalog
    from launcher.leftover_slots import leftover_slots
    from pubsub.publisher.connection import Connection

    with suppress(NoCatalog):
        async with (
            await Catalog.open(settings.catalog_location, settings.catalog_timeout, make=False) as catalog,
            await Connection.connect(conninfo, application_name="pubsub check") as connection,
        ):
            left = await leftover_slots(connection, catalog, (await catalog.node()).node_id)
            return [Finding("warning", one.message, one.detail, one.hint) for one in left.values()]
    return []


async def _catalog(settings: Settings) -> Finding:
    from catalog.store import Catalog

    location = settings.catalog_location
    shown = f'"{location}"' if isinstance(location, Path) else "at [catalog] url"
    try:
        async with await Catalog.open(location, settings.catalog_timeout, make=False) as catalog:
            return Finding("ok", f"catalog {shown} of node {(await catalog.node()).node_id}")
    except NoCatalog:
        pass
    except PubsubError as error:
        return _failed(error)
    if isinstance(location, Path):
        try:
            await asyncio.to_thread(try_directory, location.parent)
        except OSError as error:
            hint = "Give the node a directory that this user may write, with --home or $PUBSUB_HOME."
            return Finding(
                "error", f'no catalog can be made in "{location.parent}": {error.strerror}', failed_step(error), hint
            )
    return Finding("ok", f"catalog {shown} will be made")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        hint = f"ulimit -n {FEW_FILES}, or LimitNOFILE= in the service's unit."
        return Finding("warning", f"a process may open {soft} files only (at most {hard})", hint=hint)
    return Finding(
        "ok", "files that a process may open: " + ("any number" if soft == resource.RLIM_INFINITY else str(soft))
    )


def _failed(error: PubsubError) -> Finding:
    return Finding("error", error.message, error.detail, error.hint)
