# Two commands do everything on a machine with Python 3.11 or newer: `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Processes that test at once; each computes with one thread.
JOBS   ?= auto

.PHONY: serve test lint clean

serve: $(VENV)/.installed
	$(BIN)/servekit serve

test: $(VENV)/.tested
	$(BIN)/servekit pull demo
	$(BIN)/servekit pull demo-embedding
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.linted
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt $(wildcard src/servekit/engine/native/csrc/*)
	@echo "installing servekit and torch into $(VENV): about a minute, longer where torch is downloaded"
	@$(PIP) install --quiet --progress-bar off --constraint constraints.txt --editable .
	@$(BIN)/python -m servekit.engine.native.library
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

$(VENV)/.linted: $(VENV)/.tested
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[test,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f src/servekit/engine/native/_kernels*
