# Everything that can be done here.  `make` alone lists it.

VENV   := .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# With failed tests once more, each alone; N files at a time.
SUITE  = $(BIN)/python -m tests.running
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile

# A demo on a database of your own: make demo PG="host=… dbname=…"
export PUBSUB_DEMO_PG := $(PG)
# With our own server between the database and the node: make demo WALSENDER=1
export PUBSUB_DEMO_WALSENDER := $(WALSENDER)
# Processes that run tests side by side, each with a Spark session and servers of its own: on two cores a third one uses what the
# others wait for.
JOBS ?= 3
# Property tests: how many times the usual number of examples.
FUZZ ?= 20
# Mutations of files and texts: for how long, over all readers.
FUZZ_SECONDS ?= 600
# Simulated histories, states after a power loss, rounds of random crashes from a first seed, and minutes of these or of planted faults.
SEEDS ?= 10000
STATES ?= 10000
ROUNDS ?= 100
SEED ?= 0
MINUTES ?= 600
# Times that the base is run to see what wavers.
RUNS ?= 5

.DEFAULT_GOAL := help
.PHONY: help setup base demo test test-all steady soak lint bench fuzz simulate power crash mutants docs lock audit dist clean distclean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/    make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

setup: ## .venv with everything, Spark's jars and the test servers; quick when nothing changed
	@scripts/setup.sh all

base:
	@scripts/setup.sh base

demo: base ## a PostgreSQL database copied and followed into Delta tables, and compared; PG="host=… dbname=…" for your own, WALSENDER=1 for our server between, DEMO="--help" for options
	@exec $(BIN)/python -m pubsub.demo $(DEMO)

# Fewer examples of each property.
test steady: export PUBSUB_FUZZ := 0.3

test: setup ## the base: every kind, and a scenario of each feature on PostgreSQL 18 and Spark; JOBS (3) files at a time
	@exec $(SUITE) $(SIDE_BY_SIDE) --durations=15

test-all: setup ## every test but those of `make soak`
	@$(BIN)/python -m pubsub.testing.binaries fetch all
	@$(BIN)/python -m pubsub.testing.s3_server build
	@$(BIN)/python -m pubsub.testing.hdfs_server fetch
	@$(BIN)/python -m tests.support.browser fetch
	@exec $(SUITE) -m "not soak" $(SIDE_BY_SIDE) --durations=25

steady: setup ## the base RUNS (5) times beside a busy core; lists what wavered
	@exec $(SUITE) --steady $(RUNS) $(SIDE_BY_SIDE)

soak: setup ## what takes hours: random crashes and faults, the largest sizes; seeds are printed
	@exec $(PYTEST) -m soak -o faulthandler_timeout=14400

fuzz: setup ## property tests with FUZZ (20) times the usual number of examples; then FUZZ_SECONDS (600) of mutated files and texts
	@PUBSUB_FUZZ=$(FUZZ) $(PYTEST) tests/property
	@exec $(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

simulate: base ## SEEDS (10000) lives of the subscriber under a virtual clock, each from its seed
	@exec $(BIN)/python -m tests.simulation --seeds $(SEEDS)

power: setup ## a node's life recorded, and STATES (10000) that a power loss may leave started from; needs strace
	@exec $(BIN)/python -m tests.power --states $(STATES)

crash: setup ## ROUNDS (100) of random crashes of real servers, daemons and JVMs, from SEED (0) on, for MINUTES (600) at most
	@exec $(BIN)/python -m tests.crash --rounds $(ROUNDS) --seed $(SEED) --minutes $(MINUTES)

mutants: setup ## planted faults that docs/mutants.md has no result of, for MINUTES (600) at most
	@exec $(BIN)/python -m tests.mutants --minutes $(MINUTES)

bench: setup ## speed beside PostgreSQL's own subscriber and pg_recvlogical; where processor time goes; modes, tenants, processes, daemons
	@$(BIN)/python -m bench
	@$(BIN)/python -m bench.fanout
	@$(BIN)/python -m bench.budget
	@$(BIN)/python -m bench.modes
	@$(BIN)/python -m bench.processes
	@$(BIN)/python -m bench.shared_catalog

lint: base ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: base ## the documents as a site: build/site/index.html; with reference pages of settings, options, views and errors, from the code
	@$(BIN)/python -m scripts.reference
	@$(BIN)/python -m scripts.site build

dist: base ## the wheel: dist/pubsub_delta-….whl, which installs into an empty environment
	@rm -rf build
	@$(BIN)/uv build --quiet --wheel --no-build-isolation --python $(BIN)/python --out-dir dist

lock: base ## requirements.lock made again from pyproject.toml, with the newest versions that it allows
	@scripts/lock.sh

audit: base ## known vulnerabilities of the packages in requirements.lock, by pip-audit; ends with 3 if it cannot be told
	@$(BIN)/python scripts/audit.py

clean: ## caches, builds and the demo's directory removed
	rm -rf demo-node build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -print | xargs rm -rf

distclean: clean ## clean, and .venv removed: the next make sets up from nothing
	rm -rf $(VENV)
