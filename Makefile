# The environment, the demo, the tests and the checks. `make help` lists the targets.

PYTHON ?= python3.11
VENV ?= .venv
# The demo's model, data set and logs.
DEMO := .demo

export PYTHON VENV

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all faults check clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

venv: ## make the virtual environment, with a real SGLang for the CPU (again: a second)
	@bash tests/rig/install.sh

demo: venv ## extract hidden states from a real model on this machine's CPU, and prove them
	@$(VENV)/bin/python tests/rig/models.py smollm2 $(DEMO)/model >/dev/null
	@$(VENV)/bin/python examples/demo.py $(DEMO)

# Tests start hundreds of processes. Each would compile our modules again if none may write them.
test test-all: export PYTHONDONTWRITEBYTECODE :=
# Many tests wait, so there are more workers than cores; a library's threads would only add to them.
test test-all: export OMP_NUM_THREADS := 1

test: venv ## run the tests for daily work: under two minutes on two cores
	@$(VENV)/bin/pytest -n 3 --dist worksteal --hypothesis-profile loop \
	  -m 'smoke or not (sglang or crash or slow or gpu)'

test-all: venv ## run all tests that need no GPU, and measure coverage
	@$(VENV)/bin/pytest -n 3 --dist loadgroup --cov

faults: venv ## inject every fault into real runs and print the matrix (CASE=name: one of them)
	@cd tests && $(abspath $(VENV))/bin/python -m faults $(CASE)

check: venv ## lint, formatting, types, import rules
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

clean: ## remove everything that these targets made
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .hypothesis .import_linter_cache \
	  .mypy_cache .pytest_cache .ruff_cache .coverage*
