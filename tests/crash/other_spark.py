"""Another program on the Delta tables: it reads statements, JSON, a line each, and answers with an error's first line or ""."""

from __future__ import annotations

import json
import os
import sys

from tests.support.foreign_writer import session


def main() -> None:
    # VACUUM says on the JVM's standard output what it has deleted.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The tables are small; each of the usual 200 tasks takes its time on a busy machine.
    spark = session(["spark.sql.shuffle.partitions=2", "spark.databricks.delta.snapshotPartitions=2"])
    for line in sys.stdin:
        said = ""
        try:
            spark.sql(json.loads(line)).collect()
        except Exception as error:
            said = str(error).splitlines()[0]
        print(json.dumps(said), file=answers, flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
