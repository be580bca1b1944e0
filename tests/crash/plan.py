"""What a round does, from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

#: Rounds of one kind share a node; each eight seeds have all kinds, and one server.
OURS, BESIDE, PROCESSES, SHARED, STORE, STATEMENTS, SMALL_DISK = (
    "ours",
    "beside",
    "worker processes",
    "shared",
    "object store",
    "statements",
    "small disk",
)
_KINDS: Final = (OURS, STORE, BESIDE, SHARED, SHARED, PROCESSES, STATEMENTS, SMALL_DISK)
_VERSIONS: Final = ("18", "17", "16", "15")

#: How often each fault comes, beside the others.
_WEIGHTS: Final = {
    "kill daemon": 4,
    "stop daemon": 4,
    "kill JVM": 2,
    "stop JVM": 3,
    "kill publisher": 2,
    "restart publisher": 2,
    "cut after bytes": 5,
    "cut": 4,
    "slow network": 3,
    "silent network": 3,
    "terminate walsenders": 4,
    "another writer": 3,
    "SIGHUP": 3,
    "second daemon": 1,
    "REFRESH": 4,
    "DISABLE": 4,
    "SET": 4,
    "RESYNC": 3,
    "publication": 4,
}
_RESTARTS: Final = frozenset({"kill daemon", "end daemon", "cut off daemon", "kill JVM"})


@dataclass(frozen=True, slots=True)
class Fault:
    """`what` happens `at` seconds after the load began, and lasts for `seconds` where that means something; `chance`: its own seed."""

    at: float
    what: str
    seconds: float
    chance: int

    def __str__(self) -> str:
        return f"{self.at:6.2f} s: {self.what} ({self.seconds:.2f} s, {self.chance})"


@dataclass(frozen=True, slots=True)
class Plan:
    """A round.  `options`: of CREATE SUBSCRIPTION; `session`: settings of the walsender's sessions; `seconds`: of the load.

    `early`: the load begins before the subscription is created.  `everything`: the publication is FOR ALL TABLES.
    """

    seed: int
    version: str
    kind: str
    options: dict[str, str]
    session: dict[str, str]
    everything: bool
    early: bool
    writers: int
    seconds: float
    faults: tuple[Fault, ...]

    @property
    def copies(self) -> bool:
        """Whether tables are copied; if not they are empty at first, and not altered."""
        return self.options["copy_data"] == "true"

    @property
    def refresh(self) -> str:
        """REFRESH PUBLICATION; PostgreSQL refuses to copy tables for it when two_phase is enabled."""
        more = " WITH (copy_data = false)" if self.options["two_phase"] == "true" else ""
        return f"REFRESH PUBLICATION{more}"

    def story(self) -> str:
        listed = ", ".join(f"{name} = {value}" for name, value in self.options.items())
        lines = [
            f"seed {self.seed}: PostgreSQL {self.version}, {self.kind}, WITH ({listed}), {self.session}, "
            f"{'FOR ALL TABLES' if self.everything else 'a list of tables'}, {self.writers} writers, {self.seconds:.1f} s"
            + (", load before the copy" if self.early else ""),
            *(f"    {fault}" for fault in self.faults),
        ]
        return "\n".join(lines)


def generate(seed: int) -> Plan:
    """Draw a round."""
    chance = random.Random(f"crash {seed}")
    version = _VERSIONS[seed // len(_KINDS) % len(_VERSIONS)]
    kind = _KINDS[seed % len(_KINDS)]
    seconds = chance.uniform(6, 16)
    options = {
        "streaming": chance.choice(["parallel", "parallel", "on", "off"]),
        "two_phase": chance.choice(["true", "false"]),
        "binary": chance.choice(["true", "false"]),
        "copy_data": chance.choice(["true", "true", "true", "false"]),
        "batch_age": chance.choice(["'20ms'", "'20ms'", "'300ms'"]),
        "batch_rows": chance.choice(["250000", "250000", "200"]),
        "dropped_columns": chance.choice(["keep", "drop"]),
        "on_table_error": chance.choice(["stop", "stop", "isolate"]),
    }
    session = {"logical_decoding_work_mem": "64kB"} if chance.random() < 0.6 else {}
    if int(version) >= 16 and chance.random() < 0.2:
        session["debug_logical_replication_streaming"] = "immediate"
    if chance.random() < 0.4:
        options["partition_by"] = chance.choice(["'public.parted (part)'", "'public.parted (part), public.pair (k)'"])
    if chance.random() < 0.2:
        options["cluster_by"] = "'public.wide (id), public.plain (id)'"
    if kind == BESIDE:
        keyed = ", ".join(f"public.{name} (mirror + history + scd2)" for name in ("plain", "wide", "pair", "parted"))
        options["mode"] = f"'* (mirror + history), {keyed}'"
    weights = dict(_WEIGHTS)
    if kind == SMALL_DISK:
        weights["full disk"] = 12
    if kind == STORE:
        weights |= {"kill store": 4, "stop store": 6}
        # Its Spark is one for local disks.
        del weights["another writer"]
    if kind in {PROCESSES, SHARED}:
        weights |= {"kill worker": 6, "stop worker": 6}
    if kind == SHARED:
        weights |= {"cut off daemon": 6, "end daemon": 4, "kill catalog": 4, "terminate catalog": 4}
    if options["two_phase"] == "true":
        # A table that joins could not be copied.
        del weights["publication"]
    names = chance.choices([*weights], [*weights.values()], k=chance.randint(3, 9))
    faults: list[Fault] = []
    # Few restarts of the daemon, or of its JVM: each takes longer than most other faults together.
    restarts = 0
    for name in names:
        restarts += name in _RESTARTS
        if restarts > 2 and name in _RESTARTS:
            name = "stop JVM"
        at = chance.uniform(0, seconds)
        if faults and chance.random() < 0.4:
            # With the one before it, or within it.
            at = min(faults[-1].at + chance.choice([0.0, 0.05, 0.3]), seconds)
        faults.append(Fault(at, name, chance.choice([0.1, 0.5, 1.0, 2.0, 4.0, 7.0]), chance.randrange(1 << 30)))
    return Plan(
        seed=seed,
        version=version,
        kind=kind,
        options=options,
        session=session,
        everything=chance.random() < 0.3,
        early=options["copy_data"] == "true" and chance.random() < 0.7,
        writers=chance.choice([1, 2, 2]),
        seconds=seconds,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )
