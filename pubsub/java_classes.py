"""Build the jar with the classes that this node adds to Delta (java/pubsub/*.java say what each is for).

LinkLogStore is Delta's LogStore for local directories: a LogStore is where Delta asks for a store's guarantees, and its
documented extension.  ConditionalLogStore is the one for S3.  VersionCheck observes the transactions of Spark's
statements.  Calls makes several calls of Delta's classes in one.  Janino, which pyspark includes, compiles the sources,
so a Java without a compiler suffices.
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pubsub.errors import PubsubError

CLASS: Final = "pubsub.LinkLogStore"

# The compiler, and what the source uses.
_NEEDED: Final = (
    "janino",
    "commons-compiler",
    "slf4j-api",
    "hadoop-client-api",
    "jackson-core",
    "jackson-databind",
    "jackson-annotations",
    "scala-library",
    "spark-sql-api_2.13",
)

_SOURCES: Final = tuple(sorted((Path(__file__).parent / "java" / "pubsub").glob("*.java")))


def jar_name() -> str:
    """Return the jar's file name, which changes with the sources."""
    text = b"".join(path.read_bytes() for path in _SOURCES)
    return f"pubsub-log-store-{hashlib.sha256(text).hexdigest()[:16]}.jar"


def build(directory: Path, delta: Sequence[Path]) -> Path:
    """Compile the sources against Delta's jars, and return the jar's path in `directory`.

    Raises PubsubError if Janino refuses it or pyspark lacks a jar.
    """
    path = directory / jar_name()
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(prefix=".build-", dir=directory) as scratch:
        classes = Path(scratch)
        with _interrupt_afterwards():
            _compile(classes, [*_spark_jars(*_NEEDED), *delta])
        aside = classes / path.name
        with zipfile.ZipFile(aside, "w") as jar:
            for found in sorted(classes.glob("**/*.class")):
                jar.write(found, found.relative_to(classes).as_posix())
        for old in directory.glob("pubsub-log-store-*.jar"):
            old.unlink()
        aside.replace(path)
    return path


@contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    """Let SIGINT wait for the end of the body, some seconds: py4j makes another error of KeyboardInterrupt."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _compile(into: Path, jars: list[Path]) -> None:
    from py4j.java_gateway import JavaGateway
    from py4j.protocol import Py4JJavaError

    gateway = JavaGateway.launch_gateway(
        jarpath=str(_spark_jars("py4j")[0]),
        classpath=os.pathsep.join(map(str, jars)),
        die_on_exit=True,
        enable_auth=True,  # otherwise any user of the machine could run code in it
        create_new_process_group=True,  # a terminal sends SIGINT to all of its group
    )
    try:
        java: Any = gateway.jvm
        files = java.java.io.File
        compiler = java.org.codehaus.janino.Compiler()
        class_path = gateway.new_array(files, len(jars))
        for place, path in enumerate(jars):
            class_path[place] = files(str(path))
        compiler.setClassPath(class_path)
        compiler.setDestinationDirectory(files(str(into)), False)
        sources = gateway.new_array(files, len(_SOURCES))
        for place, path in enumerate(_SOURCES):
            sources[place] = files(str(path))
        compiler.compile(sources)
    except Py4JJavaError as error:
        raise PubsubError(f'could not compile the sources in "{_SOURCES[0].parent}": {error.java_exception}') from error
    finally:
        gateway.shutdown()


def _spark_jars(*names: str) -> list[Path]:
    """Return pyspark's jars of these names, of whatever version."""
    import pyspark

    directory = Path(pyspark.__file__).parent / "jars"
    found = []
    for name in names:
        (path, *_) = [*sorted(directory.glob(f"{name}-[0-9]*.jar")), None]
        if path is None:
            raise PubsubError(f'could not find the jar "{name}" in pyspark', sqlstate="58P01", hint="Install pyspark.")
        found.append(path)
    return found
