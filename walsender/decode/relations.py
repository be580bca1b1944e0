"""The relations that changes belong to: found by file, and kept until a catalog row they were made from changes.

A change refers to its relation by number: it is decoded, perhaps much later, with the definition at its own position.
`Registry` keeps a relation until no transaction in progress can refer to it.  Each output has its own view of a relation:
whether and as what it is sent, and how its values are written.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from pubsub.errors import PubsubError
from walsender.historic.names import TextSettings
from walsender.historic.relation import FIRST_NORMAL_OID, FIRST_UNPINNED_OID, RelationInfo, RelationResolver
from walsender.historic.tracker import CatalogTracker, ChangedKey
from walsender.hot import walk
from walsender.plugins.failure import failure_of
from walsender.plugins.plugin import OutputPlugin
from walsender.rowfilter.compiler import UnsupportedFilter
from walsender.types.registry import Output, TypeInfo
from walsender.xlog.record import RelFileLocator

_numbers: Final = itertools.count(1)
"""Numbers of relations are unique in the process: a decoder can take over another one's changes."""


class View(NamedTuple):
    """A relation as an output sends it, or the TOAST table of one; then `entry` is None."""

    relation: RelationInfo
    entry: Any
    is_toast: bool = False
    names: tuple[tuple[int, Output], ...] = ()
    """Index and output of the columns whose values name catalog objects: resolved when a change is read."""


class Viewer(Protocol):
    """An output, as far as relations concern it.  `views`: its view of each relation that it sends, by number."""

    number: int
    texts: TextSettings
    views: dict[int, View]

    @property
    def plugin(self) -> OutputPlugin[Any]: ...


@dataclass(eq=False, slots=True)
class Decoded:
    """A relation whose changes are sent, or the TOAST table of one.

    `views`: by the number of the output.  `errors`: why it cannot be sent there; an error if a change of it has to be.
    """

    number: int
    views: dict[int, View]
    errors: dict[int, PubsubError]
    is_toast: bool
    viewers: list[Viewer]
    code: int = field(init=False)
    """How the walk over records treats its changes (walk.py)."""

    def __post_init__(self) -> None:
        general = self.errors or any(view.names for view in self.views.values())
        self.code = -1 if general else self.number * 2 + (walk.TOAST if self.is_toast else 0)


@dataclass(eq=False, slots=True)
class Unknown:
    """A file of no relation: an error if a change of it has to be sent."""

    error: PubsubError
    code: ClassVar[int] = -1


class _Ignored:
    """A relation whose changes are not sent."""

    code: ClassVar[int] = walk.IGNORED


IGNORED: Final = _Ignored()

_ANYTHING: Final[ChangedKey] = ("", -1)
"""A relation that depends on this key is forgotten with every change of a catalog."""

Found = Decoded | _Ignored | Unknown

_Place = tuple[bool, int]
"""Where a relation is kept: by its oid (True) or by its file."""


class Registry:
    """Relations by file (walk.py: file_key), shared; a transaction that changed the catalog has a dictionary of its own."""

    def __init__(self, tracker: CatalogTracker, encoding: str) -> None:
        self._tracker = tracker
        self._encoding = encoding
        self._outputs: list[Viewer] = []
        self.by_file: dict[int, Found] = {}
        self.ignored_files: set[int] = set()
        """Files of the system's own relations, of the committed catalog."""
        self._by_oid: dict[int, Found] = {}
        self._dependents: dict[ChangedKey, set[_Place]] = {}
        """What was made from rows with the key."""
        self._depends: dict[_Place, set[ChangedKey]] = {}
        self._types: dict[int, dict[int, TypeInfo]] = {}
        """Built-in types, from the committed catalog, by the settings (`id`) that they are made with."""
        self.numbered: dict[int, Decoded] = {}
        """Relations, by the number that changes have."""
        self._retired: deque[tuple[int, int]] = deque()

    # Outputs

    def add(self, output: Viewer, lsn: int) -> None:
        """Add an output: it sees the relations of changes from `lsn` on."""
        self._outputs.append(output)
        self._forget_all(lsn)

    def remove(self, output: Viewer, lsn: int) -> None:
        self._outputs.remove(output)
        self._forget_all(lsn)

    def take_over(self, other: Registry, lsn: int) -> None:
        """Take the outputs of another registry, whose relations are good for changes before `lsn`."""
        other._forget_all(lsn)
        self._forget_all(lsn)
        self.numbered |= other.numbered
        self._retired = deque(sorted((*self._retired, *other._retired)))
        self._outputs += other._outputs

    def file(self, locator: RelFileLocator, own: Set[int], cache: dict[int, Found] | None) -> Found:
        """Return the relation with a file.

        `own`: the transaction's ids; `cache`: its own relations, if it has changed the catalog.
        """
        space, _, number = locator
        key = walk.file_key(space, number)
        resolve = _Resolving(self, own, shared=cache is None)
        try:
            oid = resolve.any.oid_of_file(space, number)
            if 0 < oid < FIRST_UNPINNED_OID:
                # A catalog's, whose changes are never sent.
                if oid == _Resolving(self, frozenset(), shared=True).any.oid_of_file(space, number):
                    self.ignored_files.add(key)
                elif cache is not None:
                    cache[key] = IGNORED
                return IGNORED
        except PubsubError as error:
            return Unknown(error)
        if not oid:
            return Unknown(PubsubError(f'could not map filenumber "{number}" to relation OID', sqlstate="XX000"))
        found = resolve.relation(oid)
        if cache is not None:
            cache[key] = found
        else:
            self.by_file[key] = found
            self._note(resolve, (False, key), oid, found)
        return found

    def oid(self, oid: int, own: Set[int], *, shared: bool) -> Found:
        """Return a relation by its oid.  `shared`: the transaction has not changed the catalog."""
        if shared and oid in self._by_oid:
            return self._by_oid[oid]
        resolve = _Resolving(self, own, shared=shared)
        found = resolve.relation(oid)
        if shared:
            self._by_oid[oid] = found
            self._note(resolve, (True, oid), oid, found)
        return found

    def refuse_unsupported(self, output: Viewer) -> None:
        """Raise if the committed catalog has a relation whose changes the output could not send.

        PostgreSQL's own refusals come at a relation's first change, and are left until then.
        """
        resolver = _Resolving(self, frozenset(), shared=True).resolver(output.texts)
        for row in list(self._tracker.all("pg_class", frozenset())):
            oid = row.number("oid")
            if oid < FIRST_NORMAL_OID or row.text("relkind") != "r":
                continue
            try:
                relation = resolver.relation(oid)
                entry = _entry(relation, output, resolver) if relation.is_logged else None
            except UnsupportedFilter:
                raise
            except PubsubError:
                continue
            error = None if entry is None else output.plugin.refusal(relation, entry)
            if error is not None:
                raise error

    def forget(self, changed: Iterable[ChangedKey], lsn: int) -> None:
        """Forget the relations made from `changed`: the catalog changed for everyone at `lsn`."""
        for key in (*changed, _ANYTHING):
            if key[1] == 0:
                self._forget_all(lsn)
                return
            if key[0] == "pg_class" and key[1] < FIRST_UNPINNED_OID:
                # A catalog has another file, and its old one's number may be given again.
                self.ignored_files.clear()
            elif key[0] == "pg_type":
                for types in self._types.values():
                    types.pop(key[1], None)
            elif key[0] == "pg_namespace":
                self._types.clear()
            for place in tuple(self._dependents.get(key, ())):
                is_oid, name = place
                found = (self._by_oid if is_oid else self.by_file).pop(name, None)
                if isinstance(found, Decoded):
                    self._retired.append((lsn, found.number))
                self._unnote(place)

    def release(self, oldest: int) -> None:
        """Drop retired relations: no change from before `oldest` is to be sent any more."""
        while self._retired and self._retired[0][0] < oldest:
            found = self.numbered.pop(self._retired.popleft()[1], None)
            if found is not None:
                for viewer in found.viewers:
                    viewer.views.pop(found.number, None)

    def retire(self, cache: dict[int, Found], lsn: int) -> None:
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
        self.ignored_files.clear()
        self._dependents.clear()
        self._depends.clear()
        self._types.clear()

    def _note(self, resolve: _Resolving, place: _Place, oid: int, found: Found) -> None:
        keys = resolve.depends()
        keys.add(("pg_class", oid))
        keys.add(("pg_publication_rel", oid))
        if isinstance(found, Decoded) and any(view.names for view in found.views.values()):
            keys.add(_ANYTHING)
        self._depends[place] = keys
        for key in keys:
            places = self._dependents.get(key)
            if places is None:
                self._dependents[key] = {place}
            else:
                places.add(place)

    def _unnote(self, place: _Place) -> None:
        for key in self._depends.pop(place, ()):
            places = self._dependents[key]
            places.discard(place)
            if not places:
                del self._dependents[key]

    def number(self, views: dict[int, View], errors: dict[int, PubsubError], *, is_toast: bool) -> Decoded:
        """Give a relation its number."""
        number = next(_numbers)
        viewers = [output for output in self._outputs if output.number in views]
        for output in viewers:
            output.views[number] = views[output.number]
        found = self.numbered[number] = Decoded(number, views, errors, is_toast, viewers)
        return found


class _Resolving:
    """One look at the catalogs, as a transaction with the ids `own` sees them, for all outputs."""

    def __init__(self, registry: Registry, own: Set[int], *, shared: bool) -> None:
        self._registry = registry
        self._own = own
        self._shared = shared
        self._resolvers: dict[int, RelationResolver] = {}
        self.any = self.resolver(None)

    def resolver(self, texts: TextSettings | None) -> RelationResolver:
        """Return what makes relations whose values are written with these settings; None: are not written."""
        found = self._resolvers.get(id(texts))
        if found is None:
            registry = self._registry
            types = registry._types.setdefault(id(texts), {}) if self._shared else {}
            settings = texts or _NO_TEXTS
            found = RelationResolver(registry._tracker, self._own, registry._encoding, types, settings)
            self._resolvers[id(texts)] = found
        return found

    def depends(self) -> set[ChangedKey]:
        """Return the keys of the rows that were looked at."""
        return set().union(*(one.depends for one in self._resolvers.values()))

    def relation(self, oid: int) -> Found:
        row = self.any.class_row(oid)
        if row is not None and row.text("relkind") not in set("rpmt"):
            return IGNORED
        views: dict[int, View] = {}
        errors: dict[int, PubsubError] = {}
        made: dict[int, RelationInfo | PubsubError] = {}
        is_toast = False
        for output in self._registry._outputs:
            resolver = self.resolver(output.texts)
            try:
                relation = made.get(id(output.texts))
                if isinstance(relation, PubsubError):
                    raise relation
                if relation is None:
                    relation = made[id(output.texts)] = self._made(oid, resolver)
                if not relation.is_logged:
                    return IGNORED
                is_toast = relation.kind == "t"
                view = self._toast(relation, output, resolver) if is_toast else _view(relation, output, resolver)
                if view is not None:
                    views[output.number] = view
            except PubsubError as error:
                made.setdefault(id(output.texts), error)
                errors[output.number] = error
        if not views and not errors:
            return IGNORED
        return self._registry.number(views, errors, is_toast=is_toast)

    @staticmethod
    def _made(oid: int, resolver: RelationResolver) -> RelationInfo:
        relation = resolver.relation(oid)
        # Attaching or detaching a table above invalidates all partitions below it (tablecmds.c:
        # ATExecAttachPartition).
        relation.generation = (*resolver.generation(oid), *relation.ancestors)
        return relation

    @staticmethod
    def _toast(relation: RelationInfo, output: Viewer, resolver: RelationResolver) -> View | None:
        """Return the view of a TOAST table: its chunks are kept if the table is published."""
        if not relation.toast_of:
            return None
        resolver.depends.add(("pg_class", relation.toast_of))
        resolver.depends.add(("pg_publication_rel", relation.toast_of))
        owner = resolver.relation(relation.toast_of)
        if not owner.is_logged or _entry(owner, output, resolver) is None:
            return None
        return View(relation, None, is_toast=True)


def _entry(relation: RelationInfo, output: Viewer, resolver: RelationResolver) -> Any:
    """Have the plugin describe a relation.  Raises PubsubError, whatever the plugin raises."""
    try:
        return output.plugin.describe(relation, resolver)
    except Exception as error:
        raise failure_of(output.plugin, error) from error


def _view(relation: RelationInfo, output: Viewer, resolver: RelationResolver) -> View | None:
    entry = _entry(relation, output, resolver)
    if entry is None:
        return None
    names = tuple(
        (index, column.type.out)
        for index, column in enumerate(relation.columns)
        if column.type is not None and column.type.named
    )
    return View(relation, entry, names=names)


_NO_TEXTS: Final = TextSettings(False, (), frozenset(), "UTF8", {})
