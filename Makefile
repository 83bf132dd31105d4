# Every target does its own set-up in .venv, from constraints.txt, and is cheap when repeated.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# One thread per process: the same bits on every machine, and parallel tests do not fight for the cores.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MPLBACKEND := Agg
ARGS ?=
T ?= 60
PIP = $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# an index set-up with unused entries makes pip repeat itself dozens of times
HUSH = 2> >(grep -v "^WARNING: Location" >&2)

.PHONY: help verify test test-report test-compat figures bench lint fuzz docs power certify adversary mutation numerics faults supply sanitize clean
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

$(VENV)/base.stamp: pyproject.toml constraints.txt
	@echo "setting up .venv (about a minute, once) ..."
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e . $(HUSH)
	@touch $@

$(VENV)/all.stamp: $(VENV)/base.stamp
	@echo "installing the extras (2.5 GB, some minutes, once) ..."
	@$(PIP) -e '.[real,gpu,sweep,docs,test]' $(HUSH)
	@touch $@

verify: $(VENV)/base.stamp ## check every claim on the embedded real cache and synthetic ones; report/index.html  (ARGS="--budget full")
	$(RUN) -m kvtheory verify $(ARGS)

test: $(VENV)/all.stamp ## the property-based tests
	$(RUN) -m pytest -n 2 --dist worksteal $(ARGS)

test-report: $(VENV)/all.stamp ## the report in headless Chromium, which must be there (Debian: chromium, chromium-driver)
	KVTHEORY_REQUIRE_CHROMIUM=1 $(RUN) -m pytest tests/report $(ARGS)

test-compat: $(VENV)/all.stamp ## reference.hf with the two minor versions of transformers before the pinned one, in venvs of their own
	$(RUN) scripts/compat.py $(VENV)/compat $(ARGS)

figures: $(VENV)/base.stamp ## draw all figures from the saved results of `make verify`
	@test -f report/ledger.json || $(RUN) -m kvtheory verify --no-figures
	$(RUN) -m kvtheory figures $(ARGS)

bench: $(VENV)/all.stamp ## speed against peers, ratios from one run
	for script in benchmarks/*.py; do echo "== $$script"; $(RUN) $$script $(ARGS) || exit 1; done

lint: $(VENV)/all.stamp ## ruff, mypy, import-linter
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

fuzz: $(VENV)/all.stamp ## coverage-guided fuzzing of all readers of bytes for T seconds in all  (T=60; a target's name in ARGS: that one alone)
	@$(PIP) -e '.[fuzz]' $(HUSH)
	$(RUN) -m tests.fuzz.every $(T) $(ARGS)

power: $(VENV)/base.stamp ## the same slips for the functions of every claim, 7 minutes  (ARGS="--share 8": an eighth; ARGS="--claim 'risk/*'")
	$(RUN) -m proofs_checks.power $(ARGS)

certify: $(VENV)/base.stamp ## inequalities of the ledger, proved on small instances in ball arithmetic
	$(RUN) -m proofs_checks.certified $(ARGS)

adversary: $(VENV)/all.stamp ## gradient ascent against the inequalities for T seconds; keeps the worst instances
	$(RUN) -m tests.adversary.search --seconds $(T) $(ARGS)

mutation: $(VENV)/all.stamp ## mutants of the sources, T seconds of them; goes on where it stopped
	@$(PIP) -c constraints-mutation.txt -e '.[mutation]' $(HUSH)
	$(RUN) -m tests.mutation.run --seconds $(T) $(ARGS)

numerics: $(VENV)/all.stamp ## same streams and verdicts under other threads and BLAS kernels  (ARGS="--python LABEL=INTERPRETER")
	$(RUN) -m tests.numerics.run $(ARGS)

faults: $(VENV)/all.stamp ## kill -9, full disk, read-only folder, two at once, Ctrl-C: what every command leaves behind
	$(RUN) -m tests.faults $(ARGS)

sanitize: $(VENV)/all.stamp ## the kernels' simulator and kernels on it under AddressSanitizer and UndefinedBehaviorSanitizer
	$(RUN) -m tests.simt.sanitised $(ARGS)

supply: $(VENV)/all.stamp ## the lock with hashes, the licences, and that no reader unpickles
	$(RUN) scripts/supply.py check
	$(RUN) -m pytest tests/test_supply.py $(ARGS)

docs: $(VENV)/all.stamp ## HTML documentation in docs/_build
	$(RUN) -m sphinx -q -W -b html docs docs/_build

clean: ## remove the virtual environment and everything generated
	rm -rf $(VENV) report docs/_build
