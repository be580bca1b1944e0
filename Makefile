# Everything that can be done here.  `make` alone lists it.

VENV   := .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

# A demo on a database of your own: make demo PG="host=… dbname=…"
export PUBSUB_DEMO_PG := $(PG)
# Processes that run tests side by side, each with a Spark session and servers of its own: on two cores a third one uses what the
# others wait for.
JOBS ?= 3
# Property tests: how many times the usual number of examples.
FUZZ ?= 20

.DEFAULT_GOAL := help
.PHONY: help setup base demo test test-all soak lint bench fuzz docs lock clean distclean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/    make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

setup: ## .venv with everything, Spark's jars and the test servers; quick when nothing changed
	@scripts/setup.sh all

base:
	@scripts/setup.sh base

demo: base ## a PostgreSQL database copied and followed into Delta tables, and compared; PG="host=… dbname=…" for your own, DEMO="--help" for options
	@exec $(BIN)/python -m pubsub.demo $(DEMO)

test: setup ## the base of every kind, and a scenario of each feature on PostgreSQL 18 and Spark; JOBS (3) files at a time
	@exec $(PYTEST) -n $(JOBS) --dist loadfile --durations=15

test-all: test ## every test: what `make test` leaves out comes after it
	@exec $(PYTEST) -m "full and not soak" -n $(JOBS) --dist loadfile --durations=25

soak: setup ## what takes hours: random crashes and faults, the largest sizes; seeds are printed
	@exec $(PYTEST) -m soak -o faulthandler_timeout=14400

fuzz: setup ## property tests with FUZZ (20) times the usual number of examples
	@PUBSUB_FUZZ=$(FUZZ) exec $(PYTEST) tests/property

bench: setup ## speed beside PostgreSQL's own subscriber and pg_recvlogical
	@exec $(BIN)/python -m bench

lint: base ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: base ## reference pages of settings, options, views and types, from the code: build/docs
	@$(BIN)/python scripts/reference.py build/docs

lock: base ## requirements.lock made again from pyproject.toml, with the newest versions that it allows
	@scripts/lock.sh

clean: ## caches, builds and the demo's directory removed
	rm -rf demo-node build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -print | xargs rm -rf

distclean: clean ## clean, and .venv removed: the next make sets up from nothing
	rm -rf $(VENV)
