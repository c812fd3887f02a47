"""Links of pages resolve, their commands can be given, and the lesson and the studies run."""

import re
import shlex
import subprocess

import pytest
from conftest import ROOT, run_python, unpack

import train
from studies import findings, ratio_one

PAGES = ["README.md", "CONTRIBUTING.md"]
for folder in ("docs", "docs/exercises"):
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


def test_each_part_of_the_lesson_lowers_the_noise_of_the_part_before(tmp_path):
    """The lesson runs, shortened, and draws a picture in each of its seven parts."""
    told = run_python(ROOT / "docs" / "lesson.py", "--quick", cwd=tmp_path).stdout
    assert len(list((tmp_path / "out" / "lesson").glob("*.png"))) == 7
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
