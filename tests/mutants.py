"""Do the tests notice? Small faults are put into a copy of the code, one at a time.

    python tests/mutants.py [WORD ...]

Each mutant of tests/mutant_table.py replaces one text of one file, and names the tests that must
fail then. This prints for each whether it was killed or has survived, then both counts. With words
only those mutants are tried whose name or file holds one of them. The exit code is 0 if all were
killed. Two run side by side, each in its own copy of the tracked files.

Before a mutant its tests must pass, so first all of them run on the unchanged copy.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutant_table import MUTANTS

ROOT = Path(__file__).parent.parent
WORKERS = 2
PATIENCE = 600  # s; a mutant that hangs its tests was noticed too

# What pytest's exit codes say about a mutant. All others are faults of the table.
VERDICTS = {0: "SURVIVED", 1: "killed"}


def copy_tree(folder) -> Path:
    """Copies all files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source = ROOT / name
        if source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


def run_tests(folder, tests) -> int:
    """Returns pytest's exit code, or 1 where the tests hang."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x"]
    command += ["-p", "no:cacheprovider", *tests]
    # A file may change twice within a second at the same size, which a .pyc would not notice.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return 1
    if process.returncode not in VERDICTS:
        print(output[-2000:])
    return process.returncode


def try_mutant(mutant, folder) -> str:
    path = folder / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return f"its old text occurs {text.count(mutant.old)} times"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        code = run_tests(folder, mutant.tests)
    finally:
        path.write_text(text)
    return VERDICTS.get(code, f"pytest ended with {code}")


def work(mutants, number) -> list[str]:
    """Tries every WORKERS-th mutant in a copy of its own. Returns the verdicts."""
    verdicts = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = copy_tree(Path(temporary))
        for mutant in mutants[number::WORKERS]:
            begin = time.monotonic()
            verdict = try_mutant(mutant, folder)
            seconds = time.monotonic() - begin
            print(f"{verdict:9} {mutant.file}: {mutant.name} ({seconds:.0f} s)", flush=True)
            verdicts.append(verdict)
    return verdicts


def chosen(words) -> list:
    if not words:
        return MUTANTS
    return [m for m in MUTANTS if any(word in f"{m.file} {m.name}" for word in words)]


def main(words) -> int:
    mutants = chosen(words)
    if not mutants:
        print("error: no mutant has such a name or file")
        return 2
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory() as temporary:
        if run_tests(copy_tree(Path(temporary)), tests) != 0:
            print("error: the tests do not pass without a mutant")
            return 2
    print(f"{len(tests)} tests pass without a mutant", flush=True)
    verdicts = []
    with ThreadPoolExecutor(WORKERS) as pool:
        for found in pool.map(work, [mutants] * WORKERS, range(WORKERS)):
            verdicts += found
    killed = verdicts.count("killed")
    print(f"{killed} killed, {len(verdicts) - killed} not")
    return int(killed < len(verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
