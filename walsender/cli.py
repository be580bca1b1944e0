"""The publisher's tools: `python -m walsender decode …`.

Standard output (or --output) has what the plugin writes: of pgoutput each message with its LSN (8 bytes) and its length (4
bytes) before it, big-endian; of test_decoding lines of LSN, xid and data with tabs between.  Standard error has
`consistent point LSN`, errors as psql prints them, and at SIGUSR1 `position LSN`: all up to there is decoded and written.
Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import BinaryIO, Final

from pubsub.errors import PubsubError
from pubsub.protocol.commands import join_identifiers
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.directories import SpillDirectory
from pubsub.reorderbuffer.files import FileFailure
from walsender.session import WORK_MEM, DecodeRequest, Session

_SPILL: Final = "walsender-spill-"
_HEADER: Final = Struct(">QI")
_UNITS: Final = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "b": 1}


class Output:
    """Messages in the form of the command's output."""

    def __init__(self, file: BinaryIO, plugin: str) -> None:
        self._file = file
        self.write = self._framed if plugin == "pgoutput" else self._line

    def _framed(self, lsn: int, xid: int, data: bytes) -> None:
        self._file.write(_HEADER.pack(lsn, len(data)) + data)

    def _line(self, lsn: int, xid: int, data: bytes) -> None:
        # A text ends at a NUL, where a logical message brought one.
        self._file.write(b"%s\t%d\t%s\n" % (str(Lsn(lsn)).encode(), xid, data.partition(b"\0")[0]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        with SpillDirectory.within(Path(tempfile.gettempdir()), _SPILL) as spill:
            return _decoded(parsed, spill.path)
    except FileFailure as error:
        print(error.report(), file=sys.stderr)
        return 1


def _decoded(parsed: argparse.Namespace, spill: Path) -> int:
    try:
        request = _request(parsed, spill)
    except PubsubError as error:
        print(error.report(), file=sys.stderr)
        return 2
    try:
        return asyncio.run(_decode(request, parsed.output))
    except PubsubError as error:
        print(error.report(), file=sys.stderr, flush=True)
        return 1
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130


async def _decode(request: DecodeRequest, output: Path | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(output.open("wb")) if output is not None else sys.stdout.buffer
        work = asyncio.create_task(_run(request, file))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        stopped.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await work
        finally:
            file.flush()
    return 0


async def _run(request: DecodeRequest, file: BinaryIO) -> None:
    written = Output(file, request.plugin)

    def consistent(lsn: int) -> None:
        print(f"consistent point {Lsn(lsn)}", file=sys.stderr, flush=True)

    session = await Session.open(request, written.write, consistent)
    # The catalogs stay for as long as the process: the garbage collector need not go through them again and again.
    gc.freeze()

    def tell() -> None:
        file.flush()
        print(f"position {Lsn(session.reader.position)}", file=sys.stderr, flush=True)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    try:
        await session.run(idle=file.flush)
    finally:
        await session.close()


def _request(parsed: argparse.Namespace, spill: Path) -> DecodeRequest:
    options: dict[str, str] = {}
    if parsed.plugin == "pgoutput":
        options["proto_version"] = str(parsed.proto_version)
        if parsed.publication is None:
            raise PubsubError("pgoutput needs --publication", sqlstate="42601")
        options["publication_names"] = join_identifiers(parsed.publication.split(","))
    for text in parsed.option:
        name, equals, value = text.partition("=")
        options[name] = value if equals else "on"
    return DecodeRequest(
        parsed.conninfo,
        parsed.plugin,
        options,
        spill,
        int(Lsn.parse(parsed.start)) if parsed.start else 0,
        int(Lsn.parse(parsed.end)) if parsed.end else 0,
        parsed.wal,
        parsed.slot,
        _size(parsed.work_mem),
    )


def _size(text: str) -> int:
    """Bytes of a size as settings have it: kilobytes where there is no unit."""
    found = re.fullmatch(r"\s*(\d+)\s*(\w*)\s*", text.lower())
    if found is None or (found[2] and found[2] not in _UNITS):
        raise PubsubError(f'invalid value for parameter "logical_decoding_work_mem": "{text}"', sqlstate="22023")
    return int(found[1]) * _UNITS.get(found[2], 1 << 10)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m walsender", description="PostgreSQL's walsender, outside the server."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    decode = commands.add_parser("decode", help="decode a server's WAL, without a logical slot on it")
    decode.add_argument("--conninfo", required=True, help="the server and the database (libpq's connection string)")
    decode.add_argument(
        "--wal", type=Path, metavar="DIR", help="a directory of WAL segments, read before the server is asked"
    )
    decode.add_argument("--slot", help="a physical slot that keeps the WAL")
    decode.add_argument("--publication", metavar="P[,Q]", help="publications, for pgoutput")
    decode.add_argument("--plugin", choices=("pgoutput", "test_decoding"), default="pgoutput")
    decode.add_argument("--proto-version", type=int, default=1)
    decode.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the plugin")
    decode.add_argument("--start", metavar="LSN", help="leave out what was committed before")
    decode.add_argument("--end", metavar="LSN", help="stop there; else the WAL is followed")
    decode.add_argument("--work-mem", default=f"{WORK_MEM >> 10}kB", metavar="SIZE", help="logical_decoding_work_mem")
    decode.add_argument("--output", type=Path, metavar="FILE", help="standard output if not given")
    return parser
