"""Statements of another program on Delta tables: a Spark of its own.

python -m tests.support.foreign_statements STATEMENT…
"""

from __future__ import annotations

import subprocess
import sys


def run(*statements: str) -> None:
    """Run SQL in a process of its own; a table is written as delta.`path`."""
    subprocess.run([sys.executable, "-m", "tests.support.foreign_statements", *statements], check=True)


if __name__ == "__main__":
    from tests.support.foreign_writer import session

    spark = session()
    for statement in sys.argv[1:]:
        spark.sql(statement).collect()
    spark.stop()
