"""What this project does on a machine with a GPU, as a page: `make card`, or with PARTS="...".

    python tools/card.py [PART ...] [--out FOLDER] [--timeout SECONDS]

It runs the parts in turn. Each part is a process of its own. If a part fails or takes too long, the
next one starts. After each part the page FOLDER/NAME.md and its figures FOLDER/NAME.json are
written, where NAME is the GPU's. A later call adds its parts to the page. A page of other versions
is refused. The folder is docs/cards if none is given; then the table in docs/scaling.md is made
anew from all the pages.

Without a GPU the same parts run with tiny shapes on the CPU. What a part prints is in out/card. The
exit code is 1 if a part has failed, and 2 for a wrong command.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib.common import UserError, check_stack, one_line  # noqa: E402
from lib.report import versions  # noqa: E402

CARDS = ROOT / "docs" / "cards"
LOGS = ROOT / "out" / "card"
MARKS = ("<!-- cards: made by tools/card.py -->\n", "<!-- end of cards -->\n")

NO_GPU = """\
**No GPU is among these machines yet.** On a CPU all shapes but the laboratory's are tiny, and what
needs a GPU is left out. These have run nowhere: the varlen and FlashAttention kernels, NCCL, CUDA
graphs, fp8, and the sampler's sleep. The limits of the GPU tests and the eight minutes for a part
are predictions. So is the plan of memory and time: until a GPU has calibrated it, the GPU test
accepts memory that is 25 % above or below the plan.""".splitlines()
# The lines of pytest's summary that say what failed or was skipped, and why.
NOTES = ("FAILED tests/", "ERROR tests/", "SKIPPED [")
NOTHING_TRIED = r"(\d+ (skipped|deselected|warnings?),? ?)+in .*|no tests ran.*"
CHARACTERS = 300  # of a line that a page quotes, at most
# A part fits into ten minutes of a rented GPU then. No GPU has shown yet how long a part takes.
TIMEOUT = 480  # seconds


@dataclass
class Part:
    shows: str
    # A file of tests/, and what selects some of its tests. Absent: a part of bench_gpu.py.
    tests: str = ""


PARTS = {
    "cycle": Part(
        "the sampler: seeds, log-probs against the trainer, sleep, sync; without CUDA graphs",
        "test_gpu_sampler.py -k eager",
    ),
    "kernels": Part(
        "attention, head, advantages and an update in bf16 against slow references",
        "test_gpu_kernels.py",
    ),
    "sampler": Part(
        "the sampler with CUDA graphs, beside ZeRO 3, and in fp8",
        "test_gpu_sampler.py -k 'not eager'",
    ),
    "runs": Part(
        "whole runs of a two-layer model: ZeRO 2 and 3, a resume, a signal; the demo in fp32",
        "test_gpu_runs.py -k 'not two_cards'",
    ),
    "two_cards": Part(
        "runs on two GPUs against runs on one GPU: NCCL, ZeRO 3, a shared sampler",
        "test_gpu_runs.py -k two_cards",
    ),
    "zero2": Part("three steps of 0.5B with a critic at ZeRO 2"),
    "zero3": Part("three steps of 0.5B with a critic at ZeRO 3"),
    "step": Part("four GRPO steps of 0.5B; a published run of verl takes 6.39 s on one H100"),
    "attention": Part("an update of 0.5B with each kind of attention"),
    "attention7b": Part("an update of four layers of 7B with each kind of attention"),
    "advantages": Part("GAE of 8,192 samples"),
    "sampling": Part("vLLM's tokens/s, and the seconds of sleep, wake and sync"),
    "lab": Part("the laboratory: 40 steps of PPO with a critic from a small base model"),
}

# {name: (target, meaning)}
FIGURES = {
    "varlen_vs_sdpa": (">= 3", "0.5B: seconds of an update with sdpa / with varlen"),
    "varlen_vs_sdpa_7b": (">= 1", "four layers of 7B: the same ratio"),
    "mfu": ("", "0.5B: flops of an update / of a large product"),
    "mfu_7b": (">= 0.35", "four layers of 7B: flops of an update / of a large product"),
    "head_share": ("", "0.5B: share of the head in an update"),
    "head_share_7b": ("", "four layers of 7B: share of the head in an update"),
    "train_tokens_per_s": ("", "0.5B: tokens/s of an update"),
    "train_tokens_per_s_7b": ("", "four layers of 7B: tokens/s of an update"),
    "advantages_s": ("<= 1", "seconds of GAE"),
    "tokens_per_s_256": ("", "tokens/s of the sampler, 256 sequences in flight"),
    "tokens_per_s_1024": ("", "tokens/s of the sampler, 1,024 sequences in flight"),
    "stops_256": ("", "tokens/s of the sampler with / without stop strings, 256 in flight"),
    "stops_1024": ("", "tokens/s of the sampler with / without stop strings, 1,024 in flight"),
    "sampler_start_s": ("", "seconds until the sampler is ready"),
    "sleep_s": ("", "seconds until the sampler sleeps"),
    "freed_gib": ("", "GiB that a sleeping sampler frees"),
    "wake_s": ("", "seconds until the sampler is awake"),
    "sync_s": ("<= 3", "seconds of a whole sync"),
    "step_s": ("", "seconds of a step"),
    "tokens_per_s": ("", "tokens/s of a step, prompts and all phases included"),
    "ratio_off_by": ("<= 0.02", "mean probability of trainer / sampler: distance from 1"),
    "approx_kl_off_by": ("<= 0.01", "KL between sampler and trainer: distance from 0"),
    "accuracy_before": ("", "held-out accuracy of the laboratory's base model"),
    "accuracy_after": ("", "held-out accuracy after 40 steps of PPO"),
    "lab_s": ("", "seconds of the laboratory, base model included"),
    "lab_step_s": ("", "seconds of a step of the laboratory"),
}


# ---- the machine -----------------------------------------------------------------------------


def machine() -> dict:
    """What the page says of this machine. The process must not hold memory of the card."""
    about = {"card": None, "name": f"{cpu_name()} (CPU)"}
    cards = list_cards()
    if cards:
        name, driver, memory = cards[0].split(", ")
        about = {"card": name, "name": name, "cards": len(cards)}
        about |= {"driver": driver, "memory": memory}
    about["cores"] = len(os.sched_getaffinity(0))
    about["ram_gib"] = round(psutil.virtual_memory().total / 2**30)
    about["python"] = platform.python_version()
    about["versions"] = versions()
    # Parts name the commit for themselves.
    about["versions"].pop("git_commit", None)
    return about


def list_cards() -> list[str]:
    """A line for each GPU: name, driver, memory. Raises UserError where nvidia-smi fails.

    With a torch for CPUs there is none, since the parts run on the CPU then.
    """
    check_stack(torch.version.cuda, torch.cuda.is_available())
    if not torch.cuda.is_available():
        return []
    query = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        query += ["-i", visible]
    try:
        lines = subprocess.check_output(["nvidia-smi", *query], text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"nvidia-smi does not name the GPU: {error}") from error
    return lines.splitlines()


def cpu_name() -> str:
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return (names or [platform.machine()])[0].strip()


def file_name(about: dict) -> str:
    return re.sub(r"[^a-z0-9]+", "-", about["name"].lower()).strip("-")


# ---- a part ----------------------------------------------------------------------------------


def command_of(name: str, folder: str, has_gpu: bool) -> list[str]:
    """All that the command writes goes into the folder, which does not outlive it."""
    tests = shlex.split(PARTS[name].tests)
    if not tests:
        return [sys.executable, f"{ROOT}/tools/bench_gpu.py", name, folder]
    marked = "not gpu"
    if has_gpu:
        marked = "gpu"
    tests[0] = f"{ROOT}/tests/{tests[0]}"
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-v", "-rfEs", "-m", marked]
    return [sys.executable, "-m", "pytest", *options, "--basetemp", f"{folder}/tests", *tests]


def run_part(name: str, timeout: int, has_gpu: bool) -> dict:
    """The part's result, seconds, last line and figures.

    result: passed, failed, timed out, or skipped where no test had anything to try.
    """
    for old in LOGS.glob(f"{name}.*"):
        old.unlink()
    log = LOGS / f"{name}.log"
    figures = {}
    part = {"date": datetime.date.today().isoformat(), "commit": commit()}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = run_process(command_of(name, folder, has_gpu), log, timeout)
        if result == "passed" and not PARTS[name].tests:
            figures = json.loads(Path(folder, "figures.json").read_text())
        for number, path in enumerate(sorted(Path(folder).rglob("run.log"))):
            # What libraries printed in a run. Passed tests have removed theirs.
            shutil.copy(path, LOGS / f"{name}.run{number}.log")
    part |= {"result": result, "seconds": time.monotonic() - begin, "figures": figures}
    text = log.read_text("utf-8", "replace").replace(folder, "FOLDER")
    # Bars of progress are no lines.
    lines = [line.strip("= ") for line in re.split(r"[\r\n]", text) if "%|" not in line]
    part["last"] = last_line(lines, figures)
    part["notes"] = [line[:CHARACTERS] for line in lines if line.startswith(NOTES)]
    # pytest fails where it has selected no test.
    if PARTS[name].tests and re.fullmatch(NOTHING_TRIED, part["last"]):
        part["result"] = "skipped"
    return part


def last_line(lines: list[str], figures: dict) -> str:
    """The figures, where there are some; the last line of the output, where there are none."""
    if figures:
        return ", ".join(f"{key} {shown(figures[key])}" for key in FIGURES if key in figures)
    said = [line for line in lines if line] or ["no word"]
    return said[-1][:CHARACTERS]


def commit() -> str:
    """Ten digits, and -dirty where a file outside docs/ was edited; the pages lie in there."""
    git = ["git", "-C", str(ROOT)]
    options = {"text": True, "stderr": subprocess.DEVNULL}
    edits = [*git, "status", "--porcelain", "--", ".", ":!docs"]
    try:
        found = subprocess.check_output([*git, "rev-parse", "--short=10", "HEAD"], **options)
        is_edited = subprocess.check_output(edits, **options) != ""
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    if is_edited:
        return f"{found.strip()}-dirty"
    return found.strip()


def run_process(command: list[str], log: Path, timeout: float) -> str:
    """Returns passed, failed or timed out. All processes of the command have ended then."""
    # Without the width pytest cuts off why a test failed.
    env = {"HF_HUB_OFFLINE": "1", **os.environ, "COLUMNS": str(CHARACTERS)}
    options = {"stderr": subprocess.STDOUT, "start_new_session": True, "cwd": ROOT, "env": env}
    with log.open("w") as output, subprocess.Popen(command, stdout=output, **options) as process:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            kill_all(process.pid)
    if code == 0:
        return "passed"
    return "failed"


def kill_all(pid: int) -> None:
    """Ends a process, all that it started, and the session that it leads, if it leads one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        # Launchers give their ranks sessions of their own.
        for process in psutil.Process(pid).children(recursive=True):
            process.kill()
        psutil.Process(pid).kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# ---- the page --------------------------------------------------------------------------------


def page(found: dict) -> str:
    """The page of a card, from its figures."""
    about = found["machine"]
    lines = [f"# {about['name']}", "", "Made by `make card`. No line of it is written by hand.", ""]
    lines += [described(about), ""]
    if not about["card"]:
        lines += [
            "**This machine has no GPU.** The parts ran on the CPU with tiny shapes, and left out "
            "what needs a GPU. Only the laboratory has its whole size. This shows that the parts "
            "work. It says nothing about a GPU. The planned figures are those of an H100.",
            "",
        ]
    lines += table_of_parts(found) + table_of_phases(found["parts"])
    lines += table_of_figures(found["parts"], has_targets=about["card"] is not None)
    return "\n".join(lines).rstrip() + "\n"


def described(about: dict) -> str:
    words = []
    if about["card"]:
        words = [f"{about['cards']} card(s) of {about['memory']}", f"driver {about['driver']}"]
    words += [f"{about['cores']} cores", f"{about['ram_gib']} GiB of memory"]
    words += [f"Python {about['python']}"]
    words += [f"{name} {version}" for name, version in sorted(about["versions"].items())]
    return f"{', '.join(words)}."


def table_of_parts(found: dict) -> list[str]:
    parts = found["parts"]
    lines = ["| part | what it shows | result | seconds | last line | date, commit |"]
    lines += ["|---|---|---|---|---|---|"]
    for name in ordered(parts):
        part = parts[name]
        last = part["last"].replace("|", "\\|")
        if part["figures"]:
            last = "see below"
        cells = [name, PARTS[name].shows, result(found, name), f"{part['seconds']:.0f}"]
        cells += [last, f"{part['date']}, {part['commit']}"]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [line for name in ordered(parts) for line in parts[name]["notes"]]
    if notes:
        lines += ["", *(f"    {line}" for line in notes)]
    return [*lines, ""]


def table_of_phases(parts: dict) -> list[str]:
    """The seconds and the memory of each phase of a step, beside the plan."""
    lines = ["| part | phase | seconds | planned seconds | GiB | planned GiB |"]
    lines += ["|---|---|---|---|---|---|"]
    columns = ("seconds", "planned_seconds", "gib", "planned_gib")
    for name in ordered(parts):
        for phase, figures in parts[name]["figures"].get("phases", {}).items():
            cells = [shown(figures.get(column)) for column in columns]
            lines.append(f"| {name} | {phase} | {' | '.join(cells)} |")
    if len(lines) == 2:
        return []
    return [
        "The plan's seconds and GiB are estimates of tools/cost.py and tools/memory.py.",
        "",
        *lines,
        "",
    ]


def table_of_figures(parts: dict, has_targets: bool) -> list[str]:
    lines = ["| part | figure | value | target | what it is |", "|---|---|---|---|---|"]
    for name in ordered(parts):
        figures = parts[name]["figures"]
        for figure in filter(figures.__contains__, FIGURES):
            target, text = FIGURES[figure]
            if not has_targets:
                target = ""
            value = shown(figures[figure])
            lines.append(f"| {name} | {figure} | {value} | {target or '-'} | {text} |")
    if len(lines) == 2:
        return []
    return [*lines, ""]


def result(found: dict, name: str) -> str:
    word = found["parts"][name]["result"]
    if found["machine"]["card"]:
        return word
    return f"{word} (CPU)"


def ordered(parts: dict) -> list[str]:
    return [name for name in PARTS if name in parts]


def shown(figure: float | None) -> str:
    """With three digits, or all digits of a number from 100 on."""
    if figure is None:
        return "-"
    if 0 < abs(figure) < 0.001:
        return "< 0.001"
    if abs(figure) >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.3g}"


def table_of_runs(pages: list[dict]) -> str:
    """What has been run where: a row for each part, a column for each page."""
    names = [f"[{page['machine']['name']}](cards/{page['file']}.md)" for page in pages]
    lines = [f"| part | what it shows | {' | '.join(names)} |", f"|---|---|{'---|' * len(pages)}"]
    for name, part in PARTS.items():
        cells = [cell(page, name) for page in pages]
        lines.append(f"| {name} | {part.shows} | {' | '.join(cells)} |")
    if not any(page["machine"]["card"] for page in pages):
        lines += ["", *NO_GPU]
    return "\n".join(lines) + "\n"


def cell(found: dict, name: str) -> str:
    part = found["parts"].get(name)
    if part is None:
        return "not run"
    return f"{result(found, name)}, {part['seconds']:.0f} s, {part['date']}"


def read_pages(folder: Path) -> list[dict]:
    pages = []
    for path in sorted(folder.glob("*.json")):
        pages.append(read_page(path) | {"file": path.stem})
    # Cards come before CPUs.
    return sorted(pages, key=lambda page: not page["machine"]["card"])


def read_page(path: Path) -> dict:
    """Raises UserError for a file that this tool has not written."""
    with contextlib.suppress(ValueError):
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict) and found.keys() >= {"machine", "parts"}:
            return found
    raise UserError(f"{path} is not a page of make card: remove it")


def with_table(text: str, table: str) -> str:
    """The text of a page with another table between the marks. Raises UserError without them."""
    if not all(mark in text for mark in MARKS):
        raise UserError(f"docs/scaling.md has lost its line {MARKS[0].strip()} or its end")
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}{table}{MARKS[1]}{after}"


def write(found: dict, folder: Path) -> None:
    name = file_name(found["machine"])
    folder.mkdir(parents=True, exist_ok=True)
    # Half a file would end the next call.
    unfinished = folder / f"{name}.part"
    unfinished.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    unfinished.replace(folder / f"{name}.json")
    (folder / f"{name}.md").write_text(page(found), "utf-8")
    if folder.resolve() == CARDS:
        path = ROOT / "docs" / "scaling.md"
        text = with_table(path.read_text("utf-8"), table_of_runs(read_pages(CARDS)))
        path.write_text(text, "utf-8")


def earlier(about: dict, folder: Path) -> dict:
    """The parts that earlier calls have run on this GPU. Raises UserError for other versions."""
    path = folder / f"{file_name(about)}.json"
    if not path.exists():
        return {}
    found = read_page(path)
    for name in ("name", "driver", "versions"):
        ours = about.get(name)
        theirs = found["machine"].get(name)
        if ours != theirs:
            raise UserError(
                f"{path} is of {name} {theirs}, and here it is {ours}: rename that page, or give "
                "another folder by --out"
            )
    return found["parts"]


# ---- the command -----------------------------------------------------------------------------


def read_arguments(argv: list[str]):
    """Raises UserError for a part that does not exist."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=CARDS, help="folder of the page (docs/cards)")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, help=f"of each part, in seconds ({TIMEOUT})"
    )
    args = parser.parse_args(argv)
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        raise UserError(f"no such part: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if not 0 < args.timeout < 1e6:
        raise UserError(f"--timeout {args.timeout}: give a number of seconds above 0")
    return args


def main(argv: list[str]) -> int:
    args = read_arguments(argv)
    about = machine()
    print(f"{about['name']}: {described(about)}", flush=True)
    # A folder that cannot be written is told before the first part.
    LOGS.mkdir(parents=True, exist_ok=True)
    write({"machine": about, "parts": earlier(about, args.out)}, args.out)
    has_failed = False
    for name in args.parts or PARTS:
        print(f"{name:12}", end=" ", flush=True)
        part = run_part(name, args.timeout, about["card"] is not None)
        # Another call may have written in the meantime.
        parts = earlier(about, args.out) | {name: part}
        write({"machine": about, "parts": parts}, args.out)
        print(f"{part['result']} in {part['seconds']:.0f} s: {part['last']}", flush=True)
        if part["result"] in ("failed", "timed out"):
            has_failed = True
            for line in part["notes"]:
                print(f"{'':12} {line}")
            print(f"{'':12} its output is in {LOGS.relative_to(ROOT)}/{name}.log", flush=True)
    print(f"the page is {args.out / file_name(about)}.md")
    return int(has_failed)


if __name__ == "__main__":
    # The end of a login or of a job must end the part too. nohup ignores SIGHUP, and so do we then.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the results of the parts that have ended are kept", file=sys.stderr)
        sys.exit(130)
