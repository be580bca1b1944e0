"""Record a run, and cut its power many times.

python -m tests.power --states 10000 [--seed 0] [--commits 110] [--record DIRECTORY]
python -m tests.power --record DIRECTORY --state 0/1234/1     # one state of a record that was kept, by its seed
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.power import trace
from tests.power.cuts import cut, one, record


def main() -> int:
    """Return 1 if something was lost in a state."""
    parser = argparse.ArgumentParser(prog="python -m tests.power", description="Power loss, from a record of a run.")
    parser.add_argument("--states", type=int, default=1000, help="how many")
    parser.add_argument("--state", help="just this one, by the seed that was printed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--commits", type=int, default=110, help="small transactions of the run; past 100 there is a checkpoint"
    )
    parser.add_argument("--record", type=Path, help="where the record is, or is kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pubsub-power-") as temporary:
        base = (arguments.record or Path(temporary)).resolve()
        if not (base / "publisher.json").exists():
            if not trace.available():
                print("strace is not installed", file=sys.stderr)
                return 2
            base.mkdir(parents=True, exist_ok=True)
            record(base, arguments.commits)
        result = one(base, arguments.state) if arguments.state else cut(base, arguments.states, arguments.seed)
    print(result)
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
