"""Read a Delta log's checkpoints without a JVM (Delta's PROTOCOL.md, Checkpoints).

    n.checkpoint.parquet                           one file
    n.checkpoint.0000000001.0000000003.parquet …   in parts: each file holds some of the actions
    n.checkpoint.<uuid>.parquet or .json           v2: its `add`s may be in sidecar files, _sidecars/*.parquet

Checkpoints are found by listing the log, since `_last_checkpoint` is only a hint and may be stale or missing.  Blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from pubsub.delta.log.transactions import Action
from pubsub.delta.places import Place, input_of
from pubsub.errors import DataCorrupted

_NAME: Final = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?(?:\.[0-9a-f-]{36})?\.(?:parquet|json)")
_KINDS: Final = ("protocol", "metaData", "add", "txn", "domainMetadata", "sidecar")
# Suffix of a checkpoint's columns that only repeat, parsed, what other columns hold as JSON.
_PARSED: Final = "_parsed"
# Arrow's exceptions that say nothing of the data; it has one base class for all.
_NOT_OF_THE_DATA: Final = (pa.ArrowMemoryError, pa.ArrowCancelled, pa.ArrowCapacityError)
# What zstd says, in an error of Arrow's that is the same as for damaged data.
_NO_MEMORY: Final = "not enough memory"
_HINT: Final = (
    "The log does not reach back beyond it: move the table's directory away; "
    "ALTER SUBSCRIPTION … RESYNC TABLE copies it anew."
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a table at `version`, in one file or several."""

    version: int
    files: tuple[Place, ...]


def announced(directory: Place) -> int | None:
    """Return the version of the checkpoint that `_last_checkpoint` names; None if it names none."""
    try:
        return int(json.loads((directory / "_last_checkpoint").read_bytes())["version"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def complete(directory: Place) -> list[Checkpoint]:
    """Return the checkpoints in the log's `directory` that have all their parts, the newest first."""
    found: dict[int, dict[int, list[Place]]] = {}
    try:
        paths: list[Place] = sorted(directory.iterdir(), key=str)
    except FileNotFoundError:
        return []
    for path in paths:
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), {}).setdefault(int(match[3] or 0), []).append(path)
    return [
        Checkpoint(version, (of_one[0],) if parts == 0 else tuple(of_one))
        for version, by_parts in sorted(found.items(), reverse=True)
        for parts, of_one in sorted(by_parts.items())
        if parts in (0, len(of_one))
    ]


def actions(checkpoint: Checkpoint) -> Iterator[list[Action]]:
    """Yield its actions, some at a time, in the form of a commit's JSON; only those that make up the table's state.

    Raises DataCorrupted, OSError, MemoryError.
    """
    for path in checkpoint.files:
        sidecars: list[Place] = []
        for some in _read(path):
            yield [action for action in some if "sidecar" not in action]
            names = (action["sidecar"]["path"] for action in some if "sidecar" in action)
            # Sidecars are always in that directory, whatever directory the path names.
            sidecars += [path.parent / "_sidecars" / PurePosixPath(unquote(name)).name for name in names]
        for sidecar in sidecars:
            yield from _read(sidecar)


def _read(path: Place) -> Iterator[list[Action]]:
    try:
        if path.suffix == ".json":
            lines = (json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip())
            yield [{kind: line[kind]} for line in lines for kind in _KINDS if kind in line]
        else:
            yield from _read_parquet(path)
    except FileNotFoundError as error:
        raise DataCorrupted(f'"{path}" of the checkpoint of a Delta table does not exist', hint=_HINT) from error
    except (pa.ArrowException, ValueError, OSError) as error:
        if _is_of_this_process(error):
            raise
        raise DataCorrupted(f'the checkpoint "{path}" of a Delta table is damaged: {error}', hint=_HINT) from error


def _is_of_this_process(error: Exception) -> bool:
    """Return whether reading failed for want of something, such as memory or a file descriptor: the data may be good.

    Arrow raises OSError without errno for data that does not decode, and for the memory that decoding lacked.
    """
    if isinstance(error, OSError):
        return error.errno is not None or _NO_MEMORY in str(error)
    return isinstance(error, _NOT_OF_THE_DATA)


def _read_parquet(path: Place) -> Iterator[list[Action]]:
    with pq.ParquetFile(input_of(path), memory_map=False) as file:
        names = [name for name in _KINDS if name in file.schema_arrow.names]
        for batch in file.iter_batches(columns=names):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                there = column.filter(column.is_valid())
                yield [{name: _as_json(action, there.type)} for action in there.to_pylist()]


def _as_json(value: Any, kind: pa.DataType) -> Any:
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


def _object(value: Mapping[str, Any], kind: pa.StructType) -> dict[str, Any]:
    return {
        field.name: _as_json(value[field.name], field.type)
        for field in kind
        if value[field.name] is not None and not field.name.endswith(_PARSED)
    }
