"""Tell whether a version of a Delta table can still be read: its log, its data files and its deletion vectors.  Blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.deltalake_turns import ask
from pubsub.delta.log.table_log import files_at
from pubsub.delta.places import Place, directory, is_local
from pubsub.errors import PubsubError, UndefinedFile
from pubsub.object_stores import options
from pubsub.texts import first_line

if TYPE_CHECKING:
    from deltalake import DeltaTable


def require_readable(path: str, relation: str, version: int) -> None:
    """Raise UndefinedFile unless the log has the version and every file of the version exists.

    `path`: a directory, or any URI that deltalake reads; there the deletion vectors are read as well.
    """
    try:
        if is_local(path):
            missing = next((str(file) for file in _files(path, version) if not file.exists()), None)
        else:
            missing = _missing_elsewhere(path, version)
    # deltalake's errors have no common class.
    except Exception as error:
        said = error.message if isinstance(error, PubsubError) else first_line(error)
        raise _unreadable(relation, version, said) from error
    if missing is not None:
        raise _unreadable(relation, version, f'File "{missing}" does not exist.')


def _unreadable(relation: str, version: int, detail: str) -> UndefinedFile:
    return UndefinedFile(
        f'version {version} of table "{relation}" can no longer be read',
        detail=detail,
        hint="VACUUM or the clean-up of the log has removed what it needs. Pin a later LSN.",
    )


def _files(path: str, version: int) -> Iterator[Place]:
    """Yield the files of a version.  Raises as `files_at` does."""
    table = directory(path)
    for file in files_at(path, version).values():
        # An absolute path stays one.
        yield table / unquote(file.path.removeprefix("file://").removeprefix("file:"))
        if file.vector is not None and (vector := deletion_vectors.file_of(table, file.vector)) is not None:
            yield vector


def _missing_elsewhere(path: str, version: int) -> str | None:
    from deltalake.fs import DeltaStorageHandler
    from pyarrow import fs

    files = fs.PyFileSystem(DeltaStorageHandler(path, options(path)))
    # The file names are unique, whereas the directories of partitions are encoded in more than one way.
    present = {info.base_name for info in files.get_file_info(fs.FileSelector("", recursive=True))}

    def named(table: DeltaTable) -> list[str]:
        for _ in table.deletion_vectors():
            pass
        return list(table.file_uris())

    return next((uri for uri in ask(path, named, version) if uri.rpartition("/")[2] not in present), None)
