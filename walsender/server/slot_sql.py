"""Find slots' views and functions in SQL.

sqlglot says what is a relation and what is a call; the lexer says where they begin and end.  A name in a string, such as
`'pg_replication_slots'::regclass`, means the upstream server's view, and is left.  A statement that sqlglot cannot read is
searched by its words alone.  slot_edits.py says what is put in their places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from pubsub.errors import FeatureNotSupported, ProgramLimitExceeded, PubsubError, SqlSyntaxError
from pubsub.sql.lexer import Kind, Token, tokenize

if TYPE_CHECKING:
    from sqlglot import exp

VIEWS: Final = {"pg_replication_slots", "pg_stat_replication", "pg_stat_replication_slots"}


@dataclass(frozen=True, slots=True)
class Signature:
    """A function's parameters as (name, type), how many have no default, and its result's columns (none: void).

    `in_hex`: the column whose text the results hold as hexadecimal digits of its bytes.
    """

    parameters: tuple[tuple[str, str], ...]
    required: int
    columns: tuple[tuple[str, str], ...]
    variadic: bool = False
    in_hex: str = ""


_SLOT: Final = (("slot_name", "name"), ("lsn", "pg_lsn"))
_STATISTICS: Final = (
    ("slot_name", "text"),
    *((f"{what}_{which}", "int8") for what in ("spill", "stream") for which in ("txns", "count", "bytes")),
    ("mem_exceeded_count", "int8"),
    *((f"total_{which}", "int8") for which in ("txns", "bytes")),
    ("slotsync_skip_count", "int8"),
    *((name, "timestamptz") for name in ("slotsync_last_skip", "stats_reset")),
)


def _changes(data: str) -> Signature:
    parameters = (("slot_name", "name"), ("upto_lsn", "pg_lsn"), ("upto_nchanges", "int4"), ("options", "text[]"))
    columns = (("lsn", "pg_lsn"), ("xid", "xid"), ("data", data))
    return Signature(parameters, 3, columns, variadic=True, in_hex="data" if data == "text" else "")


FUNCTIONS: Final[Mapping[str, Signature]] = {
    "pg_drop_replication_slot": Signature((("slot_name", "name"),), 1, ()),
    "pg_create_logical_replication_slot": Signature(
        (("slot_name", "name"), ("plugin", "name"), ("temporary", "bool"), ("twophase", "bool"), ("failover", "bool")),
        2,
        _SLOT,
    ),
    "pg_copy_logical_replication_slot": Signature(
        (("src_slot_name", "name"), ("dst_slot_name", "name"), ("temporary", "bool"), ("plugin", "name")), 2, _SLOT
    ),
    "pg_replication_slot_advance": Signature(
        (("slot_name", "name"), ("upto_lsn", "pg_lsn")), 2, (("slot_name", "name"), ("end_lsn", "pg_lsn"))
    ),
    "pg_stat_get_replication_slot": Signature((("slot_name", "text"),), 1, _STATISTICS),
    "pg_stat_reset_replication_slot": Signature((("target", "text"),), 1, ()),
    "pg_logical_slot_get_changes": _changes("text"),
    "pg_logical_slot_peek_changes": _changes("text"),
    "pg_logical_slot_get_binary_changes": _changes("bytea"),
    "pg_logical_slot_peek_binary_changes": _changes("bytea"),
}
_MOST: Final = 30
"""Views and calls in one query: each is looked at by itself, and takes the text of what it shows."""
MOST_ROWS: Final = 10_000
"""Rows for which a query can call a function: their arguments are collected."""
_MENTIONS: Final = re.compile(
    "|".join(sorted({"pg_get_replication_slots", *VIEWS, *FUNCTIONS}, reverse=True)), re.IGNORECASE
)
_BEFORE_RELATION: Final = {"from", "join", "only", "table", ",", "lateral"}
# What can follow a relation that has no alias.
_NO_ALIAS: Final = {
    *("where", "join", "inner", "left", "right", "full", "cross", "natural", "on", "using", "group", "having"),
    *("window", "order", "limit", "offset", "fetch", "for", "union", "intersect", "except", "tablesample", "returning"),
    "with",
}


class _Kind(Enum):
    """What is done with a statement: it is carried out, or kept for later; of any other one the text is left as it is."""

    EXECUTED = "executed"
    PREPARED = "prepared"
    OTHER = "other"


_EXECUTED: Final = {
    *("select", "with", "table", "values", "insert", "update", "delete", "merge", "copy", "declare", "("),
}


def _kind(tokens: Sequence[Token]) -> _Kind:
    """Return what becomes of a statement.

    EXPLAIN executes nothing without ANALYZE, and what is kept in a view or a function would show the slots of its making.
    """
    words = [token.value for token in tokens[:12]]
    first = words[0] if words else ""
    if first == "prepare":
        return _Kind.PREPARED
    if first == "explain":
        return _Kind.EXECUTED if "analyze" in words or "analyse" in words else _Kind.OTHER
    if first == "create":
        return _Kind.EXECUTED if "table" in words[1:4] else _Kind.OTHER
    return _Kind.EXECUTED if first in _EXECUTED else _Kind.OTHER


@dataclass(frozen=True, slots=True)
class View:
    """A view's place in the statement; TABLE and ONLY before it belong to it.  `name`: None: what is to be left out."""

    name: str | None
    start: int
    end: int
    is_table_command: bool
    has_alias: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of FUNCTIONS: its place in the statement, the text of each argument, None for a default.

    `rows`: the query's FROM and what follows, whose rows it is made for; None: it stands as a relation.
    `field`: what is taken of the result, as in (f()).lsn and (f()).*, which belong to the place; None: the whole.
    `is_column`: it is a column by itself, which has its name or the field's.
    `by_row`: for each argument, whether it names columns, so that it may differ from row to row.
    `ordinality`: it is a relation whose rows are numbered.
    """

    name: str
    start: int
    end: int
    arguments: tuple[str | None, ...]
    has_alias: bool
    rows: str | None = None
    field: str | None = None
    is_column: bool = False
    by_row: tuple[bool, ...] = ()
    ordinality: bool = False

    @property
    def signature(self) -> Signature:
        return FUNCTIONS[self.name]

    @property
    def is_relation(self) -> bool:
        return self.rows is None

    def _array(self, arguments: Iterable[str | None]) -> str:
        """Return an expression of arguments as a JSON array."""
        typed = [
            f"({text})::{'' if kind == 'text[]' else 'pg_catalog.'}{kind}" if text is not None else "NULL::text"
            for text, (_, kind) in zip(arguments, self.signature.parameters, strict=True)
        ]
        return f"pg_catalog.jsonb_build_array({', '.join(typed)})"

    def of_row(self) -> str:
        """Return a condition: the results whose `k` is `row_key` of this row's arguments.

        The others are evaluated only once: pg_current_wal_lsn() says something else each time.
        """
        found = zip(self.arguments, self.by_row, strict=True)
        condition = f"k = {self._array(text if by_row else None for text, by_row in found)}"
        if any("$" in text for text in self.arguments if text is not None):
            # So that the client's parameters keep their types.
            condition += f" AND {self._array(self.arguments)} IS NOT NULL"
        return condition

    def row_key(self, arguments: Sequence[Any]) -> list[Any]:
        """Return what tells a row's results from another's, of the arguments that it had."""
        return [value if by_row else None for value, by_row in zip(arguments, self.by_row, strict=True)]

    def arguments_query(self) -> str:
        """Return a query for the arguments of each call that the statement makes, as JSON arrays; of MOST_ROWS and one more."""
        asked = f"SELECT {self._array(self.arguments)} {self.rows or ''}"
        return f"SELECT * FROM ({asked}) _ LIMIT {MOST_ROWS + 1}"


def mentions(text: str) -> bool:
    """Return whether the text may be about slots at all."""
    return _MENTIONS.search(text) is not None


def is_utility(text: str) -> bool:
    """Return whether a statement takes no parameters, although it has a query in it."""
    first = next((token.value for token in tokenize(text)), "")
    return first in {"copy", "declare", "create", "explain", "prepare"}


def statements(text: str) -> list[tuple[int, int]]:
    """Return where each statement of the text begins and ends, its semicolon included; all as one if it is no SQL."""
    try:
        tokens = tokenize(text)
    except SqlSyntaxError:
        return [(0, len(text))]
    ends = [token.end for token in tokens if token.kind is Kind.OPERATOR and token.value == ";"]
    if not ends or text[ends[-1] :].strip():
        ends.append(len(text))
    ends[-1] = len(text)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def check_number(places: int) -> None:
    """Raise ProgramLimitExceeded for more views and calls than one query can have."""
    if places > _MOST:
        raise ProgramLimitExceeded(f"a query can name slots' views and functions {_MOST} times at most here")


def find(text: str) -> tuple[list[View], list[Call]]:
    """Return the views and calls in one statement, in order; none if the text is no SQL, which the server then says.

    Raises PubsubError for a call whose arguments do not fit, and FeatureNotSupported for one that stands where it cannot be
    carried out here.
    """
    try:
        tokens = tokenize(text)
    except SqlSyntaxError:
        return [], []
    kind = _kind(tokens)
    if kind is _Kind.OTHER:
        _check_block(tokens)
        return [], []
    tree = _parsed(text)
    views: list[View] = []
    calls: list[Call] = []
    closings = _closings(tokens)
    for number, token in enumerate(tokens):
        check_number(len(views) + len(calls))
        if token.kind not in {Kind.WORD, Kind.NAME}:
            continue
        first = _qualified(tokens, number)
        if first is None:
            continue
        before = tokens[first - 1].value if first else ""
        following = tokens[number + 1].value if number + 1 < len(tokens) else ""
        if token.value in FUNCTIONS and following == "(":
            end = closings.get(number + 1)
            if end is not None and (tree is None or token.start in tree.calls):
                if kind is _Kind.PREPARED:
                    raise FeatureNotSupported(f"{token.value} is not supported in PREPARE here")
                if [one.value for one in tokens[max(first - 3, 0) : first]] == ["rows", "from", "("]:
                    raise FeatureNotSupported(f"{token.value} is not supported in ROWS FROM here")
                calls.append(_call(text, tokens, first, number, end, before, tree))
        elif token.value == "pg_get_replication_slots" and following == "(" and number + 2 < len(tokens):
            node = tree.calls.get(token.start) if tree is not None else None
            if not (before in _BEFORE_RELATION if tree is None else node is None or _stands_as_relation(node)):
                raise FeatureNotSupported(
                    "pg_get_replication_slots is supported in FROM here", hint="Write SELECT ... FROM it."
                )
            alias = _has_alias(tokens, number + 3)
            views.append(View(token.value, tokens[first].start, tokens[number + 2].end, False, alias))
        elif token.value in VIEWS and following == "." and first < number:
            # pg_catalog belongs to the view's name, which is an alias then.
            views.append(View(None, tokens[first].start, token.start, False, True))
        elif token.value in VIEWS and following not in {".", "("}:
            command = before == "table"
            if before in {"into", "update"} or (before == "from" and tokens[first - 2].value == "delete"):
                continue
            if before == "only":
                first -= 1
            if command or (before in _BEFORE_RELATION if tree is None else token.start in tree.relations):
                start = tokens[first - 1 if command else first].start
                views.append(View(token.value, start, token.end, command, _has_alias(tokens, number + 1)))
    # What stands in a call goes with it.
    outside = [view for view in views if not any(call.start < view.start and view.end <= call.end for call in calls)]
    return outside, calls


def _check_block(tokens: Sequence[Token]) -> None:
    """Raise FeatureNotSupported for a DO whose body is about slots: the server would answer of its own ones."""
    if not tokens or tokens[0].value != "do":
        return
    for token in tokens:
        found = _MENTIONS.search(token.value) if token.kind is Kind.STRING else None
        if found is not None:
            raise FeatureNotSupported(
                f"{found[0].lower()} is not supported in DO here",
                hint="Use it in a statement of its own.  The upstream server's own slots are there for its own clients.",
            )


@dataclass(frozen=True, slots=True)
class _Tree:
    """Where relations' names and calls begin, by sqlglot."""

    relations: frozenset[int]
    calls: Mapping[int, Any]
    selects: dict[int, str]
    """See _rows_of."""


def _parsed(text: str) -> _Tree | None:
    """Return what sqlglot finds in a statement; None if it cannot read it."""
    from sqlglot import errors, exp, parse

    from pubsub.sql.dialect import PubsubDialect

    try:
        roots = [one for one in parse(text, read=PubsubDialect) if one is not None]
    except (errors.SqlglotError, PubsubError, RecursionError):
        return None
    if any(isinstance(one, exp.Command) for root in roots for one in root.find_all(exp.Command)):
        return None
    relations: set[int] = set()
    calls: dict[int, exp.Expression] = {}
    for root in roots:
        for node in root.walk():
            if isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier) and "start" in node.this.meta:
                if not (node.args.get("db") is None and _is_common(node, node.this.this)):
                    relations.add(node.this.meta["start"])
            elif isinstance(node, exp.Anonymous) and "start" in node.meta:
                calls[node.meta["start"]] = node
    return _Tree(frozenset(relations), calls, {})


def _is_common(node: exp.Expression, name: str) -> bool:
    """Return whether a query of WITH around the node has this name."""
    above: Any = node.parent
    while above is not None:
        with_ = above.args.get("with_")
        if with_ is not None and any(one.alias == name for one in with_.expressions):
            return True
        above = above.parent
    return False


def _call(
    text: str, tokens: Sequence[Token], first: int, number: int, end: int, before: str, tree: _Tree | None
) -> Call:
    name = tokens[number].value
    for place in range(number + 2, end - 1):
        if (
            tokens[place].value in FUNCTIONS
            and tokens[place + 1].value == "("
            and _qualified(tokens, place) is not None
        ):
            # Seen before the arguments are looked at by themselves: each level would be read once more.
            raise FeatureNotSupported(f"the arguments of {name} cannot call {tokens[place].value} here")
    arguments = _arguments(text, tokens, number, end, FUNCTIONS[name])
    node = tree.calls[tokens[number].start] if tree is not None else None
    is_relation = before in _BEFORE_RELATION - {","} if node is None else _stands_as_relation(node)
    rows = None if is_relation else _rows_of(node, name, tree.selects if tree is not None else {})
    if is_relation and node is not None and _names_columns(node):
        raise FeatureNotSupported(f"{name} cannot take its arguments from other relations of FROM here")
    selected = None
    after = [token.value for token in tokens[end + 1 : end + 4]]
    if not is_relation and first and tokens[first - 1].value == "(" and after[:2] == [")", "."]:
        known = [one for one, _ in FUNCTIONS[name].columns]
        if after[2:] == ["*"] or (len(after) > 2 and after[2] in known):
            selected, first, end = after[2], first - 1, end + 3
    is_column = not is_relation and node is not None and _is_column(node)
    by_row = tuple(bool(rows) and one is not None and _may_name_columns(one) for one in arguments)
    for one, differs in zip(arguments, by_row, strict=True):
        _check_argument(name, one or "", differs=differs)
    ordinality = is_relation and [token.value for token in tokens[end + 1 : end + 3]] == ["with", "ordinality"]
    end += 2 * ordinality
    alias = _has_alias(tokens, end + 1)
    return Call(
        name, tokens[first].start, tokens[end].end, arguments, alias, rows, selected, is_column, by_row, ordinality
    )


def _is_column(node: Any) -> bool:
    from sqlglot import exp

    while isinstance(node.parent, exp.Dot | exp.Paren):
        node = node.parent
    return isinstance(node.parent, exp.Select) and node.arg_key == "expressions"


def _stands_as_relation(node: Any) -> bool:
    from sqlglot import exp

    above = node.parent
    while isinstance(above, exp.Dot):
        above = above.parent
    return isinstance(above, exp.Table | exp.Lateral | exp.From | exp.Join)


def _names_columns(node: Any) -> bool:
    from sqlglot import exp

    return any(one.find_ancestor(exp.Select) is node.find_ancestor(exp.Select) for one in node.find_all(exp.Column))


def _check_argument(name: str, text: str, *, differs: bool) -> None:
    """Raise FeatureNotSupported for an argument that is about slots itself where that is not supported."""
    if differs and mentions(text):
        views, _ = find(f"SELECT {text}")
        if views:
            raise FeatureNotSupported(f"the arguments of {name} cannot use {views[0].name} for each row here")


def _may_name_columns(text: str) -> bool:
    from sqlglot import errors, exp, parse_one

    from pubsub.sql.dialect import PubsubDialect

    try:
        return parse_one(f"SELECT {text}", read=PubsubDialect).find(exp.Column) is not None
    except (errors.SqlglotError, PubsubError, RecursionError):
        return True


def _rows_of(node: Any, name: str, made: dict[int, str]) -> str:
    """Return the part of the query after its columns, as text: from which rows a call among the columns is made.

    `made`: what was returned for other calls, by the SELECT's `id`.
    """
    from sqlglot import exp

    from pubsub.sql.dialect import PubsubDialect

    if node is None:
        return ""
    select = node.find_ancestor(exp.Select)
    holder = node
    depends = False
    while holder is not None and holder.parent is not select:
        above = holder.parent
        may_skip = isinstance(above, exp.If | exp.Case | exp.Coalesce | exp.Connector | exp.Filter)
        depends |= may_skip and (holder.arg_key != "this" or isinstance(above, exp.If | exp.Filter))
        holder = above
    if select is None:
        return ""
    if depends:
        # It would be carried out for each row, whatever the condition says.
        raise FeatureNotSupported(
            f"{name} is not supported where it depends on a condition here", hint="Put the condition into WHERE."
        )
    if holder is None or holder.arg_key != "expressions":
        raise FeatureNotSupported(f"{name} is supported among the columns of a query, and in FROM")
    if any(select.args.get(part) for part in ("group", "having", "distinct")):
        raise FeatureNotSupported(f"{name} is not supported in a query with GROUP BY, HAVING or DISTINCT here")
    if select.args.get("with_") is not None:
        raise FeatureNotSupported(f"{name} is not supported among the columns of a query with WITH here")
    if id(select) not in made:
        columns, select.args["expressions"] = select.args["expressions"], []
        copy = select.copy()
        select.args["expressions"] = columns
        copy.set("expressions", [exp.Null()])
        made[id(select)] = copy.sql(dialect=PubsubDialect).removeprefix("SELECT NULL").strip()
    return made[id(select)]


def _arguments(
    text: str, tokens: Sequence[Token], number: int, end: int, signature: Signature
) -> tuple[str | None, ...]:
    """Return the text of each argument, by position, name or VARIADIC.  Raises PubsubError (42883)."""
    given: dict[int, str] = {}
    rest: list[str] = []
    names = [name for name, _ in signature.parameters]
    last = len(names) - 1
    for position, (start, stop) in enumerate(_parts(tokens, number + 1, end)):
        head = tokens[start]
        following = tokens[start + 1].value if start + 1 < stop else ""
        if following in {"=>", ":="} and head.value in names:
            given[names.index(head.value)] = text[tokens[start + 1].end : tokens[stop - 1].end].strip()
        elif head.kind is Kind.WORD and head.value == "variadic" and signature.variadic:
            given[last] = text[head.end : tokens[stop - 1].end].strip()
        elif signature.variadic and position >= last:
            rest.append(text[head.start : tokens[stop - 1].end])
        else:
            given[position] = text[head.start : tokens[stop - 1].end]
    if rest:
        given[last] = f"ARRAY[{', '.join(rest)}]"
    elif signature.variadic:
        given.setdefault(last, "ARRAY[]")
    if any(place not in given for place in range(signature.required)) or any(place > last for place in given):
        raise PubsubError(
            f"function {tokens[number].value}({', '.join('unknown' for _ in given)}) does not exist",
            sqlstate="42883",
            hint="No function matches the given name and argument types. You might need to add explicit type casts.",
        )
    return tuple(given.get(place) for place in range(len(names)))


def _parts(tokens: Sequence[Token], opening: int, closing: int) -> list[tuple[int, int]]:
    """Return the tokens of each argument between the parentheses."""
    parts: list[tuple[int, int]] = []
    start, depth = opening + 1, 0
    for place in range(opening + 1, closing):
        token = tokens[place]
        if token.kind is Kind.OPERATOR:
            depth += (token.value in "([") - (token.value in ")]")
            if token.value == "," and depth == 0:
                parts.append((start, place))
                start = place + 1
    if start < closing:
        parts.append((start, closing))
    return [one for one in parts if one[0] < one[1]]


def _qualified(tokens: Sequence[Token], number: int) -> int | None:
    """Return where the name at `number` begins, with pg_catalog before it; None if it belongs to something else."""
    if number == 0 or tokens[number - 1].value != ".":
        return number
    return number - 2 if number >= 2 and tokens[number - 2].value == "pg_catalog" else None


def _closings(tokens: Sequence[Token]) -> dict[int, int]:
    """Return where each parenthesis is closed."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for place, token in enumerate(tokens):
        if token.kind is Kind.OPERATOR and token.value == "(":
            opened.append(place)
        elif token.kind is Kind.OPERATOR and token.value == ")" and opened:
            found[opened.pop()] = place
    return found


def _has_alias(tokens: Sequence[Token], number: int) -> bool:
    if number >= len(tokens):
        return False
    token = tokens[number]
    return token.kind is Kind.NAME or (token.kind is Kind.WORD and token.value not in _NO_ALIAS)
