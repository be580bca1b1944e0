"""Carries out a schedule of faults, each in a thread of its own, so that several happen at once."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import psutil
import psycopg

from pubsub.delta.places import place
from pubsub.errors import PubsubError
from pubsub.sql.identifiers import quote_qualified
from pubsub.testing.s3_server import S3Server
from pubsub.testing.servers import EmbeddedPostgres
from tests.crash.load import PUBLICATION
from tests.crash.machine import Daemon, javas, workers
from tests.crash.plan import SHARED, SMALL_DISK, Fault
from tests.crash.world import World
from tests.support.replica import wait_until

#: What a fault may meet because of another one.
_TROUBLE: Final = (PubsubError, psycopg.Error, OSError, sqlite3.Error, psutil.Error)


class Faults:
    """The faults of a round.  `story`: what was done when, and what came of it."""

    def __init__(self, world: World, patience: float) -> None:
        self.world = world
        self.story: list[str] = []
        self.failures: list[str] = []
        self._patience = patience
        self._began = time.monotonic()
        self._threads: list[threading.Thread] = []
        self._publisher = threading.Lock()
        # Commands wait for each other, as those of one user do; and what the publication has, for the command that needs it.
        self._commands = threading.Lock()
        self._disk = threading.Lock()
        self._catalogs = threading.Lock()
        self._stores = threading.Lock()

    def run(self, schedule: tuple[Fault, ...], seconds: float) -> None:
        """Carry out the schedule; return when `seconds` are over and every fault has ended."""
        self._began = time.monotonic()
        for fault in schedule:
            time.sleep(max(0.0, self._began + fault.at - time.monotonic()))
            thread = threading.Thread(target=self._carry_out, args=(fault,), name=fault.what, daemon=True)
            thread.start()
            self._threads.append(thread)
        time.sleep(max(0.0, self._began + seconds - time.monotonic()))
        deadline = time.monotonic() + self._patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.failures.append(f'"{thread.name}" does not end')

    def say(self, text: str) -> None:
        self.story.append(f"{time.monotonic() - self._began:6.2f} s {time.strftime('%H:%M:%S')}: {text}")

    def _carry_out(self, fault: Fault) -> None:
        action: Callable[[Fault, random.Random], None] = getattr(self, "_" + fault.what.lower().replace(" ", "_"))
        self.say(fault.what)
        try:
            action(fault, random.Random(fault.chance))
            self.say(f"{fault.what}: done")
        except _TROUBLE as error:
            self.say(f"{fault.what}: {type(error).__name__}: {error}")
        except BaseException as error:
            self.failures.append(f"{fault.what}: {type(error).__name__}: {error}")

    # The node

    def _kill_daemon(self, fault: Fault, chance: random.Random) -> None:
        daemon = self._daemon(chance)
        with daemon.lock:
            daemon.kill()
            # Beyond eight seconds another daemon takes over what it had.
            time.sleep(fault.seconds * 2 if self.world.node.kind == SHARED else min(fault.seconds, 1.0))
            self._start(daemon)

    def _end_daemon(self, fault: Fault, chance: random.Random) -> None:
        """End one of several in order: what it has moves."""
        daemon = self._daemon(chance)
        with daemon.lock:
            # None runs if it was expelled just now.
            code = daemon.terminate()
            assert code == 0 or daemon.expelled(), f"it has ended with {code}\n{daemon.tail()}"
            time.sleep(fault.seconds)
            self._start(daemon)

    def _cut_off_daemon(self, fault: Fault, chance: random.Random) -> None:
        """Stop one of several while its sessions end, for so long that it may be expelled; it ends then."""
        daemon = self._daemon(chance)
        with daemon.lock:
            family = daemon.family()
            for process in family:
                process.suspend()
            try:
                self._terminate(f"application_name = 'pubsub daemon' AND {self.world.node.sessions()}")
                time.sleep(fault.seconds + 6.0)
            finally:
                for process in reversed(family):
                    if process.is_running():
                        process.resume()
            # It finds that out at once, or goes on.
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not daemon.running, "its end", 10.0)
            if not daemon.running:
                assert daemon.expelled(), f"it has ended by itself\n{daemon.tail()}"
                self._start(daemon)

    def _kill_catalog(self, fault: Fault, chance: random.Random) -> None:
        self._kill(self._catalog(), self._catalogs, fault.seconds)

    def _terminate_catalog(self, fault: Fault, chance: random.Random) -> None:
        some = chance.choice(["true", "random() < 0.5"])
        self._terminate(f"{some} AND {self.world.node.sessions()}")

    def _kill(self, server: EmbeddedPostgres | S3Server, lock: threading.Lock, seconds: float) -> None:
        """Kill a server, and start it again after some seconds."""
        with lock:
            server.kill()
            time.sleep(seconds)
            server.start()

    def _terminate(self, condition: str) -> None:
        """End sessions of the catalog's server."""
        self._catalog().query(
            f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND {condition}"
        )

    def _catalog(self) -> EmbeddedPostgres:
        catalog = self.world.node.catalog
        assert catalog is not None
        return catalog

    def _kill_store(self, fault: Fault, chance: random.Random) -> None:
        self._kill(self._store(), self._stores, fault.seconds)

    def _stop_store(self, fault: Fault, chance: random.Random) -> None:
        with self._stores:
            self._stop(psutil.Process(self._store().pid), fault.seconds)

    def _store(self) -> S3Server:
        store = self.world.node.store
        assert store is not None
        return store

    def _daemon(self, chance: random.Random) -> Daemon:
        return chance.choice(self.world.node.daemons)

    def _start(self, daemon: Daemon) -> None:
        """Start a daemon, though it may end while the disk is full, or the catalog is away."""
        deadline = time.monotonic() + self._patience
        # A setting that it refused when it ran would keep it from starting, as it keeps a server of PostgreSQL's.
        daemon.restore()
        while True:
            try:
                daemon.start()
                return
            except RuntimeError:
                if self.world.node.kind not in {SMALL_DISK, SHARED} or time.monotonic() > deadline:
                    raise
                time.sleep(0.3)

    def _stop_daemon(self, fault: Fault, chance: random.Random) -> None:
        daemon = self._daemon(chance)
        with daemon.lock:
            self._stop(daemon.process, fault.seconds)

    def _kill_jvm(self, fault: Fault, chance: random.Random) -> None:
        self._jvm(chance).kill()

    def _stop_jvm(self, fault: Fault, chance: random.Random) -> None:
        self._stop(self._jvm(chance), min(fault.seconds, 4.0))

    def _jvm(self, chance: random.Random) -> psutil.Process:
        daemon = self._daemon(chance)
        return wait_until(lambda: next(iter(javas(daemon.process)), None), "the JVM")

    def _kill_worker(self, fault: Fault, chance: random.Random) -> None:
        self._worker(chance).kill()

    def _stop_worker(self, fault: Fault, chance: random.Random) -> None:
        self._stop(self._worker(chance), fault.seconds)

    def _worker(self, chance: random.Random) -> psutil.Process:
        daemon = self._daemon(chance)
        return chance.choice(wait_until(lambda: workers(daemon.process), "a worker process"))

    def _stop(self, process: psutil.Process, seconds: float) -> None:
        process.suspend()
        try:
            time.sleep(seconds)
        finally:
            process.resume()

    def _sighup(self, fault: Fault, chance: random.Random) -> None:
        daemon = self._daemon(chance)
        changed = chance.choice(
            [
                'logical_decoding_work_mem = "64kB"\n',
                "max_sync_workers_per_subscription = 4\n",
                "max_logical_replication_workers = 3\n",
                'catalog_poll_interval = "1s"\n',
                "no_such_setting = 1\n",
                "",
            ]
        )
        kept = [line for line in daemon.settings.splitlines() if not changed.startswith(line.split(" ")[0] + " ")]
        (daemon.home / "pubsub.toml").write_text(changed + "\n".join(kept) + "\n")
        with daemon.lock:
            daemon.process.send_signal(signal.SIGHUP)

    def _second_daemon(self, fault: Fault, chance: random.Random) -> None:
        daemon = self._daemon(chance)
        with daemon.lock:
            ran = subprocess.run(
                [sys.executable, "-m", "pubsub.cli", "--home", str(daemon.home), "daemon"],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if daemon.running:
                assert ran.returncode == 1, f"a second daemon: {ran.returncode} {ran.stderr}"
                assert "a daemon is already running" in ran.stderr, ran.stderr

    def _full_disk(self, fault: Fault, chance: random.Random) -> None:
        """Fill the node's disk up to some bytes."""
        with self._disk:
            filler = self.world.node.daemon.home / "filler"
            left = chance.choice([0, 0, 4096, 65536, 1 << 20])
            try:
                with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(b"x" * 65536)
                if left:
                    with filler.open("r+b") as file:
                        file.truncate(max(0, filler.stat().st_size - left))
                time.sleep(fault.seconds)
            finally:
                filler.unlink()

    def _another_writer(self, fault: Fault, chance: random.Random) -> None:
        paths = [relation.path for relation in self.world.relations() if (place(relation.path) / "_delta_log").exists()]
        if not paths:
            return
        path = chance.choice(paths)
        statement = chance.choice(
            [
                f"OPTIMIZE delta.`{path}`",
                f"VACUUM delta.`{path}`",
                f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('other.number' = '{fault.chance}')",
            ]
        )
        self.say(f"{statement}: {self.world.machine.other_spark.run(statement) or 'done'}")

    # The publisher and the network

    def _kill_publisher(self, fault: Fault, chance: random.Random) -> None:
        self._kill(self.world.server, self._publisher, min(fault.seconds, 2.0))

    def _restart_publisher(self, fault: Fault, chance: random.Random) -> None:
        with self._publisher:
            self.world.server.stop("immediate" if chance.random() < 0.5 else "fast")
            time.sleep(min(fault.seconds, 2.0))
            self.world.server.start()

    def _terminate_walsenders(self, fault: Fault, chance: random.Random) -> None:
        some = chance.choice(["true", "random() < 0.5"])
        self.world.query(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'walsender' "
            f"AND datname = current_database() AND {some}"
        )

    def _cut_after_bytes(self, fault: Fault, chance: random.Random) -> None:
        self.world.network.cut_after(chance.choice([1, 100, 5_000, 100_000, 1_000_000]) + chance.randrange(1000))

    def _cut(self, fault: Fault, chance: random.Random) -> None:
        self.world.network.cut()

    def _slow_network(self, fault: Fault, chance: random.Random) -> None:
        network = self.world.network
        network.delay, network.piece = chance.choice([(0.02, 1 << 16), (0.001, 100), (0.2, 1 << 16)])
        time.sleep(fault.seconds)
        network.delay, network.piece = 0.0, 1 << 16  # silence and cuts by others go on

    def _silent_network(self, fault: Fault, chance: random.Random) -> None:
        """Silence the present connections, and cut them later: the node has made others by then, or waits."""
        links = self.world.network.silence()
        time.sleep(fault.seconds)
        self.world.network.cut(links)

    # Commands

    def _alter(self, action: str) -> None:
        self.say(action)
        self.world.node.daemon.execute(f"ALTER SUBSCRIPTION {self.world.name} {action}")

    def _refresh(self, fault: Fault, chance: random.Random) -> None:
        with self._commands:
            self._alter(self.world.plan.refresh)

    def _disable(self, fault: Fault, chance: random.Random) -> None:
        with self._commands:
            self._alter("DISABLE")
            try:
                time.sleep(min(fault.seconds, 2.0))
            finally:
                self._alter("ENABLE")

    def _set(self, fault: Fault, chance: random.Random) -> None:
        with self._commands:
            self._alter(
                chance.choice(
                    [
                        "SET (streaming = off)",
                        "SET (streaming = on)",
                        "SET (streaming = parallel)",
                        "SET (binary = true)",
                        "SET (binary = false)",
                        "SET (batch_rows = 50)",
                        "SET (batch_age = '500ms')",
                        "SET (schema_changes = follow)",
                    ]
                )
            )

    def _resync(self, fault: Fault, chance: random.Random) -> None:
        with self._commands:
            relations = sorted(quote_qualified(one.schema, one.name) for one in self.world.relations())
            if relations:
                some = chance.sample(relations, min(len(relations), chance.choice([1, 1, 2])))
                self._alter(f"RESYNC TABLE {', '.join(some)}")

    def _publication(self, fault: Fault, chance: random.Random) -> None:
        """Let a table leave and join again, or a new one join.

        While a table is out its changes are sent to nobody: it must have left the subscription, too, before it comes back.
        """
        new = f"new_{fault.chance}"
        with self._commands:
            if self.world.plan.everything or chance.random() < 0.5:
                self.world.execute(f"CREATE TABLE {new} (id int PRIMARY KEY, c0 text, c1 integer)")
                self.world.execute(f"INSERT INTO {new} SELECT g, 'first', g FROM generate_series(1, 100) g")
                if not self.world.plan.everything:
                    self.world.execute(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE {new}")
                self._alter(self.world.plan.refresh)
                return
            table = chance.choice(["plain", "wide", "parted"])
            before = self.world.relations()
            self.world.persist(f"ALTER PUBLICATION {PUBLICATION} DROP TABLE {table}")
            self._until_it_works(self.world.plan.refresh)
            # A Delta table that holds rows is refused when the table comes back.
            for one in before:
                path = self.world.node.files(one.path)
                if one.published_name == table and path.exists():
                    path.rename(path.with_name(f"{path.name}.{fault.chance}"))
            self.world.persist(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE {table}")
            time.sleep(min(fault.seconds, 1.0))
            self._alter(self.world.plan.refresh)

    def _until_it_works(self, action: str) -> None:
        """Run a command until nothing hinders it."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                self._alter(action)
                return
            except _TROUBLE:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)
