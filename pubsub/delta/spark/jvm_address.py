"""Where a node's JVM listens, for the processes that share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pubsub.delta.spark.spark_session import Spark


@dataclass(frozen=True, slots=True)
class JvmAddress:
    """Where a JVM listens, with the secret that it asks for, and its process id."""

    port: int
    secret: str
    pid: int

    @classmethod
    def of(cls, spark: Spark) -> JvmAddress:
        """Return that of a node's JVM, which is started if need be.  Blocks; raises as Spark.running does."""
        gateway: Any = spark.running()._sc._gateway
        pid = spark.jvm_pid
        assert pid is not None
        return cls(gateway.java_parameters.port, gateway.java_parameters.auth_token, pid)
