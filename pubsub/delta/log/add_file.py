"""An `add` of a table's log: a data file, what is known of its rows, and where it lies (PROTOCOL.md, Add File)."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from pubsub.delta.places import Place

# Fields of an `add` that a new deletion vector leaves as they are.
_KEPT: Final = ("baseRowId", "defaultRowCommitVersion", "clusteringProvider")


@dataclass(slots=True)
class AddFile:
    """One AddFile of the log.  `bounds`: each column's least and greatest value, where its statistics have them."""

    path: str
    size: int
    modification_time: int
    rows: int | None
    bounds: Mapping[str, tuple[Any, Any]]
    stats: str | None
    vector: Mapping[str, Any] | None
    inside: bool
    """Whether it has a relative path, as the files written here have."""
    partition: Mapping[str, str | None] = field(default_factory=dict)
    """Its partition's values as text, by the columns' physical names."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of its `add` that are passed on unchanged."""
    tags: Mapping[str, Any] | None = None
    """The `tags` that other writers store with the file; passed on unchanged."""
    writers: frozenset[str] | None = None
    """The applications that wrote its rows (empty: another engine); None: unknown, or it has others' rows, too."""
    _nulls: Mapping[str, int] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def partition_key(self) -> Hashable:
        """What is equal for files of one partition."""
        return tuple(sorted((name, value or "") for name, value in self.partition.items()))

    @property
    def clustered(self) -> bool:
        """Whether OPTIMIZE has clustered its rows."""
        return "clusteringProvider" in self.kept

    @property
    def deleted(self) -> int:
        """The number of rows that its deletion vector removes."""
        return int(self.vector["cardinality"]) if self.vector is not None else 0

    def null_count(self, name: str) -> int | None:
        """Return in how many rows the column with this physical name is NULL; None: its statistics do not say."""
        if self._nulls is None:
            self._nulls = (json.loads(self.stats).get("nullCount") if self.stats else None) or {}
        return self._nulls.get(name)


def file_of_action(add: Mapping[str, Any]) -> AddFile:
    """Return the data file of an `add` action."""
    stats = add.get("stats")
    known = json.loads(stats) if stats else {}
    least, greatest = known.get("minValues") or {}, known.get("maxValues") or {}
    path = add["path"]
    return AddFile(
        path=path,
        size=int(add["size"]),
        modification_time=int(add["modificationTime"]),
        rows=known.get("numRecords"),
        bounds={name: (least[name], greatest[name]) for name in least.keys() & greatest.keys()},
        stats=stats,
        vector=add.get("deletionVector"),
        tags=add.get("tags"),
        inside="://" not in path and not path.startswith(("/", "file:")),
        partition=add.get("partitionValues") or {},
        kept={name: add[name] for name in _KEPT if add.get(name) is not None},
    )


class _Number(str):
    """A number of JSON, as it is written."""

    __slots__ = ()


def loosened(stats: str | None, rows: int, without_nulls: Collection[str] = ()) -> str:
    """Return a file's statistics with `rows` as numRecords, marked as not tight, since a row at a bound may be deleted.

    `without_nulls`: columns, by their physical names, that are NULL in no row that is left, which such statistics may say.
    All else stays as it is written: a decimal that went through a float would no longer be a bound of the file's rows.
    """
    text: Any = json.loads(stats, parse_float=_Number, parse_int=_Number, parse_constant=_Number) if stats else {}
    if without_nulls:
        text |= {"nullCount": (text.get("nullCount") or {}) | dict.fromkeys(without_nulls, 0)}
    return _as_text(text | {"numRecords": rows, "tightBounds": False})


def _as_text(value: Any) -> str:
    if isinstance(value, _Number):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{_as_text(name)}:{_as_text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_as_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def path_of(file: AddFile, table: Place) -> Place:
    """Return a data file's path; in the log it is URL-encoded."""
    return table / unquote(file.path)
