"""Refuse what would be ignored: the parts of sqlglot's nodes that the translation does not read."""

from __future__ import annotations

from typing import Any, Final

from sqlglot import exp

from pubsub.errors import FeatureNotSupported

#: The parts of each node that pubsub.node.select.expressions reads, besides `this`, `expression` and `expressions`.
_KNOWN_PARTS: Final[dict[type[Any], tuple[str, ...]]] = {
    exp.Column: ("table", "db"), exp.Literal: ("is_string",), exp.Cast: ("to", "_type"), exp.Is: ("negate",),
    exp.Between: ("low", "high", "symmetric"), exp.In: ("query",), exp.Case: ("ifs", "default"), exp.DPipe: ("safe",),
    exp.Like: ("negate",), exp.ILike: ("negate",), exp.AtTimeZone: ("zone",), exp.Array: ("value_constructor",),
    exp.Bracket: ("offset",), exp.Window: ("partition_by", "order", "spec", "over", "alias"),
    exp.Substring: ("start", "length"), exp.StrPosition: ("substr",), exp.Trim: ("position",),
    exp.Div: ("typed", "safe"), exp.Subquery: ("with_", "order", "limit", "offset"),
}  # fmt: skip


def check_parts(node: Any) -> None:
    """Raise FeatureNotSupported for a node with parts that are not read, so that none is silently ignored."""
    if isinstance(node, exp.Query):
        return
    known = ("this", "expression", "expressions", *_KNOWN_PARTS.get(type(node), ()))
    for part, value in node.args.items():
        if value and part not in known:
            raise FeatureNotSupported(f"{part.strip('_').upper()} is not supported: {node.sql('postgres')}")
