"""`python -m walsender`."""

from __future__ import annotations

from walsender.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
