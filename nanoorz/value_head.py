"""--critic FOLDER: the critic's tokenizer and value head. Only a run with --critic loads this."""

import glob

from safetensors import safe_open
from torch import nn

from lib.common import UserError, one_line

# The names of a value head on disk: ours and ORZ's, and those of a token classifier.
HEADS = {"value_head.weight", "value_head.bias", "score.weight", "score.bias"}


def check_tokenizer(cfg, of_critic, of_model):
    """Raises UserError if the critic was trained on other tokens."""
    if of_critic.get_vocab() != of_model.get_vocab():
        raise UserError(f"--critic {cfg.critic}: its tokenizer is not the tokenizer of {cfg.model}")


def load_value_head(critic, folder):
    """Replaces the new head of a critic by the folder's head, which may have a bias.

    The head is in a file of its own (a critic that train.py exported) or beside the body's weights
    (critics that others published). Raises UserError if no head fits the body.
    """
    head = {}
    for path in glob.glob(f"{folder}/*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in HEADS.intersection(file.keys()):
                head[name.rpartition(".")[2]] = file.get_tensor(name)
    if "bias" in head:
        critic.value_head = nn.Linear(critic.value_head.in_features, 1, dtype=critic.model.dtype)
    try:
        # Without a head this raises too, because the weight is missing.
        critic.value_head.load_state_dict(head)
    except RuntimeError as error:
        raise UserError(
            f"--critic {folder} has no value head with one output that fits its body, in "
            f"value_head.safetensors or beside the body: {one_line(error)}"
        ) from error
