"""Sizes and times for people."""

from __future__ import annotations

from collections.abc import Mapping


def size(count: int | None) -> str:
    """Format bytes for people (dbsize.c: pg_size_pretty, with one decimal)."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"


def memory_words(memory: Mapping[str, int | None]) -> str:
    """Tell of a daemon's memory (pubsub.memory.Memory, as JSON has it)."""
    words = f"Python {size(memory['python'])}, JVM {size(memory['jvm'])}"
    return (
        words
        if memory["heap_max"] is None
        else f"{words}, heap {size(memory['heap_used'])} of {size(memory['heap_max'])}"
    )


def duration(seconds: float) -> str:
    """Format a time for people: 0.4 s, 12 s, 3 min, 5.1 h, 2 d."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 129_600 else f"{seconds / 86_400:.0f} d"
