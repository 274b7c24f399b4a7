# One word for each thing that is done often. PYTHON chooses the interpreter: the one of .venv where there is one.
PYTHON ?= $(if $(wildcard .venv/bin/python),$(CURDIR)/.venv/bin/python,python3)
BIN = $(dir $(shell command -v $(PYTHON)))
CONFIG ?= quickstart

.PHONY: help setup tools check format types contracts test coverage pure deep docs kill-picture page-pictures bench

help:
	@echo "make setup         install everything that the checks need into .venv"
	@echo "make check         linter, formatter, types, import contracts"
	@echo "make pure          the tests that need neither torch nor Ray"
	@echo "make test          the README's second command: the default tests"
	@echo "make coverage      the same with line coverage, below whose limits it fails"
	@echo "make deep          what the default run leaves out"
	@echo "make docs          the documentation site, warnings as errors: docs/_build/html"
	@echo "make kill-picture  docs/_static/kill.svg, from a run of quickstart"
	@echo "make page-pictures docs/_static/page-*.png, from a run of quickstart and Chromium"
	@echo "make bench         recovery after a kill, and tokens/s of CONFIG (default: quickstart)"

setup:
	python3 -m venv .venv
	.venv/bin/pip install -e '.[dev,docs]'

check: format types contracts

tools:
	@$(PYTHON) -c 'import pytest, ruff, sphinx' 2>/dev/null || { echo 'the checks are not installed: run `make setup`' >&2; exit 1; }

format: tools
	$(BIN)ruff check .
	$(BIN)ruff format --check .

types: tools
	$(BIN)mypy

contracts: tools
	$(BIN)lint-imports

pure: tools
	$(PYTHON) -m pytest tests/pure -n auto

test: tools
	$(PYTHON) -m pytest -n 2

coverage: tools
	$(PYTHON) -m pytest --cov

deep:
	VENV=$(patsubst %/bin/,%,$(BIN)) .ci/deep

docs: tools
	$(PYTHON) -m sphinx -W -n --keep-going -E -q docs docs/_build/html

kill-picture:
	$(PYTHON) docs/make_kill_svg.py

page-pictures:
	$(PYTHON) docs/make_page_pictures.py

bench:
	$(PYTHON) -m picotron_ray.cli bench recovery --peers none
	$(PYTHON) -m picotron_ray.cli bench mfu $(CONFIG)
