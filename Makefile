.PHONY: help run test check bench docs
PYTHON ?= python3
VENV ?= .venv
SPEC ?= specs/quickstart.json
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /\1\t/'

run: $(VENV)/base  ## train specs/quickstart.json (SPEC=... for another) into runs/
	$(BIN)/python -m icl.run $(SPEC)

test: $(VENV)/test  ## install what the tests need and run them
	$(BIN)/python -m pytest

check: $(VENV)/test  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/test  ## the benchmarks that take minutes, into benchmarks/results/
	$(BIN)/python -m benchmarks.train_step --save
	$(BIN)/python -m benchmarks.baselines --save

docs: $(VENV)/base  ## regenerate docs/spec.schema.json from the code
	$(BIN)/python -m icl.run --schema > docs/spec.schema.json

$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/test: $(VENV)/base
	$(PIP) --editable '.[test]'
	@touch $@
