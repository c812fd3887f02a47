"""--variant: subclasses of the recipe in files of their own."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, config

import ckpt
import ppo
import rollout
import train
from nanoorz.flags import VARIANTS, flags_of
from nanoorz.log import RunLog
from nanoorz.ranks import UserError
from nanoorz.variants import kept_files

HEAD = "from dataclasses import dataclass\nimport ppo\nfrom nanoorz.flags import flag\n"


def variant(name, *lines, base="ppo.Recipe", head="") -> str:
    """The text of a variant: a class with these lines, and `pass`."""
    body = "\n    ".join([*lines, "pass"])
    return f"{HEAD}{head}\n@dataclass\nclass {name}({base}):\n    {body}\n"


def paid(name, expression, **options) -> str:
    return variant(name, "def paid(self, samples):", f"    return {expression}", **options)


def flagged(name, field, default, **options) -> str:
    return variant(name, f"{field} = flag({default!r}, 'A number.')", **options)


ONE = paid("One", "super().paid(samples)")
TWICE = paid("Twice", "[2 * x for x in super().paid(samples)]")
MORE = paid("More", "[1 + x for x in super().paid(samples)]")
ZERO = paid("Zero", "[0.0 for _ in samples]")


@pytest.fixture
def write(tmp_path):
    """write(name=text, ...): the paths of variants with these texts."""

    def make(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
        return [str(tmp_path / f"{name}.py") for name in texts]

    return make


def paid_with(*words):
    """What a right and a wrong sample are paid."""
    cfg = config(variant=words or None)
    return cfg.paid([SimpleNamespace(reward=x, rewards=None) for x in (1.0, 0.0)])


# ---- method order --------------------------------------------------------------------------------


def test_each_variant_calls_those_before_it(write):
    twice, more, zero = write(twice=TWICE, more=MORE, zero=ZERO)
    assert paid_with(twice, more) == [3.0, 1.0]
    assert paid_with(more, twice) == [4.0, 2.0]
    assert paid_with(zero, more) == [1.0, 1.0]


def test_a_run_has_its_own_variants_only(write):
    """Also where an earlier run of this process had a file of the same name, or of the same text
    within a second."""
    (path,) = write(mine=TWICE)
    assert paid_with(path) == [2.0, 0.0]
    write(mine=TWICE.replace("2", "3"))
    assert paid_with(path) == [3.0, 0.0]
    assert paid_with() == [1.0, 0.0]
    assert not hasattr(config(), "kl_loss_coef") and "maxrl" not in config().estimators


def test_a_variant_builds_on_another_by_importing_it(write):
    """Of variants/, or of a file beside it. A file may have two classes, one built on the other. It
    may import a variant that it is not built on."""
    head = "from variants.kl_loss import KLLoss"
    own = flagged("Own", "own: int", 3, base="KLLoss", head=head)
    more = "[x + self.own for x in super().paid(samples)]"
    child = paid("Child", more, base="Own", head="from variants.own import Own")
    again = paid("Again", "[2 * x for x in super().paid(samples)]", base="Twice", head=head)
    both = f"{TWICE}Alias = Twice\n{again}"
    own_path, child_path, both_path = write(own=own, child=child, both=both)
    assert paid_with(child_path) == paid_with(own_path, child_path) == [4.0, 3.0]
    assert paid_with(both_path) == [4.0, 0.0]
    cfg = config(variant=["textbook_ppo", child_path])
    names = ["log_kl", "kl_loss", "own", "child"]
    assert [name for name, _ in config(variant=child_path).variant_hashes] == names
    assert cfg.kl_loss_coef == 0.1 and isinstance(cfg, ppo.Recipe) and cfg.policy_clip == 0.2


def test_an_estimator_of_a_variant_stands_beside_the_others(write):
    estimators = "estimators = ppo.ESTIMATORS | {'%s': ppo.Estimator(lambda pay, *_: pay)}"
    paths = write(a=variant("A", estimators % "x"), b=variant("B", estimators % "y"))
    cfg = config(variant=["maxrl", *paths])
    assert cfg.estimators.keys() == {*ppo.ESTIMATORS, "maxrl", "x", "y"}
    assert cfg.estimators["gae"] is ppo.ESTIMATORS["gae"] and cfg.estimator == "maxrl"


# ---- what is shipped -----------------------------------------------------------------------------

SHIPPED = sorted(path.stem for path in VARIANTS.glob("*.py"))


def shipped(*names):
    """The config of these variants, with flags that suit each of them."""
    own = {"task": "chain"} if "no_verdict" in names else {}
    own |= {"teacher": "-", "teacher_weight": 0.5} if "distill" in names else {}
    own |= {"n_samples_per_prompt": 8, "max_steps": 99}
    cfg = config(variant=names, zero_stage=2, bf16=True, **own)
    train.check_flags(cfg, 2)
    return cfg


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_variant_has_one_dtype_in_sampler_trainer_and_engine(name):
    """Once fp16 was refused at the start, and no gate had tried it."""
    cfg = shipped(name)
    dtype, setting = ("float16", "fp16") if name == "fp16" else ("bfloat16", "bf16")
    assert rollout.make_settings(cfg, is_gpu=True)["dtype"] == dtype
    assert cfg.training_dtype(torch.bfloat16) is getattr(torch, dtype)
    assert cfg.engine_settings({"bf16": {"enabled": True}}).keys() == {setting}


@pytest.mark.parametrize("name", SHIPPED)
def test_two_shipped_variants_go_together_or_a_line_names_the_order_in_which_they_do(name):
    """Or it says why they do not go together in any order."""
    for other in SHIPPED[SHIPPED.index(name) + 1 :]:
        refused = {}
        for order in ((name, other), (other, name)):
            try:
                shipped(*order)
            except UserError as error:
                refused[order] = str(error)
        lines = "".join(refused.values())
        assert "\n" not in lines
        if len(refused) == 1:
            assert re.search("; use --variant |: name it behind ", lines), lines
        for order in re.findall("; use --variant (.*)", lines):
            shipped(*order.split())


# ---- what is refused -----------------------------------------------------------------------------

HELPER = "def _help(self):", "    return 1"
# Texts of variants a and b, and a pattern of the line that refuses them.
REFUSED = [
    # A name that the recipe lacks, other arguments, what is no method.
    ([paid("A", "[]").replace("paid", "pade")], "A.pade is no method .* write paid.* with _"),
    ([paid("A", "[]").replace("samples", "x")], r"A.paid must be a method with \(self, samples\)"),
    ([variant("A", "paid = 3")], r"A.paid must be a method with \(self, samples\)"),
    ([variant("A", "memory = {}")], "A.memory is no method of the recipe"),
    # A flag that is none.
    ([variant("A", "lambd = 0.5")], "A.lambd is no .*; write `lambd: TYPE = flag.DEFAULT"),
    ([variant("A", "x: int = 1")], "A.x is no flag yet: write @dataclass, `x: TYPE = flag"),
    ([flagged("A", "gamma: str", "a")], "A.gamma must have .* the core's --gamma"),
    ([flagged("A", "paid: int", 1)], "A.paid must have another name"),
    (
        [flagged("A", "x: int", 1).replace("@dataclass", "")],
        "A.x is no flag yet: write @dataclass, .*; helpers have no type",
    ),
    ([flagged("A", "x", 1)], "TypeError: 'x' is a field but has no type"),
    ([variant("A", "x: int")], "TypeError: non-default argument 'x'"),
    # A file that cannot be run, or has no variant.
    (["class A\n"], "SyntaxError: .*a.py, line 1"),
    (["\n1 / 0\n"], r"ZeroDivisionError: division by zero \(.*a.py, line 2\)"),
    (["raise SystemExit(0)\n"], "SystemExit"),
    (["from variants.kl_los import KLLoss\n"], "No module named 'variants.kl_los' .*line 1"),
    (["x = 1\n"], "one subclass of Recipe, and has none"),
    ([ONE + TWICE], "one subclass of Recipe, and has .'One', 'Twice'."),
    # Two that do not go together.
    (
        [ZERO, ZERO.replace("Zero", "Other")],
        "Zero.paid is lost: Other.paid has no super.*; leave one of them out",
    ),
    ([TWICE, ZERO], "Twice.paid is lost: Zero.paid has no super.*; use --variant .*b.py .*a.py$"),
    ([variant("A", base="B", head="from variants.b import B"), variant("B")], "use .*b.py .*a.py$"),
    ([flagged(x, "x: int", 1) for x in "AB"], "A and B both have x; rename"),
    ([flagged("A", "lambd: float", 1), flagged("B", "lambd: float", 2)], "both have lambd;"),
    ([variant("A", *HELPER), variant("B", *HELPER)], "A and B both have _help; rename"),
    ([variant("A"), variant("A")], "A and A both have A; rename one"),
    ([variant("A", "estimators = {'x': 3}")], "x is no new ppo.Estimator"),
    ([variant("A", "estimators = {'gae': ppo.ESTIMATORS['grpo']}")], "gae is no new ppo.Estimator"),
]


@pytest.mark.parametrize("texts, words", REFUSED)
def test_what_a_variant_must_not_be_is_refused_in_one_line(texts, words, write):
    with pytest.raises(UserError, match=f"^--variant .*{words}") as error:
        config(variant=write(**dict(zip("ab", texts))))
    assert "\n" not in str(error.value)


def test_two_variants_may_give_a_flag_of_the_core_the_same_default(write):
    texts = {x: flagged(x, "lambd: float", 0.9) for x in "ab"}
    assert config(variant=write(**texts)).lambd == 0.9


def test_a_name_that_is_not_there_or_is_there_twice_is_refused(write, tmp_path, monkeypatch):
    write(kl_loss=ONE, mine=ONE)
    monkeypatch.chdir(tmp_path)
    for words, found in {
        "kl_loss kl_loss.py": "a variant called kl_loss is there already",
        "kl_los": "choose kl_loss or .*, or give a path$",
        "exp/xyz.py": "there is no file exp/xyz.py; ",
        "mine": "choose mine.py, or give a path",
        "xyz": "choose a file of variants/, or give a path",
        "log_kl mine.py kl_penalty.py": "there is no file kl_penalty.py; choose kl_penalty",
    }.items():
        with pytest.raises(UserError, match=found):
            config(variant=words.split())
    # A name of variants/ means that file, and not a file of this name beside another variant.
    with pytest.raises(UserError, match="kl_loss.py has this name; rename one"):
        config(variant=["mine.py", "kl_loss"])


# ---- flags ---------------------------------------------------------------------------------------


def test_a_variant_adds_flags_with_their_help(write, capsys):
    (path,) = write(a=variant("A", "gain: float = flag(3.0, 'A factor, 50 % or so.')"))
    assert config(variant=path).gain == 3
    assert flags_of(config(variant=path, gain=2))["gain"] == 2
    with pytest.raises(SystemExit):
        train.parse_flags(["--variant", path, "maxrl", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "A factor, 50 % or so. (default: 3.0)" in said and "reinforce, maxrl." in said
    with pytest.raises(UserError, match="unknown flag --gain"):
        config(gain=2)
    with pytest.raises(UserError, match="--kl_loss_coef is a flag of --variant kl_loss"):
        config(kl_loss_coef=1)


def test_a_variant_changes_a_default_of_the_core_and_a_flag_wins_over_it(write):
    """Whatever comes after it: a later variant that is built on the same class has the old default
    of that class, and Python's dataclasses would take that."""
    assert config(variant="critic_lambd").lambd == 0.95
    assert config(variant="critic_lambd", lambd=0.5).lambd == 0.5
    head = "from variants.textbook_ppo import TextbookPPO"
    (later,) = write(later=variant("Later", base="TextbookPPO", head=head))
    for words in (["critic_lambd", "kl_loss"], ["kl_loss", "critic_lambd"]):
        assert config(variant=words).lambd == 0.95
    assert config(variant=["cispo", later]).policy_clip == 1


def test_a_second_variant_flag_adds_and_none_takes_out_those_before():
    for text, words in [
        ("--variant textbook_ppo --seed 1 --variant kl_loss", ["textbook_ppo", "kl_loss"]),
        ("--variant textbook_ppo --variant none --variant kl_loss --seed=1", ["kl_loss"]),
        ("--seed 1 --variant textbook_ppo kl_loss none", []),
        ("--variant=textbook_ppo --seed 1", ["textbook_ppo"]),
    ]:
        cfg = train.parse_flags(text.split())
        assert (cfg.variant, cfg.seed) == (words, 1)
    with pytest.raises(UserError, match="--variant names nothing"):
        train.parse_flags(["--variant", "--seed", "1"])


# ---- the run -------------------------------------------------------------------------------------


def test_a_resume_with_another_text_or_order_is_refused_and_offers_the_kept_files(
    write, tmp_path, process_group
):
    """Also with another text of a class that a variant is built on."""

    def hashes(words):
        return config(variant=words or None).variant_hashes

    def find_start(words):
        now = ckpt.RunState(0, 9, 1, flags_of(config()), 1, variants=hashes(words))
        return ckpt.find_start(tmp_path, "auto", now, {})[1]

    def refuse(words, told):
        with pytest.raises(UserError, match=told):
            find_start(words)

    base = variant("Base")
    late = paid("Late", "super().paid(samples)", base="Base", head="from variants.base import Base")
    _, *paths = write(base=base, late=late, more=MORE)
    state = find_start(paths)
    assert [name for name, _ in state.variants] == ["base", "late", "more"]
    assert not ckpt.save(tmp_path, state, {}, [], 0)
    assert find_start(paths).variants == hashes(paths)
    kept = " ".join(f"{tmp_path}/variants/{name}.py" for name in ("base", "late", "more"))
    for words, edited in (
        (paths[::-1], {}),
        (paths[:1], {}),
        ([], {}),
        (paths, {"late": late + "# edited"}),
        (paths, {"base": base + "# edited"}),
    ):
        write(**{"base": base, "late": late} | edited)
        refuse(words, f"another text in one; use --variant {kept}, or")
    write(base=base, late=late)


def test_a_run_says_the_method_order_and_keeps_the_texts(write, tmp_path, capsys):
    """The kept files are the same variants again, also where the originals were edited. A file that
    a variant imports is kept too, although it has no variant."""
    own = "own: int = flag(FIVE, 'A number.')"
    base = variant("Base", own, head="from variants.five import FIVE")
    more = "[x + self.own for x in super().paid(samples)]"
    late = paid("Late", more, base="Base", head="from variants.base import Base")
    _, _, late_path, twice_path = write(five="FIVE = 5\n", base=base, late=late, twice=TWICE)
    cfg = config(variant=["critic_lambd", twice_path, late_path])
    names = ["critic_lambd", "twice", "base", "late", "variants.five"]
    assert [name for name, _ in cfg.variant_hashes] == names
    run = tmp_path / "run"
    run.mkdir()
    RunLog.keep_variants(SimpleNamespace(cfg=cfg, run_dir=run))
    said = capsys.readouterr().out
    assert "variants: Late Base Twice CriticLambd (" in said
    assert "variants: the default of --lambd is 0.95\n" in said
    kept = {path.stem: path.read_text() for path in (run / "variants").glob("*.py")}
    assert (kept["five"], kept["twice"]) == ("FIVE = 5\n", TWICE)
    assert kept["critic_lambd"] == (ROOT / "variants/critic_lambd.py").read_text()
    write(five="FIVE = 6\n", twice=ZERO)
    again = config(variant=kept_files(run, cfg.variant_hashes))
    assert again.variant_hashes == cfg.variant_hashes and again.own == 5
    assert config(variant=late_path).own == 6
    RunLog.keep_variants(SimpleNamespace(cfg=config(), run_dir=tmp_path))
    assert not capsys.readouterr().out, "a run without variants"


@pytest.mark.parametrize(
    "memory",
    [{"A": {3: 1}}, {"A": {"x": (1,)}}, {"A": {"x": {1}}}, {"A": {"x": float("nan")}}, {"A": 1}],
)
def test_a_memory_that_json_changes_is_refused(memory, tmp_path):
    """A resumed run would read something else."""
    with pytest.raises(UserError, match=r"^self.memory .*JSON"):
        ckpt.RunState().finish_step(tmp_path, memory)
    state = ckpt.RunState()
    state.finish_step(tmp_path, {"A": {"3": [1, 0.5, None, "x"]}})
    assert json.loads(json.dumps(state.memory)) == {"A": {"3": [1, 0.5, None, "x"]}}
