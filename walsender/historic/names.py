"""Texts of values that name catalog objects: reg* types and aclitem.

A value is an oid.  Its text is the object's name in the historic catalog, with the schema if the name alone would not
be found along the search path.  A subscriber's walsender has an empty path: only the objects in pg_catalog are found.

Follows regproc.c, format_type.c (format_type_extended), namespace.c (…IsVisible, FuncnameGetCandidates,
OpernameGetCandidates), acl.c (aclitemout, putid), ruleutils.c (quote_identifier).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from struct import Struct
from typing import Final

from pubsub.sql.identifiers import quote_identifier
from walsender.historic.catalog_layouts import CatalogName
from walsender.historic.tracker import CatalogTracker
from walsender.hot.catalogs import Row
from walsender.types import registry

ACLITEM: Final = 1033
_PG_CATALOG: Final = 11
_RIGHTS: Final = "arwdDxtXUCTcsAm"
"""acl.h: ACL_ALL_RIGHTS_STR, by bit."""
_ACLITEM: Final = {12: (Struct("<III"), 16), 16: (Struct("<IIQ"), 32)}
"""By length, which 16 changed: the layout (grantee, grantor, privileges), and the first bit of the grant options."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What texts depend on besides the catalogs.

    `dollars`: lc_monetary is one of registry.DOLLARS.  `path`: the search path after pg_catalog.  `keywords`: those
    that are quoted as identifiers.  `encoding`: the client's, as the server names it.  `styles`: output functions, by
    type oid, of the built-in types that the server's version or the session's settings write otherwise than
    registry.BUILTIN.  `convert`: makes
    text in the database's encoding text in the client's, for values in binary transfer; None: they are the same.
    """

    dollars: bool
    path: tuple[str, ...]
    keywords: Set[str]
    encoding: str
    styles: Mapping[int, registry.Output]
    convert: registry.Output | None = None

    def quote(self, name: str) -> str:
        return quote_identifier(name, self.keywords)


class Names:
    """Finds names for a transaction with the ids `own`."""

    def __init__(self, tracker: CatalogTracker, own: Set[int], encoding: str, settings: TextSettings) -> None:
        self._tracker = tracker
        self._own = own
        self._encoding = encoding
        self._path = settings.path
        self._quote = settings.quote
        self._texts: dict[tuple[int, int], str] = {}

    def output(self, type_oid: int) -> Callable[[bytes], bytes]:
        """Return the output function of one of TYPES.  It resolves a value once and keeps the text."""
        zero, find = TYPES[type_oid]
        texts = self._texts

        def out(value: bytes) -> bytes:
            oid = int.from_bytes(value, "little")
            if not oid:
                return zero
            text = texts.get((type_oid, oid))
            if text is None:
                text = texts[type_oid, oid] = find(self, oid) or str(oid)
            return text.encode(self._encoding)

        return out

    def aclitem(self, value: bytes) -> bytes:
        layout, shift = _ACLITEM[len(value)]
        grantee, grantor, rights = layout.unpack(value)
        text = self._role(grantee) if grantee else ""
        text += "="
        for bit, letter in enumerate(_RIGHTS):
            if rights >> bit & 1:
                text += letter
            if rights >> bit + shift & 1:
                text += "*"
        return f"{text}/{self._role(grantor)}".encode(self._encoding)

    def _role(self, oid: int) -> str:
        """Return a role's name, quoted by other rules than identifiers (acl.c: putid)."""
        key = (ACLITEM, oid)
        if key not in self._texts:
            row = self._row("pg_authid", oid)
            name = row.text("rolname") if row is not None else str(oid)
            safe = all(letter == "_" or (letter.isascii() and letter.isalnum()) for letter in name)
            self._texts[key] = name if safe else '"' + name.replace('"', '""') + '"'
        return self._texts[key]

    def procedure(self, oid: int) -> str | None:
        """Return a function's name, with its schema unless the bare name finds this function alone."""
        row = self._row("pg_proc", oid)
        if row is None:
            return None
        name, namespace = row.text("proname"), row.number("pronamespace")
        alone = self._found_alone("pg_proc", name, oid, "pronamespace", _arguments)
        return self._qualified(None if alone else namespace, name)

    def procedure_with_arguments(self, oid: int) -> str | None:
        row = self._row("pg_proc", oid)
        if row is None:
            return None
        name, namespace = row.text("proname"), row.number("pronamespace")
        visible = self._visible(namespace, self._alike("pg_proc", name, row, "pronamespace", _arguments))
        arguments = ",".join([self.type(one) or str(one) for one in _arguments(row)])
        return f"{self._qualified(None if visible else namespace, name)}({arguments})"

    def operator(self, oid: int) -> str | None:
        row = self._row("pg_operator", oid)
        if row is None:
            return None
        name = row.text("oprname")
        if self._found_alone("pg_operator", name, oid, "oprnamespace", _operands):
            return name
        return f"{self._quote(self._namespace(row.number('oprnamespace')))}.{name}"

    def operator_with_operands(self, oid: int) -> str | None:
        row = self._row("pg_operator", oid)
        if row is None:
            return None
        name, namespace = row.text("oprname"), row.number("oprnamespace")
        if not self._visible(namespace, self._alike("pg_operator", name, row, "oprnamespace", _operands)):
            name = f"{self._quote(self._namespace(namespace))}.{name}"
        left, right = ((self.type(one) or str(one)) if one else "NONE" for one in _operands(row))
        return f"{name}({left},{right})"

    def relation(self, oid: int) -> str | None:
        return self._simple("pg_class", oid, "relname", "relnamespace")

    def configuration(self, oid: int) -> str | None:
        return self._simple("pg_ts_config", oid, "cfgname", "cfgnamespace")

    def dictionary(self, oid: int) -> str | None:
        return self._simple("pg_ts_dict", oid, "dictname", "dictnamespace")

    def collation(self, oid: int) -> str | None:
        return self._simple("pg_collation", oid, "collname", "collnamespace")

    def namespace(self, oid: int) -> str | None:
        row = self._row("pg_namespace", oid)
        return None if row is None else self._quote(row.text("nspname"))

    def role(self, oid: int) -> str | None:
        row = self._row("pg_authid", oid)
        return None if row is None else self._quote(row.text("rolname"))

    def database(self, oid: int) -> str | None:
        row = self._row("pg_database", oid)
        return None if row is None else self._quote(row.text("datname"))

    def type(self, oid: int) -> str | None:
        """Return a type's name (format_type.c: format_type_be)."""
        special = registry.SPECIAL_NAMES.get(oid)
        if special is not None:
            return special
        row = self._row("pg_type", oid)
        if row is None:
            return None
        element = row.number("typelem")
        if element and row.number("typoutput") == registry.ARRAY_OUT:
            return f"{self.type(element) or str(element)}[]"
        return self._simple("pg_type", oid, "typname", "typnamespace")

    # Looking names up

    def _row(self, catalog: CatalogName, oid: int) -> Row | None:
        return self._tracker.first(catalog, oid, self._own)

    def _simple(self, catalog: CatalogName, oid: int, name_column: str, namespace_column: str) -> str | None:
        """Return the name of an object whose name is unique in its schema."""
        row = self._row(catalog, oid)
        if row is None:
            return None
        name, namespace = row.text(name_column), row.number(namespace_column)
        # With an empty path nothing has to be searched: only pg_catalog is seen.
        alike = (
            [
                other.number(namespace_column)
                for other in self._tracker.all(catalog, self._own)
                if other.text(name_column) == name
            ]
            if self._path and namespace != _PG_CATALOG
            else [namespace]
        )
        return self._qualified(None if self._visible(namespace, alike) else namespace, name)

    def _visible(self, namespace: int, alike: Iterable[int]) -> bool:
        """Return whether an object in `namespace` is found before those like it, in the namespaces `alike`."""
        places = self._places()
        if namespace not in places:
            return False
        return all(places[namespace] <= places[one] for one in alike if one in places)

    def _places(self) -> dict[int, int]:
        """Return the namespaces on the path with their positions there."""
        places = {_PG_CATALOG: 0}
        if self._path:
            by_name = {row.text("nspname"): row.number("oid") for row in self._tracker.all("pg_namespace", self._own)}
            for place, name in enumerate(self._path, 1):
                if name in by_name:
                    places.setdefault(by_name[name], place)
        return places

    def _named(self, catalog: CatalogName, name: str) -> list[Row]:
        return list(self._tracker.find(catalog, name.encode(self._encoding), self._own, 1))

    def _alike(
        self, catalog: CatalogName, name: str, row: Row, column: str, operands: Callable[[Row], tuple[int, ...]]
    ) -> list[int]:
        """Return the namespaces of the objects with the same name and operands."""
        wanted = operands(row)
        return [other.number(column) for other in self._named(catalog, name) if operands(other) == wanted]

    def _found_alone(
        self, catalog: CatalogName, name: str, oid: int, column: str, operands: Callable[[Row], tuple[int, ...]]
    ) -> bool:
        """Return whether the name alone finds `oid` and nothing else."""
        places = self._places()
        first: dict[tuple[int, ...], tuple[int, int]] = {}
        for row in self._named(catalog, name):
            place = places.get(row.number(column))
            if place is not None:
                found = (place, row.number("oid"))
                key = operands(row)
                first[key] = min(found, first.get(key, found))
        return [one for _, one in first.values()] == [oid]

    def _namespace(self, oid: int) -> str:
        row = self._row("pg_namespace", oid)
        return row.text("nspname") if row is not None else ""

    def _qualified(self, namespace: int | None, name: str) -> str:
        if namespace is None:
            return self._quote(name)
        return f"{self._quote(self._namespace(namespace))}.{self._quote(name)}"


def _arguments(row: Row) -> tuple[int, ...]:
    return row.numbers("proargtypes") or ()


def _operands(row: Row) -> tuple[int, ...]:
    return row.number("oprleft"), row.number("oprright")


TYPES: Final[dict[int, tuple[bytes, Callable[[Names, int], str | None]]]] = {
    24: (b"-", Names.procedure),
    2202: (b"-", Names.procedure_with_arguments),
    2203: (b"0", Names.operator),
    2204: (b"0", Names.operator_with_operands),
    2205: (b"-", Names.relation),
    2206: (b"-", Names.type),
    3734: (b"-", Names.configuration),
    3769: (b"-", Names.dictionary),
    4089: (b"-", Names.namespace),
    4096: (b"-", Names.role),
    4191: (b"-", Names.collation),
    6490: (b"-", Names.database),
}
"""By type oid: the text for 0, and the method that names an object; if it returns None, the number is written."""
