# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Every task of a developer; `make help` lists them. All tools come from .venv, which tools/setup.sh makes.
BUILD ?= build
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
RANKS ?= 2
JOBS ?= $(shell tools/jobs.sh)
# Tests wait for each other's ranks half of their time, those in C++ longer, those over hosts less.
WORKERS ?= $(shell expr 2 \* $(JOBS))
PROGRAMS ?= $(shell expr 3 \* $(JOBS))
HOST_WORKERS ?= $(shell expr 3 \* $(JOBS) / 2)
PRESET ?= dev
UNITY ?= ON
CMAKE = $(abspath $(VENV))/bin/cmake
CTEST = $(abspath $(VENV))/bin/ctest $(CTEST_ARGS)
RUFF = $(VENV)/bin/ruff
SETUP = @VENV=$(VENV) tools/setup.sh
CPP_FILES = $(shell git ls-files --cached --others --exclude-standard '*.cc' '*.h' '*.inl' '*.cu' '*.cuh')
PYTHON_FOLDERS = $(wildcard python examples bench tests tools src)

export PATH := $(abspath $(VENV))/bin:$(PATH)
# setup.sh installs packages without their bytecode: hundreds of short processes would compile it again each time.
export PYTHONPYCACHEPREFIX ?= $(abspath $(BUILD))/bytecode
export PYTHONDONTWRITEBYTECODE =
# Without these ccache compiles anew whatever uses a precompiled header.
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
# ccache compiles what it lacks at once and does not preprocess it first, which takes half a second per unit. In return, an
# edited comment in a header compiles its units anew.
export CCACHE_DEPEND ?= 1
export NINJA_STATUS ?= [%f/%t, %p, %W left] 

.PHONY: build build-all examples configure configure-all setup demo demo-large test test-cpp test-ends test-kills test-deepspeed-units gpu-first-ten-minutes test-gpu test-hosts test-peers test-python mutations fuzz fuzz-files bench lint tidy format docs
.PHONY: wheel test-wheel wheel-deepspeed bundle test-bundle asan tsan clean help bench-axes bench-bubble bench-tensor bench-scale bench-builds bench-checkpoint bench-comm bench-less bench-observing bench-optimizer bench-startup bench-swap bench-offload bench-largest bench-gpu bench-link bench-hosts bench-scripts
.DEFAULT_GOAL := build

build: configure  ## Build the library, the Python module and the command
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target deeptide_product

examples: configure  ## Build the C++ examples, into build/examples
	@$(CMAKE) -B $(BUILD) -DDEEPTIDE_EXAMPLES=ON >/dev/null
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target quickstart gpt

build-all: configure-all  ## Build that, the examples and the tests
	@$(CMAKE) --build $(BUILD) -j $(JOBS)

# The first configuration has no tests and no examples, so that it needs none of their packages; it is changed in place
# when they are wanted, and what was built stays.
configure: setup
	@test -f $(BUILD)/build.ninja || $(MAKE) --no-print-directory reconfigure TESTS=OFF

configure-all: setup-test
	@grep -qs '^DEEPTIDE_TESTS:BOOL=ON' $(BUILD)/CMakeCache.txt && test -f $(BUILD)/build.ninja \
	  || $(MAKE) --no-print-directory reconfigure TESTS=ON

.PHONY: reconfigure setup-test setup-hosts setup-lint setup-wheel setup-clang
reconfigure:
	@echo "configure: $(BUILD), preset $(PRESET)"
	@$(CMAKE) --preset $(PRESET) -B $(BUILD) -DPython3_EXECUTABLE=$(abspath $(PYTHON)) -DDEEPTIDE_UNITY=$(UNITY) \
	  -DDEEPTIDE_TESTS=$(TESTS) -DDEEPTIDE_EXAMPLES=$(TESTS)

setup:  ## Install what building lacks: system packages (as root), .venv, torch (TORCH_SPEC=…)
	$(SETUP) build
setup-test:
	$(SETUP) build test
setup-hosts:
	$(SETUP) build test hosts
setup-lint:
	$(SETUP) lint
setup-wheel:
	$(SETUP) build wheel
setup-clang:
	$(SETUP) build test clang

demo: build  ## Train a small GPT on Python source: 2 ranks, ZeRO-3 (DATA=path, RESUME=1, RANKS=n, OUT=folder)
	@PYTHONPATH=$(abspath $(BUILD))/python LAUNCHER=$(abspath $(BUILD))/bin/deeptide PYTHON=$(abspath $(PYTHON)) \
	  DATA="$(DATA)" RESUME="$(RESUME)" RANKS=$(RANKS) OUT="$(OUT)" sh examples/demo.sh

demo-large: build  ## Train a GPT of 1 B parameters with all of its state in files (SIZE=3B, STEPS=n, FILES=folder, RANKS=n)
	@PYTHONPATH=$(abspath $(BUILD))/python LAUNCHER=$(abspath $(BUILD))/bin/deeptide PYTHON=$(abspath $(PYTHON)) \
	  SIZE=$(SIZE) STEPS=$(STEPS) FILES="$(FILES)" RANKS=$(RANKS) sh examples/demo_large.sh

test: test-cpp test-python  ## Build what is needed and run the tests that one machine can (THOROUGH=1: as CI, 2: all cases; test-hosts: the rest)

test-cpp: build-all
	@$(CTEST) --test-dir $(BUILD) --output-on-failure -LE '$(if $(THOROUGH),python,python|slow)' -j $(PROGRAMS)

test-python: build-all
	@if [ -d tests/python ]; then \
	  $(if $(THOROUGH),,TURN=$$(tools/turns.py turn)) PYTHONPATH=$(abspath $(BUILD))/python PATH=$(abspath $(BUILD))/bin:$$PATH $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal \
	    tests/python; \
	else echo "no tests/python here: skipped"; fi

RUNS ?= 17
test-ends: build setup-test  ## Scripts that just end, in 30 ways, RUNS=17 times each: 500 short jobs beside each other
	@PYTHONPATH=$(abspath $(BUILD))/python PATH=$(abspath $(BUILD))/bin:$$PATH RUNS=$(RUNS) $(PYTHON) -m pytest -q \
	  -n $(JOBS) tests/python/programs/test_ends.py

KILLS ?= 100
test-kills: build setup-test  ## Kill ranks at random moments of saves beside training, KILLS=100 times: 4 to 20 minutes
	@PYTHONPATH=$(abspath $(BUILD))/python PATH=$(abspath $(BUILD))/bin:$$PATH KILLS=$(KILLS) $(PYTHON) -m pytest -q \
	  tests/python/checkpoint/test_async_saves.py::test_kills_at_random_moments_lose_no_checkpoint

test-hosts: setup-hosts build  ## The launcher over hosts of network namespaces (as root; skipped otherwise)
	@PYTHONPATH=$(abspath $(BUILD))/python PATH=$(abspath $(BUILD))/bin:$$PATH $(PYTHON) -m pytest -q -n $(HOST_WORKERS) --dist worksteal \
	  tests/hosts

test-gpu: build-all  ## What a GPU can prove: kernels, and the accelerator's tests on CUDA, ranks over NCCL, or Gloo where they share one
	@$(PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "test-gpu: torch finds no GPU here")'
	@PYTHONPATH=$(abspath $(BUILD))/python PATH=$(abspath $(BUILD))/bin:$$PATH DEEPTIDE_TEST_ACCELERATOR=cuda THOROUGH=1 \
	  $(PYTHON) -m pytest -q -rs -n 8 --dist worksteal \
	  $(patsubst %,tests/python/accelerator/%_on_accelerator.py,test test_like_a_gpu \
	    $(addprefix offload/test_,offload offload_param placement twin_flow))
	@$(CTEST) --test-dir $(BUILD) --output-on-failure -L gpu

# Alone with a Python that has torch: no setup, which would look for a network. ARGS=--built, --only facts smoke, …
gpu-first-ten-minutes:  ## Facts, build, kernels, smoke, speed and tests on a GPU, a line each, in OUT=runs/… (PYTHON=python3, ARGS=…)
	@$(PYTHON) tools/gpu/first_ten_minutes.py $(if $(OUT),--out $(OUT)) $(ARGS)

test-peers: setup-test build  ## Scripts of Trainer, Accelerate, PEFT, TRL and Lightning, beside plain torch; DeepSpeed (ARGS=…)
	@PYTHONPATH=$(abspath $(BUILD))/python PATH=$(abspath $(BUILD))/bin:$$PATH VENV=$(VENV) tests/peers/run.sh \
	  -n $(JOBS) --dist loadfile $(ARGS)

mutations: build setup-test  ## Put a dozen deliberate faults into a copy, one at a time, and show which tests notice (ARGS=…)
	@$(PYTHON) tools/mutations/run.py --build $(abspath $(BUILD)) $(ARGS)

# DIR: a checkout of DeepSpeed without its folder `deepspeed`; PYTHON: one with pytest 7.2 to 8.3, hjson and py-cpuinfo.
MOST ?= 5
test-deepspeed-units: build  ## DeepSpeed's own unit tests on Deeptide under its name (DIR=…, PYTHON=…, FILES="…", MOST=cases per test)
	@PYTHONPATH=$(abspath $(BUILD))/python PATH=$(abspath $(BUILD))/bin:$$PATH MOST=$(MOST) $(PYTHON) \
	  tests/deepspeed/run_units.py $(DIR) $(FILES)

READER_SECONDS ?= 60
fuzz-files: sanitize-asan  ## Fuzz the readers of safetensors, manifests and pickles (READER_SECONDS=60 each)
	@$(CMAKE) --preset asan -DDEEPTIDE_FUZZ_SECONDS=$(READER_SECONDS) >/dev/null
	@$(CTEST) --test-dir build-asan --output-on-failure -L fuzz

# Programs of user actions on the engine and on plain torch: docs/testing.md. ARGS: --seed 7, --program file.json, …
FUZZ_SECONDS ?= 3600
fuzz: configure-all build  ## Compare random programs with plain torch (FUZZ_SECONDS=3600, ARGS=…)
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target deeptide_simulated
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) tests/fuzz --seconds $(FUZZ_SECONDS) --jobs $(JOBS) $(ARGS)

bench: build  ## Compare with DDP, FSDP2 and DeepSpeed on this machine (ARGS=…; installs them into .venv-bench)
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh --deeptide $(abspath $(BUILD))/python $(ARGS)

bench-builds: build  ## Steps of this build and of an older one in turns (OLD=its folder build/python, ARGS=…)
	@$(PYTHON) bench builds --old $(abspath $(OLD)) --deeptide $(abspath $(BUILD))/python $(ARGS)

bench-comm: build  ## Collectives between ranks of one host, beside Gloo and DeepSpeed's shared memory (ARGS=…)
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target deeptide_comm_bench
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh comm --program $(abspath $(BUILD))/bench/deeptide_comm_bench $(ARGS)

bench-optimizer: build  ## The optimizer step beside DeepSpeedCPUAdam, torch and a triad (ARGS=…)
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target deeptide_optimizer_ops
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh optimizer_step \
	  --library $(abspath $(BUILD))/bench/libdeeptide_optimizer_ops.so $(ARGS)

bench-offload: build  ## Steps with states in memory, in files, and in both (ARGS=--folder=…)
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) bench offload $(ARGS)

bench-largest: build  ## The largest model that trains in 20 GiB, beside DeepSpeed, as root (ARGS=…)
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh largest --deeptide $(abspath $(BUILD))/python $(ARGS)

bench-swap: build  ## Optimizer states between files and memory, beside fio (ARGS=--folder=…)
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target deeptide_swap_bench
	@$(PYTHON) bench swap --program $(abspath $(BUILD))/bench/deeptide_swap_bench $(ARGS)

bench-checkpoint: build  ## Saves, loads, exports and imports beside fio, torch.save, DCP and DeepSpeed (ARGS=--folder=…)
	@PYTHONPATH=$(abspath $(BUILD))/python PYTHON=$(abspath $(PYTHON)) bench/run.sh checkpoint $(ARGS)

bench-link: build  ## Steps of Adam and of 1-bit Adam over a link of 1 Gbit/s, as root (ARGS=…)
	@$(PYTHON) bench slow_link --deeptide $(abspath $(BUILD))/python $(ARGS)

bench-gpu: build  ## Models of the size of a GPU beside plain torch, FSDP2 and DeepSpeed where they are (ARGS=…)
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) bench gpu $(ARGS)

bench-hosts: build  ## Steps over several hosts at 1 and 8 Gbit/s beside DDP, FSDP2 and DeepSpeed, as root (ARGS=…)
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh hosts --deeptide $(abspath $(BUILD))/python $(ARGS)

bench-scripts: build  ## A Trainer script here, under DDP, FSDP2 and DeepSpeed, beside our own loop (ARGS=…)
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh scripts --deeptide $(abspath $(BUILD))/python $(ARGS)

bench-observing: build  ## Steps with and without each observer (breakdowns, monitors, timeline), interleaved (ARGS=…)
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) bench observing $(ARGS)

bench-axes: build  ## A GPT at two pipeline stages beside torch.distributed.pipelining and DeepSpeed, interleaved (ARGS=…)
	@PYTHONPATH=$(abspath $(BUILD))/python PYTHON=$(abspath $(PYTHON)) bench/run.sh axes $(ARGS)

bench-bubble: build  ## Bubbles of stages that sleep beside those of the formula, for each schedule (ARGS=…)
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) bench bubble $(ARGS)

bench-tensor: build  ## A Llama that two ranks share beside torch's tensor.parallel and DeepSpeed's AutoTP, interleaved (ARGS=…)
	@PYTHONPATH=$(abspath $(BUILD))/python PYTHON=$(abspath $(PYTHON)) bench/run.sh shared_layers $(ARGS)

bench-scale: build  ## The forecast of a step beside steps that ran, over small meshes (ARGS=…)
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) bench scale $(ARGS)

bench-less: build  ## Less work: sparse attention and output, the transformer layer, schedules to a held-out loss (ARGS=…)
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) bench less_operators $(ARGS)
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) bench sparse_output
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) bench sparse_bert
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) bench less_step
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) bench less_training --seeds 5 --steps 150 --every 25 --width 128 --context 128

bench-startup: build  ## Import, and initialize of a 319 M model (ARGS=…)
	@PYTHON=$(abspath $(PYTHON)) bench/run.sh startup --deeptide $(abspath $(BUILD))/python $(ARGS)

lint: setup-lint  ## Check format, layer order, Python style and Python types
	@clang-format --dry-run -Werror $(CPP_FILES)
	@$(PYTHON) tools/check_includes.py
	@$(PYTHON) tools/check_links.py
	@$(RUFF) check $(PYTHON_FOLDERS)
	@$(RUFF) format --check $(PYTHON_FOLDERS)
	@$(PYTHON) -m mypy

tidy: setup-clang configure-all  ## clang-tidy over src (FILES=… for some; CHANGED=1 for what changed; TIDY_SECONDS=…)
	@$(PYTHON) tools/tidy.py --jobs $(JOBS) $(and $(CHANGED),--changed) \
	  $(and $(TIDY_SECONDS),--seconds $(TIDY_SECONDS)) $(BUILD) $(FILES)

format: setup-lint  ## Rewrite all sources in the house's format
	@clang-format -i $(CPP_FILES)
	@$(RUFF) check --fix --select I $(PYTHON_FOLDERS)
	@$(RUFF) format $(PYTHON_FOLDERS)

docs: configure-all  ## Write docs/config.md, its JSON schema and docs/from-deepspeed.md anew from their tables
	@$(CMAKE) --build $(BUILD) --target config_docs
	@$(PYTHON) tools/from_deepspeed.py

# c++ as CMake finds it, where the backend would take g++: then a compiler cache recognises what was built before.
wheel: setup-wheel  ## Build an sdist, and from it a wheel against the torch in .venv, into dist/
	@rm -rf build-sdist dist/deeptide-*.tar.gz && mkdir build-sdist
	@$(PYTHON) -c "from scikit_build_core.build import build_sdist; build_sdist('dist')" >build-sdist/log
	@tar -xzf dist/deeptide-*.tar.gz -C build-sdist --strip-components 1
	@ln -s $(abspath $(VENV)) build-sdist/.venv  # torch lies as it does from $(BUILD): a compiler cache has it all
	@CXX="$${CXX:-c++}" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) build-sdist/.venv/bin/python -m pip wheel \
	  --no-build-isolation --no-deps -w dist ./build-sdist

test-wheel: setup-test wheel  ## Install the wheel beside torch in an environment of its own; check what it needs, train with it
	@$(PYTHON) tests/wheel/wheel_test.py "$$(ls -t dist/deeptide-*.whl | head -n 1)"

wheel-deepspeed: build  ## Build the wheel that shows the interface under the name of deepspeed, into dist/
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) -m deeptide.as_deepspeed --wheel dist

bundle: setup-test  ## Write dist/deeptide.tar.xz: builds and tests itself where there is a compiler and torch, but no network
	@tools/bundle.sh dist/deeptide.tar.xz

# CI compiles the command alone (CUT=1): the bundle's paths are its own, so that a compiler cache knows nothing of it.
test-bundle: bundle  ## Unpack that archive elsewhere, build it, run what it built (CUT=1: the command alone)
	@$(PYTHON) tests/bundle/bundle_test.py dist/deeptide.tar.xz $(if $(CUT),,--whole)

# LAYERS="comm engine": the tests of these alone. A layer without such tests is none's fault.
LABELS_asan = unit ranks
LABELS_tsan = ranks
OF_LAYERS = $(if $(LAYERS),-R '^($(shell echo $(LAYERS) | tr ' ' '|'))(_|$$)' --no-tests=ignore)

asan: sanitize-asan  ## Run unit tests and ranks as threads under the address and undefined-behaviour sanitizers
	@$(CTEST) --preset asan -j $(WORKERS) $(OF_LAYERS)
	@$(CTEST) --preset asan-ranks -j $(WORKERS) $(OF_LAYERS)

tsan: sanitize-tsan  ## Run ranks as threads under the thread sanitizer
	@$(CTEST) --preset tsan -j $(WORKERS) $(OF_LAYERS)

.PHONY: sanitize-asan sanitize-tsan
sanitize-asan: setup-clang
sanitize-asan sanitize-tsan: sanitize-%: setup-test
	@$(CMAKE) --preset $* -DPython3_EXECUTABLE=$(abspath $(PYTHON)) -DDEEPTIDE_UNITY=$(UNITY)
	@$(CMAKE) --build --preset $* -j $(JOBS) $(if $(LAYERS),--target $(foreach label,$(LABELS_$*),$(addprefix deeptide_tests_$(label)_of_,$(LAYERS))))

clean:  ## Remove all builds; .venv stays
	rm -rf build build-* dist

help:  ## Show this list
	@sed -n 's/^\([a-z][a-z -]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{ printf "  make %-16s %s\n", $$1, $$2 }'
