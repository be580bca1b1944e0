"""The relations that changes belong to: found by file, and kept until a catalog row they were made from changes.

A change refers to its relation by number: it is decoded, perhaps much later, with the definition at its own position.
`Registry` keeps a relation until no transaction in progress can refer to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import ClassVar, Final, Generic, TypeVar

from pubsub.errors import PubsubError
from walsender.historic.names import TextSettings
from walsender.historic.relation import FIRST_NORMAL_OID, FIRST_UNPINNED_OID, RelationInfo, RelationResolver
from walsender.historic.tracker import CatalogTracker, ChangedKey
from walsender.hot import walk
from walsender.output.rowfilter import UnsupportedFilter
from walsender.types.registry import Output, TypeInfo

Entry = TypeVar("Entry")

Describe = Callable[[RelationInfo, RelationResolver], Entry | None]
"""Makes the output plugin's entry for a relation; None: its changes are not sent."""


@dataclass(eq=False, slots=True)
class Decoded(Generic[Entry]):
    """A relation whose changes are sent, or the TOAST table of one; then `entry` is None."""

    number: int
    relation: RelationInfo
    entry: Entry | None
    is_toast: bool
    names: tuple[tuple[int, Output], ...] = ()
    """Index and output of the columns whose values name catalog objects: resolved when a change is read."""
    code: int = field(init=False)
    """How the walk over records treats its changes (walk.py)."""

    def __post_init__(self) -> None:
        self.code = -1 if self.names else self.number * 2 + (walk.TOAST if self.is_toast else 0)


@dataclass(eq=False, slots=True)
class Unknown:
    """A file of no relation, or of one that cannot be described: an error if a change of it has to be sent."""

    error: PubsubError
    no_relation: bool = False
    """No relation has the file."""
    code: ClassVar[int] = -1


class _Ignored:
    """A relation whose changes are not sent."""

    code: ClassVar[int] = walk.IGNORED


IGNORED: Final = _Ignored()

_ANYTHING: Final[ChangedKey] = ("", -1)
"""A relation that depends on this key is forgotten with every change of a catalog."""

Found = Decoded[Entry] | _Ignored | Unknown


class Registry(Generic[Entry]):
    """Relations by file number, shared; a transaction that changed the catalog has a dictionary of its own."""

    def __init__(
        self,
        tracker: CatalogTracker,
        describe: Describe[Entry],
        encoding: str,
        settings: TextSettings,
    ) -> None:
        self._settings = settings
        self._tracker = tracker
        self._describe = describe
        self._encoding = encoding
        self.by_file: dict[int, Found[Entry]] = {}
        self.ignored_files: set[int] = set()
        """Files of the system's own relations."""
        self._by_oid: dict[int, Found[Entry]] = {}
        self._dependents: dict[ChangedKey, set[int]] = {}
        """Files, and oids as negative numbers, whose relations were made from rows with the key."""
        self._depends: dict[int, set[ChangedKey]] = {}
        self._types: dict[int, TypeInfo] = {}
        """Built-in types, from the committed catalog."""
        self.numbered: dict[int, Decoded[Entry]] = {}
        """Relations, by the number that changes have."""
        self._retired: deque[tuple[int, int]] = deque()
        self._next = 1

    def file(self, number: int, own: Set[int], cache: dict[int, Found[Entry]] | None) -> Found[Entry]:
        """Return the relation with file `number`.

        `own`: the transaction's ids; `cache`: its own relations, if it has changed the catalog.
        """
        resolver = self._resolver(own, shared=cache is None)
        oid = resolver.oid_of_file(number)
        if 0 < oid < FIRST_UNPINNED_OID:
            # A file belongs to one relation for good; this one is a catalog's, whose changes are never sent.
            self.ignored_files.add(number)
            return IGNORED
        if not oid:
            return Unknown(
                PubsubError(f'could not map filenumber "{number}" to relation OID', sqlstate="XX000"), no_relation=True
            )
        found = self._resolve(oid, resolver)
        if cache is not None:
            cache[number] = found
        else:
            self.by_file[number] = found
            self._note(resolver, number, oid, found)
        return found

    def oid(self, oid: int, own: Set[int], *, shared: bool) -> Found[Entry]:
        """Return a relation by its oid.  `shared`: the transaction has not changed the catalog."""
        if shared and oid in self._by_oid:
            return self._by_oid[oid]
        resolver = self._resolver(own, shared=shared)
        found = self._resolve(oid, resolver)
        if shared:
            self._by_oid[oid] = found
            self._note(resolver, -oid, oid, found)
        return found

    def refuse_unsupported(self, refusal: Callable[[RelationInfo, Entry], PubsubError | None]) -> None:
        """Raise if the committed catalog has a relation whose changes could not be sent.

        PostgreSQL's own refusals come at a relation's first change, and are left until then.
        """
        resolver = self._resolver(frozenset(), shared=True)
        for row in list(self._tracker.all("pg_class", frozenset())):
            oid = row.number("oid")
            if oid < FIRST_NORMAL_OID or row.text("relkind") != "r":
                continue
            try:
                relation = resolver.relation(oid)
                entry = self._describe(relation, resolver) if relation.is_logged else None
            except UnsupportedFilter:
                raise
            except PubsubError:
                continue
            error = None if entry is None else refusal(relation, entry)
            if error is not None:
                raise error

    def forget(self, changed: Iterable[ChangedKey], lsn: int) -> None:
        """Forget the relations made from `changed`: the catalog changed for everyone at `lsn`."""
        for key in (*changed, _ANYTHING):
            if key[1] == 0:
                self._forget_all(lsn)
                return
            if key[0] == "pg_type":
                self._types.pop(key[1], None)
            elif key[0] == "pg_namespace":
                self._types.clear()
            for place in tuple(self._dependents.get(key, ())):
                found = self.by_file.pop(place, None) if place > 0 else self._by_oid.pop(-place, None)
                if isinstance(found, Decoded):
                    self._retired.append((lsn, found.number))
                self._unnote(place)

    def release(self, oldest: int) -> None:
        """Drop retired relations: no transaction in progress has changes from before `oldest`."""
        while self._retired and self._retired[0][0] < oldest:
            self.numbered.pop(self._retired.popleft()[1], None)

    def retire(self, cache: dict[int, Found[Entry]], lsn: int) -> None:
        """Retire a transaction's own relations: no further change refers to them."""
        for found in cache.values():
            if isinstance(found, Decoded):
                self._retired.append((lsn, found.number))

    def _forget_all(self, lsn: int) -> None:
        for cached in (self.by_file, self._by_oid):
            for found in cached.values():
                if isinstance(found, Decoded):
                    self._retired.append((lsn, found.number))
            cached.clear()
        self._dependents.clear()
        self._depends.clear()
        self._types.clear()

    def _resolver(self, own: Set[int], *, shared: bool) -> RelationResolver:
        types = self._types if shared else {}
        return RelationResolver(self._tracker, own, self._encoding, types, self._settings)

    def _note(self, resolver: RelationResolver, place: int, oid: int, found: Found[Entry]) -> None:
        keys = resolver.depends
        keys.add(("pg_class", oid))
        keys.add(("pg_publication_rel", oid))
        if isinstance(found, Decoded) and found.names:
            keys.add(_ANYTHING)
        self._depends[place] = keys
        for key in keys:
            places = self._dependents.get(key)
            if places is None:
                self._dependents[key] = {place}
            else:
                places.add(place)

    def _unnote(self, place: int) -> None:
        for key in self._depends.pop(place, ()):
            places = self._dependents[key]
            places.discard(place)
            if not places:
                del self._dependents[key]

    def _resolve(self, oid: int, resolver: RelationResolver) -> Found[Entry]:
        row = resolver.class_row(oid)
        if row is not None and row.text("relkind") not in set("rpmt"):
            return IGNORED
        try:
            relation = resolver.relation(oid)
            if not relation.is_logged:
                return IGNORED
            if relation.kind == "t":
                if not relation.toast_of:
                    return IGNORED
                # Whether its chunks are kept depends on whether the table is published.
                resolver.depends.add(("pg_class", relation.toast_of))
                resolver.depends.add(("pg_publication_rel", relation.toast_of))
                owner = resolver.relation(relation.toast_of)
                if not owner.is_logged or self._describe(owner, resolver) is None:
                    return IGNORED
                return self._decoded(relation, None, is_toast=True)
            # Attaching or detaching a table above invalidates all partitions below it (tablecmds.c:
            # ATExecAttachPartition).
            relation.generation = (*resolver.generation(oid), *relation.ancestors)
            entry = self._describe(relation, resolver)
        except PubsubError as error:
            return Unknown(error)
        return IGNORED if entry is None else self._decoded(relation, entry, is_toast=False)

    def _decoded(self, relation: RelationInfo, entry: Entry | None, *, is_toast: bool) -> Decoded[Entry]:
        names = tuple(
            (index, column.type.out)
            for index, column in enumerate(relation.columns)
            if column.type is not None and column.type.named and not is_toast
        )
        found = Decoded(self._next, relation, entry, is_toast, names)
        self._next += 1
        self.numbered[found.number] = found
        return found
