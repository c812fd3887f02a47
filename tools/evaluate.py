"""Evaluates a run or a model on sets of problems, with the sampler and the grader alone.

    python tools/evaluate.py RUN [--n 16] [--out FOLDER] [FLAGS]
    python tools/evaluate.py MODEL --data FILE [FILE ...] [--n 16] [--out FOLDER] [FLAGS]

RUN is the folder of a run, or RUN/policy. Its config.json gives the flags and --data, and a flag
given here replaces the run's. On the same machine with as many threads, a run in fp32 gives the
samples of its last evaluation again. `RUN --model OTHER` evaluates another model in the same way.
MODEL is a folder, or a name of the Hugging Face hub. train.py finds the same numbers at step 0.

--n is the number of samples of each problem. Without a RUN, --n, --temperature and --top_p are 1.
--greedy takes the likeliest tokens of one sample. FLAGS are train.py's, which `python train.py
--help` explains. FOLDER (out/evaluate) gets result.json and eval_samples.jsonl with every response.
Under `accelerate launch` the ranks share the samples.
"""

import argparse
import contextlib
import json
import math
import re
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoorz.environment import Signals, end

if __name__ == "__main__":
    # Until main makes a Signals, Ctrl-C ends this process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import numpy as np
import pandas as pd
import torch.distributed as dist

import ckpt
import train
from nanoorz import families, log
from nanoorz.flags import flags_of, require
from nanoorz.ranks import (
    Stopped,
    UserError,
    print0,
    require_same,
    start_distributed,
)
from nanoorz.records import split_path
from nanoorz.variants import kept_files
from rollout import Rollout

# A run's flags that its evaluations do not depend on, or that read_flags finds otherwise.
NOT_TAKEN = {"model", "critic", "data", "variant", "run_dir", "resume", "log_with", "attention"}


def read_flags(argv: list[str]) -> tuple[train.Config, int]:
    """Returns the flags, and the step that the seeds depend on. Raises UserError."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.error = train.refuse
    parser.add_argument("model", metavar="RUN_OR_MODEL", type=Path, help="see above")
    text = "problems: files, FILE?columns=QUESTION,ANSWER, or data sets"
    parser.add_argument("--data", nargs="+", dest="eval_data", metavar="FILE", help=text)
    parser.add_argument("--n", type=int, dest="eval_n", help="samples of each problem")
    # train.py has a temperature and a top_p of training, which are other flags.
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--temperature", type=float, dest="eval_temperature", help="of the samples")
    greedy = {"action": "store_const", "const": 0.0, "help": "take the likeliest tokens"}
    one_of.add_argument("--greedy", dest="eval_temperature", **greedy)
    text = "draw from the likeliest tokens whose probabilities add up to this number"
    parser.add_argument("--top_p", type=float, dest="eval_top_p", help=text)
    text = "gets the results; default: out/evaluate"
    parser.add_argument(
        "--out", default="out/evaluate", dest="run_dir", metavar="FOLDER", help=text
    )
    args, words = parser.parse_known_args(argv)
    own = {name: value for name, value in vars(args).items() if value is not None}
    flags = [word.partition("=")[0].lstrip("-") for word in words if word.startswith("--")]
    if own.get("eval_temperature") == 0:
        # All greedy responses are alike.
        own.setdefault("eval_n", 1)
    given = {*flags, *own}
    # Another task may have other stop texts.
    given |= {"stop"} if "task" in given else set()
    run, settings = find_run(args.model)
    files = kept_files(run, [] if "variant" in given else settings.get("variants", []))
    words += ["--variant", *files] if files else []
    cfg = train.parse_flags(words)
    own["model"] = cfg.model or str(run / "policy" if settings else run)
    # Without result.json a policy/ would be that of an earlier end.
    if settings and not cfg.model and not (run / "result.json").exists():
        told = f"{run} is not complete; go on with it, or export a step: `python ckpt.py"
        raise UserError(f"{told} {run}/step_NNNNNN NEW`, and add --model=NEW/policy")
    taken = settings.keys() & flags_of(cfg).keys() - NOT_TAKEN - given
    for name, value in ({name: settings[name] for name in taken} | own).items():
        setattr(cfg, name, value)
    cfg.data = cfg.eval_data
    told = f"{run} is no folder of a run with --eval_data; give such a folder, or --data FILE"
    require(cfg.data, told)
    files = [split_path(path)[0] for path in cfg.data]
    # A data set of the hub has a name such as openai/gsm8k.
    files = [file for file in files if re.search(r"^[/.]|\.(jsonl?|csv|parquet)$", file)]
    missing = ", ".join(file for file in files if not Path(file).exists())
    require(not missing, f"--data {missing}: no such file here; give its place as --data")
    step = settings.get("steps", 0)
    if settings:
        flags = f"the flags of {run}/config.json and the seeds of step {step}"
        print0(f"evaluates {cfg.model} with {flags} on", *cfg.data)
    return cfg, step


def find_run(folder: Path) -> tuple[Path, dict]:
    """The run of RUN or RUN/policy, its config.json and result.json. For a model (MODEL, {})."""
    for run in [folder, folder.parent] if folder.name == "policy" else [folder]:
        with contextlib.suppress(OSError, ValueError):
            settings = json.loads((run / "config.json").read_text())
            # A model has a config.json of another kind.
            if "run_dir" in settings:
                with contextlib.suppress(OSError, ValueError):
                    settings |= json.loads((run / "result.json").read_text())
                return run, settings
    # `python ckpt.py` makes a folder of two models.
    return folder / "policy" if (folder / "policy").is_dir() else folder, {}


class Results:
    """train.evaluate gets it as the run's log. All ranks keep the numbers."""

    def __init__(self, cfg: train.Config, forms: dict):
        self.cfg = cfg
        self.forms = forms
        self.sets, self.remarks, self.samples = [], [], []

    def has_evaluation(self, name: str, step: int) -> bool:
        return False

    def evaluation(self, name: str, samples: list, step: int) -> None:
        n = self.cfg.eval_n
        numbers = log.numbers_of_evaluation(samples, n) | pass_rates(samples, n)
        self.sets.append({"step": step, "set": name} | numbers)
        self.samples += [log.describe(sample, step, name) for sample in samples]
        if told := log.judge_answers(samples, self.cfg, self.forms):
            self.remarks.append(f"{name}: {told}")

    def write(self, folder: Path) -> None:
        """Replaces the files of an earlier evaluation."""
        result = {"sets": self.sets, "remarks": self.remarks, "config": flags_of(self.cfg)}
        result |= {"world": dist.get_world_size(), "wall_seconds": log.since_start()}
        result |= {"versions": log.versions()}
        lines = [json.dumps(sample, default=log.to_plain) + "\n" for sample in self.samples]
        (folder / "eval_samples.jsonl").write_text("".join(lines), encoding="utf-8")
        (folder / "result.json").write_text(json.dumps(result, indent=1))


def pass_rates(samples: list, n: int) -> dict[str, float]:
    """{"pass@k": ...} for k = 1, 2, 4, ... and n. samples: n of each problem, in their order.

    pass@k is the probability that k of the n samples of a problem hold a right one, of reward 1.
    The unbiased estimate for c right samples is 1 - C(n - c, k) / C(n, k) (2107.03374, eq. 1).
    """
    rewards = np.array([sample.reward for sample in samples]).reshape(-1, n)  # (problems, n)
    right = (rewards >= 1).sum(1)  # (problems,)
    ks = sorted({2**i for i in range(n.bit_length())} | {n})
    missed = {k: np.mean([math.comb(n - c, k) / math.comb(n, k) for c in right]) for k in ks}
    return {f"pass@{k}": 1 - missed[k] for k in ks}


def main(cfg: train.Config, step: int, world: int, store) -> None:
    """One rank of an evaluation. Raises UserError and Stopped."""
    cfg.eval_only = True
    values = {f"--{name}": value for name, value in flags_of(cfg).items()}
    # The machines may have these files in different folders.
    require_same(values | {"--run_dir": None, "--variant": cfg.variant_hashes})
    train.check_flags(cfg, world)
    folder = Path(cfg.run_dir).absolute()
    # A run that was killed before its first checkpoint has metrics already.
    is_run = ckpt.checkpoints(folder) or (folder / "metrics.jsonl").exists()
    require(not is_run, f"--out {folder} holds a training run; choose another folder")
    lock = ckpt.claim(folder, needed_bytes=0)  # noqa: F841

    task = train.load_task(cfg)
    tokenizer = train.load_tokenizer(cfg)
    families.replace_auto(cfg)
    eval_sets = train.load_eval_sets(task, cfg, tokenizer)
    results = Results(cfg, getattr(task, "ANSWER_FORMS", {}))
    rollout = Rollout(task, Signals(store), cfg)
    try:
        train.evaluate(rollout, eval_sets, step, results)
    finally:
        rollout.grader.close()
    if dist.get_rank() == 0:
        results.write(folder)
    table = pd.DataFrame(results.sets).drop(columns="step")
    texts = [table.to_string(index=False, float_format="%.3f"), *results.remarks]
    print0("\n".join([*texts, f"all files are in {folder}"]))


def run(argv: list[str]) -> int:
    """The exit code: 0, 2 for what the user can mend, 1 after a signal or an error."""
    try:
        if "-h" in argv or "--help" in argv:
            # Prints the help, and exits.
            read_flags(argv)
        _, world, _, store = start_distributed()
        cfg, step = read_flags(argv)
        main(cfg, step, world, store)
        return 0
    except Stopped:
        print0("stopped: an evaluation saves nothing, so start it again")
        return 1
    except UserError as error:
        # Errors name the flags of train.py, which have other names here.
        text = re.sub(r"--eval_(?=n\b|temperature|top_p|data)", "--", str(error))
        text = text.replace("--run_dir", "--out").replace("--model ", "")
        text = text.replace("python train.py", "python tools/evaluate.py")
        print(f"error: {text}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = 1
    try:
        code = run(sys.argv[1:])
    except Exception:
        traceback.print_exc()
    end(code)
