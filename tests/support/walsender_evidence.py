"""Keeps what is needed to decode the WAL of a failed random run again, and does so.

    base      the cluster as it was before the run, shut down
    data      the cluster after it, shut down: pg_wal has all of the run's WAL
    run       the parameters of the run (`Run`)
    ours      our decoder's output; ours.errors: its standard error
    theirs    the messages of the server's walsender, in the same format; absent without a slot

    python -m tests.support.walsender_evidence DIR [--output FILE]     decodes DIR again, tells if the output is the same, and
    compares

Decoding begins where the cluster was shut down before the run: the catalogs are read from a copy of `base`, the WAL
from `data`.  Both clusters continued from that position separately, but the run's WAL begins with records that change
no catalog (`FILLER`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pubsub.protocol.lsn import Lsn
from pubsub.testing import binaries
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.walsender_compare import differences
from tests.support.walsender_decodings import HEADER, Message, as_sent, read_messages

FILLER = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 8000)) FROM generate_series(1, 50)"
"""More WAL than a server writes when it is started, read from and stopped."""


@dataclass(frozen=True)
class Run:
    """The parameters for decoding a run again; LSNs as text."""

    version: str
    kind: str
    seed: int
    arguments: tuple[str, ...]
    start: str = ""
    end: str = ""

    @property
    def pgoutput(self) -> bool:
        return "test_decoding" not in self.arguments


class Evidence:
    """The directory of one run; call `discard` if the run succeeds."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pubsub-evidence-", dir=binaries.readable_directory()))
        self.directory.chmod(0o755)
        self.data = self.directory / "data"

    def begin(self, server: EmbeddedPostgres, dbname: str) -> str:
        """Copy the cluster as it is now; return the position from which it continues."""
        server.stop()
        shutil.copytree(self.data, self.directory / "base")
        server.start()
        server.execute(FILLER, dbname)
        ((redo,),) = server.query("SELECT redo_lsn::text FROM pg_control_checkpoint()")
        return str(redo)

    def keep(self, run: Run, ours: bytes, errors: Sequence[str], theirs: Sequence[Message] | None) -> None:
        """Store the output of a failed run."""
        (self.directory / "run").write_text(json.dumps(asdict(run)))
        (self.directory / "ours").write_bytes(ours)
        (self.directory / "ours.errors").write_text("".join(errors))
        if theirs is not None:
            (self.directory / "theirs").write_bytes(
                b"".join(HEADER.pack(message.lsn, len(message.data)) + message.data for message in theirs)
            )
        print(f"kept in {self.directory}")

    def discard(self) -> None:
        shutil.rmtree(self.directory)


def decode_again(directory: Path, output: Path) -> Run:
    """Decode the run's WAL into `output`, from `directory` alone, which is not changed."""
    run = Run(**json.loads((directory / "run").read_text()))
    place = Path(tempfile.mkdtemp(prefix="pubsub-again-", dir=binaries.readable_directory()))
    place.chmod(0o755)
    try:
        data = place / "data"
        shutil.copytree(directory / "base", data)
        account = binaries.account()
        for path in (data, *data.rglob("*")):
            if account.uid is not None and account.gid is not None:
                shutil.chown(path, account.uid, account.gid)
        with EmbeddedPostgres(
            run.version, data_dir=data, settings={"autovacuum": "off", "max_prepared_transactions": 20}
        ) as server:
            command = [sys.executable, "-m", "walsender", "decode", "--conninfo", server.conninfo("db")]
            command += ["--wal", str(directory / "data" / "pg_wal"), "--output", str(output), "--start", run.start]
            command += ["--missing-publication", "server"]
            if run.end:
                command += ["--end", run.end]
            subprocess.run([*command, *run.arguments], check=True)
    finally:
        shutil.rmtree(place)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.walsender_evidence")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--output", type=Path, default=Path("again"))
    parsed = parser.parse_args()
    run = decode_again(parsed.directory, parsed.output)
    again = [
        m for m in read_messages(parsed.output.read_bytes(), pgoutput=run.pgoutput) if b"filler" not in m.data[:50]
    ]
    ours = list(read_messages((parsed.directory / "ours").read_bytes(), pgoutput=run.pgoutput))
    same = "the same" if again[: len(ours)] == ours else "others"
    print(f"{run}\n{len(again)} messages up to {Lsn(again[-1].lsn)}; in the run there were {len(ours)}: {same}")
    theirs = parsed.directory / "theirs"
    if theirs.exists():
        sent = list(read_messages(theirs.read_bytes()))
        found = differences(
            as_sent(again, pgoutput=run.pgoutput),
            as_sent(sent, pgoutput=run.pgoutput),
            pgoutput=run.pgoutput,
            whole=run.kind == "streams",
        )
        print(found[:10_000] or "no difference")


if __name__ == "__main__":
    main()
