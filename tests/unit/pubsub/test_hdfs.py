"""hdfs-native's errors, as tables know them."""

from __future__ import annotations

import asyncio
import errno

import pytest

from pubsub import hdfs

RPC = 'RPCError("org.apache.hadoop.{}", "{}\\n\\tat org.apache.hadoop.x(X.java:1)\\n")'


@pytest.mark.parametrize(
    ("raised", "kind", "number", "says"),
    [
        (
            RuntimeError(RPC.format("security.AccessControlException", "Permission denied: user=x")),
            PermissionError,
            errno.EACCES,
            "AccessControlException: Permission denied: user=x",
        ),
        (FileNotFoundError("File does not exist: /x\n\tat org"), FileNotFoundError, errno.ENOENT, "No such file"),
        (FileExistsError("/x for client already exists\n\tat org"), FileExistsError, errno.EEXIST, "already exists"),
        (OSError("Connection refused (os error 111)"), OSError, errno.EIO, "Connection refused"),
        (TimeoutError(), TimeoutError, errno.ETIMEDOUT, "no answer in"),
        (RuntimeError('InvalidArgument("No NameNode hosts found")'), OSError, errno.EIO, "No NameNode hosts"),
    ],
)
def test_an_error_has_an_errno_and_one_line(raised: Exception, kind: type[OSError], number: int, says: str) -> None:
    with pytest.raises(OSError, match=f"Errno {number}") as caught:
        hdfs._raise(raised, "h/x")
    assert isinstance(caught.value, (kind, hdfs._Transient))
    assert caught.value.errno == number
    assert says in caught.value.strerror
    assert "\n" not in caught.value.strerror
    assert "\tat" not in caught.value.strerror


@pytest.mark.parametrize("name", ["ipc.StandbyException", "hdfs.server.namenode.SafeModeException"])
def test_a_name_node_that_does_not_serve_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(hdfs, "_PAUSE", 0.001)
    asked = 0

    async def ask(_: object) -> int:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if asked < 3:
            raise RuntimeError(RPC.format(name, "not now"))
        return asked

    assert hdfs.Hdfs("127.0.0.1:1", {})._call("127.0.0.1:1/x", ask) == 3


def test_a_name_node_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs, "_PATIENCE", 0.05)

    async def ask(_: object) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        hdfs.Hdfs("127.0.0.1:1", {})._call("127.0.0.1:1/x", ask)


class PanicException(BaseException):
    """What pyo3 raises where Rust panics."""


def test_a_bug_of_hdfs_native_is_an_error_like_others() -> None:
    async def ask(_: object) -> None:
        await asyncio.sleep(0)
        raise PanicException("there is no reactor running")

    with pytest.raises(OSError, match="no reactor") as caught:
        hdfs.Hdfs("127.0.0.1:1", {})._call("127.0.0.1:1/x", ask)
    assert caught.value.errno == errno.EIO
