"""Where the CPU waits for the GPU in an update. Each wait is counted, by its line of code.

The CPU waits if it reads a number of a tensor, makes a tensor whose size depends on such numbers,
or synchronizes. Without a GPU this costs nothing, but a dispatch mode sees it. On a GPU torch
reports it. On a CPU the tests do not see `.cuda()`, `.to(device=...)` and torch.tensor(device=...).
"""

import contextlib
import re
import sys
import traceback
import warnings
from collections import Counter
from unittest import mock

import kernels
import pytest
import torch
from conftest import ON_GPU, ROOT
from deepspeed.accelerator import get_accelerator
from ppo_worker import config, make_batch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ppo
from nanoorz import models

# Operations of ATen that read numbers of a tensor. An index by a mask does, too.
READS = "_local_scalar_dense nonzero masked_select is_nonzero equal repeat_interleave unique2"
# Methods of a tensor that copy it to the CPU.
COPIES = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy}


def is_ours(path) -> bool:
    return path.startswith(f"{ROOT}/") and not re.search("/tests/|/site-packages/", path)


class Watch:
    """found: {line of code: its waits}."""

    def __init__(self):
        self.found = Counter()

    def add(self, what):
        for frame in reversed(traceback.extract_stack()):
            # A user may edit Recipe.token_loss, and read a number in it.
            if (frame.filename, frame.name) == (ppo.__file__, "token_loss"):
                return
            # The kernel that stands in for the GPU's, and the rows before they are copied.
            is_on_cpu = frame.filename == kernels.__file__ or frame.name == "build_rows"
            if is_on_cpu and what != "to":
                return
            if is_ours(frame.filename) or re.search("/(deepspeed|transformers)/", frame.filename):
                self.found[f"{frame.filename}:{frame.lineno} {what}"] += 1
                return

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        kind = type(get_accelerator())
        synchronize = mock.patch.object(kind, "synchronize", lambda *_: self.add("synchronize"))
        for part in (Operations(self.add), Methods(self.add), synchronize):
            self.stack.enter_context(part)
        return self.found

    def __exit__(self, *error):
        self.stack.close()


class Operations(TorchDispatchMode):
    def __init__(self, add):
        super().__init__()
        self.add = add

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if "index" in name and isinstance(args[1], (list, tuple)) else []
        is_mask = any(x is not None and x.dtype == torch.bool for x in indices)
        if name.strip("_") in [x.strip("_") for x in READS.split()] or is_mask:
            self.add(name)
        return function(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    def __init__(self, add):
        super().__init__()
        self.add = add

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_move = function is torch.Tensor.to and any(isinstance(x, torch.device) for x in args)
        is_move = is_move and is_ours(sys._getframe(1).f_code.co_filename)
        if function in COPIES or (is_move and not kwargs.get("non_blocking")):
            self.add(function.__name__)
        return function(*args, **kwargs)


class OnGpu:
    """found: {line of code: its waits}, as torch reports them."""

    def __enter__(self):
        self.found = Counter()
        self.caught = warnings.catch_warnings(record=True)
        self.told = self.caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self.found

    def __exit__(self, *error):
        torch.cuda.set_sync_debug_mode("default")
        self.caught.__exit__(*error)
        for one in self.told:
            if "synchronizing" in str(one.message):
                self.found[f"{one.filename}:{one.lineno}"] += 1


SETTINGS = {
    "as in ORZ": {},
    "with all that is logged": {"variant": ["log_ratio", "log_kl"]},
    "with other losses": {"variant": ["cispo", "entropy_bonus", "kl_loss"]},
    "a row for each sample": {"packing": "alone"},
}
# Waits of a micro-batch that others make. transformers asks whether a row has several samples, to
# make a mask. varlen needs none. DeepSpeed's ZeRO-3 ends each backward pass with a wait, which does
# nothing on a CPU.
ALLOWED = {"sdpa": "/masking_utils.py", "ZeRO-3": "/torch/cuda/streams.py"}


def waits_of_updates(name, stage, setting, folder) -> tuple[Counter, Counter]:
    """The waits of an update of few micro-batches, and of one of more, after two updates."""
    flags = {"bf16": stage > 0, "zero_stage": stage, "gradient_checkpointing": True}
    flags |= {"model": folder, "micro_train_batch_size": 1, "packing_max_len": 64}
    flags |= SETTINGS[setting]
    # As on a GPU.
    can_use_varlen = flags["bf16"] and "packing" not in flags
    cfg = config(attention="varlen" if can_use_varlen else "sdpa", **flags)
    learner = getattr(models, f"make_{name}")(cfg)
    batch = make_batch()
    batch.device = learner.device
    values = batch.per_token["values"].to(batch.device)  # (T,)
    names = ("values", "logprobs", "ref_logprobs", "old_logprobs")
    batch.per_token = dict.fromkeys(names, values)
    ppo.compute_advantages(batch, cfg)
    # As a variant makes them.
    batch.per_token |= dict.fromkeys(("policy_weights", "critic_weights"), torch.ones_like(values))
    loss = getattr(cfg, f"{name}_loss")

    def update(count):
        return ppo.update(learner, loss, batch, list(range(count)), 1e-3, cfg)

    counts = [update(count)[f"{name}_micro_batches"] for count in (16, 6)]
    found = []
    for count in (6, 16):
        with OnGpu() if learner.device.type == "cuda" else Watch() as waits:
            update(count)
        found.append(waits)
    assert counts[0] > counts[1] + 2
    return tuple(found)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["policy", "critic"])
@pytest.mark.parametrize("device", [ON_GPU, "cpu"], indirect=True)
@pytest.mark.engine
def test_no_micro_batch_waits_for_the_gpu(name, stage, setting, device, tiny, process_group):
    few, many = waits_of_updates(name, stage, setting, tiny["model"])
    of_micro_batches = {line for line in many if many[line] > few[line]}
    allowed = [ALLOWED["sdpa"]] if stage == 0 or "packing" in SETTINGS[setting] else []
    allowed += [ALLOWED["ZeRO-3"]] if stage == 3 else []
    for line in of_micro_batches:
        assert any(file in line for file in allowed), line
    of_update = {line: few[line] for line in few if line not in of_micro_batches}
    assert any("/ppo.py:" in line for line in of_update), "join_stats reads the numbers"
    assert sum(of_update.values()) <= 10, of_update
