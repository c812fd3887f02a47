"""On several ranks: layout_worker.py MODEL OUT [SOURCE]

A layout has the name RANKS-STAGE-KIND. Without SOURCE a learner is trained in each layout of this
number of ranks, and steps 3 and 4 are saved in OUT/LAYOUT. With SOURCE step 3 of each of its
layouts is loaded into each layout of this number of ranks, is saved before any update, and goes on
to step 4, in OUT/LAYOUT_LAYOUT. If OUT is `sick`, rank 1's disk fails once during a save.
"""

import os
import resource
import sys
from pathlib import Path

import torch
from conftest import config
from safetensors.torch import save_file

import ckpt
import ppo
from nanoorz import models
from nanoorz.ranks import start_distributed

# {ranks: {kind: its ZeRO stages}}. `critic` is a critic, whose head has a bias of one element.
LAYOUTS = {
    1: {"fp32": [0, 1], "frozen": [0], "critic": [0]},
    2: {"fp32": [1, 2, 3], "offload": [2, 3], "bf16": [2, 3], "frozen": [2], "critic": [1, 3]},
    3: {"fp32": [3], "bf16": [3], "frozen": [3], "critic": [3]},
}

shipped_config = models.engine_config


def engine_config(*inputs) -> dict:
    """Only biases of keys and values stay whole, so that nearly everything is sharded."""
    settings = shipped_config(*inputs)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 40
    return settings


def make_learner(model, stage, kind):
    flags = {"bf16": kind == "bf16", "offload": "optimizer" if kind == "offload" else "none"}
    flags |= {"variant": ["frozen_embedding"]} if kind == "frozen" else {}
    cfg = config(model=model, zero_stage=stage, **flags)
    if kind != "critic":
        return models.make_policy(cfg)
    module = models.critic_module(cfg)
    module.value_head = torch.nn.Linear(69, 1)
    torch.nn.init.ones_(module.value_head.weight)
    torch.nn.init.ones_(module.value_head.bias)
    return models.Learner("critic", module, cfg, 1e-2)


def take_step(learner, k):
    zero = torch.zeros(1)
    batch = ppo.Batch([[k, 1, 2]], [[3, 4, 5, k]], zero, zero, torch.device("cpu"), {}, [])
    rows = ppo.build_rows(batch, [[0]])
    numbers = learner(rows) if learner.name == "critic" else learner(rows, 1.0)[0]  # (4,)
    learner.backward(-numbers.sum(), is_last=True)
    learner.apply_update(1e-2)


def save(folder: Path, learner, step):
    error = ckpt.save(folder, ckpt.RunState(step), {"policy": learner.deepspeed}, keep_last=0)
    assert error is None, error


def save_on_a_sick_disk(folder: Path, policy, rank: int):
    """Steps 3, 4 and 5. For the second, rank 1's disk takes 1,000 bytes a file. Each rank writes
    the error that it got."""
    folder.mkdir(exist_ok=True)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (3, 4, 5):
        if rank == 1 and step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        error = ckpt.save(folder, ckpt.RunState(step), {"policy": policy.deepspeed}, keep_last=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        (folder / f"{step}_{rank}.txt").write_text(str(error))


def family_of(kind):
    """Checkpoints of one family fit each other."""
    return "fp32" if kind == "offload" else kind


def main():
    model, out, *source = sys.argv[1:]
    rank, world, _, _ = start_distributed()
    models.engine_config = engine_config
    # Small files, so that a rank writes several.
    ckpt.FILE_BYTES = 20_000
    if Path(out).name == "sick":
        save_on_a_sick_disk(Path(out), make_learner(model, 3, "fp32"), rank)
        return
    layouts = [(stage, kind) for kind in LAYOUTS[world] for stage in LAYOUTS[world][kind]]
    for stage, kind in layouts:
        name = f"{world}-{stage}-{kind}"
        if not source:
            run = Path(out, name)
            run.mkdir(parents=True, exist_ok=True)
            learner = make_learner(model, stage, kind)
            for k in range(3):
                take_step(learner, k)
            save(run, learner, 3)
            take_step(learner, 3)
            save(run, learner, 4)
            continue
        for origin in sorted(Path(source[0]).iterdir()):
            if family_of(origin.name.split("-")[2]) == family_of(kind):
                run = Path(out, f"{origin.name}_{name}")
                run.mkdir(parents=True, exist_ok=True)
                learner = make_learner(model, stage, kind)
                ckpt.resume(run, origin / "step_000003", {"policy": learner.deepspeed})
                weights = {n: x.clone() for n, x in models.named_weights(learner)}
                if rank == 0:
                    save_file(weights, run / "weights.safetensors")
                save(run, learner, 3)
                take_step(learner, 3)
                save(run, learner, 4)


if __name__ == "__main__":
    main()
    # As in train.py: gloo's threads can abort a finalising interpreter.
    os._exit(0)
