"""Send secrets to a job's tasks, and leave none in what Spark keeps of the job.

A task's closure is stored: as blocks in the memory, or on the disks, of driver and executors, and in a plan.  The local
properties of a job are sent with each of its tasks, and listed in Spark's event log, but never stored with a closure.
So the secrets are divided, anew for each job:

    closure     random bytes, as many as the secrets have
    property    the secrets, XORed with those

Each half alone says nothing but the length (a one-time pad).  Who reads the traffic between driver and executors has
both: what may go that way is for the caller to decide.
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext


@dataclass(frozen=True, slots=True)
class TaskSecrets:
    """The half that a closure holds, and the name of the property with the other half."""

    name: str
    half: bytes

    def read(self) -> dict[str, Any]:
        """Return the secrets; call it in a task of the job that they were sent with."""
        from pyspark import TaskContext

        task = TaskContext.get()
        other = None if task is None else task.getLocalProperty(self.name)
        if other is None:
            raise RuntimeError("the job's secrets are for its own tasks")
        return dict(json.loads(_xor(self.half, bytes.fromhex(other))))


@contextmanager
def sent(context: SparkContext, values: Mapping[str, Any]) -> Iterator[TaskSecrets]:
    """Send `values`, as JSON, with the jobs that this thread starts in the body."""
    text = json.dumps(dict(values)).encode()
    half = secrets.token_bytes(len(text))
    name = f"pubsub.{uuid.uuid4()}"
    context.setLocalProperty(name, _xor(half, text).hex())
    try:
        yield TaskSecrets(name, half)
    finally:
        context.setLocalProperty(name, None)  # type: ignore[arg-type]


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
