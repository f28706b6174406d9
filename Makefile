# Everything runs in .venv, which the first target that needs it makes: `make test` and `make demo` are
# all that a fresh machine needs. ARGS goes to the command: make demo ARGS="--steps 5". The tests also
# compile GPU kernels, for which `test` has more installed than the others need.

PYTHON ?= python3
TORCH ?= 2.13.0
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help venv kernels demo test lint types docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo '  ARGS="..." goes to the command; TORCH=$(TORCH) is the torch version, PYTHON=$(PYTHON) makes .venv'

venv: ## make or refresh .venv (the other targets do it when needed)
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' bash tools/setup_venv.sh

kernels: # what compiling GPU kernels takes, where that can be had
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' bash tools/setup_venv.sh kernels

demo: venv ## run the demo
	@$(BIN)/codetta demo $(ARGS)

test: kernels ## run the tests
	@$(BIN)/python -m pytest $(ARGS)

lint: venv ## check format and lint
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m ruff check .

types: venv ## check types
	@$(BIN)/python -m mypy src

docs: venv ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo 'docs: site/index.html'

clean: ## remove .venv and everything built or cached
	rm -rf .venv site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
