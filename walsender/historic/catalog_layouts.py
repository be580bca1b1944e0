"""The system catalogs that decoding needs, and what is read from their rows.

The layout of a catalog is the server's own, read from its pg_attribute when decoding begins, so that one code path
serves all versions; a column that a version does not have reads as None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import Final, Literal, Self

from walsender.hot import catalogs as hot
from walsender.hot.catalogs import EVERYBODY, NOBODY, RELATION, Value
from walsender.types.layout import ColumnLayout, Raw, RowLayout, ToastPointer

CatalogName = Literal[
    "pg_class",
    "pg_attribute",
    "pg_type",
    "pg_namespace",
    "pg_index",
    "pg_enum",
    "pg_range",
    "pg_inherits",
    "pg_publication",
    "pg_publication_rel",
    "pg_toast_6106",
    "pg_publication_namespace",
    "pg_replication_origin",
    "pg_proc",
    "pg_operator",
    "pg_collation",
    "pg_ts_config",
    "pg_ts_dict",
    "pg_authid",
    "pg_database",
]

_INT2VECTOR, _OIDVECTOR = 22, 30
_NAME, _TEXT, _NODE_TREE = 19, 25, 194
_KINDS: Final = {16: hot.BOOL, 18: hot.CHAR, _NAME: hot.NAME, 21: hot.INT2, 23: hot.INT4, 24: hot.UINT4, 26: hot.UINT4}
"""How values are read that lie at a fixed place, by type oid."""


@dataclass(frozen=True, slots=True)
class CatalogDefinition:
    """A catalog to be read.  `keys`: the columns that rows are looked up by; `columns`: those that are read."""

    name: CatalogName
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    invalidates: int = NOBODY
    """Which relation cache entries PostgreSQL invalidates at a change: definitions that were sent may be wrong then."""
    owned: bool = True
    """Whether a row belongs to the oid that is its first key."""
    shared: bool = False
    """Whether all databases have it in common."""


DEFINITIONS: Final = (
    CatalogDefinition(
        "pg_class",
        ("oid", "relfilenode", "reltoastrelid"),
        (
            "oid",
            "relname",
            "relnamespace",
            "relfilenode",
            "reltablespace",
            "reltoastrelid",
            "relpersistence",
            "relkind",
            "relnatts",
            "relreplident",
            "relispartition",
            "relrewrite",
        ),
        invalidates=RELATION,
    ),
    CatalogDefinition(
        "pg_attribute",
        ("attrelid",),
        (
            "attrelid",
            "attname",
            "atttypid",
            "attlen",
            "attnum",
            "atttypmod",
            "attbyval",
            "attalign",
            "atthasmissing",
            "attgenerated",
            "attisdropped",
            "attmissingval",
        ),
        invalidates=RELATION,
    ),
    CatalogDefinition(
        "pg_type",
        ("oid",),
        (
            "oid",
            "typname",
            "typnamespace",
            "typlen",
            "typbyval",
            "typtype",
            "typcategory",
            "typdelim",
            "typrelid",
            "typelem",
            "typbasetype",
            "typtypmod",
            "typalign",
            "typoutput",
            "typsend",
        ),
    ),
    CatalogDefinition("pg_namespace", ("oid",), ("oid", "nspname"), invalidates=EVERYBODY),
    CatalogDefinition(
        "pg_index",
        ("indrelid",),
        (
            "indexrelid",
            "indrelid",
            "indnkeyatts",
            "indisunique",
            "indisprimary",
            "indimmediate",
            "indisvalid",
            "indislive",
            "indisreplident",
            "indkey",
            "indpred",
        ),
        invalidates=RELATION,
    ),
    CatalogDefinition("pg_enum", ("enumtypid",), ("oid", "enumtypid", "enumlabel")),
    CatalogDefinition("pg_range", ("rngtypid", "rngmultitypid"), ("rngtypid", "rngsubtype", "rngmultitypid")),
    CatalogDefinition(
        "pg_inherits", ("inhrelid",), ("inhrelid", "inhparent", "inhseqno", "inhdetachpending"), invalidates=RELATION
    ),
    CatalogDefinition(
        "pg_publication",
        ("oid", "pubname"),
        (
            "oid",
            "pubname",
            "puballtables",
            "pubinsert",
            "pubupdate",
            "pubdelete",
            "pubtruncate",
            "pubviaroot",
            "pubgencols",
        ),
        invalidates=EVERYBODY,
        owned=False,
    ),
    # A partition is sent as its root is published: a change invalidates all (pgoutput.c:
    # rel_sync_cache_publication_cb).
    CatalogDefinition(
        "pg_publication_rel",
        ("prrelid",),
        ("prpubid", "prrelid", "prexcept", "prqual", "prattrs"),
        invalidates=EVERYBODY,
    ),
    # The TOAST table of pg_publication_rel, which has long row filters.
    CatalogDefinition("pg_toast_6106", ("chunk_id",), ("chunk_id", "chunk_seq", "chunk_data"), owned=False),
    CatalogDefinition(
        "pg_publication_namespace", ("pnnspid",), ("pnpubid", "pnnspid"), invalidates=EVERYBODY, owned=False
    ),
    CatalogDefinition("pg_replication_origin", ("roident",), ("roident", "roname"), owned=False, shared=True),
    # The objects that reg* and aclitem values name (names.py), and other types' output functions (relation.py).
    CatalogDefinition(
        "pg_proc", ("oid", "proname"), ("oid", "proname", "pronamespace", "prolang", "proargtypes", "prosrc", "probin")
    ),
    CatalogDefinition("pg_operator", ("oid", "oprname"), ("oid", "oprname", "oprnamespace", "oprleft", "oprright")),
    CatalogDefinition("pg_collation", ("oid",), ("oid", "collname", "collnamespace")),
    CatalogDefinition("pg_ts_config", ("oid",), ("oid", "cfgname", "cfgnamespace")),
    CatalogDefinition("pg_ts_dict", ("oid",), ("oid", "dictname", "dictnamespace")),
    CatalogDefinition("pg_authid", ("oid",), ("oid", "rolname"), shared=True),
    # Where the database's own files are (relation.py: oid_of_file), and its name.
    CatalogDefinition("pg_database", ("oid",), ("oid", "datname", "dattablespace"), shared=True),
)


_BY_NAME: Final = {one.name: one for one in DEFINITIONS}


def definition_of(name: CatalogName) -> CatalogDefinition:
    """Return a catalog's definition."""
    return _BY_NAME[name]


@dataclass(frozen=True, slots=True)
class CatalogAttribute:
    """A column of a catalog, as the server's pg_attribute has it."""

    name: str
    type_oid: int
    length: int
    alignment: int


class CatalogLayout:
    """How the rows of one catalog are read, on one server.

    `invalidates`: see CatalogDefinition.  `places`: the columns at a fixed place, as Row takes them.
    """

    def __init__(
        self, definition: CatalogDefinition, attributes: Sequence[CatalogAttribute], encoding: str, *, invalidates: int
    ) -> None:
        self.name = definition.name
        self.owned = definition.owned
        self.shared = definition.shared
        self.invalidates = invalidates
        self.encoding = encoding
        self.places: dict[str, int] = {}
        self.fixed_bytes = 0
        self._rows = RowLayout([ColumnLayout(a.length, a.alignment) for a in attributes])
        self._columns = {
            a.name: (number, a.type_oid) for number, a in enumerate(attributes) if a.name in definition.columns
        }
        offset = 0
        for attribute in attributes:
            if attribute.length < 0:
                break
            offset += -offset % attribute.alignment
            if attribute.name in self._columns:
                self.places[attribute.name] = _KINDS[attribute.type_oid] << 16 | offset
                self.fixed_bytes = offset + attribute.length
            offset += attribute.length
        self.key_places = tuple(
            (self.places[key] & 0xFFFF, self.places[key] >> 16 == hot.NAME) for key in definition.keys
        )
        self.unusual_place = self.places["relrewrite"] & 0xFFFF if "relrewrite" in self.places else -1

    def deform(self, row: bytes) -> Sequence[Raw]:
        """Return all columns' values.  Raises DataCorrupted."""
        return self._rows.deform(row)

    def value(self, raw: Sequence[Raw], name: str) -> Value:
        """Return a column of the definition without a fixed place; None (NULL) if this version lacks it."""
        if name not in self._columns:
            return None
        number, type_oid = self._columns[name]
        value = raw[number]
        if value is None:
            return None
        return (
            self._read(type_oid, value) if isinstance(value, bytes) else Toasted(value, partial(self._read, type_oid))
        )

    def _read(self, type_oid: int, value: bytes) -> Value:
        if type_oid in {_TEXT, _NODE_TREE}:
            return value.decode(self.encoding)
        return _vector(value) if type_oid in {_INT2VECTOR, _OIDVECTOR} else value


class Toasted(bytes):
    """Stands for a catalog's value that lies in its TOAST table.  `read` makes the value from its bytes."""

    pointer: ToastPointer
    read: Callable[[bytes], Value]

    def __new__(cls, pointer: ToastPointer, read: Callable[[bytes], Value]) -> Self:
        found = super().__new__(cls)
        found.pointer = pointer
        found.read = read
        return found


def _vector(value: bytes) -> tuple[int, ...]:
    """Read a vector, an array of one dimension without NULLs, from its bytes without the varlena header.

    They are ndim, dataoffset, elemtype, dim, lbound, elements.
    """
    elemtype = int.from_bytes(value[8:12], "little")
    count = int.from_bytes(value[12:16], "little") if len(value) >= 20 else 0
    size, code = (2, "h") if elemtype == 21 else (4, "I")
    return Struct(f"<{count}{code}").unpack_from(value, 20) if count and len(value) >= 20 + size * count else ()
