"""LIKE, SIMILAR TO and regular expressions (like_match.c, like.c, regexp.c; PostgreSQL's manual for their syntax).

An advanced regular expression becomes one of Python's.  Only whether it matches counts, not what is matched first or
longest.  Forms that the two do not share, and forms that depend on a collation, are refused.
"""

from __future__ import annotations

import functools
import re
from typing import Final

from pubsub.errors import FeatureNotSupported, PubsubError
from walsender.rowfilter.functions.texts import LOWER
from walsender.rowfilter.functions.values import FixedFunction, Maker, Settings

# LIKE


@functools.lru_cache(256)
def _like(pattern: str) -> re.Pattern[str]:
    """Translate a pattern of LIKE: % and _, and a backslash before a literal character (like_match.c: MatchText)."""
    parts: list[str] = []
    escaped = False
    for character in pattern:
        if escaped:
            parts.append(re.escape(character))
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "%":
            parts.append(".*")
        elif character == "_":
            parts.append(".")
        else:
            parts.append(re.escape(character))
    if escaped:
        raise PubsubError("LIKE pattern must not end with escape character", sqlstate="22025")
    return re.compile("".join(parts), re.DOTALL)


def _like_maker(*, wanted: bool, ignore_case: bool = False) -> Maker:
    def make(types: tuple[int, ...], settings: Settings) -> FixedFunction | None:
        encoding = settings.encoding
        if ignore_case:
            # Only ASCII letters have a case; all else is compared as bytes.
            return None if not settings.bytewise else folded

        def matches(text: bytes, pattern: bytes) -> bool:
            return (_like(pattern.decode(encoding)).fullmatch(text.decode(encoding)) is not None) == wanted

        return matches

    def folded(text: bytes, pattern: bytes) -> bool:
        compiled = _like(pattern.translate(LOWER).decode("latin-1"))
        return (compiled.fullmatch(text.translate(LOWER).decode("latin-1")) is not None) == wanted

    return make


def _escape_character(escape: bytes, settings: Settings) -> str:
    """Return the character of an ESCAPE clause; empty if nothing is escaped."""
    character = escape.decode(settings.encoding)
    if len(character) > 1:
        raise PubsubError(
            "invalid escape string", sqlstate="22025", hint="Escape string must be empty or one character."
        )
    return character


def _escaped_like(types: tuple[int, ...], settings: Settings) -> FixedFunction:
    """Rewrite a pattern of LIKE … ESCAPE with the backslash as escape character (like_match.c: do_like_escape)."""

    def converted(pattern: bytes, escape: bytes) -> bytes:
        text, character = pattern.decode(settings.encoding), _escape_character(escape, settings)
        if character == "\\":
            return pattern
        found: list[str] = []
        escaped = False
        for one in text:
            if one == character and not escaped:
                found.append("\\")
                escaped = True
                continue
            if one == "\\" and not escaped:
                found.append("\\")
            found.append(one)
            escaped = False
        return "".join(found).encode(settings.encoding)

    return converted


# Regular expressions

_CLASSES: Final = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": " \\t\\n\\r\\f\\v",
    "blank": " \\t",
    "punct": "!-/:-@\\[-`{-~",
    "print": " -~",
    "graph": "!-~",
    "cntrl": "\\x00-\\x1f\\x7f",
    "xdigit": "0-9a-fA-F",
    "word": "a-zA-Z0-9_",
}
_CONTROLS: Final = {
    "a": "\\x07",
    "b": "\\x08",
    "B": "\\\\",
    "e": "\\x1b",
    "f": "\\f",
    "n": "\\n",
    "r": "\\r",
    "t": "\\t",
    "v": "\\v",
}
_CONSTRAINTS: Final = {"A": "\\A", "Z": "\\Z", "m": "\\b(?=\\w)", "M": "\\b(?<=\\w)", "y": "\\b", "Y": "(?!\\b)"}
_HEX: Final = {
    "x": re.compile("[0-9a-fA-F]{1,255}"),
    "u": re.compile("[0-9a-fA-F]{4}"),
    "U": re.compile("[0-9a-fA-F]{8}"),
}
_BOUND: Final = re.compile(r"\{(\d{1,3})(,(\d{1,3})?)?\}")
_GROUPS: Final = ("(?:", "(?=", "(?!", "(?<=", "(?<!")


def _invalid(reason: str) -> PubsubError:
    return PubsubError(f"invalid regular expression: {reason}", sqlstate="2201B")


class _Translation:
    """The translation of one regular expression into Python's."""

    def __init__(self, text: str, settings: Settings, *, ignore_case: bool) -> None:
        self._text = text
        self._at = 0
        self._open: list[bool] = []
        """The enclosing groups: whether each may be repeated."""
        self._bytewise = settings.bytewise
        self.ignore_case = ignore_case

    def run(self) -> str:
        self._embedded_options()
        parts: list[str] = []
        may_repeat = False
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in "*+?" or (character == "{" and self._text[self._at + 1 : self._at + 2].isdigit()):
                if not may_repeat:
                    raise _invalid("quantifier operand invalid")
                parts.append(self._quantifier())
                may_repeat = False
                continue
            part, may_repeat = self._atom()
            parts.append(part)
        return "".join(parts)

    def _embedded_options(self) -> None:
        if self._text.startswith("***="):
            self._text, self._at = re.escape(self._text[4:]), 0
        elif self._text.startswith("***:"):
            self._at = 4
        elif self._text.startswith("***"):
            raise _invalid("invalid regular expression")
        if found := re.compile(r"\(\?([a-z]+)\)").match(self._text, self._at):
            for option in found[1]:
                if option not in "ics":
                    raise FeatureNotSupported(f"the option {option} of a regular expression is not supported")
                if option in "ic":
                    self.ignore_case = option == "i"
            self._at = found.end()

    def _quantifier(self) -> str:
        if self._text[self._at] == "{":
            found = _BOUND.match(self._text, self._at)
            if found is None:
                raise _invalid("invalid repetition count(s)")
            low, high = int(found[1]), int(found[3] or found[1])
            if max(low, high) > 255 or (found[3] and low > high):
                raise _invalid("invalid repetition count(s)")
            part = found[0]
        else:
            part = self._text[self._at]
        self._at += len(part)
        if self._text[self._at : self._at + 1] == "?":
            self._at += 1
        return part

    def _atom(self) -> tuple[str, bool]:
        """Translate the next atom; return it and whether it may be repeated."""
        text, at = self._text, self._at
        character = text[at]
        self._at += 1
        if character == "\\":
            return self._escape()
        if character == "[":
            if text.startswith(("[[:<:]]", "[[:>:]]"), at):
                self._at = at + 7
                return _CONSTRAINTS["m" if text[at + 3] == "<" else "M"], False
            return self._bracket(), True
        if character == "(":
            if text[at + 1 : at + 2] != "?":
                self._open.append(True)
                return "(", False
            for group in _GROUPS:
                if text.startswith(group, at):
                    self._open.append(group == "(?:")
                    self._at = at + len(group)
                    return group, False
            raise _invalid("invalid regular expression")
        if character in "^$":
            return ("\\A" if character == "^" else "\\Z"), False
        if character == ")":
            if not self._open:
                raise _invalid("parentheses () not balanced")
            return character, self._open.pop()
        if character == ".":
            return character, True
        if character == "|":
            return character, False
        return re.escape(character), True

    def _escape(self) -> tuple[str, bool]:
        text = self._text
        if self._at >= len(text):
            raise _invalid("invalid escape \\ sequence")
        character = text[self._at]
        self._at += 1
        if character in _CONSTRAINTS:
            if character not in "AZ":
                self._ask_collation(f"\\{character}")
            return _CONSTRAINTS[character], False
        if character in "dwsDWS":
            self._ask_collation(f"\\{character}")
            return f"\\{character}", True
        if character in "123456789":
            if text[self._at : self._at + 1].isdigit():
                raise FeatureNotSupported("such a back reference of a regular expression is not supported")
            return f"(?:\\{character})", True
        return self._character(character), True

    def _character(self, character: str) -> str:
        """Translate an escape that stands for a character, in brackets or outside."""
        if character in _CONTROLS:
            return _CONTROLS[character]
        if digits := _HEX.get(character):
            found = digits.match(self._text, self._at)
            if found is None or int(found[0], 16) > 0x10FFFF:
                raise _invalid("invalid escape \\ sequence")
            self._at = found.end()
            return re.escape(chr(int(found[0], 16)))
        if character == "c" and self._at < len(self._text):
            self._at += 1
            return f"\\x{ord(self._text[self._at - 1]) & 0x1F:02x}"
        if character == "0":
            found = re.compile("[0-7]{0,2}").match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            return f"\\x{int(found[0] or '0', 8):02x}"
        if character.isascii() and character.isalnum():
            raise _invalid("invalid escape \\ sequence")
        return re.escape(character)

    def _bracket(self) -> str:
        """Translate a bracket expression; the position is after its [."""
        text = self._text
        parts = ["["]
        if text[self._at : self._at + 1] == "^":
            parts.append("^")
            self._at += 1
        first = True
        while True:
            if self._at >= len(text):
                raise _invalid("brackets [] not balanced")
            character = text[self._at]
            if character == "]" and not first:
                self._at += 1
                break
            first = False
            if text.startswith("[:", self._at):
                end = text.find(":]", self._at)
                name = text[self._at + 2 : end]
                if end < 0 or name not in _CLASSES:
                    raise _invalid("invalid character class")
                self._ask_collation(f"[:{name}:]")
                parts.append(_CLASSES[name])
                self._at = end + 2
            elif text.startswith(("[.", "[="), self._at):
                raise FeatureNotSupported("collating elements in a regular expression are not supported")
            elif character == "\\":
                self._at += 1
                following = text[self._at : self._at + 1]
                if following in {*"dws"} and following:
                    self._ask_collation(f"\\{following}")
                    self._at += 1
                    parts.append(f"\\{following}")
                    continue
                if not following or following in "DWSAmMyYZ":
                    raise _invalid("invalid escape \\ sequence")
                self._at += 1
                parts.append(self._character(following))
            elif (
                character == "-"
                and text[self._at + 1 : self._at + 2] != "]"
                and len(parts[-1]) > 0
                and parts[-1] not in "[^"
            ):
                self._at += 1
                parts.append("-")
            else:
                self._at += 1
                parts.append(re.escape(character) if character not in "[&~|" else "\\" + character)
        return "".join(parts) + "]"

    def _ask_collation(self, what: str) -> None:
        if not self._bytewise:
            raise FeatureNotSupported(f"{what} in a regular expression asks the collation, which is not supported")


@functools.lru_cache(256)
def _expression(pattern: str, settings: Settings, ignore_case: bool) -> re.Pattern[str]:
    translation = _Translation(pattern, settings, ignore_case=ignore_case)
    text = translation.run()
    if translation.ignore_case and not settings.bytewise:
        raise FeatureNotSupported("regular expressions without case ask the collation, which is not supported")
    flags = re.DOTALL | re.ASCII | (re.IGNORECASE if translation.ignore_case else 0)
    try:
        return re.compile(text, flags)
    except re.error as error:
        raise _invalid(str(error)) from error


def _regular(*, wanted: bool, ignore_case: bool = False) -> Maker:
    def make(types: tuple[int, ...], settings: Settings) -> FixedFunction:
        encoding = settings.encoding

        def matches(text: bytes, pattern: bytes, flags: bytes = b"") -> bool:
            compiled = _expression(pattern.decode(encoding), settings, _ignores_case(flags, ignore_case))
            return (compiled.search(text.decode(encoding)) is not None) == wanted

        return matches

    return make


def _ignores_case(flags: bytes, given: bool) -> bool:
    """Return whether `flags` ignore case; `given` if they do not say (regexp.c: parse_re_flags)."""
    for flag in flags.decode("latin-1"):
        if flag not in "ics":
            raise FeatureNotSupported(f'the option "{flag}" of a regular expression is not supported')
        if flag != "s":
            given = flag == "i"
    return given


def _similar(types: tuple[int, ...], settings: Settings) -> FixedFunction:
    """Rewrite a pattern of SIMILAR TO as a regular expression (regexp.c: similar_escape_internal)."""

    def converted(pattern: bytes, escape: bytes = b"\\") -> bytes:
        text, character = pattern.decode(settings.encoding), _escape_character(escape, settings)
        return ("^(?:" + "".join(_similar_parts(text, character)) + ")$").encode(settings.encoding)

    return converted


def _similar_parts(text: str, escape: str) -> list[str]:
    parts: list[str] = []
    escaped = in_brackets = False
    for one in text:
        if escaped:
            if one == '"' and not in_brackets:
                raise FeatureNotSupported("separators in a pattern of SIMILAR TO are not supported")
            parts.append("\\" + one)
            escaped = False
        elif one == escape:
            escaped = True
        elif in_brackets:
            parts.append("\\\\" if one == "\\" else one)
            in_brackets = one != "]"
        elif one == "[":
            parts.append(one)
            in_brackets = True
        elif one == "%":
            parts.append(".*")
        elif one == "_":
            parts.append(".")
        elif one == "(":
            parts.append("(?:")
        elif one in "\\.^$":
            parts.append("\\" + one)
        else:
            parts.append(one)
    return parts


_LIKE: Final = _like_maker(wanted=True)
_NOT_LIKE: Final = _like_maker(wanted=False)
_ILIKE: Final = _like_maker(wanted=True, ignore_case=True)
_NOT_ILIKE: Final = _like_maker(wanted=False, ignore_case=True)
_MATCHES: Final = _regular(wanted=True)

FUNCTIONS: Final[dict[str, Maker]] = {
    "like": _LIKE,
    "notlike": _NOT_LIKE,
    "like_escape": _escaped_like,
    "similar_to_escape": _similar,
    "regexp_like": _MATCHES,
    **{f"{kind}like": _LIKE for kind in ("text", "bpchar", "name")},
    **{f"{kind}nlike": _NOT_LIKE for kind in ("text", "bpchar", "name")},
    **{f"{kind}iclike": _ILIKE for kind in ("text", "bpchar", "name")},
    **{f"{kind}icnlike": _NOT_ILIKE for kind in ("text", "bpchar", "name")},
    **{f"{kind}regexeq": _MATCHES for kind in ("text", "bpchar", "name")},
    **{f"{kind}regexne": _regular(wanted=False) for kind in ("text", "bpchar", "name")},
    **{f"{kind}icregexeq": _regular(wanted=True, ignore_case=True) for kind in ("text", "bpchar", "name")},
    **{f"{kind}icregexne": _regular(wanted=False, ignore_case=True) for kind in ("text", "bpchar", "name")},
}
