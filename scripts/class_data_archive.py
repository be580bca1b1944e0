"""Makes the class-data-sharing archive that lets Spark's JVM start some three seconds sooner.

A JVM, started as the daemon starts it, does what a subscription does first (creates a Delta table, appends, replaces,
merges, reads) and writes the classes that it loaded to a file when it ends.  The daemon's JVM maps that file
(pubsub/jars.py).  The archive is a convenience: a failure here is reported and changes nothing else.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from pubsub import jars
from pubsub.delta.spark.jvm_transactions import DeltaTransactions
from pubsub.delta.spark.spark_session import Spark
from pubsub.delta.spark.warm_up import warm_up


def exercise(session: Any, table: Path) -> None:
    """Do with Spark what a subscription does in its first minute."""
    path = str(table)
    rows = session.range(1000).selectExpr(
        "id", "cast(id as string) t", "cast(id as decimal(12,2)) n", "current_timestamp() ts"
    )
    session.sql(
        f"CREATE TABLE delta.`{path}` (id BIGINT NOT NULL, t STRING, n DECIMAL(12,2), ts TIMESTAMP) USING delta "
        "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
    )
    staged = str(table.with_suffix(".parquet"))
    rows.write.parquet(staged)
    source = session.read.parquet(staged)
    source.write.format("delta").mode("append").option("txnAppId", "a").option("txnVersion", "1").save(path)
    source.where("id < 10").createOrReplaceTempView("changed")
    (
        source.where("id < 5")
        .alias("s")
        .write.format("delta")
        .mode("overwrite")
        .option("replaceOn", "target.`id` IN (SELECT `id` FROM changed)")
        .option("targetAlias", "target")
        .option("txnAppId", "a")
        .option("txnVersion", "2")
        .save(path)
    )
    session.sql(f"MERGE INTO delta.`{path}` target USING changed ON target.id = changed.id WHEN MATCHED THEN DELETE")
    session.read.format("delta").load(path).selectExpr("count(*)", "max(t)").collect()
    transactions = DeltaTransactions(session)
    warm_up(transactions, table.parent)
    transactions.checkpoint(path)


def main() -> int:
    archive = jars.cds_archive_path()
    if archive is None:
        print("No Java: no archive of its classes.", file=sys.stderr)
        return 1
    if archive.is_file():
        return 0
    for stale in archive.parent.glob("classes-*.jsa"):
        stale.unlink()
    scratch = Path(tempfile.mkdtemp(prefix="pubsub-classes-"))
    made = archive.with_name(f".{archive.name}.new")
    try:
        spark = Spark(
            scratch, conf={"spark.driver.extraJavaOptions": f"-XX:ArchiveClassesAtExit={made} -XX:TieredStopAtLevel=1"}
        )
        spark.running()
        try:
            exercise(spark.session, scratch / "table")
        except Exception as error:  # a Spark error takes its text from the JVM, so read it while the JVM runs
            raise RuntimeError(str(error)) from error
        finally:
            spark.stop(timeout=120)
        made.replace(archive)
    except Exception as error:  # a convenience: Spark starts without it
        print(
            f"No archive of Java's classes ({type(error).__name__}: {error}); Spark starts a little slower.",
            file=sys.stderr,
        )
        return 1
    finally:
        made.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
