"""The commands and their options; each command's work is in a module of its own.

Exit codes: 0 done; 1 the statement or job failed, with the error printed as PostgreSQL prints it; 2 wrong usage; 130
interrupted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Final

import typer

from pubsub.cli.common import Common
from pubsub.cli.output import Format
from pubsub.cli.telling import tell
from pubsub.errors import PubsubError

FAILED: Final = 1
INTERRUPTED: Final = 130

_HELP: Final = "PostgreSQL's logical replication in Python: a node whose tables are Delta tables."

app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)


def run() -> None:
    """Parse the arguments, carry out the command, and end the process with its exit code."""
    try:
        app()
    except BrokenPipeError:
        # The reader of the output has closed it.  Discard the buffered rest, or flushing it at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


def carry_out(common: Common, work: Coroutine[object, object, int | None]) -> None:
    """Run a command, then exit with its exit code, or with 1 and the error on standard error.

    SIGINT and SIGTERM cancel it; it then removes what it has created so far.
    """
    try:
        code = asyncio.run(_until_terminated(work))
    except BrokenPipeError:
        raise
    except Exception as error:
        tell(error, verbose=common.verbose)
        code = FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("ERROR:  canceling statement due to user request", file=sys.stderr)
        code = INTERRUPTED
    raise typer.Exit(code or 0)


async def _until_terminated(work: Coroutine[object, object, int | None]) -> int | None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"pubsub {version('pubsub')}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    home: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The node's directory, made by `daemon` and by DDL.  [default: $PUBSUB_HOME, else ./pubsub-node]",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="SQLSTATEs and tracebacks with errors, and messages of less weight.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    from pubsub.node import home_directory

    context.obj = Common(home_directory(home), verbose)


@app.command()
def sql(
    context: typer.Context,
    statement: Annotated[str | None, typer.Argument(help="One or more statements.")] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="Read statements from FILE; - is standard input.")
    ] = None,
    output: Annotated[Format, typer.Option("--format", help="How rows are printed.")] = Format.TABLE,
) -> None:
    """Carry out DDL for subscriptions, SHOW, and SELECT on views and replicated tables; without any, a prompt."""
    from pubsub.cli.sql import run_script, run_terminal

    if statement is not None and file is not None:
        raise typer.BadParameter("give a statement or a file, not both", param_hint="-f")
    common: Common = context.obj
    if statement is None and file is None and sys.stdin.isatty():
        raise typer.Exit(run_terminal(common, output))
    if statement is None:
        statement = _read(file or "-", common)
    carry_out(common, run_script(common, statement, output))


@app.command()
def daemon(context: typer.Context) -> None:
    """Run the node's workers in the foreground, until SIGTERM or Ctrl-C; SIGHUP reads the settings again."""
    from pubsub.cli.daemon import serve

    carry_out(context.obj, serve(context.obj))


@app.command()
def status(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines; with --watch one document a line.")] = False,
) -> None:
    """Show subscriptions, tables and their states, workers, lag, and errors with hints."""
    from pubsub.cli.status import show

    carry_out(context.obj, show(context.obj, watch=watch, as_json=as_json))


@app.command()
def check(
    context: typer.Context,
    conninfo: Annotated[str, typer.Argument(help="The publisher, as in CREATE SUBSCRIPTION … CONNECTION.")],
    publications: Annotated[
        list[str] | None, typer.Argument(metavar="[PUBLICATION]...", help="What would be subscribed to.")
    ] = None,
) -> None:
    """Say what will and will not work with this publisher, before anything is created."""
    from pubsub.cli.check import run_check

    carry_out(context.obj, run_check(conninfo, publications or []))


@app.command()
def snapshot(
    context: typer.Context,
    subscription: Annotated[str | None, typer.Argument(help="Its name.")] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="LSN", help="Rounded down to an LSN that all tables show.  [default: the latest]"),
    ] = None,
    pin: Annotated[
        str | None, typer.Option(metavar="NAME", help="Keep these versions readable, until --drop NAME.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the pinned snapshots instead.")] = False,
    drop: Annotated[str | None, typer.Option("--drop", metavar="NAME", help="Drop a pinned snapshot instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Print the version of each table that together show one LSN; keep them readable."""
    from pubsub.cli import snapshot as command

    given = (subscription is not None, listed, drop is not None)
    if sum(given) != 1 or ((at is not None or pin is not None) and subscription is None):
        raise typer.BadParameter(
            "give a subscription, with --at and --pin as wanted; or --list; or --drop NAME", param_hint="SUBSCRIPTION"
        )
    if subscription is not None:
        carry_out(context.obj, command.show(context.obj, subscription, at, pin, as_json=as_json))
    elif drop is not None:
        carry_out(context.obj, command.drop(context.obj, drop))
    else:
        carry_out(context.obj, command.show_pinned(context.obj, as_json=as_json))


def _read(file: str, common: Common) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        failure = PubsubError(f'could not read file "{file}": {reason}', sqlstate="58030")
        print(failure.report(verbose=common.verbose), file=sys.stderr)
        raise typer.Exit(FAILED) from error
