"""--variant: files whose functions wrap the stages' functions of the same name."""

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, jsonl, launch, same_metrics

import ppo
import reward
import train
from lib.common import UserError
from lib.variants import EARLY, Variants, functions_of
from tasks import code, countdown

TWICE = "def paid(original, samples, cfg):\n    return [2 * x for x in original(samples, cfg)]\n"
ZERO = "def paid(_original, samples, cfg):\n    return [0.0 for _ in samples]\n"
MORE = "def paid(original, samples, cfg):\n    return [1 + x for x in original(samples, cfg)]\n"
HEAD = "from dataclasses import dataclass\n@dataclass\nclass Flags:\n"
SAMPLES = [SimpleNamespace(reward=1.0), SimpleNamespace(reward=0.0)]


@pytest.fixture
def write(tmp_path):
    """write(name=text, ...): the paths of variants with these texts."""

    def make(**texts):
        paths = []
        for name, text in texts.items():
            path = tmp_path / f"{name}.py"
            path.write_text(text)
            paths.append(str(path))
        return paths

    return make


def paid_with(words):
    with train.parse_flags(["--variant", *words]).variants.installed(train.stages()) as variants:
        return ppo.paid(SAMPLES, None), variants


# ---- wrapping ------------------------------------------------------------------------------------


def test_each_variant_wraps_those_before_it(write):
    twice, more, zero = write(twice=TWICE, more=MORE, zero=ZERO)
    assert paid_with([twice, more])[0] == [3.0, 1.0]
    assert paid_with([more, twice])[0] == [4.0, 2.0]
    assert paid_with([zero, more])[0] == [1.0, 1.0]


def test_variants_are_taken_out_again(write):
    before = {name: getattr(ppo, name) for name in functions_of(ppo)}
    estimators = dict(ppo.ESTIMATORS)
    paid_with(["maxrl", *write(twice=TWICE)])
    (broken,) = write(broken="def whiten(original, advantages):\n    return original(advantages)\n")
    with pytest.raises(UserError):
        paid_with(["maxrl", broken])
    assert {name: getattr(ppo, name) for name in functions_of(ppo)} == before
    assert estimators == ppo.ESTIMATORS


def test_an_estimator_can_be_wrapped(write, process_group):
    (path,) = write(
        half="def grpo(original, rewards, values, mask, groups, cfg):\n"
        "    return original(rewards, values, mask, groups, cfg) / 2\n"
    )
    cfg = train.parse_flags(["--estimator", "grpo", "--variant", path])
    problem = SimpleNamespace(prompt_ids=[1])
    samples = []
    for k in range(2):
        request = SimpleNamespace(group=0, problem=problem)
        drawn = {"request": request, "response_ids": [1, 2], "logprobs": None, "reward": float(k)}
        samples.append(SimpleNamespace(**drawn))
    batch = ppo.make_batch(samples, torch.device("cpu"), cfg)
    full = ppo.raw_advantages(batch, cfg)
    with cfg.variants.installed(train.stages()):
        assert ppo.raw_advantages(batch, cfg).equal(full / 2)


def test_the_task_s_functions_are_wrapped_once_it_is_loaded(write):
    (path,) = write(
        words="def text_metrics(original, text):\n    return original(text) | {'words': 1.0}\n"
    )
    cfg = train.parse_flags(["--task", "countdown", "--variant", path])
    with cfg.variants.installed(train.stages()):
        assert train.find_task(cfg).text_metrics("1+1=2")["words"] == 1
    cfg = train.parse_flags(["--task", "countdown"])
    assert "words" not in train.find_task(cfg).text_metrics("")


def test_train_is_the_running_module_for_a_variant(tiny, write, tmp_path):
    (path,) = write(
        who="import train\n\ndef count_steps(original, cfg, problems):\n"
        "    print('same:', original.__module__, train.main.__module__, flush=True)\n"
        "    return original(cfg, problems)\n"
    )
    flags = tiny | {"max_steps": 0, "num_episodes": 1, "variant": [path]}
    assert "same: __main__ __main__" in launch(tmp_path / "run", **flags).stdout


def test_names_of_functions_are_unique():
    """Else it would not be clear which one a variant wraps."""
    owners = {}
    for module in train.stages():
        for name in functions_of(module):
            owners.setdefault(name, []).append(module.__name__)
    assert not {name: where for name, where in owners.items() if len(where) > 1}
    for task in (reward, countdown, code):
        assert not owners.keys() & set(functions_of(task))


def test_no_module_imports_a_function_of_a_stage_by_its_name():
    """The imported name would go past the variants."""
    hookable = {}
    for stage in train.stages():
        hookable |= {getattr(stage, name): stage.__name__ for name in functions_of(stage)}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(ROOT / "lib")) or Path(file).parent == ROOT:
            for key, value in vars(module).items():
                if inspect.isfunction(value) and value in hookable:
                    assert hookable[value] == module.__name__, f"{name} has {key} by name"


# ---- what is refused -----------------------------------------------------------------------------

ONE = "def paid(original, samples, cfg):\n    return original(samples, cfg)\n"
REFUSED = [
    # A name that nobody has, other arguments, what is no function.
    ({"a": "def pade(original, x):\n    return original(x)\n"}, ["pade", "paid", "_"]),
    (
        {"a": "def paid(original, rows, cfg):\n    return original(rows)\n"},
        ["(samples, cfg)", "with their defaults"],
    ),
    ({"a": "def paid(samples, cfg):\n    return [1]\n"}, ["first argument", "original"]),
    ({"a": "class paid:\n    pass\n"}, ["paid", "by `def`"]),
    ({"a": "import functools\npaid = functools.partial(max, 1)\n"}, ["paid", "by `def`"]),
    ({"a": "paid = lambda original, samples, cfg: original(samples, cfg)\n"}, ["by `def`"]),
    ({"a": "async def paid(original, samples, cfg):\n    original()\n"}, ["by `def`"]),
    ({"a": "number = 3\n"}, ["number", "begin a helper's name with _"]),
    ({"a": "for k in range(3):\n    pass\n"}, ["k must be"]),
    ({"a": "from ppo import k3\n" + ONE}, ["import ppo", "ppo.k3"]),
    # It says that it calls the original, and does not; or the other way round.
    ({"a": "def paid(original, samples, cfg):\n    return [1.0]\n"}, ["_original"]),
    ({"a": ONE.replace("original", "_original")}, ["name this argument original"]),
    # A file that cannot be run.
    ({"a": "def paid(original\n"}, ["SyntaxError"]),
    ({"a": "1 / 0\n"}, ["ZeroDivisionError"]),
    ({"a": "raise SystemExit(0)\n"}, ["SystemExit"]),
    # Two that do not go together.
    ({"a": ZERO, "b": ZERO}, ["both replace paid", "leave one of them out"]),
    ({"a": TWICE, "b": ZERO}, ["b replaces paid", "would undo a", "use --variant", "b.py", "a.py"]),
    ({"a": "NEEDS = ['b']\n", "b": ONE}, ["a needs b before it", "use --variant"]),
    ({"a": "NEEDS = ['updates']\n"}, ["needs updates", "name it before"]),
    ({"a": "NEEDS = ['b']\n", "b": "NEEDS = ['a']\n"}, ["a needs b", "b needs a"]),
    # Flags.
    ({"a": "class Flags:\n    x: int = 1\n"}, ["@dataclass"]),
    ({"a": HEAD + "    x: int\n"}, ["--x", "no default"]),
    ({"a": HEAD + "    x = 1  # A.\n"}, ["x with its type"]),
    ({"a": HEAD + "    x: int = 1\n"}, ["--x", "no advice"]),
    ({"a": HEAD + "    gamma: str = 'a'  # A.\n"}, ["--gamma", "train.py"]),
    (dict.fromkeys("ab", HEAD + "    x: int = 1  # A.\n"), ["--x", "a flag of a too"]),
    (
        {f: HEAD + f"    gamma: float = 0.{k}  # A.\n" for k, f in enumerate("ab")},
        ["--gamma", "of a too"],
    ),
    # Estimators and memory.
    ({"a": "ESTIMATORS = {'x': 3}\n"}, ["estimator x", "ppo.Estimator"]),
    (
        {"a": "import ppo\nESTIMATORS = {'gae': ppo.ESTIMATORS['grpo']}\n"},
        ["estimator gae", "another name"],
    ),
    ({"a": "MEMORY = []\n"}, ["MEMORY must be a dict"]),
    ({"a": "NEEDS = 'updates'\n"}, ["NEEDS must be"]),
]


@pytest.mark.parametrize("texts, words", REFUSED, ids=lambda x: " ".join(x)[:60] if x else "")
def test_what_a_variant_must_not_be_is_refused_in_one_line(texts, words, write):
    with pytest.raises(UserError) as error:
        cfg = train.parse_flags(["--task", "countdown", "--variant", *write(**texts)])
        with cfg.variants.installed(train.stages()):
            train.find_task(cfg)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), error.value


def test_one_variant_twice_or_two_files_of_one_name_are_refused(write, tmp_path):
    (path,) = write(kl_loss=ONE)
    for words in (["kl_loss", "kl_loss"], ["kl_loss", path], [path, path]):
        with pytest.raises(UserError, match="called kl_loss is there already"):
            Variants(words)


def test_a_name_that_is_not_there_is_refused_with_near_ones():
    with pytest.raises(UserError, match="choose kl_loss"):
        Variants(["kl_los"])
    with pytest.raises(UserError, match="no file updates.py; choose updates"):
        Variants(["updates.py"])
    with pytest.raises(UserError, match="no file .*mine.py"):
        Variants(["mine.py"])


def test_a_function_of_the_task_that_a_stage_has_too_is_refused(write):
    task, variant = write(
        task=(ROOT / "tasks/countdown.py").read_text() + "\n\ndef paid(x):\n    pass\n", v=ONE
    )
    cfg = train.parse_flags(["--task", task, "--variant", variant])
    with (
        cfg.variants.installed(train.stages()),
        pytest.raises(UserError, match="of a stage and of the task"),
    ):
        train.find_task(cfg)


# ---- flags ---------------------------------------------------------------------------------------


def test_a_variant_adds_flags_with_their_advice(write, capsys):
    (path,) = write(a=HEAD + "    gain: float = 3.0  # A factor of the reward.\n")
    assert train.parse_flags(["--variant", path]).gain == 3
    cfg = train.parse_flags(["--variant", path, "--gain", "2"])
    assert cfg.gain == 2 and cfg.variants.added == {"gain": 3}
    with pytest.raises(SystemExit):
        train.parse_flags(["--variant", path, "--help"])
    assert "A factor of the reward." in capsys.readouterr().out
    with pytest.raises(UserError, match="unknown flag --gain"):
        train.parse_flags(["--gain", "2"])


def test_a_variant_changes_a_default_of_the_core_and_a_flag_wins_over_it():
    assert train.parse_flags(["--variant", "kl_loss"]).log_kl
    assert not train.parse_flags(["--variant", "kl_loss", "--log_kl", "false"]).log_kl
    assert train.parse_flags(["--variant", "updates"]).policy_clip_high is None
    assert train.parse_flags(["--variant", "updates", "clip_higher"]).policy_clip_high == 0.28
    assert train.parse_flags(["--variant", "kl_loss", "kl_penalty"]).log_kl


def test_a_second_variant_flag_adds_and_none_takes_out_those_before():
    def words(text):
        return train.parse_flags(text.split()).variant

    assert words("--variant updates --seed 1 --variant kl_loss") == ["updates", "kl_loss"]
    assert words("--variant updates --variant none --variant kl_loss") == ["kl_loss"]
    assert words("--variant updates kl_loss --variant none") == []
    assert words("--variant=updates") == ["updates"]
    with pytest.raises(UserError, match="--variant"):
        words("--variant")


# ---- seams ---------------------------------------------------------------------------------------

WRONG = {
    "paid": ("samples, cfg", "(samples, cfg)[1:]", "1 rewards for 2 samples"),
    "samples_that_count": ("batch, cfg", "(batch, cfg) + [0]", "indices of the 2 samples"),
    "temperatures": ("batch, micro, cfg", "(batch, micro, cfg) * torch.ones(7)", "shape (4,)"),
    "token_loss": (
        "logprobs, entropy, advantages, batch, micro, cfg, stats",
        "(logprobs, entropy, advantages, batch, micro, cfg, stats).sum()",
        "shape (4,)",
    ),
    "raw_advantages": ("batch, cfg", "(batch, cfg)[:1]", "shape (4,)"),
    "pass_order": ("problems, cfg, number", "(problems, cfg, number)[1:]", "each index"),
    "problem_order": ("problems, cfg, step", "(problems, cfg, step)[1:]", "127 problems"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_comes_back_from_a_seam_is_checked_and_the_chain_named(name, write, process_group):
    arguments, result, what = WRONG[name]
    text = f"import torch\n\ndef {name}(original, {arguments}):\n    return original{result}\n"
    same = f"def {name}(original, {arguments}):\n    return original({arguments})\n"
    paths = write(wrong=text, same=same)
    cfg = train.parse_flags(["--estimator", "reinforce", "--variant", *paths])
    problem = SimpleNamespace(prompt_ids=[1])
    samples = []
    for _ in range(2):
        request = SimpleNamespace(group=0, problem=problem)
        samples.append(
            SimpleNamespace(request=request, response_ids=[1, 2], logprobs=None, reward=1.0)
        )
    batch = ppo.make_batch(samples, torch.device("cpu"), cfg)
    micro = ppo.build_rows(batch, [[0, 1]])
    ones = torch.ones(4)
    given = {"samples": samples, "batch": batch, "micro": micro, "cfg": cfg, "stats": {}}
    given |= {"logprobs": ones, "entropy": ones, "advantages": ones}
    given |= {"problems": [problem] * 3, "number": 0, "step": 0}
    with cfg.variants.installed(train.stages()), pytest.raises(UserError) as error:
        owner = train.rollout_stage if "order" in name else ppo
        getattr(owner, name)(*[given[word] for word in arguments.split(", ")])
    assert what in str(error.value)
    assert f"same wraps wrong wraps {name}" in str(error.value)


def test_a_function_that_returns_nothing_is_named(write):
    (path,) = write(a="def paid(original, samples, cfg):\n    original(samples, cfg)\n")
    with pytest.raises(UserError, match="a wraps paid: the result is None"):
        paid_with([path])


def test_a_flag_of_a_variant_that_is_not_named_is_told_apart_from_a_mistyped_one():
    with pytest.raises(UserError, match="--kl_loss_coef is a flag of --variant kl_loss"):
        train.parse_flags(["--kl_loss_coef", "1"])
    with pytest.raises(UserError, match="unknown flag --variants: did you mean --variant"):
        train.parse_flags(["--variants", "kl_loss"])


def test_a_reward_that_is_no_number_is_refused(write):
    (path,) = write(a="def paid(_original, samples, cfg):\n    return [float('nan'), 1.0]\n")
    with pytest.raises(UserError, match="a reward is nan"):
        paid_with([path])


# ---- memory --------------------------------------------------------------------------------------


def test_memory_is_that_of_the_modules_and_fresh_in_each_run(write):
    """train.py fills it from the run's state, and saves a copy with each finished step."""
    (path,) = write(a="MEMORY = {'seen': 0}\n")
    variants = Variants([path])
    variants.memory["a"] |= {"seen": 3}
    assert variants.modules["a"].MEMORY == {"seen": 3}
    assert Variants([path]).memory == {"a": {"seen": 0}}


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_resume_with_another_text_or_order_is_refused_and_offers_the_kept_files(
    tiny, write, tmp_path
):
    paths = write(twice=TWICE, more=MORE)
    run = tmp_path / "run"
    done = launch(run, **tiny | {"max_steps": 1, "variant": paths})
    assert "variants: more wraps twice wraps paid" in done.stdout
    assert jsonl(run / "metrics.jsonl")[0]["paid"] == 1
    kept = [str(run / "variants" / name) for name in ("twice.py", "more.py")]
    assert [Path(path).read_text() for path in kept] == [TWICE, MORE]
    kept_hashes = json.loads((run / "config.json").read_text())["variants"]
    assert [name for name, _ in kept_hashes] == ["twice", "more"]
    for words in ([paths[1], paths[0]], paths[:1], ["none"]):
        done = launch(run, check=False, **tiny | {"max_steps": 2, "variant": words})
        assert done.returncode == 2
        assert f"use --variant {' '.join(kept)}" in done.stderr
    Path(paths[0]).write_text(TWICE + "# edited\n")
    done = launch(run, check=False, **tiny | {"max_steps": 2, "variant": paths})
    assert done.returncode == 2 and "another text" in done.stderr
    launch(run, **tiny | {"max_steps": 2, "variant": kept})
    assert len(jsonl(run / "metrics.jsonl")) == 2


BREAKS = """
import os
from pathlib import Path

def {name}(original, {arguments}):
    if Path({marker!r}).exists() and os.environ.get("RANK") in {ranks}:
        raise ValueError("a fault of mine")
    return original({arguments})
"""


@pytest.mark.engine
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("compute_advantages", "batch, cfg"),
        pytest.param("paid", "samples, cfg", marks=pytest.mark.slow),
        pytest.param("text_metrics", "text", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_saves_the_last_finished_step_and_ends_all_ranks(
    name, arguments, tiny, write, tmp_path
):
    """Before anything is learnt. Then the run goes on, as if nothing had been."""
    marker = tmp_path / "marker"
    # Rank 0 alone calls `paid`.
    ranks = ("0",) if name == "paid" else ("1",)
    text = BREAKS.format(name=name, arguments=arguments, marker=str(marker), ranks=ranks)
    mark = f"""
def draw_step(original, rollout, requests, problems, cfg, step, clock):
    if step == 2 and not Path({str(marker) + ".done"!r}).exists():
        Path({str(marker)!r}).touch()
    return original(rollout, requests, problems, cfg, step, clock)
"""
    paths = write(breaks=text + mark)
    flags = tiny | {"variant": paths, "save_interval": 100}
    run = tmp_path / "run"
    done = launch(run, ranks=2, check=False, **flags)
    assert done.returncode != 0
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("error:")]
    assert "ValueError: a fault of mine" in line and "breaks.py" in line
    assert "goes on from step 2" in line
    assert (run / "step_000002").is_dir()
    assert "in compute_advantages" in (run / "run.log").read_text() or name != "compute_advantages"
    marker.unlink()
    Path(f"{marker}.done").touch()
    launch(run, ranks=2, **flags)
    launch(tmp_path / "whole", ranks=2, **flags)
    both = [jsonl(folder / "metrics.jsonl") for folder in (run, tmp_path / "whole")]
    assert [same_metrics(x) for x in both[0]] == [same_metrics(x) for x in both[1]]


@pytest.mark.engine
@pytest.mark.parametrize("what", ["absent", "raises", "another text"])
def test_a_variant_that_is_not_alike_on_one_rank_ends_all_ranks_in_one_line(
    what, tiny, write, tmp_path
):
    """Two machines may have different files. Here rank 1 looks into another folder."""
    script = tmp_path / "by_rank.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train\n"
        "sys.argv = [x.replace('RANK', os.environ['RANK']) for x in sys.argv]\n"
        "os._exit(train.run(sys.argv[1:]))\n"
    )
    for rank, text in enumerate([TWICE, {"raises": "1 / 0\n", "another text": MORE}.get(what)]):
        (tmp_path / str(rank)).mkdir()
        if text:
            (tmp_path / str(rank) / "mine.py").write_text(text)
    flags = tiny | {"variant": [f"{tmp_path}/RANK/mine.py"]}
    done = launch(tmp_path / "run", ranks=2, check=False, script=script, **flags)
    assert done.returncode != 0
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("error:")]
    wanted = {"absent": "no file", "raises": "ZeroDivisionError", "another text": "--variant"}
    assert wanted[what] in line and "rank 1" in line


@pytest.mark.engine
def test_a_hook_that_was_never_reached_is_named(tiny, write, tmp_path):
    (path,) = write(
        idle="def compute_values(original, critic, batch, cfg):\n"
        "    return original(critic, batch, cfg)\n"
    )
    flags = tiny | {"variant": [path], "estimator": "grpo", "max_steps": 2}
    done = launch(tmp_path / "run", **flags)
    assert done.stderr.count("in the first learning step: idle.compute_values") == 1


# What a run of two steps with an evaluation does not call through a wrapper, and why.
RESUME = "a resume calls it"
OTHER = "another --estimator or --answer_form calls it"
UNREACHED = {
    "filler": "a rank with fewer rows than another one calls it",
    "describe_room": "a save that failed calls it",
    "skip": "DeepSpeed calls it in one of its ways of saving",
    "has_varlen": "--attention varlen calls it",
    "is_equiv": "it is for whoever copies reward.py",
}
UNREACHED |= dict.fromkeys(["grpo", "rloo", "reinforce", "dr_grpo", "group_stats"], OTHER)
UNREACHED |= dict.fromkeys(["last_box", "last_number", "after_hashes"], OTHER)
UNREACHED |= dict.fromkeys(["step_of", "find_damage", "load_state", "find_changes", "load"], RESUME)


@pytest.mark.engine
def test_nothing_escapes_by_an_import_of_its_name(tiny, write, tmp_path):
    """A wrapper around each function of each stage is called, and changes nothing."""
    lines = ["import json", "from pathlib import Path", ""]
    for module in [*train.stages(), reward]:
        for name in functions_of(module):
            if name in ("main", *EARLY):
                continue
            signature = inspect.signature(getattr(module, name))
            given = []
            for key, parameter in signature.parameters.items():
                stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
                is_named = parameter.kind == parameter.KEYWORD_ONLY
                given.append(f"{key}={key}" if is_named else stars.get(parameter.kind, "") + key)
            head = [str(x).split(":")[0].split(" = ")[0] for x in signature.parameters.values()]
            for k, parameter in enumerate(signature.parameters.values()):
                if parameter.default is not parameter.empty:
                    head[k] = f"{parameter.name}={parameter.default!r}"
            lines += [f"def {name}({', '.join(['original', *head])}):"]
            lines += [f"    return original({', '.join(given)})", ""]
    lines += ["def main(original, cfg, world, device, store):"]
    lines += ["    result = original(cfg, world, device, store)"]
    lines += ["    path = Path(cfg.run_dir) / 'unreached.json'"]
    lines += ["    missed = [hook.name for hook in cfg.variants.hooks if not hook.calls]"]
    lines += ["    path.write_text(json.dumps(missed))", "    return result"]
    (path,) = write(every="\n".join(lines))
    flags = tiny | {"max_steps": 2, "log_kl": "true", "log_ratio": "true", "eval_interval": 1}
    flags |= {"critic_lambd": 0.9, "lambd": 0.95}
    launch(tmp_path / "run", **flags | {"variant": [path]})
    launch(tmp_path / "plain", **flags)
    both = [jsonl(tmp_path / name / "metrics.jsonl") for name in ("run", "plain")]
    assert [same_metrics(x) for x in both[0]] == [same_metrics(x) for x in both[1]]
    unreached = json.loads((tmp_path / "run" / "unreached.json").read_text())
    assert set(unreached) == UNREACHED.keys(), sorted(set(unreached) ^ UNREACHED.keys())
