"""What may be left after a power loss, and how a record of system calls is read (tests/power)."""

from __future__ import annotations

from pathlib import Path

from tests.power import trace
from tests.power.disk import Disk
from tests.power.trace import Operation

_SEEDS = range(200)


def _states(*operations: Operation) -> list[dict[str, bytes | None]]:
    disk = Disk("/r")
    for operation in operations:
        disk.apply(operation)
    return [dict(disk.after_power_loss(str(seed))) for seed in _SEEDS]


_WRITTEN = (
    Operation("mkdir", "/r/d"),
    Operation("open", "/r/d/new"),
    Operation("write", "/r/d/new", offset=-1, data=b"x" * 9000),
)
_SYNCED = (*_WRITTEN, Operation("sync", "/r/d/new"), Operation("sync", "/r/d"))


def test_nothing_stays_that_was_not_fsynced() -> None:
    states = _states(*_WRITTEN)
    assert {} in states
    assert {"/r/d": None, "/r/d/new": b""} in states
    assert {"/r/d": None, "/r/d/new": b"x" * 9000} in states
    sizes = {len(state.get("/r/d/new") or b"") for state in states}
    assert len(sizes) > 5, "torn"


def test_a_name_needs_those_above_it() -> None:
    assert {} in _states(*_SYNCED), "the directory's own name was not fsynced"
    for state in _states(*_SYNCED, Operation("sync", "/r")):
        assert state == {"/r/d": None, "/r/d/new": b"x" * 9000}


def test_a_rename_happens_or_does_not() -> None:
    states = _states(*_SYNCED, Operation("sync", "/r"), Operation("rename", "/r/d/new", "/r/d/name"))
    assert {tuple(sorted(state)) for state in states} == {("/r/d", "/r/d/new"), ("/r/d", "/r/d/name")}
    moved = _states(*_SYNCED, Operation("sync", "/r"), Operation("rename", "/r/d/new", "/r/name"))
    assert ("/r/d",) in {tuple(sorted(state)) for state in moved}, "between two directories it may be lost"


def test_what_is_written_again_is_as_before_or_after_or_mixed() -> None:
    again = Operation("write", "/r/d/new", offset=0, data=b"y" * 9000)
    contents = {state["/r/d/new"] for state in _states(*_SYNCED, Operation("sync", "/r"), again)}
    assert {b"x" * 9000, b"y" * 9000} < contents
    assert all(one is not None and set(one) <= set(b"xy\0") for one in contents)


def test_calls_that_another_thread_interrupts_are_read(tmp_path: Path) -> None:
    def hexed(text: str) -> str:
        return "".join(f"\\x{byte:02x}" for byte in text.encode())

    (tmp_path / "trace").write_text(
        f'7 openat(AT_FDCWD<{hexed("/")}>, "{hexed("/r/f")}", O_WRONLY|O_CREAT|O_EXCL, 0600) = 3<{hexed("/r/f")}>\n'
        f'7 pwrite64(3<{hexed("/r/f")}>, "{hexed("abc")}", 3, 5 <unfinished ...>\n'
        f"8 fsync(4<{hexed('/elsewhere')}>) = 0\n"
        "7 <... pwrite64 resumed>) = 2\n"
        f'7 rename("{hexed("/r/f")}", "{hexed("/r/g")}") = -1 EACCES (Permission denied)\n'
        f"7 fsync(3<{hexed('/r/f')}>) = 0\n"
    )
    assert list(trace.operations(tmp_path / "trace", Path("/r"))) == [
        Operation("open", "/r/f", offset=2),
        Operation("write", "/r/f", offset=5, data=b"ab"),
        Operation("sync", "/r/f"),
    ]
