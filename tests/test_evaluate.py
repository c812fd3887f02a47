"""tools/evaluate.py has the numbers of training at step 0 and at its end, and changes no run."""

import itertools
import json
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import ROOT, SMALL, arguments, config, jsonl, launch, run_ranks

from nanoorz.flags import flags_of
from nanoorz.ranks import Stopped, UserError
from tools import evaluate

TOOL = ROOT / "tools" / "evaluate.py"


@pytest.fixture
def alone(monkeypatch, process_group):
    """run() finds the process group of one rank."""
    monkeypatch.setattr(evaluate, "start_distributed", lambda: (0, 1, None, None))


OF_TOOL = {"": (1, 1, 1), "--n 16 --temperature 0.6 --top_p 0.9": (16, 0.6, 0.9)}
OF_TOOL["--greedy"] = (1, 0, 1)


@pytest.mark.parametrize("flags, expected", OF_TOOL.items())
def test_the_tool_s_sampling_flags_change_the_evaluation_alone(flags, expected):
    cfg, step = evaluate.read_flags(["model", "--data", "hub/a", "hub/b", *flags.split()])
    assert step == 0
    assert (cfg.eval_n, cfg.eval_temperature, cfg.eval_top_p) == expected
    assert (cfg.model, cfg.eval_data, cfg.temperature) == ("model", ["hub/a", "hub/b"], 1)


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--n 4 --greedy", "--n 4: at --temperature 0 all responses are alike"),
        ("--greedy --temperature 0.6", "argument --temperature: not allowed with argument --g"),
        ("--temprature 0.6", "--temprature is no flag; the nearest is --temperature"),
        ("--data hub/a gone.json?split=test", "--data gone.json: no such file"),
        ("--data", "argument --data: expected at least one argument"),
        ("--n x", "argument --n: invalid int value: 'x'; `python tools/evaluate.py --help`"),
        ("--eval_n x", "argument --n: invalid int value"),
    ],
)
def test_bad_input_is_refused_in_one_line_with_exit_code_2(flags, told, alone, capsys):
    assert evaluate.run(["model", "--data", "hub/a", *flags.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {told}")


def test_after_a_signal_the_exit_code_is_1(monkeypatch, alone, capsys):
    monkeypatch.setattr(evaluate, "main", mock.Mock(side_effect=Stopped()))
    assert evaluate.run(["model", "--data", "hub/a"]) == 1
    assert capsys.readouterr().out.startswith("stopped: an evaluation saves nothing, ")


@pytest.fixture
def run(tmp_path):
    """A folder as a run leaves it: 7 steps, a variant, and a flag that this version lacks."""
    folder = tmp_path / "run"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "variants").mkdir()
    (folder / "variants" / "mine.py").write_text(MINE)
    (folder / "held_out.json").write_text("[]")
    settings = flags_of(config(eval_data=folder / "held_out.json", seed=3, eval_n=4))
    settings |= {"eval_temperature": 0.5, "stop": ["-", "\n"], "log_with": "wandb", "bonus": 2.5}
    settings |= {"world": 2, "variants": [["mine", "1"]], "versions": {}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "result.json").write_text('{"steps": 7}')
    return folder


MINE = """\"\"\"A copy.\"\"\"
from dataclasses import dataclass

import ppo
from nanoorz.flags import flag


@dataclass
class Mine(ppo.Recipe):
    bonus: float = flag(1.0, "What it adds.")
"""


@pytest.mark.parametrize("name", [".", "policy"])
def test_a_run_gives_flags_variants_problems_and_step(run, name, alone, capsys):
    """Flags of the command line replace the run's."""
    cfg, step = evaluate.read_flags([str(run / name)])
    assert (step, cfg.model, cfg.eval_n, cfg.bonus, cfg.seed) == (7, f"{run}/policy", 4, 2.5, 3)
    assert (cfg.stop, cfg.max_len, cfg.bf16) == (["-", "\n"], SMALL["max_len"], False)
    assert cfg.data == cfg.eval_data == [f"{run}/held_out.json"] and cfg.run_dir == "out/evaluate"
    assert (cfg.log_with, cfg.eval_temperature) == ("none", 0.5)
    [taken] = capsys.readouterr().out.splitlines()
    assert taken.startswith(f"evaluates {run}/policy with ")
    assert "the seeds of step 7 " in taken and taken.endswith(f" {run}/held_out.json")
    assert evaluate.read_flags([str(run / name), "--greedy"])[0].eval_n == 1
    words = "--n 1 --greedy --max_len 99 --stop= --seed=5 --data hub/x --variant --model other"
    cfg, step = evaluate.read_flags([str(run / name), *words.split()])
    assert (cfg.eval_n, cfg.eval_temperature, cfg.max_len, cfg.stop, cfg.seed) == (1, 0, 99, [], 5)
    assert (cfg.data, cfg.model, step) == (["hub/x"], "other", 7) and not hasattr(cfg, "bonus")


def test_a_run_without_an_end_or_its_problems_is_refused_in_one_line(run, alone, capsys):
    (run / "held_out.json").unlink()
    (run / "policy" / "config.json").unlink()
    (run / "step_000004").mkdir()
    told = f"error: --data {run}/held_out.json: no such file here; give its place as --data"
    assert (evaluate.run([str(run)]), capsys.readouterr().err) == (2, f"{told}\n")
    (run / "result.json").unlink()
    told = f"{run} is not complete; go on with it, or export a step: `python ckpt.py {run}/step_"
    told += "NNNNNN NEW`, and add --model=NEW/policy"
    assert (evaluate.run([str(run)]), capsys.readouterr().err) == (2, f"error: {told}\n")


def test_a_folder_without_problems_is_refused_in_one_line(run, alone, tmp_path):
    """A model, a folder that is absent or holds no run, and a run without evaluations."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"eval_data": []}))
    for folder in (tmp_path / "absent", tmp_path, tmp_path / "model", run):
        with pytest.raises(UserError, match=f"^{folder} is no folder of a run with --eval_data; "):
            evaluate.read_flags([str(folder)])


def test_of_an_exported_folder_the_policy_is_evaluated(alone, tmp_path):
    (tmp_path / "policy").mkdir()
    cfg, _ = evaluate.read_flags([str(tmp_path), "--data", "hub/x"])
    assert cfg.model == f"{tmp_path}/policy"


def words_of(tiny, sets, out, **flags) -> list[str]:
    return [tiny["model"], "--data", *sets, "--out", str(out), *arguments(SMALL | flags)]


SAMPLING = {"eval_n": 2, "eval_temperature": 0.7, "eval_top_p": 0.9}


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A run of one rank, and its evaluation sets."""
    folder = tmp_path_factory.mktemp("trained")
    # train.json is no name for a set.
    sets = [tiny["eval_data"], str(shutil.copy(tiny["data"], folder / "larger.json"))]
    flags = {"eval_data": sets, "max_steps": 2, "variant": ["log_ratio", "distill"], "stop": "9"}
    teacher = shutil.copytree(tiny["model"], folder / "teacher")
    launch(folder / "run", **tiny | SAMPLING | flags, teacher=teacher, teacher_weight=0.5)
    # An evaluation needs no teacher.
    shutil.rmtree(teacher)
    return folder / "run", sets


@pytest.mark.engine
def test_the_samples_of_a_run_s_last_evaluation_are_drawn_again(trained, tmp_path):
    """Nothing but the run is named. A run on CPUs is repeated to the bit."""
    run, _ = trained
    [(screen, _)] = run_ranks([TOOL, run, "--out", tmp_path], world=1)
    assert screen.startswith(f"evaluates {run}/policy with the flags of {run}/config.json ")
    last = [line for line in jsonl(run / "eval_samples.jsonl") if line["step"] == 2]
    assert jsonl(tmp_path / "eval_samples.jsonl") == last and len(last) == (8 + 40) * 2
    logged = [line for line in jsonl(run / "eval.jsonl") if line["step"] == 2]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["sets"] == [line | {"pass@1": line["accuracy"]} for line in logged]


@pytest.mark.engine
def test_the_numbers_are_those_of_a_training_run_at_step_0(tiny, trained, tmp_path):
    """The training has one rank here. The two ranks of the evaluation share the samples."""
    run, sets = trained
    out = tmp_path / "evaluate"
    out.mkdir()
    (out / "eval_samples.jsonl").write_text('{"set": "of an evaluation before"}\n')
    words = words_of(tiny, sets, out, stop="9", **SAMPLING)
    [(screen, _), (other_screen, _)] = run_ranks([TOOL, *words])
    assert other_screen == "", "one rank prints the table"
    result = json.loads((out / "result.json").read_text())
    trained = [x for x in jsonl(run / "eval.jsonl") if x["step"] == 0]
    assert result["sets"] == [x | {"pass@1": x["accuracy"]} for x in trained]
    answers = [line for line in jsonl(run / "eval_samples.jsonl") if line["step"] == 0]
    assert jsonl(out / "eval_samples.jsonl") == answers, "a second evaluation replaces the first"
    assert len(answers) == (8 + 40) * 2
    assert (result["world"], result["config"]["eval_temperature"]) == (2, 0.7)
    assert "torch" in result["versions"] and result["wall_seconds"] > 0
    # A random model knows no form of answers.
    [remark] = [text for text in result["remarks"] if text.startswith("larger: ")]
    assert "of 80 responses, in the form orz; " in remark
    assert remark in screen
    table = screen.splitlines()
    assert "pass@2" in table[0] and [x.split()[0] for x in table[1:3]] == ["eval", "larger"]


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    counts = [0, 1, 3, 6]
    # A part of the full reward is not right.
    samples = [SimpleNamespace(reward=1.0 if k < x else 0.25) for x in counts for k in range(6)]
    found = evaluate.pass_rates(samples, 6)
    assert list(found) == ["pass@1", "pass@2", "pass@4", "pass@6"]
    for k in (1, 2, 4, 6):
        draws = itertools.product(counts, itertools.combinations(range(6), k))
        has_right = [any(position < count for position in draw) for count, draw in draws]
        assert found[f"pass@{k}"] == pytest.approx(sum(has_right) / len(has_right))


@pytest.mark.parametrize("trace", ["metrics.jsonl", "step_000002/state.json"])
def test_a_training_run_is_not_touched(tiny, tmp_path, trace, process_group):
    """A run without a checkpoint is refused too. Long answers need no long packed rows here, and
    three ranks need no batch that three divides."""
    file = tmp_path / trace
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"step": 1}\n')
    cfg, step = evaluate.read_flags(words_of(tiny, ["hub/x"], tmp_path, max_len=32768))
    with pytest.raises(UserError, match="holds a training run"):
        evaluate.main(cfg, step, world=3, store=None)
    assert file.read_text() == '{"step": 1}\n'
    assert list(tmp_path.rglob("*.json*")) == [file]
