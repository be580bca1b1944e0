"""`make demo`, `python -m pubsub.demo`: exit code 0 if every value is equal, 1 if not or if something failed.

Ctrl-C (or SIGTERM) ends it at any time and leaves no server, slot, publication or process; the exit code is then 128
plus the signal's number.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg

from pubsub.errors import PubsubError

if TYPE_CHECKING:
    from pubsub.demo.interruption import Interruption
    from pubsub.demo.screen import Screen

_DEFAULT_HOME: Final = "demo-node"


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return the exit code."""
    options = _parse(arguments)
    # Imported only now, since pyarrow and others take a second: a wrong option is reported at once.
    from pubsub.demo.interruption import Interrupted, Interruption
    from pubsub.demo.screen import Screen

    interruption = Interruption()
    interruption.install()
    screen = Screen(quiet=options.quiet)
    try:
        return 0 if _run(options, interruption, screen) else 1
    except Interrupted as error:
        screen.end_live()
        screen.fail(f"Interrupted ({error}): what was started has been ended.")
        return 128 + error.number
    except PubsubError as error:
        screen.end_live()
        screen.fail(error.report())
        return 1
    except (OSError, psycopg.Error) as error:
        screen.end_live()
        screen.fail(f"ERROR:  {type(error).__name__}: {error}")
        return 1


def _run(options: argparse.Namespace, interruption: Interruption, screen: Screen) -> bool:
    home = Path(options.home)
    if options.pg:
        from pubsub.demo import own

        return own.OwnDemo(
            own.Options(home, options.pg, options.seconds, tuple(options.table), options.walsender),
            interruption,
            screen,
        ).run()
    from pubsub.demo import embedded
    from pubsub.demo.load import Rates

    rates = Rates(pgbench=options.tps, orders=options.orders_tps)
    chosen = embedded.Options(home, options.seconds, options.scale, rates, options.falsify, options.walsender)
    return embedded.EmbeddedDemo(chosen, interruption, screen).run()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pubsub.demo",
        description="Copy PostgreSQL databases into Delta tables, follow them while they are written to, compare every value.",
    )
    parser.add_argument(
        "--pg",
        metavar="CONNINFO",
        default=os.environ.get("PUBSUB_DEMO_PG") or None,
        help="a database of your own instead of an embedded server; nothing there is touched but a publication and a slot",
    )
    parser.add_argument(
        "--table",
        metavar="NAME",
        action="append",
        default=[],
        help="with --pg: only this table (may be given several times; default: all that can be followed)",
    )
    parser.add_argument(
        "--home",
        metavar="DIR",
        default=_DEFAULT_HOME,
        help="the node's directory; made anew, kept for reading afterwards (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=_positive, default=30, help="how long it is written to, or followed (default: %(default)s)"
    )
    parser.add_argument(
        "--scale", type=_positive, default=10, help="pgbench's scale: 100,000 accounts each (default: %(default)s)"
    )
    parser.add_argument(
        "--tps", type=_count, default=600, help="pgbench's transactions a second; 0: unbounded (default: %(default)s)"
    )
    parser.add_argument(
        "--orders-tps",
        type=_count,
        default=100,
        help="the shop's transactions a second on orders; 0: unbounded (default: %(default)s)",
    )
    parser.add_argument(
        "--falsify",
        action="store_true",
        help="change one value in Delta before the comparison, to see that it is found",
    )
    parser.add_argument(
        "--walsender",
        action="store_true",
        default=bool(os.environ.get("PUBSUB_DEMO_WALSENDER")),
        help="put `pubsub publish` between the database and the node: the database has no logical slot then",
    )
    parser.add_argument("--quiet", action="store_true", help="no live view: steps and figures alone")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise ValueError
    return value


if __name__ == "__main__":
    # Abandoned threads may still run inside a library, so the interpreter is not torn down under them.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
