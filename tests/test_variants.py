"""--variant: files whose functions wrap the stages' functions of the same name."""

import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, config

import ckpt
import ppo
import reward
import train
from lib.common import UserError
from lib.variants import CHECKS, Variants, functions_of
from tasks import code, countdown

PAID = "def paid(original, samples, cfg):\n    return "
ONE = PAID + "original(samples, cfg)\n"
TWICE = PAID + "[2 * x for x in original(samples, cfg)]\n"
MORE = PAID + "[1 + x for x in original(samples, cfg)]\n"
ZERO = "def paid(_original, samples, cfg):\n    return [0.0 for _ in samples]\n"
WHITEN = "def whiten(original, advantages, batch, cfg):\n    return advantages\n"
FLAGS = "from dataclasses import dataclass\n@dataclass\nclass Flags:\n    "


@pytest.fixture
def write(tmp_path):
    """write(name=text, ...): the paths of variants with these texts."""

    def make(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
        return [str(tmp_path / f"{name}.py") for name in texts]

    return make


def paid_with(words):
    """What a right and a wrong sample are paid."""
    with Variants(words).installed(train.modules_to_wrap()):
        return ppo.paid([SimpleNamespace(reward=1.0), SimpleNamespace(reward=0.0)], None)


# ---- wrapping ------------------------------------------------------------------------------------


def test_each_variant_wraps_those_before_it(write):
    twice, more, zero = write(twice=TWICE, more=MORE, zero=ZERO)
    assert paid_with([twice, more]) == [3.0, 1.0]
    assert paid_with([more, twice]) == [4.0, 2.0]
    assert paid_with([zero, more]) == [1.0, 1.0]


def test_variants_are_taken_out_again(write):
    def hooked():
        return {name: getattr(ppo, name) for name in functions_of(ppo)}, dict(ppo.ESTIMATORS)

    before = hooked()
    paid_with(["maxrl", *write(twice=TWICE)])
    with pytest.raises(UserError):
        paid_with(["maxrl", *write(broken="def whiten(original, x):\n    return original(x)\n")])
    assert hooked() == before


def test_functions_in_tables_are_wrapped(write):
    """Those of the estimators, and those of any dict of a stage."""
    arguments = "rewards, values, mask, groups, cfg"
    text = f"def grpo(original, {arguments}):\n    return original({arguments}) / 2\n"
    given = (torch.tensor([0.0, 1.0]).double(), None, None, torch.tensor([0, 0]), None)
    stage = SimpleNamespace(__name__="ppo", grpo=ppo.grpo, TABLE={"x": ppo.grpo, "y": ppo.rloo})
    with Variants(write(half=text)).installed([ppo, stage]):
        for function in (ppo.ESTIMATORS["grpo"].function, stage.TABLE["x"]):
            assert function(*given).tolist() == [-0.5, 0.5]
        assert ppo.ESTIMATORS["grpo"].least_samples == 2
        assert stage.TABLE["y"] is ppo.ESTIMATORS["rloo"].function is ppo.rloo
    assert stage.TABLE["x"] is ppo.grpo


def test_the_task_s_functions_are_wrapped_once_it_is_loaded(write):
    text = "def text_metrics(original, text):\n    return original(text) | {'words': 1.0}\n"
    cfg = config(task="countdown", variant=write(words=text))
    with cfg.variants.installed(train.modules_to_wrap()):
        assert train.find_task(cfg).text_metrics("1+1=2")["words"] == 1
    assert "words" not in train.find_task(config(task="countdown")).text_metrics("")


def test_a_function_of_the_task_that_a_stage_has_too_is_refused(write):
    """It would not be clear which one a variant wraps."""
    task = (ROOT / "tasks/countdown.py").read_text() + "\n\ndef paid(x):\n    pass\n"
    task, variant = write(task=task, v=ONE)
    with pytest.raises(UserError, match="v.py: paid is a function of a stage and of the task"):
        train.find_task(config(task=task, variant=variant))
    owners = {}
    for module in train.modules_to_wrap():
        for name in functions_of(module):
            assert owners.setdefault(name, module) is module, name
    for task in (reward, countdown, code):
        assert not owners.keys() & set(functions_of(task))


def test_no_module_imports_a_function_of_a_stage_by_its_name():
    """The imported name would go past the variants."""
    for path in (ROOT / "lib").glob("*.py"):
        importlib.import_module(f"lib.{path.stem}")
    hookable = {}
    for stage in train.modules_to_wrap():
        hookable |= {getattr(stage, name): stage.__name__ for name in functions_of(stage)}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(ROOT / "lib")) or Path(file).parent == ROOT:
            for key, value in vars(module).items():
                if inspect.isfunction(value) and value in hookable:
                    assert hookable[value] == module.__name__, f"{name} has {key} by name"


# ---- what is refused -----------------------------------------------------------------------------

# Texts of variants a and b, and a pattern of the line that refuses them.
REFUSED = [
    # A name that nobody has, other arguments, what is no function.
    (["def pade(original, x):\n    return original(x)\n"], "pade .* write paid.* with _"),
    (["def paid(original, x, cfg):\n    return original(x)\n"], r"defaults: \(samples, cfg\)"),
    (["def paid(samples, cfg):\n    return [1]\n"], "first argument of paid must be original"),
    (["class paid:\n    pass\n"], "paid must be a function made by `def`"),
    (["paid = lambda original, samples, cfg: original(samples, cfg)\n"], "made by `def`"),
    (["async def paid(original, samples, cfg):\n    original()\n"], "made by `def`"),
    (["number = [k for k in (lambda hidden=1: hidden, 3)]\n"], "number must be .* begin .* with _"),
    (["for k in range(3):\n    pass\n"], "k must be"),
    (["def run(original, argv):\n    return original(argv)\n"], "run runs before the variants"),
    (["from ppo import gae\n" + ONE], "import ppo and call ppo.gae"),
    # It says that it calls the original, and does not; or the other way round.
    ([ONE + WHITEN], "whiten does not use its first argument; name this argument _original"),
    ([ONE.replace("original", "_original")], "name this argument original"),
    # A file that cannot be run.
    (["def paid(original\n"], "SyntaxError"),
    (["\n1 / 0\n"], r"ZeroDivisionError: division by zero \(line 2\)"),
    (["raise SystemExit(0)\n"], "SystemExit"),
    # Two that do not go together.
    ([ZERO, ZERO], "a.py and .*b.py both replace paid: leave one of them out"),
    ([TWICE, ZERO], "b replaces paid, and would undo a if it came later; use .*b.py .*a.py$"),
    (["NEEDS = ['b']\n", ONE], "a needs b before it; use --variant .*b.py .*a.py$"),
    (["NEEDS = ['nobody']\n"], "a.py needs nobody; name it before"),
    (["NEEDS = ['b']\n", "NEEDS = ['a']\n"], "a needs b before it; b needs a before it"),
    (["class Flags:\n    x: int = 1\n"], "put @dataclass over Flags"),
    ([FLAGS + "x: int\n"], "--x has no default"),
    ([FLAGS + "x = 1  # A.\n"], "write x with its type"),
    ([FLAGS + "x: int = 1\n"], "--x has no advice"),
    ([FLAGS + "gamma: str = 'a'  # A.\n"], "--gamma must have the type that it has in train.py"),
    ([FLAGS + "x: int = 1  # A.\n"] * 2, "--x is a flag of a too"),
    ([FLAGS + f"gamma: float = 0.{k}  # A.\n" for k in "12"], "--gamma is a flag of a too"),
    (["ESTIMATORS = {'x': 3}\n"], "the estimator x must be a ppo.Estimator"),
    (["import ppo\nESTIMATORS = {'gae': ppo.ESTIMATORS['grpo']}\n"], "gae is there already"),
    (["NEEDS = 'updates'\n"], "NEEDS must be a list of names"),
]


@pytest.mark.parametrize("texts, words", REFUSED)
def test_what_a_variant_must_not_be_is_refused_in_one_line(texts, words, write):
    with pytest.raises(UserError, match=f"^--variant .*{words}"):
        cfg = config(task="countdown", variant=write(**dict(zip("ab", texts))))
        with cfg.variants.installed(train.modules_to_wrap()):
            train.find_task(cfg)


def test_a_name_that_is_not_there_or_is_there_twice_is_refused(write, tmp_path, monkeypatch):
    write(kl_loss=ONE, mine=ONE)
    monkeypatch.chdir(tmp_path)
    for words, found in {
        "kl_loss kl_loss.py": "a variant called kl_loss is there already",
        "kl_los": "choose kl_loss, or a path that ends in .py",
        "updates.py": "there is no file updates.py; choose updates or",
        "exp/xyz.py": "there is no file exp/xyz.py; give the path of a file$",
        "mine": "choose mine.py, or",
        "xyz": "choose a file of variants/ without .py, or a path",
    }.items():
        with pytest.raises(UserError, match=found):
            Variants(words.split())


# ---- flags ---------------------------------------------------------------------------------------


def test_a_variant_adds_flags_with_their_advice(write, capsys):
    (path,) = write(a=FLAGS + "gain: float = 3.0  # A factor of the reward.\n")
    assert config(variant=path).gain == 3
    cfg = config(variant=path, gain=2)
    assert cfg.gain == 2 and cfg.variants.added == {"gain": 3}
    with pytest.raises(SystemExit):
        train.parse_flags(["--variant", path, "--help"])
    assert "A factor of the reward." in capsys.readouterr().out
    with pytest.raises(UserError, match="unknown flag --gain"):
        config(gain=2)
    with pytest.raises(UserError, match="--kl_loss_coef is a flag of --variant kl_loss"):
        config(kl_loss_coef=1)


def test_a_variant_changes_a_default_of_the_core_and_a_flag_wins_over_it():
    assert config(variant="critic_lambd").lambd == 0.95
    assert config(variant="critic_lambd", lambd=0.5).lambd == 0.5
    assert config(variant=["updates", "clip_higher"]).policy_clip_high == 0.28


def test_a_variant_that_another_one_needs_is_added_before_it():
    for words, names in [
        (["clip_higher"], ["several_updates", "updates", "clip_higher"]),
        (["kl_loss", "kl_penalty"], ["log_kl", "kl_loss", "kl_penalty"]),
        (["log_kl", "hash_reward", "kl_loss"], ["log_kl", "hash_reward", "kl_loss"]),
    ]:
        assert [name for name, _ in Variants(words).hashes] == names


def test_a_second_variant_flag_adds_and_none_takes_out_those_before():
    for text, words in [
        ("--variant updates --seed 1 --variant kl_loss", ["updates", "kl_loss"]),
        ("--variant updates --variant none --variant kl_loss --seed=1", ["kl_loss"]),
        ("--seed 1 --variant updates kl_loss none", []),
        ("--variant=updates --seed 1", ["updates"]),
    ]:
        cfg = train.parse_flags(text.split())
        assert (cfg.variant, cfg.seed) == (words, 1)
    with pytest.raises(UserError, match="--variant names nothing"):
        train.parse_flags(["--variant", "--seed", "1"])


# ---- seams ---------------------------------------------------------------------------------------

SAMPLES = [SimpleNamespace(request=SimpleNamespace(group=0, index=k)) for k in (0, 1)]
ONES = torch.ones(4)
# What may come back from a seam, and what may not, with what the line says. There are two samples
# of two tokens, the first of which is in the micro-batch, and three problems.
SEAMS = [
    ("paid", [1, 0.5], None),
    ("paid", [1.0], "1 rewards for 2 samples"),
    ("paid", [float("nan"), 1.0], "a reward is nan (float), and must be a number below 1e30"),
    ("paid", ["1", 1.0], "a reward is '1' (str)"),
    ("paid", [10**400, 1.0], "(int), and must be a number"),
    ("samples_that_count", [1], None),
    ("samples_to_learn_from", [0, 2], "indices of the 2 samples"),
    ("samples_that_count", [0, 0], "each once"),
    ("raw_advantages", ONES, None),
    ("whiten", ONES[:2], "the result must be a tensor of shape (4,), and is (2,)"),
    ("whiten", ONES / 0, "the result has NaN or infinity"),
    ("compute_values", [1, 1, 1, 1], "must be a tensor, not list: [1, 1, 1, 1]"),
    ("raw_advantages", ONES.numpy(), "must be a tensor, not ndarray: "),
    ("token_loss", ONES[:2], None),
    ("token_loss", ONES[:2] / 0, "the result has NaN or infinity"),
    ("critic_loss", (ONES.sum(), {}), None),
    ("policy_loss", ONES.sum(), "must be a pair: a sum over tokens and a dict, not tensor(4.)"),
    ("critic_loss", (ONES, {}), "must be a pair: a sum over tokens and a dict, not (tensor("),
    ("token_loss", ONES, "shape (2,), and is (4,)"),
    ("draw", SAMPLES, None),
    ("draw", SAMPLES[::-1], "2 samples for 2 requests, or in another order"),
    ("draw_step", [], "no samples"),
    ("draw_step", [1], None),
    ("problems_of_step", [0] * 4, None),
    ("problems_of_step", [0] * 3, "3 problems for --rollout_batch_size 4"),
    ("episode_order", [2, 0, 1], None),
    ("episode_order", [0, 1], "each index of the 3 problems once"),
]


@pytest.mark.parametrize("name, result, words", SEAMS)
def test_what_comes_back_from_a_seam_is_checked(name, result, words):
    ids = [[1, 2], [3, 4]]
    batch = ppo.Batch(ids, ids, torch.tensor([0, 0]), ONES[:2], ONES.device, {}, SAMPLES)
    given = {"samples": SAMPLES, "batch": batch, "micro": ppo.build_rows(batch, [[0]])}
    given |= {"logprobs": ONES[:2], "advantages": ONES[:2]}
    given |= {"requests": [x.request for x in SAMPLES], "problems": [1, 2, 3], "cfg": config()}
    found = CHECKS[name](result, **given)
    assert found is None if words is None else words in found


def test_a_wrong_result_is_refused_in_one_line_that_names_the_chain(write):
    with pytest.raises(UserError, match="^--variant: b wraps a wraps paid: 1 rewards for 2"):
        paid_with(write(a=PAID + "original(samples, cfg)[1:]\n", b=ONE))
    with pytest.raises(UserError, match="a wraps paid: the result is None; does the function"):
        paid_with(write(a=ONE.replace("return ", "")))


def test_nan_is_told_of_the_variant_and_not_of_the_learning_rate(write):
    """Only of the variant that makes the NaN, and not if the critic's values are NaN already."""
    ids = [[1, 2], [3, 4]]
    groups = torch.tensor([0, 0])
    estimators = "import ppo\nESTIMATORS = {'good': ppo.Estimator(lambda pay, *_: pay),\n"
    estimators += "              'bad': ppo.Estimator(lambda pay, *_: pay / 0)}\n"
    innocent = "def raw_advantages(original, batch, cfg):\n    return original(batch, cfg)\n"
    whiten = "def whiten(_original, advantages, batch, cfg):\n    return advantages / 0\n"
    for files, name, told in (
        ({"a": estimators, "b": innocent}, "bad", "the estimator bad: the result has NaN or in"),
        ({"b": whiten}, "gae", "b replaces whiten: the result has NaN or in"),
    ):
        cfg = config(variant=write(**files), estimator=name)
        with cfg.variants.installed(train.modules_to_wrap()):
            batch = ppo.Batch(ids, ids, groups, ONES[:2], ONES.device, {"values": ONES}, SAMPLES)
            with pytest.raises(UserError, match=f"^--variant: {told}finity$"):
                ppo.compute_advantages(batch, cfg)
            batch.per_token["values"] = ONES * float("nan")
            ppo.compute_advantages(batch, cfg)


# ---- the run -------------------------------------------------------------------------------------


def test_a_resume_with_another_text_or_order_is_refused_and_offers_the_kept_files(
    write, tmp_path, process_group
):
    def find_start(words):
        variants = Variants(words).hashes
        now = ckpt.RunState(0, 9, 1, vars(config()), 1, variants=variants)
        return ckpt.find_start(tmp_path, "auto", now, {})[1]

    paths = write(twice=TWICE, more=MORE)
    assert not ckpt.save(tmp_path, find_start(paths), {}, [], 0)
    assert find_start(paths).variants == Variants(paths).hashes
    kept = " ".join(f"{tmp_path}/variants/{name}.py" for name in ("twice", "more"))
    for words in (paths[::-1], paths[:1], [], write(twice=TWICE + "# edited\n", more=MORE)):
        with pytest.raises(UserError, match=f"another text in one; use --variant {kept}, or"):
            find_start(words)


def test_a_run_says_what_is_wrapped_by_whom_and_keeps_the_texts(write, tmp_path, capsys):
    paths = write(zero=ZERO, twice=TWICE)
    for words in (["critic_lambd", *paths], ["critic_lambd", *paths], paths):
        config(variant=words).variants.tell_start(tmp_path)
    said = capsys.readouterr().out
    assert said.count("variants: twice wraps zero replaces paid\n") == 3
    assert said.count("variants: critic_lambd replaces critic_targets\n") == 2
    assert said.count("variants: the default of --lambd is 0.95\n") == 2
    kept = {path.stem: path.read_text() for path in (tmp_path / "variants").iterdir()}
    assert (kept["zero"], kept["twice"]) == (ZERO, TWICE)


def test_a_hook_that_was_never_reached_is_named_once(write, capsys):
    """After the first step in which the policy learns."""
    with Variants(["updates", *write(twice=TWICE)]).installed(train.modules_to_wrap()) as variants:
        variants.tell_unreached({"critic_lr": 1.0, "policy_micro_batches": 0})
        assert not capsys.readouterr().err
        ppo.paid([], None)
        for _ in range(2):
            variants.tell_unreached({"policy_micro_batches": 2})
    said = capsys.readouterr().err
    functions = ("check_config", "token_passes", "train_policy")
    names = ", ".join(f"several_updates.{name}" for name in functions)
    assert said.count("WARNING") == 1
    assert f"first learning step: {names}, updates.token_loss;" in said
