"""torchrun tests/reshard_worker.py MODEL OUT [SOURCE]

Without SOURCE it saves a policy at each ZeRO stage after three steps, as OUT/<stage>/step_000003.
Then rank 1's disk fails once, while step 4 is saved in OUT.sick: each rank writes what it was told.
With SOURCE it loads each resharded checkpoint of SOURCE into each stage, and saves what it loaded
at once, untouched, as OUT/<from>to<stage>.
"""

import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import AutoModelForCausalLM

import ckpt
import ppo
from lib import models, reshard
from lib.common import start_distributed

shipped_config = models.engine_config


def engine_config(cfg, stage: int) -> dict:
    """Only biases of keys and values stay whole, so that nearly everything is sharded."""
    settings = shipped_config(cfg, stage)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 40
    return settings


def make_config(model: str, stage: int) -> SimpleNamespace:
    return SimpleNamespace(
        model=model,
        bf16=stage >= 2,
        zero_stage=stage,
        attention="sdpa",
        max_norm=1.0,
        gradient_checkpointing=False,
        offload="none",
        actor_learning_rate=1e-2,
    )


def take_steps(policy):
    for k in range(3):
        micro = micro_batch([k, 1, 2], [3, 4, 5, k])
        logprobs, _ = policy(micro, 1.0)  # (4,)
        policy.backward(-logprobs.sum(), is_last=True)
        policy.apply_update(1e-2)


def micro_batch(prompt_ids: list[int], response_ids: list[int]):
    device = torch.device("cpu")
    batch = ppo.Batch([prompt_ids], [response_ids], torch.zeros(1), torch.zeros(1), device, {}, [])
    return ppo.build_rows(batch, [[0]])


def try_save(folder: Path, step: int, engine, cfg, world: int):
    config = {"zero_stage": cfg.zero_stage, "bf16": cfg.bf16}
    state = ckpt.RunState(step, step, world, config)
    return ckpt.save(folder, state, {"policy": engine.deepspeed}, [], keep_last=0)


def save(folder: Path, engine, cfg, world: int):
    error = try_save(folder, 3, engine, cfg, world)
    assert error is None, error


def save_on_a_sick_disk(folder: Path, engine, cfg, rank: int, world: int):
    """Steps 3, 4 and 5. For the second, rank 1's disk takes 1,000 bytes a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (3, 4, 5):
        if rank == 1 and step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        error = try_save(folder, step, engine, cfg, world)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        (folder / f"{step}_{rank}.txt").write_text(str(error))


def load_each(source: Path, out: Path, cfg, world: int):
    for origin in sorted(source.iterdir()):
        # A run in bf16 does not go on in fp32.
        if (origin.name in "01") == (cfg.zero_stage < 2):
            engine = models.make_policy(cfg)
            reshard.load(origin / "step_000003" / "universal", {"policy": engine.deepspeed})
            save(out / f"{origin.name}to{cfg.zero_stage}", engine, cfg, world)


def main():
    model, out, *source = sys.argv[1:]
    rank, world, _, _ = start_distributed()
    models.engine_config = engine_config
    for stage in range(4):
        cfg = make_config(model, stage)
        if stage == 3:
            body = models.load_body(cfg, AutoModelForCausalLM)
            for parameter in body.parameters():
                is_sharded = parameter.numel() == 0 and parameter.ds_tensor.numel() > 0
                assert is_sharded, "this rank held all of it"
        if source:
            load_each(Path(source[0]), Path(out), cfg, world)
        else:
            engine = models.make_policy(cfg)
            take_steps(engine)
            save(Path(out) / str(stage), engine, cfg, world)
    if not source:
        save_on_a_sick_disk(Path(f"{out}.sick"), engine, cfg, rank, world)


if __name__ == "__main__":
    main()
    # As in train.py: gloo's threads can abort a finalising interpreter.
    os._exit(0)
