.PHONY: help run test check bench docs
PYTHON ?= python3
VENV ?= .venv
TEST_VENV ?= .venv-test
TORCH ?= torch==2.13.0
SPEC ?= specs/quickstart.json
# Tests wait a third of their time, for servers and signals: three at once keep two cores busy.
WORKERS ?= 3
# Python compiles what it imports; pip would compile 14,000 files, a third of its work.
INSTALL := -m pip install --no-compile --constraint constraints.txt

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /\1\t/'

run: $(VENV)/ready  ## train specs/quickstart.json (SPEC=... for another) into runs/
	$(VENV)/bin/python -m icl.run $(SPEC)

test: $(TEST_VENV)/ready  ## install what the tests need and run them
	$(TEST_VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal

check: $(TEST_VENV)/ready  ## format, lint and types
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/mypy

bench: $(TEST_VENV)/ready  ## the benchmarks that take minutes, into benchmarks/results/
	$(TEST_VENV)/bin/python -m benchmarks.train_step --save
	$(TEST_VENV)/bin/python -m benchmarks.baselines --save
	$(TEST_VENV)/bin/python -m benchmarks.sweep_throughput --save
	PJRT_DEVICE=CPU $(TEST_VENV)/bin/python -m benchmarks.xla_host_time --save
	PJRT_DEVICE=CPU $(TEST_VENV)/bin/python -m benchmarks.placement --save

docs: $(VENV)/ready  ## regenerate docs/spec.schema.json and the fields in docs/spec.md from the code
	$(VENV)/bin/python -m icl.run --schema > docs/spec.schema.json
	sed '/^## Fields/q' docs/spec.md > docs/spec.md.new
	$(VENV)/bin/python -m icl.run --fields >> docs/spec.md.new
	mv docs/spec.md.new docs/spec.md

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(INSTALL) '$(TORCH)' --editable .
	@touch $@

# Apart from .venv: torch_xla pins an older PyTorch.
$(TEST_VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TEST_VENV)
	$(TEST_VENV)/bin/python $(INSTALL) --editable '.[test]'
	@touch $@
