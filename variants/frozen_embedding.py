"""The embedding is not trained, and with tied weights the head is not trained either."""

from dataclasses import dataclass

import ppo


@dataclass
class FrozenEmbedding(ppo.Recipe):
    def policy_model(self, model):
        model = super().policy_model(model)
        model.get_input_embeddings().requires_grad_(False)
        return model
