"""Decide which data files of a table are rewritten into one: small ones, and ones of which much is deleted.

Small files are merged as they come, at least four of about the same size at a time (log-structured), so their number
grows with the logarithm of the table's size.  A *worn* file has lost a tenth of its rows to its deletion vector: each
row that is written is then rewritten about ten times as long as its file lives.  A worn file takes smaller files with
it, whose rewriting costs little beside its own.  A file whose name in the log VACUUM does not recognise is rewritten first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from pubsub.delta.log import earlier_releases
from pubsub.delta.log.add_file import AddFile

# Files below both bounds are merged once a size class (each four times the one before) has at least _MERGE of them.
SMALL_ROWS: Final = 1 << 19
SMALL_BYTES: Final = 64 << 20
_MERGE: Final = 4
# The part of a file's rows that must be deleted before the file is worn, and the part for one that is taken along.
_WORN: Final = 0.1
_TAKEN_ALONG: Final = 0.05
# Files of fewer rows are merged soon enough.
_WORN_ROWS: Final = 1 << 13
# The most rows and bytes of one rewriting, unless a single file has more: it must not take longer than some seconds.
_MOST_ROWS: Final = 1 << 20
_MOST_BYTES: Final = 256 << 20
# A table that rests has this many small files merged, and files with this part of their rows deleted rewritten.
_MERGE_AT_REST: Final = 2
_WORN_AT_REST: Final = 0.01


def choose_files(
    files: Iterable[AddFile], rows_in: Callable[[AddFile], int], *, worn: bool = True, resting: bool = False
) -> list[AddFile]:
    """Return the files to rewrite into one, or [] if none is worth it.

    `rows_in` returns a file's number of rows, including deleted ones.  With `worn` false only small files are merged.
    `resting`: the table has not been written for a while, so that what is done now will last.
    """
    files = list(files)
    lost = next((file for file in files if earlier_releases.has_lost_name(file.path)), None)
    if lost is not None:
        return [lost]  # it gets another name
    sized = [(file, rows, rows - file.deleted) for file in files for rows in (rows_in(file),)]
    if worn:
        part, least = (_WORN_AT_REST, 1) if resting else (_WORN, _WORN_ROWS)
        found = [one for one in sized if one[1] >= least and one[0].deleted > part * one[1]]
        if found:
            return _with_smaller(max(found, key=lambda one: one[0].deleted), sized)
    return _small(sized, resting=resting)


_Sized = tuple[AddFile, int, int]


def _with_smaller(worn: _Sized, sized: Iterable[_Sized]) -> list[AddFile]:
    """Return the worn file, and those that it takes along: first the most worn, then the smallest."""
    chosen, live, size = [worn[0]], worn[2], worn[0].size
    others = [one for one in sized if one[0] is not worn[0] and _is_small(one)]
    for file, rows, left in sorted(others, key=lambda one: (one[0].deleted <= _TAKEN_ALONG * one[1], one[2])):
        if live + left <= _MOST_ROWS and size + file.size <= _MOST_BYTES:
            if file.deleted <= _TAKEN_ALONG * rows and left > live:
                break
            chosen.append(file)
            live, size = live + left, size + file.size
    return chosen


def _small(sized: Iterable[_Sized], *, resting: bool) -> list[AddFile]:
    """Return the small files of the smallest class that has enough of them, with those of smaller classes."""
    classes: dict[int, list[_Sized]] = {}
    for one in sized:
        if _is_small(one):
            classes.setdefault(max(one[2], 1).bit_length() // 2, []).append(one)
    chosen: list[_Sized] = []
    for _, of_class in sorted(classes.items()):
        chosen += of_class
        if len(of_class) >= _MERGE and not resting:
            return _within_bounds(chosen, _MERGE)
    return _within_bounds(chosen, _MERGE_AT_REST) if resting else []


def _within_bounds(sized: Iterable[_Sized], enough: int) -> list[AddFile]:
    """Return the smallest files that one rewriting can take; [] if these are not `enough` to be worth it."""
    chosen: list[AddFile] = []
    live = size = 0
    for file, _, left in sorted(sized, key=lambda one: one[2]):
        live, size = live + left, size + file.size
        if live > _MOST_ROWS or size > _MOST_BYTES:
            break
        chosen.append(file)
    return chosen if len(chosen) >= enough else []


def _is_small(one: _Sized) -> bool:
    return one[2] < SMALL_ROWS and one[0].size < SMALL_BYTES
