"""The laboratory: trains the settings of a plan with several seeds, and compares them.

    python tools/lab.py variants/plans/orz.txt --seeds 3

A plan has a line for each setting: its name, then its variants, then its flags of train.py. The
first setting is the baseline. docs/laboratory.md describes plans, runs and the table.

    ppo:
    mine: kl_loss + my_idea.py + --flag 3

If a setting names no --model, tools/base_model.py makes a base model in OUT/base, and this model's
flags come before those of each setting. The model is that of Countdown, or of a plan with --task
chain that of the chains. Each run has one process with one thread on its own core.
The same command again skips runs that are done, and resumes runs that were stopped. The first start
copies the code to OUT/code, and all runs use this copy.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from nanoorz.ranks import UserError, one_line  # noqa: E402
from tools import compare  # noqa: E402
from tools.runs import describe  # noqa: E402

# All runs share this code. A setting's folder has the texts of its variants.
CODE = ("*.py", "nanoorz/*.py", "tasks/*.py", "tools/*.py")
# These take most of the time of a start.
MODULES = ("train", "deepspeed", "vllm.entrypoints.llm", "math_verify")
# The laboratory gives these flags to each run.
OWN_FLAGS = ("--seed", "--run_dir", "--resume", "--variant")


@dataclass
class Setting:
    """A line of the plan."""

    name: str
    variants: dict[str, Path]  # {name: its file}, in the order of --variant
    flags: list[str]
    folder: Path
    place: str = ""  # the plan, the number of the line, and the name

    def words(self) -> list[str]:
        """The flags of train.py. The variants are the files in the setting's folder."""
        files = [str(self.folder / "variants" / f"{name}.py") for name in self.variants]
        return [*self.flags, "--variant", *files] if files else self.flags


def read_plan(path: Path, out: Path) -> list[Setting]:
    """The settings. Each has the words of the line `base` before its own. Raises UserError."""
    settings = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                words = [word.replace("{base}", f"{out}/base") for word in words]
                setting = read_line(words, path.parent, out)
                if setting.name in settings:
                    raise ValueError(f"the name {setting.name} is there twice; choose another")
                setting.place = f"{path}, line {number}: {setting.name}"
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
        told = "write `NAME: VARIANT + FLAGS`; a NAME has letters, digits, _ and -, and is not code"
        raise ValueError(f"{words[0]!r} cannot name a setting; {told}")
    is_flag = [word.startswith("--") for word in words]
    first_flag = is_flag.index(True) if any(is_flag) else len(words)
    for word in words[first_flag:]:
        if word.partition("=")[0] in OWN_FLAGS:
            raise ValueError(f"the laboratory gives {word} itself; leave it out")
    variants = {}
    for word in filter(None, "".join(words[1:first_flag]).split("+")):
        is_path = word.endswith(".py")
        places = [Path(word), folder / word] if is_path else [ROOT / "variants" / f"{word}.py"]
        path = next(filter(Path.is_file, places), None)
        if path is None:
            raise ValueError(f"the variant {' or '.join(map(str, places))} is not there")
        if path.stem in variants:
            raise ValueError(f"two variants are called {path.stem}; leave one of them out")
        variants[path.stem] = path
    return Setting(name, variants, words[first_flag:], out / name)


@contextlib.contextmanager
def claim(out: Path):
    """Makes the folder. Raises UserError if that fails, or if another laboratory uses it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise UserError(f"{describe(error, out)}; choose another --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told = f"another laboratory uses {out}; wait for it, or choose another --out"
            raise UserError(told) from None
        yield


def keep_code(out: Path) -> None:
    """Copies the code to OUT/code at the first start. Raises UserError if the code differs now."""
    code, part = out / "code", out / "code.part"
    if not code.exists():
        shutil.rmtree(part, ignore_errors=True)
        for name in ("nanoorz", "tasks", "tools", "variants"):
            shutil.copytree(ROOT / name, part / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.glob("*.py"):
            shutil.copy(path, part)
        part.rename(code)
    if read_code(code) != read_code(ROOT):
        command = shlex.join(["python", str(code / "tools" / "lab.py"), *sys.argv[1:]])
        told = f"all runs in {out} use the code in {code}, and {ROOT} has other code now"
        raise UserError(f"{told}; choose another --out, or go on with the copy: {command}")


def read_code(folder: Path) -> dict[Path, bytes]:
    paths = [path for pattern in CODE for path in folder.glob(pattern)]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def recipe_of(settings: list[Setting]) -> str:
    """Which base model of tools/base_model.py the settings start from. Raises UserError."""
    recipes = set()
    for setting in settings:
        words = {word.removeprefix("--task=") for word in setting.flags}
        if "--model" not in words:
            recipes.add("chain" if "chain" in words else "countdown")
    if len(recipes) > 1:
        told = "each of them has a base model of its own; write a plan for each task"
        raise UserError(f"the plan has settings of {' and '.join(sorted(recipes))}: {told}")
    return recipes.pop()


def lab_flags(recipe: str, base: Path) -> list[str]:
    """Makes a base model if it is not there. Returns its flags of train.py. Raises UserError."""
    flags = base / "flags.txt"
    if flags.exists() and f"--task {recipe}" not in flags.read_text():
        told = f"{base} is not the base model of the task {recipe}, which the plan needs"
        raise UserError(f"{told}; choose another --out, or give the plan another --task")
    command = [sys.executable, str(ROOT / "tools" / "base_model.py"), recipe, str(base)]
    if subprocess.call(command, stdout=subprocess.DEVNULL) != 0:
        raise UserError(f"the base model {base} was not made; the lines above say why")
    return shlex.split(flags.read_text())


def prepare(setting: Setting) -> None:
    """Makes a setting's folder. Raises UserError if the folder or train.py refuses the setting."""
    import train  # This takes seconds. A plan that cannot be read does not wait for it.

    record = setting.folder / "setting.json"
    folder = setting.folder / "variants"
    setting.flags = [cut_data(word, setting.folder) for word in setting.flags]
    folder.mkdir(parents=True, exist_ok=True)
    files = [str(path) for path in setting.variants.values()]
    cfg = train.parse_flags([*setting.flags, *(["--variant", *files] if files else [])])
    if record.exists() and (found := difference(record, setting, cfg.variant_texts)):
        saved = [*setting.folder.glob("seed*/step_*"), *setting.folder.glob("seed*/result.json")]
        if saved:
            told = f"{setting.folder} has runs with {found}; rename the setting, remove the folder,"
            raise UserError(f"{told} or choose another --out")
        # Without a saved step nothing is lost. Perhaps a variant had a fault, which is mended now.
        record.unlink()
    if not record.exists():
        train.check_flags(cfg, 1)
        train.load_task(cfg)
        # With the files of the classes that the variants are built on.
        for name, text in cfg.variant_texts.items():
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
        if not (cfg.max_steps and cfg.eval_data):
            raise UserError("give --max_steps and --eval_data; the laboratory compares accuracies")
        # A text keeps the order of the variants, which matters.
        wanted = {"variants": cfg.variant_texts, "flags": setting.flags}
        record.write_text(json.dumps(wanted, indent=1))


def difference(record: Path, setting: Setting, texts: dict[str, str]) -> str:
    """What differs between the setting that a folder was made for and this setting, or "".

    texts: of the variants and of those that they are built on.
    """
    try:
        old = json.loads(record.read_text())
    except ValueError:
        return "a damaged setting.json"
    # The order of the variants matters.
    if list(old["variants"]) != list(texts):
        return f"the variants {' + '.join(old['variants']) or 'none'}"
    for name, text in texts.items():
        if old["variants"][name] != text:
            return f"another text of the variant {name}"
    if old["flags"] != setting.flags:
        return f"the flags {shlex.join(old['flags'])}"
    return ""


def cut_data(word: str, folder: Path) -> str:
    """FILE.json[:64] becomes a file with the first 64 records of that file; other words stay."""
    match = re.fullmatch(r"(.+\.json)\[:([0-9]+)\]", word)
    if not match:
        return word
    records = json.loads(Path(match[1]).read_text())[: int(match[2])]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"first_{match[2]}.json"
    path.write_text(json.dumps(records))
    return str(path)


def run_all(runs: dict[Path, list[str]], cores: list[int], modules=()) -> int:
    """Trains the runs that are not done, one on each core. Returns how many runs failed.

    modules: what a core imports once for all its runs.
    """
    waiting = [folder for folder in runs if not is_done(folder)]
    print(f"{len(waiting)} of {len(runs)} runs to train", flush=True)
    script = next(iter(runs)).parent.parent / "code" / "train.py"
    servers = [start_server(script, core, modules) for core in cores[: len(waiting)]]
    active = {}  # the output of a server: the folder of its run
    try:
        while waiting or active:
            for server in servers:
                if waiting and server.stdout not in active:
                    folder = active[server.stdout] = waiting.pop(0)
                    log = folder.with_suffix(".log")
                    words = [str(log), *runs[folder], "--run_dir", str(folder)]
                    server.stdin.write(json.dumps(words) + "\n")
                    server.stdin.flush()
            for output in select.select(list(active), [], [])[0]:
                if not output.readline():
                    raise UserError("tools/forks.py has ended; the lines above say why")
                done = sum(map(is_done, runs))
                print(f"{done} of {len(runs)}: {describe_end(active.pop(output))}", flush=True)
    finally:
        # After an interrupt the runs save and end.
        for server in servers:
            server.terminate()
            with contextlib.suppress(BrokenPipeError):
                server.stdin.close()
        for server in servers:
            server.wait()
    return len(runs) - sum(map(is_done, runs))


def is_done(folder: Path) -> bool:
    return (folder / "result.json").exists()


def start_server(script: Path, core: int, modules) -> subprocess.Popen:
    """Starts a process that runs the script again and again, with one thread on that core."""
    # If the laboratory dies, Linux sends a SIGTERM to the process. Then its run saves and ends.
    command = ["setpriv", "--pdeathsig", "TERM", "taskset", "--cpu-list", str(core)]
    command += [sys.executable, str(ROOT / "tools" / "forks.py"), str(script), *modules]
    # A Ctrl-C reaches only the laboratory, which then stops its runs.
    options = {"start_new_session": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **options)


def describe_end(folder: Path) -> str:
    """How a run ended. Of a run that failed, also the last line of its log."""
    run = f"{folder.parent.name} {folder.name}"
    if is_done(folder):
        return f"{run} is done"
    log = folder.with_suffix(".log")
    lines = log.read_text(errors="replace").strip().splitlines() or ["the log is empty"]
    return f"{run} FAILED, see {log}: {one_line(lines[-1])}"


def run_plan(args) -> int:
    """From the arguments to an exit code. Raises UserError, OSError and KeyboardInterrupt."""
    out = args.out.resolve()
    settings = read_plan(args.plan, out)
    if args.seeds < 1:
        raise UserError(f"--seeds {args.seeds}: give 1 or a larger number")
    if unknown := set(args.show) - {setting.name for setting in settings}:
        raise UserError(f"--show {' '.join(unknown)}: the plan has no such setting")
    has_model = all("--model" in setting.flags for setting in settings)
    recipe = None if has_model else recipe_of(settings)
    with claim(out):
        return run_settings(args, out, settings, recipe)


def run_settings(args, out: Path, settings: list[Setting], recipe: str | None) -> int:
    """recipe: of the base model. None: each setting names its own model."""
    keep_code(out)
    common = lab_flags(recipe, out / "base") if recipe else []
    for setting in settings:
        setting.flags = [*common, *setting.flags]
        try:
            prepare(setting)
        except (OSError, ValueError, TypeError, UserError) as error:
            raise UserError(f"{setting.place}: {describe(error, setting.folder)}") from None
    # Runs go seed by seed, so a laboratory that is stopped early can compare all settings.
    runs = {}
    for seed in range(1, args.seeds + 1):
        for setting in settings:
            runs[setting.folder / f"seed{seed}"] = [*setting.words(), "--seed", str(seed)]
    # A fork cannot use a GPU that its parent has looked at, so there each run has its own imports.
    modules = () if torch.cuda.is_available() else MODULES
    failed = run_all(runs, sorted(os.sched_getaffinity(0))[: args.jobs], modules)
    if failed:
        print(f"{failed} run(s) failed; the same command tries them again", file=sys.stderr)
    finished = compare.read_settings([setting.folder for setting in settings], args.seeds)
    compare.compare_all(finished, args.show, str(out / args.plan.stem))
    return int(failed > 0)


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a text file of settings")
    parser.add_argument("--seeds", type=int, default=3, help="train the seeds 1 to this number")
    parser.add_argument("--out", type=Path, default=Path("out/lab"), help="the folder of all runs")
    # A GPU has room for one run.
    cores = len(os.sched_getaffinity(0))
    jobs = {"default": 1 if torch.cuda.is_available() else cores, "choices": range(1, cores + 1)}
    parser.add_argument("--jobs", type=int, help="the number of runs at a time", **jobs)
    parser.add_argument("--show", nargs="+", default=[], help="settings to draw; all are trained")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_plan(args)
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is not done", file=sys.stderr)
        return 130
    except (OSError, ValueError, UserError) as error:
        parser.exit(2, f"error: {describe(error, args.out)}\n")


if __name__ == "__main__":
    sys.exit(main())
