"""Tokens and the splitting of scripts.  The expected values are what PostgreSQL 16 answered to the same text."""

from __future__ import annotations

import pytest

from pubsub.errors import PubsubError, SqlSyntaxError
from pubsub.sql.lexer import Kind, split, tokenize


def values(text: str) -> list[str]:
    return [token.value for token in tokenize(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Foo BAR é ☃ a$b", ["foo", "bar", "é", "☃", "a$b"]),
        ('"Foo" "a""b" U&"d\\0061t"', ["Foo", 'a"b', "dat"]),
        ("'a''b' 'a\\b'", ["a'b", "a\\b"]),
        ("'a'\n'b'", ["ab"]),
        ("'a' -- 'x'\n 'b' 'c'", ["ab", "c"]),
        (r"E'a\'b\n\101\x41\u00e9\q'", ["a'b\nAAéq"]),
        (r"E'\ud83d\ude00 \xc3\xa9'", ["😀 é"]),
        (r"U&'\0061\+000062\\' U&'!0061' UESCAPE '!'", ["ab\\", "a"]),
        ("$$a'b$$ $q$;$$;$q$", ["a'b", ";$$;"]),
        ("1 1.5e3 .5 5. 1_000 0x1F", ["1", "1.5e3", ".5", "5.", "1000", "0x1F"]),
        ("a=-5 =+ @- :: => 1..2", ["a", "=", "-", "5", "=", "+", "@-", "::", "=>", "1", "..", "2"]),
        ("a /* x /* ; */ y */ b -- c", ["a", "b"]),
    ],
)
def test_values(text: str, expected: list[str]) -> None:
    assert values(text) == expected


def test_only_quotes_make_a_name() -> None:
    assert [token.kind for token in tokenize("select \"select\" 'select'")] == [Kind.WORD, Kind.NAME, Kind.STRING]


def test_a_token_knows_its_place() -> None:
    text = "a  'b''c' /* d */ E"
    assert [text[token.start : token.end] for token in tokenize(text)] == ["a", "'b''c'", "E"]


@pytest.mark.parametrize(
    ("text", "message", "position"),
    [
        ("select 'abc", 'unterminated quoted string at or near "\'abc"', 7),
        ('select "abc', 'unterminated quoted identifier at or near ""abc"', 7),
        ("select $a$ b", 'unterminated dollar-quoted string at or near "$a$ b"', 7),
        ("select /* a", 'unterminated /* comment at or near "/* a"', 7),
        ("select b'01", 'unterminated bit string literal at or near "b\'01"', 7),
        ('select ""', 'zero-length delimited identifier at or near """"', 7),
        ("select 64MB", 'trailing junk after numeric literal at or near "64MB"', 7),
        ("select $1x", 'trailing junk after parameter at or near "$1x"', 7),
        (r"select E'\u12'", "invalid Unicode escape", 9),
        (r"select E'\ud83d'", 'invalid Unicode surrogate pair at or near "\'"', 15),
        (r"select U&'\00'", "invalid Unicode escape", 10),
        (r"select U&'\0000'", "invalid Unicode escape value", 10),
        ("select U&'!0061' uescape '+'", "invalid Unicode escape character at or near \"'+'\"", 25),
    ],
)
def test_errors_name_what_they_stopped_at(text: str, message: str, position: int) -> None:
    with pytest.raises(SqlSyntaxError) as caught:
        tokenize(text)
    assert (caught.value.message, caught.value.position) == (message, position)


@pytest.mark.parametrize("text", [r"E'\xff'", r"E'a\000b'"])
def test_bytes_that_are_no_utf8_are_refused(text: str) -> None:
    with pytest.raises(PubsubError, match="invalid byte sequence for encoding") as caught:
        tokenize(text)
    assert caught.value.sqlstate == "22021"


def test_a_long_name_is_cut_at_a_character_and_said_so() -> None:
    notices: list[str] = []
    name = "é" * 40
    (token,) = tokenize(f'"{name}"', notices)
    assert token.value == "é" * 31
    assert notices == [f'identifier "{name}" will be truncated to "{"é" * 31}"']


@pytest.mark.parametrize(
    ("script", "statements", "rest"),
    [
        ("", [], ""),
        ("a; b;", ["a;", "b;"], ""),
        ("a", [], "a"),
        (" ;; -- only a comment\n /* and ; another */", [], ""),
        ("a ';' \";\" $$;$$ $x$ ; $$ $x$ (;) -- ;\n /* ; /* ; */ ; */ b; c", None, "c"),
        ("select E'\\';'; x", ["select E'\\';';"], "x"),
        ("a; 'open ; b;", ["a;"], "'open ; b;"),
        ("a; /* open ; b;", ["a;"], "/* open ; b;"),
        ("a; $f$ open ; b;", ["a;"], "$f$ open ; b;"),
        (") a; b;", [") a;", "b;"], ""),
    ],
)
def test_split(script: str, statements: list[str] | None, rest: str) -> None:
    found, left = split(script)
    assert left == rest
    if statements is None:
        statements = [script[: -len("; c") + 1]]
    assert found == statements


def test_split_never_raises_on_what_does_not_lex() -> None:
    assert split('1x; ""; \\ \x00;') == (["1x;", '"";', "\\ \x00;"], "")
