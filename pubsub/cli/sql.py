"""`pubsub sql`: statements of an argument, a file or standard input, or a prompt."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from launcher.session import SHOWN, Notice
from pubsub.cli.output import Format, render
from pubsub.cli.telling import tell
from pubsub.node import Node, Result

if TYPE_CHECKING:
    from pubsub.cli.app import Common

_HISTORY: Final = Path("~/.pubsub_history")
_HELP: Final = """\
Statements end with a semicolon.  CREATE, ALTER and DROP SUBSCRIPTION; SHOW; SELECT on the views (pg_subscription,
pg_subscription_rel, pg_stat_subscription, …) and on replicated tables (schema.table).
  \\q  quit      \\d  the subscriptions and their tables      \\?  this help"""
_TABLES: Final = (
    "SELECT s.subname AS subscription, r.relation, r.srsubstate AS state FROM pg_subscription_rel r "
    "JOIN pg_subscription s ON s.oid = r.srsubid ORDER BY 1, 2"
)


async def run_script(common: Common, script: str, output: Format) -> None:
    """Carry out a script up to its end or the first error; each answer is printed as it comes.  Raises PubsubError."""
    async with Node(common.home, workers=False, make=False) as node:
        await _run(node, common, script, output)


def run_terminal(common: Common, output: Format) -> int:
    """The prompt, until \\q or the end of the input.  Errors are printed and it goes on.  Returns the exit code."""
    try:
        with asyncio.Runner() as runner:
            node = Node(common.home, workers=False, make=False)
            runner.run(node.__aenter__())
            try:
                _prompt(runner, node, common, output)
            finally:
                runner.run(node.__aexit__(None, None, None))
    except Exception as error:
        tell(error, verbose=common.verbose)
        return 1
    return 0


def _prompt(runner: asyncio.Runner, node: Node, common: Common, output: Format) -> None:
    from pubsub.sql.lexer import split

    _load_history()
    print('pubsub: type "\\?" for help.')
    pending = ""
    while True:
        try:
            line = input("pubsub-> " if pending else "pubsub=> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            pending = ""
            continue
        if not pending and (command := line.strip()).startswith("\\"):
            if command == "\\q":
                return
            line = _TABLES + ";" if command == "\\d" else ""
            if not line:
                print(_HELP if command == "\\?" else f"invalid command {command}\nTry \\? for help.")
                continue
        statements, rest = split(f"{pending}\n{line}" if pending else line)
        for statement in statements:
            try:
                runner.run(_run(node, common, statement, output))
            except Exception as error:
                tell(error, verbose=common.verbose)
            except KeyboardInterrupt:
                print("ERROR:  canceling statement due to user request", file=sys.stderr)
        pending = rest


async def _run(node: Node, common: Common, script: str, output: Format) -> None:
    def notify(notice: Notice) -> None:
        if common.verbose or notice.severity in SHOWN:
            print(notice.report(), file=sys.stderr)

    async for result in node.results(script, notify):
        _show(result, output)


def _show(result: Result, output: Format) -> None:
    """Rows are for machines and go to standard output; a command tag goes there only in the format for people."""
    if result.is_query:
        sys.stdout.write(render(result.columns, result.rows, output))
        sys.stdout.flush()
    else:
        print(result.tag, file=sys.stdout if output is Format.TABLE else sys.stderr, flush=True)


def _load_history() -> None:
    try:
        import atexit
        import readline
    except ImportError:
        return
    path = _HISTORY.expanduser()
    try:
        if not path.exists():
            path.touch(mode=0o600)
        readline.read_history_file(path)
    except OSError:
        return
    # A CONNECTION string may hold a password: such lines are not kept.
    atexit.register(_save_history, path)


def _save_history(path: Path) -> None:
    import readline

    for place in range(readline.get_current_history_length(), 0, -1):
        line = readline.get_history_item(place).lower()
        if "password" in line or "://" in line:
            readline.remove_history_item(place - 1)
    readline.set_history_length(1000)
    try:
        readline.write_history_file(path)
    except OSError:
        return
