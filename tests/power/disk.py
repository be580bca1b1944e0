"""A file system to which the operations of a run happen, and what it may hold after its power has failed.

    a file          has its contents of its last fsync, and any of the writes since: none, all, the first ones and a part of one,
                    or any of their pages, the others being what they were, or zeros
    a directory     has the names of its last fsync, and any of the operations since: none, all, the first ones, or just some
    a rename        happens or does not, if it is within one directory; between two, both names may be there, or neither

Nothing else is promised: an fsync of a file does not keep its name, unless the state is one of a file system that does that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.power.trace import Operation

_PAGE: Final = 4096
_SECTOR: Final = 512

#: The files of a state by path; None for a directory.
State = Mapping[str, bytes | None]


@dataclass
class _Inode:
    """A file or directory.  `durable`: its contents on the disk; `pending`: writes (at an offset) and truncations since."""

    number: int
    is_directory: bool
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    cursor: int = 0


@dataclass(frozen=True, slots=True)
class _Name:
    """A change of a directory's names: `name` is of `inode`, or of nothing.  Changes of one `group` happen together."""

    directory: int
    name: str
    inode: int | None
    group: int


class Disk:
    """What has happened so far."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._inodes = [_Inode(0, True)]
        self._names: dict[int, dict[str, int]] = {0: {}}
        self._durable_names: dict[int, dict[str, int]] = {0: {}}
        self._pending: list[_Name] = []
        self._groups = 0

    # What happens

    def apply(self, operation: Operation) -> None:
        """Let an operation happen."""
        match operation.kind:
            case "open":
                self._open(operation.path, truncates=operation.offset == 1)
            case "mkdir":
                self._make(operation.path, is_directory=True)
            case "rename":
                self._rename(operation.path, operation.other)
            case "link":
                inode = self._find(operation.path)
                if inode is not None:
                    self._name([(operation.other, inode.number)])
            case "unlink":
                if self._find(operation.path) is not None:
                    self._name([(operation.path, None)])
            case "write":
                self._write(operation.path, operation.offset, operation.data)
            case "truncate":
                self._truncate(operation.path, operation.offset)
            case "sync":
                self._sync(operation.path)
            case "flushed":
                pass

    def _directory(self, path: str) -> tuple[int | None, str]:
        """Return the directory that holds `path`, and the name there."""
        parts = path[len(self._root) :].strip("/").split("/")
        at: int | None = 0
        for part in parts[:-1]:
            at = None if at is None else self._names.get(at, {}).get(part)
        return at, parts[-1]

    def _find(self, path: str) -> _Inode | None:
        if path == self._root:
            return self._inodes[0]
        directory, name = self._directory(path)
        number = None if directory is None else self._names.get(directory, {}).get(name)
        return None if number is None else self._inodes[number]

    def _make(self, path: str, *, is_directory: bool) -> _Inode:
        inode = _Inode(len(self._inodes), is_directory)
        self._inodes.append(inode)
        if is_directory:
            self._names[inode.number] = {}
            self._durable_names[inode.number] = {}
        self._name([(path, inode.number)])
        return inode

    def _name(self, changes: Iterable[tuple[str, int | None]]) -> None:
        self._groups += 1
        places = [(*self._directory(path), inode) for path, inode in changes]
        together = len({directory for directory, _, _ in places}) == 1
        for directory, name, inode in places:
            if directory is None:
                continue
            if not together:
                self._groups += 1
            self._pending.append(_Name(directory, name, inode, self._groups))
            if inode is None:
                self._names[directory].pop(name, None)
            else:
                self._names[directory][name] = inode

    def _rename(self, path: str, other: str) -> None:
        inode = self._find(path)
        if inode is not None:
            self._name([(other, inode.number), (path, None)])

    def _open(self, path: str, *, truncates: bool) -> None:
        inode = self._find(path)
        if inode is None:
            inode = self._make(path, is_directory=False)
        inode.cursor = 0
        if truncates and inode.content:
            self._truncate(path, 0)

    def _write(self, path: str, offset: int, data: bytes) -> None:
        inode = self._find(path)
        if inode is None or inode.is_directory:
            return
        if offset < 0:
            offset = inode.cursor
            inode.cursor += len(data)
        _put(inode.content, offset, data)
        inode.pending.append((offset, data))

    def _truncate(self, path: str, size: int) -> None:
        inode = self._find(path)
        if inode is not None:
            _cut(inode.content, size)
            inode.pending.append((size, None))

    def _sync(self, path: str) -> None:
        inode = self._find(path)
        if inode is None:
            return
        if not inode.is_directory:
            inode.durable = bytes(inode.content)
            inode.pending.clear()
            return
        for change in self._pending:
            if change.directory == inode.number:
                self._apply_name(self._durable_names, change)
        self._pending = [change for change in self._pending if change.directory != inode.number]

    @staticmethod
    def _apply_name(names: dict[int, dict[str, int]], change: _Name) -> None:
        if change.inode is None:
            names[change.directory].pop(change.name, None)
        else:
            names[change.directory][change.name] = change.inode

    # What is left

    def after_power_loss(self, seed: str) -> State:
        """Return what may be left now; `seed` decides."""
        chance = random.Random(seed)
        names = {directory: dict(held) for directory, held in self._durable_names.items()}
        for change in self._surviving(chance):
            self._apply_name(names, change)
        keep = _contents(chance)
        state: dict[str, bytes | None] = {}

        def walk(directory: int, path: str) -> None:
            for name, number in names[directory].items():
                inode = self._inodes[number]
                if inode.is_directory:
                    state[f"{path}/{name}"] = None
                    walk(number, f"{path}/{name}")
                else:
                    state[f"{path}/{name}"] = keep(inode)

        walk(0, self._root)
        return state

    def _surviving(self, chance: random.Random) -> list[_Name]:
        """Choose the changes of names that have reached the disk, though nobody has asked for it."""
        pending = self._pending
        how = chance.choice(["none", "all", "first", "some", "some"])
        if how == "none":
            return []
        if how == "all":
            return pending
        groups = sorted({change.group for change in pending})
        if how == "first":
            # A journal keeps the order.
            kept = set(groups[: chance.randint(0, len(groups))])
        else:
            share = chance.choice([0.1, 0.5, 0.9])
            kept = {group for group in groups if chance.random() < share}
        return [change for change in pending if change.group in kept]


def _contents(chance: random.Random) -> Callable[[_Inode], bytes]:
    """Return how this file system keeps what was not fsynced."""
    way = chance.choice(["none", "all", "each"])

    def keep(inode: _Inode) -> bytes:
        if not inode.pending or way == "none":
            return inode.durable
        how = way if way == "all" else chance.choice(["none", "all", "torn", "pages", "zeros"])
        if how == "none":
            return inode.durable
        if how == "all":
            return bytes(inode.content)
        if how == "torn":
            return _torn(inode, chance)
        return _paged(inode, chance, zeros=how == "zeros")

    return keep


def _torn(inode: _Inode, chance: random.Random) -> bytes:
    """Return the first of the writes, and the beginning of the next."""
    content = bytearray(inode.durable)
    whole = chance.randrange(len(inode.pending))
    for offset, data in inode.pending[:whole]:
        _redo(content, offset, data)
    offset, data = inode.pending[whole]
    if data is not None:
        size = chance.randint(0, len(data))
        _redo(content, offset, data[: size - size % _SECTOR if size > _SECTOR else size])
    return bytes(content)


def _paged(inode: _Inode, chance: random.Random, *, zeros: bool) -> bytes:
    """Return the file at its new size with some of its pages written; the others are as they were, or `zeros`."""
    content, old = inode.content, inode.durable
    share = 0.0 if zeros else chance.choice([0.3, 0.7])
    result = bytearray(len(content))
    for start in range(0, len(content), _PAGE):
        source = content if chance.random() < share else old
        page = source[start : start + _PAGE][: len(content) - start]
        result[start : start + len(page)] = page
    return bytes(result)


def _redo(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        _cut(content, offset)
    else:
        _put(content, offset, data)


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _cut(content: bytearray, size: int) -> None:
    if len(content) > size:
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))
