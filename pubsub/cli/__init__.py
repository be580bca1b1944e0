"""The command line: `pubsub [--home DIR] COMMAND`.

Each command imports its modules when it runs, so that it answers soon: only `daemon` loads Spark, and only it and a
SELECT load Arrow.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line; the entry point of the console script."""
    # While modules load nothing has begun: KeyboardInterrupt in the middle of one could be lost, or leave it half made.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pubsub.cli.app import run

    run()
