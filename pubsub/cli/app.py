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
from pubsub.cli.interruption import cancelled_by
from pubsub.cli.output import Format
from pubsub.cli.telling import CANCELED, tell
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


catalog_app = typer.Typer(help="Back up the node's catalog, restore it, and upgrade it.", no_args_is_help=True)
app.add_typer(catalog_app, name="catalog")


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
        code = asyncio.run(cancelled_by((signal.SIGINT, signal.SIGTERM), work))
    except (BrokenPipeError, typer.BadParameter):
        raise
    except Exception as error:
        tell(error, verbose=common.verbose)
        code = FAILED
    except asyncio.CancelledError:
        print(CANCELED, file=sys.stderr)
        code = INTERRUPTED
    raise typer.Exit(code or 0)


def _version(wanted: bool) -> None:
    if wanted:
        from pubsub import __version__

        print(f"pubsub {__version__}")
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
    from pubsub.node.node import home_directory

    context.obj = Common(home_directory(home), verbose)


@app.command()
def setup(
    s3: Annotated[bool, typer.Option("--s3", help="What Spark needs for tables on S3, too.")] = False,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Take the jars from a directory, without a network."),
    ] = None,
) -> None:
    """Fetch the jars that Spark needs, each checked by its digest; needed once after an installation."""
    from pubsub import jars

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        where = jars.set_up(s3=s3, source=source)
    except PubsubError as error:
        print(error.report(), file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        print(CANCELED, file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    print(f'the jars are in "{where}"')


@app.command()
def init(
    context: typer.Context,
    conninfo: Annotated[
        str | None, typer.Argument(help="The publisher, as in CREATE SUBSCRIPTION … CONNECTION; by default asked for.")
    ] = None,
    publication: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Made if it is not there; by default the only one, or the database's name."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE", help="A table to publish, and another; by default all, or the role's own."),
    ] = None,
    subscription: Annotated[str | None, typer.Option(metavar="NAME", help="By default the publication's name.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing, and make what is missing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be made, and make nothing.")] = False,
) -> None:
    """Make a node and a subscription, and what they need: says what to change on the publisher, and what comes next."""
    from pubsub.cli import init as command

    wanted = command.Wanted(conninfo, publication, tuple(table or ()), subscription, yes, dry_run)
    carry_out(context.obj, command.run_init(context.obj, wanted))


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
def daemon(
    context: typer.Context,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait while another daemon has the catalog, and take over when it ends.")
    ] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="Divide the subscriptions with other daemons of the catalog.")
    ] = False,
) -> None:
    """Run the node's workers in the foreground, until SIGTERM or Ctrl-C; SIGHUP reads the settings again."""
    # Read by Arrow when it is imported, and not for the processes that Spark starts.
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    from pubsub.cli.daemon import Beside, serve

    del os.environ["ARROW_DEFAULT_MEMORY_POOL"]

    if standby and shared:
        raise typer.BadParameter("--standby and --shared exclude each other")
    beside = Beside.STANDBY if standby else Beside.SHARED if shared else Beside.NONE
    carry_out(context.obj, serve(context.obj, beside=beside))


@app.command()
def publish(
    context: typer.Context,
    upstream: Annotated[
        str | None,
        typer.Option(metavar="CONNINFO", help="The server whose WAL is decoded; its role needs REPLICATION."),
    ] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where subscribers connect to.")] = None,
    cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="A certificate, for TLS with subscribers; PEM.")
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    auth_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Users and their SCRAM verifiers: clients authenticate here, and not at the upstream server.",
        ),
    ] = None,
    allow_trust: Annotated[
        bool,
        typer.Option(
            "--allow-trust",
            help="Clients of other hosts may come in where the upstream server asks this program for nothing.",
        ),
    ] = False,
    require_tls: Annotated[bool, typer.Option("--require-tls", help="Refuse clients over TCP without TLS.")] = False,
    slot: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A replication slot to make here that begins at --start, if it is not there."
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="LSN", help="Where the slot begins; in the past as far as there is WAL."),
    ] = None,
    plugin: Annotated[str, typer.Option(metavar="NAME", help="The slot's output plugin.")] = "pgoutput",
    archive_directory: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="An archive of the upstream server's WAL, for what is not kept any more."),
    ] = None,
    restore_command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Or PostgreSQL's way to get a segment %f from an archive to %p."),
    ] = None,
    wal_source: Annotated[
        str | None,
        typer.Option(metavar="CONNINFO", help="A standby of the upstream server to receive the WAL from instead."),
    ] = None,
    primary_slot_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A physical slot where the WAL comes from, which keeps it while this is not running."
        ),
    ] = None,
    max_slot_wal_keep_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="How much WAL slots may hold back here before they are lost.  [default: no limit]"
        ),
    ] = None,
    idle_replication_slot_timeout: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long a slot may be unused before it is lost.  [default: no limit]"),
    ] = None,
    max_replication_slots: Annotated[int | None, typer.Option(min=1)] = None,
    max_wal_senders: Annotated[int | None, typer.Option(min=1)] = None,
    max_connections: Annotated[int | None, typer.Option(min=1)] = None,
    authentication_timeout: Annotated[str | None, typer.Option(metavar="TIME")] = None,
    work_mem: Annotated[
        str | None, typer.Option("--work-mem", metavar="SIZE", help="logical_decoding_work_mem of each stream.")
    ] = None,
) -> None:
    """Serve a PostgreSQL server's changes to any subscriber, with slots of our own and none on that server.

    The options are those of [walsender] in pubsub.toml, and go before them.
    """
    from pubsub.cli import publish as command

    common: Common = context.obj
    given = {
        "upstream": upstream,
        "listen": listen,
        "ssl_cert_file": _absolute(cert),
        "ssl_key_file": _absolute(key),
        "auth_file": _absolute(auth_file),
        "allow_trust": allow_trust or None,
        "require_tls": require_tls or None,
        "wal_source": wal_source,
        "primary_slot_name": primary_slot_name,
        "archive_directory": _absolute(archive_directory),
        "restore_command": restore_command,
        "max_slot_wal_keep_size": max_slot_wal_keep_size,
        "idle_replication_slot_timeout": idle_replication_slot_timeout,
        "max_replication_slots": max_replication_slots,
        "max_wal_senders": max_wal_senders,
        "max_connections": max_connections,
        "authentication_timeout": authentication_timeout,
    }
    more: dict[str, object] = {"walsender": {name: value for name, value in given.items() if value is not None}}
    if work_mem is not None:
        more["logical_decoding_work_mem"] = work_mem
    if (slot is None) != (start is None):
        raise typer.BadParameter(
            "a slot to make and where it begins belong together; --primary-slot-name is a slot of the upstream server",
            param_hint="--slot, --start",
        )
    past = None if slot is None or start is None else command.PastSlot(slot, plugin, start)
    carry_out(common, command.serve(common, more, past))


def _absolute(path: str | None) -> str | None:
    """Return a path of the command line, which is relative to where the command was given."""
    return None if path is None else str(Path(path).absolute())


@app.command()
def status(
    context: typer.Context,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Show it again every second, on a screen of its own; q or Ctrl-C ends it."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines; with --watch one document a line.")] = False,
) -> None:
    """Show subscriptions, tables and their states, workers, lag, and errors with hints."""
    from pubsub.cli.status import show

    carry_out(context.obj, show(context.obj, watch=watch, as_json=as_json))


@app.command()
def check(
    context: typer.Context,
    conninfo: Annotated[
        str | None,
        typer.Argument(help="The publisher, as in CREATE SUBSCRIPTION … CONNECTION; without it, this machine alone."),
    ] = None,
    publications: Annotated[
        list[str] | None, typer.Argument(metavar="[PUBLICATION]...", help="What would be subscribed to.")
    ] = None,
) -> None:
    """Say what will and will not work, with this publisher and on this machine, before anything is created."""
    from pubsub.cli.check import run_check

    carry_out(context.obj, run_check(context.obj, conninfo, publications or []))


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


@app.command()
def verify(
    context: typer.Context,
    subscription: Annotated[str, typer.Argument(help="Its name.")],
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE]...", help="Written as in SQL.  [default: all]")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="LSN", help="Rounded up to an LSN that the publisher can show.  [default: the present]"),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Compare verify.sample_rows rows of each table only.")
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Copy the rows that differ anew.")] = False,
    show: Annotated[
        int, typer.Option("--show", metavar="N", min=0, help="Show N rows of each table that differ.")
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Compare the tables with the publisher's at one LSN, while both move; exit with 1 if something differs."""
    from pubsub.cli.verify import run_verify

    wanted = {"at": at, "sample": sample, "repair": repair, "show": show}
    carry_out(context.obj, run_verify(context.obj, subscription, tables or [], wanted, as_json=as_json))


@catalog_app.command()
def backup(
    context: typer.Context, file: Annotated[Path, typer.Argument(help="A new file, which may hold passwords.")]
) -> None:
    """Write the catalog as of one moment into a file, while a daemon may run."""
    from pubsub.cli.catalog import back_up

    carry_out(context.obj, back_up(context.obj, file.absolute()))


@catalog_app.command()
def restore(context: typer.Context, file: Annotated[Path, typer.Argument(help="A backup.")]) -> None:
    """Put a backup in the place of the catalog, unless a daemon runs or the catalog is newer."""
    from pubsub.cli import catalog as command

    carry_out(context.obj, command.restore(context.obj, file.absolute()))


@catalog_app.command()
def upgrade(
    context: typer.Context,
    backup_file: Annotated[
        Path | None,
        typer.Option(
            "--backup", metavar="FILE", help="A new file; default: catalog.vVERSION.backup in the node's directory."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be added.")] = False,
) -> None:
    """Bring an older version's catalog to this one, with a backup, unless a daemon runs."""
    from pubsub.cli import catalog as command

    file = None if backup_file is None else backup_file.absolute()
    carry_out(context.obj, command.upgrade(context.obj, file, dry_run=dry_run))


def _read(file: str, common: Common) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        failure = PubsubError(f'could not read file "{file}": {reason}', sqlstate="58030")
        print(failure.report(verbose=common.verbose), file=sys.stderr)
        raise typer.Exit(FAILED) from error
