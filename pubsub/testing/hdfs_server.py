"""An HDFS of this machine: a name node and a data node of Hadoop's mini cluster, in one JVM.

Maven has the cluster as one jar of 56 MB, which needs what pyspark includes; the tests' set-up fetches it:

    python -m pubsub.testing.hdfs_server fetch
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pubsub import jars
from pubsub.errors import PubsubError
from pubsub.testing.ports import Port

CLUSTER: Final = jars.Artifact(
    "org.apache.hadoop",
    "hadoop-client-minicluster",
    "3.5.0",
    "06772d24529e59939915979b3edba204d367750ef7dc5120411f35221dd4818c",
)
# Of pyspark's jars.
_NEEDED: Final = (
    "hadoop-client-api",
    "hadoop-client-runtime",
    "jcl-over-slf4j",
    "log4j-1.2-api",
    "log4j-api",
    "slf4j-api",
)
_PATIENCE: Final = 60.0


def jar() -> Path:
    """Return where `fetch` puts the cluster's jar."""
    return jars.share_directory() / "test-jars" / CLUSTER.filename


def fetch() -> Path:
    """Fetch the cluster's jar if it is missing; return its path.  Raises PubsubError."""
    (path,) = jars.fetch([CLUSTER], jar().parent)
    return path


class HdfsServer:
    """An HDFS whose files lie in `directory`; use it in a `with` block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._port = Port.reserve()
        self.port = self._port.number

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def start(self) -> None:
        """Start the servers, the name node on the port that it had before; return once they take files."""
        details = self.directory / "details.json"
        details.unlink(missing_ok=True)
        data = self.directory / "data"
        command = [
            *(str(jars.find_java()), "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            *("-cp", _class_path(), "org.apache.hadoop.test.MiniDFSClusterManager"),
            *("-datanodes", "1", "-nnport", str(self.port), "-writeDetails", str(details)),
            f"-Dhdfs.minidfs.basedir={data}",
        ]
        if not data.exists():
            command.append("-format")
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _PATIENCE
        # The details are written once the data node has reported its blocks.
        while not details.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PubsubError("HDFS did not start", detail=(self.directory / "server.log").read_text()[-2000:])
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the servers; their files stay."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let the servers answer nothing, while their connections stay."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the servers go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def _class_path() -> str:
    import pyspark

    directory = Path(pyspark.__file__).parent / "jars"
    found = [fetch()]
    for name in _NEEDED:
        found += sorted(directory.glob(f"{name}-[0-9]*.jar"))
    return os.pathsep.join(map(str, found))


if __name__ == "__main__":
    if sys.argv[1:] != ["fetch"]:
        raise SystemExit("usage: python -m pubsub.testing.hdfs_server fetch")
    print(fetch())
