"""The file of a commit in a Delta log: its text, and how it gets its name, which nobody else has then.  Blocks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pubsub.errors import PubsubError


class UnknownOutcome(PubsubError):
    """Nobody can tell whether a commit was made: its files must stay."""

    default_sqlstate = "08007"


def lines(actions: Iterable[Mapping[str, Any]]) -> bytes:
    """A commit's file."""
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in actions).encode()


def write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def link(path: Path, name: Path) -> None:
    """Give `path` a second name.  Raises FileExistsError when another file has it, OSError; UnknownOutcome.

    Over a network an answer can be lost: the client asks again, and hears that the name is taken (open(2), O_EXCL).  So the file
    itself is asked how many names it has.
    """
    try:
        os.link(path, name)
    except OSError as error:
        try:
            names = path.stat().st_nlink
        except OSError:
            raise UnknownOutcome(f'could not find out whether "{name}" was written: {error}') from error
        if names < 2:
            raise


def mend(actions: Iterable[Mapping[str, Any]]) -> bool:
    """Put in order what an earlier release took from a checkpoint for JSON: a map as a list of pairs.  False if there is none."""
    mended = False
    if any(action.get("commitInfo", {}).get("engineInfo") == "pubsub" for action in actions):
        for action in actions:
            form = action.get("metaData", {}).get("format", {})
            if isinstance(form.get("options"), list):
                form["options"] = dict(form["options"])
                mended = True
    return mended


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
