# Thin on purpose: every target is a line or two; the work is done by helpers and pytest.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: lab test run bench clean

lab: .venv/installed
	$(BIN)/python -m helpers prepare
	$(BIN)/jupyter lab notebooks/00-start-here.ipynb

test: .venv/installed
	$(BIN)/python -m pytest

run: .venv/installed
	$(BIN)/python -m helpers prepare
	$(BIN)/python -m helpers run

bench: .venv/installed
	$(BIN)/python -m tests.bench

clean:
	rm -rf .venv runs

.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"This course needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}: name a newer one, as in  make lab PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^uv==' requirements.lock)"
	$(BIN)/uv pip install --python $(BIN)/python -r requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@
