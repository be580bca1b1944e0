"""Where a node stages batches for Spark's statements."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.stage_directory import stage_directory
from pubsub.errors import FeatureNotSupported
from pubsub.settings import Settings


def staged(home: Path, warehouse: str, master: str = "spark://host:7077") -> str:
    return str(stage_directory(Settings.read({"warehouse": warehouse, "spark": {"master": master}}, home), "id"))


def test_executors_of_a_cluster_reach_what_is_staged(tmp_path: Path) -> None:
    for warehouse in ("hdfs://name:8020/lake", "s3a://lake", "/shared/lake"):
        assert staged(tmp_path, warehouse).startswith(f"{warehouse}/_pubsub_stage/id-")
    assert staged(tmp_path, "abfss://c@a/lake", "local[2]").startswith(str(tmp_path))


def test_a_warehouse_that_the_daemon_does_not_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FeatureNotSupported, match="S3 or HDFS, or in a directory that its executors share"):
        staged(tmp_path, "abfss://c@a/lake")
