"""Runs of train.py that end before their models are read, one after the other in one process.

refused_train.py FOLDER RUNS: RUNS is a JSON list; an item has the words of each rank. Rank k works
in FOLDER/k, so that the ranks find other files under one relative path, as other machines may.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

import train

if __name__ == "__main__":
    rank, world, device, store = train.start_distributed()
    os.chdir(Path(sys.argv[1], str(rank)))
    train.redirect_libraries = lambda path: None
    for number, words in enumerate(json.loads(sys.argv[2])):
        # An error is told once in a store.
        place = (rank, world, device, dist.PrefixStore(str(number), store))
        train.start_distributed = lambda place=place: place
        code = train.run(words[rank])
        print(f"exit code {code}", file=sys.stderr, flush=True)
    os._exit(0)
