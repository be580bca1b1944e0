"""The prompt of `pubsub sql`: turns lines into statements and psql's backslash commands.

It does not read the terminal: `Prompt.take` gets a line, `Prompt.prompt` is the prompt for the next one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from pubsub.cli.display import Display
from pubsub.sql.lexer import backslash, is_open, split

HELP: Final = """\
Statements end with a semicolon: CREATE, ALTER and DROP SUBSCRIPTION; SHOW; SELECT on the views (pg_subscription,
pg_subscription_rel, pg_stat_subscription, …) and on replicated tables (schema.table).

  \\q                     quit (exit and quit, too)
  \\?                     this help
  \\h [NAME]              the syntax of a statement
  \\g, \\gx                carry out what has been entered, as after a semicolon; \\gx with expanded output
  \\p, \\r                 show, or forget, what has been entered

  \\d                     the replicated tables
  \\d NAME                a table's or view's columns; * and ? stand for other characters
  \\dt [NAME]             the replicated tables
  \\dv [NAME]             the views
  \\dRs[+] [NAME]         the subscriptions, with + all their options
  \\x [on|off|auto]       expanded output: a line for each column; auto where rows are wider than the terminal
  \\conninfo              the node"""
_WELCOME: Final = """\
You are using pubsub sql, the prompt of a node.
Type:  \\? for help with its commands
       \\h for help with statements
       \\g or terminate with semicolon to execute query
       \\q to quit"""
_SYNTAX: Final = {
    "CREATE SUBSCRIPTION": """\
CREATE SUBSCRIPTION name
    CONNECTION 'conninfo'
    PUBLICATION publication_name [, ...]
    [ WITH ( subscription_parameter [= value] [, ... ] ) ]""",
    "ALTER SUBSCRIPTION": """\
ALTER SUBSCRIPTION name CONNECTION 'conninfo'
ALTER SUBSCRIPTION name SET PUBLICATION publication_name [, ...] [ WITH ( publication_option [= value] [, ... ] ) ]
ALTER SUBSCRIPTION name ADD PUBLICATION publication_name [, ...] [ WITH ( publication_option [= value] [, ... ] ) ]
ALTER SUBSCRIPTION name DROP PUBLICATION publication_name [, ...] [ WITH ( publication_option [= value] [, ... ] ) ]
ALTER SUBSCRIPTION name REFRESH PUBLICATION [ WITH ( refresh_option [= value] [, ... ] ) ]
ALTER SUBSCRIPTION name RESYNC TABLE table_name [, ...]
ALTER SUBSCRIPTION name ENABLE
ALTER SUBSCRIPTION name DISABLE
ALTER SUBSCRIPTION name SET ( subscription_parameter [= value] [, ... ] )
ALTER SUBSCRIPTION name SKIP ( skip_option = value )
ALTER SUBSCRIPTION name OWNER TO { new_owner | CURRENT_ROLE | CURRENT_USER | SESSION_USER }
ALTER SUBSCRIPTION name RENAME TO new_name""",
    "DROP SUBSCRIPTION": "DROP SUBSCRIPTION [ IF EXISTS ] name [ CASCADE | RESTRICT ]",
    "SELECT": """\
[ WITH with_query [, ...] ]
SELECT [ ALL | DISTINCT [ ON ( expression [, ...] ) ] ] [ { * | expression [ [ AS ] output_name ] } [, ...] ]
    [ FROM from_item [, ...] ] [ WHERE condition ] [ GROUP BY expression [, ...] ] [ HAVING condition ]
    [ WINDOW window_name AS ( window_definition ) [, ...] ]
    [ { UNION | INTERSECT | EXCEPT } [ ALL | DISTINCT ] select ]
    [ ORDER BY expression [ ASC | DESC ] [ NULLS { FIRST | LAST } ] [, ...] ] [ LIMIT count ] [ OFFSET start ]""",
    "SHOW": "SHOW name\nSHOW ALL",
}
_COMMAND: Final = re.compile(r"\\(\S*)\s*(.*)", re.DOTALL)


class Prompt:
    """The state of a prompt: the text entered so far (`pending`), and how to carry out the next line.

    `run` carries out one statement and shows its result; `describe` shows the answer to \\d or a relative, and gets the
    command and its pattern; both print errors themselves.  `display` says how rows are shown.
    """

    def __init__(
        self,
        run: Callable[[str], None],
        describe: Callable[[str, str], None],
        display: Display,
        node: str,
        say: Callable[[str], None] = print,
    ) -> None:
        self._run = run
        self._describe = describe
        self._display = display
        self._node = node
        self._say = say
        self.pending = ""

    @property
    def prompt(self) -> str:
        """The prompt, which as in psql says whether a statement or a quote is open."""
        if not self.pending:
            return "pubsub=> "
        return "pubsub'> " if is_open(self.pending) else "pubsub-> "

    def forget(self) -> None:
        """Discard the text entered so far, on Ctrl-C."""
        self.pending = ""

    def take(self, line: str) -> bool:
        """Carry out a line.  Return False to quit."""
        word = line.strip().lower().removesuffix(";").rstrip()
        done = self._word(word) if word in ("help", "exit", "quit") else None
        if done is not None:
            return done
        text = f"{self.pending}\n{line}" if self.pending else line
        place = backslash(text, len(text) - len(line))
        statements, rest = split(text if place is None else text[:place])
        for statement in statements:
            self._run(statement)
        self.pending = rest
        return True if place is None else self._command(text[place:])

    def _word(self, word: str) -> bool | None:
        """Handle help, exit or quit on a line alone (mainloop.c), and return as `take` does.

        Return None within a statement, after a hint: the line then belongs to the statement.
        """
        if not self.pending:
            if word == "help":
                self._say(_WELCOME)
            return word == "help"
        if is_open(self.pending):
            self._say("Use control-C to clear the input buffer.")
        elif word == "help":
            self._say("Use \\? for help or press control-C to clear the input buffer.")
        else:
            self._say("Use \\q to quit.")
        return None

    def _command(self, text: str) -> bool:
        match = _COMMAND.match(text)
        assert match is not None
        name, argument = match[1].removesuffix(";"), match[2].strip().removesuffix(";").strip()
        match name:
            case "q" | "quit":
                return False
            case "?":
                self._say(HELP)
            case "h" | "help":
                self._say(syntax(argument))
            case "g" | "gx":
                self._go(expanded=name == "gx")
            case "p":
                self._say(self.pending or "Query buffer is empty.")
            case "r":
                self.pending = ""
                self._say("Query buffer reset (cleared).")
            case "x":
                self._expand(argument.lower())
            case "conninfo":
                self._say(f'You are at the prompt of node "{self._node}".')
            case "d" | "dt" | "dv" | "dRs" | "d+" | "dt+" | "dv+" | "dRs+":
                self._describe(name, argument)
            case _:
                self._say(f"invalid command \\{name}\nTry \\? for help.")
        return True

    def _go(self, *, expanded: bool) -> None:
        statement, self.pending = self.pending, ""
        if not statement:
            return
        before, self._display.expanded = self._display.expanded, "on" if expanded else self._display.expanded
        try:
            self._run(statement)
        finally:
            self._display.expanded = before

    def _expand(self, wanted: str) -> None:
        if wanted not in ("", "on", "off", "auto", "true", "false", "1", "0"):
            self._say(f'unrecognized value "{wanted}" for "\\x"\nAvailable values are: on, off, auto.')
            return
        if wanted:
            self._display.expanded = {"true": "on", "1": "on", "false": "off", "0": "off"}.get(wanted, wanted)
        else:
            self._display.expanded = "off" if self._display.expanded == "on" else "on"
        said = {"on": "is on", "off": "is off", "auto": "is used automatically"}[self._display.expanded]
        self._say(f"Expanded display {said}.")


def syntax(name: str) -> str:
    """Return the syntax of the statements that begin with `name`; without a name, the list of all statements."""
    wanted = " ".join(name.upper().split())
    if not wanted:
        return "Available help:\n" + "\n".join(f"  {one}" for one in _SYNTAX)
    found = [one for one in _SYNTAX if one.startswith(wanted)]
    if not found:
        return f'No help available for "{name}".\nTry \\h with no arguments to see available help.'
    return "\n\n".join(f"Command:     {one}\nSyntax:\n{_SYNTAX[one]}" for one in found)
