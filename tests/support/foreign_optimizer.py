"""Another program that merges the files of Delta tables: a Spark of its own, with Delta's own store for local files.

    python -m tests.support.foreign_optimizer TABLE …

It prints "ready", and runs OPTIMIZE on the tables in turn until its standard input ends.
"""

from __future__ import annotations

import itertools
import sys
import threading

from tests.support.foreign_writer import merge_files, session


def main() -> None:
    spark = session()
    ending = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ending.set()), daemon=True).start()
    print("ready", flush=True)
    for path in itertools.cycle(sys.argv[1:]):
        if ending.wait(1):
            break
        merge_files(spark, path)
    spark.stop()


if __name__ == "__main__":
    main()
