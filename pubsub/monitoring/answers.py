"""What an HTTP request asks, and what it is answered."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's query, as it came, and its header Accept."""

    query: str = ""
    accept: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response; `kind` is its Content-Type."""

    status: HTTPStatus
    kind: str
    body: bytes


Handler = Callable[[Asked], Awaitable[Answer]]


def as_json(status: HTTPStatus, document: Mapping[str, object], indent: int | None = 2) -> Answer:
    """Return a JSON document as an answer."""
    separators = (",", ":") if indent is None else None
    return Answer(
        status, "application/json", json.dumps(document, indent=indent, separators=separators).encode() + b"\n"
    )
