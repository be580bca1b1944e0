"""Transactions without a JVM, for tests of what is committed: the next file of the log, written as Delta's would be."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Conflict, Operation, Request

_FEATURE = "delta.feature."


class JsonTransactions:
    """Implements transactions.Transactions on a local disk.

    `made`: the requests that were committed.  Conflicts are by version alone.
    """

    checkpoint_interval: int | None = None
    """As delta.checkpointInterval (None: no checkpoints)."""

    def __init__(self) -> None:
        self.made: list[Request] = []
        self.forgotten: list[str] = []

    def commit(self, request: Request) -> str:
        log = Path(request.path) / "_delta_log"
        log.mkdir(exist_ok=True)
        name, txn_id = log / f"{request.read_version + 1:020}.json", str(uuid.uuid4())
        info: dict[str, Any] = {
            "timestamp": int(time.time() * 1000),
            "operation": request.operation.value,
            "operationParameters": {},
            "engineInfo": "JsonTransactions",
            "txnId": txn_id,
        }
        if request.user_metadata is not None:
            info["userMetadata"] = request.user_metadata
        lines = [{"commitInfo": info}, *with_protocol(request)]
        aside = log / f".{txn_id}.tmp"
        aside.write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            os.link(aside, name)
        except FileExistsError:
            raise Conflict(name) from None
        finally:
            aside.unlink()
        self.made.append(request)
        version = request.read_version + 1
        if self.checkpoint_interval and version and version % self.checkpoint_interval == 0:
            self.checkpoint(request.path)
        return txn_id

    def forget(self, path: str) -> None:
        self.forgotten.append(path)

    def checkpoint(self, path: str) -> None:
        from deltalake import DeltaTable

        DeltaTable(path).create_checkpoint()


def with_protocol(request: Request) -> list[Mapping[str, Any]]:
    """Derive the protocol from the metadata as Delta does, for the features that pubsub's tables have."""
    found: list[Mapping[str, Any]] = []
    for action in request.actions:
        if "metaData" not in action:
            found.append(action)
            continue
        metadata = dict(action["metaData"])
        asked = metadata["configuration"]
        metadata["configuration"] = {name: value for name, value in asked.items() if not name.startswith(_FEATURE)}
        found.append({"metaData": metadata})
        wanted = [name.removeprefix(_FEATURE) for name in asked if name.startswith(_FEATURE)]
        if asked.get("delta.enableDeletionVectors") == "true":
            wanted.append("deletionVectors")
        if asked.get("delta.columnMapping.mode") == "name":
            wanted.append("columnMapping")
        protocol: Mapping[str, Any] = {}
        if request.operation is not Operation.CREATE:
            log = TableLog(request.path)
            log.refresh()
            protocol = log.protocol
        readers = list(dict.fromkeys([*(protocol.get("readerFeatures") or ()), *wanted]))
        writers = list(dict.fromkeys([*(protocol.get("writerFeatures") or ("invariants", "appendOnly")), *readers]))
        features = {"readerFeatures": readers, "writerFeatures": writers}
        found.append({"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}})
    return found
