"""Only adapters of the policy's linear layers are trained (LoRA, arXiv 2106.09685).

Each linear layer W of the body becomes W + 32 / rank * B A. "LoRA without regret"
(thinkingmachines.ai/blog/lora) claims that in reinforcement learning small adapters suffice, with
ten times the learning rate. The adapters are merged into the weights for the export, and for
the sampler, because vLLM 0.32 reads adapters only from a folder. This variant needs `pip install
--no-deps -r requirements-extras.txt`. A checkpoint has the adapters alone.
In the laboratory (PPO, rate 2e-3, 3 seeds) the accuracy is 0.58, 0.58 and 0.25, and the mean is
0.570 if all weights are trained.
"""

from dataclasses import dataclass

import torch
from deepspeed.runtime.zero import GatheredParameters

import ppo
from nanoorz.flags import flag


@dataclass
class Lora(ppo.Recipe):
    lora_rank: int = flag(
        32, "The rank of the adapters. Adapters need ten times the learning rate."
    )

    def policy_model(self, model):
        from peft import LoraConfig, inject_adapter_in_model

        model = super().policy_model(model)
        adapters = LoraConfig(r=self.lora_rank, lora_alpha=32, target_modules="all-linear")
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            inject_adapter_in_model(adapters, model)
        return model

    def named_weights(self, learner, named):
        """Yields one matrix for each layer, with its adapter merged, for sampler and export."""
        for name, tensor in super().named_weights(learner, named):
            owner, is_adapted, _ = name.partition(".base_layer.weight")
            if is_adapted:
                layer = learner.module.model.get_submodule(owner)
                adapters = [p for key, p in layer.named_parameters() if "lora_" in key]
                with GatheredParameters(adapters, enabled=hasattr(adapters[0], "ds_id")):
                    yield f"{owner}.weight", tensor + layer.get_delta_weight("default")
            elif "lora_" not in name:
                yield name.replace(".base_layer", ""), tensor
