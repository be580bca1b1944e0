"""Read a Delta log's checkpoints without a JVM (Delta's PROTOCOL.md, Checkpoints).

    n.checkpoint.parquet                           one file
    n.checkpoint.0000000001.0000000003.parquet …   in parts: each file holds some of the actions
    n.checkpoint.<uuid>.parquet or .json           v2: its `add`s may be in sidecar files, _sidecars/*.parquet

Checkpoints are found by listing the log, since `_last_checkpoint` is only a hint and may be stale or missing.  Blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from pubsub.errors import DataCorrupted

_NAME: Final = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?(?:\.[0-9a-f-]{36})?\.(?:parquet|json)")
_KINDS: Final = ("protocol", "metaData", "add", "txn", "sidecar")
# Suffix of a checkpoint's columns that only repeat, parsed, what other columns hold as JSON.
_PARSED: Final = "_parsed"
_HINT: Final = (
    "Where the log still has all commits up to it, the table is whole without this checkpoint and _last_checkpoint: move both away. "
    "Otherwise move the table's directory away; ALTER SUBSCRIPTION … RESYNC TABLE copies it anew."
)

Action = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a table at `version`, in one file or several."""

    version: int
    files: tuple[Path, ...]


def newest(log: Path) -> Checkpoint | None:
    """Return the newest checkpoint in the directory `log` that has all its parts; None if there is none."""
    found: dict[int, list[tuple[int, Path]]] = {}
    try:
        paths = list(log.iterdir())
    except FileNotFoundError:
        return None
    for path in paths:
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append((int(match[3] or 0), path))
    for version, files in sorted(found.items(), reverse=True):
        by_parts: dict[int, list[Path]] = {}
        for parts, path in sorted(files):
            by_parts.setdefault(parts, []).append(path)
        for parts, of_one in by_parts.items():
            if parts == 0:
                return Checkpoint(version, (of_one[0],))
            if parts == len(of_one):
                return Checkpoint(version, tuple(of_one))
    return None


def actions(checkpoint: Checkpoint) -> Iterator[list[Action]]:
    """Yield its actions, some at a time, in the form of a commit's JSON; only those that make up the table's state.

    Raises DataCorrupted, OSError.
    """
    for path in checkpoint.files:
        sidecars: list[Path] = []
        for some in _read(path):
            yield [action for action in some if "sidecar" not in action]
            names = (action["sidecar"]["path"] for action in some if "sidecar" in action)
            # Sidecars are always in that directory, whatever directory the path names.
            sidecars += [path.parent / "_sidecars" / Path(unquote(name)).name for name in names]
        for sidecar in sidecars:
            yield from _read(sidecar)


def _read(path: Path) -> Iterator[list[Action]]:
    try:
        if path.suffix == ".json":
            lines = (json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip())
            yield [{kind: line[kind]} for line in lines for kind in _KINDS if kind in line]
        else:
            yield from _read_parquet(path)
    except FileNotFoundError as error:
        raise DataCorrupted(f'"{path}" of the checkpoint of a Delta table does not exist', hint=_HINT) from error
    except (pa.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's error; Arrow raises OSError without errno for data that does not decode
        raise DataCorrupted(f'the checkpoint "{path}" of a Delta table is damaged: {error}', hint=_HINT) from error


def _read_parquet(path: Path) -> Iterator[list[Action]]:
    with pq.ParquetFile(path, memory_map=False) as file:
        names = [name for name in _KINDS if name in file.schema_arrow.names]
        for batch in file.iter_batches(columns=names):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                there = column.filter(column.is_valid())
                yield [{name: _as_json(action, there.type)} for action in there.to_pylist()]


def _as_json(value: Any, kind: Any) -> Any:
    """Convert a column's value to JSON's form: maps become objects, and NULLs are left out except in maps."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return _object(value, kind)
    if pa.types.is_map(kind):
        return {key: _as_json(item, kind.item_type) for key, item in value}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_as_json(item, kind.value_type) for item in value]
    return value


def _object(value: Mapping[str, Any], kind: Sequence[pa.Field]) -> dict[str, Any]:
    return {
        field.name: _as_json(value[field.name], field.type)
        for field in kind
        if value[field.name] is not None and not field.name.endswith(_PARSED)
    }
