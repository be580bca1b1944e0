"""Run our decoder like `python -m walsender decode`, and measure it from when the catalogs have been read.

    python -m bench.decoder CONNINFO WAL_DIRECTORY PUBLICATION START END

It runs in its own process, so that the memory measured is the decoder's and not the benchmark's.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from walsender.decoding import DecodeRequest, Session
from walsender.plugin_request import PluginRequest


async def _decode(conninfo: str, wal: str, publication: str, start: int, end: int) -> dict[str, Any]:
    options = {"proto_version": "1", "publication_names": publication}
    with tempfile.TemporaryDirectory() as spill:
        request = DecodeRequest(conninfo, PluginRequest("pgoutput", options, start), Path(spill), end, Path(wal))
        session = await Session.open(request, lambda lsn, xid, data: None, lambda lsn: None)
        gc.freeze()
        began, cpu = time.monotonic(), time.process_time()
        await session.run()
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        await session.close()
    return {"seconds": seconds, "cpu": cpu, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


if __name__ == "__main__":
    conninfo, wal, publication, start, end = sys.argv[1:]
    print(json.dumps(asyncio.run(_decode(conninfo, wal, publication, int(start), int(end)))))
