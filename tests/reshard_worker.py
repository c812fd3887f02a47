"""torchrun tests/reshard_worker.py MODEL OUT [SOURCE]: saves a stepped policy at each ZeRO stage, or what it loaded.

Without SOURCE: OUT/<stage>/step_000003 after three steps. With SOURCE: OUT/<from>to<stage>, loaded from each resharded
checkpoint of SOURCE into each stage and saved at once, untouched."""
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import AutoModelForCausalLM

import ckpt
import ppo
import rollout
from tools import reshard


def main() -> None:
    model, out, *source = sys.argv[1:]
    rollout.start_distributed()
    for stage in range(4):
        cfg = SimpleNamespace(model=model, bf16=stage >= 2, zero_stage=stage, attention="sdpa", max_norm=1.0,
                              gradient_checkpointing=False, zero3_persistence_threshold=40, actor_learning_rate=1e-2)
        if stage == 3:
            body = ppo.load_body(cfg, AutoModelForCausalLM)
            assert all(p.numel() == 0 and p.ds_tensor.numel() for p in body.parameters()), "this rank held all of it"
        for origin in sorted(Path(source[0]).iterdir()) if source else [None]:
            if origin and (origin.name in "01") != (stage < 2):
                continue  # a bf16 run does not go on in fp32
            engine = ppo.make_policy(cfg)
            if origin:
                reshard.load(origin / "step_000003", [("policy", engine)])
            else:
                for k in range(3):
                    batch = ppo.Batch([[k, 1, 2]], [[3, 4, 5, k]], torch.zeros(1), torch.zeros(1), {})
                    logprobs, _ = engine(ppo.build_rows(batch, [[0]], torch.device("cpu")), 1.0)  # (4,)
                    engine.backward(-logprobs.sum())
                    engine.step()
            name = f"{origin.name}to{stage}" if origin else str(stage)
            state = {"step": 3, "config": {"zero_stage": stage, "bf16": cfg.bf16}}
            assert ckpt.save(Path(out) / name, 3, [("policy", engine)], state, []) is None


if __name__ == "__main__":
    main()
    os._exit(0)  # as train.py: gloo's threads can abort a finalising interpreter
