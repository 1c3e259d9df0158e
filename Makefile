# Entry points for people. What each test environment does is in tox.ini.

# The first Python >= 3.10 that runs, 3.11 preferred; `make PYTHON=python3.13 test` chooses another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
TOOLS := .cache/tools
TOX := $(TOOLS)/bin/tox

.DEFAULT_GOAL := help
.PHONY: help quickstart test quick lint format types wheels dist bench clean distclean python

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

quickstart: python  ## Create .venv, answer three chat prompts through vLLM on the CPU, show which operators served
	@$(PYTHON) scripts/bootstrap.py quickstart

test: $(TOX)  ## Run every test environment of tox.ini; what CI runs
	@rm -rf .cache/junit
	@$(TOX) run; status=$$?; $(PYTHON) scripts/sum_junit.py .cache/junit; exit $$status

quick: $(TOX)  ## Run style, types and the tests of core and reference: the quick answer while working
	@$(TOX) run -e lint,types,core,reference

lint: $(TOX)  ## Check style and format
	@$(TOX) run -e lint

format: $(TOX)  ## Format and apply the safe fixes
	@$(TOX) exec -q -e lint -- ruff format
	@$(TOX) exec -q -e lint -- ruff check --fix

types: $(TOX)  ## Check types
	@$(TOX) run -e types

wheels: $(TOX)  ## Build and test the five wheels
	@$(TOX) run -e wheels

dist: python  ## Build source archives and wheels for a release into dist/
	@$(PYTHON) -m venv $(TOOLS)-build
	@$(TOOLS)-build/bin/python -m pip install -qq --disable-pip-version-check build
	@rm -rf dist
	@$(TOOLS)-build/bin/python scripts/build_wheels.py --out dist

bench: python  ## Measure the cost of dispatch
	@$(PYTHON) scripts/bootstrap.py env
	@.venv/bin/python benchmarks/dispatch_overhead.py

clean:  ## Remove what tests and builds left; .venv stays
	rm -rf .cache .tox dist .hypothesis
	find packages tests scripts benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## Remove .venv too
	rm -rf .venv

python:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.10 found; install one or run make PYTHON=/path/to/python3" >&2; exit 1; }

$(TOX): | python
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install -qq --disable-pip-version-check 'tox>=4.28'
