"""Receive a slot's frames like the apply worker, and drop them; the counterpart of pg_recvlogical.

    python -m bench.receive CONNINFO SLOT PUBLICATION END_LSN

Prints JSON: {"frames", "bytes", "seconds"}; the seconds run from connecting to the frame that reaches END_LSN.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from typing import Final

from pubsub.protocol import commands
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.publisher import replication
from pubsub.publisher.connection import Connection

_STATUS_SECONDS: Final = 10.0
_POSITIONS: Final = struct.Struct(">xQQ")


async def receive(conninfo: str, slot: str, publication: str, end: Lsn) -> dict[str, float]:
    """Receive until the publisher has sent everything up to `end`."""
    began = reported = time.monotonic()
    frames = size = 0
    async with await Connection.connect(conninfo, replication=True) as connection:
        options = commands.pgoutput_options(connection.server_version, [publication])
        stream = await replication.start(connection, slot, INVALID_LSN, options)
        position = 0
        while position < end:
            received = await stream.receive()
            frames += len(received)
            size += sum(map(len, received))
            last = received[-1]
            # A keepalive has only one position; its second field is a time.
            position = max(_POSITIONS.unpack_from(last)) if last[0] == ord("w") else struct.unpack_from(">xQ", last)[0]
            if time.monotonic() - reported > _STATUS_SECONDS:
                reported = time.monotonic()
                await stream.send_status(position, position, position)
        seconds = time.monotonic() - began
        await stream.close()
    return {"frames": frames, "bytes": size, "seconds": seconds}


def main(arguments: list[str]) -> int:
    conninfo, slot, publication, end = arguments
    print(json.dumps(asyncio.run(receive(conninfo, slot, publication, Lsn.parse(end)))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
