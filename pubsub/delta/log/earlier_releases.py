"""Correct commits that an earlier release of pubsub wrote wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


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
