"""Cut a history that fails down to one that still fails in the same way, and reads as a story."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from tests.simulation.history import History, Step
from tests.simulation.run import Outcome, simulate

#: How many histories are tried at most.
_MOST: Final = 400
#: Other schedules that a smaller history is tried with.
_NOISES: Final = ("", " again", " and again")


def kind(violation: str) -> str:
    """Return what is the same in violations of one kind: the first words, without names and numbers."""
    first = violation.splitlines()[-1] if violation.startswith("a worker fails") else violation.splitlines()[0]
    return " ".join(re.sub(r"[0-9A-F]+/[0-9A-F]+|\d+|\[.*|s3a://\S+", "", first).split()[:6])


def shrink(history: History, outcome: Outcome) -> tuple[History, Outcome]:
    """Return the smallest history found, with what it comes to."""
    wanted = kind(outcome.violations[0])
    best, tries = (history, outcome), 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(best[0]):
            for noise in _NOISES:
                tries += 1
                if tries > _MOST:
                    return best
                tried = replace(candidate, noise=candidate.noise + noise)
                found = simulate(tried)
                if found.violations and kind(found.violations[0]) == wanted:
                    best, smaller = (tried, found), True
                    break
                if candidate.calm:
                    break
            if smaller:
                break
    return best


def _smaller(history: History) -> Iterator[History]:
    """Yield simpler histories, those that are simpler by much first."""
    if not history.calm:
        yield replace(history, calm=True)
    steps = history.steps
    size = len(steps)
    while size > 0:
        for start in range(0, len(steps), size):
            yield replace(history, steps=(*steps[:start], *steps[start + size :]))
        size //= 2
    setting = history.setting
    for simpler in (
        replace(setting, tables=setting.tables[:-1]) if len(setting.tables) > 1 else setting,
        replace(setting, first_rows=0),
        replace(setting, catalog_on_server=False),
        replace(setting, settings=()),
        *(replace(setting, bounds=_without(setting.bounds, name)) for name, _ in setting.bounds),
        *(replace(setting, options=_without(setting.options, name)) for name, _ in setting.options),
        replace(setting, tables=tuple((name, "keyed", False) for name, _, _ in setting.tables)),
        replace(setting, dates=False),
    ):
        if simpler != setting:
            yield replace(history, setting=simpler)
    for place, step in enumerate(steps):
        for simpler_step in _simpler(step):
            yield replace(history, steps=(*steps[:place], simpler_step, *steps[place + 1 :]))


def _without(pairs: Sequence[tuple[str, object]], name: str) -> tuple[tuple[str, object], ...]:
    return tuple(pair for pair in pairs if pair[0] != name)


def _simpler(step: Step) -> Iterator[Step]:
    if step.after not in (0.0, 1.0, 5.0):
        for after in (0.0, 1.0, 5.0):
            yield replace(step, after=after)
    for place, argument in enumerate(step.args):
        if isinstance(argument, tuple) and len(argument) > 1:
            for left in range(len(argument)):
                rest = (*argument[:left], *argument[left + 1 :])
                yield replace(step, args=(*step.args[:place], rest, *step.args[place + 1 :]))
