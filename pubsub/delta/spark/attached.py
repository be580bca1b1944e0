"""Spark in the JVM of another process of this node, which has started it: the daemon's, for its worker processes.

py4j takes connections of several processes, each of which proves that it knows the gateway's secret.  The JVM ends with the
process that has started it, and is replaced there when it has died; here the new one is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JError

from pubsub.delta.spark.jvm_address import JvmAddress
from pubsub.delta.spark.spark_session import Spark, forget_gateway
from pubsub.memory import Heap

_PORT: Final = "PYSPARK_GATEWAY_PORT"
_SECRET: Final = "PYSPARK_GATEWAY_SECRET"


class _Process:
    """The JVM's process, as far as Spark asks for it; another one waits for its end."""

    stdin = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return -1
        return None

    def kill(self) -> None:
        """Leave it: it is the other process's, which kills it if it hangs."""

    def wait(self, _timeout: float | None = None) -> int:
        return 0


class AttachedSpark(Spark):
    """See Spark.  `ask` returns the address of the JVM that runs; it blocks, and raises as Spark.running does."""

    is_ours = False

    def __init__(self, home: Path, ask: Callable[[], JvmAddress], *, master: str, conf: Mapping[str, str]) -> None:
        super().__init__(home, master=master, conf=conf)
        self._ask = ask

    def fence(self, *, timeout: float = 60.0) -> None:
        """Do nothing: the process that has started the JVM has waited for the end of earlier ones."""

    def heap(self) -> Heap | None:
        """Return None: the process that has started the JVM tells of its heap."""
        return None

    @contextmanager
    def killed_if_hung(self, patience: float = 0.0) -> Iterator[None]:
        """Kill nothing: the process that has started it does that."""
        yield

    def kill_if_hung(self, patience: float = 0.0) -> None:
        """Kill nothing: the process that has started it does that."""

    def _end(self, timeout: float) -> None:
        """Leave the JVM, and its session, as they are."""
        with self._lock:
            session, self._session, self._process = self._session, None, None
            if session is None:
                return
            gateway: Any = session._sc._gateway
            with suppress(OSError, Py4JError):
                gateway.close()
            forget_gateway(gateway)

    def _start(self) -> None:
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import SparkSession

        with self._lock:
            address = self._ask()
            self._name_python()
            # Pyspark knows no other way to be told of a gateway that is there.
            os.environ |= {_PORT: str(address.port), _SECRET: address.secret}
            try:
                gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
            finally:
                del os.environ[_PORT], os.environ[_SECRET]
            jvm = gateway.jvm
            scala = jvm.org.apache.spark.SparkContext.getOrCreate()
            context = SparkContext(
                conf=SparkConf(_jvm=jvm, _jconf=scala.getConf()),
                gateway=gateway,
                jsc=jvm.org.apache.spark.api.java.JavaSparkContext(scala),
            )
            self._name_python_elsewhere(context)
            self._session = SparkSession(context)
            self._process = _Process(address.pid)  # type: ignore[assignment]
