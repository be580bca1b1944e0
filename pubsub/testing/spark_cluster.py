"""A Spark cluster of this machine's processes: a standalone master and its workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
import pyspark

from pubsub import jars
from pubsub.errors import PubsubError

_PATIENCE: Final = 180.0
_MASTER: Final = "org.apache.spark.deploy.master.Master"
_WORKER: Final = "org.apache.spark.deploy.worker.Worker"


class SparkCluster:
    """A master and `workers` workers of one core each, with their files in `directory`; use it in a `with` block.

    Their environment has no Python packages, as on a machine where only Spark is installed.  `secret`: that of
    spark.authenticate, with which they encrypt what they say; without one they do neither.  Raises PubsubError if a process
    does not start.
    """

    def __init__(self, directory: Path, *, workers: int = 2, memory: str = "1g", secret: str | None = None) -> None:
        self.directory = directory
        self._count = workers
        self._memory = memory
        self._secret = secret
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def __enter__(self) -> Self:
        try:
            master = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
            self.url = self._start("master", _MASTER, master, r"Starting Spark master at (spark://\S+)")
            for number in range(self._count):
                name = f"worker{number}"
                arguments = ["--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", self._memory]
                arguments += ["--work-dir", str(self.directory / name), self.url]
                self._start(name, _WORKER, arguments, "(Successfully registered with master)")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def conf(self) -> dict[str, str]:
        """Return what [spark.conf] needs besides the master."""
        if self._secret is None:
            return {}
        return {
            "spark.authenticate": "true",
            "spark.authenticate.secret": self._secret,
            "spark.network.crypto.enabled": "true",
        }

    def executors(self) -> list[psutil.Process]:
        """Return the processes of executors that are running."""
        found = (child for process in self._processes for child in psutil.Process(process.pid).children())
        return [one for one in found if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline())]

    def stop(self) -> None:
        """End all processes."""
        for process in reversed(self._processes):
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.send_signal(signal.SIGKILL)
            process.wait()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self._processes.clear()

    def _start(self, name: str, main: str, arguments: list[str], ready: str) -> str:
        java = jars.find_java()
        if java is None:
            raise PubsubError("could not find Java, which Spark needs", sqlstate="58P01")
        home = Path(pyspark.__file__).parent
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / f"{name}.log"
        properties = self.directory / "spark.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in self.conf().items()))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK", "SPARK"))}
        # As Spark's own start scripts set them.
        environment = {**kept, "SPARK_HOME": str(home), "SPARK_SCALA_VERSION": "2.13", "SPARK_LOCAL_IP": "127.0.0.1"}
        command = [str(java), "-Xmx256m", "-cp", f"{home / 'jars'}/*", main]
        command += ["--properties-file", str(properties), *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=self.directory, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._processes.append(process)
        deadline = time.monotonic() + _PATIENCE
        while (found := re.search(ready, log.read_text(errors="replace"))) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise PubsubError(f"{main} did not start", detail=log.read_text(errors="replace")[-2000:])
            time.sleep(0.05)
        return found[1]
