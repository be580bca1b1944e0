"""Which changes of a relation the publications send, and as which relation (pgoutput.c: get_rel_sync_entry).

This is evaluated once per relation, against the historic catalog of the change at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pubsub.errors import FeatureNotSupported, NotInPrerequisiteState, PubsubError, UndefinedObject
from walsender.historic.encodings import encoded
from walsender.historic.relation import RelationInfo, RelationResolver
from walsender.hot.catalogs import Row
from walsender.rowfilter.compiler import Filter, RowFilterCompiler
from walsender.types.layout import Raw

VERSION_18 = 180000


def missing_publication(name: str) -> UndefinedObject:
    """Return the error for a publication that does not exist at this point in the WAL."""
    return UndefinedObject(
        f'publication "{name}" does not exist',
        hint="Create it, or begin behind its creation; --missing-publication server does what the server itself would do.",
    )


@dataclass(frozen=True, slots=True)
class PublishedRelation:
    """How a relation's changes are sent.

    `target`: the relation that they are sent as, itself or an ancestor.  `source_of`: for each of the target's columns
    the index in this relation's rows; None if rows are the same.  `columns`: indexes of the target's columns that are
    sent.
    """

    target: RelationInfo
    source_of: tuple[int | None, ...] | None
    columns: tuple[int, ...]
    own_columns: tuple[int, ...]
    """The same for the relation itself, whose definition is sent after its ancestor's."""
    insert: bool
    update: bool
    delete: bool
    truncate: bool
    filters: tuple[Filter | None, Filter | None, Filter | None]
    """For inserts, updates and deletes."""

    def as_target(self, row: list[Raw] | None) -> list[Raw] | None:
        """Return a row in the order of the target's columns (tupconvert.c: execute_attr_map_slot)."""
        if row is None or self.source_of is None:
            return row
        return [None if index is None else row[index] for index in self.source_of]


Warn = Callable[[PubsubError], bool]
"""Takes a warning; returns whether it was of interest."""


class PublicationFilter:
    """The publications of one subscriber."""

    def __init__(
        self,
        names: Sequence[str],
        compiler: RowFilterCompiler,
        server_version: int,
        encoding: str,
        on_warning: Warn = lambda _: True,
        *,
        missing_is_error: bool = False,
    ) -> None:
        """`encoding`: as the server names it.  `on_warning` is called for each missing publication until it returns True, with a
        server of 18 or later and unless `missing_is_error`."""
        self._names = {name: encoded(name, encoding) for name in names}
        self._missing: set[str] = set()
        self._on_warning = on_warning
        self._compiler = compiler
        self._version = server_version
        self._missing_is_error = missing_is_error

    def published(self, relation: RelationInfo, resolver: RelationResolver) -> PublishedRelation | None:
        """Return how the relation's changes are sent; None if nothing of it is sent.

        Raises UndefinedObject for a missing publication (before 18), FeatureNotSupported for publications that
        contradict each other and for unsupported row filters.
        """
        if not relation.is_publishable:
            return None
        own = resolver._own
        ids = {row.number("prpubid") for row in self._members(relation.oid, resolver)}
        schema_ids = self._schema_publications(relation.namespace_oid, resolver)
        ancestors = relation.ancestors
        insert = update = delete = truncate = False
        level = 0
        target_oid = relation.oid
        through: list[Row] = []
        for name, key in self._names.items():
            publication = None if key is None else resolver.tracker.first("pg_publication", key, own, 1)
            if publication is None:
                if self._missing_is_error:
                    raise missing_publication(name)
                if self._version >= VERSION_18:
                    self._skip(name)
                    continue
                raise UndefinedObject(f'publication "{name}" does not exist')
            oid = publication.number("oid")
            via_root = publication.flag("pubviaroot")
            here, here_level = relation.oid, 0
            publish = publication.flag("puballtables")
            if publish:
                if self._excepts(oid, ancestors[-1] if ancestors else relation.oid, resolver):
                    continue
                if via_root and ancestors:
                    here, here_level = ancestors[-1], len(ancestors)
            else:
                top = self._topmost(oid, ancestors, resolver)
                if top:
                    publish = True
                    if via_root:
                        here, here_level = ancestors[top - 1], top
                publish = publish or oid in ids or oid in schema_ids
            if not publish or (relation.kind == "p" and not via_root):
                continue
            insert |= publication.flag("pubinsert")
            update |= publication.flag("pubupdate")
            delete |= publication.flag("pubdelete")
            truncate |= publication.flag("pubtruncate")
            if level > here_level:
                continue
            if level < here_level:
                target_oid, level = here, here_level
                through = []
            through.append(publication)
        if not (insert or update or delete or truncate):
            return None
        target = relation if target_oid == relation.oid else resolver.relation(target_oid)
        source_of = None if target is relation else _attribute_map(relation, target)
        columns: tuple[int, ...] = ()
        own_columns: tuple[int, ...] = ()
        filters: tuple[Filter | None, Filter | None, Filter | None] = (None, None, None)
        if insert or update or delete:
            filters = self._filters(through, target, resolver)
        listed, generated = self._column_list(through, target, resolver)
        columns = self._sent(target, listed, generated)
        # A column list is applied by number to the relation itself, whatever columns have these numbers there.
        own_columns = columns if target is relation else self._sent(relation, listed, generated)
        return PublishedRelation(target, source_of, columns, own_columns, insert, update, delete, truncate, filters)

    def _skip(self, name: str) -> None:
        """Warn once of a missing publication (pgoutput.c: LoadPublications)."""
        if name in self._missing:
            return
        warning = NotInPrerequisiteState(
            f'skipped loading publication "{name}"',
            detail="The publication does not exist at this point in the WAL.",
            hint="Create the publication if it does not exist.",
        )
        if self._on_warning(warning):
            self._missing.add(name)

    def _schema_publications(self, namespace: int, resolver: RelationResolver) -> set[int]:
        return {
            row.number("pnpubid") for row in resolver.tracker.find("pg_publication_namespace", namespace, resolver._own)
        }

    @staticmethod
    def _members(oid: int, resolver: RelationResolver) -> list[Row]:
        """Return the rows by which publications name the relation (pg_publication.c: GetRelationIncludedPublications)."""
        rows = resolver.tracker.find("pg_publication_rel", oid, resolver._own)
        return [row for row in rows if not row.flag("prexcept")]

    @staticmethod
    def _excepts(publication: int, root: int, resolver: RelationResolver) -> bool:
        """Return whether a publication for all tables leaves out the tree of partitions, or the table, `root`.

        Before 19 none does.
        """
        resolver.depends.add(("pg_publication_rel", root))
        rows = resolver.tracker.find("pg_publication_rel", root, resolver._own)
        return any(row.flag("prexcept") and row.number("prpubid") == publication for row in rows)

    def _topmost(self, publication: int, ancestors: tuple[int, ...], resolver: RelationResolver) -> int:
        """Return the level of the topmost ancestor in the publication: 1 is the parent, 0 none.

        Follows pg_publication.c: GetTopMostAncestorInPublication.
        """
        found = 0
        for level, oid in enumerate(ancestors, 1):
            resolver.depends.add(("pg_publication_rel", oid))
            if any(row.number("prpubid") == publication for row in self._members(oid, resolver)):
                found = level
                continue
            row = resolver.class_row(oid)
            if row is not None and publication in self._schema_publications(row.number("relnamespace"), resolver):
                found = level
        return found

    def _membership(self, publication: Row, target: RelationInfo, resolver: RelationResolver) -> Row | None:
        """Return the row of pg_publication_rel for the relation that changes are sent as."""
        resolver.depends.add(("pg_publication_rel", target.oid))
        oid = publication.number("oid")
        return next((row for row in self._members(target.oid, resolver) if row.number("prpubid") == oid), None)

    def _filters(
        self, through: list[Row], target: RelationInfo, resolver: RelationResolver
    ) -> tuple[Filter | None, Filter | None, Filter | None]:
        """Return the filter of each action, the publications' joined by OR (pgoutput.c: pgoutput_row_filter_init)."""
        actions = ("pubinsert", "pubupdate", "pubdelete")
        unfiltered = [False, False, False]
        nodes: list[list[str]] = [[], [], []]
        schema_ids = self._schema_publications(target.namespace_oid, resolver)
        for publication in through:
            qual: str | None = None
            if not publication.flag("puballtables") and publication.number("oid") not in schema_ids:
                row = self._membership(publication, target, resolver)
                stored = (
                    resolver.tracker.value_of_publication(row, "prqual", resolver._own) if row is not None else None
                )
                qual = stored if isinstance(stored, str) else None
            for number, action in enumerate(actions):
                if publication.flag(action):
                    if qual is None:
                        unfiltered[number] = True
                    else:
                        nodes[number].append(qual)
            if all(unfiltered):
                break
        compiled = [
            None if skip or not texts else self._compiler.any_of(texts, target)
            for skip, texts in zip(unfiltered, nodes, strict=True)
        ]
        return compiled[0], compiled[1], compiled[2]

    def _column_list(
        self, through: list[Row], target: RelationInfo, resolver: RelationResolver
    ) -> tuple[frozenset[int] | None, bool]:
        """Return the numbers of the listed columns, None if all are sent; and whether stored generated ones are too."""
        generated: bool | None = None
        has_generated = any(column.generated and not column.dropped for column in target.columns)
        chosen: frozenset[int] | None = None
        sets: list[frozenset[int]] = []
        lists: list[frozenset[int] | None] = []
        for publication in through:
            listed: frozenset[int] | None = None
            if not publication.flag("puballtables"):
                row = self._membership(publication, target, resolver)
                stored = (
                    resolver.tracker.value_of_publication(row, "prattrs", resolver._own) if row is not None else None
                )
                if isinstance(stored, tuple):
                    listed = frozenset(stored)
            lists.append(listed)
        for publication, listed in zip(through, lists, strict=True):
            if listed is None and self._version >= VERSION_18 and has_generated:
                wanted = publication.text("pubgencols") == "s"
                if generated is not None and generated != wanted:
                    raise FeatureNotSupported(
                        "cannot use different values of publish_generated_columns for table "
                        f'"{target.qualified_name}" in different publications'
                    )
                generated = wanted
        for listed in lists:
            if listed is None:
                numbers_sent = frozenset(target.columns[i].number for i in self._sent(target, None, bool(generated)))
            else:
                numbers_sent = listed
            sets.append(numbers_sent)
        if len(set(sets)) > 1:
            raise FeatureNotSupported(
                f'cannot use different column lists for table "{target.qualified_name}" in different publications'
            )
        if lists and lists[0] is not None:
            chosen = lists[0]
        return chosen, bool(generated)

    def _sent(self, relation: RelationInfo, listed: frozenset[int] | None, generated: bool) -> tuple[int, ...]:
        """Return the indexes of the columns that are sent (proto.c: logicalrep_should_publish_column)."""
        found = []
        for index, column in enumerate(relation.columns):
            if column.dropped:
                continue
            if self._version < VERSION_18:
                if column.generated or (listed is not None and column.number not in listed):
                    continue
            elif listed is not None:
                if column.number not in listed:
                    continue
            elif column.generated and not (column.generated == "s" and generated):
                continue
            found.append(index)
        return tuple(found)


def _attribute_map(source: RelationInfo, target: RelationInfo) -> tuple[int | None, ...] | None:
    """Return the source's index of each of the target's columns; None if rows are the same.

    Follows tupconvert.c: build_attrmap_by_name_if_req.
    """
    by_name = {column.name: index for index, column in enumerate(source.columns) if not column.dropped}
    found = tuple(None if column.dropped else by_name.get(column.name) for column in target.columns)
    return None if found == tuple(range(len(source.columns))) else found
