"""tools/evaluate.py: what training would find at step 0, and nothing of a training run touched."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ACCELERATE, ROOT, SMALL, arguments, clean_environment, jsonl, launch

from lib.common import UserError
from tools import evaluate

TOOL = str(ROOT / "tools" / "evaluate.py")


@pytest.fixture(scope="module")
def sets(tiny, tmp_path_factory):
    """Two sets. The second has another name than train.json, which is no name for a set."""
    folder = tmp_path_factory.mktemp("sets")
    shutil.copy(tiny["data"], folder / "larger.json")
    return [tiny["eval_data"], str(folder / "larger.json")]


def flags_of(tiny, sets, out, **flags) -> list[str]:
    return [tiny["model"], "--data", *sets, "--out", str(out), *arguments(SMALL | flags)]


def start(argv, launcher=(), **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *launcher, TOOL, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=clean_environment(),
        **options,
    )


def test_flags_are_those_of_training():
    argv = ["model", "--data", "a.json", "b.json", "--n", "16", "--temperature", "0.6"]
    cfg = evaluate.read_flags([*argv, "--stop", "User:", "Human:", "--top_p", "0.9"])
    assert cfg.model == "model"
    assert cfg.eval_data == ["a.json", "b.json"]
    assert (cfg.eval_n, cfg.eval_temperature, cfg.eval_top_p) == (16, 0.6, 0.9)
    assert cfg.stop == ["User:", "Human:"]
    assert cfg.run_dir == "out/evaluate"
    with pytest.raises(UserError, match="did you mean --temperature"):
        evaluate.read_flags(["model", "--data", "a.json", "--temprature", "0.6"])


def test_the_tool_has_a_distribution_of_its_own():
    """As tables are made: k samples at a temperature, or the one greedy response."""
    argv = ["model", "--data", "a.json"]
    cfg = evaluate.read_flags(argv)
    assert (cfg.eval_n, cfg.eval_temperature, cfg.eval_top_p) == (1, 1, 1)
    cfg = evaluate.read_flags([*argv, "--greedy"])
    assert (cfg.eval_n, cfg.eval_temperature, cfg.eval_top_p) == (1, 0, 1)
    assert evaluate.read_flags([*argv, "--temperature", "0"]).eval_temperature == 0
    assert evaluate.read_flags([*argv, "--n", "4"]).temperature == 1, "the training's"
    with pytest.raises(UserError, match="^--n 4: greedy responses are all alike"):
        evaluate.read_flags([*argv, "--n", "4", "--greedy"])
    with pytest.raises(UserError, match="^--greedy, --temperature: give one"):
        evaluate.read_flags([*argv, "--greedy", "--temperature", "0.6"])


ORZ_HALF = "/models/Open-Reasoner-Zero-0.5B"


@pytest.mark.parametrize(
    "model, flags, line, said",
    [
        (ORZ_HALF, ["--n", "16"], ("math500", 500), ["31.0 published", "names are the same"]),
        (
            "Open-Reasoner-Zero/Open-Reasoner-Zero-7B",
            ["--n", "4", "--temperature", "0.6"],
            ("aime2024", 30),
            ["17.9 published", "other settings: n 4 (theirs 16), temperature 0.6 (theirs 1.0)"],
        ),
        (
            "Qwen/Qwen2.5-0.5B",
            ["--greedy"],
            ("gsm8k_test200", 200),
            ["36.7 published", "SimpleRL", "other settings: problems 200 (theirs 1319)"],
        ),
        ("Qwen/Qwen2.5-0.5B-Instruct", ["--n", "8"], ("gsm8k:main-test", 1319), ["30.2", "49.6"]),
        (ORZ_HALF, [], ("train", 500), []),
        ("Open-Reasoner-Zero-0.5B-mine", [], ("math500", 500), []),
    ],
)
def test_a_published_figure_stands_beside_ours(model, flags, line, said):
    """With the settings that differ, or it would be taken for the same measurement."""
    cfg = evaluate.read_flags([model, "--data", "a.json", *flags])
    line = dict(zip(("set", "problems"), line)) | {"accuracy": 0.3021, "stderr": 0.012}
    texts = [evaluate.compare(x, line, cfg) for x in evaluate.published_for(line, cfg)]
    assert len(texts) == len([words for words in said if words[0].isdigit()])
    assert all(words in " ".join(texts) for words in said)
    assert all(f"{line['set']}: 30.2 +- 1.2 here" in text for text in texts)


def test_the_published_figures_are_those_of_the_field():
    """Each names a set that is known, flags that there are, and a source."""
    flags = vars(evaluate.train.Config())
    for figure in evaluate.PUBLISHED:
        assert figure.set in evaluate.SETS and set(figure.settings) <= set(flags)
        assert 0 < figure.accuracy < 100 and figure.source
    places = [(figure.model, figure.set, figure.source) for figure in evaluate.PUBLISHED]
    assert len(set(places)) == len(places)


def test_the_numbers_are_those_of_a_training_run_at_step_0(tiny, sets, tmp_path):
    flags = {"eval_n": 2, "eval_temperature": 0.7, "eval_top_p": 0.9}
    run = tmp_path / "run"
    launch(run, **tiny | flags | {"eval_data": sets, "max_steps": 1})
    out = tmp_path / "evaluate"
    out.mkdir()
    (out / "eval_samples.jsonl").write_text('{"set": "of an evaluation before"}\n')
    process = start(flags_of(tiny, sets, out, **flags))
    screen, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors

    result = json.loads((out / "result.json").read_text())
    before = [line for line in jsonl(run / "eval.jsonl") if line["step"] == 0]
    assert result["sets"] == before
    answers = [line for line in jsonl(run / "eval_samples.jsonl") if line["step"] == 0]
    assert jsonl(out / "eval_samples.jsonl") == answers, "a second evaluation replaces the first"
    assert len(answers) == (8 + 40) * 2

    assert [line["set"] for line in result["sets"]] == ["eval", "larger"]
    numbers = {"accuracy", "stderr", "pass@1", "pass@2", "length", "truncated"}
    assert numbers <= set(result["sets"][0])
    assert result["config"]["eval_temperature"] == 0.7
    assert "torch" in result["versions"]
    assert result["wall_seconds"] > 0
    # A random model knows no form of answers.
    (remark,) = [text for text in result["remarks"] if text.startswith("larger: ")]
    assert "no response has an answer in the form of --task math and --answer_form orz" in remark
    assert remark in screen
    table = screen.splitlines()
    assert "pass@2" in table[0]
    assert [line.split()[0] for line in table[1:3]] == ["eval", "larger"]


@pytest.mark.slow
def test_two_ranks_share_the_samples(tiny, sets, tmp_path):
    launcher = [*ACCELERATE, "--use_deepspeed", "--num_processes", "2", "--num_machines", "1"]
    argv = flags_of(tiny, sets, tmp_path, n=3)
    process = start(argv, [*launcher, "--main_process_port", "0"])
    screen, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert screen.count("accuracy") == 1, "one rank prints the table"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["world"] == 2
    samples = jsonl(tmp_path / "eval_samples.jsonl")
    drawn = {(sample["set"], sample["problem"], sample["index"]) for sample in samples}
    assert len(drawn) == len(samples) == (8 + 40) * 3
    for line in result["sets"]:
        rewards = [sample["reward"] for sample in samples if sample["set"] == line["set"]]
        assert line["accuracy"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize("trace", ["metrics.jsonl", "step_000002/manifest.json"])
def test_a_training_run_is_not_touched(tiny, sets, tmp_path, trace, process_group):
    """Nor one that was killed before its first checkpoint: an evaluation once emptied its logs."""
    file = tmp_path / trace
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"step": 1}\n')
    cfg = evaluate.read_flags(flags_of(tiny, sets, tmp_path))
    with pytest.raises(UserError, match="holds a training run"):
        evaluate.main(cfg, world=1, store=None)
    assert file.read_text() == '{"step": 1}\n'
    assert list(tmp_path.rglob("*.json*")) == [file]


def test_what_only_training_reads_is_not_in_the_way(tiny, tmp_path, process_group):
    """Long answers need no long packed rows, and three ranks no batch that three divides.

    The next check, of the folder, is the one that fails.
    """
    (tmp_path / "metrics.jsonl").touch()
    flags = {"max_len": 32768, "packing_max_len": 64, "rollout_batch_size": 4}
    cfg = evaluate.read_flags(flags_of(tiny, ["x.json"], tmp_path, **flags))
    with pytest.raises(UserError, match="holds a training run"):
        evaluate.main(cfg, world=3, store=None)


def test_bad_input_is_one_line_and_exit_code_2(tiny, tmp_path, capsys):
    argv = [tiny["model"], "--data", "x.json", "--out", str(tmp_path), "--temprature", "0.6"]
    assert evaluate.run(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: unknown flag --temprature")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may be done before the signal")
def test_a_signal_ends_it_with_one_line_and_exit_code_1(tiny, sets, tmp_path):
    """The first set is small, and the signal comes while the second, a large one, is sampled."""
    problems = json.loads(Path(sets[1]).read_text())
    many = tmp_path / "many.json"
    many.write_text(json.dumps(problems * 50))
    process = start(flags_of(tiny, [sets[0], str(many)], tmp_path / "out", n=32))
    deadline = time.monotonic() + 200
    while not (tmp_path / "out" / "eval_samples.jsonl").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    screen, errors = process.communicate(timeout=100)
    assert process.returncode == 1, errors
    assert errors.splitlines()[-1] == "stopped: an evaluation saves nothing, so start it again"
    assert "Traceback" not in errors
    assert not (tmp_path / "out" / "result.json").exists()
