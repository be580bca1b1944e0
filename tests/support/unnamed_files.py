"""Data files that no commit of a Delta table names: what an attempt that failed has left behind."""

from __future__ import annotations

from pathlib import Path


def unnamed_files(path: str | Path) -> set[str]:
    """Return the names of the table's data files that are in no commit.

    Files that housekeeping has replaced are named by the commits that added them.
    """
    commits = "".join(each.read_text("utf-8") for each in Path(path, "_delta_log").glob("*.json"))
    return {file.name for file in Path(path).glob("*.parquet") if file.name not in commits}
