"""vLLM's model runner for GPUs, on a CPU, for test_rollout.py: `gpu_runner.py OUT FLAGS`.

This runner makes the batches and draws the tokens with Triton kernels. Triton's interpreter runs
the kernels here. The file OUT is like the file of rollout_worker.py.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from types import SimpleNamespace

import torch
from conftest import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoorz.ranks import gather

# `make test-slow` installs Triton here. In site-packages other code would find Triton too.
TRITON = f"{sys.prefix}/triton"
SETTINGS = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "OMP_NUM_THREADS": "1"}
SETTINGS |= {"PYTHONPATH": f"{ROOT}:{TRITON}"}
POISON = 0x5A
STORAGES = []  # the memory that sleep at level 2 loses


class Pool(TorchDispatchMode):
    """Collects the memory of the tensors that are made inside of it, as vLLM's pool on a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tree_leaves(made) if isinstance(tensor, torch.Tensor)]
        STORAGES.extend(tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
        return made


def lose(level: int) -> None:
    assert level == 2
    for storage in STORAGES:
        storage.fill_(POISON)


def is_lost(model) -> bool:
    return all((p.view(torch.uint8) == POISON).all().item() for p in model.parameters())


def act_as_on_a_gpu() -> None:
    """Replaces what vLLM does on CPUs alone."""
    # vLLM's own module refuses a Triton without a backend for CPUs.
    names = {"HAS_TRITON": True, "TritonPlaceholder": None, "TritonLanguagePlaceholder": None}
    sys.modules["vllm.triton_utils.importing"] = SimpleNamespace(**names)
    import rollout  # noqa: F401, I001  vLLM reads the settings of rollout.py
    import vllm._custom_ops
    from triton.runtime import interpreter
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_triton import _apply_topp_split
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.sample import sampler

    # Triton would prepare its language again for each call inside of a kernel, and check each sum
    # for an overflow. Both would take two thirds of the time.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    prepare = functools.cache(interpreter._patch_lang)
    interpreter.InterpretedFunction.__call__ = lambda function, *words, **names: (
        prepare(function.fn) and function.rewrite()(*words, **names)
    )

    # vLLM has chosen asynchronous scheduling. The platform of the CPU would turn it off.
    check = current_platform.check_and_update_config

    def check_but_keep_scheduling(vllm_config):
        chosen = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen

    current_platform.check_and_update_config = check_but_keep_scheduling

    # vLLM uses these kernels for at most 64 samples. The interpreter cannot run its other kernel.
    def apply_top_p(logits, top_k, top_p):
        if top_p is not None:
            _apply_topp_split(logits, None, top_p, -torch.inf, num_sm=1)
        return logits

    sampler.apply_top_k_top_p = apply_top_p
    # Linear layers keep their weights as parameters, and not in a packed form.
    vllm._custom_ops._supports_onednn = False
    # Ranks use torch.distributed. vLLM's shared memory has the same name in all runs of a machine.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    # The worker sleeps as on a GPU. vLLM keeps all memory but that of these three tags.
    CPUWorker._maybe_get_memory_pool_context = lambda self, tag: (
        Pool() if tag in ("weights", "kv_cache", "workspace") else contextlib.nullcontext()
    )
    CPUWorker.sleep_mode_backend = SimpleNamespace(suspend=lose, resume=lambda tags: None)
    del CPUWorker.sleep, CPUWorker.wake_up


def find(rollout, policy, problems) -> dict:
    import rollout_worker as worker

    from rollout import keeps_weights_as_loaded

    sampler = rollout.sampler
    requests = worker.mixed_requests(problems[:2], longest=8)
    if sampler.cfg.tensor_parallel == 1:
        found = worker.of_sampler(rollout, policy, requests, problems[:1])
    else:
        found = {"together": worker.generated(sampler, requests, with_logprobs=True)}
    sampler.sync(worker.models.named_weights(policy))
    longer = [dataclasses.replace(x, max_tokens=20, top_p=1.0) for x in requests]
    found["turns"] = worker.draw_turns(sampler, longer)
    core = sampler.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    found["runner"] = [kind.__module__ for kind in type(runner).__mro__]
    found["scheduling"] = [core.async_scheduling, core.batch_queue_size]
    # vLLM compares the free memory before and after. On a CPU other programs change it.
    torch.accelerator.get_memory_info = lambda: (0, 0)
    sampler.gpu = True
    sampler.sleep()
    found["lost"] = sum(gather(sampler.llm.apply_model(is_lost)), [])
    sampler.sync(worker.models.named_weights(policy))
    found["after sleep"] = worker.generated(sampler, requests, with_logprobs=True)
    found["as loaded"] = sampler.llm.apply_model(keeps_weights_as_loaded)
    named = worker.models.named_weights(policy)
    try:
        sampler.sync(pair for pair in named if pair[0] != "model.norm.weight")
    except worker.UserError as error:
        found["lacking"] = str(error)
    return found


if __name__ == "__main__":
    if "vllm" in sys.modules:
        # This process is a fork of forks.py, which has imported vLLM without Triton.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    act_as_on_a_gpu()
    import rollout_worker

    rollout_worker.main(find, *sys.argv[1:])
