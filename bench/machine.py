"""Facts about the machine, and processes' processor time (seconds) and memory (bytes), from /proc."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pubsub import jars

_TICK: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_SECONDS: Final = 0.5


def facts() -> dict[str, Any]:
    """Return the hardware, system and versions, without the servers' versions."""
    model = next((value for key, value in _fields(Path("/proc/cpuinfo"), ":") if key == "model name"), "unknown")
    memory = next(value for key, value in _fields(Path("/proc/meminfo"), ":") if key == "MemTotal")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_bytes": int(memory.split()[0]) << 10,
        "system": f"{platform.system()} {platform.release()}",
        "load_average_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "java": _java(),
        "class_data_archive": jars.cds_archive() is not None,
        "packages": {name: version(name) for name in ("pyspark", "delta-spark", "pyarrow", "numpy", "psycopg")},
        "commit": _commit(),
    }


@dataclass(frozen=True, slots=True)
class MachineTime:
    """Processor seconds since the machine started, over all cores; `stolen` were given to other guests by the host."""

    busy: float
    stolen: float

    @classmethod
    def now(cls) -> Self:
        """Read the current values (proc(5): user nice system idle iowait irq softirq steal …)."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        stolen = ticks[7] / _TICK
        return cls((sum(ticks) - ticks[3] - ticks[4]) / _TICK - stolen, stolen)


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, with its threads and the children it has waited for; 0 if it is gone."""
    words = _stat(pid)
    return sum(map(int, words[11:15])) / _TICK if words else 0.0


def tree_seconds(pid: int) -> float:
    """Return the processor time of a process and of its descendants that have not ended."""
    return sum(map(cpu_seconds, [pid, *descendants(pid)]))


def threads(pid: int) -> list[tuple[str, float]]:
    """Return the name of each thread that a process has now, and its processor time."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            name, _, words = task.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        found.append((name, sum(map(int, words.split()[11:13])) / _TICK))
    return found


def peak_memory(pid: int) -> int:
    """Return a process's peak resident memory since it started, or since `forget_peak`."""
    return _status_kilobytes(pid, "VmHWM")


def resident_memory(pid: int) -> int:
    """Return a process's current resident memory, shared pages included."""
    words = _stat(pid)
    return int(words[21]) * _PAGE if words else 0


def forget_peak(pid: int) -> None:
    """Reset `peak_memory` to the current resident memory (proc(5): clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def descendants(pid: int) -> dict[int, str]:
    """Return the descendants of `pid`, with their names."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = _stat(int(entry.name))
            if words:
                parents.setdefault(int(words[1]), []).append((int(entry.name), _name(int(entry.name))))
    found: dict[int, str] = {}
    left = [pid]
    while left:
        for child, name in parents.get(left.pop(), []):
            found[child] = name
            left.append(child)
    return found


class MemoryWatch:
    """The peak resident memory of the Python processes among a daemon's descendants.

    They come and go with Spark's jobs, and no counter outlives a process: so it is sampled.  Shared pages count once
    per process.
    """

    def __init__(self, daemon: int) -> None:
        self.workers_peak = 0
        self._daemon = daemon
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(_SAMPLE_SECONDS):
            below = descendants(self._daemon)
            size = sum(resident_memory(pid) for pid, name in below.items() if name.startswith("python"))
            self.workers_peak = max(self.workers_peak, size)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/pid/stat from the third, the state, on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _status_kilobytes(pid: int, name: str) -> int:
    try:
        found = dict(_fields(Path(f"/proc/{pid}/status"), ":"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found.get(name, "0 kB").split()[0]) << 10


def _fields(path: Path, separator: str) -> Iterable[tuple[str, str]]:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(separator)
        yield key.strip(), value.strip()


def _java() -> str:
    java = jars.find_java()
    if java is None:
        return "none"
    ran = subprocess.run([str(java), "-version"], capture_output=True, text=True, check=False)
    return (ran.stderr or ran.stdout).split("\n", 1)[0].strip()


def _commit() -> str | None:
    """Return the measured commit, with a plus if the work tree had changes."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip()[:12] + ("+" if changed.stdout.strip() else "")
