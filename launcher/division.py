"""How the daemons that share a catalog divide its subscriptions: each works out the same division, and does its own part of it.

    a unit that nobody has   goes to the daemon that has least
    a daemon has too much    it leaves some of it, which then go to those that have least
    prepared transactions    are files of a home: their subscription goes to the daemon of that home, while there is one
    a daemon that begins     gets something when its JVM has started, so that nothing stands still meanwhile

The node's own work weighs nothing, and stays with whoever has it.
"""

from __future__ import annotations

from dataclasses import dataclass

from catalog.leases import Fleet
from catalog.records import OF_NODE, DaemonRow


@dataclass(frozen=True, slots=True)
class Part:
    """What one daemon is to do of a division: take these units, and leave those."""

    takes: frozenset[int] = frozenset()
    leaves: frozenset[int] = frozenset()


def part_of(fleet: Fleet) -> Part:
    """Return this daemon's part of the division.  One whose lock is free, and that has not been expelled yet, gets nothing more."""
    if all(one.id != fleet.me for one in fleet.daemons):
        return Part()  # it has been expelled, as its next write finds
    division = _Division(fleet)
    division.give_out()
    division.level()
    gone = {one.unit for one in fleet.leases if one.daemon == fleet.me and one.unit not in fleet.weights}
    asked = {one.unit for one in fleet.leases if one.leaving}
    return Part(frozenset(division.takes), frozenset((division.leaves | gone) - asked))


class _Division:
    """Whom the units will belong to when everybody has done their part."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        daemons = _ready(fleet)
        self._loads = {one.id: 0 for one in daemons}
        self._held: dict[int, set[int]] = {one.id: set() for one in daemons}
        self._pinned = tied(fleet)
        self.takes: set[int] = set()
        self.leaves: set[int] = set()

    def give_out(self) -> None:
        """Leave the units that are held where they are, and give the least loaded daemons those that are not, or are being left."""
        fleet = self._fleet
        leases = {one.unit: one for one in fleet.leases if one.unit in fleet.weights}
        free: list[int] = []
        for unit, weight in fleet.weights.items():
            lease = leases.get(unit)
            if lease is None or lease.leaving:
                free.append(unit)
            elif lease.daemon in self._loads:
                self._loads[lease.daemon] += weight
                self._held[lease.daemon].add(unit)
        for unit in sorted(free):
            to = self._pinned.get(unit, self._least())
            self._loads[to] += fleet.weights[unit]
            if to == fleet.me and unit not in leases:
                self.takes.add(unit)

    def level(self) -> None:
        """Move units to the daemons that they are tied to, and then from the most loaded daemon as long as that evens out."""
        for unit, to in self._pinned.items():
            for daemon, held in self._held.items():
                if daemon != to and unit in held:
                    self._move(unit, daemon, to)
        fixed = self._pinned.keys() | {OF_NODE}
        movable = {daemon: sorted(held - fixed, reverse=True) for daemon, held in self._held.items()}
        while move := self._next_move(movable):
            self._move(*move)
            # What has been moved is not there yet, and is not moved on.
            movable[move[1]].remove(move[0])

    def _next_move(self, movable: dict[int, list[int]]) -> tuple[int, int, int] | None:
        """Return a unit, the daemon that has it, and the one that is to have it."""
        weights, to = self._fleet.weights, self._least()
        for daemon in sorted(self._loads, key=lambda one: (-self._loads[one], one)):
            more = self._loads[daemon] - self._loads[to]
            unit = next((one for one in movable[daemon] if 0 < weights[one] < more), None)
            if unit is not None:
                return unit, daemon, to
        return None

    def _move(self, unit: int, daemon: int, to: int) -> None:
        self._loads[daemon] -= self._fleet.weights[unit]
        self._loads[to] += self._fleet.weights[unit]
        if daemon == self._fleet.me:
            self.leaves.add(unit)

    def _least(self) -> int:
        return min(self._loads, key=lambda one: (self._loads[one], one))


def tied(fleet: Fleet) -> dict[int, int]:
    """Return by unit the daemon, if it is ready, in whose home its prepared transactions are."""
    found: dict[int, int] = {}
    for unit, (host, directory) in fleet.homes.items():
        for one in _ready(fleet):
            if host == one.host and directory is not None and directory.startswith(f"{one.home}/"):
                found[unit] = one.id
    return found


def _ready(fleet: Fleet) -> list[DaemonRow]:
    return [one for one in fleet.daemons if one.id in fleet.ready]
