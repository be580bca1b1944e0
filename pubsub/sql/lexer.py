"""Split SQL text into tokens, and a script into statements, like PostgreSQL and psql (scan.l, psqlscan.l).

Tokens keep their place in the text, so that an error can point at them.  Errors have the texts of scan.l, which quote
the offending text: `unterminated quoted string at or near "'abc"`.  standard_conforming_strings is on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pubsub.errors import PubsubError, SqlSyntaxError

#: Names are cut to this many bytes (pg_config_manual.h: NAMEDATALEN - 1).
MAX_NAME: Final = 63


class Kind(Enum):
    """A token's kind; all forms of a string have the same kind."""

    WORD = "word"  # an identifier or key word without quotes; `value` is in lower case
    NAME = "name"  # an identifier in double quotes
    STRING = "string"
    NUMBER = "number"
    OPERATOR = "operator"
    OTHER = "other"  # bit strings, parameters, stray characters: not part of any statement here


@dataclass(frozen=True, slots=True)
class Token:
    """A token: `text[start:end]` is its source, `value` its meaning, with quotes and escapes resolved."""

    kind: Kind
    value: str
    start: int
    end: int


_DIGITS: Final = r"[0-9](?:_?[0-9])*"
_HEX_OCTAL_BINARY: Final = r"0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+"
_DECIMAL: Final = rf"(?:{_DIGITS}(?:\.(?!\.)(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?{_DIGITS})?"
_WORD: Final = r"[A-Za-z_\u0080-\U0010ffff][A-Za-z0-9_$\u0080-\U0010ffff]*"
# Two parts of one string are separated by white space that contains a newline; `--` comments count as white space.
_JOIN: Final = r"(?:[ \t\f\v]|--[^\n\r]*)*[\n\r](?:[ \t\n\r\f\v]|--[^\n\r]*[\n\r])*"
_PLAIN: Final = r"'(?:[^']|'')*+'"
_ESCAPED: Final = r"'(?:[^'\\]|''|\\.)*+'"


def _joined(first: str, more: str) -> str:
    return rf"{first}(?:{_JOIN}{more})*"


_TOKEN: Final = re.compile(
    "|".join(
        (
            r"(?P<space>(?:[ \t\n\r\f\v]|--[^\n\r]*)+)",
            r"(?P<comment>/\*)",
            rf"(?P<escaped>[eE]{_joined(_ESCAPED, _ESCAPED)})",
            rf"(?P<unicode>[uU]&{_joined(_PLAIN, _PLAIN)})",
            rf"(?P<bits>[bBxX]{_joined(_PLAIN, _PLAIN)})",
            rf"(?P<plain>{_joined(_PLAIN, _PLAIN)})",
            r'(?P<unicode_name>[uU]&"(?:[^"]|"")*+")',
            r'(?P<name>"(?:[^"]|"")*+")',
            r"(?P<open_string>[eEbBxX]?'|[uU]&')",
            r'(?P<open_name>(?:[uU]&)?")',
            r"(?P<dollar>\$(?P<tag>(?:[A-Za-z_\u0080-\U0010ffff][A-Za-z0-9_\u0080-\U0010ffff]*)?)\$)",
            rf"(?P<parameter>\$[0-9]+(?:{_WORD})?)",
            rf"(?P<word>{_WORD})",
            rf"(?P<number>(?:{_HEX_OCTAL_BINARY}|{_DECIMAL})(?P<junk>{_WORD})?)",
            r"(?P<fixed>::|\.\.|:=|=>)",
            r"(?P<operator>[~!@#^&|`?+\-*/%<>=]+)",
            r"(?P<one>.)",
        )
    ),
    re.DOTALL,
)
#: An operator of several characters ends in + or - only if it has one of these (scan.l: operator).
_KEEPS_SIGN: Final = frozenset("~!@#^&|`?%")
_SIMPLE_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPE: Final = re.compile(
    r"''|\\(?:([0-7]{1,3})|x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL
)
_UESCAPE: Final = re.compile(r"[ \t\n\r\f\v]+uescape[ \t\n\r\f\v]*'(.)'", re.IGNORECASE | re.DOTALL)


def tokenize(text: str, notices: list[str] | None = None) -> list[Token]:
    """Return the tokens of one statement, without comments and white space.

    Names that are too long are truncated, as in PostgreSQL, and a notice is added to `notices`.  Raises SqlSyntaxError,
    and PubsubError (22021) for an escape that gives invalid UTF-8.
    """
    return list(_tokens(text, notices))


def split(script: str) -> tuple[list[str], str]:
    """Split a script into its statements, and the rest after the last semicolon.

    A statement includes its semicolon, but not the white space and comments around it.  Semicolons in quotes, comments
    and parentheses do not end a statement.  The rest is empty, or a statement without an end: an interactive prompt
    asks for more, at a file's end it is the last statement.  Never raises.
    """
    statements: list[str] = []
    start: int | None = None
    depth = 0
    for kind, begin, end in _scan(script):
        if kind in ("space", "comment"):
            continue
        text = script[begin:end]
        if start is None:
            if text == ";":
                continue
            start = begin
        if kind == "one":
            depth = depth + 1 if text == "(" else max(0, depth - 1) if text == ")" else depth
            if text == ";" and depth == 0:
                statements.append(script[start:end])
                start = None
    return statements, "" if start is None else script[start:].rstrip()


def is_open(text: str) -> bool:
    """Whether the text ends within quotes or a comment."""
    return any(kind.startswith("open_") for kind, _, _ in _scan(text))


def backslash(text: str, start: int) -> int | None:
    """The place of the first backslash from `start` on that is in no quotes and no comment: a command of the prompt."""
    return next((begin for _, begin, _ in _scan(text) if begin >= start and text[begin] == "\\"), None)


def _scan(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, start, end): a group of _TOKEN, or "open_…" for an unterminated token.  Comments nest."""
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        assert match is not None  # `one` takes any character
        kind, end = match.lastgroup or "one", match.end()
        # lastgroup is the group that closed last: the alternative itself, since it encloses all others.
        if kind == "comment":
            end = _end_of_comment(text, end)
            kind = "comment" if end else "open_comment"
        elif kind == "dollar":
            closing = text.find(match["dollar"], end)
            end = closing + len(match["dollar"]) if closing >= 0 else 0
            kind = "dollar" if end else "open_dollar"
        elif kind == "operator":
            end = place + _operator_length(match["operator"])
        if kind.startswith("open_"):
            end = len(text)
        yield kind, place, end
        place = end


def _end_of_comment(text: str, place: int) -> int:
    """Return where the comment opened before `place` ends; 0 if it does not."""
    depth = 1
    for match in re.compile(r"/\*|\*/").finditer(text, place):
        depth += 1 if match[0] == "/*" else -1
        if depth == 0:
            return match.end()
    return 0


def _operator_length(characters: str) -> int:
    for mark in ("/*", "--"):
        found = characters.find(mark)
        if found > 0:
            characters = characters[:found]
    length = len(characters)
    while length > 1 and characters[length - 1] in "+-" and not _KEEPS_SIGN & set(characters[: length - 1]):
        length -= 1
    return length


_OPEN: Final = {
    "open_comment": "unterminated /* comment",
    "open_dollar": "unterminated dollar-quoted string",
    "open_name": "unterminated quoted identifier",
}


def _tokens(text: str, notices: list[str] | None) -> Iterator[Token]:
    skip_to = 0
    for kind, start, end in _scan(text):
        raw = text[start:end]
        if start < skip_to or kind in ("space", "comment"):
            continue
        match kind:
            case "word":
                yield Token(Kind.WORD, _cut(_lower(raw), notices), start, end)
            case "name" | "unicode_name":
                if kind == "unicode_name":
                    value, skip_to = _unicode(text, start, end, raw[3:-1].replace('""', '"'))
                else:
                    value = raw[1:-1].replace('""', '"')
                if not value:
                    raise near("zero-length delimited identifier", text, start, end)
                yield Token(Kind.NAME, _cut(value, notices), start, max(end, skip_to))
            case "plain":
                yield Token(Kind.STRING, "".join(_parts(raw, _PLAIN)).replace("''", "'"), start, end)
            case "escaped":
                value = _unescape(text, "".join(_parts(raw[1:], _ESCAPED)), start + 2)
                yield Token(Kind.STRING, value, start, end)
            case "unicode":
                value, skip_to = _unicode(text, start, end, "".join(_parts(raw[2:], _PLAIN)).replace("''", "'"))
                yield Token(Kind.STRING, value, start, max(end, skip_to))
            case "dollar":
                tag = raw.index("$", 1) + 1
                yield Token(Kind.STRING, raw[tag:-tag], start, end)
            case "number" | "parameter":
                yield _number(text, kind, start, end)
            case "fixed" | "operator" | "one":
                operator = kind != "one" or raw in ",()[].;:"
                yield Token(Kind.OPERATOR if operator else Kind.OTHER, raw, start, end)
            case "bits":
                yield Token(Kind.OTHER, raw, start, end)
            case "open_string":
                what = {"b": "unterminated bit string literal", "x": "unterminated hexadecimal string literal"}
                raise near(what.get(raw[0].lower(), "unterminated quoted string"), text, start, end)
            case _:
                raise near(_OPEN[kind], text, start, end)


def near(message: str, text: str, start: int, end: int) -> SqlSyntaxError:
    """Return an error that quotes the text at its place (scan.l: scanner_yyerror)."""
    where = f'at or near "{text[start:end]}"' if start < len(text) else "at end of input"
    return SqlSyntaxError(f"{message} {where}", statement=text, position=start)


def _number(text: str, kind: str, start: int, end: int) -> Token:
    match = _TOKEN.match(text, start)
    assert match is not None
    if kind == "parameter":
        if not match["parameter"][1:].isdigit():
            raise near("trailing junk after parameter", text, start, end)
        return Token(Kind.OTHER, match[0], start, end)
    if match["junk"]:
        raise near("trailing junk after numeric literal", text, start, end)
    return Token(Kind.NUMBER, match[0].replace("_", ""), start, end)


def _parts(raw: str, part: str) -> list[str]:
    """Return the parts of a string that continues over several lines, without their quotes."""
    return [match[0][1:-1] for match in re.finditer(rf"{part}|--[^\n\r]*", raw, re.DOTALL) if match[0][0] == "'"]


def _unescape(text: str, body: str, first: int) -> str:
    """Resolve an E'…' string's escapes (scan.l: xe).  Octal and hexadecimal ones are bytes; the result must be UTF-8.

    `first` is where the body begins in the text.  In a string of several parts, error positions after the first part
    are not exact.
    """
    out = bytearray()
    place = 0
    high: int | None = None
    for match in _ESCAPE.finditer(body):
        octal, hexadecimal, short, long, other = match.groups()
        if high is not None and (match.start() != place or not (short or long)):
            raise _no_pair(text, first + place)
        out += body[place : match.start()].encode()
        if octal:
            out.append(int(octal, 8) & 0xFF)
        elif hexadecimal:
            out.append(int(hexadecimal, 16))
        elif short or long:
            code = int(short or long, 16)
            if not 0 < code <= 0x10FFFF:
                raise near("invalid Unicode escape value", text, first + match.start(), first + match.end())
            if (0xDC00 <= code <= 0xDFFF) != (high is not None):
                raise near("invalid Unicode surrogate pair", text, first + match.start(), first + match.end())
            high = _add_code(out, code, high)
        elif other in ("u", "U"):
            hint = "Unicode escapes must be \\uXXXX or \\UXXXXXXXX."
            raise _bad(text, first + match.start(), "invalid Unicode escape", hint, sqlstate="22025")
        else:
            out += (_SIMPLE_ESCAPES.get(other, other) if other else "'").encode()
        place = match.end()
    if high is not None:
        raise _no_pair(text, first + place)
    out += body[place:].encode()
    try:
        value = out.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(bytes(out[error.start : error.start + 1])) from None
    if "\0" in value:
        raise _not_utf8(b"\0")
    return value


def _unicode(text: str, start: int, end: int, body: str) -> tuple[str, int]:
    """Resolve a U&'…' string or name; return it and its UESCAPE clause's end, or 0 (parser.c: str_udeescape)."""
    clause = _UESCAPE.match(text, end)
    escape = clause[1] if clause else "\\"
    if clause and escape in "0123456789abcdefABCDEF+'\" \t\n\r\f\v":
        raise near("invalid Unicode escape character", text, clause.start(1) - 1, clause.end())
    out = bytearray()
    place = 0
    high: int | None = None
    mark = re.escape(escape)
    pattern = re.compile(rf"{mark}(?:({mark})|([0-9A-Fa-f]{{4}})|\+([0-9A-Fa-f]{{6}})|)", re.DOTALL)
    for match in pattern.finditer(body):
        double, short, long = match.groups()
        here = start + 3 + match.start()
        code = int(short or long or "0", 16)
        if not (double or short or long):
            hint = "Unicode escapes must be \\XXXX or \\+XXXXXX."
            raise _bad(text, here, "invalid Unicode escape", hint)
        if not double and not 0 < code <= 0x10FFFF:
            raise _bad(text, here, "invalid Unicode escape value")
        is_low = 0xDC00 <= code <= 0xDFFF
        if is_low != (high is not None) or (high is not None and match.start() != place):
            raise _bad(text, here, "invalid Unicode surrogate pair")
        out += body[place : match.start()].encode()
        place = match.end()
        if double:
            out += escape.encode()
        else:
            high = _add_code(out, code, high)
    if high is not None:
        raise _bad(text, start + 3 + place, "invalid Unicode surrogate pair")
    out += body[place:].encode()
    return out.decode(), clause.end() if clause else 0


def _add_code(out: bytearray, code: int, high: int | None) -> int | None:
    """Append one code point; return a surrogate pair's first half instead, for the caller to pass with the second."""
    if 0xD800 <= code <= 0xDBFF:
        return code
    if high is not None:
        code = 0x10000 + ((high & 0x3FF) << 10) + (code & 0x3FF)
    out += chr(code).encode()
    return None


def _bad(text: str, place: int, message: str, hint: str | None = None, sqlstate: str = "42601") -> SqlSyntaxError:
    error = SqlSyntaxError(message, statement=text, position=place, hint=hint)
    error.sqlstate = sqlstate
    return error


def _no_pair(text: str, place: int) -> SqlSyntaxError:
    """Return the error for a surrogate pair without its second half; it quotes the text found instead."""
    following = re.compile(r"'|\\.?|[^\\']+", re.DOTALL).match(text, place)
    return near("invalid Unicode surrogate pair", text, place, following.end() if following else place)


def _not_utf8(data: bytes) -> PubsubError:
    shown = " ".join(f"0x{byte:02x}" for byte in data)
    return PubsubError(f'invalid byte sequence for encoding "UTF8": {shown}', sqlstate="22021")


def _lower(name: str) -> str:
    """Convert ASCII letters to lower case, no others (scansup.c: downcase_identifier, in multi-byte encodings)."""
    return "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in name)


def _cut(name: str, notices: list[str] | None) -> str:
    """Truncate a name to MAX_NAME bytes and add a notice (scansup.c: truncate_identifier)."""
    data = name.encode(errors="surrogatepass")
    if len(data) <= MAX_NAME:
        return name
    short = data[:MAX_NAME].decode(errors="ignore")
    if notices is not None:
        notices.append(f'identifier "{name}" will be truncated to "{short}"')
    return short
