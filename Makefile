# Everything is run from here, and every target prepares what it needs: see `make help`.
# The package is installed in place (editable): Python files are live, and a change under native/ rebuilds the extension.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch
# --oldest: what zpccl and its tests need has the oldest version that setup.cfg allows. Use another VENV for that.
OLDEST ?=
SEEDS ?= 2000
SECONDS ?= 60
# Number of C tests, or of workers under a sanitizer, that run at the same time: they compute more than they wait.
JOBS ?= $(shell nproc)
# More arguments for the tool that a target runs: make test ARGS='-k ring -x'
ARGS ?=

# Python tests of the data plane that also run with an extension compiled for a sanitizer.
ENGINE_TESTS := $(filter-out tests/engine/test_quantiser.py, $(wildcard tests/engine/test_*.py))
ASAN_TESTS ?= tests/engine tests/state tests/test_communicator.py tests/e2e/test_loss.py
TSAN_TESTS ?= $(ENGINE_TESTS) --deselect tests/engine/test_trees.py::test_more_than_the_window \
	tests/state/test_transfer.py tests/e2e/test_loss.py::test_many_reduces_end_when_nobody_is_left

PY := $(VENV)/bin/python
# -qq: errors only, since the warnings do not concern this project.
PIP := $(PY) -m pip install -qq --disable-pip-version-check
PYTEST := $(PY) -m pytest -q
# Most tests wait for processes and timeouts; tests/conftest.py sets how many run at the same time.
SIDE_BY_SIDE := --numprocesses auto --dist worksteal
MAKE_NATIVE := $(MAKE) --silent --no-print-directory --jobs=$(JOBS) -C native
TORCH_INSTALLED := $(VENV)/.$(subst =,-,$(TORCH))
NATIVE := $(wildcard native/*.c native/*.h native/build_native.py)
CHECKED := setup.py zpccl tools examples tests native

# Tests start hundreds of interpreters. With this variable each of them would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

# --- Environment ------------------------------------------------------------------------------------------------------

$(PY):
	$(PYTHON) -m venv $(VENV)

$(VENV)/.requirements: setup.cfg pyproject.toml tools/requirements.py | $(PY)
	$(PY) tools/requirements.py $(OLDEST) secure xxhash cli test > $@.txt
	$(PY) tools/requirements.py examples dev >> $@.txt
	$(PIP) --upgrade pip -r $@.txt
	touch $@

# Has the time at which the build began, so that a file edited during the build is built again.
$(VENV)/.installed: $(VENV)/.requirements setup.py $(NATIVE)
	touch $@.begun
	$(PIP) --no-build-isolation --no-deps --editable .
	mv $@.begun $@

$(TORCH_INSTALLED): $(VENV)/.requirements
	$(PIP) '$(TORCH)' 'torchft>=0.2' parameterized
	touch '$@'

$(VENV)/.fuzz: $(VENV)/.requirements
	$(PIP) 'atheris>=2.3'
	touch $@

deps: $(VENV)/.requirements ## .venv with what the package, its tests and its checks depend on
venv: $(VENV)/.installed ## .venv with zpccl compiled and installed in it

# --- Run --------------------------------------------------------------------------------------------------------------

demo: venv ## train on real text with three peers; one is killed, one joins
	$(PY) examples/demo.py $(ARGS)

sim: venv ## the simulator, on all cores: make sim SEEDS=2000
	$(PY) -m zpccl.sim --seeds $(SEEDS) --jobs 0 $(ARGS)

mutants: venv ## faults put into the protocol, one at a time: each must be caught by the simulator or a unit test
	$(PY) tools/mutate_protocol.py $(ARGS)

model: ## the rules of leadership, searched exhaustively with spin, and each rule broken: ARGS=--deep looks further
	@for program in spin cc; do command -v $$program >/dev/null || { \
		echo "$$program is missing; on Debian or Ubuntu: apt-get install spin gcc" >&2; exit 2; }; done
	$(PYTHON) tools/model/check.py $(ARGS)

bench: venv ## all-reduce times, a table and out/bench_allreduce.json
	mkdir -p out
	$(PY) tools/bench.py allreduce --peers 2 4 --bytes 4KiB 1MiB 64MiB 256MiB --json out/bench_allreduce.json $(ARGS)

# --- Test -------------------------------------------------------------------------------------------------------------

test: venv native-test ## tests in C, and the Python tests that find most for their time: a few minutes
	$(PYTEST) $(SIDE_BY_SIDE) -m 'not torch and not slow and not alone' $(ARGS)

# If ARGS select tests, one of the two runs may have none (exit status 5).
test-all: venv native-test ## every test except those that need torch
	$(PYTEST) $(SIDE_BY_SIDE) -m 'not torch and not alone' $(ARGS) || test $$? -eq 5
	$(PYTEST) -m 'not torch and alone' $(ARGS) || test $$? -eq 5

test-torch: venv $(TORCH_INSTALLED) ## adds torch and torchft to .venv and runs the tests that need it: TORCH=torch==2.13.0 names a version
	$(PYTEST) $(SIDE_BY_SIDE) -m torch $(ARGS)

fuzz: venv $(VENV)/.fuzz ## each target of tests/fuzz under atheris, SECONDS=60 for each
	mkdir -p out/fuzz
	cd tests && for target in messages handshake master; do \
		'$(abspath $(PY))' -m fuzz $$target --seconds $(SECONDS) --directory '$(abspath out/fuzz)' || exit 1; done

native-test: ## tests of the C code
	$(MAKE_NATIVE) test

native-clang: ## the same, compiled by clang, if it is installed
	$(MAKE_NATIVE) clang

native-poll: ## the same, with poll() and pipes in place of epoll: docs/portability.md
	$(MAKE_NATIVE) poll

asan: deps ## tests in C, and of the data plane from Python, under AddressSanitizer and UndefinedBehaviorSanitizer
	$(MAKE_NATIVE) asan
	$(PY) tools/run_sanitized.py address -q -m "not torch" --numprocesses $(JOBS) --dist worksteal $(ASAN_TESTS) $(ARGS)

tsan: deps ## the same under ThreadSanitizer, fewer of them
	$(MAKE_NATIVE) tsan
	$(PY) tools/run_sanitized.py thread -q -m "not torch" --numprocesses $(JOBS) --dist worksteal $(TSAN_TESTS) $(ARGS)

arm64: deps ## tests in C, and of the engine from Python, on 64-bit ARM: needs gcc-aarch64-linux-gnu and qemu-user
	$(MAKE_NATIVE) arm64
	$(PY) tools/run_emulated.py -q tests/engine $(ARGS)

fuzz-native: ## frame parser and connections under libFuzzer, which needs clang; SECONDS=60 for each
	$(MAKE_NATIVE) fuzz SECONDS=$(SECONDS)

# --- Check ------------------------------------------------------------------------------------------------------------

lint: deps ## ruff: rules and format
	$(PY) -m ruff check $(CHECKED)
	$(PY) -m ruff format --check $(CHECKED)

format: deps ## let ruff fix what it can
	$(PY) -m ruff check --fix $(CHECKED)
	$(PY) -m ruff format $(CHECKED)

types: deps ## mypy, strict
	$(PY) -m mypy zpccl tools examples tests

native-strict: ## compile the C code with -Wall -Wextra -Wshadow -Werror
	$(MAKE_NATIVE) strict

wheel: deps ## sdist and wheel in dist/, the wheel tried in an empty environment without a compiler
	@rm -rf dist && mkdir -p build
	$(PY) -m build --no-isolation --outdir dist . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	$(PY) tools/check_wheel.py dist

# --- Clean ------------------------------------------------------------------------------------------------------------

clean: ## remove what was built, but not .venv
	rm -rf build dist out zpccl.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis '$(VENV)/.installed'
	rm -f zpccl/engine/_native*.so
	find zpccl tests tools examples native -name __pycache__ -type d -prune -exec rm -rf {} +
	$(MAKE) -C native clean

.PHONY: help deps venv demo sim mutants model bench test test-all test-torch fuzz fuzz-native native-test native-clang native-poll \
	asan tsan arm64 lint format types native-strict wheel clean
