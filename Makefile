# Two commands for a newcomer: `make reproduce` (the experiment) and `make test` (every check).
# Each sets up .venv by itself; the second time the set-up costs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= runs/mini

.PHONY: help setup reproduce test lint clean

help:
	@echo "make reproduce   the experiment on real text; ends with $(OUT)/report.html"
	@echo "make test        every check: ruff, pyright, tests in float64 and float32, the notebook"
	@echo "make lint        ruff and pyright alone"
	@echo "make clean       remove $(VENV) and caches (runs stay)"

setup: $(VENV)/.ready

# The stamp holds the digest of what it was made from: a changed dependency list sets up again.
$(VENV)/.ready: pyproject.toml constraints/py311.txt constraints/py312.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sens needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]' \
	  --constraint constraints/$$($(BIN)/python -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")').txt
	@touch $@

reproduce: setup
	$(BIN)/sens reproduce --out $(OUT)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# Leg 1 checks everything with x64 on; leg 2 the float32 behaviour as users have it, with x64 off.
test: setup lint
	JAX_ENABLE_X64=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
	JAX_ENABLE_X64=0 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m float32
	$(BIN)/python -m pytest --nbmake notebooks --nbmake-timeout=600

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .jax_cache
