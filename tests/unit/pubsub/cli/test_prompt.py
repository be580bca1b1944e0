"""The prompt: what psql does with a line, and how rows are shown."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from catalog.records import NewRelation, NewSubscription
from catalog.store import Catalog
from pubsub.cli.describe import described
from pubsub.cli.display import Display
from pubsub.cli.output import Format
from pubsub.cli.prompt import Prompt
from pubsub.errors import PubsubError
from pubsub.sql.options import SubscriptionOptions
from tests.support.replica import PATIENCE


class Screen:
    """A prompt, what was carried out and what was said."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []
        self.asked: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.display = Display(Format.TABLE)
        self.prompt = Prompt(
            lambda statement: self.ran.append((statement, self.display.expanded)),
            lambda command, pattern: self.asked.append((command, pattern)),
            self.display,
            "/n",
            self.said.append,
        )

    def take(self, *lines: str) -> bool:
        return [self.prompt.take(line) for line in lines][-1]


def test_statements_over_several_lines() -> None:
    screen = Screen()
    assert screen.prompt.prompt == "pubsub=> "
    assert screen.take("SELECT 1,", "  2; SELECT 'a;")
    assert screen.prompt.prompt == "pubsub'> "
    assert screen.take("b'")
    assert screen.prompt.prompt == "pubsub-> "
    assert screen.take(";")
    assert [one for one, _ in screen.ran] == ["SELECT 1,\n  2;", "SELECT 'a;\nb'\n;"]


@pytest.mark.parametrize("line", ["exit", "quit", "QUIT;", " exit ", "\\q", "\\quit"])
def test_exit_commands_end_the_prompt(line: str) -> None:
    assert Screen().take(line) is False


def test_help_exit_and_quit_within_a_statement() -> None:
    screen = Screen()
    assert screen.take("help")
    assert screen.said[-1].startswith("You are using pubsub sql")
    assert screen.take("SELECT", "help")
    assert screen.said[-1] == "Use \\? for help or press control-C to clear the input buffer."
    assert screen.take("exit")
    assert screen.said[-1] == "Use \\q to quit."
    assert screen.take("'", "quit")
    assert screen.said[-1] == "Use control-C to clear the input buffer."
    assert screen.prompt.pending == "SELECT\nhelp\nexit\n'\nquit"


def test_backslash_commands_within_a_statement() -> None:
    screen = Screen()
    assert screen.take("SELECT 1", "\\?", "\\d t", "+ 1 \\dt")
    assert "\\dRs" in screen.said[0]
    assert screen.asked == [("d", "t"), ("dt", "")]
    assert screen.take("\\g")
    assert screen.ran == [("SELECT 1\n+ 1", "auto")]
    assert screen.take("SELECT 2 \\gx")
    assert screen.ran[1:] == [("SELECT 2", "on")]
    assert screen.display.expanded == "auto"
    assert screen.take("SELECT 3", "\\r", "SELECT 4;")
    assert screen.ran[2:] == [("SELECT 4;", "auto")]
    assert screen.take("SELECT '\\q", "\\q';")
    assert screen.ran[3:] == [("SELECT '\\q\n\\q';", "auto")]
    assert screen.take("SELECT 5; \\dRs+ s")
    assert screen.asked[-1] == ("dRs+", "s")
    assert screen.take("SELECT", "\\q") is False


def test_expanded_display_is_switched() -> None:
    screen = Screen()
    screen.take("\\x", "\\x", "\\x auto", "\\x on", "\\x nope", "\\nope")
    assert screen.said == [
        "Expanded display is on.",
        "Expanded display is off.",
        "Expanded display is used automatically.",
        "Expanded display is on.",
        'unrecognized value "nope" for "\\x"\nAvailable values are: on, off, auto.',
        "invalid command \\nope\nTry \\? for help.",
    ]


def test_syntax_of_statements() -> None:
    screen = Screen()
    screen.take("\\h", "\\h drop subscription", "\\h alter", "\\h nope")
    assert "CREATE SUBSCRIPTION" in screen.said[0]
    assert screen.said[1].endswith("DROP SUBSCRIPTION [ IF EXISTS ] name [ CASCADE | RESTRICT ]")
    assert "RESYNC TABLE" in screen.said[2]
    assert screen.said[3].startswith('No help available for "nope".')


def test_wide_rows_are_expanded() -> None:
    display = Display(Format.TABLE)
    columns, rows = ("name", "a_long_name_of_a_column"), [("x" * 20, 1), ("two\nlines", None)]
    assert display.text(columns, rows, 80).startswith("         name ")
    assert display.text(columns, rows, 30) == (
        "-[ RECORD 1 ]-----------+---------------------\n"
        "name                    | xxxxxxxxxxxxxxxxxxxx\n"
        "a_long_name_of_a_column | 1\n"
        "-[ RECORD 2 ]-----------+---------------------\n"
        "name                    | two                 +\n"
        "                        | lines\n"
        "a_long_name_of_a_column |\n"
    )
    display.expanded = "off"
    assert "RECORD" not in display.text(columns, rows, 30)
    display.expanded = "on"
    assert display.text(("a",), [], 80) == "(0 rows)\n"
    assert display.text(("a",), [(1,)], 80) == "-[ RECORD 1 ]\na | 1\n"
    assert Display(Format.CSV).text(columns, rows, 10).startswith("name,")


async def test_backslash_d_lists_tables(tmp_path: Path) -> None:
    async with await Catalog.open(tmp_path / "catalog.db") as catalog:
        new = NewSubscription("s", "host=h password=secret", ("p",), SubscriptionOptions(), "s", "s")
        attributes = '{"columns": [[1, "id", 23, -1, null, 0], [2, "price", 1700, 786438, null, 0], [3, "n", 1043, 24, null, 0]]}'
        definition = '{"columns": ["id", "price", "n"], "key": ["id"], "attributes": %s}' % (
            '"' + attributes.replace('"', '\\"') + '"'
        )
        made = [
            NewRelation(1, "public", "orders", str(tmp_path / "o"), definition=definition),
            NewRelation(2, "public", "Odd", str(tmp_path / "odd")),
        ]
        await catalog.create_subscription(new, made)
        state = await catalog.state()
    (tables,) = described(state, "d", "")
    assert tables.rows == [
        ("public", "Odd", "s", "i (waiting to be copied)"),
        ("public", "orders", "s", "i (waiting to be copied)"),
    ]
    (orders,) = described(state, "d", "Orders")
    assert orders.title == 'Table "public.orders"'
    assert [row[:2] + row[3:] for row in orders.rows] == [
        ("id", "integer", "not null"),
        ("price", "numeric(12,2)", ""),
        ("n", "character varying(20)", ""),
    ]
    assert orders.footer[0] == "Key: (id)"
    assert [one.title for one in described(state, "d", "public.o*")] == ['Table "public.orders"']
    assert [one.title for one in described(state, "d", '"Odd"')] == ['Table "public.Odd"']
    assert [row[1] for one in described(state, "dt", "o*") for row in one.rows] == ["orders"]
    (view,) = described(state, "d", "pg_subscription")
    assert view.rows[0] == ("oid", "oid")
    (short,) = described(state, "dRs", "")
    assert short.rows == [("s", "pubsub", True, ("p",))]
    (long,) = described(state, "dRs+", "")
    assert "Conninfo" in long.columns
    assert "secret" not in str(long.rows)
    for command, pattern in (("d", "nope"), ("dt", "nope"), ("dv", "nope")):
        with pytest.raises(PubsubError, match="Did not find any"):
            list(described(state, command, pattern))


def test_on_a_terminal(tmp_path: Path) -> None:
    """A wide view, a table that is not there, a statement that is left unfinished: as someone types them."""
    ours, theirs = pty.openpty()
    home = tmp_path / "node"
    created = "CREATE SUBSCRIPTION s CONNECTION 'host=h' PUBLICATION p WITH (connect = false)"
    subprocess.run(
        [sys.executable, "-m", "pubsub.cli", "--home", str(home), "sql", created], check=True, capture_output=True
    )
    environment = os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "dumb", "HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "pubsub.cli", "--home", str(home), "sql"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = _until(ours, "pubsub=> ")
        for line, prompt in (
            ("help", "pubsub=> "),
            ("SELECT * FROM pg_subscription;", "pubsub=> "),
            ("SELECT subname", "pubsub-> "),
            ("\\d nope", "pubsub-> "),
            ("FROM pg_subscription \\g", "pubsub=> "),
            ("\\dRs+", "pubsub=> "),
        ):
            os.write(ours, line.encode() + b"\n")
            shown += _until(ours, prompt)
        os.write(ours, b"quit\n")
        assert process.wait(PATIENCE) == 0
    os.close(ours)
    assert "You are using pubsub sql" in shown
    assert "-[ RECORD 1 ]" in shown
    assert 'Did not find any relation named "nope".' in shown
    assert "(1 row)" in shown
    assert "List of subscriptions" in shown


def _until(terminal: int, prompt: str) -> str:
    """What is shown up to the next prompt."""
    shown = b""
    while not shown.decode(errors="replace").replace("\r", "").endswith("\n" + prompt):
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, shown.decode()
        shown += os.read(terminal, 65536)
    return shown.decode().replace("\r", "")
