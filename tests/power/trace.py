"""Record the file operations of a process and its children with strace, and read the record.

Contents are recorded, too: SQLite writes its pages again and again.  What is sent on sockets is recorded for the status messages
to the publisher, which say what is flushed.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pubsub.errors import PubsubError
from pubsub.protocol.copyboth import StatusUpdate, read_client_message
from pubsub.protocol.lsn import Lsn

_CALLS: Final = (
    "openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,unlink,unlinkat,rmdir,write,pwrite64,writev,pwritev,"
    "ftruncate,truncate,fallocate,fsync,fdatasync,sendto"
)
_CALL: Final = re.compile(r"^(\w+)\((.*)\) += (-?\d+)(?:<(.*)>)?(?: .*)?$")
_STRING: Final = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(?:\.\.\.)?')
_DESCRIPTOR: Final = re.compile(r"^\d+<([^>]*)>")
_STATUS: Final = struct.Struct(">cI")

Kind = Literal["open", "mkdir", "rename", "link", "unlink", "write", "truncate", "sync", "flushed"]


@dataclass(frozen=True, slots=True)
class Operation:
    """A call that succeeded.

    open        `path`; `offset` 1: what was there is truncated; 2: it must be new
    mkdir, unlink (also of a directory), sync (of a file or directory): `path`
    rename, link    from `path` to `other`
    write       `data` at `offset`, -1: where the file's last write ended
    truncate    to `offset` bytes
    flushed     a status message says so; `offset` is the LSN
    """

    kind: Kind
    path: str = ""
    other: str = ""
    offset: int = 0
    data: bytes = b""


def available() -> bool:
    """Return whether there is strace."""
    return shutil.which("strace") is not None


def recording(trace: Path, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` and records it in the file `trace`."""
    return [
        "strace", "-f", "-qq", "--seccomp-bpf", "-y", "-xx", "-s", str(1 << 22), "-e", f"trace={_CALLS}", "-e", "signal=none",
        "-o", str(trace), *command,
    ]  # fmt: skip


def operations(trace: Path, root: Path) -> Iterator[Operation]:
    """Yield the operations on files below `root`, and the status messages, in the order in which the calls ended."""
    prefix = f"{root}/"
    for line in _calls(trace):
        found = _CALL.match(line)
        if found is None or found[3].startswith("-"):
            continue
        name, arguments, returned, opened = found.groups()
        if name == "sendto":
            yield from _statuses(arguments)
            continue
        for operation in _operation(name, arguments, int(returned), opened):
            if operation.path.startswith(prefix) or operation.path == str(root):
                yield operation


def _calls(trace: Path) -> Iterator[str]:
    """Yield the calls without their threads; strace divides one that another thread's interrupts."""
    begun: dict[str, str] = {}
    with trace.open(errors="replace") as lines:
        for line in lines:
            thread, _, rest = line.rstrip().partition(" ")
            rest = rest.lstrip()
            if rest.endswith("<unfinished ...>"):
                begun[thread] = rest.removesuffix("<unfinished ...>")
            elif rest.startswith("<... ") and "resumed>" in rest:
                yield begun.pop(thread, "") + rest.partition("resumed>")[2]
            else:
                yield rest


def _decoded(escaped: str) -> str:
    return bytes.fromhex(escaped.replace("\\x", "")).decode("utf-8", "surrogateescape")


def _operation(name: str, arguments: str, returned: int, opened: str | None) -> Iterator[Operation]:
    strings = [match[1] for match in _STRING.finditer(arguments)]
    if name in ("openat", "open", "creat"):
        if opened is not None and ("O_CREAT" in arguments or "O_TRUNC" in arguments or name == "creat"):
            how = 2 if "O_EXCL" in arguments else 1 if "O_TRUNC" in arguments or name == "creat" else 0
            yield Operation("open", _decoded(opened), offset=how)
    elif name in ("mkdir", "mkdirat"):
        yield Operation("mkdir", _decoded(strings[-1]))
    elif name.startswith("rename"):
        yield Operation("rename", _decoded(strings[0]), _decoded(strings[-1]))
    elif name.startswith("link"):
        yield Operation("link", _decoded(strings[0]), _decoded(strings[-1]))
    elif name in ("unlink", "unlinkat", "rmdir"):
        yield Operation("unlink", _decoded(strings[-1]))
    elif name == "truncate":
        yield Operation("truncate", _decoded(strings[0]), offset=int(arguments.rpartition(",")[2]))
    elif (descriptor := _DESCRIPTOR.match(arguments)) is not None:
        path = _decoded(descriptor[1].removesuffix("\\x28\\x64\\x65\\x6c\\x65\\x74\\x65\\x64\\x29"))
        if name.endswith("sync"):
            yield Operation("sync", path)
        elif name == "ftruncate":
            yield Operation("truncate", path, offset=int(arguments.rpartition(",")[2]))
        elif name in ("write", "pwrite64", "writev", "pwritev"):
            data = b"".join(bytes.fromhex(one.replace("\\x", "")) for one in strings)[:returned]
            offset = int(arguments.rpartition(",")[2]) if name.startswith("pwrite") else -1
            yield Operation("write", path, offset=offset, data=data)


def _statuses(arguments: str) -> Iterator[Operation]:
    """Yield the status messages in what was sent: CopyData messages that begin with r."""
    found = _STRING.search(arguments)
    data = bytes.fromhex(found[1].replace("\\x", "")) if found is not None else b""
    while data.startswith(b"d") and len(data) >= _STATUS.size:
        _, length = _STATUS.unpack_from(data)
        body, data = data[_STATUS.size : length + 1], data[length + 1 :]
        if not body.startswith(b"r"):
            continue
        try:
            message = read_client_message(body)
        except PubsubError:
            continue
        if isinstance(message, StatusUpdate):
            yield Operation("flushed", offset=int(message.flushed))


def greatest_flushed(operations: Sequence[Operation]) -> Lsn:
    """Return the greatest LSN that was reported as flushed."""
    return Lsn(max((one.offset for one in operations if one.kind == "flushed"), default=0))
