"""The laboratory: trains the settings of a plan with several seeds, and says which of them differ.

    python tools/lab.py variants/plans/orz.txt --seeds 3

A plan has a line for each setting: its name, then its variants, then its flags of train.py. A
variant is a name of variants/, or a .py file in the current folder or in the plan's folder.
tools/compare.py compares each setting with the first one, the baseline.

    base: --max_steps 60                           of all settings; this line may be left out
    ppo:                                           the baseline
    mine: kl_loss + my_idea.py + --flag 3          two variants and a flag; my_idea.py is your own
    few: --data {base}/train.json[:64]             the first 64 problems of the laboratory

If a setting names no --model, tools/countdown.py makes a base model in OUT/base, and this model's
flags come before those of each setting. All seeds share the base model, so a result holds for this
base model only. A seed changes what is sampled and the order of the problems. So two runs of one
seed are a pair, and their settings alone make the difference.

Runs go side by side, one process of one thread on each core. The same command again skips runs that
are done, and resumes runs that were stopped. The first start copies the code to OUT/code, and all
runs use this copy. A setting's folder has the texts of its variants, and a run folder and a log for
each seed. Two plans share the runs of a setting that has the same line in both.
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
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from lib.common import UserError, hash64, one_line  # noqa: E402
from lib.signals import PR_SET_PDEATHSIG  # noqa: E402

# The code without variants, of which each setting keeps its own.
CODE = ("*.py", "lib/*.py", "tasks/*.py", "tools/*.py")
# The laboratory gives these flags to each run.
OWN_FLAGS = ("--seed", "--run_dir", "--resume", "--variant")


@dataclass
class Setting:
    """A line of the plan."""

    name: str
    variants: dict[str, str]  # name: text, in the order of --variant
    flags: list[str]
    folder: Path

    def words(self) -> list[str]:
        """Its flags, and its variants as its folder keeps them."""
        files = [str(self.folder / "variants" / f"{name}.py") for name in self.variants]
        return [*self.flags, "--variant", *files] if files else self.flags


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
        """Starts one process with one thread on that core. It holds the laboratory's lock."""
        train = self.setting.folder.parent / "code" / "train.py"
        command = [sys.executable, str(train), *self.setting.words()]
        command += ["--seed", str(self.seed), "--run_dir", str(self.folder)]
        options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        # The Ctrl-C of a terminal must reach the laboratory alone, which then stops its runs.
        options |= {"start_new_session": True, "pass_fds": [lock.fileno()]}
        options |= {"env": os.environ | {"OMP_NUM_THREADS": "1"}}
        options |= {"preexec_fn": functools.partial(settle, core)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, **options)


def settle(core: int) -> None:
    """Keeps this new process on the core. If the laboratory dies, the process saves and ends."""
    os.sched_setaffinity(0, {core})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# ---- the plan ------------------------------------------------------------------------------------


def read_plan(path: Path, out: Path) -> list[Setting]:
    """The settings, with what the line `base` has before their own. Raises UserError."""
    settings = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                words = [word.replace("{base}", f"{out}/base") for word in words]
                setting = read_line(words, path.parent, out)
                if setting.name in settings:
                    raise ValueError(f"the name {setting.name} is there twice; choose another")
                settings[setting.name] = setting
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    base = settings.pop("base", Setting("base", {}, [], out))
    if not settings:
        raise UserError(f"{path} has no setting; write a line `NAME: FLAGS` for each")
    for setting in settings.values():
        setting.variants = base.variants | setting.variants
        setting.flags = [*base.flags, *setting.flags]
    return list(settings.values())


def read_line(words: list[str], folder: Path, out: Path) -> Setting:
    """folder: of the plan. Raises ValueError."""
    name = words[0].removesuffix(":")
    # OUT/code is the copy of the code.
    if name in (words[0], "code") or not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"{words[0]!r} cannot name a setting; write `NAME: VARIANT + FLAGS`")
    flags = list(itertools.dropwhile(lambda word: not word.startswith("--"), words[1:]))
    for word in flags:
        if word.partition("=")[0] in OWN_FLAGS:
            raise ValueError(f"the laboratory gives {word} itself; leave it out")
    variants = {}
    for word in filter(None, "".join(words[1 : len(words) - len(flags)]).split("+")):
        path = find_variant(word, folder)
        if path.stem in variants:
            raise ValueError(f"two variants are called {path.stem}; leave one of them out")
        variants[path.stem] = path.read_text(encoding="utf-8")
    return Setting(name, variants, flags, out / name)


def find_variant(word: str, folder: Path) -> Path:
    """The file of a variant. Raises ValueError."""
    is_path = word.endswith(".py")
    places = [Path(word), folder / word] if is_path else [ROOT / "variants" / f"{word}.py"]
    for path in filter(Path.is_file, places):
        return path
    raise ValueError(f"the variant {' or '.join(map(str, places))} is not there")


# ---- what runs need ------------------------------------------------------------------------------


def keep_code(out: Path) -> None:
    """Copies the code to OUT/code at the first start. Raises UserError if it is another one now."""
    code, part, record = out / "code", out / "code.part", out / "code.record"
    if not record.exists():
        from lib.report import versions  # This takes seconds.

        shutil.rmtree(part, ignore_errors=True)
        for name in ("lib", "tasks", "tools", "variants"):
            shutil.copytree(ROOT / name, part / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.glob("*.py"):
            shutil.copy(path, part)
        shutil.rmtree(code, ignore_errors=True)
        part.rename(code)
        write_json(record, {"commit": versions().get("git_commit"), "hash": code_hash(code)})
    kept = json.loads(record.read_text())
    if not kept["hash"] == code_hash(code) == code_hash(ROOT):
        command = shlex.join(["python", str(code / "tools" / "lab.py"), *sys.argv[1:]])
        raise UserError(
            f"all runs in {out} use a copy of commit {kept['commit'] or 'unknown'}, and {ROOT} "
            f"has other code now; choose another --out, or go on with the copy: {command}"
        )


def code_hash(folder: Path) -> str:
    files = sorted(path for pattern in CODE for path in folder.glob(pattern))
    return f"{hash64([(str(x.relative_to(folder)), x.read_bytes()) for x in files]):016x}"


def write_json(path: Path, record: dict) -> None:
    """Writes the whole file or nothing."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(record))
    part.replace(path)


def lab_flags(base: Path) -> list[str]:
    """Makes the laboratory's base model unless it is there, and returns its flags of train.py."""
    command = [sys.executable, str(ROOT / "tools" / "countdown.py"), str(base)]
    if subprocess.call(command) != 0:
        raise UserError(f"the base model {base} was not made, see above")
    return shlex.split((base / "flags.txt").read_text())


def prepare(setting: Setting) -> int:
    """Makes a setting's folder, and returns how many steps its runs have. Raises UserError."""
    path = setting.folder / "setting.json"
    folder = setting.folder / "variants"
    folder.mkdir(parents=True, exist_ok=True)
    setting.flags = [cut_data(word, setting.folder) for word in setting.flags]
    wanted = {"variants": setting.variants, "flags": setting.flags}
    record = json.loads(path.read_text()) if path.exists() else {}
    # A text, because two dicts are equal in any order, and the order of variants matters.
    if record and json.dumps(record | wanted) != json.dumps(record):
        raise UserError(
            f"{setting.folder} has runs with other flags, or with another text of a variant; "
            "rename the setting, remove the folder, or choose another --out"
        )
    for name, text in setting.variants.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    if not record:
        record = wanted | {"steps": count_steps(setting)}
        write_json(path, record)
    return record["steps"]


def cut_data(word: str, folder: Path) -> str:
    """FILE.json[:64] becomes a file with the first 64 records of that file; other words stay."""
    match = re.fullmatch(r"(.+\.json)\[:([0-9]+)\]", word)
    if not match:
        return word
    path = folder / f"first_{match[2]}.json"
    records = json.loads(Path(match[1]).read_text())
    path.write_text(json.dumps(records[: int(match[2])]))
    return str(path)


def count_steps(setting: Setting) -> int:
    """How many steps its runs have. Raises UserError where train.py refuses its words."""
    import train  # This takes seconds, and only a new setting needs it.

    try:
        cfg = train.parse_flags(setting.words())
        with cfg.variants.installed(train.stages()):
            train.check.check_config(cfg, 1, train.ppo.ESTIMATORS)
            train.find_task(cfg)
        if not (cfg.max_steps and cfg.eval_data):
            raise UserError("give --max_steps and --eval_data; the laboratory counts and compares")
    except UserError as error:
        # The plan names a variant without this folder.
        message = str(error).replace(f"{setting.folder}/variants/", "")
        raise UserError(f"{setting.name}: {message}") from None
    return cfg.max_steps


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
    keep_code(out)
    common = ["--log_with", "none"]
    if not all("--model" in setting.flags for setting in settings):
        common += lab_flags(out / "base")
    for setting in settings:
        setting.flags = [*common, *setting.flags]
    steps = [prepare(setting) for setting in settings]
    # Runs go seed by seed, so a laboratory that is stopped early can compare all settings.
    runs = []
    for seed in range(1, args.seeds + 1):
        runs += [Run(setting, seed, count) for setting, count in zip(settings, steps)]
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
