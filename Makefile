# Every habit of thinwire is a target here. `make` alone lists them.
#
# The first target that needs it makes .venv and installs what it needs, pinned by constraints.txt; it is done again when
# pyproject.toml, constraints.txt or TORCH change.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
ARGS ?=
# Workers that run tests: five keep two cores busy, since many tests wait (13:12 against 14:44 with four).
JOBS ?= 5

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINS := $(VENV)/constraints.txt

# Another torch than the pinned one: any words for `pip install`. It is remembered, so that `make TORCH=... setup` and then
# `make train` use the same torch; `make TORCH= setup` goes back to the pinned one.
REMEMBERED := $(VENV)/torch-requirement
TORCH ?= $(shell cat $(REMEMBERED) 2>/dev/null)

# One stamp for each torch: a stamp that was made for another torch does not count.
TAG := $(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
RUN_STAMP := $(VENV)/stamp-run-$(TAG)
TEST_STAMP := $(VENV)/stamp-test-$(TAG)
# Flower's simulation pins another ray than the one that the pins hold: an environment on top of .venv, for its tests.
FLOWER := flwr[simulation]==1.42.0
FLOWER_STAMP := $(VENV)/flower/stamp

TEST_EXTRAS := [dev,docs,hf,parquet,lightning,trl]

# What belongs to one build of torch must not hold for another.
PINS_OF_TORCH := ^(torch|triton)==|^(cuda|nvidia)-

RUN ?= runs/demo
TRAIN := train --replicas 2 --method iso-loco --model nano --data stdlib --steps 300 \
	--sync-interval 30 --overlap-steps 3 --codec e3m0 --out $(RUN)

BENCHMARKS := $(sort $(wildcard benchmarks/*.py))
BENCH ?= $(basename $(notdir $(BENCHMARKS)))

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(TEST_STAMP) ## Make .venv with everything for running, testing and the docs

.PHONY: train
train: $(RUN_STAMP) ## Train nano on real text with two replicas over a thin wire (ARGS="--steps 50" appends)
	$(BIN)/thinwire $(TRAIN) $(ARGS)

.PHONY: check
check: $(TEST_STAMP) ## Lint, format, types, layers: seconds
	@status=0; \
	for tool in "ruff check ." "ruff format --check ." "mypy --strict" "lint-imports --no-logo --no-cache"; do \
		echo "$$tool"; $(BIN)/$$tool || status=1; \
	done; exit $$status

# Tests that need no other process, without whole runs: the fastest signal after a change. Few of them wait, and each
# worker collects for ten seconds.
QUICK := tests/unit tests/laws tests/architecture -m "not slow"
QUICK_JOBS := 3

# One wing's tests alone, by the table in tests/wings.py.
test-core: ## Tests of codecs, averaging, sync, methods and transport
test-elastic: ## Tests of elastic runs
test-monitor: ## Tests of monitor, run log and recording
test-planner: ## Tests of planning, site, traffic and simulate
test-lab: ## Tests of the lab
test-training: ## Tests of training, its data and models
test-faces: ## Tests of commands, integrations, docs and the shape of the source

TEST_WINGS := test-core test-elastic test-monitor test-planner test-lab test-training test-faces
.PHONY: $(TEST_WINGS)
$(TEST_WINGS): test-%: $(TEST_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $$($(BIN)/python -m tests.wings $*) $(ARGS)

# How long each test took in the last run, for `make slowest` and `make durations`.
JUNIT := build/tests.xml

# $(1) is the number of workers, $(2) what pytest runs. The tests run also where a check failed: one run reports
# everything. The checks run beside them, since types need a minute of one core and many tests wait; their output comes
# last. Files whose tests start processes stay whole on one worker (tests/dealing.py), so that what a file prepares is
# made once. Hundreds of processes start, so bytecode is written also where the environment says that it should not be.
define checks_and_tests
	@status=0; report=$$(mktemp); \
	$(MAKE) --no-print-directory check > "$$report" 2>&1 & check=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(1) $(2) --junitxml=$(JUNIT) $(ARGS) || status=1; \
	wait $$check || status=1; \
	cat "$$report"; rm "$$report"; \
	exit $$status
endef

.PHONY: quick
quick: $(TEST_STAMP) ## All checks, unit tests and laws but for long ones, in about two minutes (ARGS="-k word" appends)
	$(call checks_and_tests,$(QUICK_JOBS),$(QUICK))

.PHONY: test
test: $(TEST_STAMP) $(FLOWER_STAMP) ## All checks and all tests (ARGS="-k word" appends)
	$(call checks_and_tests,$(JOBS),)

.PHONY: slowest
slowest: $(TEST_STAMP) ## The slowest 50 tests of the last run, and the seconds of each folder
	@$(BIN)/python -m tests.durations $(JUNIT)

.PHONY: durations
durations: $(TEST_STAMP) ## Store the durations of the last `make test`, by which tests are dealt out to workers
	@$(BIN)/python -m tests.durations $(JUNIT) --store

# A target of its own: counting the lines takes half of the tests' time again.
.PHONY: coverage
coverage: $(TEST_STAMP) ## All tests, with branch coverage of src (ARGS="-k word" appends)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) \
		--cov --cov-branch --cov-report=term --cov-fail-under=90 $(ARGS)

.PHONY: docs
docs: $(TEST_STAMP) ## Build the docs into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

.PHONY: docs-serve
docs-serve: $(TEST_STAMP) ## Show the docs on http://127.0.0.1:8000 and follow changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

.PHONY: command-line-page
command-line-page: $(TEST_STAMP) ## Write docs/cli.md from the help of the commands
	$(BIN)/python scripts/command_line_page.py docs/cli.md

BENCH_WIRE := benchmarks/wire/bench.py --rate 5mbit --repeats 1 --intervals 1 --budget 45s --out runs/bench-wire-short \
	$(foreach name,all-reduce ddp diloco streaming-dense streaming-e3m0,--contender $(name))

.PHONY: bench
bench: $(RUN_STAMP) ## A short comparison on real sockets over a thin wire, some minutes (ARGS="--rate 1mbit" appends)
	OMP_NUM_THREADS=1 $(BIN)/python $(BENCH_WIRE) $(ARGS)

.PHONY: benchmarks
benchmarks: $(TEST_STAMP) ## Run every benchmark of benchmarks/, hours, or those of BENCH="codec memory"
	@for name in $(BENCH); do echo "benchmarks/$$name.py $(ARGS)"; $(BIN)/python benchmarks/$$name.py $(ARGS); done

.PHONY: quality
quality: $(TEST_STAMP) ## Run rung A of the quality ladder, what is not stored yet, and print its tables
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quality/ladder.py A $(ARGS)
	$(BIN)/python benchmarks/quality/report.py

.PHONY: format
format: $(TEST_STAMP) ## Format and sort the imports of what you changed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: constraints
constraints: $(TEST_STAMP) ## Pin the newest versions that fit pyproject.toml, for every supported Python
	$(BIN)/python scripts/pin.py constraints.txt

.PHONY: clean
clean: ## Remove .venv, caches and what was built; runs/ stays
	rm -rf $(VENV) site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "thinwire needs Python 3.11 or newer, and '$(PYTHON)' is none." >&2; \
		echo "Name one that is: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# $(1) is the list of extras in brackets, or nothing. A torch that stays from another choice would count as installed, also
# where only its build differs: so it goes first.
define install
	@echo "Installing into $(VENV); the first time this takes some minutes."
	@rm -f $(filter-out %-$(TAG),$(wildcard $(VENV)/stamp-*))
	@[ "$$(cat $(REMEMBERED) 2>/dev/null || true)" = '$(TORCH)' ] || $(PIP) uninstall --yes torch
	@printf '%s' '$(TORCH)' > $(REMEMBERED)
	grep -vE '$(if $(TORCH),$(PINS_OF_TORCH),^#)' constraints.txt > $(PINS)
	$(if $(TORCH),$(PIP) install $(TORCH))
	$(PIP) install -c $(PINS) hatchling editables
	$(PIP) install -c $(PINS) --no-build-isolation -e '.$(1)'
	@touch $@
endef

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,)

$(TEST_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$(TEST_EXTRAS))
	@touch $(RUN_STAMP)

# Without it, tests/multiprocess/test_flower_environment.py is skipped by name. What is below comes last, so that pip does
# not take .venv's packages for its own.
$(FLOWER_STAMP): | $(TEST_STAMP)
	@$(BIN)/python -m venv $(VENV)/flower
	@site() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	if $(VENV)/flower/bin/python -m pip --disable-pip-version-check --quiet install '$(FLOWER)'; then \
		echo "import site; site.addsitedir('$$(site $(BIN)/python)')" \
			> "$$(site $(VENV)/flower/bin/python)/below.pth"; \
		touch $@; \
	else echo "Flower could not be installed: its tests are skipped" >&2; rm -rf $(VENV)/flower; fi
