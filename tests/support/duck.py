"""DuckDB with its reader of Delta tables, which is installed as a Python package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import duckdb_extension_delta


@contextmanager
def reader() -> Iterator[Any]:
    """Open a connection in which delta_scan('path') is a table."""
    (extension,) = Path(duckdb_extension_delta.__file__).parent.glob("extensions/*/delta.duckdb_extension")
    with duckdb.connect() as connection:
        connection.execute(f"LOAD '{extension}'; SET TimeZone = 'UTC'")
        yield connection
