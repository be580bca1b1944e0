"""A worker process of the daemon: `python -m launcher.worker_process SOCKET LIFELINE` runs a share of the subscriptions.

It is a launcher like the daemon's own, with a catalog, threads and table logs of its own, in the daemon's JVM.  It ends when
the daemon does: at once if that was killed, since another daemon may begin.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import MutableMapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

from catalog.store import Catalog
from launcher import process_messages as p
from launcher.failures import typed
from launcher.launcher import Launcher
from launcher.stage_directory import stage_directory
from pubsub import allocators, object_stores, tracing
from pubsub.delta.key_index.node_index import KeyIndex
from pubsub.delta.log.transactions import DELETING
from pubsub.delta.spark.attached import AttachedSpark
from pubsub.delta.spark.engine import Engine
from pubsub.delta.spark.jvm_address import JvmAddress
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import PubsubError
from pubsub.forks.channel import Channel
from pubsub.logs import hear_libraries
from pubsub.processor_time import spent
from pubsub.settings import Settings
from pubsub.stacks import tell_when_asked

NAME: Final = "pubsub-worker"
_FIGURES: Final = 1.0
"""Seconds between two reports of the figures."""


class WorkerProcess:
    """The process.  `run` lasts until it has drained, or fails."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = Channel(sock, self._message, _end_at_once)
        self._task: asyncio.Future[p.Task] = self._loop.create_future()
        self._settings: Settings | None = None
        self._launcher: Launcher | None = None
        self._asked: list[Future[JvmAddress]] = []

    async def run(self) -> int:
        """Run the task; return the exit code."""
        task = await self._task
        _tell_events(self._loop, self._channel, task.level)
        try:
            await self._run(task)
        except Exception as error:
            self._channel.send(p.FAILURE, p.packed(typed(error).fields()))
            return 1
        finally:
            # What events are still on their way to it.
            await asyncio.sleep(0)
            self._channel.flush()
        return 0

    async def _run(self, task: p.Task) -> None:
        settings = task.settings
        conf = settings.spark.session_conf()
        object_stores.configure(conf)
        allocators.limit_arenas()
        DELETING.between_processes(settings.home / p.DELETING_LOCK)
        async with await Catalog.open(settings.catalog_location, settings.catalog_timeout) as catalog:
            catalog.belong_to(task.epoch, sharing=task.share.leased is not None)
            node = await catalog.node()
            await asyncio.to_thread(tracing.configure, settings.tracing.endpoint, node.node_id)
            spark = AttachedSpark(settings.home, self._jvm, master=settings.spark.master, conf=conf)
            engine = Engine(spark)
            writers = TableWriters(
                stage_directory(settings, node.node_id, task.share.number, sharing=catalog.is_sharing),
                engine.transactions,
                statement_rows=settings.spark.least_statement_rows,
                index=KeyIndex(settings.home / "key_index"),
            )
            self._launcher = launcher = Launcher(settings, catalog, engine, writers, node.node_id, share=task.share)
            telling = asyncio.create_task(self._tell_figures(launcher))
            try:
                await launcher.run()
            finally:
                telling.cancel()
                try:
                    await engine.stop()
                finally:
                    await asyncio.to_thread(writers.stop)
                    await asyncio.to_thread(tracing.close)

    def _jvm(self) -> JvmAddress:
        """Ask where the JVM is.  Blocks."""
        asked: Future[JvmAddress] = Future()
        self._asked.append(asked)
        self._loop.call_soon_threadsafe(self._channel.send, p.JVM)
        return asked.result()

    async def _tell_figures(self, launcher: Launcher) -> None:
        while True:
            await asyncio.sleep(_FIGURES)
            if self._channel.is_clear:
                self._channel.send(p.FIGURES, p.packed(p.Told(launcher.figures(), spent())))

    def _message(self, kind: bytes, contents: bytes, _files: list[int]) -> None:
        if kind == p.TASK:
            task: p.Task = p.unpacked(contents)
            # At once: a message that follows may change them.
            self._settings = task.settings
            self._task.set_result(task)
        elif kind == p.JVM:
            answer: p.Answer = p.unpacked(contents)
            asked = self._asked.pop(0)
            if answer.address is not None:
                asked.set_result(answer.address)
            else:
                assert answer.error is not None
                asked.set_exception(PubsubError(**answer.error))
        elif kind == p.RELOAD and self._settings is not None:
            self._settings.take_over(p.unpacked(contents))
        if self._launcher is not None:
            if kind == p.STOP:
                self._launcher.stop()
            else:
                self._launcher.wake()
        elif kind == p.STOP:
            _end_at_once()


def _tell_events(loop: asyncio.AbstractEventLoop, channel: Channel, level: int) -> None:
    """Have the daemon log this process's events: it writes the log, and keeps the last ones."""

    def tell(_logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        fields = {name: value if isinstance(value, int | float | None) else str(value) for name, value in event.items()}
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(channel.send, p.EVENT, p.packed((method, fields)))
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.format_exc_info, tell],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    hear_libraries()


def _end_at_once() -> None:
    os._exit(1)


def _end_with(lifeline: int) -> None:
    """End this process when the other end of a pipe is gone, whatever else it does."""
    os.read(lifeline, 1)
    _end_at_once()


def main(descriptor: int, lifeline: int) -> int:
    """Run the process at one end of a socket; return the exit code."""
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()
    with suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)

    async def run() -> int:
        tell_when_asked(asyncio.get_running_loop())
        return await WorkerProcess(socket.socket(fileno=descriptor)).run()

    return asyncio.run(run())


if __name__ == "__main__":
    # Those of a terminal, or of a service manager, are for the daemon, which has this one drain.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
