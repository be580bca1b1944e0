"""The demo's node: its directory, its daemon and the command line, used as a user would use them.

The daemon is a Watched program, so it ends when this process ends, in whatever way.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from catalog.home_lock import running_daemon
from catalog.store import Catalog
from pubsub.demo.interruption import Interrupted, Interruption
from pubsub.demo.watched import Watched
from pubsub.errors import ObjectInUse, PubsubError
from pubsub.settings import Settings

MARKER: Final = ".pubsub-demo"
"""The file that marks a directory as made by a demo, which the next demo may remove."""

_CLI: Final = (sys.executable, "-m", "pubsub.cli")
_STATEMENT_SECONDS: Final = 120.0
_DRAIN_SECONDS: Final = 60.0
_LOG_LINES: Final = 15

Status = dict[str, Any]


class DemoFailed(PubsubError):
    """The demo cannot continue."""

    default_sqlstate = "58000"


class DemoNode:
    """A fresh node in `home`.  `show` is called with each statement and its output."""

    def __init__(self, home: Path, interruption: Interruption, show: Callable[[str], None]) -> None:
        self.home = home
        self._interruption = interruption
        self._show = show
        self._watched: Watched | None = None
        self._watching: subprocess.Popen[str] | None = None
        self._status: Status | None = None

    @property
    def log(self) -> Path:
        """The daemon's standard error: JSON lines."""
        return self.home / "daemon.log"

    @property
    def shown_home(self) -> str:
        """The node's directory as a user would type it here."""
        return _short(self.home)

    @property
    def daemon_pid(self) -> int | None:
        """The daemon's process id; None before it is started and after it is stopped."""
        return None if self._watched is None else self._watched.pid

    def make_fresh(self) -> None:
        """Remove an earlier demo's directory and make a new one.

        Raises DemoFailed if the directory was not made by a demo, ObjectInUse if a daemon uses it.
        """
        if self.home.exists() and any(self.home.iterdir()):
            if not (self.home / MARKER).is_file():
                raise DemoFailed(
                    f'directory "{self.home}" exists and was not made by a demo',
                    hint="Give another one with --home.",
                )
            if (pid := running_daemon(self.home)) is not None:
                raise ObjectInUse(
                    f'a daemon runs on node "{self.home}"',
                    detail=f"Its process id is {pid}." if pid else None,
                    hint="Another demo may be running: wait for it, or give this one another --home.",
                )
            shutil.rmtree(self.home.resolve())
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.home / MARKER).write_text("Made by make demo, which removes this directory when it runs again.\n")

    # the command line

    def command(self, *arguments: str) -> str:
        """Return a command on this node as a user would type it in the current directory."""
        program = Path(sys.executable).with_name("pubsub")
        typed = [_short(program)] if program.is_file() else [_short(Path(sys.executable)), "-m", "pubsub.cli"]
        return " ".join([shlex.join([*typed, "--home", _short(self.home)]), *map(_quoted, arguments)])

    def sql(self, statement: str, *, shown: str | None = None, quietly: bool = False) -> str:
        """Run a statement with `pubsub sql`; return its output.  `shown` is displayed instead of one with a password.

        Raises DemoFailed with its standard error.  Raises Interrupted after interrupting the command and waiting for
        it.
        """
        if not quietly:
            self._show(f"$ pubsub sql {_quoted(shown or statement)}")
        # On standard input, because every user can read a command's arguments.
        out, err, code = self._run(["sql", "--file", "-"], statement)
        if code:
            raise DemoFailed(f"the statement failed:\n{err.strip()}", detail=self.log_tail() or None)
        if not quietly:
            self._show((err + out).strip())
        return out

    def snapshot(self, subscription: str) -> dict[str, Any]:
        """Run `pubsub snapshot --json`; return the LSN that all tables show, and each one's version and path."""
        out, err, code = self._run(["snapshot", subscription, "--json"])
        if code:
            raise DemoFailed(f"pubsub snapshot failed:\n{err.strip()}")
        found: dict[str, Any] = json.loads(out)
        return found

    def drop_subscription(self, name: str) -> str | None:
        """Run DROP SUBSCRIPTION IF EXISTS at the end of a demo, uninterruptibly; return the error's text, if any."""
        if not self.home.exists():
            return None
        try:
            ran = subprocess.run(
                [*_CLI, "--home", str(self.home), "sql", f"DROP SUBSCRIPTION IF EXISTS {name}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_STATEMENT_SECONDS,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return f"DROP SUBSCRIPTION did not end within {_STATEMENT_SECONDS:g} seconds"
        return ran.stderr.strip() or "no reason given" if ran.returncode else None

    def _run(self, arguments: Sequence[str], given: str = "") -> tuple[str, str, int]:
        process = subprocess.Popen(
            [*_CLI, "--home", str(self.home), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # In its own session, so that Ctrl-C reaches only this process, which passes it on.
            start_new_session=True,
        )
        reading = self._interruption.start(lambda: process.communicate(given))
        try:
            code = self._interruption.wait(process, _STATEMENT_SECONDS)
            out, err = reading.result()
        except (Interrupted, TimeoutError) as error:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_DRAIN_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if isinstance(error, TimeoutError):
                raise DemoFailed(f"pubsub {arguments[0]} did not end within {_STATEMENT_SECONDS:g} seconds") from None
            raise
        return out, err, code

    # the daemon

    def start_daemon(self) -> None:
        """Make the node, start `pubsub daemon`, and `pubsub status --watch --json` to watch it.

        The node comes first because `pubsub status` neither makes one nor waits for one.
        """
        asyncio.run(self._make_node())
        self._watched = Watched([*_CLI, "--home", str(self.home), "daemon"], self.log)
        self._watching = subprocess.Popen(
            [*_CLI, "--home", str(self.home), "status", "--watch", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._follow, args=(self._watching,), daemon=True).start()

    async def _make_node(self) -> None:
        settings = Settings.load(self.home)
        async with await Catalog.open(settings.catalog_location, settings.catalog_timeout):
            return

    def _follow(self, watching: subprocess.Popen[str]) -> None:
        assert watching.stdout is not None
        for line in watching.stdout:
            self._status = json.loads(line)

    def check(self) -> None:
        """Raise DemoFailed with the end of the log if the daemon has ended."""
        if self._watched is not None and (code := self._watched.ended()) is not None:
            raise DemoFailed(f"the daemon has ended with exit code {code}", detail=self.log_tail() or None)

    @property
    def status(self) -> Status:
        """The latest document of `pubsub status --json`; one without subscriptions before the first."""
        return self._status or {"subscriptions": []}

    def subscription(self, name: str) -> Status | None:
        """Return one subscription's part of the latest status, if it has one."""
        for found in self.status["subscriptions"]:
            if found["name"] == name:
                return dict(found)
        return None

    def stop(self, *, drain: bool) -> None:
        """Stop the daemon and Spark, after a drain or at once; not interruptible, but bounded in time."""
        if self._watching is not None:
            self._watching.kill()
            self._watching.wait()
            self._watching = None
        watched, self._watched = self._watched, None
        if watched is not None:
            # At once ends its JVM, too: it would end by itself, but not if it is just starting.
            watched.end(_DRAIN_SECONDS if drain else 0)

    def log_tail(self, count: int = _LOG_LINES) -> str:
        """Return the last lines of the daemon's log in readable form."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-count:]
        except OSError:
            return ""
        return (
            f"The last lines of {_short(self.log)}:\n" + "\n".join(_readable(line) for line in lines) if lines else ""
        )

    def events(self) -> list[dict[str, Any]]:
        """Return the daemon's log as documents, without lines that are not JSON objects."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines() if self.log.exists() else ():
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if isinstance(document, dict):
                found.append(document)
        return found


def _quoted(text: str) -> str:
    """Quote a word for a shell, in double quotes if that is easier to read."""
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)


def _readable(line: str) -> str:
    """Format one line of the log for reading."""
    try:
        document = json.loads(line)
    except ValueError:
        return "  " + line
    if not isinstance(document, dict):
        return "  " + line
    head = f"{document.pop('timestamp', '')[11:19]} {document.pop('level', ''):7} {document.pop('event', '')}"
    rest = "  ".join(f"{name}={value}" for name, value in document.items() if value is not None)
    return f"  {head}  {rest}".rstrip()


def _short(path: Path) -> str:
    """Return a path relative to the current directory if it is inside it."""
    # Not resolved, because a virtual environment's python is a link.
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
