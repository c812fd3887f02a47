"""GRPO with ppo.py on a random model of transformers, without vLLM and DeepSpeed.

To use ppo.py elsewhere, copy ppo.py, nanoorz/ranks.py and nanoorz/flags.py beside such a script.
"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import ppo
from nanoorz.ranks import start_distributed


class Policy:
    """What ppo.py calls a learner."""

    name = "policy"

    def __init__(self, model, device):
        self.model = model  # of transformers
        self.device = device
        self.optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def __call__(self, micro, temperature):
        logits = micro.select(self.model(**micro.model_inputs()).logits) / temperature  # (M, V)
        log_p = logits.log_softmax(-1)  # (M, V)
        entropy = -(log_p.exp() * log_p).sum(-1)  # (M,)
        return log_p.gather(1, micro.token_ids[:, None])[:, 0], entropy

    def backward(self, loss, is_last):
        loss.backward()

    def apply_update(self, lr):
        self.optimizer.param_groups[0]["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()


_, _, device, _ = start_distributed()
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=4))
policy = Policy(model.to(device), device)
recipe = ppo.Recipe(
    estimator="grpo", actor_learning_rate=3e-3, warmup_updates=1, packing_max_len=64
)
prompts = torch.arange(1, 9).repeat_interleave(8)[:, None]  # (64, 1): 8 problems, 8 samples each
# By default `generate` draws from the 50 likeliest tokens, and the loss would not know this.
sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "pad_token_id": 0}
for step in range(20):
    ids = model.generate(prompts.to(device), **sampling).cpu()  # (64, 13): prompt and response
    rewards = (ids[:, 1:] % 2 == 0).double().mean(1)  # (64,): the share of even tokens
    groups = prompts[:, 0]  # the samples of a problem have one number
    lists = (prompts.tolist(), ids[:, 1:].tolist())
    batch = ppo.Batch(*lists, groups, rewards, device, per_token={}, samples=[])
    ppo.compute_advantages(batch, recipe)
    stats = recipe.train_policy(policy, batch, step, total_steps=20)
    print(f"step {step + 1}  reward {rewards.mean():.3f}  norm {stats['policy_grad_norm']:.2f}")
