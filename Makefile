# make demo | make lab | make test | make bench | make install | make lint
# There is one environment, .venv. With an NVIDIA GPU it gets the CUDA stack, otherwise the CPU lock, which has the same
# versions.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
LOCK := $(if $(shell command -v nvidia-smi),requirements.txt,requirements-cpu.txt)
export HF_HUB_OFFLINE ?= 1

demo: $(VENV)/.installed
	$(BIN)/accelerate launch --num_machines 1 --num_processes 1 --mixed_precision no --dynamo_backend no train.py
	$(BIN)/python tools/plot.py out/run
	$(BIN)/python tools/demo.py --show out/run

# The flags are quoted as for a shell, which xargs understands.
lab: $(VENV)/.installed
	$(BIN)/python tools/countdown.py out/lab/base
	xargs $(BIN)/accelerate launch --num_machines 1 --num_processes 1 --mixed_precision no --dynamo_backend no train.py \
	--seed 1 --run_dir out/lab/run < out/lab/base/flags.txt
	$(BIN)/python tools/plot.py out/lab/run
	$(BIN)/python tools/compare.py out/lab/run

test: $(VENV)/.installed
	$(BIN)/python -m pytest

bench: $(VENV)/trl/.installed
	$(BIN)/python tools/bench.py

# This adds TRL alone, on top of the same torch and transformers.
$(VENV)/trl/.installed: $(VENV)/.installed
	$(BIN)/python -m venv --without-pip $(VENV)/trl
	echo "$(abspath $(VENV))/lib/python3.11/site-packages" > $(VENV)/trl/lib/python3.11/site-packages/parent.pth
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/trl/lib/python3.11/site-packages trl==1.16.0
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(VENV)/.installed

# The lock is complete, so nothing is resolved (--no-deps). That keeps a CUDA torchvision out of the CPU stack.
# A compilation that was killed leaves a lock for which everybody waits for ever, so torch_extensions starts empty. Then
# DeepSpeed's op is compiled. That does not end by a normal exit: gloo's threads can abort a finalising interpreter.
$(VENV)/.installed: $(LOCK)
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or set PYTHON="; exit 2; }
	@command -v g++ >/dev/null || { echo "error: g++ not found; DeepSpeed compiles one small op with it (Debian: apt install g++)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(findstring cpu,$(LOCK)),--no-deps) -r $(LOCK) || { echo "error: install failed; \
	the CPU build of torch comes from PyTorch's own CPU wheel index: put its address into PIP_EXTRA_INDEX_URL"; exit 2; }
	rm -rf $(VENV)/torch_extensions
	$(BIN)/python -c "import os; from lib import common, models; common.start_distributed(); \
	models.deepspeed.init_distributed(); os._exit(0)" >/dev/null
	touch $@

.PHONY: demo lab test bench lint install
