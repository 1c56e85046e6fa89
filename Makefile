# Thin on purpose: every target is a line or two; helpers and pytest do the work.
PYTHON ?= python3
BIN := .venv/bin
FIRST := notebooks/00-start-here.ipynb

# Two processes more than there are cores, four at most. The tests of a notebook, or of a file, stay together. The
# slowest tests are listed at the end.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --durations 15 --durations-min 20

# Many container images forbid Python to keep compiled modules: then every process would compile torch, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: lab quick test test-all prove run site bench clean

lab: .venv/installed
	$(BIN)/python -m helpers prepare
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/$(FIRST) $(LAB)

quick: .venv/installed
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not notebooks and not browser and not processes and not slow and not prove"

test: .venv/installed
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not prove"

test-all: test
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m slow

# The tests five times, two of them while a process keeps a core busy; that process always ends with the command. Then
# the lessons' controls, which must fail, with ten seeds.
prove: export TEST_EXAMPLES = 300
prove:
	for run in 1 2 3; do $(MAKE) test || exit; done
	$(BIN)/python -c "while True: pass" & trap "kill $$!" EXIT INT TERM; for run in 4 5; do $(MAKE) test || exit; done
	TEST_SEEDS=10 $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m prove

run: .venv/installed
	$(BIN)/python -m helpers run

site: .venv/installed
	$(BIN)/python -m helpers site

bench: .venv/installed
	$(BIN)/python -m tests.bench

clean:
	rm -rf .venv runs site

# The file is made last, so make repeats an interrupted installation.
.venv/installed: requirements.lock requirements.hashes pyproject.toml stepscope/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"This course needs Python 3.11 or newer, but $(PYTHON) is {v[0]}.{v[1]}. Name a newer one:  make lab PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^uv==' requirements.lock)"
ifdef TORCH_BACKEND
	grep -vE '^(nvidia-[^m]|cuda-|triton)' requirements.lock > .venv/requirements.txt
	$(BIN)/uv pip install --python $(BIN)/python --torch-backend $(TORCH_BACKEND) -r .venv/requirements.txt -c requirements.hashes
else
	$(BIN)/uv pip install --python $(BIN)/python -r requirements.lock -c requirements.hashes
endif
	$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation -e ./stepscope -e .
	@touch $@
