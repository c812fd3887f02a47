"""On several ranks: reshard_worker.py MODEL OUT [SOURCE]

Without SOURCE it saves a policy at each ZeRO stage after three steps, as OUT/<stage>/step_000003.
Then rank 1's disk fails once, while step 4 is saved in OUT.sick: each rank writes the error it got.
With SOURCE it loads each resharded checkpoint of SOURCE into each stage, and saves what it loaded
at once, untouched, as OUT/<from>to<stage>.
"""

import os
import resource
import sys
from pathlib import Path

import torch
from conftest import config
from transformers import AutoModelForCausalLM

import ckpt
import ppo
from nanoorz import models, reshard
from nanoorz.families import Plain
from nanoorz.ranks import start_distributed

shipped_config = models.engine_config


def engine_config(*inputs) -> dict:
    """Only biases of keys and values stay whole, so that nearly everything is sharded."""
    settings = shipped_config(*inputs)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 40
    return settings


def take_steps(policy):
    device = torch.device("cpu")
    for k in range(3):
        zero = torch.zeros(1)
        batch = ppo.Batch([[k, 1, 2]], [[3, 4, 5, k]], zero, zero, device, {}, [])
        logprobs, _ = policy(ppo.build_rows(batch, [[0]]), 1.0)  # (4,)
        policy.backward(-logprobs.sum(), is_last=True)
        policy.apply_update(1e-2)


def save(folder: Path, engine, cfg, world: int, step: int = 3):
    state = ckpt.RunState(step, step, world, {"zero_stage": cfg.zero_stage, "bf16": cfg.bf16})
    return ckpt.save(folder, state, {"policy": engine.deepspeed}, [], keep_last=0)


def save_on_a_sick_disk(folder: Path, engine, cfg, rank: int, world: int):
    """Steps 3, 4 and 5. For the second, rank 1's disk takes 1,000 bytes a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (3, 4, 5):
        if rank == 1 and step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        error = save(folder, engine, cfg, world, step)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        (folder / f"{step}_{rank}.txt").write_text(str(error))


def load_each(source: Path, out: Path, cfg, world: int):
    for origin in sorted(source.iterdir()):
        # A run in bf16 does not go on in fp32.
        if (origin.name in "01") == (cfg.zero_stage < 2):
            engine = models.make_policy(cfg)
            reshard.load(origin / "step_000003" / "universal", {"policy": engine.deepspeed})
            error = save(out / f"{origin.name}to{cfg.zero_stage}", engine, cfg, world)
            assert error is None, error


def main():
    model, out, *source = sys.argv[1:]
    rank, world, _, _ = start_distributed()
    models.engine_config = engine_config
    for stage in range(4):
        cfg = config(model=model, zero_stage=stage, bf16=stage >= 2, actor_learning_rate=1e-2)
        if stage == 3:
            body = models.load_model(cfg, Plain(model), AutoModelForCausalLM)
            for parameter in body.parameters():
                is_sharded = parameter.numel() == 0 and parameter.ds_tensor.numel() > 0
                assert is_sharded, "this rank held all of it"
        if source:
            load_each(Path(source[0]), Path(out), cfg, world)
        else:
            engine = models.make_policy(cfg)
            take_steps(engine)
            error = save(Path(out) / str(stage), engine, cfg, world)
            assert error is None, error
    if not source:
        save_on_a_sick_disk(Path(f"{out}.sick"), engine, cfg, rank, world)


if __name__ == "__main__":
    main()
    # As in train.py: gloo's threads can abort a finalising interpreter.
    os._exit(0)
