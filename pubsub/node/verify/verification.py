"""One verification of a subscription: from a point in the WAL to a report.

1. the daemon's apply worker holds a point: an LSN, and a snapshot of the publisher there, which our sessions import
2. the subscription's origin comes to it; the version of each table that shows it is found, and pinned
3. each table is compared (comparison.py), its result stored
4. repair: the daemon copies the rows that differ anew, and the tables are compared once more, at a later point
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import psycopg

from catalog.database import now
from catalog.figures import Outcome
from catalog.records import State, Subscription, SubscriptionRel
from catalog.store import Catalog
from pubsub import faults
from pubsub.concurrency import finish, uncancelled
from pubsub.delta.table import application_id
from pubsub.digest import source as digest_source
from pubsub.digest.forms import RowForm
from pubsub.digest.target import DeltaVersion
from pubsub.errors import NotInPrerequisiteState, PubsubError
from pubsub.node import pinned_snapshots, snapshot
from pubsub.node.verify.comparison import Comparer, Found, Pace, Progress
from pubsub.node.verify.repair import POINT_SECONDS, Ask, Broken, Repair
from pubsub.node.verify.report import Report, TableReport
from pubsub.node.verify.tables import chosen, obstacle
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import copy_out, snapshots
from pubsub.publisher.connection import Connection
from pubsub.publisher.publication import Operations
from pubsub.setting_tables import VerifySettings
from pubsub.sql.identifiers import quote_qualified
from tablesync.row_forms import CannotCompare, Published, published, row_form, source_table

PIN: Final = "pubsub_verify_"
"""The names of pins that verifications make begin so; one that was killed leaves its pin, which the next one drops."""

_ANSWER_SECONDS: Final = 10.0
_POLL: Final = 0.1
#: How often a verification begins anew because no version of a table shows its LSN: the worker had started again.
_ATTEMPTS: Final = 3
#: How often rows are copied anew before it is given up.
_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a verification is asked for.  `at`: the least LSN; `show`: how many rows of each table that differ are shown."""

    tables: tuple[str, ...] = ()
    at: Lsn | None = None
    sample: bool = False
    repair: bool = False
    show: int = 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """The settings of [verify]: sessions on the publisher, bytes of its tables read per second, how long a snapshot is held."""

    connections: int
    bytes_per_second: float
    timeout: float
    sample_rows: int

    @classmethod
    def of(cls, settings: VerifySettings) -> Bounds:
        return cls(settings.connections, settings.max_rate, settings.timeout, settings.sample_rows)


@dataclass(frozen=True, slots=True)
class Status:
    """How far a verification is: what it does, the table it is at, and of how many."""

    doing: str
    table: str | None = None
    number: int = 0
    tables: int = 0
    progress: Progress | None = None


class _NotShown(Exception):
    """No version of a table shows the LSN."""


class Verification:
    """Verifies one subscription.  `tell` is called with what it does, several times a second at most."""

    def __init__(
        self,
        catalog: Catalog,
        subscription: Subscription,
        bounds: Bounds,
        ask: Ask,
        carry: pinned_snapshots.Carry,
        tell: Callable[[Status], None],
    ) -> None:
        self._catalog = catalog
        self._subscription = subscription
        self._bounds = bounds
        self._ask = ask
        self._carry = carry
        self._tell = tell

    async def run(self, wanted: Wanted) -> Report:
        """Verify, repair if that is wanted, store the results, and return them.

        Raises UndefinedTable for a table that is not in the subscription; NotInPrerequisiteState if the subscription or its
        daemon does not run, or no table can be compared; ObjectInUse while another process verifies it; PubsubError.
        """
        async with self._catalog.verifying(self._subscription.oid, self._subscription.name):
            await self._drop_pins()
            began = time.monotonic()
            report, broken = await self._compare(wanted)
            rounds = 0
            while broken and rounds < _ROUNDS:
                rounds += 1
                report, broken = await self._repaired(report, broken, wanted)
            return replace(report, seconds=time.monotonic() - began)

    async def _repaired(
        self, report: Report, broken: Sequence[Broken], wanted: Wanted
    ) -> tuple[Report, Sequence[Broken]]:
        """Let the daemon copy the rows that differ anew, and compare their tables again; return the report, and what differs."""

        def tell(relation: str) -> None:
            self._tell(Status("copies rows anew of", relation))

        done = await Repair(self._subscription, self._ask, tell).run(broken)
        report = replace(report, tables=tuple(done.noted(table) for table in report.tables))
        again = tuple(one.name for one in broken if one.relation not in done.refused)
        if not again:
            return report, ()
        after, broken = await self._compare(replace(wanted, tables=again, at=None))
        compared = {table.relation: table for table in after.tables}
        tables = [
            replace(compared[one.relation], repaired=one.repaired) if one.relation in compared else one
            for one in report.tables
        ]
        await self._store_repaired({one.relation: one.repaired for one in tables if one.relation in compared})
        return replace(report, lsn=after.lsn, tables=tuple(tables)), broken

    async def _store_repaired(self, rows: Mapping[str, int]) -> None:
        """Store how many rows were copied anew of tables whose results are stored."""
        state, subid = await self._catalog.state(), self._subscription.oid
        names = {one.relid: one.qualified_name for one in state.relations if one.subid == subid}
        found = [
            replace(one, repaired=rows[names[one.relid]])
            for one in state.verifications
            if one.subid == subid and names.get(one.relid) in rows
        ]
        await self._catalog.put_statistics(verifications=found)

    async def _compare(self, wanted: Wanted) -> tuple[Report, Sequence[Broken]]:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._compare_once(wanted)
            except _NotShown as error:
                if attempt == _ATTEMPTS:
                    raise NotInPrerequisiteState(
                        str(error), hint="The apply worker starts again and again: pubsub status says why."
                    ) from error
        raise AssertionError

    async def _compare_once(self, wanted: Wanted) -> tuple[Report, Sequence[Broken]]:
        began, started = time.monotonic(), now()
        state = await self._catalog.state()
        relations = chosen(
            [one for one in state.relations if one.subid == self._subscription.oid],
            wanted.tables,
            self._subscription.name,
        )
        reports = {
            one.relid: TableReport(one.qualified_name, "not compared", reason=why.message, hint=why.hint)
            for one in relations
            if (why := obstacle(one)) is not None
        }
        # Longest not compared first: if the time does not suffice for all, others are left the next time.
        before = state.last_compared
        never = datetime.min.replace(tzinfo=UTC)
        going = sorted(
            (one for one in relations if one.relid not in reports),
            key=lambda one: before.get((one.subid, one.relid, one.copy_generation), never),
        )
        if not going:
            raise NotInPrerequisiteState(
                f'subscription "{self._subscription.name}" has no table that can be compared',
                detail="; ".join(f"{one.relation}: {one.reason}" for one in reports.values()) or "It has no tables.",
            )
        async with AsyncExitStack() as stack:
            point = await self._point(stack, wanted.at)
            stack.push_async_callback(point.close)
            at: SubscriptionRel | None = None
            try:
                async with asyncio.timeout(self._bounds.timeout or None):
                    versions = await self._versions(going, point.lsn)
                    # Also if the interrupt comes when all is done but this.
                    stack.push_async_callback(uncancelled(self._drop_pins))
                    await self._pin(point.lsn, going, versions)
                    tables = _Tables(self, point, wanted, state)
                    for number, at in enumerate(going, 1):
                        report = await tables.compare(at, versions[at.relid], number, len(going))
                        reports[at.relid] = report
                        await self._store(state, at, report, started)
            except TimeoutError:
                error = PubsubError(
                    f"the verification was not done within {self._bounds.timeout:g} seconds",
                    sqlstate="57014",
                    hint='Parameter "verify.timeout" bounds how long a snapshot is held on the publisher.',
                )
                if at is not None and at.relid not in reports:
                    # A table for which the time never suffices may not keep the others from their turn.
                    report = TableReport(at.qualified_name, "failed", point.lsn, reason=error.message, hint=error.hint)
                    await self._store(state, at, report, started)
                raise error from None
        for relation in relations:
            if relation not in going:
                await self._store(state, relation, reports[relation.relid], started)
        ordered = tuple(reports[one.relid] for one in relations)
        done = Report(self._subscription.name, wanted.at, point.lsn, time.monotonic() - began, ordered)
        return done, tables.broken

    async def _store(self, state: State, relation: SubscriptionRel, report: TableReport, started: Any) -> None:
        before = next(
            (one for one in state.verifications if (one.subid, one.relid) == (relation.subid, relation.relid)), None
        )
        await self._catalog.put_statistics(verifications=[report.record(relation, started, now(), before)])

    # The point

    async def _point(self, stack: AsyncExitStack, at: Lsn | None) -> _Point:
        """Let the daemon hold a point, and open sessions that see its snapshot; then the daemon can let go of it."""
        self._tell(Status("waits for a snapshot on the publisher"))
        payload = {} if at is None else {"at": str(at)}
        conninfo = self._subscription.conninfo
        try:
            found = await self._ask("hold point", self._subscription.oid, payload, timeout=POINT_SECONDS)
            if found is None:
                raise NotInPrerequisiteState("no daemon runs on the node", hint="Start one: pubsub daemon.")
            lsn, name = Lsn.parse(found["lsn"]), str(found["snapshot"])
            connection = await Connection.connect(conninfo, application_name="pubsub verify")
            stack.push_async_callback(connection.close)
            await snapshots.begin_under(connection, name)
            cut = copy_out.Cut()
            opening = (asyncio.to_thread(_session, conninfo, name, cut) for _ in range(self._bounds.connections))
            sessions = await finish(asyncio.gather(*opening), cancelled=cut)
        finally:
            with suppress(PubsubError):
                await uncancelled(self._ask)("free point", self._subscription.oid, timeout=_ANSWER_SECONDS)
        return _Point(lsn, connection, sessions, await published(connection, self._subscription.publications))

    async def _versions(self, relations: Sequence[SubscriptionRel], lsn: Lsn) -> dict[int, int]:
        """Wait until everything up to `lsn` is in Delta, and return the version of each table that shows it."""
        while True:
            origin = await self._catalog.origin(self._subscription.oid)
            if origin >= lsn:
                break
            self._tell(Status(f"waits until the subscription has reached {lsn}; it is at {origin}"))
            await self._require_running()
            await asyncio.sleep(_POLL)
        node = await self._catalog.node()
        found = {}
        for relation in relations:
            try:
                version = partial(snapshot.version_at, node.node_id, relation, origin, lsn)
                found[relation.relid] = await asyncio.to_thread(version)
            except NotInPrerequisiteState as error:
                raise _NotShown(error.message) from error
        return found

    async def _require_running(self) -> None:
        stored = await self._catalog.subscription(self._subscription.oid)
        if not stored.enabled:
            raise NotInPrerequisiteState(
                f'subscription "{stored.name}" is disabled', hint="Use ALTER SUBSCRIPTION ... ENABLE."
            )

    # Pins

    async def _pin(self, lsn: Lsn, relations: Sequence[SubscriptionRel], versions: Mapping[int, int]) -> None:
        self._tell(Status("pins the versions of the tables"))
        tables = {one.qualified_name: (versions[one.relid], one.path) for one in relations}
        name = f"{PIN}{self._subscription.oid}"
        await pinned_snapshots.pin(
            self._catalog, self._carry, snapshot.Snapshot(self._subscription.name, lsn, tables), name
        )

    async def _drop_pins(self) -> None:
        """Drop the pin of this verification, or that of one that was killed."""
        name = f"{PIN}{self._subscription.oid}"
        if any(one.name == name for one in (await self._catalog.state()).pinned_snapshots):
            await pinned_snapshots.drop(self._catalog, self._carry, name)


@dataclass(frozen=True, slots=True)
class _Point:
    """An LSN, sessions whose transactions have its snapshot, and what the publications publish there."""

    lsn: Lsn
    connection: Connection
    sessions: Sequence[psycopg.Connection]
    published: Published

    async def close(self) -> None:
        for session in self.sessions:
            await asyncio.to_thread(session.close)


class _Tables:
    """Compares tables at one point."""

    def __init__(self, verification: Verification, point: _Point, wanted: Wanted, state: State) -> None:
        self._verification = verification
        self._point = point
        self._wanted = wanted
        self._node_id = state.node.node_id
        self._rows = {one.relid: one.rows for one in state.rows if one.subid == verification._subscription.oid}
        self.broken: list[Broken] = []

    async def compare(self, relation: SubscriptionRel, version: int, number: int, tables: int) -> TableReport:
        """Compare a table; an error is part of the report."""
        name, lsn = relation.qualified_name, self._point.lsn
        await faults.reached(f"comparing {name}")
        try:
            found, form = await self._compare(relation, version, number, tables)
        except CannotCompare as error:
            outcome: Outcome = "different" if error.differs else "not compared"
            return TableReport(name, outcome, lsn, version, reason=error.message, hint=error.hint)
        except Exception as error:
            from launcher.failures import typed

            known = typed(error)
            return TableReport(name, "failed", lsn, version, reason=known.message, hint=known.hint)
        operations = self._point.published.operations.get(relation.oid)
        explained = _explained(relation, operations)
        report = _without_masked(_reported(name, lsn, version, found, explained), relation)
        if self._wanted.repair and report.outcome == "different":
            if explained is not None:
                reason = f"{report.reason}; it is not repaired, since rows that are meant to differ would be lost"
                return replace(report, reason=reason)
            name = quote_qualified(relation.schema, relation.name)
            self.broken.append(Broken(relation.relid, relation.qualified_name, name, form, found.keys))
        return report

    async def _compare(
        self, relation: SubscriptionRel, version: int, number: int, tables: int
    ) -> tuple[Found, RowForm]:
        point, bounds = self._point, self._verification._bounds
        pace = Pace(bounds.bytes_per_second)
        comparer = Comparer(point.sessions, pace, show=self._wanted.show, all_keys=self._wanted.repair)
        cut = copy_out.Cut()
        app_id = application_id(self._node_id, relation.subid, relation.relid, relation.copy_generation)

        def work() -> tuple[Found, RowForm]:
            for session in point.sessions:
                session.execute("SAVEPOINT before_table")
            try:
                target = DeltaVersion(relation.path, version, relation.qualified_name, relation.source)
                form = row_form(relation, point.published, target, app_id)
                source = source_table(point.sessions[0], relation, point.published, form, target, app_id)
                estimate = self._rows.get(relation.relid) or relation.estimated_rows or 0
                if self._wanted.sample:
                    return comparer.sample(source, target, estimate, bounds.sample_rows), form
                return comparer.compare(source, target, estimate), form
            finally:
                # Neither an error nor a lock of one table may outlast it: the transactions go on with the others.
                for session in point.sessions:
                    with suppress(psycopg.Error):
                        session.execute("ROLLBACK TO SAVEPOINT before_table")
                        session.execute("RELEASE SAVEPOINT before_table")

        def stop() -> None:
            pace.stopping.set()
            cut()

        async def show() -> None:
            while True:
                status = Status("compares", relation.qualified_name, number, tables, comparer.progress)
                self._verification._tell(status)
                await asyncio.sleep(_POLL)

        with cut.watching_all(point.sessions):
            showing = asyncio.create_task(show())
            try:
                return await finish(asyncio.create_task(asyncio.to_thread(work)), cancelled=stop)
            finally:
                showing.cancel()


@dataclass(frozen=True, slots=True)
class _Explained:
    """Why rows of a table may differ, and of which kinds of differences that may be the reason."""

    reason: str
    kinds: frozenset[str]


def _explained(relation: SubscriptionRel, operations: Operations | None) -> _Explained | None:
    left_out = operations.left_out if operations is not None else ()
    stay = relation.truncate == "ignore"
    if not left_out and not stay:
        return None
    reasons = [f"its publications do not publish {', '.join(left_out)}"] if left_out else []
    if stay:
        reasons.append("what was truncated stays in it")
    # Rows that were deleted stay here if that is not published; without updates any row may be an older one.
    only_extra = not {"insert", "update"} & set(left_out)
    return _Explained(", and ".join(reasons), frozenset(["extra"] if only_extra else ["missing", "extra", "different"]))


def _reported(name: str, lsn: Lsn, version: int, found: Found, explained: _Explained | None) -> TableReport:
    report = TableReport(
        name,
        "different" if found.differs else "equal",
        lsn,
        version,
        sampled=found.sampled,
        rows=found.rows,
        delta_rows=found.delta_rows,
        missing=found.missing,
        extra=found.extra,
        different=found.different,
        ranges_left=found.ranges_left,
        shown=tuple(found.shown),
    )
    if not found.differs or explained is None:
        return report
    counts = {kind: getattr(report, kind) for kind in ("missing", "extra", "different")}
    expected = sum(count for kind, count in counts.items() if kind in explained.kinds)
    reason = f"{explained.reason}: {expected} of the rows that differ may do so for that"
    if expected == sum(counts.values()) and not found.ranges_left:
        return replace(report, outcome="equal", expected=expected, reason=reason)
    return replace(report, expected=expected, reason=reason)


def _without_masked(report: TableReport, relation: SubscriptionRel) -> TableReport:
    """Say in the report which columns were not compared."""
    if not relation.masked:
        return report
    masked = f"columns that are masked are not compared: {', '.join(relation.masked)}"
    return replace(report, reason=masked if report.reason is None else f"{report.reason}; {masked}")


def _session(conninfo: str, snapshot: str, cut: copy_out.Cut) -> psycopg.Connection:
    """Open a session whose transaction has the snapshot; a `cut` ends the attempt.  Blocks."""
    connection = copy_out.session(conninfo, "pubsub verify", cut)
    try:
        connection.execute(digest_source.SESSION.encode())
        snapshots.begin_session_under(connection, snapshot)
        digest_source.require_same_hashes(connection)
    except BaseException:
        connection.close()
        raise
    return connection
