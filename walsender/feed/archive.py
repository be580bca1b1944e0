"""A WAL archive, for WAL that neither the spool nor the server has any more: a directory of segments, or a restore_command.

Only whole segments are taken, each on the newest timeline of the followed history that has WAL in it: that file begins with a
copy of the older timeline's WAL (xlogarchive.c: RestoreArchivedFile).  `archive.json` beside the spool's segments names the
archive, so that every process that reads the spool finds it.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from pubsub.errors import DataCorrupted
from pubsub.protocol.timeline import TimelineHistory
from pubsub.reorderbuffer import files
from walsender import checked_files
from walsender.source.restore import restore
from walsender.source.segments import SegmentDirectory, check_header
from walsender.xlog.errors import WalCorrupted
from walsender.xlog.formats import LONG_HEADER
from walsender.xlog.geometry import Geometry

_NAME: Final = "archive.json"


@dataclass(frozen=True, slots=True)
class Archive:
    """The archive of a cluster: `directory` or `command`, one of which is set.  `timelines`: TimelineHistory's entries."""

    directory: str | None
    command: str | None
    segment_size: int
    system_identifier: int
    timelines: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spool: Path) -> Self | None:
        """Return the archive that `save` has named beside this spool; None if there is none.  Raises FileFailure, DataCorrupted."""
        path = spool / _NAME
        if not path.exists():
            return None
        fields = json.loads(checked_files.read(path, "file"))
        return cls(**{**fields, "timelines": tuple((int(one), int(end)) for one, end in fields["timelines"])})

    def save(self, spool: Path) -> None:
        """Name it to all who read this spool.  Raises FileFailure."""
        checked_files.write(spool / _NAME, json.dumps(asdict(self)).encode())

    @staticmethod
    def forget(spool: Path) -> None:
        """There is no archive any more."""
        files.remove(spool / _NAME)

    def name(self, lsn: int) -> str:
        """Return the name of the file that has the WAL at `lsn`."""
        timelines = TimelineHistory(self.timelines).timelines_of_segment(lsn, self.segment_size)
        return Geometry(self.segment_size).segment_name(timelines[0], lsn)

    def fetch(self, lsn: int, stop: threading.Event | None = None) -> int | None:
        """Return a descriptor of the segment that holds `lsn`; None if the archive does not have it.

        A restore_command may take as long as it likes; once `stop` is set it is killed.  Raises PubsubError if the archive
        cannot be asked, WalCorrupted for another cluster's file.
        """
        start = lsn - lsn % self.segment_size
        name = self.name(start)
        number = self._from_directory(name) if self.directory is not None else self._restore(name, stop)
        if number is None:
            return None
        try:
            if not check_header(os.pread(number, LONG_HEADER, 0), start, self.system_identifier, name):
                raise WalCorrupted(f'archive file "{name}" does not begin with the header of its first page', start)
        except BaseException:
            os.close(number)
            raise
        return number

    def has(self, lsn: int, stop: threading.Event | None = None) -> bool:
        """Return whether `fetch` finds it.  Raises what that does."""
        number = self.fetch(lsn, stop)
        if number is not None:
            os.close(number)
        return number is not None

    def _from_directory(self, name: str) -> int | None:
        assert self.directory is not None
        directory = SegmentDirectory(Path(self.directory), Geometry(self.segment_size), self.system_identifier)
        contents = directory.whole(name)
        if contents is None:
            return None
        with tempfile.TemporaryFile() as copy:
            for _, data in contents:
                copy.write(data)
            copy.flush()
            # Shorter: it is still being written.
            return os.dup(copy.fileno()) if copy.tell() == self.segment_size else None

    def _restore(self, name: str, stop: threading.Event | None) -> int | None:
        assert self.command is not None
        with tempfile.TemporaryDirectory(prefix="walsender-restore-") as room:
            path = Path(room) / name
            if not restore(self.command, name, path, stop):
                return None
            try:
                number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            size = os.fstat(number).st_size
            if size != self.segment_size:
                os.close(number)
                raise DataCorrupted(f'archive file "{name}" has wrong size: {size} instead of {self.segment_size}')
            return number
