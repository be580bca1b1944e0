"""The conditions of the option where: which of the publisher's rows a Delta table has.

    status <> 'draft' AND (amount >= 10.5 OR region IN ('eu', 'us')) AND deleted_at IS NULL AND NOT hidden

    condition     condition OR condition,  condition AND condition,  NOT condition,  condition IS [NOT] TRUE | FALSE | UNKNOWN
    comparison    column = <> != < <= > >= column or constant,  column IS [NOT] DISTINCT FROM constant,
                  column [NOT] BETWEEN constant AND constant,  column [NOT] IN (constant, …),  column [NOT] LIKE 'pattern',
                  column IS [NOT] NULL,  a column that is a Boolean itself
    constant      'text',  12.5,  TRUE,  FALSE

The words bind as in PostgreSQL (gram.y: %nonassoc and %left).  What a condition means is decided by the columns' types
(pubsub.row_filters); nothing else of SQL is taken, since it is evaluated here, too, and has to come out as the publisher's does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Final, Literal, assert_never

from pubsub.errors import FeatureNotSupported, PubsubError, SqlSyntaxError
from pubsub.sql.identifiers import ANY_NAME, quote_identifier, quote_literal
from pubsub.sql.keywords import NOT_COLID
from pubsub.sql.lexer import Kind, Token, tokenize

Operator = Literal["=", "<>", "<", "<=", ">", ">="]
_OPERATORS: Final[Mapping[str, Operator]] = {
    "=": "=", "<>": "<>", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">=",
}  # fmt: skip
_TURNED: Final[Mapping[Operator, Operator]] = {"=": "=", "<>": "<>", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
#: Deeper conditions are refused: each level takes some of Python's stack, here and where they are evaluated.
_DEEPEST: Final = 50
#: numeric.c: NUMERIC_MAX_PRECISION and more; a longer number is no constant that anybody compares with.
_MOST_DIGITS: Final = 1000

Constant = str | Decimal | bool


@dataclass(frozen=True, slots=True)
class Column:
    """A column; as a condition, one of Booleans."""

    name: str


@dataclass(frozen=True, slots=True)
class Comparison:
    operator: Operator
    left: Column
    right: Column | Constant


@dataclass(frozen=True, slots=True)
class Distinct:
    """column IS DISTINCT FROM constant."""

    column: Column
    constant: Constant


@dataclass(frozen=True, slots=True)
class Membership:
    """column IN (constants)."""

    column: Column
    constants: tuple[Constant, ...]


@dataclass(frozen=True, slots=True)
class Like:
    """column LIKE pattern, with the backslash as its escape."""

    column: Column
    pattern: str


@dataclass(frozen=True, slots=True)
class NullTest:
    """column IS NULL."""

    column: Column


@dataclass(frozen=True, slots=True)
class TruthTest:
    """condition IS TRUE, IS FALSE or IS UNKNOWN (`value` None)."""

    operand: Expression
    value: bool | None


@dataclass(frozen=True, slots=True)
class Not:
    operand: Expression


@dataclass(frozen=True, slots=True)
class Junction:
    """Conditions joined by AND, or by OR."""

    word: Literal["AND", "OR"]
    operands: tuple[Expression, ...]


Expression = Column | Comparison | Distinct | Membership | Like | NullTest | TruthTest | Not | Junction


@dataclass(frozen=True, slots=True)
class RowCondition:
    """A condition: as it was written, and as it was read."""

    text: str
    expression: Expression

    @classmethod
    def parse(cls, text: str) -> RowCondition:
        """Parse a condition.  Raises SqlSyntaxError, and FeatureNotSupported for SQL that is not taken."""
        return cls(text, _Parser(text, tokenize(text)).whole())

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its columns, in order."""
        return tuple(dict.fromkeys(one.name for one in columns_in(self.expression)))

    def sql(self, names: Mapping[str, str]) -> str:
        """Return it as SQL for the publisher; `names`: what its columns are called there now."""
        return _sql(self.expression, lambda column: quote_identifier(names[column.name], ANY_NAME))


def columns_in(expression: Expression) -> Iterator[Column]:
    """Yield the columns of an expression, in order."""
    match expression:
        case Column():
            yield expression
        case Comparison():
            yield expression.left
            if isinstance(expression.right, Column):
                yield expression.right
        case Distinct() | Membership() | Like() | NullTest():
            yield expression.column
        case TruthTest() | Not():
            yield from columns_in(expression.operand)
        case Junction():
            for one in expression.operands:
                yield from columns_in(one)
        case _:
            assert_never(expression)


def _sql(expression: Expression, name: Callable[[Column], str]) -> str:
    match expression:
        case Column():
            return name(expression)
        case Comparison(operator, left, right):
            other = name(right) if isinstance(right, Column) else _constant_sql(right)
            return f"({name(left)} {operator} {other})"
        case Distinct(column, constant):
            return f"({name(column)} IS DISTINCT FROM {_constant_sql(constant)})"
        case Membership(column, constants):
            return f"({name(column)} IN ({', '.join(map(_constant_sql, constants))}))"
        case Like(column, pattern):
            return f"({name(column)} LIKE {quote_literal(pattern)})"
        case NullTest(column):
            return f"({name(column)} IS NULL)"
        case TruthTest(operand, value):
            return f"({_sql(operand, name)} IS {'UNKNOWN' if value is None else str(value).upper()})"
        case Not(operand):
            return f"(NOT {_sql(operand, name)})"
        case Junction(word, operands):
            return f"({f' {word} '.join(_sql(one, name) for one in operands)})"
    assert_never(expression)


def _constant_sql(constant: Constant) -> str:
    if isinstance(constant, bool):
        return str(constant).upper()
    if isinstance(constant, str):
        return quote_literal(constant)
    return f"({constant})" if constant.is_signed() else str(constant)


class _Number(Decimal):
    """A constant; not the same class as what an expression may be."""


# What a part of a condition may be until its use tells.
_Term = Expression | str | _Number | bool


class _Parser:
    """Reads a condition from its tokens, by recursive descent."""

    def __init__(self, text: str, tokens: Sequence[Token]) -> None:
        self._text = text
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    def whole(self) -> Expression:
        found = self._condition(self._disjunction())
        if self._place < len(self._tokens):
            raise self._failed()
        return found

    # Levels, the loosest first

    def _disjunction(self) -> _Term:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise FeatureNotSupported(f"a condition of the option where has more than {_DEEPEST} levels of parentheses")
        found = self._joined("OR", self._conjunction)
        self._depth -= 1
        return found

    def _conjunction(self) -> _Term:
        return self._joined("AND", self._negation)

    def _joined(self, word: Literal["AND", "OR"], operand: Callable[[], _Term]) -> _Term:
        found = [operand()]
        while self._take(word.lower()):
            found.append(operand())
        return found[0] if len(found) == 1 else Junction(word, tuple(map(self._condition, found)))

    def _negation(self) -> _Term:
        count = 0
        while self._take("not"):
            count += 1
        found = self._tested()
        # Two negations cancel each other out, also of what is unknown.
        return Not(self._condition(found)) if count % 2 else self._condition(found) if count else found

    def _tested(self) -> _Term:
        found = self._compared()
        if self._take("isnull"):
            return self._null_test(found, negated=False)
        if self._take("notnull"):
            return self._null_test(found, negated=True)
        if not self._take("is"):
            return found
        negated = self._take("not")
        if self._take("null"):
            return self._null_test(found, negated=negated)
        for word, value in (("true", True), ("false", False), ("unknown", None)):
            if self._take(word):
                test = TruthTest(self._condition(found), value)
                return Not(test) if negated else test
        if self._take("distinct"):
            if not self._take("from"):
                raise self._failed()
            distinct = Distinct(self._column(found), self._constant(self._compared()))
            return Not(distinct) if negated else distinct
        raise self._failed()

    def _null_test(self, operand: _Term, *, negated: bool) -> Expression:
        test: Expression = (
            NullTest(operand) if isinstance(operand, Column) else TruthTest(self._condition(operand), None)
        )
        return Not(test) if negated else test

    def _compared(self) -> _Term:
        left = self._ranged()
        token = self._token()
        if token is None or token.kind is not Kind.OPERATOR or token.value not in _OPERATORS:
            return left
        self._place += 1
        operator, right = _OPERATORS[token.value], self._ranged()
        if not isinstance(left, Column):
            left, right, operator = right, left, _TURNED[operator]
        column = self._column(left)
        return Comparison(operator, column, right if isinstance(right, Column) else self._constant(right))

    def _ranged(self) -> _Term:
        found = self._primary()
        start = self._place
        negated = self._take("not")
        test: Expression
        if self._take("between"):
            column, low = self._column(found), self._constant(self._primary())
            if not self._take("and"):
                raise self._failed()
            high = self._constant(self._primary())
            test = Junction("AND", (Comparison(">=", column, low), Comparison("<=", column, high)))
        elif self._take("in"):
            test = Membership(self._column(found), self._list())
        elif self._take("like"):
            pattern = self._primary()
            if not isinstance(pattern, str):
                raise self._refused("a pattern that is no constant")
            test = Like(self._column(found), _checked_pattern(pattern))
        else:
            self._place = start
            return found
        return Not(test) if negated else test

    def _list(self) -> tuple[Constant, ...]:
        if not self._take("("):
            raise self._failed()
        found = [self._constant(self._primary())]
        while self._take(","):
            found.append(self._constant(self._primary()))
        if not self._take(")"):
            raise self._failed()
        return tuple(found)

    def _primary(self) -> _Term:
        token = self._token()
        if token is None:
            raise self._failed()
        if self._take("("):
            found = self._disjunction()
            if not self._take(")"):
                raise self._failed()
            return found
        if token.kind is Kind.STRING:
            self._place += 1
            return token.value
        if token.kind is Kind.OPERATOR and token.value in ("-", "+"):
            self._place += 1
            number = self._token()
            if number is None or number.kind is not Kind.NUMBER:
                raise self._refused("arithmetic")
            found_number = self._number(number)
            return _Number(found_number.copy_negate()) if token.value == "-" else found_number
        if token.kind is Kind.NUMBER:
            return self._number(token)
        for word in ("true", "false"):
            if self._take(word):
                return word == "true"
        if token.kind is Kind.NAME or (token.kind is Kind.WORD and token.value not in NOT_COLID):
            self._place += 1
            after = self._token()
            if after is not None and after.kind is Kind.OPERATOR and after.value == "(":
                raise self._refused("a function")
            if after is not None and after.kind is Kind.STRING:
                raise self._refused("a constant with a type")
            return Column(token.value)
        if token.kind is Kind.WORD and token.value == "null":
            raise self._refused("NULL as a constant", "Use IS NULL, or IS NOT NULL.")
        raise self._failed()

    def _number(self, token: Token) -> _Number:
        self._place += 1
        text = token.value.lower()
        try:
            found = _Number(int(text, 0)) if text[:2] in ("0x", "0o", "0b") else _Number(text)
        except (InvalidOperation, ValueError) as error:
            raise self._refused("this number") from error
        if len(found.as_tuple().digits) > _MOST_DIGITS or abs(found.adjusted()) > _MOST_DIGITS:
            raise self._refused("a number of so many digits")
        return found

    # What a part may be used as

    def _condition(self, term: _Term) -> Expression:
        if isinstance(term, str | Decimal | bool):
            raise self._refused("a constant that is compared with no column")
        return term

    def _column(self, term: _Term) -> Column:
        if not isinstance(term, Column):
            raise self._refused("a comparison of something else than a column")
        return term

    def _constant(self, term: _Term) -> Constant:
        if isinstance(term, bool | str):
            return term
        if isinstance(term, _Number):
            return Decimal(term)
        raise self._refused("a comparison with something else than a constant")

    # Tokens

    def _token(self) -> Token | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self, value: str) -> bool:
        """Pass a word, or a sign, if it comes next."""
        token = self._token()
        if token is None or token.value != value or token.kind not in (Kind.WORD, Kind.OPERATOR):
            return False
        self._place += 1
        return True

    def _refused(self, what: str, hint: str | None = None) -> FeatureNotSupported:
        return FeatureNotSupported(
            f"{what} is not supported in a condition of the option where: {self._text}",
            detail="Columns are compared with constants, by AND, OR, NOT, =, <>, <, <=, >, >=, BETWEEN, IN, LIKE and IS.",
            hint=hint or "A row filter of the publication takes more, and leaves rows out at the publisher.",
        )

    def _failed(self) -> PubsubError:
        token = self._token()
        if token is None:
            return SqlSyntaxError("syntax error at end of input", statement=self._text, position=len(self._text))
        shown = self._text[token.start : token.end]
        if token.kind in (Kind.OPERATOR, Kind.OTHER) and shown not in "(),;":
            return self._refused(f'"{shown}"')
        return SqlSyntaxError(f'syntax error at or near "{shown}"', statement=self._text, position=token.start)


def _checked_pattern(pattern: str) -> str:
    """Return the pattern.  Raises FeatureNotSupported for one that ends in its escape, which PostgreSQL refuses for some rows."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise FeatureNotSupported("LIKE pattern must not end with escape character", sqlstate="22025")
    return pattern
