"""Give a Delta table a name in one of Spark's catalogs, and take it away.  Blocks.

A name is an external table of the catalog: it has the place of the Delta table and nothing else, and the catalog deletes no file
with it.  What is there is looked at through Spark's own interface of catalogs, which does not read the Delta table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import AnalysisException

from pubsub import faults
from pubsub.errors import DuplicateObject, FeatureNotSupported
from pubsub.sql.identifiers import quote_for_spark
from pubsub.sql.layouts import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DELTA: Final = "org.apache.spark.sql.delta.catalog.DeltaTableV2"
_EXTERNAL: Final = "EXTERNAL"


def register(session: SparkSession, path: str, name: TableName) -> bool:
    """Give the Delta table at `path` the name; return whether it did not have it.

    The schema is made if it is missing.  Raises DuplicateObject if the name is another table's, and what Spark raises.
    """
    catalog, place = _found(session, name)
    if catalog.tableExists(place):
        other = _path_of(catalog, place)
        if other == _qualified(session, path):
            return False
        raise DuplicateObject(
            f'"{name}" is another table',
            detail="It is not a Delta table." if other is None else f"It lies at {other}.",
            hint="Drop it, or choose another name in the subscription option register.",
        )
    if not catalog.namespaceExists(place.namespace()):
        session.sql(f"CREATE SCHEMA IF NOT EXISTS {_sql(name[:2])}")
    session.sql(f"CREATE TABLE {_sql(name)} USING delta LOCATION {_literal(path)}")
    faults.point("table registered")
    return True


def forget(session: SparkSession, path: str, name: TableName) -> bool:
    """Take the name away from the Delta table at `path`, of which no file is touched; return whether it had it.

    Raises FeatureNotSupported if the catalog would delete the table's files, and what Spark raises.
    """
    catalog, place = _found(session, name)
    if not catalog.tableExists(place) or _path_of(catalog, place) != _qualified(session, path):
        return False
    kind = _kind_of(catalog, place)
    if kind != _EXTERNAL:
        raise FeatureNotSupported(
            f'"{name}" is not dropped: the catalog would delete its files',
            detail=f"It is a table of type {kind}.",
        )
    session.sql(f"DROP TABLE {_sql(name)}")
    return True


def _found(session: SparkSession, name: TableName) -> tuple[Any, Any]:
    """Return Spark's catalog, and the table's identifier in it."""
    jvm: Any = session._jvm
    # What is called without SQL reads the settings of the session that is active in its thread: without one Spark does not see that
    # Delta's catalog is in place of its own, and a table comes without its entry in the catalog, which says of which type it is.
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(session._jsparkSession)
    namespace = session._sc._gateway.new_array(jvm.java.lang.String, 1)  # type: ignore[union-attr]
    namespace[0] = name.schema
    catalog = session._jsparkSession.sessionState().catalogManager().catalog(name.catalog)
    return catalog, jvm.org.apache.spark.sql.connector.catalog.Identifier.of(namespace, name.table)


def _path_of(catalog: Any, place: Any) -> str | None:
    """Return where a table lies; None: it is no Delta table, or a view."""
    try:
        table = catalog.loadTable(place)
    except AnalysisException:  # a view
        return None
    return str(table.path().toString()) if table.getClass().getName() == _DELTA else None


def _kind_of(catalog: Any, place: Any) -> str:
    known = catalog.loadTable(place).catalogTable()
    return str(known.get().tableType().name()) if known.isDefined() else "unknown"


def _qualified(session: SparkSession, path: str) -> str:
    """Return a path as catalogs have it."""
    jvm: Any = session._jvm
    found = jvm.org.apache.hadoop.fs.Path(path)
    return str(
        found.getFileSystem(session._jsparkSession.sessionState().newHadoopConf()).makeQualified(found).toString()
    )


def _sql(names: Iterable[str]) -> str:
    return ".".join(map(quote_for_spark, names))


def _literal(text: str) -> str:
    """Return a string of Spark's SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
