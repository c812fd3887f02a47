"""Do the tests notice small faults of the code? By hand, after `pip install pytest-cov`:

    export COVERAGE_PROCESS_START=$PWD/tests/mutate.cfg PYTHONDONTWRITEBYTECODE=1
    python -m pytest --cov --cov-config tests/mutate.cfg --cov-context test    # out/coverage
    python tests/mutate.py FILE [1/2]    draws 300 mutants by a seed, or tries every second of them

A mutant changes one expression of the stages or of lib/. In a copy it meets the tests that run its
line (its file, if only imports run the line), those without engines first, until one fails."""

import ast
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import deepspeed  # noqa: F401
import pytest
from coverage import CoverageData

ROOT = Path(__file__).parent.parent
CODE = ["ppo.py", "rollout.py", "reward.py", "ckpt.py", "train.py"]
CODE += [f"lib/{path.name}" for path in ROOT.glob("lib/*.py")]
TEXTS = r"tests/test_(structure|docs|contributing|exercises|makefile)"
PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)]
PAIRS += [(ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)]
OTHER = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}


def change(node):
    """Arithmetic, comparisons, constants, conditions, calls: the fields that become another."""
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OTHER:
        return {"op": OTHER[type(node.op)]()}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        return {"ops": [OTHER[type(node.ops[0])](), *node.ops[1:]]}
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        return {"value": not node.value if isinstance(node.value, bool) else node.value + 1}
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return {"value": ast.Constant(None)}
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return {"test": ast.UnaryOp(ast.Not(), node.test)}
    if isinstance(node, ast.Call) and len(node.args) > 1:
        return {"args": [node.args[1], node.args[0], *node.args[2:]]}


def mutants_of(name):
    for number, node in enumerate(ast.walk(ast.parse((ROOT / name).read_text()))):
        if change(node):
            mutant = {"file": name, "line": node.lineno, "node": number, "old": ast.unparse(node)}
            vars(node).update(change(node))
            yield json.dumps(mutant | {"new": ast.unparse(node)})


def covering_tests():
    """{file: {line: tests}}. What a fixture runs, all tests of its file may share."""
    found = {}
    (data := CoverageData(ROOT / "out" / "coverage")).read()
    for name in data.measured_files():
        lines = found[os.path.relpath(name, ROOT)] = {}
        for line, contexts in data.contexts_by_lineno(name).items():
            words = [re.search(r"(tests/.*?)[| ]\(?(\w+)\)?\|?$", text) for text in contexts]
            pairs = {word.groups() for word in words if word and not re.match(TEXTS, word[1])}
            whole = {test.split("::")[0] for test, part in pairs if part not in ("run", "call")}
            lines[line] = whole | {test for test, _ in pairs if test.split("::")[0] not in whole}
    return found


def in_fork(words, folder, log):
    os.setsid()  # so that all its processes can be killed
    os.chdir(folder)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    # A mutant's file has no comments, so --help has no advice.
    words += ["-knot help_has_the_advice", "-oaddopts=", "-xq", "-rfE", "-pno:cacheprovider"]
    os._exit(pytest.main(words))


def first_failure(tests, folder, log):
    for engines in ("not engine", "engine"):
        words = ["-m", f"{engines} and not slow and not long and not gpu", *sorted(tests)]
        child = multiprocessing.Process(target=in_fork, args=(words, folder, log))
        child.start()
        child.join(1200)  # a mutant that hangs its tests is noticed too
        subprocess.run(["pkill", "-KILL", "-s", str(child.pid)])
        child.join()
        if child.exitcode not in (0, 5):  # all passed; there are none
            return (re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(), re.M) or ["hung"])[0]


def run(path, number, of):
    covered = covering_tests()
    (results := Path(f"{path}.{number}")).touch()
    done = len(results.read_text().splitlines())
    folder = Path(tempfile.mkdtemp(), "copy")
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    for mutant in map(json.loads, path.read_text().splitlines()[number - 1 :: of][done:]):
        file = folder / mutant["file"]
        tree = ast.parse(file.read_text())
        node = list(ast.walk(tree))[mutant["node"]]
        vars(node).update(change(node))
        file.write_text(ast.unparse(ast.fix_missing_locations(tree)))
        lines = covered.get(mutant["file"], {})
        tests = lines.get(mutant["line"])
        tests = set().union(*lines.values()) if tests == set() else tests
        mutant["killed by"] = tests and first_failure(tests, folder, folder.parent / "log")
        results.write_text(f"{results.read_text()}{json.dumps(mutant)}\n")
        subprocess.run(["git", "checkout", "-q", "."], cwd=folder, check=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run(Path(sys.argv[1]), *map(int, sys.argv[2].split("/")))
    else:
        drawn = random.Random(24).sample(sorted(m for name in CODE for m in mutants_of(name)), 300)
        Path(sys.argv[1]).write_text("\n".join([*drawn, ""]))
