"""Checkpoints are atomic and resumed to the bit, whatever a disk or a user breaks."""

import errno
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny as maker
import torch
from conftest import fill
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

import ckpt
import train
from ckpt import RunState
from nanoorz import families, models  # noqa: F401 (models turns a compilation of DeepSpeed off)
from nanoorz.flags import flags_of
from nanoorz.ranks import UserError

MAY_CHANGE = train.Config.__annotations__


@pytest.fixture(scope="session")
def group(process_group):
    """A process group of one, and a DeepSpeed engine (ZeRO 1) that is cheap to step."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def step(engine):
    engine.backward(engine(torch.ones(1, 64)).square().mean())
    engine.step()


def run_state(number: int, **changes) -> RunState:
    config = flags_of(train.Config()) | changes.pop("config", {})
    return RunState(number, config=config, **changes)


def save(run, number, engine, keep_last=0, **changes):
    return ckpt.save(run, run_state(number, **changes), {"policy": engine}, keep_last)


def steps(run: Path) -> list[int]:
    return [ckpt.step_of(path) for path in ckpt.checkpoints(run)]


SAVED = {"problems_hash": 1, "variants": [["mine", "hash of its text"]]}


def find_start(run: Path, choice="auto", **changes):
    return ckpt.find_start(run, choice, run_state(0, **SAVED | changes), MAY_CHANGE)


# ---- the folder, save, export --------------------------------------------------------------------

LOCK = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
input()
"""


def test_claim_refuses_a_folder_that_is_used_full_or_not_writable(group, tmp_path):
    """A claimed folder is also cleaned of what an unfinished save left there."""
    (tmp_path / ".saving_000003").mkdir()
    ckpt.claim(tmp_path, 0).close()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    words = [sys.executable, "-c", LOCK, tmp_path / ".lock"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="another run is using this folder"):
            ckpt.claim(tmp_path, 0)
        other.communicate(b"\n")
    numbers = r"machine .*, rank 0, .*needed 1,1\d\d(,\d{3}){5} bytes, free"
    with pytest.raises(UserError, match=numbers):
        ckpt.claim(tmp_path, 1 << 60)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not writable"):
        ckpt.claim(tmp_path / "file" / "run", 0)


def test_a_forked_child_does_not_keep_the_lock_of_a_folder(process_group, tmp_path):
    """A tool's process may outlive a run that is killed."""
    lock = ckpt.claim(tmp_path, needed_bytes=0)
    wait, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(wait, 1)
        os._exit(0)
    lock.close()
    words = [sys.executable, "-c", LOCK, tmp_path / ".lock"]
    assert subprocess.run(words, input=b"\n", capture_output=True).stdout == b"locked\n"
    os.close(end)
    os.waitpid(child, 0)


@pytest.fixture
def break_flush(monkeypatch):
    """break_flush(ending): the next flush of a path with this ending fails."""
    fsync = os.fsync
    sick = []

    def sick_fsync(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if sick and path.endswith(sick[0]):
            # The kernel reports a failed flush once.
            sick.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", sick_fsync)
    return sick.append


@pytest.mark.parametrize(
    "fault, told",
    [
        (20_000, "No space left|os error 28"),
        (0, "No space left"),
        (".safetensors", "Input/output error"),
        ("state.json", "Input/output error"),
        ("/.saving_000002", "Input/output error"),
    ],
)
def test_a_disk_that_fails_keeps_the_checkpoint_before(
    group, small_disk, break_flush, capsys, fault, told
):
    """The disk is full, with so many bytes free, or cannot flush a file or a folder. The warning
    has the kernel's words, and the next try works."""
    assert save(small_disk, 1, group) is None
    if isinstance(fault, int):
        fill(small_disk, room=fault)
    else:
        break_flush(fault)
    capsys.readouterr()
    error = save(small_disk, 2, group)
    assert re.match(f"machine .*, rank 0: .*({told})", error)
    assert capsys.readouterr().out == f"WARNING: step 2 is NOT saved: {error}\n"
    assert steps(small_disk) == [1]
    assert not list(small_disk.glob(".saving*")), "the torn one must not eat the space"
    (small_disk / "ballast").unlink(missing_ok=True)
    assert save(small_disk, 2, group) is None
    assert capsys.readouterr().out == "saved step 2\n"


def test_all_files_are_flushed_before_a_checkpoint_gets_its_name(group, tmp_path, monkeypatch):
    """A loss of power keeps what was flushed: all files, folders and logs come before the rename,
    and the run folder after it."""
    done = []  # (name, path, size by then)
    fsync = os.fsync
    rename = os.rename

    def note_fsync(handle):
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append(("fsync", path, path.stat().st_size))

    def note_rename(source, target):
        rename(source, target)
        done.append(("rename", Path(target), 0))

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert save(tmp_path, 1, group) is None
    final = tmp_path / "step_000001"
    temporary = tmp_path / ".saving_000001"
    names = [(name, path) for name, path, _ in done]
    renamed = names.index(("rename", final))
    flushed = {path: size for name, path, size in done[:renamed]}
    assert len(list(final.rglob("*.safetensors"))) == 1
    for path in [final, *final.rglob("*")]:
        size = flushed[temporary / path.relative_to(final)]
        assert path.is_dir() or size == path.stat().st_size, "what came later is not on disk"
    assert tmp_path / "metrics.jsonl" in flushed
    assert names[renamed + 1 :] == [("fsync", tmp_path)]


def test_prune_keeps_the_last_ones_or_all_and_tells_if_it_cannot(
    group, tmp_path, monkeypatch, capsys
):
    for number in range(1, 4):
        save(tmp_path, number, group, keep_last=2)
    assert steps(tmp_path) == [3, 2]
    save(tmp_path, 4, group, keep_last=0)
    assert steps(tmp_path) == [4, 3, 2]
    assert not list(tmp_path.glob(".*ing_*")), "the deleted ones must not eat the space"

    def fail(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    # The new checkpoint is complete. Without the line the disk would fill without a word.
    monkeypatch.setattr(ckpt, "prune", fail)
    capsys.readouterr()
    assert save(tmp_path, 5, group) is None
    told = capsys.readouterr().out
    assert "saved step 5" in told and "WARNING: older checkpoints are not removed: machine" in told


def test_an_export_to_a_full_disk_is_a_user_error(group, tiny, small_disk):
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    fill(small_disk, room=0)
    with pytest.raises(UserError, match="policy is NOT written: .*No space left"):
        save_model = functools.partial(families.save, model, tiny["model"])
        ckpt.export(small_disk / "policy", save_model, model.named_parameters(), "")


def test_an_export_has_the_small_files_of_the_base_model(group, tmp_path):
    """transformers 5 writes a config without rope_theta, and the versions before it take the
    default then. Its tokenizer files they cannot read. It reads this generation config, and
    refused to write it after the last step."""
    base = maker.make_model(tmp_path / "base", hidden=32, layers=1)
    config = json.loads((base / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "dtype"):
        del config[name]
    config |= {"rope_theta": 1e6, "torch_dtype": "bfloat16", "transformers_version": "4.42.3"}
    (base / "config.json").write_text(json.dumps(config))
    (base / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    (base / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (base / "merges.txt").write_text("#version: 0.2\n")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (base / "train.json").write_text("no file of a model")
    for auto_class, architecture in (
        (AutoModelForCausalLM, "Qwen2ForCausalLM"),
        (AutoModel, "Qwen2Model"),
    ):
        model = auto_class.from_pretrained(base, dtype=torch.float32)
        out = tmp_path / architecture
        save_model = functools.partial(families.save, model, base)
        ckpt.export(out, save_model, model.state_dict().items(), "Say hello.")
        assert (out / "README.md").read_text() == "Say hello."
        names = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"]
        for name in [*names, "additional_chat_templates/tool_use.jinja"]:
            assert (out / name).read_bytes() == (base / name).read_bytes()
        assert not (out / "train.json").exists()
        # Who may read the config may read the weights.
        assert len({path.stat().st_mode for path in out.iterdir() if path.is_file()}) == 1
        expected = config | {"torch_dtype": "float32", "architectures": [architecture]}
        assert json.loads((out / "config.json").read_text()) == expected
        again = auto_class.from_pretrained(out, dtype="auto")
        assert again.dtype == torch.float32 and again.config.rope_parameters["rope_theta"] == 1e6
    # A variant may train another model. Then the config is that of this model.
    model.config.rope_parameters["rope_theta"] = 5.0
    ckpt.export(tmp_path / "other", save_model, model.state_dict().items(), "")
    assert AutoModel.from_pretrained(tmp_path / "other").config.rope_parameters["rope_theta"] == 5.0


# ---- resume --------------------------------------------------------------------------------------


@pytest.fixture
def run(group, tmp_path):
    """A run folder with checkpoints of steps 1 and 2."""
    (tmp_path / "run").mkdir()
    for number in (1, 2):
        assert save(tmp_path / "run", number, group, **SAVED) is None
    return tmp_path / "run"


def test_the_choice_of_a_checkpoint(run, tmp_path, monkeypatch):
    """A wrong path is answered with the steps that there are."""
    assert find_start(run)[0].name == "step_000002"
    assert find_start(run, f"{run}/../run/step_000001")[0] == run / "step_000001"
    monkeypatch.chdir(run)
    assert find_start(run, "step_000001/")[0] == run / "step_000001"
    assert find_start(run, "none")[0] is None
    assert find_start(tmp_path / "nothing")[0] is None, "a new run"
    for name in ("latest", str(run), f"{run}/step_000003", f"{tmp_path}/step_000002"):
        told = f"^--resume {name}: give auto, none or a checkpoint; .*run has step_000002, step_0"
        with pytest.raises(UserError, match=told):
            find_start(run, name)


def test_a_damaged_checkpoint_is_refused_in_one_line(group, run):
    """The run never starts over unasked: the user deletes the checkpoint, or mends the disk."""
    newest = run / "step_000002"
    [file] = newest.rglob("*.safetensors")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(UserError, match=f"^{file} is damaged: .*; delete this checkpoint"):
        ckpt.resume(run, newest, {"policy": group})
    file.unlink()
    with pytest.raises(UserError, match="policy is damaged: it lacks .*weight"):
        ckpt.resume(run, newest, {"policy": group})


def test_the_same_run_goes_on_where_it_was(group, tmp_path, capsys):
    assert save(tmp_path, 3, group, **SAVED | {"memory": {"mine": {"1": 2}}}) is None
    path, state = find_start(tmp_path, config={"save_interval": 7, "zero_stage": 0})
    assert "resume: --save_interval was 50, is 7\n" in capsys.readouterr().out
    assert path == tmp_path / "step_000003"
    assert (state.step, state.config["save_interval"]) == (3, 7)
    assert state.memory == {"mine": {"1": 2}}
    assert find_start(tmp_path, "none") == (None, run_state(0, **SAVED))


def test_flags_that_decide_what_is_learnt_must_stay_and_the_others_may_change(capsys):
    for name, old in run_state(3).config.items():
        # Of the same kind, as far as that is known.
        new = 1 if old is None else old + (["more"] if isinstance(old, list) else old or 1)
        if isinstance(old, bool):
            new = not old
        now = run_state(0, config={name: new})
        found = ckpt.find_misfits(Path("RUN/step_000003"), run_state(3), now, MAY_CHANGE)
        change = f"--{name} was {old}, is {new}"
        assert found == ([] if name in MAY_CHANGE else [change])
        printed = capsys.readouterr().out
        assert printed == (f"resume: {change}\n" if name in MAY_CHANGE else "")


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"config": {"seed": 7, "top_p": 0.5}}, "--seed was 42, is 7; --top_p was 1.0, is 0.5"),
        ({"problems_hash": 7}, "--data has other prompts or labels"),
        ({"problems_hash": 7, "config": {"template": "plain"}}, "--template was orz, is plain"),
        (
            {"variants": []},
            "the variants or their texts differ from --variant .*run/variants/mine.py",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_in_one_line(run, changes, told):
    newest = run / "step_000002"
    told = f"^{newest} cannot go on: {told}; undo this, or .* python ckpt.py {newest} NEW$"
    with pytest.raises(UserError, match=told):
        find_start(run, **changes)


def test_save_load_is_exact(group, tmp_path):
    """A save directly after a load also has the moments."""
    step(group)
    assert save(tmp_path, 1, group) is None
    at_save = group.module.weight.detach().clone()
    step(group)
    after = group.module.weight.detach().clone()
    ckpt.resume(tmp_path, tmp_path / "step_000001", {"policy": group})
    assert torch.equal(group.module.weight, at_save)
    assert save(tmp_path, 2, group) is None
    one, two = (load_file(path) for path in sorted(tmp_path.rglob("*.safetensors")))
    assert (
        one.keys()
        == two.keys()
        == {f"{kind}/{name}" for kind in ckpt.KINDS for name in ("weight", "bias")}
    )
    assert all(torch.equal(one[key], two[key]) and one[key].any() for key in one)
    step(group)
    assert torch.equal(group.module.weight, after), "Adam's moments did not come back"


def test_memory_that_json_changes_is_no_silent_loss():
    """A resumed run would read something else. The state keeps a copy."""
    memory = {"mine": {"3": [1, 0.5, None, "x"]}}
    state = RunState()
    state.finish_step(memory)
    memory["mine"]["4"] = 1
    assert (state.step, state.memory) == (1, {"mine": {"3": [1, 0.5, None, "x"]}})
    for value in ({3: 1}, {"x": (1,)}):
        with pytest.raises(AssertionError, match="self.memory changes"):
            RunState().finish_step({"mine": value})


def write_lines(path, *lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_resume_cuts_the_logs_and_moves_later_checkpoints(tmp_path):
    """What belongs to the step stays, also an evaluation of it. A later checkpoint would be
    resumed, so it is moved. Only the user deletes it."""
    write_lines(tmp_path / "metrics.jsonl", {"step": 1}, {"step": 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"st')
    evaluations = [{"step": 0, "set": "a"}, {"step": 1, "set": "a"}, {"step": 2, "set": "a"}]
    write_lines(tmp_path / "eval.jsonl", *evaluations)
    samples = [line for line in evaluations for _ in range(2)]
    write_lines(tmp_path / "eval_samples.jsonl", *samples)
    (tmp_path / "problems.jsonl").write_text("theirs")
    (tmp_path / "policy").mkdir()
    for count in (1, 2, 3):
        for number in (1, 2):
            (tmp_path / f"step_{number:06d}").mkdir(exist_ok=True)
        (tmp_path / "step_000002" / str(count)).write_text("")
        ckpt.rewind_folder(tmp_path, 1)
        assert steps(tmp_path) == [1]
    dropped = sorted(tmp_path.glob("dropped_*"))
    names = [next((path / "step_000002").iterdir()).name for path in dropped]
    assert names == ["1", "2", "3"], "no name twice"
    assert (dropped[0] / "policy").exists() and not (tmp_path / "policy").exists()
    assert (dropped[0] / "metrics.jsonl").read_text() == '{"step": 2}\n{"st'
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    lines = (tmp_path / "eval.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == evaluations[:2]
    lines = (tmp_path / "eval_samples.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == samples[:4]
    assert (tmp_path / "problems.jsonl").read_text() == "theirs", "a file of the user's was emptied"


def test_a_new_run_moves_all_of_an_earlier_run_away_and_says_so(tmp_path, capsys):
    ckpt.rewind_folder(tmp_path, None)
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out
    logs = [*ckpt.LOGS, "config.json", "result.json"]
    folders = ["code", "variants", "policy", "critic", "tensorboard", "wandb"]
    folders += ["step_000000", "step_000002"]
    for name in folders:
        (tmp_path / name).mkdir()
    for name in [*logs, "mine.txt"]:
        (tmp_path / name).write_text(name)
    (tmp_path / "base").mkdir()
    ckpt.rewind_folder(tmp_path, None)
    [aside] = tmp_path.glob("dropped_*")
    assert {path.name for path in aside.iterdir()} == {*logs, *folders}
    assert {path.name for path in tmp_path.iterdir()} == {"base", "mine.txt", aside.name}
    said = capsys.readouterr().out
    assert said.startswith(f"the run starts at step 0, so these are moved to {aside}: ")
    assert said.count("\n") == 1
    assert all(name in said for name in [*logs, *folders])
