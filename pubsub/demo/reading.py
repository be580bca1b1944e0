"""How to read the tables: scripts to paste into a shell, all run by the tests."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from pubsub import jars


def ways(path: Path, query: str) -> list[str]:
    """Return a paragraph for each way to read the table at `path`; `query` calls it t."""
    return [
        "To read them, paste one of these into a shell.  Python (deltalake):\n" + with_python(path, query),
        "DuckDB:\n" + with_duckdb(path, query),
        "Spark:\n" + with_spark(path, query),
    ]


def with_python(path: Path, query: str) -> str:
    """Return a script for deltalake's reader, without a JVM and without this project.  `query` calls the table t."""
    return _script(
        "from deltalake import DeltaTable, QueryBuilder",
        f't = QueryBuilder().register("t", DeltaTable({_text(path)}))',
        f"rows = t.execute({query!r}).read_all()",
        'print(*rows.to_struct_array().to_pylist(), sep="\\n")',
    )


def with_duckdb(path: Path, query: str) -> str:
    """Return a script for DuckDB over deltalake's stream of Arrow batches.  `query` calls the table t."""
    return _script(
        "import duckdb, pyarrow",
        "from deltalake import DeltaTable, QueryBuilder",
        f't = QueryBuilder().register("t", DeltaTable({_text(path)})).execute("SELECT * FROM t")',
        "t = pyarrow.RecordBatchReader.from_stream(t)",
        f"print(duckdb.sql({query!r}))",
    )


def with_spark(path: Path, query: str) -> str:
    """Return a script for Spark with the jars that set-up fetched.  `query` calls the table t."""
    classes = os.pathsep.join(_shown(each) for each in jars.class_path())
    return _script(
        "from pyspark.sql import SparkSession",
        "spark = (SparkSession.builder",
        f"    .config('spark.driver.extraClassPath', {classes!r})",
        "    .config('spark.sql.extensions', 'io.delta.sql.DeltaSparkSessionExtension')",
        "    .config('spark.sql.catalog.spark_catalog', 'org.apache.spark.sql.delta.catalog.DeltaCatalog')",
        "    .getOrCreate())",
        f"t = spark.read.format('delta').load({_text(path)})",
        "t.createOrReplaceTempView('t')",
        f"spark.sql({query!r}).show()",
    )


def _script(*lines: str) -> str:
    return "\n".join([f"{shlex.quote(_shown(Path(sys.executable)))} - <<'END'", *lines, "END"])


def _text(path: Path) -> str:
    return repr(_shown(path))


def _shown(path: Path) -> str:
    """Return a path relative to the current directory if it is inside it.

    Not resolved, because a virtual environment's python is a link.
    """
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
