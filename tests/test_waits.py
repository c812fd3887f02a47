"""Where the CPU waits for the GPU in an update: each wait is counted, by its line of our code.

The CPU waits if it reads a number of a tensor. On a GPU torch reports these places. On a CPU the
test watches the methods of a tensor that read numbers.
"""

import sys
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ON_GPU, ROOT
from ppo_worker import config, make_batch
from torch.overrides import TorchFunctionMode

import ppo
from nanoorz import models

# These functions read tensors that are on the CPU.
ON_CPU = ("build_rows", "count_tokens")
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__"}


def is_ours(path) -> bool:
    return Path(path).parent in (ROOT, ROOT / "nanoorz", ROOT / "variants")


class Watch(TorchFunctionMode):
    """found: {(file, function, line): waits}."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        code = frame.f_code
        if is_ours(code.co_filename) and code.co_name not in ON_CPU and function.__name__ in READS:
            self.found[code.co_filename, code.co_name, frame.f_lineno] += 1
        return function(*args, **(kwargs or {}))


def waits_on_gpu(update) -> Counter:
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        update()
    torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in told if is_ours(one.filename) and "synchron" in str(one.message)]
    return Counter((one.filename, one.lineno) for one in waits)


@pytest.mark.parametrize("name", ["policy", "critic"])
@pytest.mark.parametrize("device", [ON_GPU, "cpu"], indirect=True)
@pytest.mark.engine
def test_an_update_waits_once_and_reduces_once(name, device, tiny, process_group):
    """However many micro-batches it has, and however many numbers are logged."""
    logged = {"variant": ["log_ratio", "kl_loss", "entropy_bonus"], "micro_train_batch_size": 1}
    flags = {"model": tiny["model"], "bf16": device.type == "cuda", "zero_stage": 2} | logged
    cfg = config(packing_max_len=64, **flags)
    learner = getattr(models, f"make_{name}")(cfg)
    batch = make_batch()
    batch.device = learner.device
    values = batch.per_token["values"].to(batch.device)  # (T,)
    batch.per_token = dict.fromkeys(("values", "logprobs", "ref_logprobs"), values)
    ppo.compute_advantages(batch, cfg)
    losses_of = getattr(ppo, f"{name}_losses")

    def update():
        return ppo.update(learner, losses_of, batch, batch.all_indices(), 1e-3, cfg)

    assert update()[f"{name}_micro_batches"] > 5
    spy = mock.Mock(wraps=ppo.dist.all_reduce)
    with mock.patch.object(ppo, "dist", mock.Mock(wraps=ppo.dist, all_reduce=spy)):
        if device.type == "cuda":
            waits = waits_on_gpu(update)
        else:
            with Watch() as watch:
                update()
            waits = watch.found
    assert sum(place[0] == ppo.__file__ for place in waits) == 1 and set(waits.values()) == {1}
    assert spy.call_count == 1
