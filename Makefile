# Thin wrappers over commands that a person can type; CI calls the same targets.
# PYTHON, CXX and VENV may be given: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
CXX ?= c++
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CXX_CHECK := $(CXX) -std=c++17 -march=native -pthread -Wall -Wextra -Werror -fsyntax-only \
    -Iengine/csrc
CXX_SOURCES = $(shell find engine emulation -name '*.cpp')
# Those of engine/model/kernels are for nvcc alone: the simulator does without shared memory.
KERNELS = $(shell find engine emulation -name '*.cu' -not -path '*/model/kernels/*')
KERNEL_SHIM := emulation/cupysim/csrc/cuda_shim.h
CXX_HEADERS = $(shell find engine emulation -name '*.h' -o -name '*.cuh')

.PHONY: setup demo test test-vm e2e check lint types cxx format bench load compare report h200 clean distclean needs

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(MAKE) --no-print-directory needs
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# What cannot be installed by pip, each missing thing in one sentence.
needs:
	@command -v $(PYTHON) > /dev/null || { \
	    echo "Python >= 3.11 is needed, but there is no $(PYTHON):" \
	        "install it (Debian: apt-get install python3), or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python >= 3.11 is needed, but $(PYTHON) is $$($(PYTHON) --version 2>&1):" \
	        "install a newer one and say make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	    echo "Python's venv module is missing: install it" \
	        "(Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo 'static_assert(__cplusplus >= 201703L, "");' | $(CXX) -std=c++17 -x c++ -fsyntax-only - \
	    2> /dev/null || { \
	    echo "A C++17 compiler is needed, but $(CXX) is missing or too old: install one" \
	        "(Debian: apt-get install g++), or say make CXX=..." >&2; exit 1; }

demo: setup
	$(BIN)/blinkbed demo

test: setup
	$(BIN)/python -m pytest

# Two emulated machines on this host, without containers; needs qemu-system-x86.
test-vm: setup
	$(BIN)/python -m pytest tests/vm

# The whole stack in containers, on the best link that this host can do: LINK=shm|vm|rxe names one.
LINK ?= auto
e2e: setup
	$(BIN)/python -m compose.e2e --link $(LINK)

check: lint types cxx

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

cxx:
	@for source in $(CXX_SOURCES); do \
	    echo "$(CXX_CHECK) -x c++ $$source"; $(CXX_CHECK) -x c++ $$source || exit 1; done
	@for kernel in $(KERNELS); do \
	    echo "$(CXX_CHECK) -include $(KERNEL_SHIM) -x c++ $$kernel"; \
	    $(CXX_CHECK) -include $(KERNEL_SHIM) -x c++ $$kernel || exit 1; done
	@for header in $(CXX_HEADERS); do \
	    echo "$(CXX_CHECK) -include $$header"; \
	    $(CXX_CHECK) -include $$header -x c++ /dev/null || exit 1; done

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m loadtests.bench

load: setup
	$(BIN)/python -m loadtests.run

compare: setup
	$(BIN)/blinkbed compare

# On a machine with a CUDA GPU, in about 25 minutes; goes on where it stopped.
h200: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cuda]'
	$(BIN)/python -m loadtests.bench_h200 --out results/h200 all

report: setup
	$(BIN)/blinkbed report

clean:
	rm -rf build dist *.egg-info results
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find engine emulation loadtests tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Also the virtual environment.
distclean: clean
	rm -rf $(VENV)
