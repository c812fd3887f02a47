"""The laboratory: trains the settings of a plan with several seeds, and says which of them differ.

    python tools/lab.py ablations/plans/orz.txt --seeds 3

A plan has a line for each setting: its name, patches of ablations/ if any, and flags of train.py.
The first setting is the baseline, with which tools/compare.py compares the others.

    base: --max_steps 60                           flags of all settings, if there are any
    ppo:                                           the baseline
    kl: kl_loss + --kl_coef 0.1                    a patch and its flag
    few: --data {base}/train.json[:64]             the first 64 problems of the laboratory

The settings start from one base model, OUT/base, which tools/countdown.py makes, and have its flags
before their own, unless they all name a --model. All seeds share the base model. A seed changes
what is sampled and in which order problems come, so runs of one seed are a pair, and what differs
is the setting. It also means that all is said of this base model.

Runs go side by side, one process of one thread on each core. What is done is skipped; what was
stopped or killed goes on from its checkpoint. OUT has for each setting a folder with its code, a
snapshot with the patches, and for each seed a run folder and what the run printed; and for each
plan a table and a picture. Plans share the runs of settings of one name, which must be the same.
"""

import argparse
import ctypes
import fcntl
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from lib.common import UserError, hash64, one_line  # noqa: E402
from lib.launcher import PR_SET_PDEATHSIG  # noqa: E402

# The files of this checkout that a run needs, and the flags that it has from the laboratory.
PRODUCT = ("*.py", "lib/*.py", "tasks/*.py", "tools/*.py")
OWN_FLAGS = ("--seed", "--run_dir", "--resume")


@dataclass
class Setting:
    """A line of the plan."""

    name: str
    patches: dict[str, str]  # the text of each, by name
    flags: list[str]
    folder: Path


@dataclass
class Run:
    """A setting with a seed."""

    setting: Setting
    seed: int
    total_steps: int
    process: subprocess.Popen | None = None

    @property
    def folder(self) -> Path:
        return self.setting.folder / f"seed{self.seed}"

    @property
    def log(self) -> Path:
        return self.setting.folder / f"seed{self.seed}.log"

    def is_done(self) -> bool:
        return (self.folder / "result.json").exists()

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def start(self, core: int, lock) -> None:
        """One process with one thread on that core. It holds the lab's lock while it lives."""
        command = [sys.executable, str(self.setting.folder / "code" / "train.py")]
        command += [*self.setting.flags, "--seed", str(self.seed), "--run_dir", str(self.folder)]
        options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        # The Ctrl-C of a terminal must reach the lab alone, which then stops its runs.
        options |= {"start_new_session": True, "pass_fds": [lock.fileno()]}
        options |= {"env": os.environ | {"OMP_NUM_THREADS": "1"}}
        options |= {"preexec_fn": functools.partial(settle, core)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, **options)


def settle(core: int) -> None:
    """A new process keeps to this core, and is told to save and leave if the lab dies."""
    os.sched_setaffinity(0, {core})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# ---- the plan ------------------------------------------------------------------------------------


def read_plan(path: Path, out: Path) -> list[Setting]:
    """The settings, with the flags of the line `base` before their own. Raises UserError."""
    lines = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            words = shlex.split(line, comments=True)
            add_line(lines, [word.replace("{base}", str(out / "base")) for word in words])
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    common = lines.pop("base", [])
    if not lines:
        raise UserError(f"{path} has no setting; write a line `NAME: FLAGS` for each")
    settings = []
    for name, words in lines.items():
        patches = "".join(itertools.takewhile(is_no_flag, words)).split("+")
        texts = {patch: read_patch(name, patch) for patch in filter(None, patches)}
        own = itertools.dropwhile(is_no_flag, words)
        settings.append(Setting(name, texts, [*common, *own], out / name))
    return settings


def add_line(lines: dict[str, list[str]], words: list[str]) -> None:
    """Adds a line's words under its name, if there are any. Raises ValueError."""
    if not words:
        return
    name = words[0].removesuffix(":")
    if name == words[0] or not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"{words[0]!r} is no name with a colon; write `NAME: PATCH + FLAGS`")
    if name in lines:
        raise ValueError(f"the name {name} is there twice; choose another")
    for word in words:
        if word.partition("=")[0] in OWN_FLAGS:
            raise ValueError(f"the laboratory gives {word} itself; leave it out")
    lines[name] = words[1:]


def is_no_flag(word: str) -> bool:
    return not word.startswith("--")


def read_patch(setting: str, name: str) -> str:
    path = ROOT / "ablations" / f"{name}.patch"
    if not path.is_file():
        raise UserError(f"{setting}: ablations/{name}.patch is not there; flags start with --")
    return path.read_text()


# ---- what runs need ------------------------------------------------------------------------------


def lab_flags(base: Path) -> list[str]:
    """Makes the laboratory's base model unless it is there, and returns its flags of train.py."""
    command = [sys.executable, str(ROOT / "tools" / "countdown.py"), str(base)]
    if subprocess.call(command) != 0:
        raise UserError(f"the base model {base} was not made, see above")
    return shlex.split((base / "flags.txt").read_text())


def prepare(setting: Setting) -> dict:
    """Makes a setting's folder, where there is none, and returns its record.

    Raises UserError for a patch that does not apply, a flag that train.py does not take, or a
    folder with the runs of another setting.
    """
    path = setting.folder / "setting.json"
    setting.folder.mkdir(parents=True, exist_ok=True)
    setting.flags = [cut_data(word, setting.folder) for word in setting.flags]
    wanted = {"patches": setting.patches, "flags": setting.flags}
    if not path.exists():
        copy_code(setting)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(wanted | {"code": code_hash(), "steps": count_steps(setting)}))
        part.replace(path)
    record = json.loads(path.read_text())
    if not wanted.items() <= record.items():
        raise UserError(
            f"{setting.folder} has runs with other flags, or with other text in a patch; rename "
            "the setting, remove the folder, or choose another --out"
        )
    return record


def cut_data(word: str, folder: Path) -> str:
    """FILE.json[:64] becomes a file with the first 64 records of that file; other words stay."""
    match = re.fullmatch(r"(.+\.json)\[:([0-9]+)\]", word)
    if not match:
        return word
    path = folder / f"first_{match[2]}.json"
    records = json.loads(Path(match[1]).read_text())
    path.write_text(json.dumps(records[: int(match[2])]))
    return str(path)


def code_files() -> list[Path]:
    return sorted(path for pattern in PRODUCT for path in ROOT.glob(pattern))


def code_hash() -> int:
    return hash64([path.read_text() for path in code_files()])


def copy_code(setting: Setting) -> None:
    """Copies the product's files, so that no later edit changes a run, and applies the patches."""
    code = setting.folder / "code"
    shutil.rmtree(code, ignore_errors=True)
    for path in code_files():
        copy = code / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    # Git must not find the checkout around it: it would take the paths as relative to that.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(setting.folder)}
    for name, text in setting.patches.items():
        options = {"cwd": code, "env": env, "input": text, "text": True}
        done = subprocess.run(["git", "apply"], capture_output=True, **options)
        if done.returncode != 0:
            patch = f"ablations/{name}.patch"
            raise UserError(f"{setting.name}: {patch} does not apply: {one_line(done.stderr)}")


def count_steps(setting: Setting) -> int:
    """How many steps its runs have. Raises UserError where its train.py does not take its flags."""
    try:
        # A patch may add flags, so the patched file is asked.
        config = read_patched_flags(setting) if setting.patches else read_flags(setting.flags)
        if not (config["max_steps"] and config["eval_data"]):
            raise UserError("give --max_steps and --eval_data; the laboratory counts and compares")
    except UserError as error:
        raise UserError(f"{setting.name}: {error}") from None
    return config["max_steps"]


def read_flags(words: list[str]) -> dict:
    """The flags as this file's train.py reads them. Raises UserError."""
    import train  # slow, and seldom needed

    cfg = train.parse_flags(words)
    train.check.check_config(cfg, 1, train.ppo.ESTIMATORS)
    return vars(cfg)


def read_patched_flags(setting: Setting) -> dict:
    """The same by the copy of this file that lies beside the patched train.py."""
    script = "import json, sys, tools.lab as l; print(json.dumps(l.read_flags(sys.argv[1:])))"
    command = [sys.executable, "-c", script, *setting.flags]
    code = setting.folder / "code"
    done = subprocess.run(command, cwd=code, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.splitlines() or ["it was killed"])[-1]
        raise UserError(last.removeprefix("lib.common.UserError: "))
    return json.loads(done.stdout.splitlines()[-1])


# ---- runs ----------------------------------------------------------------------------------------


def run_all(runs: list[Run], cores: list[int], lock) -> int:
    """Trains what is not done, one run on each core. Returns how many runs failed.

    However it ends, by an interrupt too, it first stops its runs, which save.
    """
    waiting = [run for run in runs if not run.is_done()]
    active = {}  # by core
    total = sum(run.total_steps for run in runs)
    bar = tqdm(total=total, initial=sum_steps(runs), unit="step", disable=None)
    try:
        while waiting or active:
            free = [core for core in cores if core not in active]
            for core in free[: len(waiting)]:
                run = waiting.pop(0)
                run.start(core, lock)
                active[core] = run
            time.sleep(0.5)
            for core in [core for core in active if active[core].process.poll() is not None]:
                tqdm.write(describe_end(active.pop(core), runs))
            bar.update(sum_steps(runs) - bar.n)
    finally:
        bar.close()
        for run in active.values():
            run.process.terminate()
        for run in active.values():
            run.process.wait()
    return sum(not run.is_done() for run in runs)


def sum_steps(runs: list[Run]) -> int:
    return sum(run.steps() for run in runs)


def describe_end(run: Run, runs: list[Run]) -> str:
    """A line on a run whose process has ended: how many are done, and the last line of its log."""
    lines = run.log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    verdict = f"FAILED, see {run.log}"
    if run.is_done():
        verdict = f"{sum(other.is_done() for other in runs)} of {len(runs)}"
    return f"{verdict}: {run.setting.name} seed {run.seed}: {one_line(lines[-1])}"


def claim(out: Path):
    """Locks the folder; returns the lock. The runs of a lab that was killed hold it as well."""
    out.mkdir(parents=True, exist_ok=True)
    lock = (out / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = "is used by another laboratory, or its runs still save; wait for them"
        raise UserError(f"{out} {message}") from None
    return lock


def choose_cores(jobs: int | None) -> list[int]:
    """The cores that runs get, one each. A GPU has room for one run."""
    cores = sorted(os.sched_getaffinity(0))
    if jobs is None:
        jobs = 1 if torch.cuda.is_available() else len(cores)
    if not 1 <= jobs <= len(cores):
        raise UserError(f"--jobs {jobs}: choose 1 to {len(cores)}, the cores of this process")
    return cores[:jobs]


def compare(settings: list[Setting], args, out: Path) -> int:
    """Writes the plan's table and picture."""
    command = [sys.executable, str(ROOT / "tools" / "compare.py")]
    command += [str(setting.folder) for setting in settings]
    command += ["--out", str(out / args.plan.stem), "--seeds", str(args.seeds)]
    if args.show:
        command += ["--show", *args.show]
    return subprocess.call(command)


def run_plan(args) -> int:
    """From the arguments to an exit code. Raises UserError, OSError and KeyboardInterrupt."""
    out = args.out.resolve()
    settings = read_plan(args.plan, out)
    unknown = set(args.show) - {setting.name for setting in settings}
    if unknown or args.seeds < 1:
        raise UserError(f"--show {' '.join(unknown)} --seeds {args.seeds}: no such setting or seed")
    cores = choose_cores(args.jobs)
    lock = claim(out)
    common = ["--log_with", "none"]
    if not all("--model" in setting.flags for setting in settings):
        common += lab_flags(out / "base")
    for setting in settings:
        setting.flags = [*common, *setting.flags]
    # Each patched train.py is asked in a process of its own, which takes seconds to import.
    with ThreadPoolExecutor(len(cores)) as pool:
        records = list(pool.map(prepare, settings))
    if len({record["code"] for record in records}) > 1:
        print("WARNING: the code was edited between these settings; what differs may be that")
    # They go seed by seed, so that a laboratory that is stopped has something to compare.
    runs = []
    for seed in range(1, args.seeds + 1):
        for setting, record in zip(settings, records):
            runs.append(Run(setting, seed, record["steps"]))
    failed = run_all(runs, cores, lock)
    code = compare(settings, args, out)
    if failed:
        print(f"{failed} run(s) failed; the same command tries them again", file=sys.stderr)
        return 1
    return code


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this number")
    parser.add_argument("--out", type=Path, default=Path("out/lab"))
    parser.add_argument("--jobs", type=int, help="runs at a time; absent: one for each core")
    parser.add_argument(
        "--show", nargs="+", default=[], metavar="NAME", help="settings in the picture"
    )
    args = parser.parse_args()
    try:
        return run_plan(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
