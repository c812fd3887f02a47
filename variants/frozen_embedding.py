"""The embedding is not trained, and with tied weights the head is not trained either.

The laboratory has not measured this variant.
"""

import ppo


class FrozenEmbedding(ppo.Recipe):
    def policy_model(self, model):
        model = super().policy_model(model)
        model.get_input_embeddings().requires_grad_(False)
        return model
