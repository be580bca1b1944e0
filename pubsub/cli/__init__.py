"""The command line: `pubsub [--home DIR] COMMAND` (interface.md, Command line).

Each command imports what it needs when it runs: none but `daemon`, and a SELECT on Delta tables, loads Spark or Arrow.
"""

from __future__ import annotations


def main() -> None:
    """The console script's entry."""
    from pubsub.cli.app import run

    run()
