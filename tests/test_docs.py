"""Each link of a page resolves. The files, targets and flags of each command on a page exist."""

import json
import re
import shlex
import shutil
import subprocess

import pytest
from conftest import ROOT, run_python, unpack

import train
from nanoorz.ranks import UserError
from studies import evidence, kills, peers, race, ratio_one

PAGES = ["README.md", "README.zh.md", "CONTRIBUTING.md"]
for folder in ("docs", "docs/exercises", "studies"):
    PAGES += [f"{folder}/{path.name}" for path in sorted((ROOT / folder).glob("*.md"))]
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
    assert all(path.is_file() for path in paths), words
    if "train.py" in words:
        argv = [word for word in words if word not in ("...", "--help")]
        argv = argv[argv.index("train.py") + 1 :]
        if "--model" not in argv:
            # Without --model it is the demo, whose base model and data any names stand in for.
            argv = [*DEMO, *argv]
        cfg = train.parse_flags(argv)
        world = re.findall(r"--num_processes (\d+)", " ".join(words)) or [1]
        train.check_flags(cfg, int(world[0]))
        train.find_task(cfg)
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


def test_each_part_of_the_lesson_lowers_the_noise_of_the_part_before(tmp_path):
    """The lesson runs, shortened, and draws a picture in each of its seven parts."""
    told = run_python(ROOT / "docs" / "lesson.py", "--quick", cwd=tmp_path).stdout
    assert len(list((tmp_path / "out" / "lesson").glob("*.png"))) == 7
    names = ("reward 0 or 1", "mean of the batch", "rloo, groups of 8", "a critic that has learnt")
    noise = [float(re.search(f"noise.*{name}: ([0-9.]+)", told)[1]) for name in names]
    assert noise == sorted(noise, reverse=True)


def test_the_race_ends_at_the_third_good_evaluation_and_refuses_flags_that_it_decides(tmp_path):
    """The tokens are those of all steps up to the end. Without an end there is no result."""
    accuracies = [0.1, 0.2, 0.48, 0.56, 0.5, 0.9]
    evaluations = [{"step": 2 * k, "set": "eval", "accuracy": x} for k, x in enumerate(accuracies)]
    steps = [{"step": k, "drawn_tokens": 100 * k} for k in range(1, 11)]
    for name, lines in (("eval", evaluations), ("metrics", steps)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert race.find_end(tmp_path) == ([4, 6, 8], 3600)
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, evaluations[:4])))
    assert race.find_end(tmp_path) is None
    assert race.find_entry(race.ENTRIES, "baseline").flags
    plan = tmp_path / "plan.txt"
    plan.write_text("a: --eval-n 1\nb: --max-steps 121\nbaseline: --lambd 0.9")
    told = {"a": "a: the race decides --eval_n", "b": "b: --max_steps takes a number up to 120"}
    for name, words in (told | {"baseline": "line 3: baseline: .* another name"}).items():
        with pytest.raises(UserError, match=words):
            race.find_entry(plan, name)


def test_at_ratio_one_only_the_mean_of_a_loss_matters():
    """The losses of other algorithms, as their papers write them, have one of four gradients."""
    assert {ratio_one.mean_of(name) for name in ratio_one.LOSSES} == ratio_one.LEFT.keys()


def test_the_studies_that_start_runs_have_flags_that_train_py_takes(process_group):
    """Kills of one rank and of two, and our side of each case beside TRL."""
    flags = [f"{kills.FLAGS} 0", f"{kills.FLAGS} 3"]
    flags += [peers.our_flags("folder", *case) for case in peers.CASES]
    for words in flags:
        train.check_flags(train.parse_flags([*shlex.split(words), *DEMO]), 1)


def test_the_evidence_names_claims_whose_code_has_changed(tmp_path, monkeypatch):
    """A comment and a docstring are no code. The page has each claim, and its numbers exist."""
    found = json.loads(evidence.CLAIMS.read_text())
    page = evidence.PAGE.read_text()
    for name, claim in found["claims"].items():
        assert (ROOT / claim["numbers"]).exists() and claim["machine"] in found["machines"]
        section = evidence.section(name, claim)
        assert section.partition("- **Changed since**")[0] in page
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    source = tmp_path / "stage.py"
    texts = ["x = 1\n", '"""Doc."""\nx = 1  # one\n', "x = 2\n"]
    hashes = [source.write_text(text) and evidence.hash_of("*.py") for text in texts]
    assert hashes[0] == hashes[1] != hashes[2]
    assert evidence.changed({"rests on": {"*.py": hashes[1]}}) == ["*.py"]


def are_in(rows: list[str], printed: list[str]) -> bool:
    """Whether the printed rows have these rows, in the same order."""
    rest = iter(printed)
    return all(row in rest for row in rows)


def test_the_tables_of_the_chains_have_the_numbers_of_their_runs(tmp_path):
    """studies/chain.py prints each row of the page that has an interval, in the page's order."""
    unpack(ROOT / "studies" / "chain_runs.tar.xz", tmp_path)
    words = [ROOT / "studies" / "chain.py", tmp_path, "--picture", tmp_path / "picture.png"]
    told = run_python(*words).stdout
    page = (ROOT / "docs" / "chain.md").read_text()
    rows, printed = (re.findall(r"^.* \| .*\].*", text, re.MULTILINE) for text in (page, told))
    assert len(rows) > 20 and are_in(rows, printed)
    shutil.rmtree(tmp_path / "grpo_4")
    done = run_python(*words, code=2)
    assert "lacks runs (KeyError: 4); unpack the archive there" in done.stderr


def test_the_tables_of_a_teacher_and_of_several_rewards_have_the_numbers_of_their_runs(tmp_path):
    """studies/teacher.py prints each row of the two pages that has an interval, in this order."""
    unpack(ROOT / "studies" / "teacher_runs.tar.xz", tmp_path)
    words = [ROOT / "studies" / "teacher.py", tmp_path, "--pictures", tmp_path]
    told = run_python(*words).stdout
    text = (ROOT / "docs" / "teacher.md").read_text() + (ROOT / "docs" / "rewards.md").read_text()
    rows, printed = (re.findall(r"^.* \| .*\d\.\d+ \[.*", x, re.MULTILINE) for x in (text, told))
    assert len(rows) > 10 and are_in(rows, printed)
    shutil.rmtree(tmp_path / "chain")
    assert "unpack the archive there" in run_python(*words, code=2).stderr


def test_the_tables_of_the_critic_have_the_numbers_of_its_runs(tmp_path):
    """pays.py prints each row of the laboratory, and each interval of the README."""
    unpack(ROOT / "studies" / "critic_runs.tar.xz", tmp_path)
    told = run_python(ROOT / "studies" / "pays.py", tmp_path / "critic", tmp_path / "alone").stdout
    page = (ROOT / "docs" / "laboratory.md").read_text()
    rows = re.findall(r"^.* minus .* \| .*\].*", page, re.MULTILINE)
    assert len(rows) > 7
    for line in rows:
        assert f"\n{line.replace('**', '')}" in told, line
    intervals = re.findall(r"\d\.\d+\s\[.*?\]", (ROOT / "README.md").read_text())
    assert intervals
    for interval in intervals:
        assert f"+{' '.join(interval.split())}" in told, interval
