"""Plant faults, and see which tests see them.

python -m tests.mutants --list
python -m tests.mutants [--minutes 60] [--only TEXT] [--again]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants import report
from tests.mutants.harmless import HARMLESS
from tests.mutants.plant import Fault, faults
from tests.mutants.run import copy_checkout, import_the_rest, planted, run


def main() -> int:
    """Return 1 if a fault was not seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Planted faults; docs/mutants.md.")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--only", default="", help="those whose names contain this")
    parser.add_argument("--again", action="store_true", help="also those whose results are in docs/mutants.md")
    parser.add_argument("--minutes", type=float, default=600, help="end after so long")
    arguments = parser.parse_args()
    listed = faults()
    if arguments.list:
        for fault in listed:
            print(f"{fault.name}: {fault.said}")
        return 0
    results = report.read()
    chosen = [
        fault
        for fault in listed
        if arguments.only in fault.name
        and fault.name not in HARMLESS
        and (arguments.again or results.get(report.key(fault), report.NOT_RUN) == report.NOT_RUN)
    ]
    unseen = _plant(listed, chosen, results, time.monotonic() + arguments.minutes * 60)
    print(f"{len(unseen)} were not seen" + "".join(f"\n    {fault.name}: {fault.said}" for fault in unseen))
    return 1 if unseen else 0


def _plant(listed: list[Fault], chosen: list[Fault], results: dict[str, str], until: float) -> list[Fault]:
    import_the_rest()
    unseen = []
    usual: dict[tuple[str, ...], float] = {}
    with tempfile.TemporaryDirectory(prefix="pubsub-mutants-") as temporary:
        checkout = Path(temporary)
        copy_checkout(checkout)
        for fault in chosen:
            if time.monotonic() > until:
                break
            tests = fault.place.tests
            if tests not in usual:
                seen, which, usual[tests] = run(checkout, tests)
                if seen != "not seen":
                    sys.exit(f"{which} fails without a fault")
            with planted(checkout, fault):
                seen, which, seconds = run(checkout, tests, usual[tests])
            if seen == "not seen":
                unseen.append(fault)
            results[report.key(fault)] = which.removeprefix("tests/") if seen == "seen" and which else seen
            print(f"{seen}, {seconds:.1f} s: {fault.name}: {fault.said}", flush=True)
            report.write(listed, results)
    return unseen


if __name__ == "__main__":
    sys.exit(main())
