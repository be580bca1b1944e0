"""The JVM that lives but serves nobody: its Spark has stopped, or it hangs."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pyspark import SparkContext

from pubsub.delta.spark import spark_session
from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import PubsubError


class Jvm:
    """A process in place of a JVM, and the session that pyspark would have in it.

    With `hung` its calls are answered when the process has ended, by an error.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE)
        self.hung = self.stopped = False
        context = SimpleNamespace(isStopped=self._is_stopped)
        gateway = SimpleNamespace(shutdown=self._shut_down)
        self._sc = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: context), _gateway=gateway)
        self._jvm = SimpleNamespace(java=SimpleNamespace(lang=SimpleNamespace(System=self)))
        self.sparkContext = SimpleNamespace(cancelJobGroup=self._answered)

    def nanoTime(self) -> int:
        self._answered()
        return 0

    def stop(self) -> None:
        self._answered()
        self._sc._jsc = None
        self.stopped = True

    def _is_stopped(self) -> bool:
        self._answered()
        return self.stopped

    def _shut_down(self) -> None:
        self._answered()
        self.process.kill()

    def _answered(self, *_: object) -> None:
        if self.hung:
            self.process.wait()
        if self.process.poll() is not None:
            raise ConnectionResetError


class Node(Spark):
    """A node's Spark whose JVMs are those above; each is told apart."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.jvms: list[Jvm] = []

    def _launch(self, descriptor: int) -> None:
        self.jvms.append(Jvm())
        session: Any = self.jvms[-1]
        self._session, self._process = session, session.process


@pytest.fixture
def spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(spark_session.jars, "require_java", lambda: None)
    monkeypatch.setattr(spark_session, "_ASK_SECONDS", 0.0)
    node = Node(tmp_path)
    yield node
    for jvm in node.jvms:
        jvm.process.kill()
        jvm.process.wait()


def test_a_spark_that_has_stopped_by_itself_is_replaced(spark: Node) -> None:
    """Its master was gone, or it had no memory left.  Its JVM lived on, and every copy failed for ever."""
    first: Any = spark.running()
    assert spark.running() is first
    first.stopped = True
    assert spark.alive()
    second: Any = spark.running()
    assert second is not first
    assert first.process.poll() is not None, "its lock is free"
    assert spark.running() is second


def test_a_spark_that_a_program_has_stopped_is_replaced(spark: Node) -> None:
    """`df.sparkSession.stop()`, in a program that runs the node."""
    first: Any = spark.running()
    first.stop()
    assert spark.running() is not first


def test_a_jvm_that_hangs_does_not_keep_a_daemon_from_ending(spark: Node) -> None:
    jvm: Any = spark.running()
    jvm.hung = True
    spark.stop(timeout=0.1)
    assert jvm.process.poll() is not None


def test_work_that_waits_for_a_jvm_that_hangs_ends_with_the_daemon(spark: Node) -> None:
    jvm: Any = spark.running()
    failed = threading.Event()

    def commit() -> None:
        try:
            jvm._answered()
        except ConnectionError:
            failed.set()

    jvm.hung = True
    working = threading.Thread(target=commit)
    working.start()
    with spark.killed_if_hung(0.1):
        working.join(60)
    assert failed.is_set()


def test_a_jvm_that_hangs_before_its_gateway_is_open_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pyspark waits for the gateway without end, and tells of no process meanwhile."""
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f"""#!/bin/sh
        case "$*" in *-version*) echo 'openjdk version "17.0.1"' >&2;; *) echo $$ > {tmp_path}/pid; exec sleep 1000;; esac
        """
    )
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    failed: list[str] = []

    def start() -> None:
        try:
            spark.running()
        except PubsubError as error:
            failed.append(error.message)

    spark = Spark(tmp_path)
    starting = threading.Thread(target=start)
    starting.start()
    deadline = time.monotonic() + 300
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline, "Java was not started"
        time.sleep(0.01)
    with spark.killed_if_hung(0.1):
        starting.join(300)
    assert failed == ["Spark did not start"]
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(300)


def test_a_jvm_that_answers_is_left(spark: Node) -> None:
    jvm: Any = spark.running()
    asked = threading.Event()
    jvm.nanoTime = asked.set
    with spark.killed_if_hung(60):
        assert asked.wait(60)
    assert jvm.process.poll() is None
    assert spark.running() is jvm


def test_the_gateway_of_another_jvm_of_the_process_is_left(spark: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nothing goes through that JVM any more: pyspark has one for the process, and keeps it in a class."""
    others: Any = object()
    monkeypatch.setattr(SparkContext, "_gateway", others)
    monkeypatch.setattr(SparkContext, "_jvm", others)
    spark.running()
    spark.stop()
    assert (SparkContext._gateway, SparkContext._jvm) == (others, others)
