"""Correct what an earlier release of pubsub wrote wrong: commits, and paths of files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

# Of ! $ & ' ( ) + , ; @, which Java's URI leaves as they are.
_TOO_MANY_ESCAPES: Final = re.compile("%(?:2[146789BC]|3B|40)")


def has_lost_name(path: str) -> bool:
    """Return whether an earlier release gave a data file this path in the log: VACUUM does not know that the log names it."""
    return _TOO_MANY_ESCAPES.search(path) is not None


def lines(actions: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the text of a commit's file."""
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in actions).encode()


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
