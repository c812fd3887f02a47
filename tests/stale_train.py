"""train.py whose sampler keeps the base model: after the first sync it gets no weights any more."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import train  # noqa: E402
from rollout import Sampler  # noqa: E402


def sync_once(sampler, weights, sync=Sampler.sync):
    sync(sampler, weights)
    Sampler.sync = lambda sampler, weights: None


if __name__ == "__main__":
    Sampler.sync = sync_once
    os._exit(train.run(sys.argv[1:]))
