"""What happens to a subscription from outside: a list of steps, made from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.simulation.publisher import Kind

_STATEMENTS: Final = ("insert", "insert", "insert", "update", "update", "move", "delete")
_ALTERS: Final = ("add", "drop", "column", "table", "identity")


@dataclass(frozen=True, slots=True)
class Step:
    """`what` is done `after` so many seconds; `args` as the world's method of that name takes them."""

    after: float
    what: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}({', '.join(map(repr, self.args))})"


@dataclass(frozen=True, slots=True)
class Setting:
    """How the world is made: the tables, the subscription's options, the node's settings, and bounds of the code.

    `catalog_on_server`: as PostgreSQL has it.
    """

    tables: tuple[tuple[str, Kind, bool], ...]
    options: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, Any], ...] = ()
    bounds: tuple[tuple[str, int], ...] = ()
    catalog_on_server: bool = False
    first_rows: int = 3
    dates: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """`noise`: the seed of schedules and failures; `calm`: without either."""

    seed: int
    setting: Setting
    steps: tuple[Step, ...]
    noise: str
    calm: bool = False
    flavour: str = field(default="", compare=False)


# How often each kind of step comes, by flavour: load and the daemon's deaths belong to all.
_FLAVOURS: Final[dict[str, dict[str, float]]] = {
    "load": {"write": 8, "idle": 1, "kill": 1.5, "dies": 2, "stop": 0.7, "cut": 1},
    "copies": {"write": 6, "idle": 1, "kill": 1.5, "dies": 3, "lose_sync_slot": 1, "resync": 1.2, "cut": 1, "stop": 0.5},
    "streams": {"write": 2, "open": 3, "more": 6, "finish": 4, "kill": 1, "dies": 1.5, "cut": 1, "resync": 0.3},
    "prepared": {"write": 2, "open": 2, "more": 2, "prepare": 3, "outcome": 4, "kill": 1, "dies": 2, "stop": 0.5, "cut": 0.7},
    "failover": {"write": 6, "open": 1, "more": 1, "finish": 1, "prepare": 0.7, "outcome": 1, "failover": 1.5, "kill": 0.7,
                 "dies": 1, "cut": 0.5, "down": 0.5},
    "slots": {"write": 6, "lose_slot": 0.7, "rewind_slot": 1.2, "advance_slot": 0.6, "lose_sync_slot": 1, "kill": 1, "dies": 1,
              "resync": 0.5, "cut": 1},
    "schema": {"write": 6, "alter": 4, "mixed": 2, "refresh": 1, "kill": 1, "dies": 2, "cut": 0.7, "resync": 0.3, "forget": 1},
    "outcomes": {"write": 7, "fate": 3, "foreign": 1.5, "foreign_delete": 0.5, "optimize": 0.7, "interloper": 1, "kill": 0.7,
                 "dies": 2},
    "commands": {"write": 5, "disable": 1, "resync": 1.2, "refresh": 1, "unpublish": 1, "publish": 1.3, "skip": 0.7,
                 "dies": 1.5, "kill": 0.7, "set": 1, "client_dies": 1.5},
    "zombies": {"write": 7, "freeze": 2, "kill": 0.7, "dies": 1, "cut": 0.5},
    "poison": {"write": 6, "poison": 1.5, "resync": 1, "dies": 1, "kill": 0.5, "skip_failed": 1},
}  # fmt: skip
_SINGLE: Final = {"freeze": "zombies"}


def generate(seed: int) -> History:
    """Return the history of this seed."""
    chance = random.Random(seed)
    flavour = chance.choice(sorted(_FLAVOURS))
    weights = dict(_FLAVOURS[flavour])
    if chance.random() < 0.4:
        # Two things at once.
        other = chance.choice(sorted(_FLAVOURS))
        for what, weight in _FLAVOURS[other].items():
            if what not in _SINGLE:
                weights[what] = weights.get(what, 0) + weight / 2
        flavour = f"{flavour} and {other}"
    setting = _setting(chance, flavour)
    pace = chance.choice([0.02, 0.5, 0.5, 3.0])
    steps = []
    for _ in range(chance.choice([5, 12, 12, 25])):
        what = chance.choices(list(weights), list(weights.values()))[0]
        steps.append(Step(round(chance.random() * pace, 3), what, _args(chance, what)))
    return History(seed, setting, tuple(steps), f"{seed}", flavour=flavour)


def _setting(chance: random.Random, flavour: str) -> Setting:
    kinds: Sequence[Kind] = ("keyed", "keyed", "keyed", "full", "keyless")
    tables = tuple((name, chance.choice(kinds), chance.random() < 0.3) for name in "abc"[: chance.choice([1, 2, 2, 3])])
    options: dict[str, str] = {
        "streaming": chance.choice(["off", "on", "parallel", "parallel"]),
        "batch_rows": chance.choice(["2", "5", "50"]),
        "batch_age": chance.choice(["'100ms'", "'500ms'", "'1s'"]),
    }
    if "prepared" in flavour and chance.random() < 0.9:
        options["two_phase"] = "true"
    if "failover" in flavour and chance.random() < 0.9:
        options["failover"] = "true"
    if "poison" in flavour or chance.random() < 0.3:
        options["on_table_error"] = "isolate"
    if "schema" not in flavour and chance.random() < 0.5:
        options["schema_changes"] = "refuse"
    if "schema" in flavour and chance.random() < 0.5:
        options["dropped_columns"] = "drop"
    if chance.random() < 0.1:
        options["disable_on_error"] = "true"
    settings = {
        "max_logical_replication_workers": chance.choice([1, 2, 4, 1000]),
        "max_sync_workers_per_subscription": chance.choice([1, 2]),
    }
    bounds: dict[str, int] = {}
    if chance.random() < 0.5:
        bounds["small transaction"] = chance.choice([60, 300])
    if chance.random() < 0.6:
        bounds["part ahead"] = chance.choice([1, 60, 200])
    if chance.random() < 0.3:
        bounds["whole batch"] = chance.choice([100, 400])
    if chance.random() < 0.3:
        bounds["memory"] = chance.choice([200, 1000])
    if chance.random() < 0.3:
        bounds["worth staging ahead"] = 2
    on_server = "zombies" in flavour or chance.random() < 0.2
    return Setting(
        tables,
        tuple(options.items()),
        tuple(settings.items()),
        tuple(bounds.items()),
        on_server,
        chance.choice([0, 3, 6]),
        "poison" in flavour,
    )


def _args(chance: random.Random, what: str) -> tuple[Any, ...]:
    pick = chance.randrange(1 << 16)
    match what:
        case "write":
            return (_statements(chance, chance.choice([1, 1, 2, 4])),)
        case "more":
            return (
                pick,
                _statements(chance, chance.choice([1, 2, 4])),
                chance.choice(["", "", "savepoint", "rollback"]),
            )
        case "open":
            return (_statements(chance, chance.choice([1, 3])),)
        case "finish" | "outcome":
            return (pick, chance.random() < 0.75)
        case "alter":
            return (pick, chance.choice(_ALTERS))
        case "mixed":
            return (pick, chance.choice(_ALTERS), _statements(chance, 2), _statements(chance, 2))
        case "dies":
            return (chance.choice([1, 2, 3, 5, 8, 13, 21]),)
        case "kill":
            return (chance.choice([0, 1, 3, 10, 50, 200]),)
        case "failover":
            return (chance.choice([0, 0, 1, 3, 10]),)
        case "fate":
            fates = ["refused", "failed", "lost answer", "unknown, made", "unknown, not made"]
            return (chance.choice(fates), chance.choice([1, 1, 2, 12]))
        case "down" | "freeze":
            return (chance.choice([1.0, 20.0, 120.0]),)
        case "set":
            name, values = chance.choice(
                [
                    ("batch_rows", ("3", "20")),
                    ("streaming", ("off", "on", "parallel")),
                    ("disable_on_error", ("false",)),
                ]
            )
            return (name, chance.choice(values))
        case "client_dies":
            return (chance.choice([1, 2, 3, 5, 8]), chance.choice(["resync", "refresh", "disable"]), pick)
        case "rewind_slot" | "resync" | "unpublish" | "publish" | "prepare" | "lose_sync_slot" | "foreign" | "optimize":
            return (pick,)
        case "foreign_delete" | "interloper" | "poison" | "forget" | "skip" | "disable":
            return (pick,)
        case _:
            return ()


def _statements(chance: random.Random, count: int) -> tuple[tuple[str, int, int], ...]:
    found: list[tuple[str, int, int]] = []
    for _ in range(count):
        what = "truncate" if chance.random() < 0.04 else chance.choice(_STATEMENTS)
        found.append((what, chance.randrange(3), chance.randrange(1 << 16)))
    return tuple(found)
