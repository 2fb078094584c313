# One screen: `make help` lists the targets. A fresh machine needs python3 >= 3.11, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint format types contracts test-spark test-slow bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## make the virtual environment (once; again when its inputs change)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python3 >= 3.11 is needed" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable ".[torch,rwkv-clip]"
	$(BIN)/python -m pip install --quiet --no-deps openai-clip==1.0.1  # CLIP's vocabulary, for the tests of the tokenizer
	touch $@

demo: $(READY) ## train a small RWKV-CLIP on handwritten digits, traced (about two minutes)
	$(BIN)/python -m rwkv_clip.demo

test: check test-spark ## what CI runs: set up, lint, types, import contracts, tests

check: $(READY) lint types contracts
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not spark"

lint: $(READY) ## ruff, lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY) ## mypy, strict
	$(BIN)/mypy

contracts: $(READY) ## which room may import which
	$(BIN)/lint-imports

test-spark: $(READY) ## the tests that run on Spark; skipped, and said so, where there is no Java
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m spark -rs

test-slow: $(READY) ## the exhaustive tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow

bench: $(READY) ## every benchmark, written to benchmarks/results/
	$(BIN)/python -m benchmarks

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
