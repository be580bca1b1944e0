"""Row filters: an expression of the catalog as a function of a row (pgoutput.c: pgoutput_row_filter_exec_expr).

PostgreSQL allows columns, constants, and built-in functions and operators that are immutable.  Those that are supported
are in functions/.  Any other is refused by name when the stream starts, or when a filter is changed later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from pubsub.errors import FeatureNotSupported
from walsender.historic.relation import RelationInfo
from walsender.historic.upstream import Builtins
from walsender.rowfilter import functions
from walsender.rowfilter.functions import FixedFunction, Settings
from walsender.rowfilter.nodetree import Field, Node, read_nodes
from walsender.types.layout import Raw, read_varlena
from walsender.types.registry import array_elements

Filter = Callable[[list[Raw]], bool]
Evaluate = Callable[[list[Raw]], Any]

_NULLTEST_IS_NULL: Final = 0
_MINMAX_GREATEST: Final = 0
_DEFAULT_COLLATION: Final = 100
_C_COLLATIONS: Final = frozenset({950, 951})
_JSONB: Final = 3802


class UnsupportedFilter(FeatureNotSupported):
    """A row filter that PostgreSQL can evaluate but this module cannot."""


class RowFilterCompiler:
    """Makes functions of row filters.

    `c_collation`: the database's default collation compares bytes.  `version`: as libpq numbers versions.
    """

    def __init__(self, builtins: Builtins, encoding: str, *, c_collation: bool, version: int) -> None:
        self._version = version
        self._builtins = builtins
        self._encoding = encoding
        self._c_collation = c_collation
        self._tested: list[list[Any]] = []
        """While CASE expressions are compiled: one cell for each enclosing CASE, with its operand's value at run time."""

    def any_of(self, texts: Sequence[str], relation: RelationInfo) -> Filter:
        """Return a filter that holds if one of the filters `texts` does.  Raises UnsupportedFilter, DataCorrupted."""
        try:
            compiled = [self._compile(read_nodes(text), relation) for text in texts]
        except FeatureNotSupported as error:
            raise UnsupportedFilter(
                f'the row filter of table "{relation.qualified_name}" cannot be evaluated: {error.message}',
                hint="Leave the table out of the publication, or change its filter.",
            ) from error
        if len(compiled) == 1:
            only = compiled[0]
            return lambda row: only(row) is True
        return lambda row: any(one(row) is True for one in compiled)

    def _compile(self, node: Field, relation: RelationInfo) -> Evaluate:
        if not isinstance(node, Node):
            raise FeatureNotSupported("an expression of an unknown form")
        method = _METHODS.get(node.kind)
        if method is None:
            raise FeatureNotSupported(f"expressions of the kind {node.kind} are not supported")
        return method(self, node, relation)

    def _all(self, nodes: Sequence[Field], relation: RelationInfo) -> list[Evaluate]:
        return [self._compile(node, relation) for node in nodes]

    def _var(self, node: Node, relation: RelationInfo) -> Evaluate:
        number = node.number("varattno")
        if number <= 0:
            raise FeatureNotSupported("system columns are not supported")
        index = number - 1
        column = relation.columns[index]
        oid = column.type.base_oid if column.type is not None else column.type_oid
        read = _reader(oid, self._encoding)

        def value(row: list[Raw]) -> Any:
            raw = row[index]
            if raw is None:
                return None
            if not isinstance(raw, bytes):
                raise FeatureNotSupported(
                    f'the row filter of table "{relation.qualified_name}" needs column "{column.name}", whose '
                    "unchanged value is not in the WAL"
                )
            return read(raw)

        return value

    def _const(self, node: Node, relation: RelationInfo) -> Evaluate:
        if node.fields.get("constisnull") == "true":
            return lambda row: None
        constant = _reader(node.number("consttype"), self._encoding)(self._datum(node))
        return lambda row: constant

    @staticmethod
    def _datum(node: Node) -> bytes:
        value = node.fields.get("constvalue")
        if not isinstance(value, bytes):
            raise FeatureNotSupported("a constant without a value")
        length = node.number("constlen")
        if length == -1:
            raw, _ = read_varlena(value, 0)
            if not isinstance(raw, bytes):
                raise FeatureNotSupported("a constant that lies in a TOAST table")
            return raw
        return value[:length] if length > 0 else value.partition(b"\0")[0]

    def _operator(self, node: Node, relation: RelationInfo) -> Evaluate:
        return self._call(self._operator_function(node), self._all(node.items("args"), relation))

    def _operator_function(self, node: Node) -> FixedFunction:
        found = self._builtins.operators.get(node.number("opno"))
        if found is None:
            raise FeatureNotSupported(f"the operator {node.number('opno')} is not built in")
        return self._function(found[1], node)

    def _function(self, oid: int, node: Node) -> FixedFunction:
        found = self._builtins.functions.get(oid)
        if found is None:
            raise FeatureNotSupported(f"the function {oid} is not built in")
        name, types = found
        collation = node.number("inputcollid")
        bytewise = (
            collation in _C_COLLATIONS or collation == 0 or (collation == _DEFAULT_COLLATION and self._c_collation)
        )
        made = functions.find(name, types, Settings(self._encoding, bytewise, self._version))
        if made is None:
            raise FeatureNotSupported(f"the function {name} is not supported")
        return made

    @staticmethod
    def _call(function: FixedFunction, arguments: list[Evaluate]) -> Evaluate:
        """Make a function call that is strict, as all built-in functions here are."""
        if len(arguments) == 1:
            (first,) = arguments

            def one(row: list[Raw]) -> Any:
                a = first(row)
                return None if a is None else function(a)

            return one
        if len(arguments) == 2:
            first, second = arguments

            def two(row: list[Raw]) -> Any:
                a, b = first(row), second(row)
                return None if a is None or b is None else function(a, b)

            return two

        def more(row: list[Raw]) -> Any:
            values = [argument(row) for argument in arguments]
            return None if any(value is None for value in values) else function(*values)

        return more

    def _call_node(self, node: Node, relation: RelationInfo) -> Evaluate:
        return self._call(self._function(node.number("funcid"), node), self._all(node.items("args"), relation))

    def _bool(self, node: Node, relation: RelationInfo) -> Evaluate:
        arguments = self._all(node.items("args"), relation)
        kind = str(node.fields.get("boolop"))
        if kind == "not":
            (inner,) = arguments

            def negated(row: list[Raw]) -> Any:
                value = inner(row)
                return None if value is None else not value

            return negated
        decisive = kind == "or"

        def joined(row: list[Raw]) -> Any:
            unknown = False
            for argument in arguments:
                value = argument(row)
                if value is None:
                    unknown = True
                elif value == decisive:
                    return decisive
            return None if unknown else not decisive

        return joined

    def _null_test(self, node: Node, relation: RelationInfo) -> Evaluate:
        wanted = node.number("nulltesttype") == _NULLTEST_IS_NULL
        arg = node.fields["arg"]
        if node.fields.get("argisrow") != "true":
            return self._is_null(arg, relation, wanted)
        # Test each of the row's fields (clauses.c: eval_const_expressions_mutator).
        if not isinstance(arg, Node) or arg.kind not in {"ROW", "ROWEXPR"}:
            raise FeatureNotSupported("tests of whole rows are not supported")
        tests = [self._is_null(one, relation, wanted) for one in arg.items("args")]
        return lambda row: all(test(row) for test in tests)

    def _is_null(self, arg: Field, relation: RelationInfo, wanted: bool) -> Evaluate:
        inner = self._compile(arg, relation)
        if isinstance(arg, Node) and arg.kind == "VAR":
            # The test needs no value, which may not be in the WAL.
            index = arg.number("varattno") - 1
            return lambda row: (row[index] is None) == wanted
        return lambda row: (inner(row) is None) == wanted

    def _boolean_test(self, node: Node, relation: RelationInfo) -> Evaluate:
        inner = self._compile(node.fields["arg"], relation)
        # IS TRUE, IS NOT TRUE, IS FALSE, IS NOT FALSE, IS UNKNOWN, IS NOT UNKNOWN
        wanted, positive = ((True, True), (True, False), (False, True), (False, False), (None, True), (None, False))[
            node.number("booltesttype")
        ]
        return lambda row: (inner(row) is wanted) == positive

    def _array_operator(self, node: Node, relation: RelationInfo) -> Evaluate:
        function = self._operator_function(node)
        scalar, array = self._all(node.items("args"), relation)
        use_or = node.fields.get("useOr") == "true"

        def value(row: list[Raw]) -> Any:
            elements = array(row)
            if elements is None:
                return None
            if not elements:
                return not use_or
            left = scalar(row)
            if left is None:
                return None
            unknown = False
            for element in elements:
                if element is None:
                    unknown = True
                elif function(left, element) == use_or:
                    return use_or
            return None if unknown else not use_or

        return value

    def _distinct(self, node: Node, relation: RelationInfo) -> Evaluate:
        function = self._operator_function(node)
        left, right = self._all(node.items("args"), relation)

        def value(row: list[Raw]) -> Any:
            a, b = left(row), right(row)
            if a is None or b is None:
                return (a is None) != (b is None)
            return not function(a, b)

        return value

    def _null_if(self, node: Node, relation: RelationInfo) -> Evaluate:
        function = self._operator_function(node)
        left, right = self._all(node.items("args"), relation)

        def value(row: list[Raw]) -> Any:
            a, b = left(row), right(row)
            return None if a is not None and b is not None and function(a, b) else a

        return value

    def _coalesce(self, node: Node, relation: RelationInfo) -> Evaluate:
        arguments = self._all(node.items("args"), relation)

        def value(row: list[Raw]) -> Any:
            return next((v for v in (argument(row) for argument in arguments) if v is not None), None)

        return value

    def _min_max(self, node: Node, relation: RelationInfo) -> Evaluate:
        arguments = self._all(node.items("args"), relation)
        best = max if node.number("op") == _MINMAX_GREATEST else min
        if node.number("inputcollid") not in {0, *_C_COLLATIONS} and not self._c_collation:
            raise FeatureNotSupported("comparing by this collation is not supported")

        def value(row: list[Raw]) -> Any:
            present = [v for v in (argument(row) for argument in arguments) if v is not None]
            return best(present) if present else None

        return value

    def _case(self, node: Node, relation: RelationInfo) -> Evaluate:
        operand = node.fields.get("arg")
        tested = self._compile(operand, relation) if operand is not None else None
        place: list[Any] = [None]
        self._tested.append(place)
        conditions = [self._compile(when.fields["expr"], relation) for when in node.items("args")]
        self._tested.pop()
        results = [self._compile(when.fields["result"], relation) for when in node.items("args")]
        branches = list(zip(conditions, results, strict=True))
        default = node.fields.get("defresult")
        otherwise = self._compile(default, relation) if default is not None else lambda row: None

        def value(row: list[Raw]) -> Any:
            if tested is not None:
                place[0] = tested(row)
            for condition, result in branches:
                if condition(row) is True:
                    return result(row)
            return otherwise(row)

        return value

    def _case_test(self, node: Node, relation: RelationInfo) -> Evaluate:
        """Return the operand of the enclosing CASE."""
        if not self._tested:
            raise FeatureNotSupported("an expression of an unknown form")
        place = self._tested[-1]
        return lambda row: place[0]

    def _relabel(self, node: Node, relation: RelationInfo) -> Evaluate:
        return self._compile(node.fields["arg"], relation)

    def _array(self, node: Node, relation: RelationInfo) -> Evaluate:
        if node.fields.get("multidims") == "true":
            raise FeatureNotSupported("arrays of arrays are not supported")
        elements = self._all(node.items("elements"), relation)
        dims, lower = ([len(elements)], [1]) if elements else ([], [])
        return lambda row: functions.Array([element(row) for element in elements], dims, lower)

    def _row_comparison(self, node: Node, relation: RelationInfo) -> Evaluate:
        """Compare rows: the first pair of fields that differs decides (execExprInterp.c: EEOP_ROWCOMPARE_STEP)."""
        lefts, rights = (self._all(node.items(side), relation) for side in ("largs", "rargs"))
        numbers, collations = node.items("opnos"), node.items("inputcollids")
        pairs = []
        for left, right, number, collation in zip(lefts, rights, numbers, collations, strict=True):
            fields = {"opno": number, "inputcollid": collation}
            pairs.append((left, right, self._operator_function(Node(node.kind, fields))))

        def value(row: list[Raw]) -> Any:
            found: Any = None
            for left, right, holds in pairs:
                a, b = left(row), right(row)
                if a is None or b is None:
                    return None
                found = holds(a, b)
                if a != b:
                    break
            return found

        return value


_METHODS: Final[dict[str, Callable[[RowFilterCompiler, Node, RelationInfo], Evaluate]]] = {
    "VAR": RowFilterCompiler._var,
    "CONST": RowFilterCompiler._const,
    "OPEXPR": RowFilterCompiler._operator,
    "FUNCEXPR": RowFilterCompiler._call_node,
    "BOOLEXPR": RowFilterCompiler._bool,
    "NULLTEST": RowFilterCompiler._null_test,
    "BOOLEANTEST": RowFilterCompiler._boolean_test,
    "SCALARARRAYOPEXPR": RowFilterCompiler._array_operator,
    "DISTINCTEXPR": RowFilterCompiler._distinct,
    "NULLIFEXPR": RowFilterCompiler._null_if,
    "COALESCEEXPR": RowFilterCompiler._coalesce,
    "COALESCE": RowFilterCompiler._coalesce,
    "MINMAXEXPR": RowFilterCompiler._min_max,
    "MINMAX": RowFilterCompiler._min_max,
    "CASE": RowFilterCompiler._case,
    "CASEEXPR": RowFilterCompiler._case,
    "RELABELTYPE": RowFilterCompiler._relabel,
    "COLLATEEXPR": RowFilterCompiler._relabel,
    "ARRAYEXPR": RowFilterCompiler._array,
    "ARRAY": RowFilterCompiler._array,
    "ROWCOMPAREEXPR": RowFilterCompiler._row_comparison,
    "ROWCOMPARE": RowFilterCompiler._row_comparison,
    "CASETESTEXPR": RowFilterCompiler._case_test,
}


def _reader(oid: int, encoding: str) -> Callable[[bytes], Any]:
    """Return a reader for values of the type, which may be an array.  Raises FeatureNotSupported."""
    element = functions.ARRAYS.get(oid)
    if _JSONB in {oid, element} and not functions.is_utf8(encoding):
        raise FeatureNotSupported("jsonb in another encoding than UTF8 is not supported there")
    if element is None:
        return functions.reader(oid)
    read = functions.reader(element)
    length, alignment = functions.STORAGE[element]

    def array(raw: bytes) -> functions.Array:
        dims, lower, elements = array_elements(raw, length, alignment)
        return functions.Array([None if e is None else read(e) for e in elements], dims, lower)

    return array
