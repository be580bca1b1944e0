"""The system catalogs that decoding needs: which they are, and what is read from their rows.

The layout of a catalog is the server's own, read from its pg_attribute when decoding begins, so that one code path serves
all versions; a column that a version does not have reads as None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, Literal

from walsender.types.layout import ROW_IN_TUPLE, ColumnLayout, Raw, RowLayout

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
    "pg_publication_namespace",
    "pg_replication_origin",
]

Value = int | str | bool | bytes | tuple[int, ...] | None
"""A column's value: oids and integers as int, names and texts as str, "char" as str of one character, vectors as tuples."""

_INT2VECTOR, _OIDVECTOR = 22, 30
_INTEGERS: Final = {20: "<q", 21: "<h", 23: "<i", 26: "<I", 24: "<I", 28: "<I"}
_BOOL, _CHAR, _NAME, _TEXT, _NODE_TREE = 16, 18, 19, 25, 194


@dataclass(frozen=True, slots=True)
class CatalogDefinition:
    """`keys`: the sets of columns that rows are looked up by; `columns`: those that are read."""

    name: CatalogName
    keys: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...]
    shared: bool = False


DEFINITIONS: Final = (
    CatalogDefinition(
        "pg_class",
        (("oid",), ("relfilenode",), ("reltoastrelid",)),
        (
            "oid",
            "relname",
            "relnamespace",
            "relfilenode",
            "reltoastrelid",
            "relpersistence",
            "relkind",
            "relnatts",
            "relreplident",
            "relispartition",
            "relrewrite",
        ),
    ),
    CatalogDefinition(
        "pg_attribute",
        (("attrelid",),),
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
    ),
    CatalogDefinition(
        "pg_type",
        (("oid",),),
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
        ),
    ),
    CatalogDefinition("pg_namespace", (("oid",),), ("oid", "nspname")),
    CatalogDefinition(
        "pg_index",
        (("indrelid",),),
        (
            "indexrelid",
            "indrelid",
            "indisunique",
            "indisprimary",
            "indimmediate",
            "indisvalid",
            "indislive",
            "indisreplident",
            "indkey",
            "indpred",
        ),
    ),
    CatalogDefinition("pg_enum", (("enumtypid",),), ("oid", "enumtypid", "enumlabel")),
    CatalogDefinition("pg_range", (("rngtypid",), ("rngmultitypid",)), ("rngtypid", "rngsubtype", "rngmultitypid")),
    CatalogDefinition("pg_inherits", (("inhrelid",),), ("inhrelid", "inhparent", "inhseqno", "inhdetachpending")),
    CatalogDefinition(
        "pg_publication",
        (("oid",), ("pubname",)),
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
    ),
    CatalogDefinition("pg_publication_rel", (("prrelid",),), ("prpubid", "prrelid", "prqual", "prattrs")),
    CatalogDefinition("pg_publication_namespace", (("pnnspid",),), ("pnpubid", "pnnspid")),
    CatalogDefinition("pg_replication_origin", (("roident",),), ("roident", "roname"), shared=True),
)


@dataclass(frozen=True, slots=True)
class CatalogAttribute:
    """A column of a catalog, as the server's pg_attribute has it."""

    name: str
    type_oid: int
    length: int
    alignment: int


class Row:
    """A row's values by column name, as attributes are too many to name: `row["relname"]`.

    They are made when they are asked for: of most rows few ever are.
    """

    __slots__ = ("_base", "_layout", "_raw", "_row", "_values")

    def __init__(self, layout: CatalogLayout, row: bytes) -> None:
        self._layout = layout
        self._row = row
        self._base = row[4] - ROW_IN_TUPLE
        self._raw: Sequence[Raw] | None = None
        self._values: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        values = self._values
        if name not in values:
            reader = self._layout.readers.get(name)
            if reader is not None:
                values[name] = reader(self._row, self._base)
            else:
                if self._raw is None:
                    self._raw = self._layout.deform(self._row)
                values[name] = self._layout.value(self._raw, name)
        return values[name]

    def number(self, name: str) -> int:
        """An oid or integer; NULL and columns that the version has not are 0."""
        value = self[name]
        return value if isinstance(value, int) else 0

    def text(self, name: str) -> str:
        """A name, text or "char"; NULL is empty."""
        value = self[name]
        return value if isinstance(value, str) else ""

    def flag(self, name: str) -> bool:
        return self[name] is True

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """An int2vector or oidvector."""
        value = self[name]
        return value if isinstance(value, tuple) else None

    def raw(self, name: str) -> bytes | None:
        value = self[name]
        return value if isinstance(value, bytes) else None


class CatalogLayout:
    """How the rows of one catalog are read, on one server."""

    def __init__(self, definition: CatalogDefinition, attributes: Sequence[CatalogAttribute], encoding: str) -> None:
        self.definition = definition
        self._encoding = encoding
        self._rows = RowLayout([ColumnLayout(a.length, a.alignment) for a in attributes])
        self._columns = {
            a.name: (number, a.type_oid) for number, a in enumerate(attributes) if a.name in definition.columns
        }
        self.readers: dict[str, Callable[[bytes, int], Value]] = {}
        """Of the columns of fixed place: from a row, and where its columns begin in it."""
        self._keys: list[Callable[[bytes, int], Value]] = []
        self._fixed_bytes = 0
        offset = 0
        for attribute in attributes:
            if attribute.length < 0:
                break
            offset += -offset % attribute.alignment
            if attribute.name in self._columns:
                self.readers[attribute.name] = self._reader(attribute.type_oid, offset, attribute.length)
                self._fixed_bytes = offset + attribute.length
            offset += attribute.length
        for (name,) in definition.keys:
            kind = self._columns[name][1]
            self._keys.append(_name_bytes(offset_of(name, attributes)) if kind == _NAME else self.readers[name])

    def keys(self, row: bytes) -> list[int | bytes]:
        """The row's key in each index of the definition: an oid, or a name's bytes.  Raises IndexError where the row is too
        short to have its columns of fixed place."""
        base = row[4] - ROW_IN_TUPLE
        if base < 0 or len(row) < base + self._fixed_bytes:
            raise IndexError
        return [key(row, base) for key in self._keys]  # type: ignore[misc]

    def read(self, row: bytes) -> Row:
        """The row, of which `keys` has been asked."""
        return Row(self, row)

    def deform(self, row: bytes) -> Sequence[Raw]:
        """All columns' values.  Raises DataCorrupted."""
        return self._rows.deform(row)

    def _reader(self, type_oid: int, offset: int, length: int) -> Callable[[bytes, int], Value]:
        code = _INTEGERS.get(type_oid)
        if code is not None:
            unpack = Struct(code).unpack_from

            def integer(row: bytes, base: int) -> Value:
                number: int = unpack(row, base + offset)[0]
                return number

            return integer

        def convert(row: bytes, base: int) -> Value:
            return self._convert(type_oid, row[base + offset : base + offset + length])

        return convert

    def value(self, raw: Sequence[Raw], name: str) -> Value:
        """A column of the definition; one that this version has not is NULL."""
        if name not in self._columns:
            return None
        number, type_oid = self._columns[name]
        value = raw[number]
        if value is None:
            return None
        return self._convert(type_oid, value) if isinstance(value, bytes) else _TOASTED

    def _convert(self, type_oid: int, value: bytes) -> Value:
        code = _INTEGERS.get(type_oid)
        if code is not None:
            return int.from_bytes(value, "little", signed=code[1].islower())
        if type_oid == _BOOL:
            return value != b"\0"
        if type_oid == _CHAR:
            return value.decode("latin-1") if value != b"\0" else ""
        if type_oid == _NAME:
            return value[: value.index(b"\0")].decode(self._encoding)
        if type_oid in {_TEXT, _NODE_TREE}:
            return value.decode(self._encoding)
        if type_oid in {_INT2VECTOR, _OIDVECTOR}:
            return _vector(value)
        return value


_TOASTED: Final = b"\xfftoasted"
"""Stands for a value of a catalog that lies in its TOAST table, which is not followed."""


def is_toasted(value: Value) -> bool:
    return value is _TOASTED


def _vector(value: bytes) -> tuple[int, ...]:
    """An array of one dimension without NULLs: ndim, dataoffset, elemtype, dim, lbound, elements (the header is cut)."""
    elemtype = int.from_bytes(value[8:12], "little")
    count = int.from_bytes(value[12:16], "little") if len(value) >= 20 else 0
    size, code = (2, "h") if elemtype == 21 else (4, "I")
    return Struct(f"<{count}{code}").unpack_from(value, 20) if count and len(value) >= 20 + size * count else ()


def vector(value: bytes) -> tuple[int, ...]:
    """An int2vector or oidvector that was not read as one."""
    return _vector(value)


def offset_of(name: str, attributes: Sequence[CatalogAttribute]) -> int:
    """Where the column lies, one of those of fixed place."""
    offset = 0
    for attribute in attributes:
        offset += -offset % attribute.alignment
        if attribute.name == name:
            return offset
        offset += attribute.length
    raise AssertionError(f"{name} is no column of fixed place")


def _name_bytes(offset: int) -> Callable[[bytes, int], Value]:
    """A name as it is stored, without what fills it up."""

    def read(row: bytes, base: int) -> Value:
        start = base + offset
        return row[start : row.index(b"\0", start)]

    return read
