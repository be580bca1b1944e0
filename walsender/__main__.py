"""`python -m walsender`."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # While modules load, SIGINT ends the process as SIGTERM does.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from walsender.cli import main

    raise SystemExit(main())
