# make demo | make lab | make check | make test | make test-gpu | make card | make bench | make install | make lint
# STACK=cuda or STACK=cpu says what is installed, in the same versions; unsaid, it is cuda where nvidia-smi answers.
# .venv has this stack. The tests are the CPU's: beside a CUDA stack they have an environment of their own, .venv-cpu.
PYTHON ?= python3.11
STACK ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
STACK := $(STACK)
ifeq ($(filter cuda cpu,$(STACK)),)
$(error STACK=$(STACK): choose cuda or cpu)
endif
VENV := .venv
BIN := $(VENV)/bin
# An environment that has the other stack is made anew: pip takes a CPU build for the CUDA one of the same version.
ifeq ($(STACK),cuda)
INSTALLED := $(VENV)/.installed-cuda
CPU_VENV := .venv-cpu
else
INSTALLED := $(VENV)/.installed
CPU_VENV := $(VENV)
endif
export HF_HUB_OFFLINE ?= 1

demo: $(INSTALLED)
	$(BIN)/accelerate launch --num_machines 1 --num_processes 1 --mixed_precision no --dynamo_backend no train.py
	$(BIN)/python tools/plot.py out/run
	$(BIN)/python tools/base_model.py show out/run

# The flags are quoted as for a shell, which xargs understands.
lab: $(INSTALLED)
	$(BIN)/python tools/base_model.py countdown out/lab/base
	xargs $(BIN)/accelerate launch --num_machines 1 --num_processes 1 --mixed_precision no --dynamo_backend no train.py \
	--seed 1 --run_dir out/lab/run < out/lab/base/flags.txt
	$(BIN)/python tools/plot.py out/lab/run
	$(BIN)/python tools/compare.py out/lab/run

# What to run after an edit: ruff, and all tests that start no engine.
check: $(CPU_VENV)/.installed
	$(CPU_VENV)/bin/ruff check .
	$(CPU_VENV)/bin/ruff format --check .
	$(CPU_VENV)/bin/python -m pytest -m "not engine and not slow and not long and not gpu"

test: $(CPU_VENV)/.installed
	$(CPU_VENV)/bin/python -m pytest

# The tests on a GPU, in parts, with a line for each part; PARTS="kernels runs" runs some of them. Where nvidia-smi finds
# no GPU this ends before anything is installed.
test-gpu: find-gpu $(INSTALLED)
	$(BIN)/python tools/card.py $(or $(PARTS),cycle kernels sampler runs two_cards) --out out/card

find-gpu:
	@[ $(STACK) = cuda ] || { echo "error: nvidia-smi finds no GPU here, and the tests of make test-gpu need one"; exit 2; }

# These tests and all that is measured on a GPU, as a page of docs/cards; PARTS="zero2 lab" runs some of it. Without a GPU
# the shapes are tiny.
card: $(INSTALLED)
	$(BIN)/python tools/card.py $(PARTS)

bench: $(VENV)/trl/.installed
	$(BIN)/python tools/bench.py

# This adds TRL alone, on top of the same torch and transformers.
$(VENV)/trl/.installed: $(INSTALLED)
	$(BIN)/python -m venv --without-pip $(VENV)/trl
	echo "$(abspath $(VENV))/lib/python3.11/site-packages" > $(VENV)/trl/lib/python3.11/site-packages/parent.pth
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/trl/lib/python3.11/site-packages trl==1.16.0
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(INSTALLED)

# The lock is complete, so nothing is resolved (--no-deps). That keeps a CUDA torchvision out of the CPU stack.
# A compilation that was killed leaves a lock for which everybody waits for ever, so torch_extensions starts empty. Then
# DeepSpeed's op is compiled, which only CPUs need: a CUDA stack can be installed where there is no GPU. That does not end
# by a normal exit: gloo's threads can abort a finalising interpreter.
COMPILE = $(@D)/bin/python -c "import os; from lib import common, models; common.start_distributed(); \
	models.deepspeed.init_distributed(); os._exit(0)" >/dev/null
# On a GPU Triton compiles C files that include Python.h.
CAN_COMPILE = @command -v $${CC:-gcc} >/dev/null || { echo "error: $${CC:-gcc} not found; Triton compiles with it (Debian: \
	apt install gcc)"; exit 2; }; $(PYTHON) -c "import os, sysconfig as s; os.stat(s.get_path('include') + '/Python.h')" \
	2>/dev/null || { echo "error: Python.h not found; Triton includes it (Debian: apt install python3.11-dev)"; exit 2; }
.venv/.installed .venv-cpu/.installed: requirements-cpu.txt
.venv/.installed-cuda: requirements.txt
.venv/.installed .venv-cpu/.installed .venv/.installed-cuda:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or set PYTHON="; exit 2; }
	@command -v g++ >/dev/null || { echo "error: g++ not found; DeepSpeed compiles one small op with it (Debian: apt install g++)"; exit 2; }
	$(if $(findstring cpu,$<),,$(CAN_COMPILE))
	$(PYTHON) -m venv $(if $(filter-out $@,$(wildcard $(@D)/.installed*)),--clear) $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet $(if $(findstring cpu,$<),--no-deps) -r $< || { echo "error: install failed; \
	the CPU build of torch comes from PyTorch's own CPU wheel index: put its address into PIP_EXTRA_INDEX_URL"; exit 2; }
	rm -rf $(@D)/torch_extensions
	$(if $(findstring cpu,$<),$(COMPILE))
	touch $@

.PHONY: demo lab check test test-gpu find-gpu card bench lint install
