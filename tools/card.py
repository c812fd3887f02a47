"""Measures a machine: `python tools/card.py [PART ...] [--out FOLDER] [--timeout SECONDS]`.

A part is a process. It runs GPU tests or a part of tools/bench.py. Without a PART all parts run.
If a part fails or takes too long, the next part starts. After each part the tool writes the page
FOLDER/NAME.md and its figures FOLDER/NAME.json, where NAME is the GPU's name. FOLDER is docs/cards,
or out/card on a machine without a GPU. A later call adds its parts to the page. If FOLDER is
docs/cards, the tool also writes the table in docs/scaling.md anew. The output of a part is in
out/card. Without a GPU the parts run on the CPU with small shapes.

The exit code is 1 if a part has failed, and 2 for a wrong command.
"""

import argparse
import contextlib
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

sys.path.insert(0, str(Path(__file__).parent.parent))

# The import of environment.py sets variables that torch reads, and hides a GPU from the CPU stack.
from nanoorz import environment  # noqa: F401  # isort: skip
import psutil
import torch

from nanoorz.log import versions
from nanoorz.ranks import UserError, one_line

ROOT = Path(__file__).resolve().parent.parent
CARDS = ROOT / "docs" / "cards"
LOGS = ROOT / "out" / "card"
MARKS = ("<!-- cards: made by tools/card.py -->\n", "<!-- end of cards -->\n")
# {part: (a file of tests/ with options of pytest, or "" for a part of bench.py; what it shows)}
PARTS = {
    "cycle": (
        "test_gpu.py -k 'sampler_sleeps and eager'",
        "the sampler without CUDA graphs: seeds, sync",
    ),
    "kernels": (
        "test_gpu.py -k 'varlen or packed or head or bf16 or waits'",
        "attention, head, update against references; waits for the GPU",
    ),
    "sampler": (
        "test_gpu.py -k 'sampler_sleeps and not eager'",
        "the sampler with CUDA graphs, ZeRO 3, fp8",
    ),
    "compiled": ("test_gpu.py -k run_in_fp16", "a run with compiled layers, and one in fp16"),
    "runs": (
        "test_gpu.py -k 'resumes or signal or demo'",
        "whole runs: ZeRO 2 and 3, resume, signal",
    ),
    "two_cards": ("test_gpu.py -k two_cards", "two GPUs against one: NCCL, a shared sampler"),
    "zero2": ("", "two steps of 0.5B with a critic at ZeRO 2"),
    "zero3": ("", "two steps of 0.5B with a critic at ZeRO 3"),
    "step": ("", "four GRPO steps of 0.5B; verl's published step takes 6.39 s on one H100"),
    "update": (
        "",
        "an update of 0.5B by the length of its rows, compiled, and with each attention",
    ),
    "sync": ("", "a sync of the sampler, 0.5B"),
    "sync_large": ("", "a sync of the sampler, 1.5B"),
    "rollout": ("", "the sampler's tokens/s"),
    "lab": ("", "the laboratory: 40 steps of PPO with a critic from a small base model"),
}


def machine() -> dict:
    """Returns the name of the GPU (without a GPU: of the CPU), its driver, and the versions."""
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        query += ["-i", os.environ.get("CUDA_VISIBLE_DEVICES") or "0"]
        name, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
        about = {"card": name, "name": name, "driver": driver, "gpus": torch.cuda.device_count()}
    else:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        about = {"card": None, "name": f"{found[1].strip() if found else 'unknown'} (CPU)"}
    return about | {"cores": len(os.sched_getaffinity(0)), "versions": versions()}


def command_of(name: str, has_gpu: bool) -> list[str]:
    if not PARTS[name][0]:
        return [sys.executable, f"{ROOT}/tools/bench.py", name]
    tests, *options = shlex.split(PARTS[name][0])
    options += ["-o", "addopts=", "-p", "no:cacheprovider", "-v", "-rfEs"]
    options += ["-m", "gpu" if has_gpu else "not gpu"]
    return [sys.executable, "-m", "pytest", f"{ROOT}/tests/{tests}", *options]


def run_part(name: str, timeout: float, has_gpu: bool) -> dict:
    """Returns the part's result (passed, failed, timed out or skipped), seconds and figures."""
    log = LOGS / f"{name}.log"
    begin = time.monotonic()
    # All temporary files of the part are in this folder, which is deleted.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = run_process(command_of(name, has_gpu), log, timeout, folder)
    seconds = time.monotonic() - begin
    text = log.read_text("utf-8", "replace")
    figures = {}
    if result == "passed" and not PARTS[name][0]:
        figures = json.loads(re.findall(rf'^{{"{name}".*', text, re.MULTILINE)[-1])[name]
    # The exit code of pytest does not tell whether a test ran.
    if re.search(r"^=+ (\d+ (skipped|deselected|warnings?),? ?)+in ", text, re.MULTILINE):
        result = "skipped"
    return {"date": time.strftime("%F"), "seconds": seconds, "result": result, "figures": figures}


def run_process(command: list[str], log: Path, timeout: float, folder: str) -> str:
    """Returns passed, failed or timed out. All processes of the command have ended then."""
    env = {"HF_HUB_OFFLINE": "1", **os.environ, "TMPDIR": folder}
    options = {"stderr": subprocess.STDOUT, "start_new_session": True, "cwd": ROOT, "env": env}
    with log.open("w") as output, subprocess.Popen(command, stdout=output, **options) as process:
        try:
            return "failed" if process.wait(timeout) else "passed"
        except subprocess.TimeoutExpired:
            started = psutil.Process(process.pid).children(recursive=True)
            # pytest then prints why tests have failed so far.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            for child in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            return "timed out"
        finally:
            kill_all(process.pid)


def kill_all(pid: int) -> None:
    """Ends a process, its descendants, and the session that the process leads."""
    with contextlib.suppress(psutil.NoSuchProcess):
        # Launchers give each rank a session of its own.
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(found: dict) -> str:
    about = found["machine"]
    words = about | about["versions"]
    words = [f"{key} {words[key]}" for key in words if key not in ("card", "name", "versions")]
    text = f"# {about['name']}\n\n`make card` has written this page. {', '.join(words)}.\n\n"
    if not about["card"]:
        text += "**This machine has no GPU.** Shapes are small. Planned figures are an H100's.\n\n"
    rows, figures = [], []
    for name, part in found["parts"].items():
        when = [part["date"], part["commit"]]
        rows.append([name, part["result"], f"{part['seconds']:.0f}", *when])
        figures += [[name, figure, f"{value:,.4g}"] for figure, value in part["figures"].items()]
    text += table(["part", "result", "seconds", "date", "commit"], rows)
    return f"{text}\n{table(['part', 'figure', 'value'], figures)}" if figures else text


def table_of_runs(folder: Path) -> str:
    """Returns a table with a row for each part, and a column for each page of the folder."""
    head = ["part", "what it shows"]
    rows = {name: [name, shows] for name, (_, shows) in PARTS.items()}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        head.append(f"[{found['machine']['name']}](cards/{path.stem}.md)")
        for name, row in rows.items():
            part = found["parts"].get(name)
            cell = part and f"{part['result']}, {part['seconds']:.0f} s, {part['date']}"
            row.append(cell or "not run")
    return table(head, list(rows.values()))


def write(path: Path, about: dict, new: dict) -> None:
    """Adds new parts to the page, or checks that it could. Raises OSError and UserError."""
    old = json.loads(path.read_text()) if path.exists() else {"machine": about, "parts": {}}
    for key in ("driver", "versions"):
        theirs, ours = old["machine"].get(key), about.get(key)
        if theirs != ours:
            advice = "rename that page, or give another folder by --out"
            raise UserError(f"{path} has {key} {theirs}, and here it is {ours}: {advice}")
    found = {"machine": about, "parts": old["parts"] | new}
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()
    if not new:
        return
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(found))
    if path.parent.resolve() == CARDS:
        scaling = ROOT / "docs" / "scaling.md"
        before, rest = scaling.read_text().split(MARKS[0])
        _, after = rest.split(MARKS[1])
        scaling.write_text(before + MARKS[0] + table_of_runs(CARDS) + MARKS[1] + after)


def main(argv: list[str]) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the folder of the page")
    # On an H200 the parts cycle and kernels took 78 s each. The other limits are guesses.
    parser.add_argument("--timeout", type=float, default=480, help="seconds for each part (480)")
    args = parser.parse_args(argv)
    for name in set(args.parts) - set(PARTS):
        parser.exit(2, f"error: no such part: {name}; choose from {', '.join(PARTS)}\n")
    if not args.timeout > 0:
        parser.exit(2, f"error: --timeout {args.timeout:g}: give seconds above 0\n")
    about = machine()
    if args.out is None:
        # A page of a CPU shows nothing that a pull request needs.
        args.out = CARDS if about["card"] else LOGS
    commit = about["versions"].pop("git_commit", "") or "unknown"
    path = args.out / (re.sub(r"[^a-z0-9]+", "-", about["name"].lower()).strip("-") + ".json")
    # A folder that cannot be written is an error before the first part.
    LOGS.mkdir(parents=True, exist_ok=True)
    write(path, about, {})
    results = set()
    for name in args.parts or PARTS:
        print(f"{name:12}", end=" ", flush=True)
        part = run_part(name, args.timeout, about["card"] is not None)
        write(path, about, {name: part | {"commit": commit}})
        print(f"{part['result']} in {part['seconds']:.0f} s; output: out/card/{name}.log")
        results.add(part["result"])
    print(f"the page is {path.with_suffix('.md')}")
    return int(not results.isdisjoint({"failed", "timed out"}))


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
