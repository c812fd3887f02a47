# `make` prints the targets: the lines below with two #.
# STACK=cuda or STACK=cpu chooses the packages that .venv gets. Both stacks have the same versions. The default is cuda if
# nvidia-smi finds a GPU, else cpu. `make check` and `make test` run on the CPU. If .venv has the CUDA stack, they use a
# second environment, .venv-cpu.
# PYTHON is the first of these three that runs. `command -v` would also find a shim of pyenv that leads to no Python.
ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3.12 python3.13; do $$python -c "" 2>/dev/null && echo $$python && break; done)
endif
STACK ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
STACK := $(STACK)
ifeq ($(filter cuda cpu,$(STACK)),)
$(error STACK=$(STACK): choose cuda or cpu)
endif
VENV := .venv
BIN := $(VENV)/bin
# If an environment has the other stack, it is made anew, because pip would keep a CPU build of the same version.
ifeq ($(STACK),cuda)
INSTALLED := $(VENV)/.installed-cuda
CPU_VENV := .venv-cpu
else
INSTALLED := $(VENV)/.installed
CPU_VENV := $(VENV)
endif
export HF_HUB_OFFLINE ?= 1

help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1: /p' $(firstword $(MAKEFILE_LIST))

demo: $(INSTALLED) ## train a tiny model to add two numbers (about 3 minutes on 2 CPU cores)
	$(BIN)/python train.py
	$(BIN)/python tools/plot.py out/run
	$(BIN)/python tools/compare.py out/run

# xargs removes the quotes that flags.txt has around a path with a space.
lab: $(INSTALLED) ## train the model of the laboratory on Countdown problems (3 to 6 minutes)
	$(BIN)/python tools/base_model.py countdown out/lab/base
	xargs $(BIN)/python train.py --seed 1 --run_dir out/lab/run < out/lab/base/flags.txt
	$(BIN)/python tools/plot.py out/lab/run
	$(BIN)/python tools/compare.py out/lab/run

chain: $(INSTALLED) ## train the model of the chains, in a task with turns (about 2 minutes)
	$(BIN)/python tools/base_model.py chain out/chain/base
	xargs $(BIN)/python train.py --seed 1 --run_dir out/chain/run < out/chain/base/flags.txt
	$(BIN)/python tools/plot.py out/chain/run
	$(BIN)/python tools/compare.py out/chain/run

# Run `make check` after an edit. It runs ruff and all tests without the mark `engine`.
check: $(CPU_VENV)/.installed ## run ruff and the tests without an engine (about 2 minutes)
	$(CPU_VENV)/bin/ruff check .
	$(CPU_VENV)/bin/ruff format --check .
	$(CPU_VENV)/bin/python -m pytest -m "not engine and not slow and not gpu"

test: $(CPU_VENV)/.installed ## run the tests on the CPU (about 8 minutes)
	$(CPU_VENV)/bin/python -m pytest

test-slow: $(CPU_VENV)/.installed ## run the slow tests (about 10 minutes)
	$(CPU_VENV)/bin/python -m pytest -m slow

# tools/bench.py also runs if a test has failed. Then the target fails at the end.
card: $(INSTALLED) ## run the tests that need a GPU and all measurements, and write a page of docs/cards
	$(BIN)/python -m pytest -n 0 -vv -m gpu tests/test_gpu.py; code=$$?; $(BIN)/python tools/bench.py --page && exit $$code

bench: $(INSTALLED) ## measure the speed of this machine
	$(BIN)/python tools/bench.py

lint: $(INSTALLED) ## run ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(INSTALLED) ## install the packages into .venv

PIP = $(@D)/bin/python -m pip
# requirements-cpu.txt names all packages, so pip resolves nothing (--no-deps). Otherwise pip would install a torchvision for
# CUDA into the CPU stack. torch comes first, in one of three ways. PyPI has no CPU build of it, so pip finds the CPU build
# only where an index or a folder with it is configured. uv knows PyTorch's own index of CPU builds.
define INSTALL_CPU
@echo "pip installs torch for CPUs"
@$(PIP) install --quiet --no-deps "$$(grep '^torch==' $<)" || { \
	echo "pip cannot get it; uv looks for it in PyTorch's own index"; \
	$(PIP) install --quiet uv && \
	$(@D)/bin/python -m uv pip install --quiet --python $(@D)/bin/python --torch-backend cpu --no-deps "$$(grep '^torch==' $<)"; } || { \
	echo "uv cannot get it; pip installs PyPI's torch for CUDA, which runs on CPUs too (6.0 GB in place of 2.9)"; \
	$(PIP) install --quiet --no-deps -r requirements-torch.txt; } || $(FAILED)
@echo "pip installs the other packages"
@grep -v '^torch==' $< | $(PIP) install --quiet --no-deps -r /dev/stdin || $(FAILED)
endef
FAILED = { echo "error: the installation failed; the lines above say why; run the same command to try again"; exit 2; }
# On a GPU Triton compiles C files. These files include Python.h.
CAN_COMPILE = @command -v $${CC:-gcc} >/dev/null || { echo "error: $${CC:-gcc} not found; Triton compiles with it (Debian: \
	apt install gcc)"; exit 2; }; "$(PYTHON)" -c "import os, sysconfig as s; os.stat(s.get_path('include') + '/Python.h')" \
	2>/dev/null || { echo "error: Python.h not found; Triton includes it (Debian: apt install python3-dev)"; exit 2; }
.venv/.installed .venv-cpu/.installed: requirements-cpu.txt
.venv/.installed-cuda: requirements.txt
.venv/.installed .venv-cpu/.installed .venv/.installed-cuda:
	@"$(PYTHON)" -c "import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))" 2>/dev/null || { \
	echo "error: no Python 3.11, 3.12 or 3.13 runs here; install one, or name it: make PYTHON=/path/to/python3.11"; exit 2; }
	$(if $(findstring cpu,$<),,$(CAN_COMPILE))
	"$(PYTHON)" -m venv $(if $(filter-out $@,$(wildcard $(@D)/.installed*)),--clear) $(@D)
	@$(PIP) install --quiet --upgrade pip || $(FAILED)
	$(if $(findstring cpu,$<),$(INSTALL_CPU),$(PIP) install --quiet -r $< || $(FAILED))
	touch $@

.PHONY: help demo lab chain check test test-slow card bench lint install
