"""Run histories from their seeds, on all cores; tell of each that fails, cut down, as a story.

python -m tests.simulation --seeds 10000 [--first 0] [--jobs 2]
python -m tests.simulation --seed 4711 [--story] [--no-shrink]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

# The order of sets of strings must be the same in every run.
if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

from tests.simulation import catalog
from tests.simulation.history import generate
from tests.simulation.many import CHUNK, prepare, run
from tests.simulation.run import installed, simulate
from tests.simulation.shrink import kind, shrink

#: How many lines of a story are told, at most.
_LINES = 150


def main() -> int:
    """Return 1 if a history fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="just this one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--story", action="store_true", help="tell the story also if nothing fails")
    parser.add_argument("--no-shrink", action="store_true", help="tell the history as it is")
    parser.add_argument("--most", type=int, default=5, help="how many failures are told")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _one(arguments.seed, story=arguments.story, whole=arguments.no_shrink)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    began = time.monotonic()
    failed: list[tuple[int, str]] = []
    flavours: Counter[str] = Counter()
    # Each process has its own event loop, clock and catalog.
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, prepare) as pool:
        for number, found in enumerate(pool.imap_unordered(run, chunks), 1):
            failed += found[0]
            flavours += found[1]
            if sys.stderr.isatty():
                print(f"\r{number * CHUNK} histories, {len(failed)} failed", end="", file=sys.stderr)
    seconds = time.monotonic() - began
    print(f"{len(seeds)} histories ({seeds.start} to {seeds.stop - 1}) in {seconds:.0f} s, {len(failed)} failed")
    print("Things at once: " + ", ".join(f"{name} {count}" for name, count in sorted(flavours.items())))
    kinds: dict[str, list[tuple[int, str]]] = {}
    for seed, violation in sorted(failed):
        kinds.setdefault(kind(violation), []).append((seed, violation))
    for of_kind in sorted(kinds.values(), key=len, reverse=True):
        listed = ", ".join(str(seed) for seed, _ in of_kind[:10]) + (", …" if len(of_kind) > 10 else "")
        print(f"{len(of_kind)} times: {of_kind[0][1].splitlines()[0]}  (seeds {listed})")
    for of_kind in list(kinds.values())[: arguments.most]:
        print()
        _one(of_kind[0][0], story=True, whole=arguments.no_shrink)
    return 1 if failed else 0


def _one(seed: int, *, story: bool, whole: bool) -> int:
    catalog.prepare()
    history = generate(seed)
    with installed():
        outcome = simulate(history)
        if not outcome.violations and not story:
            print(f"seed {seed}: nothing fails")
            return 0
        if outcome.violations and not whole:
            history, outcome = shrink(history, outcome)
    cut = "" if history == generate(seed) else f", cut down to {len(history.steps)} steps"
    print(f"seed {seed} ({history.flavour}){cut}")
    print(f"    {history.setting}")
    for step in history.steps:
        print(f"    {step.after:8.3f} s later: {step}")
    if len(outcome.story) > _LINES:
        print(f"    … {len(outcome.story) - _LINES} lines before")
    print("\n".join(outcome.story[-_LINES:]))
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
