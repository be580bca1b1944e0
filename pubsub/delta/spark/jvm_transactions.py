"""Commit by Delta's own transaction, in Spark's JVM, without a Spark job.

Of a table of several sources the partition of one is read instead (`trackReadPredicates`), so that Delta lets a commit come after
others that have changed other partitions.

Every call of Delta's internal classes stands in this file, and in java/pubsub/Calls.java for those of every commit,
because they may change with any release; the jar is pinned, and tests/scenarios/test_022_delta_transactions.py has a test
for each call.  Conflicts are Delta's to find: with `readWholeTable` and the application's entry in `readTxn` Delta refuses
our commit if another changed the table, or our application's version, after we read it.

    DeltaLog.forTable ─► startTransaction ─► at the version read here? ─► commit(actions, operation)

Traps, measured: as `ManualUpdate` a commit takes five times as long, because its checksum is computed anew;
`txnVersion(app)` reconstructs the table's state with a Spark job; a `remove` without size, stats and
extendedFileMetadata spoils the checksum's incremental computation.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

# pyspark turns exceptions of the JVM that it knows into its own.  With this import it knows Delta's conflicts, too.
import delta.exceptions
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from pubsub.delta.log.demands import managed_by_catalog
from pubsub.delta.log.transactions import (
    CommitFailed,
    Conflict,
    Listed,
    Operation,
    Request,
    Retention,
    UnknownOutcome,
)
from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import UndefinedTable
from pubsub.sql.identifiers import quote_for_spark as quote
from pubsub.texts import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pubsub.delta.pins import Change

P = ParamSpec("P")
T = TypeVar("T")

# They have no class in common but PySparkException.
CONFLICTS: Final = tuple(getattr(delta.exceptions, name) for name in delta.exceptions.__all__)
_USER_METADATA: Final = "spark.databricks.delta.commitInfo.userMetadata"
# Of VACUUM: its jobs have a few hundred rows each, which take less time than code for them takes to be compiled.
_SMALL_JOBS: Final = {
    # With it VACUUM makes two commits of its own, each of which makes a batch that is being committed start anew.
    "spark.databricks.delta.vacuum.logging.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
}
_WRITE_CHECKSUM: Final = "spark.databricks.delta.writeChecksumFile.enabled"
# Delta's name for the refusal of LITE since the log lacks commits.
_LITE_REFUSED: Final = "DELTA_CANNOT_VACUUM_LITE"
# Delta does not let its tables' files be read as other files.
_FORMAT_CHECK: Final = "spark.databricks.delta.formatCheck.enabled"
# Delta keeps one DeltaLog of a table for each set of file system options; with these it keeps another than the commits'.
_APART: Final = {"fs.pubsub.apart": "true"}
_INVENTORY: Final = "path string, length bigint, isDir boolean, modificationTime bigint"
# How VersionCheck.java begins its exception's message.
_REFUSED: Final = "pubsub.VersionCheck: "


class DeltaTransactions:
    """Implements transactions.Transactions in the JVM of `session`, for any thread."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session
        jvm: Any = session._jvm
        self._jvm = jvm
        self._delta = jvm.org.apache.spark.sql.delta
        self._java = _Classes(jvm)

    def commit(self, request: Request) -> str:
        """See transactions.Transactions."""
        try:
            return self._commit_once(request)
        except (Conflict, CommitFailed):
            raise
        except Exception as error:
            # Whatever failed, and be it the question what the JVM's exception says: the JVM may have committed.
            raise UnknownOutcome.of_commit(request.path, error) from error

    def _commit_once(self, request: Request) -> str:
        name = ""
        try:
            transaction = self._java.calls.begin(
                self.session._jsparkSession,
                request.path,
                request.read_version,
                request.table_id,
                "\n".join(request.applications),
                None if request.part is None else _of_partition(*request.part),
            )
            if transaction is None:
                # Either another writer has just committed, or what Delta keeps is of a table that was replaced.
                self.forget(request.path)
                raise Conflict(f"the table is not at version {request.read_version}")
            name = str(transaction.txnId())
            self._commit(transaction, request)
        except (Py4JJavaError, PySparkException) as error:
            if isinstance(error, CONFLICTS):
                raise Conflict(_said(error)) from error
            failure = CommitFailed(f'could not commit to the Delta table "{request.path}": {_said(error)}')
            failure.txn_id = name
            raise failure from error
        return name

    def forget(self, path: str) -> None:
        """See transactions.Transactions."""
        self._java.invalidate(self.session._jsparkSession, self._java.path(path))

    def change_properties(self, path: str, change: Change) -> None:
        """See pins.Properties.  Delta finds no conflict in commits that leave the metadata alone, such as ours."""
        try:
            transaction = self._log(path).startTransaction()
            if transaction.readVersion() < 0:
                raise UndefinedTable(f'Delta table "{path}" does not exist')
            action = json.loads(transaction.metadata().json())
            before = action["metaData"]["configuration"]
            after = dict(change(before))
            if after == before:
                return
            action["metaData"]["configuration"] = after
            transaction.updateMetadata(self._action(action), False)
            changed = {name: value for name, value in after.items() if before.get(name) != value}
            operation = getattr(self._delta, "DeltaOperations$SetTableProperties")(self._map(changed))
            transaction.commit(self._java.nil, operation)
        except (Py4JJavaError, PySparkException) as error:
            if isinstance(error, CONFLICTS):
                raise Conflict(_said(error)) from error
            raise CommitFailed(
                f'could not change the properties of the Delta table "{path}": {_said(error)}'
            ) from error
        except (Py4JError, OSError) as error:
            raise UnknownOutcome(
                f'could not find out whether the properties of the Delta table "{path}" were changed: {error}'
            ) from error

    def checkpoint(self, path: str) -> None:
        """Write a checkpoint of the table's newest version, and remove the log's expired files.

        It works on a DeltaLog apart, since Delta finds out a snapshot's state under a lock that commits on it need, too.
        The transaction after it reads the log anew, and would find out the state by Spark jobs.  Therefore commits made
        meanwhile leave their checksum files, which say it.  For a table that rests the jobs are done here.
        """
        apart = self._log(path, _APART)
        usual = self.session.sparkContext.getConf().get(_WRITE_CHECKSUM, "true")
        self.session.conf.set(_WRITE_CHECKSUM, "true")
        try:
            snapshot = self._snapshot(apart)
            try:
                apart.checkpoint(snapshot, self._java.none)
            finally:
                snapshot.uncache()
            after = self._snapshot(self._log(path))
        finally:
            self.session.conf.set(_WRITE_CHECKSUM, usual)
        if after.checksumOpt().isEmpty():
            after.numOfFiles()

    def retention(self, path: str) -> Retention:
        """See transactions.Cleaning."""
        log = self._log(path)
        snapshot = self._snapshot(log)
        metadata = snapshot.metadata()
        return Retention(
            files=self._delta.DeltaLog.tombstoneRetentionMillis(metadata) / 1000,
            log=log.deltaRetentionMillis(metadata) / 1000,
            cleans_log=bool(log.enableExpiredLogCleanup(metadata)),
            managed=managed_by_catalog(json.loads(snapshot.protocol().json())["protocol"]),
        )

    def vacuum(self, path: str, listed: Sequence[Listed] | None) -> None:
        """See transactions.Cleaning."""
        own = self._quiet_session()
        if listed is None:
            own.sql(f"VACUUM delta.{quote(path)} LITE").collect()
            return
        place = self._java.path(path)
        base = place.getFileSystem(self.session._jsc.hadoopConfiguration()).makeQualified(place).toString()
        rows = [(f"{base}/{one.path}", one.size, False, one.modification_time) for one in listed]
        self._vacuum_of(own, path, own.createDataFrame(rows, _INVENTORY))

    def vacuum_elsewhere(self, path: str, older_than: int) -> None:
        """See transactions.Cleaning.

        Delta refuses LITE once its own clean-up of the log, after a checkpoint, has removed commits that no VACUUM has
        read, and would do so ever after.
        """
        try:
            self.vacuum(path, None)
            return
        except (Py4JJavaError, PySparkException) as error:
            if _LITE_REFUSED not in str(error):
                raise
        own = self._quiet_session()
        own.conf.set(_FORMAT_CHECK, "false")
        # Spark lists the files without reading them, as long as nobody asks for their content.
        files = own.read.format("binaryFile").option("recursiveFileLookup", "true").load(path)
        listed = files.selectExpr(
            "path", "length", "false AS isDir", "unix_millis(modificationTime) AS modificationTime"
        )
        # Of an inventory Delta wants columns that may be null.
        nothing: Any = own.createDataFrame([], _INVENTORY)
        self._vacuum_of(own, path, nothing.union(listed.where(f"modificationTime < {older_than}")))

    def _quiet_session(self) -> SparkSession:
        own = self.session.newSession()
        for name, value in _SMALL_JOBS.items():
            own.conf.set(name, value)
        return own

    def _vacuum_of(self, own: SparkSession, path: str, inventory: Any) -> None:
        """Run VACUUM for the files of an inventory."""
        empty = _module(self._jvm.scala.collection.immutable, "Map").empty()
        table = self._delta.catalog.DeltaTableV2.apply(
            own._jsparkSession, self._java.path(path), self._java.none, self._java.none, empty, self._java.none
        )
        # As LITE it records up to which version all removed files are gone; SQL refuses an inventory with LITE.
        self._delta.commands.VacuumCommand.gc(
            own._jsparkSession,
            table,
            False,
            self._java.none,
            self._java.some(inventory._jdf),
            self._java.some("LITE"),
            empty,
            self._jvm.org.apache.spark.util.SystemClock(),
        )

    def clean_log(self, path: str, until: int) -> None:
        """See transactions.Cleaning."""
        log = self._log(path)
        age = max(0, int(time.time() * 1000) - until)
        # Through OptionalLong, because py4j makes an Integer of a small number.
        options = self._jvm.scala.jdk.javaapi.OptionConverters
        kept = options.toScala(self._jvm.java.util.OptionalLong.of(age))
        # Delta's own clean-up, after a checkpoint, cuts off at the last midnight before the retention.
        minute = _module(self._delta, "TruncationGranularity").MINUTE()
        log.cleanUpExpiredLogs(self._snapshot(log), self._java.none, kept, minute)

    def _snapshot(self, log: Any) -> Any:
        """Return the table's newest snapshot."""
        return log.update(False, self._java.none, self._java.none)

    def _commit(self, transaction: Any, request: Request) -> None:
        metadata = next((self._action(action) for action in request.actions if "metaData" in action), None)
        if metadata is not None:
            # Delta checks the change, and derives the protocol.
            transaction.updateMetadata(metadata, False)
        lines = "\n".join(_line(action) for action in request.actions if "metaData" not in action)
        if request.operation is Operation.WRITE:
            rewrites = any("remove" in action for action in request.actions)
            self._java.calls.write(transaction, lines, rewrites, request.user_metadata)
            return
        actions = self._java.calls.actions(lines)
        operation = self._operation(transaction, request)
        if request.user_metadata is None:
            transaction.commit(actions, operation)
            return
        # Only DeltaOperations.Write carries userMetadata; for others Delta reads the active session's setting.
        sessions = self._java.sessions
        own = self.session._jsparkSession.newSession()
        own.conf().set(_USER_METADATA, request.user_metadata)
        sessions.setActiveSession(own)
        try:
            transaction.commit(actions, operation)
        finally:
            sessions.setActiveSession(self.session._jsparkSession)

    def _operation(self, transaction: Any, request: Request) -> Any:
        """Return the DeltaOperations.Operation of other commits than writes: Delta records it, and asks what it may do."""
        java = self._java
        none, nil = java.none, java.nil
        match request.operation:
            case Operation.MERGE_FILES:
                return java.optimize(nil, nil, False, none, False)
            case Operation.CREATE:
                return java.create_table(transaction.metadata(), False, False, none)
            case Operation.ALTER:
                return java.update_schema(transaction.snapshot().schema(), transaction.metadata().schema())
            case Operation.WRITE:
                raise ValueError("Calls.java makes this one")

    def _map(self, values: Mapping[str, str]) -> Any:
        found = self._jvm.java.util.HashMap()
        for name, value in values.items():
            found.put(name, value)
        converted = self._java.as_scala(found)
        return getattr(_module(self._jvm.scala.collection.immutable, "Map"), "from")(converted)

    def _action(self, action: Mapping[str, Any]) -> Any:
        return self._java.from_json(_line(action))

    def _log(self, path: str, options: Mapping[str, str] = MappingProxyType({})) -> Any:
        # Delta's own threads, and what it does after a commit, ask for the session that is active in the caller's
        # thread; without one a checkpoint cannot be read (DeltaThreadPool.scala: NonFateSharingFuture).
        self._java.sessions.setActiveSession(self.session._jsparkSession)
        return self._java.for_table(self.session._jsparkSession, self._java.path(path), self._map(options))


def _in_running_jvm(
    method: Callable[Concatenate[DeltaTransactions, P], T],
) -> Callable[Concatenate[SparkTransactions, P], T]:
    """Return the method of SparkTransactions that calls `method` in the JVM that runs."""

    def call(self: SparkTransactions, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.running(), *args, **kwargs)

    functools.update_wrapper(call, method)
    return call


class SparkTransactions:
    """Implements transactions.Transactions for a node: in its Spark's JVM, which the first call starts.

    Any thread may call it; the calls wait while the JVM starts.  They also raise what Spark.running raises.
    `called`: whether there was a call, even if it still waits.
    """

    def __init__(self, spark: Spark) -> None:
        self._spark = spark
        self._made: DeltaTransactions | None = None
        self.called = False

    def running(self) -> DeltaTransactions:
        """Return the transactions of the JVM that runs; start one if need be."""
        self.called = True
        session, made = self._spark.running(), self._made
        if made is None or made.session is not session:
            made = self._made = DeltaTransactions(session)
        return made

    commit = _in_running_jvm(DeltaTransactions.commit)
    forget = _in_running_jvm(DeltaTransactions.forget)
    change_properties = _in_running_jvm(DeltaTransactions.change_properties)
    checkpoint = _in_running_jvm(DeltaTransactions.checkpoint)
    retention = _in_running_jvm(DeltaTransactions.retention)
    vacuum = _in_running_jvm(DeltaTransactions.vacuum)
    vacuum_elsewhere = _in_running_jvm(DeltaTransactions.vacuum_elsewhere)
    clean_log = _in_running_jvm(DeltaTransactions.clean_log)


class _Classes:
    """The classes, static methods and objects of the JVM that commits need.

    They are looked up once: py4j asks the JVM for every part of a dotted name, which took most of a commit's time.
    """

    def __init__(self, jvm: Any) -> None:
        scala, spark = jvm.scala, jvm.org.apache.spark.sql
        delta = spark.delta
        self.calls = jvm.pubsub.Calls
        self.for_table = delta.DeltaLog.forTable
        self.invalidate = delta.DeltaLog.invalidateCache
        self.from_json = delta.actions.Action.fromJson
        self.optimize = getattr(delta, "DeltaOperations$Optimize")
        self.create_table = getattr(delta, "DeltaOperations$CreateTable")
        self.update_schema = getattr(delta, "DeltaOperations$UpdateSchema")
        self.sessions = spark.classic.SparkSession
        self.path = jvm.org.apache.hadoop.fs.Path
        self.as_scala = scala.jdk.javaapi.CollectionConverters.asScala
        self.some = scala.Some
        self.none = _module(scala, "None")
        self.nil = _module(scala.collection.immutable, "Nil")


@contextmanager
def at_version(spark: SparkSession, app_id: str, version: int) -> Iterator[None]:
    """While it lasts, have this thread's statements refused by a table that holds another version of `app_id` (0: none).

    The statement's own transaction is asked, so nothing can come between the answer and its commit; a table whose later
    copy has begun refuses, too.  `is_refusal` knows the error.
    """
    jvm: Any = spark._jvm
    observers = _module(jvm.org.apache.spark.sql.delta, "TransactionExecutionObserver")
    before = observers.getObserver()
    observers.setObserver(jvm.pubsub.VersionCheck.observer(app_id, version))
    try:
        yield
    finally:
        with suppress(Py4JError, OSError):  # a JVM that is gone has no observer
            observers.setObserver(before)


def is_refusal(error: BaseException) -> bool:
    """Return whether a statement failed since the table is not `at_version`; it has committed nothing."""
    return _REFUSED in str(error)


def _module(package: Any, name: str) -> Any:
    """Return a Scala object, such as None, which Java sees as the static MODULE$ of a class name$."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def _of_partition(name: str, value: str) -> str:
    """Return the condition, on the `add` actions of the log, that a data file is in a partition."""
    of_name, of_value = ("'" + one.replace("\\", "\\\\").replace("'", "\\'") + "'" for one in (name, value))
    return f"partitionValues[{of_name}] = {of_value}"


def _line(action: Mapping[str, Any]) -> str:
    """Return an action as it is a line of Delta's log."""
    return json.dumps(action, ensure_ascii=False, separators=(",", ":"))


def _said(error: Py4JJavaError | PySparkException) -> str:
    """Return the first line of what the JVM's exception says."""
    if isinstance(error, Py4JJavaError):
        java = error.java_exception
        return first_line(Exception(str(java.getMessage() or java.getClass().getName())))
    return first_line(error)
