"""Data files that no commit of a Delta table names: what an attempt that failed has left behind."""

from __future__ import annotations

from pubsub.delta.places import Place, place


def unnamed_files(path: str | Place) -> set[str]:
    """Return the names of the table's data files that are in no commit.

    Files that housekeeping has replaced are named by the commits that added them.
    """
    commits = "".join(each.read_text("utf-8") for each in (place(str(path)) / "_delta_log").glob("*.json"))
    return {file.name for file in place(str(path)).glob("*.parquet") if file.name not in commits}
