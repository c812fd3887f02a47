"""The page of a machine with a GPU: `python tools/card.py [PART ...] [--out FOLDER] [--timeout S]`.

A part is a process: GPU tests, or a part of tools/bench.py. If a part fails or takes too long, the
next part starts. After each part the tool writes the page FOLDER/NAME.md and its figures
FOLDER/NAME.json, where NAME is the GPU's name. A later call adds its parts to the page. If FOLDER
is docs/cards, the tool also writes the table in docs/scaling.md anew from all pages. The output of
a part is in out/card. Without a GPU the same parts run on the CPU with small shapes.

The exit code is 1 if a part has failed, and 2 for a wrong command.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from lib.common import UserError, check_stack, one_line
from lib.report import versions

ROOT = Path(__file__).resolve().parent.parent
CARDS = ROOT / "docs" / "cards"
LOGS = ROOT / "out" / "card"
MARKS = ("<!-- cards: made by tools/card.py -->\n", "<!-- end of cards -->\n")
NO_GPU = """
**No GPU is among these machines yet.** The kernels of attention for GPUs, NCCL, CUDA graphs, fp8
and the sampler's sleep have run nowhere. The limits in the GPU tests and the plan are predictions.
"""
# {part: (a file of tests/ with options of pytest, or "" for a part of bench.py; what it shows)}
PARTS = {
    "cycle": (
        "test_gpu_sampler.py -k eager",
        "the sampler without CUDA graphs: seeds, sleep, sync",
    ),
    "kernels": ("test_gpu_kernels.py", "attention, head, advantages, update against references"),
    "sampler": ("test_gpu_sampler.py -k 'not eager'", "the sampler with CUDA graphs, ZeRO 3, fp8"),
    "runs": ("test_gpu_runs.py -k 'not two_cards'", "whole runs: ZeRO 2 and 3, resume, signal"),
    "two_cards": ("test_gpu_runs.py -k two_cards", "two GPUs against one: NCCL, a shared sampler"),
    "zero2": ("", "three steps of 0.5B with a critic at ZeRO 2"),
    "zero3": ("", "three steps of 0.5B with a critic at ZeRO 3"),
    "step": ("", "four GRPO steps of 0.5B; verl's published step takes 6.39 s on one H100"),
    "update": ("", "an update of 0.5B with each kind of attention"),
    "update7b": ("", "an update of four layers of 7B with each kind of attention"),
    "rollout": ("", "the sampler's tokens/s"),
    "lab": ("", "the laboratory: 40 steps of PPO with a critic from a small base model"),
}


def machine() -> dict:
    """What the page says of this machine."""
    check_stack(torch.version.cuda, torch.cuda.is_available())
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    about = {"card": None, "name": f"{found[1].strip() if found else 'unknown'} (CPU)"}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
        query += ["--format=csv,noheader", "-i", os.environ.get("CUDA_VISIBLE_DEVICES") or "0"]
        name, driver, size = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
        about = {"card": name, "name": name, "driver": driver, "memory": size}
        about["cards"] = torch.cuda.device_count()
    about["cores"] = len(os.sched_getaffinity(0))
    about["ram_gib"] = round(psutil.virtual_memory().total / 2**30)
    return about | {"python": sys.version.split()[0], "versions": versions()}


# ---- a part ----------------------------------------------------------------------------------


def command_of(name: str, has_gpu: bool) -> list[str]:
    if not PARTS[name][0]:
        return [sys.executable, f"{ROOT}/tools/bench.py", name]
    tests, *options = shlex.split(PARTS[name][0])
    options += ["-o", "addopts=", "-p", "no:cacheprovider", "-v", "-rfEs"]
    options += ["-m", "gpu" if has_gpu else "not gpu"]
    return [sys.executable, "-m", "pytest", f"{ROOT}/tests/{tests}", *options]


def run_part(name: str, timeout: float, has_gpu: bool) -> dict:
    """The part's result (passed, failed, timed out or skipped), seconds, last line and figures."""
    log = LOGS / f"{name}.log"
    begin = time.monotonic()
    # All temporary files of the part are in this folder, which is deleted.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = run_process(command_of(name, has_gpu), log, timeout, folder)
    part = {"date": f"{datetime.date.today()}", "seconds": time.monotonic() - begin, "figures": {}}
    text = log.read_text("utf-8", "replace").replace(folder, "FOLDER")
    # A progress bar is not a line.
    lines = [line.strip("= ") for line in re.split(r"[\r\n]", text) if "%|" not in line]
    last = [line for line in ["no output", *lines] if line][-1]
    if result == "passed" and not PARTS[name][0]:
        part["figures"] = json.loads([line for line in lines if line[:1] == "{"][-1])[name]
        last = "see below"
    # pytest fails where no test was selected.
    if re.fullmatch(r"(\d+ (skipped|deselected|warnings?),? ?)+in .*|no tests ran.*", last):
        result = "skipped"
    notes = [line for line in lines if re.match(r"(FAILED|ERROR) tests/|SKIPPED \[", line)]
    return part | {"result": result, "last": last[:300], "notes": [note[:300] for note in notes]}


def run_process(command: list[str], log: Path, timeout: float, folder: str) -> str:
    """Returns passed, failed or timed out. All processes of the command have ended then."""
    # Without COLUMNS pytest shortens the reason of a failure.
    env = {"HF_HUB_OFFLINE": "1", **os.environ, "COLUMNS": "300", "TMPDIR": folder}
    options = {"stderr": subprocess.STDOUT, "start_new_session": True, "cwd": ROOT, "env": env}
    with log.open("w") as output, subprocess.Popen(command, stdout=output, **options) as process:
        try:
            return "failed" if process.wait(timeout) else "passed"
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            kill_all(process.pid)


def kill_all(pid: int) -> None:
    """Ends a process, its descendants, and the session that it leads."""
    with contextlib.suppress(psutil.NoSuchProcess):
        # Launchers give each rank a session of its own.
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# ---- the page --------------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = []
    for row in (head, ["---"] * len(head), *rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def page(found: dict) -> str:
    about, parts = found["machine"], found["parts"]
    words = about | about["versions"]
    words = [f"{key} {words[key]}" for key in words if key not in ("card", "name", "versions")]
    text = f"# {about['name']}\n\n`make card` has written this page. {', '.join(words)}.\n\n"
    if not about["card"]:
        text += "**This machine has no GPU.** Shapes are small. Planned figures are an H100's.\n\n"
    rows = []
    figures = []
    for name, part in parts.items():
        seconds, when = f"{part['seconds']:.0f}", f"{part['date']}, {part['commit']}"
        rows.append([name, shows(name), result(found, name), seconds, part["last"], when])
        figures += [[name, figure, f"{value:,.4g}"] for figure, value in part["figures"].items()]
    head = ["part", "what it shows", "result", "seconds", "last line", "date, commit"]
    text += table(head, rows) + "\n" + table(["part", "figure", "value"], figures)
    notes = [f"    {note}" for part in parts.values() for note in part["notes"]]
    return "\n".join([text, *notes]).rstrip() + "\n"


def shows(name: str) -> str:
    return PARTS.get(name, ("", "a part of an earlier version"))[1]


def result(found: dict, name: str) -> str:
    return found["parts"][name]["result"] + ("" if found["machine"]["card"] else " (CPU)")


def table_of_runs(folder: Path) -> str:
    """A row for each part, and a column for each page."""
    pages = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    names = [name for found in pages.values() for name in found["parts"]]
    rows = {name: [name, shows(name)] for name in [*PARTS, *names]}
    head = ["part", "what it shows"]
    for stem, found in pages.items():
        head.append(f"[{found['machine']['name']}](cards/{stem}.md)")
        for name, row in rows.items():
            part = found["parts"].get(name)
            cell = part and f"{result(found, name)}, {part['seconds']:.0f} s, {part['date']}"
            row.append(cell or "not run")
    has_gpu = any(found["machine"]["card"] for found in pages.values())
    return table(head, list(rows.values())) + ("" if has_gpu else NO_GPU)


def write(path: Path, about: dict, new: dict) -> None:
    """Adds the new parts to the page. Raises UserError for a page of other versions."""
    # Another call may have added parts in the meantime.
    old = json.loads(path.read_text()) if path.exists() else {"machine": about, "parts": {}}
    for key in ("driver", "versions"):
        theirs, ours = old["machine"].get(key), about.get(key)
        if theirs != ours:
            advice = "rename that page, or give another folder by --out"
            raise UserError(f"{path} has {key} {theirs}, and here it is {ours}: {advice}")
    found = {"machine": about, "parts": old["parts"] | new}
    path.parent.mkdir(parents=True, exist_ok=True)
    # The next call cannot read half a file.
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(found, indent=1) + "\n")
    unfinished.replace(path)
    path.with_suffix(".md").write_text(page(found))
    if path.parent.resolve() == CARDS:
        scaling = ROOT / "docs" / "scaling.md"
        before, rest = scaling.read_text().split(MARKS[0])
        _, after = rest.split(MARKS[1])
        scaling.write_text(before + MARKS[0] + table_of_runs(CARDS) + MARKS[1] + after)


# ---- the command -----------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=CARDS, help="folder of the page (docs/cards)")
    # No GPU has shown yet how long a part takes.
    parser.add_argument("--timeout", type=float, default=480, help="seconds for each part (480)")
    args = parser.parse_args(argv)
    for name in set(args.parts) - set(PARTS):
        parser.error(f"no such part: {name}; choose from {', '.join(PARTS)}")
    about = machine()
    commit = about["versions"].pop("git_commit", "unknown")
    path = args.out / (re.sub(r"[^a-z0-9]+", "-", about["name"].lower()).strip("-") + ".json")
    # A folder that cannot be written is an error before the first part.
    LOGS.mkdir(parents=True, exist_ok=True)
    write(path, about, {})
    results = []
    for name in args.parts or PARTS:
        print(f"{name:12}", end=" ", flush=True)
        part = run_part(name, args.timeout, about["card"] is not None)
        write(path, about, {name: part | {"commit": commit}})
        print(f"{part['result']} in {part['seconds']:.0f} s: {part['last']}", flush=True)
        print(*part["notes"], f"{'':12} output: out/card/{name}.log", sep="\n", flush=True)
        results.append(part["result"])
    print(f"the page is {path.with_suffix('.md')}")
    return int(not {"failed", "timed out"}.isdisjoint(results))


if __name__ == "__main__":
    # The end of a login or of a job must end the part too, unless nohup has turned SIGHUP off.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the results of the parts that have ended are kept", file=sys.stderr)
        sys.exit(130)
