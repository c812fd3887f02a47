"""train.py that writes down the calls of its loop: RUN/calls.json, [name, what it was given].

With STOP_AT="NAME NUMBER" the last rank sends itself a SIGTERM at that call of that function.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import ckpt
import ppo
import train
from nanoorz.families import BaseFiles
from nanoorz.log import RunLog
from rollout import Sampler

CALLS = []
COUNTS = Counter()


def record(owner, name, describe=None):
    """describe: what to write down, from the arguments of the call. None: the call is counted."""
    original = getattr(owner, name)

    def recorded(*arguments, **named):
        if describe:
            CALLS.append([name, describe(*arguments, **named)])
        COUNTS[name] += 1
        is_last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if is_last_rank and os.environ.get("STOP_AT") == f"{name} {COUNTS[name]}":
            os.kill(os.getpid(), signal.SIGTERM)
            # In the export another thread ends the process.
            time.sleep(60 if name == "save_pretrained" else 0)
        return original(*arguments, **named)

    setattr(owner, name, recorded)


if __name__ == "__main__":
    record(Sampler, "generate", lambda sampler, requests, *options, **named: len(requests))
    record(Sampler, "end_turn", lambda sampler, sample, completion: None)
    record(Sampler, "sync", lambda sampler, weights: None)
    record(Sampler, "sleep", lambda sampler: None)
    record(ppo, "compute_values", lambda learner, batch, cfg: learner.name)
    record(ppo, "compute_logprobs", lambda learner, batch, cfg: learner.name)
    record(ppo, "compute_advantages", lambda batch, cfg: sorted(batch.per_token))
    record(train.Config, "train_critic", lambda cfg, learner, batch, step: step)
    record(train.Config, "train_policy", lambda cfg, learner, batch, step, total: [step, total])
    record(RunLog, "step", lambda log, step, *rest: step)
    record(RunLog, "evaluation", lambda log, name, samples, step: [name, step])
    record(RunLog, "result", lambda log, steps: steps)
    record(ckpt, "resume", lambda run_dir, source, engines, state: state.step)
    record(ckpt.RunState, "finish_step", lambda state, run_dir, memory: state.step)
    record(ckpt, "save", lambda run_dir, state, *rest: state.step)
    record(BaseFiles, "save_pretrained")
    record(ckpt, "export", lambda folder, *rest: folder.name)
    code = train.run(sys.argv[1:])
    run_dir = Path(sys.argv[sys.argv.index("--run_dir") + 1])
    (run_dir / "calls.json").write_text(json.dumps(CALLS))
    os._exit(code)
