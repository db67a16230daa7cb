# make demo      run the main job here: on a GPU against SDPA; without one, the same kernels interpreted and compiled
# make test      lint, types and the tests that need no GPU
# make test-gpu  the tests that need one
# make compile-matrix  compile every CUDA instantiation for every architecture (half an hour on two cores)
# make bench     the measured table, plot included, under bench/results
#
# Variables: PYTHON (interpreter of the new environment), VENV (its folder), TORCH (pip requirements for torch and
# Triton; empty: what PYTHON already has), JOBS (test processes).

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && n=8; echo $$n)

GPU := $(shell { nvidia-smi -L || rocm-smi --showid; } 2>/dev/null | head -c 1)
HAVE := $(shell cd / && $(PYTHON) -c 'import sys, importlib.util as u; \
	print("yes" if sys.prefix == sys.base_prefix and u.find_spec("torch") and u.find_spec("triton") else "")' 2>/dev/null)

# A torch that is already there is kept. Else: with a GPU, pip's default build; without one, the release that the
# tests run on, in its CPU build if a package index offers it (the default build is several GB of CUDA).
ifeq ($(HAVE),yes)
TORCH ?=
VENV_FLAGS := --system-site-packages
else ifneq ($(GPU),)
TORCH ?= torch
else
TORCH ?= torch==2.13.0 triton==3.6.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
INDEX = $(shell $(PYTHON) -c "import urllib.request as u; u.urlopen('$(CPU_INDEX)/torch/', timeout=5)" 2>/dev/null \
	&& echo --extra-index-url $(CPU_INDEX))
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test test-gpu lint compile-matrix bench clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: lint
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/cpu -q -n $(JOBS) --dist worksteal --durations=10

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ffpa_jit

test-gpu: $(VENV)/.dev
	-$(PIP) install transformers
	$(BIN)/python -m pytest tests/gpu -q --durations=10

compile-matrix: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cpu/test_cuda_kernels.py -q -m matrix -n $(JOBS)

bench: $(VENV)/.dev
	-$(PIP) install matplotlib
	$(BIN)/python bench/bench.py $(BENCH)

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(if $(TORCH),$(PIP) install $(INDEX) $(TORCH))
	$(PIP) install --editable . 'numpy<2.4'  # Triton 3.6's interpreter fails on newer ones
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
