"""An S3 server of this machine: versitygw, whose objects are files of a directory.

Its project publishes no program for pip or Maven to fetch; Go builds it from its source, in some minutes:

    python -m pubsub.testing.s3_server build
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pubsub import jars
from pubsub.errors import PubsubError
from pubsub.testing.ports import Port

_MODULE: Final = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
_PATIENCE: Final = 30.0
_REGION: Final = "us-east-1"


def program() -> Path | None:
    """Return the server's program: $PUBSUB_S3_SERVER, one that `build` has made, or the first on the path."""
    override = os.environ.get("PUBSUB_S3_SERVER")
    built = _directory() / "versitygw"
    found = override or (str(built) if built.is_file() else shutil.which("versitygw"))
    return Path(found) if found else None


def can_build() -> bool:
    """Return whether there is a Go that can build the program."""
    return shutil.which("go") is not None


def build() -> Path:
    """Build the program, if there is none; return its path.  Raises PubsubError."""
    found = program()
    if found is not None:
        return found
    if not can_build():
        raise PubsubError(
            "could not find Go, which builds the S3 server of the tests",
            sqlstate="58P01",
            hint="Install Go, or set PUBSUB_S3_SERVER to versitygw.",
        )
    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GOBIN": str(directory)}
    ran = subprocess.run(["go", "install", _MODULE], env=environment, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise PubsubError("could not build the S3 server of the tests", sqlstate="58030", detail=ran.stderr[-2000:])
    return directory / "versitygw"


def _directory() -> Path:
    return jars.share_directory() / "bin"


class S3Server:
    """A server of the objects in `directory`, one directory for each bucket; use it in a `with` block."""

    access_key: Final = "tester"
    secret_key: Final = "only-for-tests"

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

    @property
    def pid(self) -> int:
        """The process's, of a server that runs."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, on the port that it had before."""
        path = build()
        (self.directory / "data").mkdir(parents=True, exist_ok=True)
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(path), "--port", f"127.0.0.1:{self.port}", "--quiet", "posix", str(self.directory / "data")],
                env={"ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key, **_plain()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _PATIENCE
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PubsubError("the S3 server did not start", detail=(self.directory / "server.log").read_text())
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server; its objects stay."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def bucket(self, name: str) -> Path:
        """Make a bucket; return the directory of its objects."""
        path = self.directory / "data" / name
        path.mkdir(exist_ok=True)
        return path

    def environment(self) -> dict[str, str]:
        """Return the variables by which Amazon's SDK, Arrow and deltalake in any process find the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": _REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def conf(self, endpoint: str | None = None, *, secret_key: str | None = None) -> dict[str, str]:
        """Return Spark's settings that reach the server, by another endpoint or with another key if these are given."""
        return {
            "spark.hadoop.fs.s3a.endpoint": endpoint or self.endpoint,
            "spark.hadoop.fs.s3a.endpoint.region": _REGION,
            "spark.hadoop.fs.s3a.access.key": self.access_key,
            "spark.hadoop.fs.s3a.secret.key": secret_key or self.secret_key,
        }


def _plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "VGW_", "ROOT_"))}


if __name__ == "__main__":
    if sys.argv[1:] != ["build"]:
        raise SystemExit("usage: python -m pubsub.testing.s3_server build")
    if program() is None and not can_build():
        print("There is no Go that could build an S3 server: the tests that need one will be skipped.")
    else:
        print(build())
