"""The command line: `pubsub [--home DIR] COMMAND`.

Each command imports its modules when it runs, so that it answers soon: only `daemon` loads Spark, and only it and a
SELECT load Arrow.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line; the entry point of the console script."""
    from pubsub.cli.app import run

    run()
