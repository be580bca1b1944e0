"""Planted faults: does a test see it when a hot place is wrong?

python -m tests.mutants --list
python -m tests.mutants [--minutes 60] [--only spool.py] [--again]

places.py       the hot places: files, how many faults each gets, and the tests that ought to see them
plant.py        the faults: a comparison turned, a call or a lock left out, two steps in the other order
run.py          one at a time, in a copy of the checkout
report.py       docs/mutants.md: each fault, and what saw it
"""
