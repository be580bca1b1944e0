"""`pubsub sql`: run statements from an argument, a file, standard input or a prompt."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Final

from launcher.notices import SHOWN, Notice
from pubsub.cli.daemon_session import DaemonSession
from pubsub.cli.display import Display
from pubsub.cli.interruption import cancelled_by
from pubsub.cli.output import Format
from pubsub.cli.telling import CANCELED, tell
from pubsub.errors import PubsubError
from pubsub.node.node import Node, Result
from pubsub.sql.parser import script_statements

if TYPE_CHECKING:
    from pubsub.cli.common import Common

_HISTORY: Final = Path("~/.pubsub_history")


async def run_script(common: Common, script: str, output: Format) -> None:
    """Carry out a script up to its end or the first error, and print each answer as it comes.  Raises PubsubError."""
    async with Node(common.home, workers=False, make=False) as node:
        await _run(node, common, script, Display(output))


def run_terminal(common: Common, output: Format) -> int:
    """Run the prompt until \\q or the end of the input, and return the exit code.

    A failed statement's error is printed, and the prompt goes on.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    from pubsub.cli.prompt import Prompt

    display = Display(output)

    def tried(work: Coroutine[object, object, None]) -> None:
        try:
            runner.run(cancelled_by((signal.SIGINT,), work))
        except Exception as error:
            tell(error, verbose=common.verbose)
        except asyncio.CancelledError:
            print(CANCELED, file=sys.stderr)

    prompt = Prompt(
        lambda statement: tried(_run(node, common, statement, display)),
        lambda command, pattern: tried(_describe(node, command, pattern, display)),
        display,
        str(node.home),
    )
    _load_history()
    print('pubsub: type "help" for help.')
    while True:
        try:
            if not prompt.take(input(prompt.prompt)):
                return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            # Also just before or after a statement, which has its own way to be cancelled.
            print()
            prompt.forget()


async def _describe(node: Node, command: str, pattern: str, display: Display) -> None:
    from pubsub.cli.describe import described

    state = await node.state()
    try:
        for answer in described(state, command, pattern):
            shown = display.text(answer.columns, answer.rows)
            footer = "\n".join(answer.footer)
            print(f"{answer.title}\n{shown}{footer}", end="\n\n" if footer else "\n")
    except PubsubError as error:
        # psql, too, prints this message without "ERROR:".
        print(error.message)


async def _run(node: Node, common: Common, script: str, display: Display) -> None:
    def notify(notice: Notice) -> None:
        if common.verbose or notice.severity in SHOWN:
            print(notice.report(), file=sys.stderr)

    session: DaemonSession | None = None
    try:
        for text in script_statements(script):
            if not _of_daemon(text):
                async for result in node.results(text, notify):
                    _show(result, display)
                continue
            session = session or await DaemonSession.open(common.home)
            async for result in (session or node).results(text, notify):
                _show(result, display)
    finally:
        if session is not None:
            await session.close()


def _of_daemon(text: str) -> bool:
    """Return whether a statement is carried out by the daemon, if one runs; SHOW is about the settings' file."""
    return not re.match(r"(?:\s|--[^\n]*\n)*show\b", text, re.IGNORECASE)


def _show(result: Result, display: Display) -> None:
    """Print a result.  Rows go to standard output; a command tag goes there only in the format for people, table."""
    if result.is_query:
        sys.stdout.write(display.text(result.columns, result.rows))
        sys.stdout.flush()
    else:
        print(result.tag, file=sys.stdout if display.output is Format.TABLE else sys.stderr, flush=True)


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
    # Leaves out lines that may hold a password, as a CONNECTION string does.
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
