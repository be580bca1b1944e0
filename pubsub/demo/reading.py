"""Where the tables lie and how to read them: commands to paste into a shell, each tried by the tests."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from pubsub import jars


def with_python(path: Path, query: str) -> str:
    """Python alone: deltalake's reader; no JVM, nothing of this project."""
    return _python(
        "from deltalake import DeltaTable, QueryBuilder",
        f"t = QueryBuilder().register('t', DeltaTable({_shown(path)!r}))",
        f"print(t.execute({query!r}).read_all().to_struct_array().to_pylist())",
    )


def with_duckdb(path: Path, query: str) -> str:
    """DuckDB over what deltalake reads, as Arrow."""
    return _python(
        "import duckdb, pyarrow",
        "from deltalake import DeltaTable, QueryBuilder",
        f"t = QueryBuilder().register('t', DeltaTable({_shown(path)!r})).execute('SELECT * FROM t')",
        "t = pyarrow.RecordBatchReader.from_stream(t)",
        f"print(duckdb.sql({query!r}))",
    )


def with_spark(path: Path, query: str) -> str:
    """Spark's own SQL shell; `query` names the table {t}."""
    program = Path(sys.executable).with_name("spark-sql")
    classes = os.pathsep.join(map(str, jars.class_path()))
    statement = query.format(t=f"delta.`{path.absolute()}`")
    words = [
        _relative(program),
        "--driver-class-path",
        classes,
        "--conf",
        "spark.sql.catalogImplementation=in-memory",
        "--conf",
        "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension",
        "--conf",
        "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "-e",
        statement,
    ]
    return shlex.join(words)


def _python(*lines: str) -> str:
    return shlex.join([_relative(Path(sys.executable)), "-c", "; ".join(lines)])


def _shown(path: Path) -> str:
    return _relative(path)


def _relative(path: Path) -> str:
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
