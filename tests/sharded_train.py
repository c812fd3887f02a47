"""train.py where ZeRO-3 shards the small parameters too, which it keeps whole otherwise."""

import os
import sys

import train
from lib import models


def engine_config(cfg, stage, usual=models.engine_config):
    settings = usual(cfg, stage)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return settings


if __name__ == "__main__":
    models.engine_config = engine_config
    os._exit(train.run(sys.argv[1:]))
