"""What the daemon and its worker processes tell each other (pubsub/forks/channel.py).

    daemon ──► T  Task       what to run: the first message
               J  Answer     where the JVM is, or why there is none
               W             the catalog has changed
               R  Settings   the settings have changed in place
               S             drain, and end
    daemon ◄── J             where is the JVM?
               F  Told       figures, once a second
               E  event      of the log: method, text, fields
               X  error      why the process ends

Contents are pickled: both ends are the same program, and nobody else has the socket.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Final

from apply.worker_statistics import Figures
from launcher.share import Share
from pubsub.delta.spark.jvm_address import JvmAddress
from pubsub.settings import Settings

TASK: Final = b"T"
JVM: Final = b"J"
WAKE: Final = b"W"
RELOAD: Final = b"R"
STOP: Final = b"S"
FIGURES: Final = b"F"
EVENT: Final = b"E"
FAILURE: Final = b"X"

DELETING_LOCK: Final = "deleting.lock"
"""The file, in the node's directory, by which processes take turns (pubsub/delta/log/transactions.py: DELETING)."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a process runs.  `epoch`: the daemon's, in the catalog; `level`: of the events that it tells of."""

    settings: Settings
    share: Share
    epoch: int | None
    level: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to JVM: an address, or an error's fields."""

    address: JvmAddress | None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """The figures of the apply workers that run, by subscription's oid, and what the process has `spent` (processor_time)."""

    figures: dict[int, Figures]
    spent: dict[str, float]


def packed(what: Any) -> bytes:
    """Return a message's contents."""
    return pickle.dumps(what)


def unpacked(contents: bytes) -> Any:
    """Return what a message's contents say."""
    return pickle.loads(contents)  # noqa: S301
