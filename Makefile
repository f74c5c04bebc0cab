# Two targets matter: `make train` and `make test`. Each sets up .venv first, once per change of the requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
TESTS_READY := $(VENV)/.installed-for-tests
CORPUS := corpora/default

.PHONY: train test test-all lint format setup

train: setup
	$(BIN)/python -m data.prepare --output $(CORPUS) --vocabulary-size 2048
	$(BIN)/python train.py configs/quickstart.toml --run.resume auto
	$(BIN)/python -m eval.report runs/quickstart

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: lint
	$(BIN)/python -m pytest

lint: $(TESTS_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TESTS_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": run make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about two minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[corpus]'
	touch $(READY)

# The tests also compare with transformers and the evaluation harness.
$(TESTS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,corpus]'
	touch $(TESTS_READY)
