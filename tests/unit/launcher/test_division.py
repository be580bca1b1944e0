"""launcher.division: daemons that share a catalog, each doing its part of the division that it works out."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from catalog.leases import Fleet
from catalog.records import OF_NODE, DaemonRow, Lease
from launcher.division import part_of
from pubsub.memory import Memory

FIRST = 16_384


class World:
    """A catalog's rows, without the catalog."""

    def __init__(self, weights: dict[int, int]) -> None:
        self.weights = {OF_NODE: 0} | weights
        self.homes: dict[int, tuple[str | None, str | None]] = {}
        self.daemons: list[int] = []
        self.memory: dict[int, Memory] = {}
        self.leases: dict[int, Lease] = {}

    def fleet(self, me: int) -> Fleet:
        daemons = tuple(
            DaemonRow(one, 1, f"host{one}", f"/home{one}", datetime.now(UTC), self.memory.get(one))
            for one in self.daemons
        )
        leases = tuple(self.leases.values())
        return Fleet(me, daemons, frozenset(self.daemons), leases, {}, self.weights, self.homes)

    def step(self, me: int) -> bool:
        """Let a daemon do its part, and give up what it left before; return whether it did anything."""
        given_up = [unit for unit, lease in self.leases.items() if lease.daemon == me and lease.leaving]
        for unit in given_up:
            del self.leases[unit]
        part = part_of(self.fleet(me))
        assert part.takes.isdisjoint(self.leases), "what another one has is not taken"
        for unit in part.takes:
            self.leases[unit] = Lease(unit, me, False)
        for unit in part.leaves:
            assert self.leases[unit] == Lease(unit, me, False)
            self.leases[unit] = Lease(unit, me, True)
        return bool(given_up or part.takes or part.leaves)

    def settle(self, turns: st.DataObject | None = None) -> None:
        """Let all of them work, in any order, until nobody has anything to do."""
        for _ in range(40):
            order = list(self.daemons) if turns is None else turns.draw(st.permutations(self.daemons))
            did = [me for me in order if self.step(me)]
            if not did:
                return
        raise AssertionError("the division does not come to an end")

    def loads(self) -> dict[int, int]:
        found = Counter(dict.fromkeys(self.daemons, 0))
        for unit, lease in self.leases.items():
            found[lease.daemon] += self.weights[unit]
        return found


@given(st.integers(0, 30), st.integers(0, 12), st.lists(st.sampled_from(["joins", "ends"]), max_size=8), st.data())
def test_every_unit_has_one_daemon_and_each_daemon_as_much(
    units: int, of_sources: int, events: list[str], data: st.DataObject
) -> None:
    world = World({FIRST + number: 1 for number in range(units)} | ({0: of_sources} if of_sources else {}))
    world.daemons = [1]
    world.settle()
    names = iter(range(2, 100))
    for event in events:
        if event == "joins":
            world.daemons.append(next(names))
        elif len(world.daemons) > 1:
            gone = data.draw(st.sampled_from(world.daemons))
            world.daemons.remove(gone)
            world.leases = {unit: lease for unit, lease in world.leases.items() if lease.daemon != gone}
        if data.draw(st.booleans()):
            world.settle(data)
    world.settle(data)
    assert world.leases.keys() == world.weights.keys()
    loads = world.loads().values()
    # One that has the sources, which stay together, may have more than the others.
    assert max(loads) - min(loads) <= max(1, of_sources)


def test_one_that_joins_gets_half_and_the_rest_stays_where_it_is() -> None:
    world = World({FIRST + number: 1 for number in range(10)})
    world.daemons = [1]
    world.settle()
    world.daemons.append(2)
    assert not part_of(world.fleet(2)).takes, "nothing is free yet"
    assert len(part_of(world.fleet(1)).leaves) == 5
    world.settle()
    assert world.loads() == {1: 5, 2: 5}
    assert world.leases[OF_NODE].daemon == 1, "the node's work does not move"
    before = dict(world.leases)
    world.settle()
    assert world.leases == before


def test_a_thousand_subscriptions_on_fifty_daemons() -> None:
    """What a daemon has stays there as far as possible: when others are lost, and when they come back."""
    world = World({FIRST + number: 1 for number in range(1000)})
    world.daemons = list(range(1, 51))
    world.settle()
    assert set(world.loads().values()) == {20}
    before = dict(world.leases)
    lost = set(range(10, 15))
    world.daemons = [one for one in world.daemons if one not in lost]
    world.leases = {unit: lease for unit, lease in world.leases.items() if lease.daemon not in lost}
    world.settle()
    assert set(world.loads().values()) == {22, 23}
    stayed = {unit: lease for unit, lease in before.items() if lease.daemon not in lost}
    assert {unit: world.leases[unit] for unit in stayed} == stayed
    world.daemons += range(51, 56)
    before = dict(world.leases)
    world.settle()
    assert set(world.loads().values()) == {20}
    assert sum(world.leases[unit] != lease for unit, lease in before.items()) == 100


def test_one_whose_jvm_is_still_to_start_gets_nothing_yet() -> None:
    world = World({FIRST + number: 1 for number in range(4)})
    # All begin at once: somebody has to have them.
    world.daemons = [1, 2]
    world.settle()
    assert world.loads() == {1: 2, 2: 2}
    world.memory[1] = Memory(1, 1)
    world.settle()
    assert world.loads() == {1: 2, 2: 2}, "what has begun stays"
    world.daemons.append(3)
    world.memory[2], world.memory[3] = Memory(1, 1), Memory(1, None)
    world.settle()
    assert world.loads() == {1: 2, 2: 2, 3: 0}
    world.memory[3] = Memory(1, 1)
    world.settle()
    assert sorted(world.loads().values()) == [1, 1, 2]
    # The only one that is left takes all, whether it has one or not.
    world.daemons = [3]
    world.leases = {unit: lease for unit, lease in world.leases.items() if lease.daemon == 3}
    world.memory[3] = Memory(1, None)
    world.settle()
    assert world.loads() == {3: 4}


def test_prepared_transactions_stay_with_their_home_and_come_back_to_it() -> None:
    world = World({FIRST + number: 1 for number in range(4)})
    world.daemons = [1]
    world.settle()
    world.homes = {FIRST + number: ("host1", "/home1/prepared/1") for number in range(4)}
    world.daemons.append(2)
    world.settle()
    assert world.loads() == {1: 4, 2: 0}
    # Its daemon ends, and is started again.
    world.daemons.remove(1)
    world.leases.clear()
    world.settle()
    assert world.loads() == {2: 4}
    world.daemons.append(1)
    world.settle()
    assert world.loads() == {1: 4, 2: 0}
    assert world.leases[OF_NODE].daemon == 2


def test_a_subscription_that_was_dropped_is_given_up() -> None:
    world = World({FIRST: 1})
    world.daemons = [1]
    world.settle()
    del world.weights[FIRST]
    assert part_of(world.fleet(1)).leaves == {FIRST}
    world.settle()
    assert world.leases.keys() == {OF_NODE}


def test_one_that_was_expelled_does_nothing() -> None:
    world = World({FIRST: 1})
    world.daemons = [1]
    part = part_of(world.fleet(2))
    assert not part.takes
    assert not part.leaves
