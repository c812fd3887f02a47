"""The promises to the reader as rules: budgets of tokens, simple statements, arrows that go down.

The rules are functions in tests/measure.py; `python tests/measure.py` prints where the files stand.
Each rule is tried here on a text that breaks it, and held against every file of the product.
"""

import re
import subprocess
import sys
import tomllib

import measure
import pytest
from measure import ROOT, STAGES, Source

# Budgets in tokens. A raise is a commit of its own that says why.
RUN_BUDGET = 22_500  # the five stages and what they import
STAGE_BUDGET = 3_400
PPO_BUDGET = 3_800
LIB_BUDGET = 2_000  # each file

LOOP_LINES = 60  # one screen

SOURCES = {name: measure.read(name) for name in measure.product_files()}
FILES = set(SOURCES)
for folder in ("tests", "ablations"):
    FILES |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
GRAPH = measure.import_graph(SOURCES)


def holds(broken: list[str]) -> None:
    """Fails with the places that break a rule, one a line, and without a traceback."""
    if broken:
        pytest.fail("\n".join(broken), pytrace=False)


# ---- the house -----------------------------------------------------------------------------------


def test_the_root_holds_the_five_stages():
    assert {path.name for path in ROOT.glob("*.py")} == set(STAGES)


def budget(name: str) -> int | None:
    """At most so many tokens; tools and tasks have no budget."""
    if name == "ppo.py":
        return PPO_BUDGET
    if name in STAGES:
        return STAGE_BUDGET
    if name.startswith("lib/"):
        return LIB_BUDGET
    return None


def over_budget(source: Source) -> list[str]:
    limit = budget(source.name)
    if limit is None or source.tokens <= limit:
        return []
    return [source.at(1, f"{source.tokens} tokens, at most {limit}: delete or move something out")]


def run_over_budget(sources: dict[str, Source]) -> list[str]:
    run = measure.loaded_by(STAGES, measure.import_graph(sources))
    total = sum(sources[name].tokens for name in run)
    if total <= RUN_BUDGET:
        return []
    files = [sources[name].at(1, f"{sources[name].tokens} tokens") for name in run]
    return [f"a run loads {total} tokens, at most {RUN_BUDGET}: delete from", *files]


def test_tokens_of_a_file():
    holds([line for source in SOURCES.values() for line in over_budget(source)])


def test_tokens_of_a_run():
    holds(run_over_budget(SOURCES))


def test_a_budget_bites():
    assert over_budget(Source("lib/x.py", "x = 1\n" * 700))
    assert not over_budget(Source("lib/x.py", '"""Text."""\n' + "x = 1  # why\n" * 600))
    assert over_budget(Source("ckpt.py", f"x = [{'1, ' * 1800}]"))
    assert not over_budget(Source("ppo.py", f"x = [{'1, ' * 1800}]"))
    large = Source("lib/x.py", f"x = [{'1, ' * RUN_BUDGET}]")
    loaded = {"train.py": Source("train.py", "import lib.x"), "lib/x.py": large}
    assert run_over_budget(loaded)
    assert not run_over_budget(loaded | {"train.py": Source("train.py", "")})


def test_a_run_is_what_the_stages_import():
    texts = {
        "train.py": "import ppo\ndef f():\n    from lib import levers\n    from lib.check import x",
        "ppo.py": "",
        "lib/levers.py": "import lib.equal",
        "lib/check.py": "from lib import common",
        "lib/common.py": "",
        "lib/equal.py": "",
        "tools/plot.py": "import train",
    }
    graph = measure.import_graph({name: Source(name, text) for name, text in texts.items()})
    assert measure.loaded_by(STAGES, graph) == [
        "lib/check.py",
        "lib/common.py",
        "ppo.py",
        "train.py",
    ]


# ---- style ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", measure.STYLE, ids=lambda rule: rule.__name__)
def test_style(rule):
    holds([line for source in SOURCES.values() for line in rule(source)])


def block(depth: int, indent: str = "") -> str:
    """Nested `if` statements."""
    lines = [f"{indent}{'    ' * level}if x:" for level in range(depth)]
    return "\n".join([*lines, f"{indent}{'    ' * depth}pass"])


BREAKS = {
    "long_lines": ["x = 1  # " + "a" * 92, '"""' + "a" * 98 + '"""'],
    "formatter_switches": ["x = 1  # fmt: skip", "# fmt: off\nx = 1", "x = 1  # why  # fmt: skip"],
    "dense_statements": [
        "x = " + " + ".join("abcdefghijklmnop"),  # 33 nodes
        "x = f(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)\n" * 2 + "f()\n" * 9,
        "if a:\n  x = [[f(a) + g(b) for a in x if a] for b in y if b and g(1, 2, 3, c(d)(e)(f))]",
    ],
    "parallel_assignments": [
        "a, b = 1, 2",
        "self.a, b = c, d",
        "first, log = rank == 0, RunLog()",
        "[a, b] = [[], []]",
    ],
    "crowded_expressions": [
        "x = 1 if a else 2\n" * 3,
        "x = lambda: 1\n" * 2,
        "while a := f():\n    pass\n" * 2,
        "y = 1\n" * 112 + "x = 1 if a else 2\n" * 3,
        "y = 1\n" * 150 + "x = lambda: 1",
    ],
    "tricks": [
        "text = name * (count > 1)",
        'text = f"{n}_" * (n > 0)',
        "x = 'the demo: ' * (a is None)",
        "x = n * (a or b)",
        "x = text * bool(flag)",
        "x = text * (not flag)",
        "x *= a > b",
        "for x in xs if flag else ():\n    pass",
        "y = [x for x in (xs if flag else [])]",
        "rank == 0 and print(1)",
        "a or f()",
        "moved = path and check(path)",
        "start, moved = saved.step, path and check(path)",
        "x: int = flag and len(xs)",
        "due = old or flag and save()",
        "f(y := a and b.find(c))",
        "def f(a):\n    return a and re.match('x', a)",
        "options = flag and {'a': 1}",
        "x = a and b + 1",
        "x = {'a': 1, 'b': 2}[key]",
        "x = ('no', 'yes')[flag]",
        "x = [load, read][a > b](path)",
        "x = {'a': 1}.get(key, 2)",
    ],
    "long_functions": [
        "def f():\n" + "    x = 1\n" * 40,
        "def main():\n" + "    x = 1\n" * 90,
        'def f():\n    """One.\n' + "\n" * 38 + '    """\n    x = 1',
    ],
    "deep_nesting": [
        block(4),
        "def f():\n" + block(4, "    "),
        "def main():\n" + block(5, "    "),
        "class A:\n    def f(self):\n" + block(4, "        "),
        "for a in b:\n  with c:\n    try:\n      x\n    except E:\n      while d:\n        x",
        "if a:\n  x\nelif b:\n  for c in d:\n    for e in f:\n      for g in h:\n        x",
    ],
    "many_parameters": [
        "def f(a, b, c, d, e, f, g, h):\n    pass",
        "def f(a, b, c, d, /, e, f, *, g, h):\n    pass",
        "def f(self, a, b, c, d, e, f, g, h):\n    pass",
    ],
    "long_trailing_comments": [
        "x = 1  # " + "a" * 41,
        "x = f(a)  # (R, L) and then a sentence that goes on and on",
        "x = f(a)  # (a whole sentence that stands in parentheses goes on and on)",
    ],
}

KEEPS = {
    "long_lines": ["x = 1  # " + "a" * 91],
    "formatter_switches": ["import x  # noqa: F401"],
    "dense_statements": [
        "TABLE = {" + ", ".join(f"{k}: [{k}]" for k in range(40)) + "}",
        "def f():\n" + "    x = g(1, 2)\n" * 30,
        "x = f(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)\n" + "f()\n" * 10,
    ],
    "parallel_assignments": ["a, b = f()", "a, b = b, a + b", "a, *b = c", "a = b = 1", "a = 1, 2"],
    "crowded_expressions": [
        "x = 1 if a else 2\n" * 2 + "x = lambda: 1\nf(y := 2)",
        "y = 1\n" * 197 + "x = 1 if a else 2\n" * 5,
        "y = 1\n" * 200 + "x = lambda: 1",
    ],
    "tricks": [
        "x = a * b",
        "x = a and b",
        "x = a > 1 and b > 1",
        "x = a and isinstance(b, int)",
        "x = path and path.is_file()",
        "def f(a) -> bool:\n    return bool(a) and g(a)",
        "def g(a) -> bool | None:\n    pass\nx = a and g(a)",
        "x = a or f()",
        "if a and f():\n    pass",
        "for x in xs:\n    pass",
        "y = [1 if x else 2 for x in xs]",
        "TABLE = {'a': 1}\nx = TABLE[key]\nx = TABLE.get(key)",
        "x = f(a)[0]",
        "x: tuple[int, str]",
    ],
    "long_functions": [
        "def f():\n" + "    x = 1\n" * 39,
        "def main():\n" + "    x = 1\n" * 89,
    ],
    "deep_nesting": [
        "def f():\n" + block(3, "    "),
        "def main():\n" + block(4, "    "),
        "if a:\n    x\n" + "elif b:\n    x\n" * 9,
        "if a:\n  if b:\n    if c:\n      def f():\n        if d:\n          x",
    ],
    "many_parameters": [
        "def f(self, a, b, c, d, e, f, g):\n    pass",
        "def f(ctx, a, b, *, c, d, e, f, g):\n    pass",
    ],
    "long_trailing_comments": [
        "x = 1  # " + "a" * 40,
        "x = f(a)  # (R, L), (R, L - 1), (longest response, V), (T,), (chunk, V)",
        "# " + "a" * 90 + "\nx = 1",
        'x = "# ' + "a" * 60 + '"',
    ],
}


def cases(texts: dict[str, list[str]]) -> list:
    rules = {rule.__name__: rule for rule in measure.STYLE}
    return [
        pytest.param(rule, text, id=f"{name}-{number}")
        for name, rule in rules.items()
        for number, text in enumerate(texts[name])
    ]


@pytest.mark.parametrize("rule, text", cases(BREAKS))
def test_style_bites(rule, text):
    assert rule(Source("lib/x.py", text))


@pytest.mark.parametrize("rule, text", cases(KEEPS))
def test_style_leaves_alone(rule, text):
    assert rule(Source("lib/x.py", text)) == []


def test_a_place_is_named():
    found = measure.parallel_assignments(Source("lib/x.py", "x = 1\n\na, b = 1, 2\n"))
    assert found == ["lib/x.py:3: a parallel assignment: one line for each name"]


def test_tokens_and_nodes():
    """Counted by hand."""
    text = '"""A docstring."""\n\n\ndef f(x):  # a comment\n    """Another."""\n    return x + 1\n'
    source = Source("lib/x.py", text)
    assert source.tokens == 10  # def f ( x ) : return x + 1
    # return, sum, x and 1; the function, its parameters and x
    assert measure.statement_sizes(source) == [(3, 4), (4, 6)]
    assert source.code_lines == {4, 6}


# ---- the formatter -------------------------------------------------------------------------------


def ruff(*arguments: str, text: str = "") -> list[str]:
    """What ruff says about files, or about a text on its standard input; [] if that is clean."""
    command = [sys.executable, "-m", "ruff", *arguments, "--output-format", "concise"]
    result = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    if result.returncode == 0:
        return []
    return ["make it clean with `ruff`:", result.stdout, result.stderr]


def test_all_files_are_formatted():
    """The whole repository, tests and exercises too. `ruff format .` mends it."""
    holds(ruff("format", "--check", "."))


def test_all_files_are_linted():
    holds(ruff("check", "."))


def test_the_formatter_breaks_lines_at_100_columns():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert settings["line-length"] == measure.LINE_LENGTH
    assert not [key for key in settings if "exclude" in key], "a file is hidden from ruff"


def test_the_formatter_bites():
    check = ["format", "--check", "--stdin-filename", "lib/x.py", "-"]
    assert ruff(*check, text="x = f(1,2)\n")
    assert ruff(*check, text=f"x = f({'a' * 50}, {'b' * 50})\n")
    assert not ruff(*check, text=f"x = f({'a' * 40}, {'b' * 50})\n")


# ---- arrows --------------------------------------------------------------------------------------


def test_imports_go_down():
    broken = []
    for source in SOURCES.values():
        broken += measure.upward_imports(source, FILES)
    holds(broken)


def test_imports_make_no_circle():
    holds(measure.circles(GRAPH))


@pytest.mark.parametrize("name", measure.COPIED_WITH)
def test_a_stage_can_be_copied(name):
    holds(measure.entangled_imports(SOURCES[name], FILES))


def test_ppo_needs_torch_and_numpy_only():
    holds(measure.foreign_imports(SOURCES["ppo.py"], FILES))
    holds(measure.foreign_imports(SOURCES["lib/common.py"], FILES, top_only=True))


HOUSE = {*STAGES, "lib/common.py", "lib/equal.py", "lib/reshard.py", "lib/check.py"}
HOUSE |= {"tools/plot.py", "tools/demo.py", "tasks/code.py", "tasks/jail.py", "ablations/x.py"}


@pytest.mark.parametrize(
    "name, text",
    [
        ("ppo.py", "import rollout"),
        ("ppo.py", "from train import Config"),
        ("reward.py", "def f():\n    import ckpt"),
        ("train.py", "from tools import plot"),
        ("train.py", "import tools.demo as demo"),
        ("train.py", "from tasks import code"),
        ("train.py", "import ablations.x"),
        ("train.py", 'import importlib\nimportlib.import_module("tools.demo")'),
        ("lib/check.py", "from ckpt import claim"),
        ("lib/check.py", "from tools.plot import draw"),
        ("lib/check.py", "def f():\n    import tasks.code"),
        ("tasks/code.py", "import reward"),
        ("tools/plot.py", "from tools import demo"),
        ("tools/plot.py", "from . import demo"),
        ("tools/plot.py", "import demo"),
        ("tools/plot.py", "from tasks import code"),
    ],
)
def test_an_arrow_upward_is_caught(name, text):
    assert measure.upward_imports(Source(name, text), HOUSE)


@pytest.mark.parametrize(
    "name, text",
    [
        ("train.py", "import ppo, rollout\nfrom lib import check\nimport json"),
        ("ppo.py", "import torch\nfrom lib.common import UserError"),
        ("lib/check.py", "from lib import common\nfrom . import equal"),
        ("tasks/code.py", "from lib.common import UserError\nfrom tasks import jail"),
        ("tools/plot.py", "import train\nfrom lib import report"),
        ("train.py", "importlib.import_module(cfg.reward)"),
    ],
)
def test_an_arrow_downward_is_left_alone(name, text):
    assert measure.upward_imports(Source(name, text), HOUSE) == []


def test_a_circle_is_caught():
    texts = {
        "lib/a.py": "from lib import b",
        "lib/b.py": "def f():\n    from lib import c",
        "lib/c.py": "from lib.a import x",
        "lib/d.py": "from lib import a",
    }
    graph = measure.import_graph({name: Source(name, text) for name, text in texts.items()})
    found = measure.circles(graph)
    assert len(found) == 3
    assert "lib/a.py -> lib/b.py -> lib/c.py -> lib/a.py" in found[0]
    assert measure.circles(graph | {"lib/c.py": set()}) == []


def test_an_entangled_stage_is_caught():
    reshard = "def load():\n    from lib import reshard"
    assert measure.entangled_imports(Source("ppo.py", "from lib import check"), HOUSE)
    assert measure.entangled_imports(Source("ppo.py", reshard), HOUSE)
    assert measure.entangled_imports(Source("ckpt.py", "from lib import reshard"), HOUSE)
    assert not measure.entangled_imports(Source("ckpt.py", reshard), HOUSE)
    assert not measure.entangled_imports(Source("reward.py", "from lib import equal"), HOUSE)
    assert measure.entangled_imports(Source("rollout.py", "from lib import equal"), HOUSE)


def test_a_foreign_package_is_caught():
    psutil = Source("lib/common.py", "def f():\n    import psutil")
    assert measure.foreign_imports(psutil, HOUSE)
    assert not measure.foreign_imports(psutil, HOUSE, top_only=True)
    assert measure.foreign_imports(Source("ppo.py", "import deepspeed"), HOUSE)
    text = "import math\nimport torch.distributed as dist\nfrom lib import common"
    assert not measure.foreign_imports(Source("ppo.py", text), HOUSE)


# ---- Config and the loop -------------------------------------------------------------------------


def test_every_setting_is_read():
    reads = set()
    for name, source in SOURCES.items():
        if not name.startswith("tools/"):
            reads |= measure.config_reads(source)
    holds(measure.unread_fields(SOURCES["train.py"], reads))


def test_every_setting_has_advice():
    assert len(measure.config_fields(SOURCES["train.py"])) > 30
    holds(measure.fields_without_advice(SOURCES["train.py"]))


CONFIG = """
class Learning:
    seed: int = 0  # of every random choice, and of nothing else in the whole wide program
    # The sum is longer than the line.
    top_p: float = 1.0
    bare: int = 1

class Config(Learning):
    stop: list[str] = field(
        default_factory=list
    )  # texts

class Other:
    x: int
"""


def test_a_useless_setting_is_caught():
    source = Source("train.py", CONFIG)
    assert measure.config_reads(Source("x.py", "f(cfg.a)\ncfg.b = self.cfg.c")) == {"a", "c"}
    assert len(measure.unread_fields(source, {"seed", "stop", "top_p", "bare"})) == 0
    assert measure.unread_fields(source, {"seed", "stop", "top_p"})[0].startswith(
        "train.py:6: bare"
    )
    assert measure.fields_without_advice(source) == [
        "train.py:6: bare has no advice: add a comment"
    ]
    assert measure.long_trailing_comments(source) == []
    assert len(measure.long_trailing_comments(Source("rollout.py", CONFIG))) == 1


def loop_too_long(source: Source) -> list[str]:
    start, end = measure.training_loop(source)
    length = end - start + 1
    if length <= LOOP_LINES:
        return []
    return [source.at(start, f"the loop has {length} lines, at most {LOOP_LINES}: name a part")]


def test_the_loop_fits_one_screen():
    holds(loop_too_long(SOURCES["train.py"]))


def test_the_loop_has_a_banner_for_each_phase():
    start, _ = measure.training_loop(SOURCES["train.py"])
    found = measure.phases(SOURCES["train.py"])
    if found != list(range(1, 10)):
        holds([f"train.py:{start}: banners `# 1. Prompts: ...` number {found} and not 1 to 9"])


LOOP = """
def main(cfg):
    try:
        evaluate()
        for step in range(start, total):
            # 1. Prompts: drawn anew in each of 3 passes
            a()
            # ---- 2 rollout, 3 reward ----
            b()  # 4. not a banner
            # Another comment about 5 things.
        last()
    except Stopped:
        # 6. Save.
        save()
"""


def test_the_loop_is_found():
    source = Source("train.py", LOOP)
    assert measure.training_loop(source) == (5, 11)
    assert measure.phases(source) == [1, 2, 3]
    assert loop_too_long(source) == []
    assert loop_too_long(
        Source("train.py", LOOP.replace("a()", "a()\n" + "            a()\n" * 60))
    )
    with pytest.raises(LookupError):
        measure.training_loop(
            Source("train.py", "def main():\n    for k in range(3):\n        pass")
        )


# ---- pages ---------------------------------------------------------------------------------------


def files_in_table(page: str) -> set[str]:
    """The names in the first column of a page's tables."""
    return set(re.findall(r"^\| `([\w/]+(?:\.py|/))`", page, re.MULTILINE))


def test_readme_says_which_files_there_are():
    names = files_in_table((ROOT / "README.md").read_text())
    assert names >= set(STAGES), "README.md's table of files leaves out a stage"
    gone = sorted(name for name in names if not (ROOT / name).exists())
    holds([f"README.md: its table names {name}, which is not there" for name in gone])


def test_a_table_is_read():
    page = "`a.py` | a\n| file |\n|---|\n| `ppo.py` | a |\n| `lib/x.py` | `b.py` |\n| `lib/` | c |"
    assert files_in_table(page) == {"ppo.py", "lib/x.py", "lib/"}
