"""The key indexes of a node's tables: a directory of the node, its secret, and the memory and the thread that they share."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pubsub.delta.key_index.hashing import Secret
from pubsub.delta.key_index.memory_runs import MemoryRuns
from pubsub.delta.key_index.table_index import TableIndex

_SECRET_BYTES: Final = 32


class KeyIndex:
    """The indexes of one node's tables, for any thread.  Without `directory` there are only runs in memory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._secret = Secret.of(_secret(directory) if directory is not None else secrets.token_bytes(_SECRET_BYTES))
        self._background = ThreadPoolExecutor(1, thread_name_prefix="key-index")
        self._lock = threading.Lock()
        self._tables: dict[str, TableIndex] = {}
        self.memory = MemoryRuns()

    def of(self, table: str) -> TableIndex:
        """Return the index of the table at the path `table`."""
        with self._lock:
            index = self._tables.get(table)
            if index is None:
                place = self._place(table)
                index = TableIndex(table, place, self._secret, self.memory, self._background)
                self._tables[table] = index
            return index

    def forget(self, table: str) -> None:
        """Remove the table's runs: it is gone, or is being created anew."""
        with self._lock:
            index = self._tables.pop(table, None)
        if index is not None:
            index.stop()
        place = self._place(table)
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)

    def keep_only(self, tables: frozenset[str]) -> None:
        """Remove the runs of all other tables."""
        if self._directory is None:
            return
        names = {place.name for table in tables if (place := self._place(table)) is not None}
        for place in self._directory.iterdir():
            if place.is_dir() and place.name not in names:
                shutil.rmtree(place, ignore_errors=True)

    def stop(self) -> None:
        """End the work in the background."""
        with self._lock:
            for index in self._tables.values():
                index.stop()
        self._background.shutdown(wait=True, cancel_futures=True)

    def _place(self, table: str) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / hashlib.sha256(table.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _secret(directory: Path) -> bytes:
    """Return the node's secret, made if it is not there or not whole."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / "secret"
    try:
        data = path.read_bytes()
        if len(data) == _SECRET_BYTES:
            return data
    except FileNotFoundError:
        pass
    data = secrets.token_bytes(_SECRET_BYTES)
    aside = path.with_suffix(".new")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
    os.replace(aside, path)
    return data
