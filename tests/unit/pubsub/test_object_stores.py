"""Settings of an object store, translated for Spark, Arrow and deltalake; and errors that tell bad data from a bad store."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from pubsub import hdfs, object_stores
from pubsub.delta.log import checkpoints
from pubsub.delta.places import StorePath, is_local, is_reached, place
from pubsub.delta.warehouse_check import require_writable
from pubsub.errors import PubsubError
from pubsub.settings import Settings

KEYS = {"spark.hadoop.fs.s3a.access.key": "me", "spark.hadoop.fs.s3a.secret.key": "secret"}
NOWHERE = {**KEYS, "spark.hadoop.fs.s3a.endpoint": "http://127.0.0.1:1"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(object_stores, "_ATTEMPTS", 1)
    monkeypatch.setattr(hdfs, "_ATTEMPTS", 1)
    yield
    object_stores.configure({})


def test_which_paths_are_reached() -> None:
    assert [is_local(path) for path in ("/a", "file:///a", "s3a://b/c", "hdfs://h/a")] == [True, True, False, False]
    reached = [is_reached(path) for path in ("/a", "s3a://b/c", "hdfs://h/a", "gs://b/c")]
    assert reached == [True, True, True, False]
    assert place("file:///a/b") == Path("/a/b")
    assert Settings.read({"warehouse": "s3://b/c/"}, Path("/n")).warehouse_uri == "s3a://b/c"
    default = {"spark": {"conf": {"spark.hadoop.fs.defaultFS": "hdfs://lake"}}}
    assert Settings.read({"warehouse": "hdfs:///a/", **default}, Path("/n")).warehouse_uri == "hdfs://lake/a"


def test_one_set_of_settings_for_all() -> None:
    conf = {**KEYS, "spark.hadoop.fs.s3a.endpoint": "store:9000", "spark.hadoop.fs.s3a.connection.ssl.enabled": "false"}
    object_stores.configure(conf)
    found = object_stores.options("s3a://lake/t") or {}
    assert {name: value for name, value in found.items() if name.startswith("AWS")} == {
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": "http://store:9000",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    assert object_stores.options("/tmp/t") is None
    for_spark = object_stores.session_conf("s3a://lake", conf)
    assert for_spark["spark.hadoop.fs.s3a.path.style.access"] == "true"
    assert for_spark["spark.delta.logStore.s3a.impl"] == "pubsub.ConditionalLogStore"
    assert "spark.hadoop.fs.s3a.endpoint" not in for_spark, "the user's own stays"
    assert object_stores.session_conf("/data/lake", conf) == {}


def test_a_bucket_may_have_settings_of_its_own() -> None:
    region = {"spark.hadoop.fs.s3a.endpoint.region": "eu-west-1"}
    object_stores.configure({**KEYS, **region, "spark.hadoop.fs.s3a.bucket.lake.access.key": "other"})
    assert (object_stores.options("s3a://lake/t") or {})["AWS_ACCESS_KEY_ID"] == "other"
    assert (object_stores.options("s3a://sea/t") or {})["AWS_ACCESS_KEY_ID"] == "me"


def test_the_environment_serves_where_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    object_stores.configure({})
    for_spark = object_stores.session_conf("s3a://lake", {})
    assert for_spark["spark.hadoop.fs.s3a.endpoint"] == "http://store:9000"
    assert for_spark["spark.hadoop.fs.s3a.endpoint.region"] == "eu-central-1"
    assert (object_stores.options("s3a://lake/t") or {})["AWS_REGION"] == "eu-central-1"


def test_spark_finds_the_credentials_that_arrow_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hadoop alone does not look at profiles, nor for a role's token."""
    name = "spark.hadoop.fs.s3a.aws.credentials.provider"
    assert "awssdk.auth.credentials.DefaultCredentialsProvider" in object_stores.session_conf("s3a://lake", {})[name]
    assert name not in object_stores.session_conf("s3a://lake", {name: "my.own.Provider"})
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.s3a.aws.credentials.provider</name><value>my.own</value></property></configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert name not in object_stores.session_conf("s3a://lake", {})


def test_the_region_of_a_bucket_is_asked_of_amazon_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow would take the default one, and a bucket elsewhere answers with a redirection."""
    asked = []

    def resolve(bucket: str) -> str:
        asked.append(bucket)
        return "eu-north-1"

    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(fs, "resolve_s3_region", resolve)
    object_stores.configure({**KEYS, "spark.hadoop.fs.s3a.bucket.sea.endpoint.region": "eu-west-1"})
    found: Any = object_stores.file_system("s3a://lake/t")
    assert found.region == "eu-north-1"
    assert (object_stores.options("s3a://lake/t") or {})["AWS_REGION"] == "eu-north-1"
    assert asked == ["lake"], "once"
    other: Any = object_stores.file_system("s3a://sea/t")
    assert other.region == "eu-west-1"
    object_stores.configure({**KEYS, "spark.hadoop.fs.s3a.endpoint": "http://store:9000"})
    own: Any = object_stores.file_system("s3a://lake/t")
    assert own.region == "us-east-1"
    assert asked == ["lake"]


def test_a_bucket_in_another_region(monkeypatch: pytest.MonkeyPatch) -> None:
    def redirect(*_: object) -> None:
        raise OSError(errno.EIO, "When completing … AWS Error UNKNOWN (HTTP status 301) during PutObject operation")

    monkeypatch.setattr(StorePath, "write_bytes", redirect)
    with pytest.raises(PubsubError, match="cannot write to the warehouse") as caught:
        require_writable("s3a://lake/t")
    assert "AWS_REGION" in (caught.value.hint or "")
    assert "another region" in (caught.value.hint or "")


def test_hadoop_s_settings_come_from_its_files_and_spark_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hdfs-site.xml").write_text(
        "<configuration><property><name>dfs.nameservices</name><value> lake </value></property>"
        "<property><name>dfs.replication</name><value>3</value></property></configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    object_stores.configure({**KEYS, "spark.hadoop.dfs.replication": "1", "spark.sql.x": "y"})
    assert object_stores.options("hdfs://lake/t") == {"dfs.nameservices": "lake", "dfs.replication": "1"}
    whole = {**KEYS, "spark.hadoop.dfs.nameservices": "lake", "spark.hadoop.dfs.replication": "1"}
    assert object_stores.configured() == whole, "what an executor gets, which may lack the files"
    conf = {"spark.hadoop.dfs.client.retry.policy.spec": "1000,2"}
    for_spark = object_stores.session_conf("hdfs://lake", conf)
    assert "spark.hadoop.dfs.client.block.write.locateFollowingBlock.initial.delay.ms" in for_spark
    assert not for_spark.keys() & conf.keys(), "the user's own stays"
    assert "spark.delta.logStore.s3a.impl" not in for_spark


def test_a_path_in_a_store() -> None:
    path = StorePath("s3a://lake/a/") / "_delta_log" / "1.json"
    assert (str(path), path.name, path.suffix, path.parent.name) == (
        "s3a://lake/a/_delta_log/1.json",
        "1.json",
        ".json",
        "_delta_log",
    )
    assert path.parent.parent == StorePath("s3a://lake/a")
    assert StorePath("s3a://lake/a") / "" == StorePath("s3a://lake/a")


def test_a_store_that_does_not_answer_is_no_bad_data() -> None:
    """A checkpoint that cannot be read now must not be taken for a damaged one, which is removed."""
    object_stores.configure(NOWHERE)
    path = StorePath("s3a://lake/t/_delta_log")
    for name in ("00000000000000000001.checkpoint.parquet", "00000000000000000001.checkpoint.json"):
        with pytest.raises(OSError, match="NETWORK_CONNECTION") as caught:
            list(checkpoints.actions(checkpoints.Checkpoint(1, (path / name,))))
        assert caught.value.errno == errno.EIO


def test_a_warehouse_that_cannot_be_written() -> None:
    object_stores.configure(NOWHERE)
    with pytest.raises(PubsubError, match="cannot write to the warehouse") as caught:
        require_writable("s3a://lake/t")
    assert caught.value.sqlstate == "08001"
    assert "fs.s3a.endpoint" in (caught.value.hint or "") or "endpoint" in (caught.value.hint or "")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_directory_that_cannot_be_written(tmp_path: Path, scheme: str) -> None:
    """It is made by the first table; until then the nearest one that exists is tried."""
    require_writable(f"{scheme}{tmp_path}/made/later")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(PubsubError, match=f'warehouse "{tmp_path}/file" cannot be used: Not a directory') as caught:
        require_writable(f"{scheme}{tmp_path}/file")
    assert caught.value.sqlstate == "58030"
    assert caught.value.detail == "It failed at making a directory."
    assert '"warehouse"' in (caught.value.hint or "")
    require_writable("abfss://container@account/lake")


@pytest.mark.parametrize("warehouse", ["hdfs://127.0.0.1:1/t", "hdfs://nolake/t", "hdfs:///t"])
def test_a_name_node_that_is_not_there(warehouse: str) -> None:
    with pytest.raises(PubsubError, match="cannot write to the warehouse") as caught:
        require_writable(warehouse)
    assert caught.value.sqlstate == "08001"
    assert "HADOOP_CONF_DIR" in (caught.value.hint or "")
    with pytest.raises(OSError, match=r"Errno 5") as failed:
        StorePath(warehouse).exists()
    assert failed.value.errno == errno.EIO
