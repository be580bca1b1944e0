"""Who may read what of a daemon: the modes of its files, where passwords are, who reaches its JVM, and the roles that it needs.

One daemon does everything that makes files and processes: a copy by Spark's workers, spilled and prepared transactions, a
subscription to its own walsender, queries.  Its catalog is in PostgreSQL.  Every secret that it is given can be recognised.
It is started with umask 000, so that a mode is what the program gives.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import psycopg
import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JError, Py4JJavaError

from catalog.home_lock import running_daemon
from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import wait_until

pytestmark = pytest.mark.full

PATIENCE = 300.0
PUBLISHER = "Pa55-of-the-publisher"
CATALOG = "Pa55-of-the-catalog"
CLIENT_KEY = "Pa55-of-the-TLS-key"
SECRETS = {
    "publisher": PUBLISHER,
    "catalog": CATALOG,
    "TLS key": CLIENT_KEY,
    "S3": "Pa55-of-the-store",
    "Spark": "Pa55-of-Spark",
    "endpoint": "Pa55-of-an-endpoint",
}
ROLES = f"""
    CREATE ROLE replicator LOGIN REPLICATION PASSWORD '{PUBLISHER}';
    CREATE ROLE keeper LOGIN PASSWORD '{CATALOG}';
    REVOKE ALL ON DATABASE postgres FROM PUBLIC;
    REVOKE ALL ON SCHEMA public FROM PUBLIC;
    GRANT CONNECT ON DATABASE postgres TO replicator;
    CREATE SCHEMA shop;
    GRANT USAGE ON SCHEMA shop TO replicator;
"""
TABLES = """
    CREATE TABLE shop.small (id int PRIMARY KEY, t text);
    CREATE TABLE shop.large (id int PRIMARY KEY, t text);
    CREATE TABLE shop.second (id int PRIMARY KEY, t text);
    INSERT INTO shop.small VALUES (1, 'one');
    INSERT INTO shop.large SELECT g, repeat('x', 1000) FROM generate_series(1, 4000) g;
    CREATE PUBLICATION p FOR TABLE shop.small, shop.large;
    CREATE PUBLICATION again FOR TABLE shop.second;
    GRANT SELECT ON shop.small, shop.large, shop.second TO replicator;
    GRANT EXECUTE ON FUNCTION pg_read_binary_file(text, bigint, bigint, boolean) TO replicator;
"""
CATALOG_ROLE = """
    REVOKE ALL ON DATABASE kept FROM PUBLIC;
    GRANT CONNECT ON DATABASE kept TO keeper;
    REVOKE ALL ON SCHEMA public FROM PUBLIC;
    GRANT USAGE, CREATE ON SCHEMA public TO keeper;
"""


@dataclass(frozen=True)
class Life:
    """A daemon in the middle of its work.  `said`: what commands have printed; `held`: an open transaction."""

    server: EmbeddedPostgres
    home: Path
    process: psutil.Process
    said: list[str]
    http: str

    def sql(self, statement: str) -> str:
        return self.command("sql", "-f", "-", given=statement)

    def command(self, *arguments: str, given: str = "") -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "pubsub.cli", "--verbose", "--home", str(self.home), *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        self.said.append(ran.stdout + ran.stderr)
        return self.said[-1]

    @property
    def log(self) -> str:
        return (self.home.parent / "daemon.log").read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        return [one for one in self.process.children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]

    def jvm(self) -> psutil.Process:
        return wait_until(lambda: next((c for c in self.children() if c.name() == "java"), None), "the JVM")


def conninfo(server: EmbeddedPostgres, **more: object) -> str:
    return server.conninfo(**{"user": "replicator", "password": PUBLISHER, "sslpassword": CLIENT_KEY, **more})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    root = tmp_path_factory.mktemp("audit")
    home = root / "node"
    settings: dict[str, str | int] = {"max_prepared_transactions": 5, "logical_decoding_work_mem": "64kB"}
    with EmbeddedPostgres("18", auth="scram-sha-256", password="of-the-superuser", settings=settings) as server:
        server.execute(ROLES)
        server.execute(TABLES)
        server.create_database("kept")
        server.execute(CATALOG_ROLE, "kept")
        home.mkdir(mode=0o700)
        upstream = conninfo(server)
        (home / "pubsub.toml").write_text(
            f"""
            wal_retrieve_retry_interval = "300ms"
            catalog_poll_interval = "50ms"
            logical_decoding_work_mem = "64kB"
            [catalog]
            url = "postgresql://keeper:{CATALOG}@{server.host}:{server.port}/kept"
            [http]
            listen = "127.0.0.1:0"
            [walsender]
            listen = "127.0.0.1:0"
            upstream = {json.dumps(upstream)}
            [spark.conf]
            "spark.driver.memory" = "1g"
            "spark.hadoop.fs.s3a.secret.key" = "{SECRETS["S3"]}"
            "spark.ssl.keyPassword" = "{SECRETS["Spark"]}"
            "spark.hadoop.fs.custom.endpoint" = "https://user:{SECRETS["endpoint"]}@store"
            """
        )
        (home / "pubsub.toml").chmod(0o600)
        with (root / "daemon.log").open("wb") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", "pubsub.cli", "--verbose", "--home", str(home), "daemon"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=0,
                preexec_fn=_cores_allowed,  # noqa: PLW1509 (it only sets a limit)
            )
        try:
            yield from _lived(server, home, started)
        finally:
            started.terminate()
            started.wait(PATIENCE)


def _cores_allowed() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)


def _lived(server: EmbeddedPostgres, home: Path, started: subprocess.Popen[bytes]) -> Iterator[Life]:
    def places() -> dict[str, str] | None:
        assert started.poll() is None, life.log
        lines = [json.loads(line) for line in life.log.splitlines() if line.startswith("{")]
        return next((line for line in lines if line["event"] == "daemon has started"), None)

    life = Life(server, home, psutil.Process(started.pid), [], "")
    wait_until(lambda: running_daemon(home) == started.pid or started.poll() is not None, "the daemon")
    found = wait_until(places, "the daemon to listen")
    life = Life(server, home, life.process, life.said, found["http"])
    right = conninfo(server)
    own = conninfo(server, port=found["listen"].rpartition(":")[2])
    with psycopg.connect(server.conninfo()) as held:
        made = life.sql(f"CREATE SUBSCRIPTION s CONNECTION '{right}' PUBLICATION p WITH (two_phase = true)")
        assert "CREATE SUBSCRIPTION" in made, made
        made = life.sql(f"CREATE SUBSCRIPTION w CONNECTION '{own}' PUBLICATION again")
        assert "CREATE SUBSCRIPTION" in made, made

        def ready() -> bool:
            shown = json.loads(life.command("status", "--json"))["subscriptions"]
            return (
                all(t["state"] == "r" for s in shown for t in s["tables"]) and sum(len(s["tables"]) for s in shown) == 3
            )

        try:
            wait_until(ready, "the copies")
        except AssertionError:
            pytest.fail(f"{life.said[-1]}\n{life.log}")
        server.execute("BEGIN; INSERT INTO shop.small VALUES (2, 'two'); PREPARE TRANSACTION 'x'")
        held.execute("INSERT INTO shop.large SELECT g, repeat('y', 100) FROM generate_series(5001, 15000) g")
        wait_until(lambda: [*(home / "prepared").rglob("*.prepared")], "a prepared file")
        wait_until(lambda: [p for p in (home / "spill").rglob("*") if p.is_file()], "a spill file")
        life.sql("SELECT count(*) FROM shop.large")
        life.command("snapshot", "s", "--pin", "kept")
        life.command("verify", "w")
        yield life
        held.rollback()
        server.execute("ROLLBACK PREPARED 'x'")
    life.sql("DROP SUBSCRIPTION s")
    life.sql("DROP SUBSCRIPTION w")


def open_to_others(directory: Path, *, without: Path) -> dict[str, str]:
    """Return the modes of what others may read, write or enter below `directory`, if they are let into that itself."""
    found = {}
    for path in directory.iterdir():
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path != without and not path.is_symlink():
            if mode & 0o077:
                found[path.name] = oct(mode)
            if path.is_dir() and mode & 0o011:
                found |= {f"{path.name}/{name}": one for name, one in open_to_others(path, without=without).items()}
    return found


def test_what_a_node_keeps_is_its_owners_alone(life: Life) -> None:
    assert stat.S_IMODE(life.home.stat().st_mode) == 0o700
    assert open_to_others(life.home, without=life.home / "warehouse") == {}


def test_nobody_else_writes_the_tables(life: Life) -> None:
    """Who may read them, the umask says; nobody but the owner may write, whatever that is."""
    found = {
        str(path): oct(path.stat().st_mode)
        for path in (life.home / "warehouse").rglob("*")
        if path.stat().st_mode & 0o022
    }
    assert found == {}


def test_no_secret_is_in_an_argument_or_an_environment(life: Life) -> None:
    life.jvm()
    names = set()
    for process in (life.process, *life.children()):
        names.add(process.name())
        for kind, text in (("cmdline", " ".join(process.cmdline())), ("environ", str(process.environ()))):
            for name, secret in SECRETS.items():
                assert secret not in text, (name, kind, process)
    assert "java" in names


def test_no_secret_is_in_what_is_written_or_shown(life: Life) -> None:
    """In the order of the table of docs/security.md: the catalog and pubsub.toml hold what they were given, nothing else does."""
    with urlopen(f"http://{life.http}/metrics") as answer:
        metrics = answer.read().decode()
    for path in ("/health", "/ready", "/", "/status.json"):
        with urlopen(f"http://{life.http}{path}") as answer:
            metrics += answer.read().decode()
    views = re.findall(
        r"pg_(?:stat_)?(?:subscription|replication|publication)\w*", life.sql("SELECT relname FROM pg_class")
    )
    shown = [life.sql(f"SELECT * FROM {view}") for view in sorted({*views, "pg_subscription", "pg_stat_subscription"})]
    shown += [life.sql("SHOW ALL"), life.command("status"), life.command("status", "--json"), metrics]
    wrong = conninfo(life.server, password=PUBLISHER + "-wrong")
    for failing in (
        wrong,
        conninfo(life.server, host="127.0.0.1", port=1),
        conninfo(life.server, host="no-such-host.invalid"),
        conninfo(life.server, dbname="nope"),
        f"postgresql://replicator:{PUBLISHER}%zz@127.0.0.1/postgres",
        f"host=127.0.0.1 password={PUBLISHER} {CLIENT_KEY}",
    ):
        said = life.sql(f"CREATE SUBSCRIPTION x CONNECTION '{failing}' PUBLICATION p")
        assert "ERROR:" in said
        shown += [said, life.command("check", failing, "p")]
    life.sql(f"ALTER SUBSCRIPTION s CONNECTION '{wrong}'")
    wait_until(lambda: "password authentication failed" in life.log, "a worker that fails")
    shown.append(life.command("status"))
    life.sql(f"ALTER SUBSCRIPTION s CONNECTION '{conninfo(life.server)}'")
    # The WAL that the walsender keeps is the server's, so it has the rows of the catalog, which is on the same server here.
    wal = life.home / "walsender" / "wal"
    files = [
        path
        for path in life.home.rglob("*")
        if path.is_file() and wal not in path.parents and path.name != "pubsub.toml"
    ]
    held = [(str(path), path.read_bytes().decode("latin-1")) for path in files]
    for where, text in [
        ("log", life.log),
        *held,
        *((said.splitlines()[0], said) for said in (*life.said, *shown) if said),
    ]:
        for name, secret in SECRETS.items():
            assert secret not in text, (name, where, text[max(text.find(secret) - 300, 0) :][:400])
    assert '"level": "debug"' in life.log


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    return [
        (c.laddr.ip.removeprefix("::ffff:"), c.laddr.port)
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    ]


def test_the_jvm_listens_on_loopback_alone_and_asks_who_it_is(life: Life) -> None:
    sockets = listening(life.jvm())
    assert sockets
    for address, port in sockets:
        assert address in {"127.0.0.1", "::1"}, (address, port)
        # A client that does not know the secret learns nothing and runs nothing, whatever listens there.
        gateway = JavaGateway(gateway_parameters=GatewayParameters(address=address, port=port, read_timeout=5))
        with pytest.raises((Py4JError, OSError)):
            gateway.jvm.java.lang.System.getProperty("user.name")
        gateway.close()
    with pytest.raises(URLError, match="refused"):
        urlopen("http://127.0.0.1:4040", timeout=5)


def test_spark_s_own_ports_ask_who_it_is(life: Life, spark: Spark) -> None:
    """Another Spark, which does not know the secret, asks there for what every driver has; without a secret it got it."""
    jvm: Any = spark.running()._jvm
    package = jvm.org.apache.spark
    conf = package.SparkConf(False).set("spark.rpc.lookupTimeout", "30s")
    unset = getattr(package.SecurityManager, "$lessinit$greater$default$3")()
    nobody = package.SecurityManager(conf, jvm.scala.Option.empty(), unset)
    probe = package.rpc.RpcEnv.create("probe", "127.0.0.1", 0, conf, nobody, True)
    try:
        sockets = listening(life.jvm())
        assert len(sockets) > 2
        for address, port in sockets:
            with pytest.raises(Py4JJavaError):
                probe.setupEndpointRef(package.rpc.RpcAddress(address, port), "MapOutputTracker")
    finally:
        probe.shutdown()


def test_the_walsender_s_command_keeps_its_password_and_its_output_to_itself(life: Life) -> None:
    secret = life.home.parent / "conninfo"
    secret.write_text(conninfo(life.server) + "\n")
    given = life.home.parent / "given"
    ((now,),) = life.server.query("SELECT pg_current_wal_lsn()::text")
    for number, (arguments, environment) in enumerate(
        [
            (["--conninfo-file", str(secret)], {}),
            (["--conninfo-file", "-"], {}),
            (["--conninfo", "service=audit"], {"PGSERVICEFILE": str(given)}),
            ([], {"PGSERVICE": "audit", "PGSERVICEFILE": str(given)}),
        ]
    ):
        parts = [part for part in shlex.split(conninfo(life.server)) if not part.startswith("application_name")]
        given.write_text("\n".join(["[audit]", *parts, ""]))
        output = life.home.parent / f"decoded{number}"
        command = [sys.executable, "-m", "walsender", "decode", *arguments, "--start", now]
        with secret.open("rb") as read:
            started = subprocess.Popen(
                [*command, "--publication", "p", "--output", str(output)],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                umask=0,
                env={**os.environ, **environment},
            )
        assert started.stderr is not None
        said = started.stderr.readline()
        assert said.startswith("consistent point"), said + started.stderr.read()
        process = psutil.Process(started.pid)
        for one in (process, *process.children(recursive=True)):
            assert PUBLISHER not in " ".join(one.cmdline())
            assert PUBLISHER not in str(one.environ())
        assert stat.S_IMODE(output.stat().st_mode) == 0o600
        started.terminate()
        with started.stderr as said_last:
            assert started.wait(PATIENCE) == 0, said_last.read()


def test_the_daemon_and_its_processes_leave_no_core(life: Life) -> None:
    for process in (life.process, *life.children()):
        assert resource.prlimit(process.pid, resource.RLIMIT_CORE)[0] == 0, process


def test_the_roles_have_what_docs_name_and_no_more(life: Life) -> None:
    """The fixture's roles have done all of it: docs/security.md has the same statements."""
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    superusers = life.server.query("SELECT rolname FROM pg_roles WHERE rolsuper OR rolcreatedb OR rolcreaterole")
    assert superusers == [("postgres",)]
    for line in ("GRANT USAGE ON SCHEMA shop TO replicator", "GRANT USAGE, CREATE ON SCHEMA public TO keeper"):
        assert line in text
