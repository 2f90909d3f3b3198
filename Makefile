# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Every task of a developer; `make help` lists them. All tools come from .venv, which tools/setup.sh makes.
BUILD ?= build
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
RANKS ?= 2
JOBS ?= $(shell tools/jobs.sh)
CMAKE = $(abspath $(VENV))/bin/cmake
CTEST = $(abspath $(VENV))/bin/ctest
RUFF = $(VENV)/bin/ruff
BUILD_TYPE ?= RelWithDebInfo
CPP_FILES = $(shell git ls-files --cached --others --exclude-standard '*.cc' '*.h' '*.inl' '*.cu' '*.cuh')
PYTHON_FOLDERS = $(wildcard python examples bench tests tools src)

export PATH := $(abspath $(VENV))/bin:$(PATH)

.PHONY: build setup demo test test-cpp test-hosts test-python bench lint tidy format docs wheel asan tsan clean help
.PHONY: bench-comm bench-optimizer bench-startup
.DEFAULT_GOAL := build

build: setup  ## Build the library, the command, the Python module, the examples and the tests
	@test -f $(BUILD)/build.ninja || $(CMAKE) -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) \
	  -DPython3_EXECUTABLE=$(abspath $(PYTHON))
	@$(CMAKE) --build $(BUILD) -j $(JOBS)

setup:  ## Install what is missing: system packages (as root), .venv, torch (TORCH_SPEC=…)
	@VENV=$(VENV) tools/setup.sh

demo: build  ## Train a small GPT on Python source: 2 ranks, ZeRO-3 (DATA=path, RESUME=1, RANKS=n, OUT=folder)
	@PYTHONPATH=$(abspath $(BUILD))/python LAUNCHER=$(abspath $(BUILD))/bin/deeptide PYTHON=$(abspath $(PYTHON)) \
	  DATA="$(DATA)" RESUME="$(RESUME)" RANKS=$(RANKS) OUT="$(OUT)" sh examples/demo.sh

test: test-cpp test-python  ## Build what is needed and run every test that one machine can (test-hosts: the rest)

test-cpp: build
	@$(CTEST) --test-dir $(BUILD) --output-on-failure -LE python -j $(JOBS)

test-python: build
	@if [ -d tests/python ]; then \
	  PYTHONPATH=$(abspath $(BUILD))/python PATH=$(abspath $(BUILD))/bin:$$PATH $(PYTHON) -m pytest -q -n $(JOBS) --dist worksteal \
	    tests/python; \
	else echo "no tests/python here: skipped"; fi

test-hosts: build  ## The launcher over hosts of network namespaces (as root; skipped otherwise)
	@PYTHONPATH=$(abspath $(BUILD))/python PATH=$(abspath $(BUILD))/bin:$$PATH $(PYTHON) -m pytest -q tests/hosts

bench: build  ## Compare with DDP, FSDP2 and DeepSpeed on this machine (ARGS=…; installs them into .venv-bench)
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh --deeptide $(abspath $(BUILD))/python $(ARGS)

bench-comm: build  ## Collectives between ranks of one host, beside Gloo and DeepSpeed's shared memory (ARGS=…)
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target deeptide_comm_bench
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh comm.py --program $(abspath $(BUILD))/bench/deeptide_comm_bench $(ARGS)

bench-optimizer: build  ## The optimizer step beside DeepSpeedCPUAdam, torch and a triad (ARGS=…)
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target deeptide_optimizer_ops
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh optimizer_step.py \
	  --library $(abspath $(BUILD))/bench/libdeeptide_optimizer_ops.so $(ARGS)

bench-startup: build  ## Import, and initialize of a 319 M model (ARGS=…)
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh startup.py --deeptide $(abspath $(BUILD))/python $(ARGS)

lint: setup  ## Check format, layer order and Python style
	@command -v clang-format >/dev/null || { echo "make lint needs clang-format: apt-get install -y clang-format"; exit 1; }
	@clang-format --dry-run -Werror $(CPP_FILES)
	@$(PYTHON) tools/check_includes.py
	@$(RUFF) check $(PYTHON_FOLDERS)
	@$(RUFF) format --check $(PYTHON_FOLDERS)

tidy: build  ## clang-tidy over src (minutes; FILES=… for some)
	@clang-tidy --quiet -p $(BUILD) $(or $(FILES),$(shell git ls-files 'src/*.cc'))

format: setup  ## Rewrite all sources in the house's format
	@clang-format -i $(CPP_FILES)
	@$(RUFF) check --fix --select I $(PYTHON_FOLDERS)
	@$(RUFF) format $(PYTHON_FOLDERS)

docs: build  ## Write docs/config.md and the JSON schema anew from the table of keys
	@$(CMAKE) --build $(BUILD) --target config_docs

wheel: setup  ## Build a wheel against the torch in .venv, into dist/
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PYTHON) -m pip wheel --no-build-isolation --no-deps -w dist .

asan tsan: setup  ## Build with sanitizers and run the tests that suit them: asan = address + undefined, tsan = thread
	@$(CMAKE) --preset $@
	@$(CMAKE) --build --preset $@ -j $(JOBS)
	@$(CTEST) --preset $@ -j $(JOBS)

clean:  ## Remove all builds; .venv stays
	rm -rf build build-* dist

help:  ## Show this list
	@sed -n 's/^\([a-z][a-z -]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{ printf "  make %-16s %s\n", $$1, $$2 }'
