"""`pubsub check`: find out what will and will not work with a publisher before creating anything there.

The check writes nothing to the publisher.  For failures that PostgreSQL would report later, it uses PostgreSQL's words.
"""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.protocol.column_types import delta_type, folded_name
from pubsub.publisher import definitions, publication, replication, sequences
from pubsub.publisher.connection import Connection
from pubsub.publisher.definitions import ServerInfo, TableDefinition
from pubsub.publisher.publication import Publication, PublishedTable
from pubsub.publisher.replica_identities import Unfit, refused_keys, unfit_identities
from pubsub.sql.identifiers import encode_path, quote_identifier, quote_qualified

Severity = Literal["ok", "warning", "error"]

OLDEST_VERSION: Final = 150000
STANDBY_VERSION: Final = 160000  # logical decoding on a standby
EFFECTIVE_LEVEL_VERSION: Final = 190000  # replica is enough: the first logical slot makes it logical

_SLOTS_WANTED: Final = 3  # the subscription's, and max_sync_workers_per_subscription's default

_RESTART: Final = "-- and restart the server"
# auth.c: ClientAuthentication; the peer's address, the role and the database are in quotes.
_NO_HBA_ENTRY: Final = re.compile(
    r'(?:no pg_hba\.conf entry for|pg_hba\.conf rejects connection for) host "(.+?)", user "(.+?)", database "(.+?)"'
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.  "error": a subscription, or one of its tables, would fail; "warning": worth knowing.

    `change`: what the publisher's administrator does about it, line by line: SQL, or comments that say where a line goes.
    """

    severity: Severity
    message: str
    detail: str | None = None
    hint: str | None = None
    change: tuple[str, ...] = ()


async def check(conninfo: str, publications: Sequence[str] | None = ()) -> list[Finding]:
    """Return all findings, in the order in which a subscription would meet them; by default for all publications.

    `publications` None: what concerns the server and the role alone.
    An error from the publisher becomes a finding.  Raises PubsubError (42601) for an invalid connection string.
    """
    try:
        connection = await Connection.connect(conninfo, application_name="pubsub check")
    except PubsubError as error:
        if error.sqlstate == "42601":
            raise
        return [_failed(error)]
    async with connection:
        try:
            info = await definitions.server_info(connection)
            findings = [Finding("ok", f'connected to PostgreSQL {info.version_text}, database "{info.database}"')]
            if info.version < OLDEST_VERSION:
                hint = "Publishers from PostgreSQL 15 on are supported."
                return [*findings, Finding("error", f"PostgreSQL {info.version_text} is too old", hint=hint)]
            findings += check_server(info)
            findings.append(await _replication_connection(conninfo, connection))
            if publications is None:
                return findings
            existing = await publication.publications(connection)
            findings += check_publications(existing, publications)
            names = [p.name for p in existing if not publications or p.name in publications]
            findings += await _tables(connection, names)
        except PubsubError as error:
            return [_failed(error)]
    return findings


def check_server(info: ServerInfo) -> list[Finding]:
    """Check the server's settings."""
    findings = []
    if info.wal_level == "logical":
        findings.append(Finding("ok", "wal_level is logical"))
    elif info.version >= EFFECTIVE_LEVEL_VERSION and info.wal_level == "replica" and not info.in_recovery:
        why = "PostgreSQL 19 writes what logical decoding needs as long as there is a logical slot."
        findings.append(Finding("ok", "wal_level is replica", detail=why))
    elif info.version >= EFFECTIVE_LEVEL_VERSION and info.in_recovery:
        findings.append(
            Finding(
                "error",
                'logical decoding on standby requires "effective_wal_level" >= "logical" on the primary',
                hint="Set wal_level = logical on the primary, or make a logical slot there.",
            )
        )
    else:
        findings.append(
            Finding(
                "error",
                'logical decoding requires "wal_level" >= "logical"',
                detail=f'"wal_level" is "{info.wal_level}".',
                hint="Set wal_level = logical in the publisher's postgresql.conf and restart it.",
                change=("ALTER SYSTEM SET wal_level = logical;", _RESTART),
            )
        )
    if info.in_recovery and info.version < STANDBY_VERSION:
        findings.append(Finding("error", "logical decoding cannot be used while in recovery"))
    elif info.in_recovery:
        hint = "A slot is made only when the primary has written a checkpoint; pg_log_standby_snapshot() there helps."
        findings.append(Finding("warning", "the publisher is a standby", hint=hint))
    findings.append(
        _room(
            "max_replication_slots",
            info.free_replication_slots,
            info.max_replication_slots,
            "all replication slots are in use",
            'Free one or increase "max_replication_slots".',
        )
    )
    findings.append(
        _room(
            "max_wal_senders",
            info.free_wal_senders,
            info.max_wal_senders,
            f'number of requested standby connections exceeds "max_wal_senders" (currently {info.max_wal_senders})',
            'Increase "max_wal_senders", or end a walsender that is not needed.',
        )
    )
    if info.encoding == "SQL_ASCII":
        findings.append(
            Finding(
                "warning",
                "the database's encoding is SQL_ASCII",
                detail="Text that is not UTF-8 cannot be replicated: the table that holds it stops.",
            )
        )
    return findings


def check_publications(existing: Sequence[Publication], wanted: Sequence[str]) -> list[Finding]:
    """Check that the wanted publications exist (subscriptioncmds.c: check_publications) and publish every operation."""
    by_name = {publication.name: publication for publication in existing}
    missing = [name for name in dict.fromkeys(wanted) if name not in by_name]
    findings = []
    if missing:
        names = ", ".join(f'"{name}"' for name in missing)
        findings.append(
            Finding(
                "error",
                f"publication {names} does not exist on the publisher"
                if len(missing) == 1
                else f"publications {names} do not exist on the publisher",
                hint="CREATE PUBLICATION … FOR TABLE … there.",
            )
        )
    if not wanted and not existing:
        hint = "CREATE PUBLICATION … FOR TABLE … there."
        findings.append(Finding("error", "the database has no publication", hint=hint))
    for one in existing:
        if wanted and one.name not in wanted:
            continue
        parts = {
            "INSERT": one.insert,
            "UPDATE": one.update,
            "DELETE": one.delete,
            "TRUNCATE": one.truncate,
        }
        left_out = [operation for operation, published in parts.items() if not published]
        if left_out:
            message = f'publication "{one.name}" does not publish {", ".join(left_out)}'
            findings.append(Finding("warning", message, detail="The Delta tables will differ by what is left out."))
        else:
            findings.append(Finding("ok", f'publication "{one.name}"'))
    return findings


def check_table(table: PublishedTable, definition: TableDefinition, root: str | None = None) -> list[Finding]:
    """Check a table's definition for what a subscription needs; without an error, the first finding is an "ok".

    `root` names the partitioned table that it is a partition of.
    """
    name = qualified(table)
    findings = []
    columns = definition.published(table.attnames)
    if not columns:
        message = f'table "{name}" has no column that is published'
        findings.append(Finding("warning", message, detail="A subscription leaves it out."))
    for column in columns:
        try:
            delta_type(column.base_type_oid, column.base_typmod, column.base_type_kind, column.type_name)
        except FeatureNotSupported as error:
            findings.append(
                Finding("error", f'column "{column.name}" of table "{name}": {error.message}', hint=error.hint)
            )
    key = definition.identity_key if definition.replica_identity == "i" else definition.primary_key
    findings += [Finding("error", error.message, hint=error.hint) for error in refused_keys(columns, key, name)]
    findings += [
        Finding(
            "error",
            f'columns {same} of table "{name}" differ only in case',
            detail="Delta does not tell the names of columns apart by case.",
            hint="Rename one, there or by the option rename, or leave it out with a column list in the publication.",
        )
        for same in _same_but_for_case(column.name for column in columns)
    ]
    findings += _identity(table, definition, name)
    if left_out := [f'"{c.name}"' for c in definition.columns if c.generated and c not in columns]:
        findings.append(
            Finding(
                "warning",
                f'generated columns {", ".join(left_out)} of table "{name}" are not published',
                hint="PostgreSQL 18 and later publish stored ones WITH (publish_generated_columns = stored).",
            )
        )
    if any(finding.severity == "error" for finding in findings):
        return findings
    key = definition.identity_key or definition.primary_key
    keyed = f"key ({', '.join(key)})" if key else "no key"
    rows = "number of rows unknown (never analyzed)"
    if definition.estimated_rows is not None:
        rows = f"about {definition.estimated_rows} rows"
    return [
        Finding(
            "ok",
            f'table "{name}"',
            detail="; ".join([f"{len(columns)} columns, {keyed}, {rows}", *_where(table, root)]),
        ),
        *findings,
    ]


def _where(table: PublishedTable, root: str | None) -> list[str]:
    """What of its place in Delta does not go without saying."""
    found = []
    if table.relkind == "p":
        found.append("its partitions are one Delta table (publish_via_partition_root)")
    if root is not None:
        found.append(
            f'a partition of "{root}", and a Delta table of its own (publish_via_partition_root = true makes one of all)'
        )
    directory = f"{encode_path(table.schema)}/{encode_path(table.name)}"
    if directory != f"{table.schema}/{table.name}":
        found.append(f'its directory is "{directory}"')
    return found


def qualified(table: PublishedTable) -> str:
    """Return schema.table, unquoted, as PostgreSQL's messages write it."""
    return f"{table.schema}.{table.name}"


def _identity(table: PublishedTable, definition: TableDefinition, name: str) -> list[Finding]:
    if definition.replica_identity == "f" and not definition.primary_key:
        return [
            Finding(
                "warning",
                f'table "{name}" has REPLICA IDENTITY FULL and no primary key',
                detail="Updates and deletes find their row by all its columns, which is slow on a large table.",
            )
        ]
    if not table.publishes_updates or definition.replica_identity == "f":
        return []
    if not definition.identity_key:
        return [
            Finding(
                "warning",
                f'cannot update table "{table.name}" because it does not have a replica identity and publishes updates',
                detail=f'The publisher refuses UPDATE and DELETE on "{name}"; INSERT works.',
                hint="To enable updating the table, set REPLICA IDENTITY using ALTER TABLE.",
            )
        ]
    missing = [
        column for column in definition.identity_key if table.attnames is not None and column not in table.attnames
    ]
    if missing:
        return [
            Finding(
                "warning",
                f'cannot update table "{table.name}"',
                detail="Column list used by the publication does not cover the replica identity.",
                hint=f"Add {', '.join(missing)} to the column list, or INSERT alone works.",
            )
        ]
    return []


def _unfit(unfit: Iterable[Unfit]) -> list[Finding]:
    return [
        Finding(
            "warning" if one.refused else "error",
            one.message,
            detail=one.detail,
            hint="Until then INSERT alone works.",
            change=(one.change,),
        )
        for one in unfit
    ]


async def _replication_connection(conninfo: str, connection: Connection) -> Finding:
    """Try a walsender connection, so that the server itself says what it requires of the role."""
    try:
        async with await Connection.connect(conninfo, replication=True, application_name="pubsub check") as walsender:
            await replication.identify_system(walsender)
    except PubsubError as error:
        if await definitions.can_replicate(connection):
            return _failed(error)
        change = f"ALTER ROLE {quote_identifier(connection.user)} REPLICATION;"
        return Finding("error", error.message, error.detail, error.hint or "The role needs REPLICATION.", (change,))
    return Finding("ok", f'role "{connection.user}" may replicate')


async def _tables(connection: Connection, names: Sequence[str]) -> list[Finding]:
    try:
        tables = await publication.published_tables(connection, names)
    except FeatureNotSupported as error:
        return [_failed(error)]
    of_sequences = await _sequences(connection, names)
    if names and not tables:
        return of_sequences or [Finding("warning", "the publications have no tables")]
    known = await definitions.table_definitions(connection, [table.oid for table in tables])
    roots = await definitions.partition_roots(connection, [table.oid for table in tables])
    findings = [
        Finding(
            "warning",
            f"tables {same} differ only in case",
            detail="Spark's catalog does not tell them apart; their paths differ.",
        )
        for same in _same_but_for_case(qualified(table) for table in tables)
    ]
    # What was dropped meanwhile is not in `known`.
    there = [table for table in tables if table.oid in known]
    # The rows of updates and deletes must be found, those of a partitioned table's partitions, too.
    updated = [(known[table.oid], table.attnames) for table in there if table.publishes_updates]
    unfit = await unfit_identities(connection, updated)
    columns = {table.oid: known[table.oid].names(table.attnames) for table in there}
    readable = await definitions.readable_tables(connection, columns)
    policed = await definitions.under_row_security(connection, [table.oid for table in there])
    for table in there:
        findings += check_table(table, known[table.oid], roots.get(table.oid))
        findings += _unfit(unfit.get(table.oid, ()))
        if table.oid not in readable:
            findings.append(
                Finding(
                    "error",
                    f"permission denied for table {table.name}",
                    hint=f'The initial copy reads "{qualified(table)}" as role "{connection.user}".',
                    change=grants(table.schema, table.name, connection.user),
                )
            )
        elif table.oid in policed:
            findings.append(
                Finding(
                    "error",
                    f'query would be affected by row-level security policy for table "{table.name}"',
                    hint="The initial copy needs the table's owner, a superuser, or a role with BYPASSRLS.",
                    change=(f"ALTER ROLE {quote_identifier(connection.user)} BYPASSRLS;",),
                )
            )
    return findings + of_sequences


async def _sequences(connection: Connection, names: Sequence[str]) -> list[Finding]:
    """Check that the published sequences can be read; [] if none are published, as before PostgreSQL 19."""
    found = await sequences.published_sequences(connection, names)
    if not found:
        return []
    states = await sequences.sequence_states(connection, [(one.schema, one.name) for one in found])
    hidden = [found[state.place] for state in states if state.readable is False]
    to = quote_identifier(connection.user)
    return [
        Finding("ok", f"{len(found)} sequence{'s' if len(found) > 1 else ''}"),
        *(
            Finding(
                "error",
                f"permission denied for sequence {one.name}",
                hint=f'"{one.schema}.{one.name}" is synchronized as role "{connection.user}".',
                change=(f"GRANT SELECT ON SEQUENCE {quote_qualified(one.schema, one.name)} TO {to};",),
            )
            for one in hidden
        ),
    ]


def _room(setting: str, free: int, most: int, full: str, hint: str) -> Finding:
    change = (f"ALTER SYSTEM SET {setting} = {most + _SLOTS_WANTED - free};", _RESTART)
    if free == 0:
        return Finding("error", full, hint=hint, change=change)
    if free < _SLOTS_WANTED:
        detail = f"A subscription uses one, and one more for each table that is copied at the time: {_SLOTS_WANTED}."
        return Finding("warning", f"only {free} of {setting} = {most} are free", detail, hint, change)
    return Finding("ok", f"{free} of {setting} = {most} are free")


def _same_but_for_case(names: Iterable[str]) -> list[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[folded_name(name)].append(name)
    return [", ".join(f'"{name}"' for name in group) for group in groups.values() if len(group) > 1]


def grants(schema: str, table: str, role: str) -> tuple[str, ...]:
    """Return the statements that let a role read the table."""
    to = quote_identifier(role)
    return (
        f"GRANT USAGE ON SCHEMA {quote_identifier(schema)} TO {to};",
        f"GRANT SELECT ON TABLE {quote_qualified(schema, table)} TO {to};",
    )


def hba_line(message: str) -> tuple[str, ...]:
    """Return the line of pg_hba.conf that a refused connection lacks; () if the message says something else."""
    match = _NO_HBA_ENTRY.search(message)
    if match is None:
        return ()
    address, user, database = match.groups()
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
        where = ["host", f"{found}/{found.max_prefixlen}"]
    except ValueError:
        where = ["local"] if address == "[local]" else ["host", address]
    # A line for a database lets replication of that database in, too; "replication" means physical replication alone.
    line = " ".join([where[0], _in_hba(database), _in_hba(user), *where[1:], "scram-sha-256"])
    return ("-- in pg_hba.conf, before the lines that reject it:", f"--   {line}", "SELECT pg_reload_conf();")


def _in_hba(name: str) -> str:
    """Quote a name as pg_hba.conf needs it: hba.c: next_token."""
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) and name not in {"all", "replication"} else f'"{name}"'


def _failed(error: PubsubError) -> Finding:
    return Finding("error", error.message, error.detail, error.hint, hba_line(f"{error.message} {error.detail or ''}"))
