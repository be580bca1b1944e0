"""The publisher's tools: `python -m walsender decode …`.

Standard output (or --output) has what the plugin writes: of pgoutput each message with its LSN (8 bytes) and its length (4
bytes) before it, big-endian, the LSN being 0 where a walsender leaves it out; of test_decoding lines of LSN, xid and data with
tabs between.  Standard error has `consistent point LSN`, errors as psql prints them, and at SIGUSR1 `position LSN`: all up to
there is decoded and written.
Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import os
import re
import signal
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import BinaryIO, Final, Self

from pubsub.errors import PubsubError
from pubsub.protocol.commands import join_identifiers
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.directories import SpillDirectory
from pubsub.reorderbuffer.files import FileFailure
from walsender.session import WORK_MEM, DecodeRequest, Session

_SPILL: Final = "walsender-spill-"
_HEADER: Final = Struct(">QI")
_PUBLICATION: Final = re.compile(r'(?:"((?:[^"]|"")+)"|([^",][^,]*)),')
_UNITS: Final = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "b": 1}


class OutputFailure(PubsubError):
    """What was decoded could not be written."""

    default_sqlstate = "58030"

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(f"{what}: {error.strerror}", sqlstate="53100" if error.errno == errno.ENOSPC else None)
        self.nobody_reads = error.errno == errno.EPIPE


class Output:
    """Messages in the form of the command's output, in the file `path` or on standard output.

    A context manager.  A file that is there is emptied by `begin`, no sooner.  All raise OutputFailure.
    """

    def __init__(self, path: Path | None, plugin: str) -> None:
        self._name = "standard output" if path is None else f'file "{path}"'
        self.write = self._framed if plugin == "pgoutput" else self._line
        try:
            if path is None and sys.stdout is None:
                # It was closed: the descriptor may be another file's by now.
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._file: BinaryIO = open(1, "wb", closefd=False) if path is None else path.open("ab")  # noqa: SIM115
        except OSError as error:
            raise OutputFailure(f"could not open {self._name}", error) from error
        self._empties = path is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as failure:
            # What could not be written is told once.
            if not isinstance(error, OutputFailure):
                raise self._failure(failure) from failure

    def begin(self) -> None:
        """There will be something to write."""
        if self._empties and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.truncate(0)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise self._failure(error) from error

    def _framed(self, lsn: int, xid: int, data: bytes) -> None:
        try:
            self._file.write(_HEADER.pack(lsn, len(data)) + data)
        except OSError as error:
            raise self._failure(error) from error

    def _line(self, lsn: int, xid: int, data: bytes) -> None:
        # A text ends at a NUL, where a logical message brought one.
        try:
            self._file.write(b"%s\t%d\t%s\n" % (str(Lsn(lsn)).encode(), xid, data.partition(b"\0")[0]))
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> OutputFailure:
        return OutputFailure(f"could not write to {self._name}", error)


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
        if not isinstance(error, OutputFailure) or not error.nobody_reads:
            print(error.report(), file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130


async def _decode(request: DecodeRequest, output: Path | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with Output(output, request.plugin) as written:
        work = asyncio.create_task(_run(request, written))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        stopped.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    return 0


async def _run(request: DecodeRequest, written: Output) -> None:
    def consistent(lsn: int) -> None:
        print(f"consistent point {Lsn(lsn)}", file=sys.stderr, flush=True)

    session = await Session.open(request, written.write, consistent)
    # The catalogs stay for as long as the process: the garbage collector need not go through them again and again.
    gc.freeze()
    written.begin()

    def tell() -> None:
        # What can not be written stays in the buffer, and fails again where the decoding writes next.
        with contextlib.suppress(OutputFailure):
            written.flush()
            print(f"position {Lsn(session.reader.position)}", file=sys.stderr, flush=True)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    try:
        await session.run(idle=written.flush)
    finally:
        await session.close()


def _request(parsed: argparse.Namespace, spill: Path) -> DecodeRequest:
    given = [
        (name, value if equals else "on") for name, equals, value in (text.partition("=") for text in parsed.option)
    ]
    options: dict[str, str] = {}
    if parsed.plugin == "pgoutput":
        names = {name for name, _ in given}
        if parsed.publication is not None:
            options["publication_names"] = join_identifiers(_publications(parsed.publication))
        elif "publication_names" not in names:
            raise PubsubError("pgoutput needs --publication", sqlstate="42601")
        if parsed.proto_version is not None or "proto_version" not in names:
            options["proto_version"] = str(1 if parsed.proto_version is None else parsed.proto_version)
    for name, value in given:
        if name in options and parsed.plugin == "pgoutput":
            raise PubsubError("conflicting or redundant options", sqlstate="42601")
        options[name] = value
    start = int(Lsn.parse(parsed.start)) if parsed.start else 0
    end = int(Lsn.parse(parsed.end)) if parsed.end else 0
    if end and end < start:
        raise PubsubError(f"the end {Lsn(end)} lies before the start {Lsn(start)}", sqlstate="22023")
    return DecodeRequest(
        parsed.conninfo,
        parsed.plugin,
        options,
        spill,
        start,
        end,
        parsed.wal,
        parsed.slot,
        _size(parsed.work_mem),
    )


def _publications(text: str) -> list[str]:
    """Names with commas between, as they are; one in double quotes may hold commas, and quotes doubled."""
    found: list[str] = []
    rest = text + ","
    while rest:
        match = _PUBLICATION.match(rest)
        if match is None:
            raise PubsubError(f'invalid list of publications: "{text}"', sqlstate="42602")
        quoted, plain = match.groups()
        found.append(plain if quoted is None else quoted.replace('""', '"'))
        rest = rest[match.end() :]
    return found


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
    decode.add_argument(
        "--publication", metavar="P[,Q]", help="publications, for pgoutput; in double quotes one that has a comma"
    )
    decode.add_argument("--plugin", choices=("pgoutput", "test_decoding"), default="pgoutput")
    decode.add_argument("--proto-version", type=int, metavar="N", help="pgoutput's, 1 to 4; 1 if not given")
    decode.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the plugin")
    decode.add_argument("--start", metavar="LSN", help="leave out what was committed before")
    decode.add_argument("--end", metavar="LSN", help="stop there; else the WAL is followed")
    decode.add_argument("--work-mem", default=f"{WORK_MEM >> 10}kB", metavar="SIZE", help="logical_decoding_work_mem")
    decode.add_argument("--output", type=Path, metavar="FILE", help="standard output if not given")
    return parser
