"""Write the files of commits in a Delta log: their text, and the link that claims a version exclusively.  Blocks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pubsub.errors import PubsubError


class UnknownOutcome(PubsubError):
    """Whether the commit was made cannot be determined, so its files must stay."""

    default_sqlstate = "08007"


def lines(actions: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the text of a commit's file."""
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in actions).encode()


def write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def link(path: Path, name: Path) -> None:
    """Give `path` a second name.  Raises FileExistsError if another file has that name, OSError, UnknownOutcome.

    On a network file system an answer can be lost; the client repeats the request and is told that the name is taken
    (open(2), O_EXCL).  So after an error the file's link count decides.
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
    """Correct a map that an earlier release wrote as a list of pairs, as it read it from a checkpoint.

    Return whether there was one.
    """
    mended = False
    if any(action.get("commitInfo", {}).get("engineInfo") == "pubsub" for action in actions):
        for action in actions:
            form = action.get("metaData", {}).get("format", {})
            if isinstance(form.get("options"), list):
                form["options"] = dict(form["options"])
                mended = True
    return mended


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
