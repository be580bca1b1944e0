"""Build a relation from the historic catalog, as one transaction sees it at one position.

It is made once and kept until a row that it was made from changes (`depends`).  Follows relcache.c
(RelationGetIdentityKeyBitmap, RelationGetIndexList), partition.c (get_partition_ancestors), lsyscache.c (getBaseType).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final, NamedTuple

from pubsub.errors import DataCorrupted, FeatureNotSupported, PubsubError
from pubsub.protocol.output import numbers
from pubsub.protocol.output.xml import xml_send
from walsender.historic import names
from walsender.historic.names import Names, TextSettings
from walsender.historic.tracker import CatalogTracker, ChangedKey
from walsender.hot.catalogs import Row
from walsender.types import registry
from walsender.types.layout import ColumnLayout, Raw, RowLayout, alignment_of
from walsender.types.registry import TypeInfo, UnsupportedType

FIRST_NORMAL_OID: Final = 16384
FIRST_UNPINNED_OID: Final = 12000
_TOAST_NAMESPACE: Final = 99


class ColumnInfo(NamedTuple):
    """A column; `type` is None for a dropped one."""

    number: int
    name: str
    type_oid: int
    type_modifier: int
    dropped: bool
    generated: str
    """Empty, "s" (stored) or "v" (virtual)."""
    type: TypeInfo | None


@dataclass(eq=False, slots=True)
class RelationInfo:
    """A relation.  `columns`: in the order of their numbers, dropped ones included; `row` reads their values."""

    oid: int
    schema: str
    name: str
    kind: str
    persistence: str
    replica_identity: str
    is_partition: bool
    rewrites: int
    """The relation that is being rewritten into this transient one; 0: none."""
    toast_of: int
    """The relation whose TOAST table this is; 0: none."""
    namespace_oid: int
    columns: tuple[ColumnInfo, ...]
    identity: frozenset[int]
    """Numbers of the columns of the replica identity's index."""
    ancestors: tuple[int, ...]
    """The partitioned tables above it, the nearest first."""
    row: RowLayout
    generation: tuple[int, ...] = ()
    """Changes whenever definitions of the relation that were sent may have become wrong."""

    @property
    def qualified_name(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def is_logged(self) -> bool:
        """Whether its changes are decoded: RelationIsLogicallyLogged, and no sequence (ReorderBufferProcessTXN)."""
        return self.persistence == "p" and self.kind in "rpmt" and self.oid >= FIRST_UNPINNED_OID

    @property
    def is_publishable(self) -> bool:
        """Whether it can be published (pg_publication.c: is_publishable_class); a transient relation cannot."""
        return self.kind in "rp" and self.persistence == "p" and self.oid >= FIRST_NORMAL_OID and not self.rewrites


class RelationResolver:
    """Makes relations and types from the tracker, for a transaction with the ids `own`.

    `depends`: the keys of the rows that it looked at.
    """

    def __init__(
        self,
        tracker: CatalogTracker,
        own: Set[int],
        encoding: str,
        builtin: dict[int, TypeInfo],
        settings: TextSettings,
    ) -> None:
        """`builtin`: the built-in types made so far; more are added."""
        self._builtin = builtin
        self._settings = settings
        self._names = Names(tracker, own, encoding, settings)
        self.tracker = tracker
        self._own = own
        self._encoding = encoding
        self._types: dict[int, TypeInfo] = {}
        self.depends: set[ChangedKey] = set()

    def oid_of_file(self, space: int, number: int) -> int:
        """Return the oid of the relation with this file in a tablespace; 0: none that is visible.

        Temporary relations have files of their own, which may have the same number; what is done to them is not logged.
        Raises PubsubError if there are two (relfilenumbermap.c: RelidByRelfilenumber).
        """
        found = [
            row.number("oid")
            for row in self.tracker.find("pg_class", number, self._own, 1)
            if row.text("relpersistence") != "t" and (row.number("reltablespace") or self.tracker.space) == space
        ]
        # A catalog and the transient relation into which it is rewritten may share a file for a moment.
        if len(found) > 1 and min(found) >= FIRST_NORMAL_OID:
            raise PubsubError(f"unexpected duplicate for tablespace {space}, relfilenumber {number}", sqlstate="XX000")
        return found[0] if found else 0

    def generation(self, oid: int) -> tuple[int, ...]:
        """Return a relation's generation, see RelationInfo."""
        return self.tracker.generation(oid, self._own)

    def class_row(self, oid: int) -> Row | None:
        self.depends.add(("pg_class", oid))
        return self.tracker.first("pg_class", oid, self._own)

    def relation(self, oid: int) -> RelationInfo:
        """Return a relation.  Raises DataCorrupted if there is none; UnsupportedType only when a value is written."""
        row = self.class_row(oid)
        if row is None:
            raise DataCorrupted(f"the historic catalog has no relation {oid}")
        toast_of = 0
        kind = row.text("relkind")
        if kind == "t":
            owner = self.tracker.first("pg_class", oid, self._own, 2)
            toast_of = owner.number("oid") if owner is not None else 0
        columns = self._columns(oid, row.number("relnatts"))
        layout = RowLayout([column[1] for column in columns])
        replica_identity = row.text("relreplident")
        ancestors = self.ancestors(oid) if row.flag("relispartition") else ()
        return RelationInfo(
            oid,
            self.namespace(row.number("relnamespace")),
            row.text("relname"),
            kind,
            row.text("relpersistence"),
            replica_identity,
            row.flag("relispartition"),
            row.number("relrewrite"),
            toast_of,
            row.number("relnamespace"),
            tuple(column[0] for column in columns),
            self._identity(oid, replica_identity, kind),
            ancestors,
            layout,
        )

    def namespace(self, oid: int) -> str:
        self.depends.add(("pg_namespace", oid))
        row = self.tracker.first("pg_namespace", oid, self._own)
        return row.text("nspname") if row is not None else ""

    def ancestors(self, oid: int) -> tuple[int, ...]:
        """Return the partitioned tables above, nearest first (get_partition_ancestors_worker).

        A partition that is being detached has none.
        """
        found: list[int] = []
        while len(found) < 1000:
            self.depends.add(("pg_inherits", oid))
            row = next((r for r in self.tracker.find("pg_inherits", oid, self._own) if r.number("inhseqno") == 1), None)
            if row is None or row.flag("inhdetachpending"):
                break
            parent = self.class_row(row.number("inhparent"))
            if parent is None or parent.text("relkind") != "p":
                break
            oid = row.number("inhparent")
            found.append(oid)
        return tuple(found)

    def type(self, oid: int) -> TypeInfo:
        """Return a type.  Raises UnsupportedType, which names it."""
        known = self._types.get(oid)
        if known is None:
            known = self._types[oid] = self._type(oid, 0)
        return known

    def _columns(self, oid: int, natts: int) -> list[tuple[ColumnInfo, ColumnLayout]]:
        self.depends.add(("pg_attribute", oid))
        rows = {row.number("attnum"): row for row in self.tracker.find("pg_attribute", oid, self._own)}
        found: list[tuple[ColumnInfo, ColumnLayout]] = []
        for number in range(1, natts + 1):
            row = rows.get(number)
            if row is None:
                raise DataCorrupted(f"the historic catalog has no column {number} of relation {oid}")
            dropped = row.flag("attisdropped")
            missing: Raw = None
            length, alignment = row.number("attlen"), alignment_of(row.text("attalign"))
            if row.flag("atthasmissing"):
                stored = row.raw("attmissingval")
                if stored is not None:
                    _, _, elements = registry.array_elements(stored, length, alignment)
                    missing = elements[0] if elements else None
            type_oid = row.number("atttypid")
            info = None if dropped else self._type_or_refusal(type_oid, length, alignment)
            found.append(
                (
                    ColumnInfo(
                        number,
                        row.text("attname"),
                        type_oid,
                        row.number("atttypmod"),
                        dropped,
                        row.text("attgenerated"),
                        info,
                    ),
                    ColumnLayout(length, alignment, missing),
                )
            )
        return found

    def _type_or_refusal(self, oid: int, length: int, alignment: int) -> TypeInfo:
        """Return the type, or one that raises UnsupportedType when a value is written: other columns can be sent."""
        try:
            return self.type(oid)
        except UnsupportedType as error:
            refusal = error

        def refuse(value: bytes) -> bytes:
            raise UnsupportedType(refusal.message, detail=refusal.detail, hint=refusal.hint)

        row = self.tracker.first("pg_type", oid, self._own)
        name = row.text("typname") if row is not None else str(oid)
        namespace = self.namespace(row.number("typnamespace")) if row is not None else ""
        return TypeInfo(
            oid, namespace, name, length, alignment, refuse, refuse, namespace, name, "?", name, oid, refusal
        )

    def _identity(self, oid: int, replica_identity: str, kind: str) -> frozenset[int]:
        self.depends.add(("pg_index", oid))
        if replica_identity not in {"d", "i"}:
            return frozenset()
        for row in self.tracker.find("pg_index", oid, self._own):
            if not row.flag("indislive") or not row.flag("indisunique") or row["indpred"] is not None:
                continue
            if not row.flag("indimmediate"):
                continue
            if not row.flag("indisvalid") and not (kind == "p" and row.flag("indisprimary")):
                continue
            if row.flag("indisprimary" if replica_identity == "d" else "indisreplident"):
                # Without the columns of INCLUDE (relcache.c: RelationGetIndexAttrBitmap).
                keys = (row.numbers("indkey") or ())[: row.number("indnkeyatts")]
                return frozenset(number for number in keys if number)
        return frozenset()

    def _type(self, oid: int, depth: int) -> TypeInfo:
        self.depends.add(("pg_type", oid))
        known = self._builtin.get(oid)
        if known is not None:
            return known
        row = self.tracker.first("pg_type", oid, self._own)
        if row is None or depth > 32:
            raise UnsupportedType(f"the type {oid} is not in the historic catalog")
        name = row.text("typname")
        namespace = self.namespace(row.number("typnamespace"))
        length, alignment = row.number("typlen"), alignment_of(row.text("typalign"))
        kind = row.text("typtype")
        label = registry.SPECIAL_NAMES.get(oid) or self._label(namespace, name)
        base_namespace, base_name, base_oid = namespace, name, oid
        named = False
        has_binary = True
        builtin = registry.BUILTIN.get(oid)
        other = self._other(row) if oid >= FIRST_NORMAL_OID and kind == "b" else None
        if builtin is not None:
            out, send = self._settings.styles.get(oid, builtin[0]), builtin[1]
            if oid == registry.XML:
                send = xml_send(self._settings.encoding)
            send = self._converted(oid, name, send)
        elif other is not None:
            out, send = other
            has_binary = row.number("typsend") != 0
        elif oid in names.TYPES:
            out, send, named = self._names.output(oid), numbers.reversed_bytes, True
        elif oid == names.ACLITEM:
            out, send, named, has_binary = self._names.aclitem, _no_binary(name), True, False
        elif oid in {registry.INT2VECTOR, registry.OIDVECTOR}:
            out, send = registry.vector_type(self._type(21 if oid == registry.INT2VECTOR else 26, depth + 1))
        elif oid == registry.MONEY and self._settings.dollars:
            out, send = numbers.dollars_out, numbers.reversed_bytes
        elif kind == "d":
            below = self._type(row.number("typbasetype"), depth + 1)
            out, send, named, has_binary = below.out, below.send, below.named, below.has_binary
            base_namespace, base_name, base_oid = below.base_namespace, below.base_name, below.base_oid
        elif kind == "e":
            self.depends.add(("pg_enum", oid))
            labels = {
                r.number("oid"): r.text("enumlabel").encode(self._encoding)
                for r in self.tracker.find("pg_enum", oid, self._own)
            }
            out = registry.enum_type(name, labels)
            send = self._converted(registry.TEXT, name, out)
        elif kind == "c":
            columns = self._columns_of_type(row.number("typrelid"), depth)
            named = any(info.named for info, _, _ in columns)
            out, send = registry.composite_type(
                [(info, dropped) for info, dropped, _ in columns], RowLayout([layout for _, _, layout in columns])
            )
        elif kind in {"r", "m"}:
            self.depends.add(("pg_range", oid))
            range_row = self.tracker.first("pg_range", oid, self._own, 0 if kind == "r" else 1)
            if range_row is None:
                raise UnsupportedType(f"the range type {name} is not in the historic catalog")
            subtype = self._type(range_row.number("rngsubtype"), depth + 1)
            of_range = registry.RangeType(subtype)
            named = subtype.named
            if kind == "r":
                out, send = of_range.out, of_range.send
            else:
                out, send = of_range.multirange_out, of_range.multirange_send
        elif kind == "b" and row.number("typelem") and row.number("typoutput") == registry.ARRAY_OUT:
            element = self._type(row.number("typelem"), depth + 1)
            out, send = registry.array_type(element, self._delimiter(element.oid))
            label = element.label + "[]"
            named = element.named
        else:
            raise UnsupportedType(
                f'values of type "{namespace}.{name}" cannot be decoded',
                hint="Leave the column out with a column list, or the table out of the publication.",
            )
        info = TypeInfo(
            oid,
            namespace,
            name,
            length,
            alignment,
            out,
            send,
            base_namespace,
            base_name,
            kind,
            label,
            base_oid,
            named=named,
            has_binary=has_binary,
        )
        if builtin is not None:
            self._builtin[oid] = info
        return info

    def _label(self, namespace: str, name: str) -> str:
        quote = self._settings.quote
        found = namespace == "pg_catalog" or namespace in self._settings.path
        return quote(name) if found else f"{quote(namespace)}.{quote(name)}"

    def _other(self, row: Row) -> tuple[registry.Output, registry.Output] | None:
        """Return the functions that write a type of a known extension, or one with built-in types' functions.

        None for any other type.
        """
        function = self._function(row, "typoutput")
        if function is not None and function.number("prolang") != registry.INTERNAL_LANGUAGE:
            library, name = function.text("probin").rpartition("/")[2], row.text("typname")
            found = registry.EXTENSIONS.get((library, function.text("prosrc")))
            return None if found is None else (found[0], self._converted(library, name, found[1]))
        out, send = self._of_built_in(row, "typoutput"), self._of_built_in(row, "typsend")
        if out is None or (send is None and row.number("typsend")):
            return None
        text, name = self._settings.styles.get(out, registry.BUILTIN[out][0]), row.text("typname")
        return text, _no_binary(name) if send is None else self._converted(send, name, registry.BUILTIN[send][1])

    def _converted(self, what: int | str, name: str, send: registry.Output) -> registry.Output:
        convert = self._settings.convert
        return send if convert is None else registry.converted_send(convert, what, name, send)

    def _of_built_in(self, row: Row, column: str) -> int | None:
        """Return the built-in type with the same function, or None.

        A function in the language `internal` is identified by its source (fmgr.c); others are no built-in type's.
        """
        function = self._function(row, column)
        if function is None or function.number("prolang") != registry.INTERNAL_LANGUAGE:
            return None
        source = function.text("prosrc")
        for oid in registry.BUILTIN:
            built_in = self.tracker.first("pg_type", oid, self._own)
            if built_in is not None and (its := self._function(built_in, column)) and its.text("prosrc") == source:
                return oid
        return None

    def _function(self, row: Row, column: str) -> Row | None:
        number = row.number(column)
        return self.tracker.first("pg_proc", number, self._own) if number else None

    def _delimiter(self, element: int) -> str:
        row = self.tracker.first("pg_type", element, self._own)
        return (row.text("typdelim") if row is not None else "") or ","

    def _columns_of_type(self, relation: int, depth: int) -> list[tuple[TypeInfo, bool, ColumnLayout]]:
        self.depends.add(("pg_attribute", relation))
        rows = sorted(
            (row for row in self.tracker.find("pg_attribute", relation, self._own) if row.number("attnum") > 0),
            key=lambda row: row.number("attnum"),
        )
        found = []
        for row in rows:
            length, alignment = row.number("attlen"), alignment_of(row.text("attalign"))
            dropped = row.flag("attisdropped")
            if dropped:
                info = TypeInfo(0, "", "", length, alignment, _dropped, _dropped, "", "")
            else:
                info = self._type(row.number("atttypid"), depth + 1)
            found.append((info, dropped, ColumnLayout(length, alignment)))
        return found


def _no_binary(name: str) -> registry.Output:
    def send(value: bytes) -> bytes:
        raise FeatureNotSupported(f"no binary output function available for type {name}", sqlstate="42883")

    return send


def _dropped(value: bytes) -> bytes:
    raise AssertionError("a dropped column has no value")
