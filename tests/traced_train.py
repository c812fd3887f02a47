"""train.py that also writes down what its loop calls, in order: RUN/calls.json.

RUN/modules.json has the files of all modules that were loaded then.

Each function is wrapped and then runs as always. A call is [name, what it was given].
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ckpt  # noqa: E402
import ppo  # noqa: E402
import train  # noqa: E402
from lib.report import RunLog  # noqa: E402
from rollout import Sampler  # noqa: E402

CALLS = []
REQUEST = ("seed", "group", "index", "max_tokens")


def describe_requests(sampler, requests, *options, **named):
    """The problem of each request, and the fields of REQUEST."""
    shown = []
    for request in requests:
        fields = [getattr(request, name) for name in REQUEST]
        shown.append([request.problem.index, *fields])
    return shown


def record(owner, name, describe):
    """describe: what to write down, from the arguments of the call."""
    original = getattr(owner, name)

    def recorded(*arguments, **named):
        CALLS.append([name, describe(*arguments, **named)])
        return original(*arguments, **named)

    setattr(owner, name, recorded)


def record_the_loop():
    record(Sampler, "generate", describe_requests)
    record(Sampler, "sync", lambda sampler, weights: None)
    record(Sampler, "sleep", lambda sampler: None)
    record(ppo, "compute_values", lambda learner, batch, cfg: learner.name)
    record(ppo, "compute_logprobs", lambda learner, batch, cfg: learner.name)
    record(ppo, "compute_advantages", lambda batch, cfg: sorted(batch.per_token))
    record(ppo, "train_critic", lambda learner, batch, cfg, step: step)
    record(ppo, "train_policy", lambda learner, batch, cfg, step, total: [step, total])
    record(RunLog, "step", lambda log, step, *rest: step)
    record(RunLog, "evaluation", lambda log, name, samples, step: [name, step])
    record(RunLog, "result", lambda log, steps: steps)
    record(ckpt, "restore", lambda run_dir, source, engines, state: state.step)
    record(ckpt.RunState, "finish_step", lambda state, run_dir, memory: state.step)
    record(ckpt, "save", lambda run_dir, state, *rest: state.step)
    record(ckpt, "export", lambda folder, *rest: folder.name)


if __name__ == "__main__":
    record_the_loop()
    code = train.run(sys.argv[1:])
    run_dir = sys.argv[sys.argv.index("--run_dir") + 1]
    Path(run_dir, "calls.json").write_text(json.dumps(CALLS))
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    Path(run_dir, "modules.json").write_text(json.dumps([file for file in files if file]))
    os._exit(code)
