"""A warehouse on S3 or HDFS: a real server, reached by Spark, by Arrow and by deltalake with the same settings."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pyspark
import pytest

from pubsub import jars, object_stores
from pubsub.errors import PubsubError
from pubsub.testing.compare import compare_tables
from pubsub.testing.fixtures import Database
from pubsub.testing.hdfs_server import HdfsServer
from pubsub.testing.s3_server import S3Server, can_build, program
from tests.fault.daemon import SETTINGS, Daemon, Subscribed
from tests.support import java_programs
from tests.support.broken_store import BrokenStore
from tests.support.replica import PATIENCE, wait_until
from tests.support.store_servers import S3, Hdfs, Store, commits, write_settings

pytestmark = pytest.mark.full


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            "s3", marks=pytest.mark.skipif(program() is None and not can_build(), reason="needs Go, or versitygw")
        ),
        "hdfs",
    ],
)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "s3":
        with S3Server(directory) as objects:
            yield S3(objects)
    else:
        with HdfsServer(directory) as files:
            yield Hdfs(files)


@pytest.fixture
def daemon(store: Store, tmp_path: Path) -> Iterator[Daemon]:
    found = Daemon(tmp_path)
    write_settings(tmp_path, SETTINGS, store.warehouse(tmp_path.name), store.conf())
    found.start()
    yield found
    found.kill()
    object_stores.configure({})


@pytest.fixture
def subscribed(daemon: Daemon, database: Database) -> Iterator[Subscribed]:
    made = Subscribed(daemon, database)
    yield made
    daemon.ensure()
    made.drop()


def assert_equal(subscribed: Subscribed, *tables: str) -> None:
    subscribed.caught_up()
    relations = subscribed.relations()
    for table in tables or ("a", "keyless"):
        difference = compare_tables(subscribed.database.conninfo, f"public.{table}", relations[table].path)
        assert difference is None, f"{difference}\n{subscribed.daemon.tail()}"


def test_the_life_of_tables(store: Store, daemon: Daemon, subscribed: Subscribed, database: Database) -> None:
    subscribed.grow()
    subscribed.subscribe()
    assert_equal(subscribed)
    path = subscribed.relations()["a"].path
    assert path.startswith(store.warehouse(""))
    copied = len(commits(path))
    subscribed.write(3)
    assert_equal(subscribed)
    database.execute("UPDATE a SET t = 'x' WHERE id BETWEEN 300100 AND 300120")
    database.execute("ALTER TABLE keyless REPLICA IDENTITY FULL; DELETE FROM keyless WHERE n = 3")
    assert_equal(subscribed)
    made = commits(path)[copied:]
    assert made, "there were commits"
    assert not any("replaceOn" in text or "MERGE" in text for text in made), "our files, not statements"
    assert any('"deletionVector"' in text for text in made)
    database.execute("ALTER TABLE a ADD c text; INSERT INTO a VALUES (-1, 1, 'y', 'new'); TRUNCATE keyless")
    database.execute("INSERT INTO keyless VALUES (7)")
    assert_equal(subscribed)
    daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} RESYNC TABLE a")
    assert_equal(subscribed)
    daemon.kill()
    subscribed.write(2)
    daemon.start()
    subscribed.write(1)
    assert_equal(subscribed)
    found = daemon.client(lambda node: node.fetch("SELECT count(*) AS n, max(c) AS c FROM public.a"))
    assert found == [{"n": database.query("SELECT count(*) FROM a")[0][0], "c": "new"}]
    assert b"only-for-tests" not in daemon.log.read_bytes()


@pytest.mark.skipif(not java_programs.has_compiler(), reason="needs a JDK")
@pytest.mark.parametrize("kind", ["profile", "token"])
def test_hadoop_finds_the_credentials_of_a_profile_and_of_a_role_s_token(tmp_path: Path, kind: str) -> None:
    profile = tmp_path / "credentials"
    if kind == "profile":
        profile.write_text("[default]\naws_access_key_id = of-a-profile\naws_secret_access_key = s\n")
    (tmp_path / "token").write_text("token")
    provider = object_stores.session_conf("s3a://lake", {})["spark.hadoop.fs.s3a.aws.credentials.provider"]
    of_spark = sorted(Path(pyspark.__file__).parent.joinpath("jars").glob("*.jar"))
    program = Path(java_programs.__file__).with_name("java") / "Credentials.java"
    classes = os.pathsep.join(map(str, [*jars.s3(), *of_spark]))
    with TokenService() as service:
        role = {
            "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/r",
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_STS": service.url,
        }
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        env |= {"AWS_SHARED_CREDENTIALS_FILE": str(profile), "AWS_EC2_METADATA_DISABLED": "true"}
        ran = subprocess.run(
            [str(jars.find_java()), "-Xmx256m", "-cp", classes, str(program), provider],
            env=env | (role if kind == "token" else {}),
            capture_output=True,
            text=True,
            check=False,
        )
    assert ran.stdout.splitlines()[-1:] == [f"of-a-{kind}"], ran.stderr


class TokenService:
    """Answers as Amazon's STS does to AssumeRoleWithWebIdentity."""

    ANSWER = (
        b'<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        b"<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>of-a-token</AccessKeyId>"
        b"<SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
        b"<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>"
        b"<AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/r/s</Arn><AssumedRoleId>A:s</AssumedRoleId></AssumedRoleUser>"
        b"</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )

    def __enter__(self) -> Self:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Type", "text/xml")
                self.send_header("Content-Length", str(len(TokenService.ANSWER)))
                self.end_headers()
                self.wfile.write(TokenService.ANSWER)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def refused(store: Store, made: Subscribed, warehouse: str, sqlstate: str, **conf: str) -> PubsubError:
    """Ask for a subscription with this warehouse: there must be one clear error, before a slot is made; return it."""
    write_settings(made.daemon.home, SETTINGS, warehouse, {**store.conf(), **conf})
    with pytest.raises(PubsubError, match="cannot write to the warehouse") as caught:
        made.subscribe()
    assert caught.value.sqlstate == sqlstate, caught.value.report()
    assert caught.value.hint
    assert made.slots() == []
    return caught.value


def test_a_store_that_is_not_there(store: Store, daemon: Daemon, database: Database) -> None:
    refused(store, Subscribed(daemon, database), store.warehouse("x", port=1), "08001", **store.conf(port=1))


def test_a_store_that_refuses(
    store: Store, daemon: Daemon, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Subscribed(daemon, database)
    if isinstance(store, S3):
        key = store.server.conf(secret_key="wr0ng-key-of-the-store")
        error = refused(store, made, "s3a://lake/x", "28P01", **key)
        for text in (
            "".join(traceback.format_exception(error)),
            error.report(verbose=True),
            made.daemon.log.read_text(),
        ):
            assert "wr0ng-key-of-the-store" not in text
        refused(store, made, "s3a://nolake/x", "3F000")
        return
    refused(store, made, "hdfs://nolake/x", "08001")
    daemon.kill()
    monkeypatch.setenv("HADOOP_USER_NAME", "stranger")
    daemon.start()
    refused(store, made, store.warehouse("x"), "42501")


def test_a_store_that_goes_away(store: Store, daemon: Daemon, subscribed: Subscribed) -> None:
    subscribed.subscribe()
    assert_equal(subscribed)
    store.server.kill()
    subscribed.write(2)
    wait_until(lambda: daemon.said("worker failed"), "the worker to say so")
    store.server.start()
    subscribed.write(1)
    assert_equal(subscribed)


def test_a_store_that_breaks(store: Store, tmp_path: Path, database: Database) -> None:
    """Connections are cut at any byte, requests refused and delayed, in copies and commits: nothing is lost or doubled."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    with BrokenStore(store.server.port, seed, store.ways) as broken:
        daemon = Daemon(tmp_path)
        write_settings(tmp_path, SETTINGS, store.warehouse(tmp_path.name, broken.port), store.conf(broken.port))
        daemon.start()
        try:
            made = Subscribed(daemon, database)
            made.grow()
            made.subscribe()
            broken.often = 0.2
            number = 0
            while number < 12 or not all(broken.broken.values()):
                broken.break_all()
                made.write(2)
                if number == 6:
                    daemon.kill()
                    daemon.start()
                made.caught_up()
                number += 1
            broken.often = 0.0
            assert_equal(made)
            made.drop()
        finally:
            daemon.kill()
            object_stores.configure({})


RACE = """
import json, sys, threading
from pathlib import Path
from pubsub.delta.spark.spark_session import Spark

conf, home, table, names = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
spark = Spark(home, master="local[2]", conf=conf, warehouse=table)
session = spark.running()
jvm = session._jvm
hadoop = session._jsc.hadoopConfiguration()
s3 = table.startswith("s3a:")
store = jvm.pubsub.ConditionalLogStore(hadoop) if s3 else jvm.io.delta.storage.HDFSLogStore(hadoop)
won = []
log = jvm.org.apache.hadoop.fs.Path(f"{table}/_delta_log")
log.getFileSystem(hadoop).mkdirs(log)
print("ready", flush=True)
sys.stdin.readline()

def write(name):
    for version in range(12):
        lines = jvm.java.util.ArrayList()
        lines.add(f"{name} {version}")
        path = jvm.org.apache.hadoop.fs.Path(f"{table}/_delta_log/{version:020}.json")
        try:
            store.write(path, lines.iterator(), False, hadoop)
            won.append((version, name))
        except Exception as error:
            assert "FileAlreadyExistsException" in str(error), error

threads = [threading.Thread(target=write, args=(name,)) for name in names]
[one.start() for one in threads]
[one.join() for one in threads]
print(json.dumps(won))
spark.stop()
"""


def test_a_commit_is_exclusive(store: Store, tmp_path: Path) -> None:
    """Of several that put the same version at once, in two processes, one is told that it has; its lines are there."""
    table = store.warehouse("race")
    racing = []
    for names in ("ab", "cd"):
        home = tmp_path / names
        home.mkdir()
        racing.append(
            subprocess.Popen(
                [sys.executable, "-c", RACE, json.dumps(store.conf()), str(home), table, names],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for one in racing:
        assert one.stdout is not None
        while one.stdout.readline().strip() != "ready":
            assert one.poll() is None
    won: list[tuple[int, str]] = []
    for one in racing:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    for one in racing:
        said, _ = one.communicate(timeout=PATIENCE)
        assert one.returncode == 0
        won += map(tuple, json.loads(said.splitlines()[-1]))
    assert len(dict(won)) == len(won) == 12
    object_stores.configure(store.conf())
    try:
        assert dict(enumerate(commits(table))) == {version: f"{name} {version}\n" for version, name in won}
    finally:
        object_stores.configure({})
