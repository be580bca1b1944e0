"""The publisher's tools: `python -m walsender decode …`.

Standard output (or --output) gets the plugin's messages (outputfile.py).  Standard error gets `consistent point LSN`, errors as
psql prints them, and at SIGUSR1 `position LSN`: everything up to it is decoded and written.  SIGINT, SIGTERM and SIGHUP end the
command after the message that is being written; a second signal, or a timeout, ends it even if nobody reads the output.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 the output was not read to its end.
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
from dataclasses import replace
from pathlib import Path
from typing import Final

from pubsub.errors import PubsubError, UndefinedFile
from pubsub.parameters import Parameter
from pubsub.protocol.commands import join_identifiers
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.directories import SpillDirectory
from pubsub.reorderbuffer.files import DiskFull
from walsender.confirmation import Confirmations
from walsender.decoding import WORK_MEM, DecodeRequest, Session
from walsender.interruption import Interruption
from walsender.outputfile import Output, OutputFailure
from walsender.plugin_request import PluginRequest
from walsender.plugins import registered
from walsender.source.stream import RECEIVER_TIMEOUT

_STANDARD_INPUT: Final = Path("-")
_STANDARD_INPUT_NUMBER: Final = 0
_STANDARD_OUTPUT: Final = Path("-")
_RECEIVER_TIMEOUT: Final = Parameter("wal_receiver_timeout", "ms", 0)
_RESTORE_TIMEOUT: Final = Parameter("restore_timeout", "ms", 0)
_SPILL: Final = "walsender-spill-"
_PUBLICATION: Final = re.compile(r'(?:"((?:[^"]|"")+)"|([^",][^,]*)),')
_UNITS: Final = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "b": 1}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        request = _request(parsed)
        _check_output(parsed)
    except PubsubError as error:
        print(error.report(), file=sys.stderr)
        return 2
    try:
        # The output first: a signal ends the process while a FIFO waits for its reader, and must leave no directory then.
        with (
            Output(parsed.output, request.asked.plugin, as_stream=parsed.as_stream) as written,
            SpillDirectory.within(Path(tempfile.gettempdir()), _SPILL) as spill,
        ):
            try:
                asyncio.run(_decode(replace(request, spill=spill.path), written, confirms=parsed.confirm))
            except PubsubError as error:
                if not isinstance(error, OutputFailure):
                    written.done(error)
                raise
            written.done()
    except PubsubError as error:
        if isinstance(error, DiskFull):
            error.hint = "Free space on the disk, and decode again."
        if not isinstance(error, OutputFailure) or not error.nobody_reads:
            print(error.report(), file=sys.stderr, flush=True)
        return 1
    return 130 if written.given_up else 0


async def _decode(request: DecodeRequest, written: Output, *, confirms: bool) -> None:
    work = asyncio.create_task(_run(request, written, confirms=confirms))

    def end() -> None:
        written.end()
        # The loop may be closed already, while the reader has still to take the output.
        with contextlib.suppress(RuntimeError):
            work.get_loop().call_soon_threadsafe(work.cancel)

    Interruption(end, written.give_up)
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def _run(request: DecodeRequest, written: Output, *, confirms: bool) -> None:
    # There is no position yet to report; by default the signal would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def consistent(lsn: int) -> None:
        print(f"consistent point {Lsn(lsn)}", file=sys.stderr, flush=True)

    def warn(warning: PubsubError) -> bool:
        print(warning.report().replace("ERROR:", "WARNING:", 1), file=sys.stderr, flush=True)
        written.warn(warning)
        return True

    session = await Session.open(request, written.write, consistent, warn)
    # The catalogs live as long as the process, so the garbage collector need not scan them again and again.
    gc.freeze()
    written.begin()

    def tell() -> None:
        # Unwritten bytes stay in the buffer, and the decoder's next write fails again.
        with contextlib.suppress(OutputFailure):
            written.flush()
            print(f"position {Lsn(session.written)}", file=sys.stderr, flush=True)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    confirmed = Confirmations(_STANDARD_INPUT_NUMBER) if confirms else None

    def idle() -> None:
        written.keepalive(session.written, at_once=True)
        written.flush()

    def kept(position: int) -> int:
        if confirmed is not None:
            return confirmed.newest()
        written.sync()
        return position

    try:
        await session.run(idle=idle, going=lambda: written.keepalive(session.written, at_once=False), kept=kept)
    finally:
        await session.close()


def _request(parsed: argparse.Namespace) -> DecodeRequest:
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
    two_phase_at = int(Lsn.parse(parsed.two_phase_at)) if parsed.two_phase_at else None
    if end and end < start:
        raise PubsubError(f"the end {Lsn(end)} lies before the start {Lsn(start)}", sqlstate="22023")
    if parsed.confirm and parsed.slot is None:
        raise PubsubError("--confirm needs --slot", sqlstate="42601")
    if parsed.confirm and parsed.conninfo_file == _STANDARD_INPUT:
        raise PubsubError("standard input cannot be both the connection string and what is confirmed", sqlstate="42601")
    return DecodeRequest(
        _conninfo(parsed),
        PluginRequest(
            parsed.plugin, options, start, two_phase_at, missing_is_error=parsed.missing_publication == "error"
        ),
        Path(),
        end,
        parsed.wal,
        parsed.slot,
        _size(parsed.work_mem),
        restore_command=parsed.restore_command,
        restore_timeout=_RESTORE_TIMEOUT.parse(parsed.restore_timeout) * _RESTORE_TIMEOUT.factor,
        receiver_timeout=_RECEIVER_TIMEOUT.parse(parsed.wal_receiver_timeout) * _RECEIVER_TIMEOUT.factor,
        # Who reads a stream decides by the timeline whether the server may be followed.
        one_timeline=parsed.as_stream,
    )


def _conninfo(parsed: argparse.Namespace) -> str:
    if parsed.conninfo_file is None:
        return parsed.conninfo or ""
    try:
        return (
            sys.stdin.read() if parsed.conninfo_file == _STANDARD_INPUT else parsed.conninfo_file.read_text()
        ).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UndefinedFile(f'could not read file "{parsed.conninfo_file}": {error}') from error


def _check_output(parsed: argparse.Namespace) -> None:
    """Refuse to write binary output to a terminal, which would take it for commands; `--output -` insists."""
    binary = "a stream" if parsed.as_stream else "pgoutput" if parsed.plugin == "pgoutput" else None
    if parsed.output == _STANDARD_OUTPUT:
        parsed.output = None
    elif binary is not None and parsed.output is None and sys.stdout is not None and sys.stdout.isatty():
        raise PubsubError(
            f"{binary} is binary, and is not written to a terminal",
            sqlstate="22023",
            hint="Use --output FILE or a pipe; --output - for the terminal nevertheless; --plugin test_decoding for text.",
        )


def _publications(text: str) -> list[str]:
    """Split names at commas.  Names keep their case; one in double quotes may contain commas, and quotes doubled."""
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
    """Parse a size as in settings, in kilobytes if it has no unit; return bytes."""
    found = re.fullmatch(r"\s*(\d+)\s*(\w*)\s*", text.lower())
    if found is None or (found[2] and found[2] not in _UNITS):
        raise PubsubError(
            f'invalid value for parameter "logical_decoding_work_mem": "{text}"',
            sqlstate="22023",
            hint='Valid units for this parameter are "B", "kB", "MB", and "GB".',
        )
    return int(found[1]) * _UNITS.get(found[2], 1 << 10)


_DECODE_HELP: Final = """\
output:
  pgoutput       binary.  Each message has 12 bytes before it, big-endian: 8 of its LSN (0 where a walsender leaves it
                 out), 4 of its length; then the message itself.  It is not written to a terminal unless --output is -.
  test_decoding  text.  Each message is a line: LSN, transaction id and text, with tabs between.
  --as-stream    either, as a walsender sends it in copy-both mode: CopyData messages of XLogData, and of keepalives, which say
                 how far decoding is; a NoticeResponse for a warning; at the end CopyDone or an ErrorResponse.

server:
  Without --conninfo and --conninfo-file libpq's environment says which: PGSERVICE, PGHOST, PGDATABASE, PGPASSFILE and so on.  Every
  user of the machine can read a command's arguments, so a password belongs into a file or the environment.

slot:
  A physical --slot keeps the WAL from which decoding can begin again.  It moves on when the output is durable in its file.
  What went into a pipe counts as kept, unless --confirm says otherwise: its reader then writes the LSN with which it would
  --start again, and may lose all that it has not confirmed.

start:
  Without --start decoding begins at the first consistent point from now on; standard error says "consistent point LSN".
  With --start it begins there, from a checkpoint before it; the server, --wal or a physical --slot must have the WAL.
  Whoever goes on with a stream of prepared transactions says in --two-phase-at where it had begun: at the consistent point or
  the --start of the first command.

end:
  Without --end the WAL is followed until SIGINT, SIGTERM or SIGHUP.  With --end it ends by itself, exit code 0.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m walsender", description="PostgreSQL's walsender, outside the server."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    decode = commands.add_parser(
        "decode",
        help="decode a server's WAL, without a logical slot on it",
        description="Decode a server's WAL, without a logical slot on it.",
        epilog=_DECODE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = decode.add_mutually_exclusive_group()
    server.add_argument(
        "--conninfo", help="the server and the database (libpq's connection string, in which service=NAME is one, too)"
    )
    server.add_argument(
        "--conninfo-file",
        type=Path,
        metavar="FILE",
        help="a file that holds the connection string; - is standard input",
    )
    archive = decode.add_mutually_exclusive_group()
    archive.add_argument(
        "--wal", type=Path, metavar="DIR", help="a directory of WAL segments, read before the server is asked"
    )
    archive.add_argument(
        "--restore-command",
        metavar="COMMAND",
        help="a command of the shell that fetches segments instead, with %%f and %%p as PostgreSQL's restore_command",
    )
    decode.add_argument(
        "--restore-timeout",
        default="10min",
        metavar="TIME",
        help="how long it may take for a file; milliseconds without a unit; 0: for ever",
    )
    decode.add_argument("--slot", help="a physical slot that keeps the WAL")
    decode.add_argument(
        "--confirm",
        action="store_true",
        help="the slot moves no further than standard input says: an LSN a line, up to which the output's reader keeps all",
    )
    decode.add_argument(
        "--wal-receiver-timeout",
        default=_RECEIVER_TIMEOUT.show(round(RECEIVER_TIMEOUT / _RECEIVER_TIMEOUT.factor)),
        metavar="TIME",
        help="a server that is silent for so long is taken for lost, and connected to anew; milliseconds without a unit; 0: never",
    )
    decode.add_argument(
        "--publication", metavar="P[,Q]", help="publications, for pgoutput; in double quotes one that has a comma"
    )
    decode.add_argument(
        "--missing-publication",
        choices=("error", "server"),
        default="error",
        help="a publication that is not there: an error, before anything is written where it is known; or what the server's own "
        "release does (15 to 17: an error at the first change; 18: a warning, and it is left out)",
    )
    decode.add_argument("--plugin", choices=registered.names(), default="pgoutput")
    decode.add_argument("--proto-version", type=int, metavar="N", help="pgoutput's, 1 to 4; 1 if not given")
    decode.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the plugin")
    decode.add_argument(
        "--start", metavar="LSN", help="where to begin: what was committed before is left out; now if not given"
    )
    decode.add_argument(
        "--two-phase-at",
        metavar="LSN",
        help="send transactions at their PREPARE, as from this LSN on before: those that were prepared between it and --start are "
        "not sent again with their COMMIT PREPARED; --start if not given",
    )
    decode.add_argument(
        "--end",
        metavar="LSN",
        help="where to stop; the WAL is followed for ever if not given",
    )
    decode.add_argument("--work-mem", default=f"{WORK_MEM >> 10}kB", metavar="SIZE", help="logical_decoding_work_mem")
    decode.add_argument(
        "--as-stream", action="store_true", help="write what a walsender would send, keepalives and the error among it"
    )
    decode.add_argument("--output", type=Path, metavar="FILE", help="standard output if not given, or -")
    return parser
