"""Run rounds of random crashes, each from its seed; tell of the first that fails.

python -m tests.crash --rounds 100 [--seed 0] [--minutes 60] [--directory DIR]
python -m tests.crash --seed 4711 --plan        # what a round would do
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.machine import Machine
from tests.crash.plan import generate
from tests.crash.round import run


def main() -> int:
    """Return 1 if a round fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next ones follow")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no round after these")
    parser.add_argument("--directory", type=Path, help="where nodes are, and what failed is kept")
    parser.add_argument("--results", type=Path, help="a file that gets a line of JSON for each round")
    parser.add_argument("--go-on", action="store_true", help="go on after a round that failed")
    parser.add_argument("--plan", action="store_true", help="only tell what would be done")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.rounds)
    if arguments.plan:
        for seed in seeds:
            print(generate(seed).story())
        return 0
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="pubsub-crash-"))
    directory.mkdir(parents=True, exist_ok=True)
    results = arguments.results or directory / "results.jsonl"
    # So that servers, daemon and JVMs end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    failed: list[int] = []
    made = 0
    with Machine(directory.resolve()) as machine:
        for seed in seeds:
            if time.monotonic() - began > arguments.minutes * 60:
                break
            plan = generate(seed)
            result = run(machine, plan)
            made += 1
            with results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(
                f"seed {seed}: PostgreSQL {plan.version}, {result['kind']}, {len(plan.faults)} faults, "
                f"{sum(result['done'].values())} transactions, {result.get('rows')} rows, {result['seconds']} s, "
                f"memory {result.get('memory')}",
                flush=True,
            )
            if "difference" in result:
                failed.append(seed)
                print(f"{plan.story()}\n{result['difference']}\nThe logs are in {result['kept']}.", flush=True)
                if not arguments.go_on:
                    break
    print(
        f"{made} rounds in {time.monotonic() - began:.0f} s, {len(failed)} failed{f': seeds {failed}' if failed else ''}"
    )
    if not failed and arguments.directory is None:
        if arguments.results is None:
            shutil.copy(results, Path.cwd() / "crash-results.jsonl")
        shutil.rmtree(directory)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
