"""A source of Spark's for the changes that a history keeps (docs/spark-source.md): `spark.readStream.format("pubsub")`.

    spark.dataSource.register(PubsubSource)

The methods of a source run in Python processes that Spark starts: those that plan on the driver's machine, `read` in the
executors.  So all that is sent to executors is importable without the catalog, which their packages need not have.
"""

from pubsub.spark_source.source import PubsubSource

__all__ = ["PubsubSource"]
