"""The laboratory: trains the settings of a plan with several seeds, and compares them.

    python tools/lab.py variants/plans/orz.txt --seeds 3

A plan has a line for each setting: its name, and its flags of train.py. The first setting is the
baseline. The flags of the line `base` come before those of each setting.

    base: --max_steps 60
    ppo:
    mine: --variant kl_loss my_idea.py --lambd 0.95
    few: --data {base}/train.json[:64]

For settings without a --model tools/base_model.py makes a base model in OUT/base, and the flags of
this model come first. The model is that of Countdown, or of the chains in a plan with --task chain.
Each run is a process with one thread on a core of its own. OUT/NAME has the runs of a setting, and
OUT/PLAN.md and OUT/PLAN.png compare them.

The same command again skips runs that are done, and resumes runs that were stopped. A run reads the
code when it starts, so do not edit the code while the laboratory runs; after an edit of the core
give another --out.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from nanoorz.ranks import UserError
from tools.compare import compare
from tools.runs import refuse

ROOT = Path(__file__).resolve().parent.parent


def read_plan(path: Path, base: Path) -> dict[str, list[str]]:
    """{setting: its flags}, with those of the line `base` first. Raises UserError.

    base: the folder of the base model.
    """
    settings = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        name = words[0].removesuffix(":")
        if not re.fullmatch(r"[\w-]+:", words[0]) or name in settings:
            raise UserError(
                f"line {number}: a line begins with a new name, as in `mine: --lambd 1`"
            )
        settings[name] = [word.replace("{base}", str(base)) for word in words[1:]]
    shared = settings.pop("base", [])
    return {name: [*shared, *flags] for name, flags in settings.items()}


def has_model(flags: list[str]) -> bool:
    return any(word.partition("=")[0] == "--model" for word in flags)


def make_base(settings: dict[str, list[str]], folder: Path) -> list[str]:
    """Makes the base model of the settings without a --model. Returns its flags of train.py."""
    if all(map(has_model, settings.values())):
        return []
    is_chain = any("chain" in flags for flags in settings.values())
    task = "chain" if is_chain else "countdown"
    command = [sys.executable, ROOT / "tools" / "base_model.py", task, folder]
    if subprocess.call(command) != 0:
        sys.exit(2)
    return shlex.split((folder / "flags.txt").read_text())


def cut_data(word: str, folder: Path) -> str:
    """FILE.json[:64] becomes a file with the first 64 records of that file; other words stay."""
    match = re.fullmatch(r"(.+\.json)\[:([0-9]+)\]", word)
    if not match:
        return word
    source = Path(match[1])
    records = json.loads(source.read_text())[: int(match[2])]
    # Two files of one setting may have one name.
    path = folder / f"first_{match[2]}" / re.sub(r"\W", "_", str(source.parent)) / source.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records))
    return str(path)


def prepare(folder: Path, flags: list[str]) -> list[str]:
    """Makes the folder of a setting. Returns the flags of its runs. Raises UserError.

    A folder belongs to one line of a plan and to the texts of its variants. Otherwise the runs of a
    setting would differ in more than their seeds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = [cut_data(word, folder) for word in flags]
    cfg = train.parse_flags(flags)
    train.check_flags(cfg, 1)
    if not (cfg.max_steps and cfg.eval_data):
        raise UserError("give --max_steps and --eval_data, because accuracies are compared")
    text = json.dumps({"flags": flags, "variants": cfg.variant_texts}, indent=1)
    record = folder / "setting.json"
    is_other = record.exists() and record.read_text() != text
    if is_other and [*folder.glob("seed*/step_*"), *folder.glob("seed*/result.json")]:
        told = f"{folder} has runs of other flags or variants, which {record} shows"
        raise UserError(f"{told}; rename the setting, or give another --out")
    record.write_text(text)
    return flags


def train_all(runs: dict[Path, list[str]], cores: list[int]) -> int:
    """Trains the runs that are not done, one on each core. Returns how many runs failed."""
    waiting = [folder for folder in runs if not is_done(folder)]
    print(f"{len(waiting)} of {len(runs)} runs to train", flush=True)
    active = {}  # {process: (its folder, its core)}
    try:
        while waiting or active:
            if waiting and cores:
                folder, core = waiting.pop(0), cores.pop(0)
                active[start(folder, runs[folder], core)] = (folder, core)
                continue
            process = wait_for_one(active)
            folder, core = active.pop(process)
            cores.append(core)
            end = "is done" if is_done(folder) else f"FAILED, see {folder}.log"
            done = sum(map(is_done, runs))
            print(f"{done} of {len(runs)}: {folder.parent.name} {folder.name} {end}", flush=True)
    finally:
        # A Ctrl-C has reached the runs too, and they save.
        for process in active:
            process.wait()
    return len(runs) - sum(map(is_done, runs))


def is_done(folder: Path) -> bool:
    return (folder / "result.json").exists()


def start(folder: Path, flags: list[str], core: int) -> subprocess.Popen:
    # If the laboratory is killed, Linux sends a SIGTERM to the run. Then the run saves and ends.
    command = ["setpriv", "--pdeathsig", "TERM", "taskset", "--cpu-list", str(core)]
    command += [sys.executable, str(ROOT / "train.py"), *flags, "--run_dir", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def wait_for_one(processes) -> subprocess.Popen:
    """Waits until one of the processes ends. Returns this process."""
    pid, status = os.wait()
    process = next(process for process in processes if process.pid == pid)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a text file of settings")
    parser.add_argument("--seeds", type=int, default=3, help="train the seeds 1 to this number")
    parser.add_argument("--out", type=Path, default=Path("out/lab"), help="the folder of all runs")
    cores = sorted(os.sched_getaffinity(0))
    # A GPU has room for one run.
    jobs = 1 if torch.cuda.is_available() else len(cores)
    parser.add_argument("--jobs", type=int, default=jobs, help="the number of runs at a time")
    args = parser.parse_args()
    out = args.out.resolve()
    place = args.plan
    try:
        settings = read_plan(args.plan, out / "base")
        shared = make_base(settings, out / "base")
        for place, flags in settings.items():
            base = [] if has_model(flags) else shared
            settings[place] = prepare(out / place, [*base, *flags])
    except (OSError, ValueError, UserError) as error:
        refuse(f"{place}: {error}")
    # Runs go seed by seed, so a laboratory that is stopped early can compare all settings.
    runs = {}
    for seed in range(1, args.seeds + 1):
        for name, flags in settings.items():
            runs[out / name / f"seed{seed}"] = [*flags, "--seed", str(seed)]
    failed = train_all(runs, cores[: args.jobs])
    if failed:
        print(f"{failed} run(s) failed; the same command tries them again", file=sys.stderr)
    compare([out / name for name in settings], args.seeds, str(out / args.plan.stem))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
