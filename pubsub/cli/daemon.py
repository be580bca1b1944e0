"""`pubsub daemon`: the node's workers in the foreground, under signals.

SIGTERM, SIGINT   drain: commit and report what was received, for drain_timeout at most; then end
a second SIGINT   end at once; the next daemon receives again what was not committed
SIGHUP            read and check pubsub.toml again; if it has changed, go on with it, or restart the workers with it if they
                  must (Settings.take_over), or with what they had if it cannot be served
SIGUSR1           tell where everything stands (pubsub.stacks)

With --standby it waits as long as another daemon has the catalog, under the same signals.  With --shared it is one of several
that divide the catalog's subscriptions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from catalog.home_lock import DaemonLock
from catalog.store import Catalog
from launcher.failures import traced, typed
from launcher.service import Service, require_shared
from pubsub import logs
from pubsub.cli.privacy import harden, warn_of_open_cluster, warn_of_readers
from pubsub.errors import ObjectInUse, PubsubError
from pubsub.monitoring.document import Observed
from pubsub.monitoring.picture import Pictures
from pubsub.node.node import Node, make_home
from pubsub.node.verify import process
from pubsub.server.backend import NodeBackend
from pubsub.server.doors import Doors
from pubsub.service_manager import ServiceManager
from pubsub.settings import Settings
from pubsub.stacks import tell_when_asked

if TYPE_CHECKING:
    from pubsub.cli.common import Common

_AT_ONCE: Final = 130
_FAILED: Final = 1

logger = structlog.get_logger()


class Beside(Enum):
    """What a daemon does beside others of its catalog; the values are the command's options."""

    NONE = ""
    """It is refused."""
    STANDBY = "--standby"
    """While another has the catalog it waits for its end, and then takes its place."""
    SHARED = "--shared"
    """It has a part of the subscriptions, as they have."""


async def serve(common: Common, *, beside: Beside = Beside.NONE) -> int:
    """Run until asked to stop, and return the exit code.

    Raises PubsubError, for example if another daemon runs, the settings cannot be read or Java is missing.
    """
    recent = logs.RecentEvents()
    logs.configure(logging.DEBUG if common.verbose else logging.INFO, verbose=common.verbose, recent=recent)
    logs.hear_libraries()
    try:
        return await _serve(common, recent, beside)
    except PubsubError:
        raise
    except Exception as error:
        known = typed(error)
        logger.error(
            "daemon has failed", reason=known.message, detail=known.detail, hint=known.hint, exception=traced(error)
        )
        return _FAILED


async def _serve(common: Common, recent: logs.RecentEvents, beside: Beside) -> int:
    harden()
    make_home(common.home)
    settings = Settings.load(common.home)
    warn_of_readers(settings)
    warn_of_open_cluster(settings)
    observed = Observed(recent)
    wanted = _Signals()
    wanted.install()
    manager = ServiceManager.from_environment()
    # The lock is held while the workers start again with other settings, too: nobody may take the node meanwhile, or
    # believe that nobody has it.  Nor may one that stands by take its catalog.
    async with manager.watched():
        with DaemonLock.acquire(settings.home) as lock:
            async with _Reservation() as reservation:
                again, before = True, None
                while again:
                    serving = asyncio.Event()
                    try:
                        found, again = await _serve_with(
                            settings, common, wanted, manager, observed, lock, serving, beside, reservation
                        )
                    except Exception as error:
                        # What a settings file says can be right, and yet not be served: a port may be taken, a host or
                        # the catalog may not be found.
                        if serving.is_set() or before is None:
                            raise
                        _not_taken(typed(error))
                        settings, before = before, None
                    else:
                        settings, before = found, settings
    logger.info("daemon has ended")
    return 0


async def _serve_with(
    settings: Settings,
    common: Common,
    wanted: _Signals,
    manager: ServiceManager,
    observed: Observed,
    lock: DaemonLock,
    serving: asyncio.Event,
    beside: Beside,
    reservation: _Reservation,
) -> tuple[Settings, bool]:
    """Serve until a signal ends it; return the settings, and whether to serve again, with these.

    `serving` is set when all of the settings are served, or would be if this daemon did not stand by.
    """
    async with await Catalog.open(settings.catalog_location, settings.catalog_timeout) as catalog:
        if beside is Beside.STANDBY:
            require_shared(settings, catalog, "that stands by")
        service: Service | None = None
        while service is None:
            if beside is Beside.STANDBY and not reservation.is_held:
                signalled = await _stand_by(settings, catalog, wanted, manager, serving)
                if signalled is not None:
                    return signalled
            try:
                verify = partial(process.run, common.home)
                service = await Service.start(settings, catalog, verify, lock, sharing=beside is Beside.SHARED)
            except ObjectInUse:
                # Another one was quicker; if none has the catalog, something else of this machine is in use.
                if beside is not Beside.STANDBY or not await catalog.has_daemon():
                    raise
                await reservation.end()
        try:
            async with Node(settings.home, settings=settings, service=service) as node:
                backend = NodeBackend(settings, node)
                doors = await Doors.open(settings, backend)
                try:
                    async with _monitored(settings, Pictures(node, doors, backend), observed) as http:
                        logger.info(
                            "daemon has started",
                            home=str(common.home),
                            listen=doors.place,
                            http=http,
                            pid=os.getpid(),
                        )
                        serving.set()
                        await reservation.end()
                        manager.tell("READY=1")
                        failing = asyncio.create_task(_failed(service, doors))
                        signalled = await _until_signalled(failing, wanted, settings, service.reloaded)
                        assert signalled is not None, "workers end by an error alone"
                        settings, again = signalled
                        if again and beside is not Beside.SHARED:
                            await reservation.begin(catalog)
                        elif not again:
                            manager.tell("STOPPING=1")
                finally:
                    await doors.close()
        finally:
            await service.stop()
    return settings, again


@asynccontextmanager
async def _monitored(settings: Settings, pictures: Pictures, observed: Observed) -> AsyncIterator[str | None]:
    """Serve what monitors ask for, as long as the body runs; yield the place.  Raises PubsubError.

    What was `observed` outlasts a reload of the settings.
    """
    place = settings.http.place()
    if place is None:
        yield None
        return
    from pubsub.monitoring.endpoint import Endpoint
    from pubsub.monitoring.node import NodeSource
    from pubsub.monitoring.page import Page

    page = Page(pictures.take, observed, settings.http.ready_lag)
    paths = page.paths() if settings.http.page else {}
    source = NodeSource(pictures.take, settings.http.ready_lag)
    endpoint = await Endpoint.open(place, source, paths, hosts=settings.http.names)
    watching = asyncio.create_task(page.watch()) if settings.http.page else None
    try:
        yield endpoint.place
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await endpoint.close()


class _Reservation:
    """Of the catalog, from a daemon's end until it has begun again with other settings."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self.is_held = False

    async def __aenter__(self) -> _Reservation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.end()

    async def begin(self, catalog: Catalog) -> None:
        """Reserve the catalog; if its server does not answer, the first daemon to ask has it."""
        try:
            await self._stack.enter_async_context(catalog.reserved())
        except PubsubError as error:
            logger.warning("catalog could not be read", reason=error.message, hint=error.hint)
        else:
            self.is_held = True

    async def end(self) -> None:
        self.is_held = False
        await self._stack.aclose()


async def _stand_by(
    settings: Settings, catalog: Catalog, wanted: _Signals, manager: ServiceManager, serving: asyncio.Event
) -> tuple[Settings, bool] | None:
    """Wait until the catalog has no daemon, and return None; or return what a signal asks for, as _until_signalled does."""
    if not await catalog.has_daemon():
        return None
    async with _monitored_standing_by(settings) as http:
        logger.info("daemon stands by", catalog=catalog.url, http=http, pid=os.getpid())
        serving.set()
        manager.tell("READY=1\nSTATUS=standing by")
        signalled = await _until_signalled(asyncio.create_task(_is_free(settings, catalog)), wanted, settings)
        if signalled is None:
            logger.info("daemon takes over", catalog=catalog.url)
            manager.tell("STATUS=")
        return signalled


async def _is_free(settings: Settings, catalog: Catalog) -> None:
    """Return when the catalog has no daemon.  While its server does not answer it has whatever daemon it had."""
    told = None
    while True:
        try:
            if not await catalog.has_daemon():
                return
            told = None
        except PubsubError as error:
            if error.message != told:
                logger.warning("catalog could not be read", reason=error.message, hint=error.hint)
            told = error.message
        await asyncio.sleep(settings.catalog_poll_interval)


@asynccontextmanager
async def _monitored_standing_by(settings: Settings) -> AsyncIterator[str | None]:
    """Tell monitors that this daemon lives, and is not ready, as long as the body runs; yield the place."""
    place = settings.http.place()
    if place is None:
        yield None
        return
    from pubsub.monitoring.endpoint import Endpoint
    from pubsub.monitoring.standby import StandbySource

    endpoint = await Endpoint.open(place, StandbySource())
    try:
        yield endpoint.place
    finally:
        await endpoint.close()


async def _until_signalled(
    working: asyncio.Task[None], wanted: _Signals, settings: Settings, reloaded: Callable[[], None] = lambda: None
) -> tuple[Settings, bool] | None:
    """Wait for a signal; return the settings, and True if the workers must restart with them, False if the daemon ends.

    Returns None if `working` ends before, and raises its error.  `reloaded` is called when settings were changed in place.
    """
    try:
        while True:
            signalled = asyncio.create_task(wanted.event.wait())
            done, _ = await asyncio.wait({working, signalled}, return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
            if working in done:
                return working.result()
            wanted.event.clear()
            if wanted.stop:
                logger.info("daemon drains", deadline=settings.drain_timeout)
                return settings, False
            # postmaster.c: process_pm_reload_request, with its text.
            logger.info("received SIGHUP, reloading configuration files")
            try:
                found = Settings.load(settings.home)
            except PubsubError as error:
                _not_taken(error)
                continue
            if found == settings:
                logger.info("settings are unchanged")
                continue
            for name, before, after in changed(settings, found):
                logger.info("parameter was changed", parameter=name, before=before, after=after)
            if settings.take_over(found):
                logger.info("settings have changed: the workers go on with them")
                reloaded()
                continue
            logger.info("settings have changed: the workers start again")
            return found, True
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _not_taken(error: PubsubError) -> None:
    logger.error(
        "settings were not taken",
        reason=error.message,
        detail=error.detail,
        hint=error.hint,
        context=error.context,
    )


async def _failed(service: Service, doors: Doors) -> None:
    """Wait until the workers or the publisher's server fail, and raise the error."""
    work = [asyncio.ensure_future(one) for one in (service.failed(), doors.failed())]
    try:
        done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    for one in done:
        one.result()


def changed(before: Settings, after: Settings) -> list[tuple[str, str | None, str | None]]:
    """Return the parameters that differ: name, and both values as SHOW prints them.

    For the tables catalog and spark both values are None, since they may be secrets.
    """
    untold = ("catalog", "spark")
    found: list[tuple[str, str | None, str | None]] = [
        (name, was, now)
        for (name, was), (_, now) in zip(before.show_all(), after.show_all(), strict=True)
        if was != now and name.partition(".")[0] not in untold
    ]
    if before.walsender.upstream != after.walsender.upstream:
        found.append(("walsender.upstream", None, None))
    for table in untold:
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
        tell_when_asked(loop)

    def _drain(self) -> None:
        self.stop = True
        self.event.set()

    def _interrupt(self) -> None:
        if self.stop:
            # The JVM ends by itself: its standard input is a pipe from this process.
            os._exit(_AT_ONCE)
        self._drain()
