# One word for each thing that is done often. PYTHON chooses the interpreter: the one of .venv where there is one.
PYTHON ?= $(if $(wildcard .venv/bin/python),$(CURDIR)/.venv/bin/python,python3)
BIN = $(dir $(shell command -v $(PYTHON)))
CONFIG ?= quickstart

.PHONY: help setup tools check format types contracts test coverage pure deep docs kill-picture page-pictures bench
.PHONY: lock sbom audit

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
	@echo "make lock          docker/lock, from pyproject.toml; LOCK_OPTIONS=--upgrade for the newest versions (needs uv)"
	@echo "make sbom          what the images hold, as CycloneDX: build/cpu.cdx.json, build/cuda.cdx.json"
	@echo "make audit         known vulnerabilities of what the images hold"
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

lock:
	$(PYTHON) docker/make_lock.py $(LOCK_OPTIONS)

# Pinned with hashes themselves, in an environment of their own.
build/tools/bin/cyclonedx-py: docker/lock/tools.txt
	python3 -m venv build/tools
	build/tools/bin/pip install --quiet --require-hashes --requirement docker/lock/tools.txt

sbom: build/tools/bin/cyclonedx-py
	cat docker/lock/common.txt docker/lock/cpu.txt > build/cpu.txt
	cat docker/lock/common.txt docker/lock/cuda.txt docker/lock/flash.txt > build/cuda.txt
	build/tools/bin/cyclonedx-py requirements build/cpu.txt --output-file build/cpu.cdx.json
	build/tools/bin/cyclonedx-py requirements build/cuda.txt --output-file build/cuda.cdx.json

audit: build/tools/bin/cyclonedx-py
	build/tools/bin/pip-audit --strict --require-hashes --disable-pip --requirement docker/lock/common.txt
	build/tools/bin/pip-audit --strict --require-hashes --disable-pip --requirement docker/lock/cuda.txt
