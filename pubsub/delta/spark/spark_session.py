"""Start and stop Spark's JVM beside the daemon, fenced off from an earlier daemon's JVM.

A killed daemon's JVM may still finish a commit that it was given.  So the JVM holds a lock on the node's file
`jvm.lock`, which is opened and locked here; the JVM inherits the descriptor and releases the lock only by ending.
`running` waits for that lock before it starts the next JVM; callers call `fence` before they read table versions.

`running` and `stop` block for seconds: call them in a thread.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
from py4j.protocol import Py4JError

from pubsub import faults, jars, java_classes, object_stores
from pubsub.delta.spark import executor_packages
from pubsub.errors import ObjectInUse, PubsubError
from pubsub.forks import fence
from pubsub.memory import Heap
from pubsub.reorderbuffer import files
from pubsub.setting_tables import names_secret

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_DELTA: Final = "spark.databricks.delta."

logger = structlog.get_logger()

# Measured on two cores (see `make bench`); a user's [spark] conf overrides it.
BASE_CONF: Final[Mapping[str, str]] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000000",
    "spark.sql.caseSensitive": "false",
    "spark.scheduler.mode": "FAIR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.delta.logStore.file.impl": java_classes.CLASS,
    # With it Delta 4.4.0 reads wrong snapshots, whatever a core-site.xml says.
    "spark.hadoop.delta.enableFastS3AListFrom": "false",
    # Without the checksum file of each version a commit takes half the time, and a log half the files (but see
    # jvm_transactions.py: checkpoint).
    _DELTA + "writeChecksumFile.enabled": "false",
    # With it a commit lists the table's files by a Spark job each time that they have come down to 50 again, or a checkpoint
    # was written: seconds, on a busy machine.
    _DELTA + "allFilesInCrc.enabled": "false",
    _DELTA + "snapshotPartitions": "2",
    _DELTA + "properties.defaults.enableDeletionVectors": "true",
    _DELTA + "insertReplaceOnOrUsing.materializeSource": "none",
    _DELTA + "merge.materializeSource": "none",
    _DELTA + "optimizeWrite.enabled": "false",
    _DELTA + "autoCompact.enabled": "false",
    # OPTIMIZE leaves files alone that housekeeping takes for large.
    _DELTA + "optimize.minFileSize": str(64 << 20),
    _DELTA + "optimize.maxFileSize": str(256 << 20),
    # Dates and timestamps are read and written exactly as they are, without rebasing between calendars.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
}

# Nobody else connects to a Spark in this process; the executors of a cluster must.
_LOCAL: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.python.daemon.module": "pubsub.delta.spark.python_workers",
}

# What the JVM is started with.  All other settings are given to it afterwards: its arguments can be read by anybody on this machine.
_ARGUMENT: Final = re.compile(
    r"^spark\.(master$|app\.name$|driver\.|submit\.|jars|archives|files|repl\.|yarn\.|kubernetes\.)"
)
# Masters for which Spark makes the secret of spark.authenticate itself (SecurityManager.initializeAuth).
_ONE_PROCESS: Final = re.compile(r"local(\[.*\])?")
_STOP_SECONDS: Final = 20.0
_ASK_SECONDS: Final = 1.0
_DETAIL: Final = 2000  # characters of a JVM's stack trace

# The JVM's second compiler begins at ten times its usual thresholds.  Otherwise it takes half of the processor time of
# a daemon's first minutes, for methods that commits never call often enough; Spark's jobs are as fast as before.
_LATE_C2: Final = " ".join(
    f"-XX:Tier4{name}Threshold={10 * usual}"
    for name, usual in {"Invocation": 5000, "MinInvocation": 600, "Compile": 15000, "BackEdge": 40000}.items()
)
_JAVA_OPTIONS: Final = f"-Duser.timezone=UTC -XX:+UseParallelGC -Xshare:auto {_LATE_C2}"

_LOG4J: Final = """\
rootLogger.level = error
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c: %m%n%ex
"""


class Spark:
    """The one Spark session of a node, and the JVM it lives in.

    `home`: the node's directory, which holds the lock and Spark's own log.  `conf` overrides BASE_CONF.  `warehouse`: the
    root of the tables, whose store Spark must reach.
    """

    def __init__(
        self,
        home: Path,
        *,
        master: str = "local[*]",
        memory: str = "2g",
        conf: Mapping[str, str] | None = None,
        warehouse: str = "",
    ) -> None:
        self._home = home
        self._master = master
        self._memory = memory
        self._conf = dict(conf or {})
        self._warehouse = warehouse
        self._session: SparkSession | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # The process of a session that is being made.
        self._launching = False
        self._launched: subprocess.Popen[bytes] | None = None
        # The fence has its own lock, so that callers of `fence` do not wait while a JVM is starting.
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._stopped = False
        # From when on the JVM is asked again whether its Spark is running, in monotonic seconds.
        self._ask_at = 0.0
        self._fencing = threading.Lock()
        self._fence: int | None = None

    is_ours = True
    """Whether the JVM is started here; otherwise another process has (attached.py)."""

    @property
    def session(self) -> SparkSession:
        """The session.  Raises PubsubError (57P03) if Spark is not running."""
        if self._session is None:
            raise PubsubError("Spark is not running", sqlstate="57P03")
        return self._session

    @property
    def local(self) -> bool:
        """Whether jobs run in this machine's JVM, not on a cluster."""
        return self._master.startswith("local")

    @property
    def jvm_pid(self) -> int | None:
        """The JVM's process id, to measure its memory; None without a JVM."""
        return self._process.pid if self._process is not None else None

    def alive(self) -> bool:
        """Return whether the JVM is running."""
        return self._process is not None and self._process.poll() is None

    def heap(self) -> Heap | None:
        """Ask the JVM for its heap; None without one, or if it ends meanwhile.  Blocks while the JVM hangs."""
        session = self._session
        if session is None or not self.alive():
            return None
        jvm: Any = session._jvm
        try:
            runtime = jvm.java.lang.Runtime.getRuntime()
            committed, most = runtime.totalMemory(), runtime.maxMemory()
            return Heap(committed - runtime.freeMemory(), committed, most)
        except (OSError, Py4JError) as error:
            logger.debug("Spark could not be asked for its memory", reason=str(error))
            return None

    def usable(self) -> bool:
        """Return whether the JVM is running, and its Spark too: that stops for good when its master is gone, for example.

        The JVM is asked once a second at most, so a commit may yet find out by failing.  Blocks while the JVM hangs.
        """
        session = self._session
        if session is None or not self.alive() or session._sc._jsc is None:  # None: somebody here has stopped it
            return False
        now = time.monotonic()
        if now >= self._ask_at:
            try:
                if session._sc._jsc.sc().isStopped():
                    return False
            except (OSError, Py4JError) as error:
                if _refused(error):
                    return False
                logger.debug("Spark could not be asked whether it is running", reason=str(error))
            self._ask_at = now + _ASK_SECONDS
        return True

    def cancel(self, group: str) -> None:
        """Cancel the jobs of a job group, if Spark is running.  Blocks while the JVM hangs."""
        session = self._session
        if session is not None and self.alive():
            with suppress(OSError, Py4JError):  # without its JVM, or its context, the job has ended
                session.sparkContext.cancelJobGroup(group)

    @contextmanager
    def killed_if_hung(self, patience: float = _STOP_SECONDS) -> Iterator[None]:
        """As long as the body runs, kill a JVM that leaves a question unanswered, or its session unmade, for `patience` seconds.

        Whoever waits for that JVM then gets an error, instead of waiting for ever.
        """
        over = threading.Event()
        deadline = time.monotonic() + patience

        def watch() -> None:
            while not over.is_set():
                if time.monotonic() > deadline:
                    for pid in self._starting_processes():
                        logger.warning("Spark does not answer: its JVM is killed", pid=pid)
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                self.kill_if_hung(patience)
                over.wait(patience / 4)

        watching = threading.Thread(target=watch, name="watch Spark")
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()

    def _starting_processes(self) -> list[int]:
        """Return the processes of a JVM that has no session yet: Spark's scripts and Java, known by the fence that they hold.

        Pyspark tells of no process before its gateway is open.  Empty where there is no /proc, as long as that is so.
        """
        if (launched := self._launched) is not None:
            return [launched.pid]
        return _holders(self._home / "jvm.lock") if self._launching else []

    def kill_if_hung(self, patience: float = _STOP_SECONDS) -> None:
        """Kill the JVM if it leaves a question unanswered for `patience` seconds; return at once if it answers."""
        session, process = self._session, self._process
        if session is None or process is None or process.poll() is not None:
            return

        jvm: Any = session._jvm

        def ask() -> None:
            with suppress(Exception):  # an answer, too
                jvm.java.lang.System.nanoTime()

        if not _ends(ask, patience):
            logger.warning("Spark does not answer: its JVM is killed", pid=process.pid)
            process.kill()

    def fence(self, *, timeout: float = 60.0) -> None:
        """Wait until this node has no earlier JVM, at most `timeout` seconds; then table versions may be read.

        Raises ObjectInUse if an earlier JVM does not end.
        """
        with self._fencing:
            if self._fence is None and not self.alive():
                self._fence = _acquire_fence(self._home / "jvm.lock", timeout)

    def running(self) -> SparkSession:
        """Return the session of a running JVM: start it if it is not running, and replace one that died or stopped.

        Callers wait while another thread starts it.  Raises as `fence` does, and PubsubError if Java is missing, Spark
        does not start, or (57P03) it was stopped.
        """
        with self._starting:
            if self._stopped:
                raise PubsubError("Spark was stopped", sqlstate="57P03")
            if not self.usable():
                if self.alive():
                    logger.warning("Spark has stopped by itself: its JVM is replaced")
                jars.require_java()
                if self.is_ours:
                    logger.info("Spark is starting")
                began = time.monotonic()
                self._end(_STOP_SECONDS)
                self.fence()
                self._start()
                if self.is_ours:
                    logger.info("Spark has started", seconds=round(time.monotonic() - began, 1))
            return self.session

    def stop(self, *, timeout: float = _STOP_SECONDS) -> None:
        """End the session and the JVM for good; kill it if either takes longer than `timeout` seconds.

        A JVM that is just starting is waited for.  Otherwise it would outlive this call.
        """
        with self._starting:
            self._stopped = True
            self._end(timeout)

    def _start(self) -> None:
        with self._lock:
            # The JVM has its own copy of the descriptor; with ours closed, the lock lasts exactly as long as the JVM.
            descriptor = self._fence
            assert descriptor is not None
            try:
                self._launch(descriptor)
            finally:
                self._fence = None
                os.close(descriptor)

    def _end(self, timeout: float) -> None:
        with self._lock:
            session, process = self._session, self._process
            self._session = self._process = None
            if self._fence is not None:
                os.close(self._fence)
                self._fence = None
            if process is None:
                return
            gateway = None if session is None else session._sc._gateway
            if session is not None and process.poll() is None and not _ends(partial(_stop_session, session), timeout):
                process.kill()
            forget_gateway(gateway)
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _name_python(self) -> None:
        """Have this Python run the tasks of a local Spark."""
        if self.local:
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)

    def _name_python_elsewhere(self, context: SparkContext) -> None:
        """Have executors run a Python of this version, unless another is set."""
        if not self.local and "PYSPARK_PYTHON" not in os.environ:
            context.pythonExec = context.getConf().get("spark.pyspark.python", f"python{context.pythonVer}")

    def _launch(self, descriptor: int) -> None:
        from pyspark import SparkConf, SparkContext
        from pyspark.errors import PySparkRuntimeError
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import SparkSession

        self._name_python()
        log4j = self._home / "spark-log4j2.properties"
        with open(log4j, "w", opener=files.private) as file:
            file.write(_LOG4J)
        # Spark makes directories below it that anybody may enter, if the umask lets them.
        files.make_directory(self._home / "spill" / "spark")
        conf = SparkConf(loadDefaults=False)
        settings = self._settings(log4j)
        secrets = {name for name in settings if names_secret(name)}
        # Hadoop's configuration alone gets these: a context shows its settings to every client that asks.
        hadoop_secrets = {name: settings.pop(name) for name in secrets if name.startswith("spark.hadoop.")}
        later = {name: settings.pop(name) for name in list(settings) if name in secrets or not _ARGUMENT.search(name)}
        for name, value in settings.items():
            conf.set(name, value)
        self._launching = True
        try:
            with open(self._home / "spark.log", "ab", opener=files.private) as log:
                gateway = launch_gateway(conf, popen_kwargs={"pass_fds": (descriptor,), "stdout": log, "stderr": log})  # type: ignore[no-untyped-call]
            self._launched = gateway.proc
        except PySparkRuntimeError as error:  # it ended before its gateway was open
            raise self._not_started(str(error)) from None
        finally:
            self._launching = False
        try:
            faults.point("Spark launched")
            for name, value in later.items():
                conf.set(name, value)
            context = SparkContext(conf=conf, gateway=gateway)
            self._name_python_elsewhere(context)
            hadoop = context._jsc.hadoopConfiguration()
            for name, value in hadoop_secrets.items():
                hadoop.set(name.removeprefix("spark.hadoop."), value)
            context.setLogLevel("ERROR")
            self._session = SparkSession(context)
        except BaseException as error:
            # The text is the JVM's, so it must be asked for before that ends.
            text = str(error)
            # A JVM without a session would be taken for a running Spark forever.
            gateway.proc.kill()
            gateway.proc.wait()
            forget_gateway(gateway)
            if not isinstance(error, Py4JError):
                raise
            raise self._not_started(text) from None
        finally:
            self._launched = None
        self._process = gateway.proc

    def _not_started(self, text: str) -> PubsubError:
        return PubsubError(
            "Spark did not start",
            sqlstate="58000",
            detail=text[:_DETAIL],
            hint=f'See "{self._home / "spark.log"}".',
        )

    def _settings(self, log4j: Path) -> dict[str, str]:
        java = f"{_JAVA_OPTIONS} -Dlog4j2.configurationFile={log4j.as_uri()}"
        archive = jars.cds_archive()
        if archive is not None:
            java += f" -XX:SharedArchiveFile={archive}"
        if self._conf.get("spark.sql.catalogImplementation") == "hive":
            # A metastore of Derby's would write its log where the daemon was started.
            java += f' "-Dderby.stream.error.file={self._home / "derby.log"}"'
        paths = [str(path) for path in jars.class_path()]
        settings = {
            "spark.app.name": "pubsub",
            "spark.master": self._master,
            "spark.driver.memory": self._memory,
            "spark.driver.extraClassPath": os.pathsep.join(paths),
            "spark.driver.extraJavaOptions": java,
            "spark.local.dir": str(self._home / "spill" / "spark"),
            "spark.sql.warehouse.dir": (self._home / "warehouse").as_uri(),
            **BASE_CONF,
        }
        sent = [] if self.local else paths
        if object_stores.is_store(self._warehouse):
            settings |= object_stores.session_conf(self._warehouse, self._conf)
            if object_stores.is_s3(self._warehouse) and not any("hadoop-aws" in value for value in self._conf.values()):
                sent += map(str, jars.s3())
        if sent:
            settings["spark.jars"] = ",".join(sent)
        if _ONE_PROCESS.fullmatch(self._master):
            # Otherwise Spark's own ports take messages from every user of the machine, and hand out the tasks of copies.
            settings["spark.authenticate"] = "true"
        if self.local:
            settings |= _LOCAL
        else:
            if not {"spark.archives", "spark.executorEnv.PYTHONPATH"} & self._conf.keys():
                packages = executor_packages.archive(self._home)
                settings["spark.archives"] = f"{packages}#{executor_packages.UNPACKED}"
                settings["spark.executorEnv.PYTHONPATH"] = executor_packages.UNPACKED
        settings |= self._conf
        if "spark.driver.extraJavaOptions" in self._conf:
            settings["spark.driver.extraJavaOptions"] = f"{java} {self._conf['spark.driver.extraJavaOptions']}"
        return settings


def _stop_session(session: SparkSession) -> None:
    gateway = session._sc._gateway
    try:
        session.stop()
        assert gateway is not None
        gateway.shutdown()
    except Exception as error:
        # The JVM may disappear during this, or its context be stopped already, which is fine: it was to end.
        logger.debug("Spark was gone before it was stopped", reason=str(error))


def _ends(work: Callable[[], None], patience: float) -> bool:
    """Run `work` in a thread; return whether it has ended within `patience` seconds."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(patience)
    return not thread.is_alive()


def _refused(error: BaseException | None) -> bool:
    """Return whether nobody listens in the JVM any more."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _acquire_fence(path: Path, timeout: float) -> int:
    """Lock the node's JVM fence, waiting at most `timeout` seconds for an earlier JVM to end; return the descriptor."""
    try:
        return fence.acquire(path, timeout, lambda: logger.info("waiting for an earlier daemon's JVM to end"))
    except TimeoutError as error:
        raise ObjectInUse(
            "another Spark of this node is still running",
            detail=f'It has held "{path}" for more than {timeout:.0f} s.',
            hint="Wait for it, or end the java process that a daemon killed earlier left behind.",
        ) from error


def _holders(path: Path) -> list[int]:
    """Return the processes that this one has started, or those have, and that have a file open; none where there is no /proc."""
    place = path.stat()
    parents: dict[int, int] = {}
    holding = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if any(os.path.samestat(place, one.stat()) for one in (process / "fd").iterdir() if one.exists()):
                holding.append(int(process.name))

    def is_ours(pid: int) -> bool:
        parent = parents.get(pid, 0)
        return parent == os.getpid() or (parent != 0 and is_ours(parent))

    return [pid for pid in holding if is_ours(pid)]


def forget_gateway(gateway: object) -> None:
    """Let pyspark start a new JVM in this process: it keeps the first JVM's gateway in class attributes.

    Those of another JVM, which goes on, stay as they are.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._gateway is not gateway:
        return
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
