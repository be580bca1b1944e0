"""Mutate samples for some time, reader by reader; end with 1 if a reader stumbled."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time

from pubsub import logs
from tests.fuzz.mutate import mutated
from tests.fuzz.readers import READERS
from tests.fuzz.run import bounded, keep, stumbles


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, over all readers")
    parser.add_argument("--reader", choices=sorted(READERS), action="append")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = parser.parse_args()
    logs.configure(logging.ERROR)
    names = given.reader or sorted(READERS)
    print(f"seed {given.seed}")
    found = 0
    with bounded():
        for name in names:
            chance = random.Random(f"{given.seed} {name}")
            until = time.monotonic() + given.seconds / len(names)
            count, known = 0, set()
            while time.monotonic() < until:
                data = mutated(chance, READERS[name].samples)
                count += 1
                if (error := stumbles(name, data)) is not None:
                    trace = error.__traceback__
                    while trace is not None and trace.tb_next is not None:
                        trace = trace.tb_next
                    place = (
                        f"{type(error).__name__} at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
                        if trace
                        else ""
                    )
                    if place not in known:
                        known.add(place)
                        print(f"  {place}: {str(error)[:200]!r}, kept as {keep(name, data)}")
            found += len(known)
            print(f"{name}: {count} inputs, {len(known)} places stumbled")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
