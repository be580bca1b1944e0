"""Cut the power of a recorded run at random moments, and check what is left."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pubsub.protocol.lsn import Lsn
from pubsub.testing.servers import EmbeddedPostgres
from tests.power import trace
from tests.power.check import Lost, Publisher, Reported, check, rebuild
from tests.power.disk import Disk, State

_ROOT: Final = Path(__file__).parent.parent.parent
#: How many different states are made at one moment.
_AT_ONCE: Final = 3
#: What differs between failures of one kind: LSNs, numbers, paths.
_VALUE: Final = re.compile(r"[0-9A-F]+/[0-9A-F]+|\d+|/\S+")
#: Of so many states one is read by other readers, too.
_THOROUGH: Final = 20


@dataclass
class Result:
    """What the cuts have come to.  `failures`: each with the seed of its state."""

    states: int = 0
    operations: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {count}" for stage, count in self.stages.most_common())
        lines = [f"{self.states} states of {self.operations} operations, {len(self.failures)} lost something", stages]
        kinds: dict[str, list[tuple[str, str]]] = {}
        for seed, what in self.failures:
            kinds.setdefault(_VALUE.sub("…", what.splitlines()[-1]), []).append((seed, what))
        for of_kind in sorted(kinds.values(), key=len, reverse=True):
            seeds = ", ".join(seed for seed, _ in of_kind[:5])
            lines.append(f"{len(of_kind)} times: {of_kind[0][1]}\n    states {seeds}")
        return "\n".join(lines)


def record(base: Path, commits: int) -> None:
    """Record a node's life, with so many small transactions: BASE/trace, BASE/publisher.json and BASE/home."""
    settings: dict[str, str | int] = {"max_prepared_transactions": 5, "autovacuum": "off"}
    with EmbeddedPostgres("18", settings=settings) as server:
        server.execute("CREATE DATABASE d")
        run = [sys.executable, "-m", "tests.power.run", str(base), server.conninfo("d"), str(commits)]
        subprocess.run(trace.recording(base / "trace", run), cwd=_ROOT, check=True)


def cut(base: Path, states: int, seed: int) -> Result:
    """Make so many states of the run recorded in `base`, and check each."""
    chance = random.Random(seed)
    operations = _operations(base)
    moments = sorted(chance.randrange(len(operations) + 1) for _ in range(-(-states // _AT_ONCE)))
    names = [f"{seed}-{place}/{number}/{which}" for place, number in enumerate(moments) for which in range(_AT_ONCE)]
    return _check(base, operations, names[:states])


def one(base: Path, name: str) -> Result:
    """Make and check the state of this name."""
    return _check(base, _operations(base), [name])


def _operations(base: Path) -> list[trace.Operation]:
    return list(trace.operations(base / "trace", base))


def _check(base: Path, operations: list[trace.Operation], names: list[str]) -> Result:
    publisher = Publisher(base / "publisher.json")
    result = Result(operations=len(operations))
    memory = Path("/dev/shm")
    target = Path(tempfile.mkdtemp(prefix="pubsub-power-", dir=memory if memory.is_dir() else None)) / "home"
    try:
        for name, state, reported in _states(base, operations, names):
            result.states += 1
            try:
                rebuild(state, base / "home", target)
                thorough = result.states % _THOROUGH == 0
                result.stages[check(target, base / "home", publisher, reported, thorough=thorough)] += 1
            except Lost as error:
                result.failures.append((name, str(error)))
            except Exception:
                result.failures.append((name, traceback.format_exc()))
            if sys.stderr.isatty():
                print(f"\r{result.states} states, {len(result.failures)} failed", end="", file=sys.stderr)
    finally:
        shutil.rmtree(target.parent, ignore_errors=True)
    return result


def _states(base: Path, operations: list[trace.Operation], names: list[str]) -> Iterator[tuple[str, State, Reported]]:
    """Yield the states of these names, which are in order: of each the middle part is how many operations have happened."""
    disk, reported = Disk(str(base)), Reported()
    happened = 0
    for name in names:
        until = int(name.split("/")[1])
        for operation in operations[happened:until]:
            disk.apply(operation)
            reported = _reported(base, reported, operation)
        happened = until
        yield name, disk.after_power_loss(name), reported


def _reported(base: Path, reported: Reported, operation: trace.Operation) -> Reported:
    if operation.kind == "flushed":
        return reported.with_flushed(Lsn(operation.offset))
    if operation.kind == "mkdir" and Path(operation.path).parent == base / "marks":
        return reported.with_mark(Path(operation.path).name)
    return reported
