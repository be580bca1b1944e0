"""What only HDFS does: files that are seen half written, name nodes that fail over or hang, deltalake beside Delta."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from pubsub import hdfs, object_stores
from pubsub.delta.log import durable_files
from pubsub.delta.log.deltalake_turns import ask
from pubsub.delta.places import StorePath, open_parquet, remove_tree
from pubsub.errors import PubsubError
from pubsub.testing.compare import compare_tables
from pubsub.testing.fixtures import Database
from pubsub.testing.hdfs_server import HdfsServer
from tests.fault.daemon import SETTINGS, Daemon, Subscribed
from tests.support.replica import PATIENCE
from tests.support.store_servers import Hdfs, commits, write_settings

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsServer]:
    with HdfsServer(tmp_path_factory.mktemp("hdfs")) as running:
        yield running


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    object_stores.configure({})
    yield
    object_stores.configure({})


@pytest.fixture
def root(server: HdfsServer, tmp_path: Path) -> StorePath:
    return StorePath(Hdfs(server).warehouse(tmp_path.name))


def _first_is_gone(server: HdfsServer) -> dict[str, str]:
    """Return Spark's settings for a name service, of whose name nodes the first is away."""
    service = "spark.hadoop.dfs."
    return {
        f"{service}nameservices": "lake",
        f"{service}ha.namenodes.lake": "one,two",
        f"{service}namenode.rpc-address.lake.one": "127.0.0.1:1",
        f"{service}namenode.rpc-address.lake.two": f"127.0.0.1:{server.port}",
        f"{service}client.failover.proxy.provider.lake": "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider",
    }


def names(path: StorePath) -> list[str]:
    return sorted(found.name for found in path.iterdir())


def test_a_file_has_its_name_once_it_is_whole(root: StorePath) -> None:
    path = root / "part.parquet"
    file = path.open_output()
    file.write(b"x" * (5 << 20))
    file.write(b"y")
    assert not path.exists()
    (aside,) = names(root)
    assert aside.startswith("part.parquet.")
    assert aside.endswith(".tmp")
    durable_files.finish(file, path)
    assert names(root) == ["part.parquet"]
    assert path.stat().st_size == (5 << 20) + 1
    assert path.read_at(5 << 20, 10) == b"y"
    path.write_bytes(b"another")
    assert path.read_bytes() == b"another", "as in an object store, the later one replaces"
    (root / "empty").write_bytes(b"")
    assert (root / "empty").read_bytes() == b""
    assert [file.name for file in root.glob("*.parquet")] == ["part.parquet"]
    remove_tree(root)
    with pytest.raises(FileNotFoundError):
        list(root.iterdir())
    remove_tree(root)
    assert list(root.glob("*")) == []


def write_on(file: pa.NativeFile) -> None:
    """Write until that fails."""
    while True:
        file.write(b"x" * (5 << 20))


def test_a_file_that_fails_half_written_never_has_its_name(root: StorePath, server: HdfsServer) -> None:
    path = root / "part.parquet"
    file = path.open_output()
    file.write(b"x" * (5 << 20))
    server.kill()
    with pytest.raises(OSError, match=r"/part\.parquet"):
        write_on(file)
    server.start()
    with pytest.raises(OSError, match="could not be written"):
        file.close()
    assert not path.exists()


def test_small_files_take_milliseconds(root: StorePath) -> None:
    """hdfs-native alone takes half a second for each."""
    (root / "first").write_bytes(b"x")
    began = time.monotonic()
    for number in range(20):
        (root / f"{number}").write_bytes(b"x" * 1000)
    assert (time.monotonic() - began) / 20 < 0.2


def test_parquet(root: StorePath) -> None:
    import pyarrow.parquet as pq

    table = pa.table({"a": list(range(1_000_000)), "b": [str(n) for n in range(1_000_000)]})
    with (root / "p").open_output() as file:
        pq.write_table(table, file, row_group_size=100_000)
    with open_parquet(root / "p") as found:
        assert found.read(["b"]) == table.select(["b"])


def test_a_name_node_that_hangs_stops_no_other_thread(
    root: StorePath, server: HdfsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdfs, "_PATIENCE", 1.0)
    (root / "x").write_bytes(b"x")
    server.freeze()
    failed: list[OSError] = []

    def ask() -> None:
        try:
            (root / "x").exists()
        except OSError as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    try:
        asking.start()
        turns = 0
        while asking.is_alive() and turns < 3000:
            asking.join(0.01)
            turns += 1
        assert 20 < turns < 3000
        assert isinstance(failed[0], TimeoutError)
    finally:
        server.thaw()
    assert (root / "x").read_bytes() == b"x"


def test_a_name_service_whose_first_name_node_is_gone(server: HdfsServer, tmp_path: Path, database: Database) -> None:
    """One set of Hadoop's settings serves Spark, our files and deltalake."""
    daemon = Daemon(tmp_path)
    write_settings(tmp_path, SETTINGS, f"hdfs://lake/{tmp_path.name}", _first_is_gone(server))
    daemon.start()
    try:
        made = Subscribed(daemon, database)
        made.subscribe()
        made.write(2)
        made.caught_up()
        path = made.relations()["a"].path
        options = object_stores.options(path)
        assert compare_tables(database.conninfo, "public.a", path, storage_options=options) is None
        made.drop()
    finally:
        daemon.kill()


def test_threads_that_ask_for_tables_at_once_are_all_answered(server: HdfsServer, tmp_path: Path) -> None:
    """One of some two thousand calls of deltalake never returned: a table stayed in f, without an error."""
    from deltalake import write_deltalake

    object_stores.configure(_first_is_gone(server))
    path = f"hdfs://lake/{tmp_path.name}"
    for _ in range(5):
        write_deltalake(path, pa.table({"n": [1]}), mode="append", storage_options=object_stores.options(path))
    answered = [0] * 6

    def run(thread: int) -> None:
        for _ in range(1000):
            assert ask(path, lambda table: table.transaction_version("none")) is None
            answered[thread] += 1

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(answered))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert answered == [1000] * 6


def test_deltalake_writes_beside_us(server: HdfsServer, tmp_path: Path, database: Database) -> None:
    """Its commits are exclusive with ours, by the same rename, and they are noticed."""
    from deltalake import write_deltalake

    daemon = Daemon(tmp_path)
    write_settings(tmp_path, SETTINGS, Hdfs(server).warehouse(tmp_path.name), {})
    daemon.start()
    try:
        made = Subscribed(daemon, database)
        made.subscribe()
        made.write(1)
        made.caught_up()
        path = made.relations()["keyless"].path
        theirs = 0
        row = pa.table({"n": pa.array([1], pa.int32())})
        before = len(commits(path))
        for number in range(5):
            database.execute(f"INSERT INTO keyless VALUES ({1000 + number})")
            write_deltalake(path, row, mode="append", storage_options=object_stores.options(path))
            theirs += 1
        made.caught_up()
        found = commits(path)[before:]
        assert len(found) >= theirs + 1
        assert sum('"clientVersion":"delta-rs' in text for text in found) == theirs
        ours = daemon.client(lambda node: node.fetch("SELECT count(*) AS n FROM public.keyless"))
        assert ours == [{"n": database.query("SELECT count(*) FROM keyless")[0][0] + theirs}]
        for text in found:
            assert all(json.loads(line) for line in text.splitlines())
        made.drop()
    except PubsubError as error:
        raise AssertionError(error.report() + daemon.tail()) from error
    finally:
        daemon.kill()
