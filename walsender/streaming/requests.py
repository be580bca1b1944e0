"""What the server and a decoding process tell each other (channel.py): kinds of messages, and their contents.

To the process      C  Task            once, first
                    T  tip (8)         the WAL in the spool goes up to here
                    S  StreamRequest   begin a stream; its socket comes with it
                    E  number (8)      end a stream
                    N  LSN (8)         nothing needs what is older
                    L  LSN (8)         streams of failover slots are sent no WAL from after it; UNLIMITED: they are
                    X  [number, texts, timeout]
                                       a stream's settings from now on, as in StreamRequest
                    U  status (4 × 8)  the answer to a Q: number, LSN, oldest and next transaction
                    B                  the answer to F: nothing comes any more
From the process    P  [[number, sent, written, flushed, applied, replied_at, confirmed, restart, counted], …]
                                        `counted`: the stream's statistics, in the order of Statistics
                    D  StreamEnd       the stream has ended, and its socket is the server's again
                    W  Warning         a plugin's warning for a stream
                    Q  number (8)      a stream's client asks for the primary's status
                    F  error           the process ends because of this, when it has had the answer

All contents but numbers are JSON.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from struct import Struct
from typing import Any, Final, Self

from pubsub.protocol.output.styles import Styles, TimeZone
from walsender.historic.upstream import SessionTexts

TASK: Final = b"C"
TIP: Final = b"T"
START: Final = b"S"
END: Final = b"E"
NEEDED: Final = b"N"
LIMIT: Final = b"L"
SETTINGS: Final = b"X"
BYE: Final = b"B"
POSITIONS: Final = b"P"
DONE: Final = b"D"
WARNING: Final = b"W"
STATUS_REQUEST: Final = b"Q"
PRIMARY_STATUS: Final = b"U"
FAILURE: Final = b"F"

NUMBER: Final = Struct(">Q")
STATUS: Final = Struct(">QQQQ")
UNLIMITED: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Task:
    """What a process is to do.

    `conninfo`: the upstream server's, of any database; `database`: the oid of the one to decode.
    `spool`, `states`, `spill`: directories.  `tip`: where the WAL ends; `redo`: the redo position of a checkpoint, from which a
    slot of the database can begin; `system_identifier`: the upstream server's; `answer_timeout`: seconds that it may take for an
    answer; 0: for ever.
    """

    conninfo: str
    database: int
    spool: str
    states: str
    spill: str
    segment_size: int
    system_identifier: int
    work_mem: int
    tip: int
    redo: int
    answer_timeout: float

    def write(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, data: bytes) -> Self:
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A stream that is to begin: LSNs as PluginRequest has them.

    `restart`: a list of running transactions from which everything from `start` on is seen whole; `redo`: the redo position of a
    checkpoint before it.  `timeout`: wal_sender_timeout in seconds.  `failover`: the slot's.
    `received`: what the client has sent already.
    """

    number: int
    plugin: str
    options: dict[str, str]
    start: int
    restart: int
    redo: int
    two_phase_at: int | None
    client_encoding: str
    texts: SessionTexts
    timeout: float
    failover: bool = False
    received: bytes = b""

    def write(self) -> bytes:
        return json.dumps({**asdict(self), "received": b64encode(self.received).decode()}).encode()

    @classmethod
    def read(cls, data: bytes) -> Self:
        fields = json.loads(data)
        fields["texts"] = texts_of(fields["texts"])
        fields["received"] = b64decode(fields["received"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a stream has ended (subscriber.py); `rest`: what the client has sent that was not looked at."""

    number: int
    how: str
    error: dict[str, Any] | None
    rest: bytes

    def write(self) -> bytes:
        return json.dumps({**asdict(self), "rest": b64encode(self.rest).decode()}).encode()

    @classmethod
    def read(cls, data: bytes) -> Self:
        fields = json.loads(data)
        fields["rest"] = b64decode(fields["rest"])
        return cls(**fields)


def texts_of(fields: dict[str, Any]) -> SessionTexts:
    styles = fields["styles"]
    zone: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in styles["zone"].items()
    }
    return SessionTexts(
        Styles(**{**styles, "zone": TimeZone(**zone)}),
        fields["quote_all"],
        tuple(fields["path"]),
        fields["dollars"],
    )
