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

quick: .venv/tests
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not notebooks and not browser and not processes and not slow and not prove"

test: .venv/tests
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

site: .venv/tests
	$(BIN)/python -m helpers site

bench: .venv/tests
	$(BIN)/python -m tests.bench

clean:
	rm -rf .venv runs site

# Another build of PyTorch brings its own CUDA, or none, and its files have other sums.
OF_CUDA := nvidia-[^m]|cuda-|triton
OF_TORCH := $(OF_CUDA)|torch==|torchvision==|torchcodec==
OTHER_BUILD := /^($(OF_CUDA))/,/[^\\]$$/d; /^($(OF_TORCH))/,/[^\\]$$/{s/ \\$$//; /--hash/d; }

# The file is made last, so make repeats an interrupted installation.
.venv/installed: requirements.lock pyproject.toml stepscope/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"This course needs Python 3.11 or newer, but $(PYTHON) is {v[0]}.{v[1]}. Name a newer one:  make lab PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep -o '^uv==[^ ]*' requirements.lock)"
ifdef TORCH_BACKEND
	sed -E '$(OTHER_BUILD)' requirements.lock > .venv/requirements.txt
	$(BIN)/uv pip install --python $(BIN)/python --torch-backend $(TORCH_BACKEND) -r .venv/requirements.txt
else
	$(BIN)/uv pip install --python $(BIN)/python -r requirements.lock
endif
	$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation -e ./stepscope -e .
	@touch $@

# What only tests and the site need, in the versions that fit those of the course.
.venv/tests: .venv/installed requirements-test.lock
	grep -vE '^($(OF_TORCH))' requirements-test.lock > .venv/requirements-test.txt
	$(BIN)/uv pip install --python $(BIN)/python -r .venv/requirements-test.txt
	@touch $@
