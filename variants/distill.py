"""On-policy distillation: the policy draws the responses, and a teacher scores each drawn token.

The advantage of a token is w * (log p of the teacher - log p of the policy) + (1 - w) * (advantage
of the estimator). w is --teacher_weight. With w = 1 add --estimator reinforce, because a critic
would learn for nothing. Later tokens do not change the first part. Its mean, over the policy's
distribution, is minus the reverse KL divergence, KL(policy, teacher).
Source: "On-policy distillation" (thinkingmachines.ai/blog/on-policy-distillation, 2025). GKD (arXiv
2306.13649) uses all tokens of the vocabulary, and not only the drawn one. In MiniLLM (arXiv
2306.08543) later tokens count, too.
What the laboratory measured: docs/lab.md.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

import ppo
from nanoorz import families, models
from nanoorz.flags import flag, require


@dataclass
class Distill(ppo.Recipe):
    teacher: str | None = flag(None, "A causal LM with the tokenizer of --model: a folder or name.")
    teacher_weight: float = flag(1.0, "The teacher's share of the advantage. 0: only log its KL.")

    def check(self, world):
        super().check(world)
        require(self.teacher, "--variant distill: name a model with --teacher")
        told = f"--top_p {self.top_p}: choose 1 with distill; log-probs are of the whole vocabulary"
        require(self.top_p == 1, told)

    def policy_model(self, model):
        """Makes the teacher, too."""
        self._check_teacher()
        self._teacher = models.make_frozen(self, "teacher", self.teacher)
        return super().policy_model(model)

    def _check_teacher(self):
        """Raises UserError if the teacher's log-probs would not be those of the policy's tokens."""
        # A critic with tied embeddings would load as a policy, without an error.
        is_critic = Path(self.teacher, "value_head.safetensors").exists()
        require(not is_critic, f"--teacher {self.teacher} is a critic; name the policy/ beside it")
        config = families.load_config(self.teacher, "--teacher")
        positions = families.max_positions(config) or self.max_len
        told = f"--teacher {self.teacher} has {positions} positions, less than --max_len"
        require(self.max_len <= positions, told)
        own, other = (AutoTokenizer.from_pretrained(x) for x in (self.model, self.teacher))
        told = f"--teacher {self.teacher}: its tokenizer is not that of {self.model}"
        require(own.get_vocab() == other.get_vocab(), told)
        # Policy and teacher share their rows. So the run must have what the teacher needs.
        fits = self.packing == "alone" or families.may_be_packed(config)
        require(fits, f"--teacher {self.teacher} needs --packing alone")
        fits = self.attention == "eager" or not families.needs_eager(config)
        require(fits, f"--teacher {self.teacher} needs --attention eager")

    def token_passes(self, policy, critic, batch, step):
        super().token_passes(policy, critic, batch, step)
        batch.per_token["teacher_logprobs"] = ppo.compute_logprobs(self._teacher, batch, self)
        batch.per_token["old_logprobs"] = ppo.compute_logprobs(policy, batch, self)

    def whiten(self, advantages, batch):
        # The estimator's advantages may be whitened. The teacher's part is not.
        advantages = super().whiten(advantages, batch)
        of_teacher = self._log_ratio(batch)  # (T,)
        return self.teacher_weight * of_teacher + (1 - self.teacher_weight) * advantages

    def metrics(self, line, samples, batch):
        """Adds two estimates of KL(policy, teacher) (joschu.net/blog/kl-approx.html)."""
        if counted := self.samples_that_count(batch):
            log_ratio = batch.select(self._log_ratio(batch), counted)
            line["teacher_k1"] = -log_ratio.mean().item()
            line["teacher_k3"] = (log_ratio.exp() - 1 - log_ratio).mean().item()
        return super().metrics(line, samples, batch)

    def _log_ratio(self, batch):
        tokens = batch.per_token
        return (tokens["teacher_logprobs"] - tokens["old_logprobs"]).double()
