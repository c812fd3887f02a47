"""Links of pages resolve, commands can be given, examples run; so do the lesson and the studies."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL, arguments, config, jsonl, run_python, unpack

import ppo
import train
from studies import findings, ratio_one

PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
CHANGE = (ROOT / "docs" / "change.md").read_text()
EXAMPLES = dict(re.findall(r"^```python\n# (\w+)\n(.*?)^```", CHANGE, re.MULTILINE | re.DOTALL))
DEMO = ["--model", "demo", "--data", "demo"]
BLOCK = r"^```(\w*)\n(.*?)^```"
COMMAND = r"(\w+=\S+ )*(accelerate launch .*train\.py|make |bash runs/|sbatch |sed |\S*python ).*"


@pytest.mark.parametrize("name", PAGES)
def test_links_resolve(name):
    text = (ROOT / name).read_text()
    prose = re.sub(rf"{BLOCK}|`[^`]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(((?!http)[^)]*)\)", prose):
        path, _, anchor = target.partition("#")
        path = (ROOT / name).parent / path if path else ROOT / name
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
            titles = [re.sub(r"[^\w\- ]", "", title).lower() for title in titles]
            assert anchor in [title.replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("name", PAGES)
def test_commands_can_be_given(name, monkeypatch, process_group, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(EXAMPLES["task"])
    text = (ROOT / name).read_text().replace("\\\n", " ")
    blocks = re.findall(BLOCK, text, re.MULTILINE | re.DOTALL)
    lines = "".join(block for language, block in blocks if language == "sh").splitlines()
    prose = re.sub(BLOCK, "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    commands = [part for x in lines for part in re.sub(r"\s# .*", "", x).strip().split(" && ")]
    commands = [command for command in commands if re.fullmatch(COMMAND, command)]
    assert commands or "/" in name
    for command in commands:
        check_command(shlex.split(re.sub(r"^(\w+=\S+ )+", "", command)))


def check_command(words: list[str]):
    paths = [ROOT / word for word in words if re.search(r"\.(py|sh|sbatch)$", word)]
    assert all(path.is_file() for path in paths if path.name != "my_task.py"), words
    if "train.py" in words:
        argv = [word for word in words if word not in ("...", "--help")]
        argv = argv[argv.index("train.py") + 1 :]
        if "--model" not in argv:
            # Without --model it is the demo, whose base model and data any names stand in for.
            argv = [*DEMO, *argv]
        cfg = train.parse_flags(argv)
        world = re.findall(r"--num_processes (\d+)", " ".join(words)) or [1]
        train.check_flags(cfg, int(world[0]))
        train.load_task(cfg)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[0] == "sed":
        done = subprocess.run(["sed", words[2], paths[0]], capture_output=True, text=True)
        assert done.stdout not in ("", paths[0].read_text()), words
    elif paths:
        # An option must be in a file of the command, or be a flag of train.py.
        text = "".join(path.read_text() for path in [*paths, ROOT / "runs" / "launch.sh"])
        for option in re.findall(r" --(\w+)", " ".join(words).partition(paths[0].name)[2]):
            assert f"--{option}" in text or hasattr(train.Config(), option), words


def test_the_page_s_estimator_has_its_advantages(monkeypatch):
    """The example is run as if it were pasted into ppo.py."""
    # ppo.Recipe has the same dict.
    monkeypatch.delitem(ppo.ESTIMATORS, "w_reinforce", raising=False)
    exec(EXAMPLES["estimator"], dict(vars(ppo)))
    responses = [[2], [2, 2], [2]]
    rewards = torch.tensor([1, 0, 1], dtype=torch.float64)
    batch = ppo.Batch([[1]] * 3, responses, torch.arange(3), rewards, torch.device("cpu"), {}, [])
    ppo.compute_advantages(batch, config(estimator="w_reinforce"))
    assert batch.per_token["advantages"].tolist() == pytest.approx([0.1, -1, -1, 0.1])


def test_the_page_s_variant_pays_truncated_responses_less(tmp_path):
    path = tmp_path / "my_idea.py"
    path.write_text(EXAMPLES["variant"])
    ends = {"stop": 1.0, "length": 0.0}
    samples = [SimpleNamespace(finish_reason=x, reward=r, rewards=None) for x, r in ends.items()]
    assert config(variant=path, cut_cost=0.25).paid(samples) == [1.0, -0.25]


def test_the_page_s_task_pays_half_for_an_answer_that_is_near(tmp_path):
    """The example has all that a run asks of a task."""
    path = tmp_path / "my_task.py"
    path.write_text(EXAMPLES["task"])
    task = train.load_task(config(task=path, answer_form="hashes"))
    assert {"load_problems", "text_metrics"} <= vars(task).keys()
    with task.Grader(2, "hashes") as grader:
        assert grader.submit("right", "#### 18", "stop", "18") == "18"
        assert grader.submit("near", "#### 19", "stop", "18") == "19"
        assert grader.submit("cut", "#### 18", "length", "18") is None
        grader.submit("far", "#### 20", "stop", "18")
        grader.submit("none", "18", "stop", "18")
        grader.submit("word", "#### six", "stop", "6")
        assert grader.pending(9) == 0
        zeros = {"cut": 0.0, "far": 0.0, "none": 0.0, "word": 0.0}
        assert grader.results() == {"right": 1.0, "near": 0.5} | zeros
        assert grader.results() == {}
        assert grader.lost == 0


def test_the_step_with_numbers_is_right(process_group):
    """The shipped code computes all of the table in docs/ppo.md out of token, r, V and p."""
    page = (ROOT / "docs" / "ppo.md").read_text()
    rows = re.findall(r"^([ab]\d) \| `.*?` \|(.*)", page, re.MULTILINE)
    names = [name for name, _ in rows]
    table = torch.tensor([[float(x) for x in row.split("|")] for _, row in rows]).double().T
    r, value, raw, whitened, p, log_p, loss = table  # (T,) each
    starts = [k for k, name in enumerate(names) if name not in names[:k]]
    lengths = [names.count(names[k]) for k in starts]
    groups = torch.tensor([int(names[k].startswith("b")) for k in starts])
    responses = [[7] * n for n in lengths]
    batch = ppo.Batch([[1]] * 4, responses, groups, r[starts], torch.device("cpu"), {}, [])
    batch.per_token["values"] = value.float()
    recipe = ppo.Recipe()
    assert recipe.raw_advantages(batch).tolist() == pytest.approx(raw.tolist(), abs=1e-6)
    ppo.compute_advantages(batch, recipe)
    advantages = batch.per_token["advantages"]
    assert advantages.tolist() == pytest.approx(whitened.tolist(), abs=0.005)
    assert batch.per_token["returns"].tolist() == pytest.approx(r.tolist(), abs=1e-6)
    assert p.log().tolist() == pytest.approx(log_p.tolist(), abs=0.005)
    losses = recipe.token_loss(p.log(), None, advantages, batch, None, {})
    assert losses.tolist() == pytest.approx(loss.tolist(), abs=0.005)

    def losses_of(learner, batch, micro, cfg, stats):
        return losses[micro.flat_index]

    micro, _ = next(ppo.micro_batches(batch, [0, 1, 2, 3], recipe))
    critic_loss = recipe.critic_loss(value[micro.flat_index].float(), batch, micro, {}).mean()
    learner = SimpleNamespace(name="policy", backward=lambda *_: None, apply_update=lambda _: 0.0)
    told = ppo.update(learner, losses_of, batch, [0, 1, 2, 3], 0.1, recipe)
    numbers = [told["policy_loss"], raw.mean(), raw.std(correction=0), critic_loss]
    assert all(f" {number:.3f}" in page for number in numbers)
    scores = ppo.Recipe(estimator="grpo").raw_advantages(batch)
    assert scores.tolist() == [1.0] * 2 + [-1.0] * 4 + [0.0] * 5


@pytest.mark.slow
def test_the_three_edits_do_what_the_page_says(tiny, tmp_path):
    """Each diff of docs/change.md applies to the shipped code, and the run shows its effect."""
    diffs = re.findall("^```diff\n(.*?)^```", CHANGE, re.MULTILINE | re.DOTALL)
    lines = {}
    for name, diff in zip(("none", "reward", "advantage", "loss"), ["", *diffs], strict=True):
        folder = tmp_path / name
        shutil.copytree(ROOT / "nanoorz", folder / "nanoorz")
        for path in ROOT.glob("*.py"):
            shutil.copy(path, folder)
        if diff:
            (folder / "my.diff").write_text(diff)
            subprocess.run(["git", "apply", "my.diff"], cwd=folder, check=True)
        words = arguments(SMALL | tiny | {"max_steps": 1, "run_dir": folder / "run"})
        run_python("train.py", *words, cwd=folder)
        [lines[name]] = jsonl(folder / "run" / "metrics.jsonl")
    plain = lines["none"]
    cut = plain["reward"] - 0.5 * plain["truncated"]
    assert plain["truncated"] > 0 and lines["reward"]["paid"] == pytest.approx(cut)
    # The advantages had the mean 0. Without the negative ones it is half of the mean size.
    half = pytest.approx(plain["advantage_abs"] / 2)
    assert lines["advantage"]["advantage"] == lines["advantage"]["advantage_abs"] == half
    loss = plain["policy_loss"] - 0.1 * plain["entropy"]
    assert lines["loss"]["policy_loss"] == pytest.approx(loss, rel=1e-4)


def test_each_part_of_the_lesson_lowers_the_noise_of_the_part_before(tmp_path):
    """The lesson runs, shortened, and draws a picture in each of its six parts."""
    told = run_python(ROOT / "docs" / "lesson.py", "--quick", cwd=tmp_path).stdout
    assert len(list((tmp_path / "out" / "lesson").glob("*.png"))) == 6
    names = ("reward 0 or 1", "mean of the batch", "rloo, groups of 8", "a critic that has learnt")
    noise = [float(re.search(f"noise.*{name}: ([0-9.]+)", told)[1]) for name in names]
    assert noise == sorted(noise, reverse=True)


def test_at_ratio_one_only_the_mean_of_a_loss_matters():
    """The losses of other algorithms, as their papers write them, have one of four gradients."""
    toy, moved = ratio_one.Toy(), ratio_one.Toy(moved=0.5)
    for row, losses in ratio_one.losses(toy).items():
        assert {ratio_one.find_mean(loss, toy) for loss in losses.values()} == {row}
    for losses in ratio_one.losses(moved).values():
        found = {ratio_one.find_mean(loss, moved, tolerance=0.01) for loss in losses.values()}
        assert found == {"none"}


def test_tries_of_a_response():
    """The values are those before a try, before its verdict, and behind the verdict."""
    tries = [
        "2 + 3 = 5 <",
        "3 + 2 = 5 <",
        "2 - 3 = -1 <",
        "4 * 3 = 12 >",
        "7 + 5 = 12 !",
        "4 * 3 = 12 !",
    ]
    tokens = " \n ".join(tries).split(" ") + ["end"]
    label = {"numbers": [2, 3, 4, 8], "target": 12}
    sample = {"tokens": tokens, "values": list(range(len(tokens))), "label": label}
    kinds = ["new miss", "repeated try", "new miss", "overlooked hit", "false claim", "true hit"]
    expected = [(kind, 7 * k, 7 * k + 5, 7 * k + 6) for k, kind in enumerate(kinds)]
    assert findings.read_tries(sample) == expected


@pytest.mark.slow
def test_the_studies_print_their_tables_from_the_archive(tmp_path):
    """A row has a 95 % interval. Where runs are absent, one line says so."""
    unpack(ROOT / "studies" / "runs.tar.xz", tmp_path)
    script = ROOT / "studies" / "findings.py"
    told = run_python(script, ".", "--picture", "chain.png", cwd=tmp_path).stdout
    assert len(re.findall(r"^.* \| .*\d\.?\d* \[.*\]", told, re.MULTILINE)) > 90
    assert (tmp_path / "chain.png").exists()
    (tmp_path / "empty").mkdir()
    said = run_python(script, "empty", cwd=tmp_path, code=2).stderr
    assert said.startswith("error: ") and said.count("\n") == 1
