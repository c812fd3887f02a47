"""--variant: subclasses of the recipe in files of their own."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, config

import ckpt
import ppo
import rollout
import train
from nanoorz.flags import flags_of
from nanoorz.log import RunLog
from nanoorz.ranks import UserError
from nanoorz.variants import VARIANTS, kept_files

HEAD = "from dataclasses import dataclass\nimport ppo\nfrom nanoorz.flags import flag\n"


def variant(name, *lines, base="ppo.Recipe", head="") -> str:
    """The text of a variant: a class with these lines, and `pass`."""
    body = "\n    ".join([*lines, "pass"])
    return f"{HEAD}{head}\n@dataclass\nclass {name}({base}):\n    {body}\n"


def paid(name, expression, **options) -> str:
    return variant(name, "def paid(self, samples):", f"    return {expression}", **options)


TWICE = paid("Twice", "[2 * x for x in super().paid(samples)]")
MORE = paid("More", "[1 + x for x in super().paid(samples)]")
ZERO = paid("Zero", "[0.0 for _ in samples]")


@pytest.fixture
def write(tmp_path):
    """write(name=text, ...): the paths of variants with these texts."""

    def make(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return [str(tmp_path / f"{name}.py") for name in texts]

    return make


def paid_with(*words):
    """What a right and a wrong sample are paid."""
    cfg = config(variant=words or None)
    return cfg.paid([SimpleNamespace(reward=x, rewards=None) for x in (1.0, 0.0)])


# ---- methods and estimators ----------------------------------------------------------------------


def test_each_variant_calls_those_before_it(write):
    twice, more, zero = write(twice=TWICE, more=MORE, zero=ZERO)
    assert paid_with(twice, more) == [3.0, 1.0]
    assert paid_with(more, twice) == [4.0, 2.0]
    assert paid_with(zero, more) == [1.0, 1.0]


def test_a_run_has_its_own_variants_only(write, tmp_path):
    """Also where an earlier run of this process had a file of the same name."""
    (path,) = write(mine=TWICE)
    assert paid_with(path, "maxrl") == [2.0, 0.0]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text(MORE)
    assert paid_with(tmp_path / "other" / "mine.py") == [2.0, 1.0]
    assert paid_with() == [1.0, 0.0]
    assert not hasattr(config(), "kl_loss_coef") and "maxrl" not in config().estimators


def test_a_variant_builds_on_another_by_importing_it(write):
    """Of variants/, or of a file beside it. It may then hide what it is built on."""
    head = "from variants.kl_loss import KLLoss"
    own = variant("Own", "own: int = flag(3, 'A number.')", base="KLLoss", head=head)
    more = "[x + self.own for x in super().paid(samples)]"
    child = paid("Child", more, base="Own", head="from variants.own import Own")
    hides = paid("Hides", "[7]", base="Child", head="from variants.child import Child")
    own_path, child_path, hides_path = write(own=own, child=child, hides=hides)
    assert paid_with(child_path) == paid_with(own_path, child_path) == [4.0, 3.0]
    assert paid_with(child_path, hides_path) == [7]
    names = ["log_kl", "kl_loss", "own", "child"]
    assert [name for name, _ in config(variant=child_path).variant_hashes] == names
    cfg = config(variant=["textbook_ppo", child_path])
    assert cfg.kl_loss_coef == 0.1 and isinstance(cfg, ppo.Recipe) and cfg.policy_clip == 0.2


def test_estimators_of_variants_are_joined(write):
    """An estimator may also take the place of one of the core."""
    estimator = "estimators = {'%s': ppo.Estimator(lambda rewards, *_: rewards)}"
    a, b, c = write(**{x: variant(x, estimator % x) for x in ("a", "b", "gae")})
    cfg = config(variant=["maxrl", a, c, b])
    assert cfg.estimators.keys() == {*ppo.ESTIMATORS, "maxrl", "a", "b"}
    assert not cfg.estimators["gae"].needs_critic and cfg.estimator == "maxrl"
    assert config().estimators is ppo.ESTIMATORS


# ---- what is refused -----------------------------------------------------------------------------


def refuse(words, told):
    with pytest.raises(UserError, match=told) as error:
        config(variant=words)
    assert "\n" not in str(error.value)


def test_a_public_name_that_is_no_method_of_the_recipe_and_no_flag_is_refused(write):
    """A run would never call the method, and would keep the old default."""
    texts = {"a": ZERO.replace("paid", "pade"), "b": variant("Short", "lambd = 0.5")}
    child = variant("Child", base="Short", head="from variants.b import Short")
    a, b, c = write(**texts, c=child)
    refuse([a], "--variant: Zero.pade is no method of the recipe.*; begin a helper with _")
    refuse([b], "--variant: Short.lambd is no method of the recipe, and no flag with a type")
    refuse([c], "Short.lambd is no method")


def test_a_method_without_super_that_hides_an_earlier_one_is_refused(write):
    """So is a helper, or a constant."""
    helpers = {x: variant(x.upper(), "def _help(self):", "    return 1", "_k = 1") for x in "ab"}
    constant = variant("C", "_k = 2")
    twice, zero, a, b, c = write(twice=TWICE, zero=ZERO, **helpers, c=constant)
    told = r"Zero.paid without super\(\) hides Twice's; name Zero first, or leave one out"
    refuse([twice, zero], told)
    assert paid_with(zero, twice) == [0, 0]
    refuse([a, b], "B._(help|k) without .* hides A's")
    refuse([a, c], "C._k without .* hides A's")


def test_a_file_that_is_not_there_or_is_not_the_one_that_is_named_is_refused(write, tmp_path):
    refuse(["kl_los"], "--variant: there is no file .*variants/kl_los.py")
    mine, other = write(mine=ZERO, kl_loss=ZERO)
    refuse([mine, "kl_loss"], "kl_loss.py has the name of .*variants/kl_loss.py; rename one")


# ---- flags ---------------------------------------------------------------------------------------


def test_a_variant_adds_flags_with_their_help(write, capsys):
    own = ["gain: float = flag(3.0, 'A factor, 50 % or so.')", "plain: int = 5"]
    own += ["zero_stage: int = 1"]
    (path,) = write(a=variant("A", *own))
    assert (config(variant=path).gain, config(variant=path).plain) == (3, 5)
    (bare,) = write(bare=variant("B", "lambd: float = 0.5").replace("@dataclass", ""))
    assert config(variant=bare).lambd == 0.5, "@dataclass may be left out"
    cfg = config(variant=path, gain=2, plain=6)
    assert (flags_of(cfg)["gain"], flags_of(cfg)["plain"]) == (2, 6)
    train.print_help(["--variant", path, "--help"])
    assert "--gain 3.0\n      A factor, 50 % or so.\n--plain 5\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="--gain is no flag"):
        config(gain=1)


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


def test_a_second_variant_flag_adds():
    for text, words in [
        ("--variant textbook_ppo --seed 1 --variant kl_loss", ["textbook_ppo", "kl_loss"]),
        ("--variant=textbook_ppo --seed 1", ["textbook_ppo"]),
        ("--variant --seed 1", []),
    ]:
        cfg = train.parse_flags(text.split())
        assert (cfg.variant, cfg.seed) == (words, 1)


# ---- what is shipped -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in VARIANTS.glob("*.py")))
def test_each_shipped_variant_has_one_dtype_in_sampler_trainer_and_engine(name):
    """Once fp16 was refused at the start, and no gate had tried it."""
    own = {"n_samples_per_prompt": 8, "max_steps": 99, "zero_stage": 2, "bf16": True}
    own |= {"teacher": "-"} if name == "distill" else {}
    own |= {"overlong_cache": 8} if name == "overlong_penalty" else {}
    cfg = config(variant=name, **own)
    train.check_flags(cfg, 2)
    dtype, setting = ("float16", "fp16") if name == "fp16" else ("bfloat16", "bf16")
    assert rollout.make_settings(cfg, is_gpu=True)["dtype"] == dtype
    assert cfg.training_dtype(torch.bfloat16) is getattr(torch, dtype)
    assert cfg.engine_settings({"bf16": {"enabled": True}}).keys() == {setting}


# ---- the run folder ------------------------------------------------------------------------------


def test_a_resume_with_another_text_or_order_is_refused_and_offers_the_kept_files(
    write, tmp_path, process_group
):
    """Also with another text of a class that a variant is built on."""

    def find_start(words):
        hashes = config(variant=words or None).variant_hashes
        now = ckpt.RunState(0, flags_of(config()), hashes)
        return ckpt.find_start(tmp_path, "auto", now, flags_of(config()))[1]

    base = variant("Base")
    late = paid("Late", "super().paid(samples)", base="Base", head="from variants.base import Base")
    _, *paths = write(base=base, late=late, more=MORE)
    state = find_start(paths)
    assert [name for name, _ in state.variants] == ["base", "late", "more"]
    assert not ckpt.save(tmp_path, state, {}, 0)
    assert find_start(paths).variants == state.variants
    kept = " ".join(f"{tmp_path}/variants/{name}.py" for name in ("base", "late", "more"))
    edits = ({"late": late + "# edited"}, {"base": base + "# edited"})
    for words, edit in ((paths[::-1], {}), (paths[:1], {}), ([], {}), *((paths, x) for x in edits)):
        write(**{"base": base, "late": late} | edit)
        with pytest.raises(UserError, match=f"texts differ from --variant {kept};"):
            find_start(words)


def test_a_run_keeps_the_texts(write, tmp_path, process_group):
    """The kept files are the same variants again, also where the originals were edited."""
    base = variant("Base", "own: int = flag(5, 'A number.')")
    more = "[x + self.own for x in super().paid(samples)]"
    late = paid("Late", more, base="Base", head="from variants.base import Base")
    base_path, late_path, twice_path = write(base=base, late=late, twice=TWICE)
    cfg = config(variant=["critic_lambd", twice_path, late_path])
    assert list(cfg.variant_texts) == ["critic_lambd", "twice", "base", "late"]
    run = tmp_path / "run"
    run.mkdir()
    RunLog(run, cfg, None, {}).start(0, ROOT / "reward.py")
    kept = {path.stem: path.read_text() for path in (run / "variants").glob("*.py")}
    assert kept == cfg.variant_texts and kept["twice"] == TWICE
    assert kept["critic_lambd"] == (ROOT / "variants/critic_lambd.py").read_text()
    write(base=base.replace("5", "66"), twice=ZERO)
    again = config(variant=kept_files(run, cfg.variant_hashes))
    assert again.variant_hashes == cfg.variant_hashes and again.own == 5
    assert config(variant=late_path).own == 66
