"""`pubsub daemon`: the node's workers in the foreground, under signals.

SIGTERM, SIGINT   drain: commit and report what was received, for drain_timeout at most; then end
a second SIGINT   end at once; the next daemon receives again what was not committed
SIGHUP            read and check pubsub.toml again; if it has changed, restart the workers with it
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import TYPE_CHECKING, Final

import structlog

from catalog.store import Catalog
from launcher.failures import traced, typed
from launcher.service import Service
from pubsub import logs
from pubsub.errors import PubsubError
from pubsub.node import make_home
from pubsub.settings import Settings

if TYPE_CHECKING:
    from pubsub.cli.common import Common

_AT_ONCE: Final = 130
_FAILED: Final = 1

log = structlog.get_logger()


async def serve(common: Common) -> int:
    """Run until asked to stop, and return the exit code.

    Raises PubsubError, for example if another daemon runs, the settings cannot be read or Java is missing.
    """
    logs.configure(logging.DEBUG if common.verbose else logging.INFO, verbose=common.verbose)
    try:
        return await _serve(common)
    except PubsubError:
        raise
    except Exception as error:
        known = typed(error)
        log.error(
            "daemon has failed", reason=known.message, detail=known.detail, hint=known.hint, exception=traced(error)
        )
        return _FAILED


async def _serve(common: Common) -> int:
    make_home(common.home)
    settings = Settings.load(common.home)
    wanted = _Signals()
    wanted.install()
    while True:
        async with await Catalog.open(settings.catalog_location, settings.catalog_timeout) as catalog:
            service = await Service.start(settings, catalog)
            log.info("daemon has started", home=str(common.home), pid=os.getpid())
            try:
                settings, again = await _until_signalled(service, wanted, settings)
            finally:
                await service.stop()
        if not again:
            log.info("daemon has ended")
            return 0


async def _until_signalled(service: Service, wanted: _Signals, settings: Settings) -> tuple[Settings, bool]:
    """Wait for a signal; return the settings, and True if the workers must restart with them, False if the daemon ends.

    Raises the error of a launcher that fails meanwhile.
    """
    failing = asyncio.create_task(service.failed())
    try:
        while True:
            signalled = asyncio.create_task(wanted.event.wait())
            done, _ = await asyncio.wait({failing, signalled}, return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
            if failing in done:
                failing.result()
            wanted.event.clear()
            if wanted.stop:
                log.info("daemon drains", deadline=settings.drain_timeout)
                return settings, False
            # postmaster.c: process_pm_reload_request, with its text.
            log.info("received SIGHUP, reloading configuration files")
            try:
                found = Settings.load(settings.home)
            except PubsubError as error:
                log.error(
                    "settings were not taken",
                    reason=error.message,
                    detail=error.detail,
                    hint=error.hint,
                    context=error.context,
                )
                continue
            if found == settings:
                log.info("settings are unchanged")
                continue
            for name, before, after in changed(settings, found):
                log.info("parameter was changed", parameter=name, before=before, after=after)
            log.info("settings have changed: the workers start again")
            return found, True
    finally:
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)


def changed(before: Settings, after: Settings) -> list[tuple[str, str | None, str | None]]:
    """Return the parameters that differ: name, and both values as SHOW prints them.

    For the tables catalog and spark both values are None, since they may be secrets.
    """
    found: list[tuple[str, str | None, str | None]] = [
        (name, was, now)
        for (name, was), (_, now) in zip(before.show_all(), after.show_all(), strict=True)
        if was != now
    ]
    if before.warehouse != after.warehouse:
        found.append(("warehouse", before.warehouse_uri, after.warehouse_uri))
    for table in ("catalog", "spark"):
        was, now = getattr(before, table), getattr(after, table)
        found += [
            (f"{table}.{name}", None, None)
            for name in type(was).model_fields
            if getattr(was, name) != getattr(now, name)
        ]
    return found


class _Signals:
    """The signals that the process has received: `event` is set by each, `stop` by SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.stop = False

    def install(self) -> None:
        """Replace Python's signal handlers."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGHUP, self.event.set)

    def _drain(self) -> None:
        self.stop = True
        self.event.set()

    def _interrupt(self) -> None:
        if self.stop:
            # The JVM ends by itself: its standard input is a pipe from this process.
            os._exit(_AT_ONCE)
        self._drain()
