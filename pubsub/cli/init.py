"""`pubsub init`: from nothing to a subscription.

    look     ask the publisher what is there (pubsub.publisher.check), and say what to change there, as statements
    make     the publication, if it is not there; pubsub.toml, if it is not there; the subscription
    say      what to run next

Whatever is missing is asked for on a terminal.  Nothing is made while something that the publisher lacks would make the
subscription fail; then the statements are printed, and the exit code is 1.  No file is overwritten.

The publisher's own writes go on as before: a publication is made without the tables whose updates PostgreSQL would then
refuse, and dropped again if no subscription comes of it.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from pubsub.cli.check import lines
from pubsub.errors import PubsubError
from pubsub.node.node import Node, make_home
from pubsub.settings import FILE_NAME, Settings
from pubsub.sql.conninfo import mask_conninfo
from pubsub.sql.identifiers import parse_qualified_name, quote_identifier, quote_literal, quote_qualified

if TYPE_CHECKING:
    from pubsub.cli.common import Common
    from pubsub.publisher.check import Finding
    from pubsub.publisher.connection import Connection

_FAILED: Final = 1

SETTINGS: Final = """\
# Settings of this node.  What is commented out is the default; docs/housekeeping.md, docs/monitoring.md and `make docs` say more.
# A running daemon reads the file again on SIGHUP.  Units are PostgreSQL's: "64MB", "5s".

# Where the Delta tables are: a directory (a relative path is one beside this file), s3a://bucket/path or hdfs://host:port/path.
#warehouse = "warehouse"

# How many tables of a subscription are copied at once, each with a slot of its own on the publisher.
#max_sync_workers_per_subscription = 2
# Changes of transactions in progress beyond this are kept on disk.
#logical_decoding_work_mem = "64MB"

[http]
# /metrics, /health and /ready.  Whoever reaches the port may read.
#listen = "127.0.0.1:9187"

[housekeeping]
# For how long readers may still open an earlier version of a table.
#deleted_file_retention = "1h"

[spark]
#master = "local[*]"
#conf = { "spark.driver.memory" = "2g" }
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line gave; None and () are asked for, or have a default."""

    conninfo: str | None
    publication: str | None
    tables: tuple[str, ...]
    subscription: str | None
    yes: bool
    dry_run: bool


@dataclass(frozen=True, slots=True)
class _Publication:
    """The publication to follow; `statement` makes it (None: it is there), and `grants` let the role read its tables.

    `findings`: what was found about the tables that it could hold.
    """

    name: str
    statement: str | None = None
    grants: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


async def run_init(common: Common, wanted: Wanted) -> int:
    """Carry out the command and return its exit code.  Raises PubsubError, typer.BadParameter."""
    from pubsub.node.check import check_node
    from pubsub.publisher.check import check

    if not (wanted.yes or wanted.dry_run or _can_ask()):
        raise typer.BadParameter("give --yes or --dry-run where nobody can be asked")
    conninfo = wanted.conninfo or await _ask("The publisher, as a connection string (host=… dbname=… user=…)")
    server = await check(conninfo, None)
    _tell(server)
    publication = await _publication(conninfo, wanted) if len(server) > 1 else None
    if publication is not None:
        _tell(publication.findings)
        server = [*server, *publication.findings]
    if not _may_go_on(server, publication) or publication is None:
        return _FAILED
    machine = await check_node(Settings.load(common.home))
    _tell(machine)
    if not _may_go_on(machine):
        return _FAILED
    if publication.statement is not None:
        _say("", "On the publisher:", f"    {publication.statement}")
    if publication.statement is not None and not wanted.dry_run:
        done = await _make_and_follow(common, conninfo, publication, wanted, server)
    else:
        done = await _follow(common, conninfo, publication, wanted, server)
    if not done:
        return _FAILED
    if not wanted.dry_run:
        _say("CREATE SUBSCRIPTION", *_next_steps(common.home))
    return 0


async def _make_and_follow(
    common: Common, conninfo: str, publication: _Publication, wanted: Wanted, known: Sequence[Finding]
) -> bool:
    """Make the publication and follow it, or leave none; return whether that was done.  Raises PubsubError."""
    if not (await _agreed("Make the publication?", wanted) and await _make_publication(conninfo, publication)):
        return False
    done = False
    try:
        done = await _follow(common, conninfo, publication, wanted, known)
    finally:
        if not done:
            await _drop_publication(conninfo, publication.name)
    return done


async def _follow(
    common: Common, conninfo: str, publication: _Publication, wanted: Wanted, known: Sequence[Finding]
) -> bool:
    """Check the publication, if it is there, and subscribe to it; return whether that was done.

    What is `known` is not told again.  Raises PubsubError.
    """
    from pubsub.publisher.check import check

    if publication.statement is None or not wanted.dry_run:
        rest = [finding for finding in await check(conninfo, [publication.name]) if finding not in known]
        _tell(rest)
        if not _may_go_on(rest):
            return False
    return await _subscribe(common, conninfo, publication.name, wanted)


async def _publication(conninfo: str, wanted: Wanted) -> _Publication:
    """Choose the publication, and how to make it if it is not there.  Raises PubsubError."""
    from pubsub.publisher import publication
    from pubsub.publisher.connection import Connection

    async with await Connection.connect(conninfo, application_name="pubsub init") as connection:
        existing = [one.name for one in await publication.publications(connection)]
        name = wanted.publication
        if name is None:
            unasked = wanted.yes or wanted.dry_run
            if unasked and len(existing) > 1:
                there = ", ".join(f'"{one}"' for one in existing)
                hint = "Name one with --publication, or a new one."
                raise PubsubError(f"there are several publications: {there}", sqlstate="22023", hint=hint)
            there = f" (there are {', '.join(existing)})" if existing else ""
            default = existing[0] if len(existing) == 1 else connection.dbname
            name = default if unasked else await _ask(f"The publication{there}", default=default)
        if name in existing:
            if wanted.tables:
                hint = "Name another one, or leave --table out."
                raise PubsubError(f'publication "{name}" already exists', sqlstate="42710", hint=hint)
            return _Publication(name)
        return await _new_publication(connection, name, wanted)


async def _new_publication(connection: Connection, name: str, wanted: Wanted) -> _Publication:
    """Choose the tables: those that are wanted, or else all, or the role's own, without those that may not be in it."""
    from pubsub.publisher import definitions
    from pubsub.publisher.check import Finding, grants
    from pubsub.publisher.publishable import publishable_tables

    if wanted.tables:
        tables = [(one.schema or "public", one.name) for one in map(parse_qualified_name, wanted.tables)]
        listed = [quote_qualified(*table) for table in tables]
        refused = [one for one in await publishable_tables(connection, tables) if one.change]
        needed = True
    else:
        found = await publishable_tables(connection)
        owned = [] if await definitions.is_superuser(connection) else [one for one in found if one.owned]
        refused = [one for one in owned or found if one.change]
        # If none fits, they all do as soon as what is missing has been done.
        fit = [one for one in owned or found if not one.change] or refused
        tables = [] if not owned and refused in ([], fit) else [(one.schema, one.name) for one in fit]
        listed = [one.alone for one in fit] if tables else []
        needed = fit == refused
    findings = [
        Finding(
            "error" if needed else "warning",
            f'table "{one.schema}.{one.name}" '
            + ("cannot be published yet" if needed else "is left out of the publication"),
            detail="Once it is published, PostgreSQL refuses UPDATE and DELETE on it, for lack of a replica identity.",
            hint="Give it a primary key, or let its updates have all columns, as below."
            if needed
            else "Give it a primary key, or let its updates have all columns, as below. It is published with: "
            f"ALTER PUBLICATION {quote_identifier(name)} ADD TABLE {one.alone};",
            change=one.change,
        )
        for one in refused
    ]
    what = f"TABLE {', '.join(listed)}" if listed else "ALL TABLES"
    everything = (f"GRANT pg_read_all_data TO {quote_identifier(connection.user)};",)
    return _Publication(
        name,
        # With the option a partitioned table is one Delta table.
        f"CREATE PUBLICATION {quote_identifier(name)} FOR {what} WITH (publish_via_partition_root = true);",
        tuple(line for table in tables for line in grants(*table, connection.user)) or everything,
        tuple(findings),
    )


async def _make_publication(conninfo: str, publication: _Publication) -> bool:
    """Make it, and return whether the command goes on: not if the role may not make it."""
    from pubsub.publisher.connection import Connection

    assert publication.statement is not None
    async with await Connection.connect(conninfo, application_name="pubsub init") as connection:
        try:
            await connection.execute(publication.statement)
        except PubsubError as error:
            if error.sqlstate != "42501":
                raise
            print(error.report(), file=sys.stderr)
            _tell_changes((publication.statement, *publication.grants))
            return False
    _say("CREATE PUBLICATION")
    return True


async def _drop_publication(conninfo: str, name: str) -> None:
    """Drop the publication that this command has made; if that fails, say so, with the statement."""
    from pubsub.publisher.connection import Connection

    statement = f"DROP PUBLICATION {quote_identifier(name)};"
    try:
        async with await Connection.connect(conninfo, application_name="pubsub init") as connection:
            await connection.execute(statement)
    except PubsubError as error:
        print(error.report(), file=sys.stderr)
        _tell_changes((statement,))
        return
    _say("DROP PUBLICATION")


async def _subscribe(common: Common, conninfo: str, publication: str, wanted: Wanted) -> bool:
    name = quote_identifier(wanted.subscription or publication)

    def create(connection: str) -> str:
        return (
            f"CREATE SUBSCRIPTION {name} CONNECTION {quote_literal(connection)} "
            f"PUBLICATION {quote_identifier(publication)}"
        )

    _say("", f'In the node "{common.home}":', f"    {create(mask_conninfo(conninfo))};")
    if wanted.dry_run:
        return True
    if not await _agreed("Make the subscription?", wanted):
        return False
    make_home(common.home)
    _write_settings(common.home)
    async with Node(common.home, workers=False) as node:
        async for _ in node.results(create(conninfo), lambda one: print(one.report(), file=sys.stderr)):
            pass
    return True


def _tell(findings: Iterable[Finding]) -> None:
    for finding in findings:
        _say(*lines(finding))


def _may_go_on(findings: Iterable[Finding], publication: _Publication | None = None) -> bool:
    """Return whether nothing stands in the way; if something does, print what to change, with what is missing besides."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return True
    changes = [line for finding in errors for line in finding.change]
    if publication is not None and publication.statement is not None:
        changes += [publication.statement, *publication.grants]
    _tell_changes(changes)
    return False


def _tell_changes(changes: Iterable[str]) -> None:
    """Print what a role that may do it changes on the publisher, each line once."""
    if found := dict.fromkeys(changes):
        _say("", "To be changed on the publisher, by a role that may; then give this command again:")
        _say(*(f"    {line}" for line in found))


def _write_settings(home: Path) -> None:
    try:
        with (home / FILE_NAME).open("x", encoding="utf-8") as file:
            file.write(SETTINGS)
    except FileExistsError:
        _say(f'settings are kept as they are: "{home / FILE_NAME}"')
        return
    except OSError as error:
        raise PubsubError(f'could not write "{home / FILE_NAME}": {error.strerror}', sqlstate="58030") from error
    _say(f'settings are in "{home / FILE_NAME}"')


def _next_steps(home: Path) -> Sequence[str]:
    command = f"pubsub --home {shlex.quote(str(home))}"
    return (
        "",
        "Next:",
        f"    {command} daemon            # copies and follows; docs/first-hour.md has a service for it",
        f"    {command} status --watch",
        f"    {command} sql 'SELECT relation, path FROM pg_subscription_rel'",
    )


async def _agreed(question: str, wanted: Wanted) -> bool:
    if wanted.yes:
        return True
    return (await _input(f"{question} [Y/n] ")).strip().lower() in {"", "y", "yes"}


async def _ask(question: str, *, default: str = "") -> str:
    if not _can_ask():
        raise typer.BadParameter("CONNINFO is missing, and nobody can be asked")
    shown = f" [{default}]" if default else ""
    while not (answer := (await _input(f"{question}{shown}: ")).strip() or default):
        pass
    return answer


async def _input(prompt: str) -> str:
    """Ask, and return a line from the terminal.  Unlike in input(), a signal's cancellation ends the wait for it."""
    print(prompt, end="", flush=True)
    loop, typed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, typed.set)
    try:
        await typed.wait()
    except asyncio.CancelledError:
        print()
        raise
    finally:
        loop.remove_reader(sys.stdin)
    line = sys.stdin.readline()
    if not line:
        raise typer.BadParameter("the input has ended")
    return line


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _say(*texts: str) -> None:
    for text in texts:
        print(text, flush=True)
