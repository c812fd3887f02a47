"""Checkpoints are atomic, verified, and resumed to the bit.

And every way to break one that a disk or a user can think of.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import (
    ACCELERATE,
    ROOT,
    SMALL,
    arguments,
    clean_environment,
    equal_runs,
    held_port,
    jsonl,
    launch,
)
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

import ckpt
import train
from ckpt import RunState
from lib.common import Stopped, UserError, start_distributed
from tools import convert, demo

LEARNING = vars(train.Learning())
CONFIG = vars(train.Config()).keys() - LEARNING.keys()


@pytest.fixture(scope="session")
def group():
    """A process group of one, and a DeepSpeed engine (ZeRO 1) that is cheap to step."""
    import deepspeed

    if not dist.is_initialized():
        start_distributed()
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
    """Of a run of 6 steps."""
    config = vars(train.Config()) | changes.pop("config", {})
    return RunState(number, **{"total_steps": 6, "config": config} | changes)


def save(run, number, engine, keep_last=0, hf=None):
    hf = hf or [demo.make_tokenizer()]
    return ckpt.save(run, run_state(number), {"policy": engine}, hf, keep_last)


def steps(run: Path) -> list[int]:
    return [ckpt.step_of(path) for path in ckpt.checkpoints(run)]


def weights(engine):
    return engine.module.weight.detach().clone()


# ---- the folder ----------------------------------------------------------------------------------


def test_leftovers_are_cleaned_and_second_run_refused(group, tmp_path):
    (tmp_path / ".saving_000003").mkdir()
    lock = ckpt.claim(tmp_path, 0)
    assert not (tmp_path / ".saving_000003").exists()
    code = f"""import sys; sys.path.insert(0, {str(ROOT)!r})
import ckpt, pathlib
from lib.common import start_distributed
start_distributed()
ckpt.claim(pathlib.Path({str(tmp_path)!r}), 0)"""
    command = [sys.executable, "-c", code]
    second = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=clean_environment()
    )
    assert "another run is using this folder" in second.stderr
    lock.close()


def test_too_small_and_unwritable_name_the_numbers(group, tmp_path):
    with pytest.raises(
        UserError, match=r"machine .*, rank 0, .*needed 1,1\d\d(,\d{3}){5} bytes, free"
    ):
        ckpt.claim(tmp_path, 1 << 60)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not writable"):
        ckpt.claim(tmp_path / "file" / "run", 0)


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 1 MB, where the machine lets us mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_read_only_folder_is_refused(group, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match="not writable.*Read-only"):
        ckpt.claim(small_disk / "run", 0)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


# ---- save ----------------------------------------------------------------------------------------


def test_checkpoint_files_need_no_arbitrary_pickle(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, ("touch " + str(tmp_path / "owned"),))

    torch.save(Evil(), tmp_path / "evil.pt")
    with pytest.raises(Exception, match="[Ww]eights"):
        ckpt.DurableWriter().load(str(tmp_path / "evil.pt"))
    assert not (tmp_path / "owned").exists()


def test_full_disk_keeps_the_old_one(group, small_disk, capsys):
    """It said `unexpected pos 864384 vs 864272`, and neither what is free nor what was needed."""
    assert save(small_disk, 1, group) is None
    ballast = small_disk / "ballast"
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(b"x" * (free - 20_000))
    capsys.readouterr()
    error = save(small_disk, 2, group)
    assert error, "a full disk must be reported, not published"
    assert "rank 0" in error
    assert "No space left on device" in error, "the kernel's word, and not what torch makes of it"
    needed = 16 * sum(parameter.numel() for parameter in group.module.parameters())
    free = shutil.disk_usage(small_disk).free
    assert error.endswith(f"; {small_disk}: needed {needed:,} bytes, free {free:,}")
    assert capsys.readouterr().out == f"WARNING: step 2 is NOT saved: {error}\n"
    assert steps(small_disk) == [1]
    assert not list(small_disk.glob(".saving*")), "the torn one must not eat the space"
    assert ckpt.pick_checkpoint(small_disk, "auto").name == "step_000001"
    ballast.unlink()
    assert save(small_disk, 2, group) is None, "the next try works"


@pytest.mark.parametrize("numbers", [1000, 300_000])
def test_a_full_disk_is_told_in_the_kernel_s_words(group, small_disk, numbers):
    """torch only says that a position is unexpected."""
    (small_disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 4096))
    writer = ckpt.DurableWriter()
    writer.save({"weight": torch.zeros(numbers)}, str(small_disk / "state.pt"))
    writer.finish()
    assert writer.error == "OSError: [Errno 28] No space left on device"


def test_an_error_while_a_stop_is_handled_is_told_as_itself():
    """A run that is stopped saves while it handles Stopped, which every error refers to then."""
    try:
        raise Stopped
    except Stopped:
        error = ckpt.try_disk(os.mkdir, "/nonexistent/folder")
    assert error.startswith("FileNotFoundError: [Errno 2] No such file")


@pytest.mark.parametrize("room", [0, 3000])
def test_disk_that_fills_up_at_the_end_of_a_save(group, small_disk, room):
    """After all ranks' files, while rank 0 writes the small ones: tokenizers raises a bare
    Exception."""

    class Last:
        def save_pretrained(self, folder):
            free = shutil.disk_usage(small_disk).free
            (small_disk / "ballast").write_bytes(b"x" * max(0, free - room))
            demo.make_tokenizer().save_pretrained(folder)

    error = save(small_disk, 1, group, hf=[Last()])
    assert error
    assert re.search("space|os error 28", error, re.IGNORECASE)
    assert not ckpt.checkpoints(small_disk)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What the kernel has done below tmp_path, in order: (name, path, its size by then)."""
    done = []
    fsync = os.fsync
    rename = os.rename

    def note(name, path):
        if path.is_relative_to(tmp_path):
            done.append((name, path, path.stat().st_size))

    def note_fsync(handle):
        fsync(handle)
        note("fsync", Path(os.readlink(f"/proc/self/fd/{handle}")))

    def note_rename(source, target):
        assert ckpt.manifest(Path(source)), "what gets its name must be complete"
        rename(source, target)
        note("rename", Path(target))

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    return done


def test_all_is_on_disk_before_the_name_is(group, tmp_path, calls):
    """A power cut keeps what was flushed. Every rank flushes its own files before rank 0 begins to
    publish; all files, folders and logs come before the rename, and the run folder after it."""

    class First:
        def save_pretrained(self, folder):
            calls.append(("publish", folder, 0))
            demo.make_tokenizer().save_pretrained(folder)

    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert save(tmp_path, 1, group, hf=[First()]) is None
    final = tmp_path / "step_000001"
    temporary = tmp_path / ".saving_000001"
    names = [(name, path) for name, path, _ in calls]
    publishing = names.index(("publish", temporary / "hf"))
    renamed = names.index(("rename", final))
    flushed = {path: size for name, path, size in calls[:renamed] if name == "fsync"}

    ours = set(final.rglob("*.pt"))
    assert len(ours) == 2
    for path in ours:
        assert ("fsync", temporary / path.relative_to(final)) in names[:publishing]
    for path in [final, *final.rglob("*")]:
        size = flushed[temporary / path.relative_to(final)]
        assert path.is_dir() or size == path.stat().st_size, "what came later is not on disk"
    assert tmp_path / "metrics.jsonl" in flushed
    assert names[renamed + 1 :] == [("fsync", tmp_path)]


def test_what_reshard_writes_is_on_disk_before_its_name_is(group, tmp_path, calls):
    state = run_state(1, config={"zero_stage": 1})
    assert ckpt.save(tmp_path, state, {"policy": group}, [], 0) is None
    calls.clear()
    convert.reshard(tmp_path)
    path = tmp_path / "step_000001"
    temporary = path / ".universal"
    names = [(name, place) for name, place, _ in calls]
    renamed = names.index(("rename", path / "universal"))
    flushed = {place for name, place in names[:renamed]}
    assert flushed == {temporary, temporary / "policy.safetensors", temporary / "manifest.json"}
    assert names[renamed + 1 :] == [("fsync", path)]


@pytest.mark.parametrize("place", ["_optim_states.pt", "manifest.json", "/.saving_000002"])
def test_a_flush_that_fails_is_a_save_that_failed(group, tmp_path, monkeypatch, place):
    """The kernel tells it once, and the next fsync finds nothing left to do."""
    fsync = os.fsync
    told = []

    def sick_fsync(handle):
        if not told and os.readlink(f"/proc/self/fd/{handle}").endswith(place):
            told.append(place)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(handle)

    assert save(tmp_path, 1, group) is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sick_fsync)
        assert "Input/output error" in save(tmp_path, 2, group)
    assert steps(tmp_path) == [1]
    assert save(tmp_path, 2, group) is None


def test_prune_keeps_the_last_ones_or_all(group, tmp_path):
    for number in range(1, 5):
        save(tmp_path, number, group, keep_last=2)
    assert steps(tmp_path) == [4, 3]
    save(tmp_path, 5, group, keep_last=0)
    assert steps(tmp_path) == [5, 4, 3]


def test_prune_counts_only_complete_ones(group, tmp_path):
    for number in (1, 2):
        save(tmp_path, number, group, keep_last=2)
    (tmp_path / "step_000002" / "manifest.json").unlink()
    save(tmp_path, 3, group, keep_last=2)
    assert steps(tmp_path) == [3, 2, 1], "1 is the second that can be loaded"


# ---- resume --------------------------------------------------------------------------------------


def test_flipped_byte_goes_back_to_the_one_before(group, tmp_path, capsys):
    save(tmp_path, 1, group)
    save(tmp_path, 2, group)
    victim = max((tmp_path / "step_000002").rglob("*.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert ckpt.manifest(tmp_path / "step_000002"), "the size is the same: only the hash can tell"
    assert ckpt.pick_checkpoint(tmp_path, "auto").name == "step_000001"
    assert "does not match its hash" in capsys.readouterr().out
    with pytest.raises(UserError, match="hash"):
        ckpt.pick_checkpoint(tmp_path, str(tmp_path / "step_000002"))


@pytest.mark.parametrize("how", ["missing", "cut", "no manifest", "torn manifest"])
def test_damaged_checkpoint_is_passed_over(group, tmp_path, how):
    save(tmp_path, 1, group)
    save(tmp_path, 2, group)
    newest = tmp_path / "step_000002"
    victim = newest / "manifest.json"
    if how in ("missing", "cut"):
        victim = next(newest.rglob("*.pt"))
    if how in ("missing", "no manifest"):
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size // 2)
    assert ckpt.pick_checkpoint(tmp_path, "auto").name == "step_000001"
    assert save(tmp_path, 2, group) is None, "a damaged one is replaced"
    assert ckpt.pick_checkpoint(tmp_path, "auto").name == "step_000002"


ODD = ["", "[]", "null", "3", "true", '"x"', "[" * 100_000, "\udcff"]
ODD_MANIFESTS = [
    *ODD,
    "{}",
    '{"state.json": null}',
    '{"state.json": {}}',
    '{"state.json": []}',
    '{"state.json": 3}',
    '{"state.json": "size"}',
    '{"state.json": {"size": null}}',
    '{"state.json": {"size": "x"}}',
    '{"state.json": {"size": NaN}}',
    '{"absent": {"size": 1}}',
    '{"a\\u0000b": {"size": 1}}',
    '{"\\ud800": {"size": 1}}',
    '{"%s": {"size": 1}}' % ("x" * 5000),
]


def write_odd(path: Path, text: str):
    path.write_text(text, errors="surrogateescape")


@pytest.fixture(scope="module")
def two_saves(group, tmp_path_factory):
    run = tmp_path_factory.mktemp("two_saves")
    for number in (1, 2):
        assert save(run, number, group) is None
    return run


@pytest.fixture
def copy(two_saves, tmp_path):
    """A run folder with steps 1 and 2, to be damaged."""
    return Path(shutil.copytree(two_saves, tmp_path / "copy"))


@pytest.mark.parametrize("number", range(len(ODD_MANIFESTS)))
def test_a_manifest_of_any_shape_is_damage(group, copy, capsys, number):
    """JSON of another shape ended in a traceback. The run must go back a step, and what reshard
    wrote must be asked for again."""
    write_odd(copy / "step_000002" / "manifest.json", ODD_MANIFESTS[number])
    assert ckpt.pick_checkpoint(copy, "auto").name == "step_000001"
    line = "step_000002 is damaged (files are missing or cut short); going back"
    assert line in capsys.readouterr().out
    universal = copy / "step_000001" / "universal"
    universal.mkdir()
    write_odd(universal / "manifest.json", ODD_MANIFESTS[number])
    with pytest.raises(UserError, match="universal: files are missing.*reshard again"):
        ckpt.load(universal.parent, {"policy": group}, run_state(1, world=2))
    convert.list_checkpoints(copy)
    two, one = capsys.readouterr().out.splitlines()
    assert two.endswith("TORN") and one.endswith("complete")
    with pytest.raises(UserError, match="step_000002 is not a complete checkpoint"):
        convert.verified_state(copy / "step_000002")


@pytest.mark.parametrize("text", [*ODD[:6], '{"of_another_version": 1}'])
def test_a_state_of_any_shape_is_damage_or_of_another_version(copy, text):
    """It is damage where the manifest disagrees, and another version's where it agrees."""
    newest = copy / "step_000002"
    write_odd(newest / "state.json", text)
    assert ckpt.pick_checkpoint(copy, "auto").name == "step_000001"
    entries = json.loads((newest / "manifest.json").read_text())
    entries["state.json"] = ckpt.size_and_hash(newest / "state.json")
    (newest / "manifest.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match=r"step_000002/state.json is not of this version \("):
        find_start(copy)
    with pytest.raises(UserError, match=r"step_000002/state.json is not of this version \("):
        convert.verified_state(newest)


def test_an_old_checkpoint_is_refused_and_says_where_its_commit_stands(
    group, tmp_path, monkeypatch
):
    """Of before there were variants."""
    old = vars(run_state(3)) | {"levers": {}}
    del old["variants"], old["memory"]
    monkeypatch.setattr(ckpt.dataclasses, "asdict", lambda state: old)
    assert ckpt.save(tmp_path, run_state(3), {"policy": group}, [], 0) is None
    with pytest.raises(UserError, match=f"the commit that {tmp_path}/config.json names") as e:
        find_start(tmp_path)
    assert "\n" not in str(e.value)
    assert find_start(tmp_path, "none")[0] is None


def test_never_starts_over_by_itself(group, tmp_path):
    """A disk that cannot be read for a minute must not cost a run: with nothing left to go back to,
    it ends."""
    assert ckpt.pick_checkpoint(tmp_path, "auto") is None, "nothing there: a new run"
    for number in (1, 2):
        save(tmp_path, number, group)
        os.truncate(tmp_path / f"step_{number:06d}" / "state.json", 1)
    with pytest.raises(UserError, match="step_000001: files are missing.*--resume none"):
        ckpt.pick_checkpoint(tmp_path, "auto")
    assert len(ckpt.checkpoints(tmp_path)) == 2
    assert ckpt.pick_checkpoint(tmp_path, "none") is None


@pytest.fixture(scope="module")
def saved_run(group, tmp_path_factory):
    """A run folder with a checkpoint of step 3 of 6."""
    run = tmp_path_factory.mktemp("saved_run")
    state = run_state(3, problems_hash=1, log_sizes={"metrics.jsonl": 5})
    assert ckpt.save(run, state, {"policy": group}, [], 0) is None
    return run


def find_start(run: Path, choice="auto", **changes):
    now = run_state(0, **{"problems_hash": 1} | changes)
    return ckpt.find_start(run, choice, now, LEARNING)


def another(value):
    """Of the same kind, as far as that is known."""
    if value is None:
        return 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value, "more"]
    if isinstance(value, str):
        return f"another {value}"
    return value + 1


def test_the_same_run_goes_on_where_it_was(saved_run, tmp_path):
    path, state = find_start(saved_run)
    assert path == saved_run / "step_000003"
    assert state.step == 3
    assert state.log_sizes == {"metrics.jsonl": 5}
    assert find_start(saved_run, "none") == (None, run_state(0, problems_hash=1))


@pytest.mark.parametrize("name", sorted(LEARNING))
def test_another_mathematics_is_refused_by_name(saved_run, name, capsys):
    old = getattr(train.Config(), name)
    with pytest.raises(UserError, match=f"another --{name}, which changes what is learnt"):
        find_start(saved_run, config={name: another(old)})
    assert f"resume: --{name} was {old}, is {another(old)}\n" in capsys.readouterr().out


def test_a_checkpoint_from_before_a_flag_has_its_default():
    """It was refused, and told to use an old value that there was not."""
    saved = run_state(3)
    del saved.config["answer_form"]
    assert ckpt.find_changes(saved, run_state(0), LEARNING) == []
    now = run_state(0, config={"answer_form": "hashes"})
    assert ckpt.find_changes(saved, now, LEARNING) == ["answer_form"]


@pytest.mark.parametrize("name", sorted(CONFIG - {"zero_stage"}))
def test_when_and_where_may_change(saved_run, name, capsys):
    old = getattr(train.Config(), name)
    path, state = find_start(saved_run, config={name: another(old)})
    assert state.step == 3
    assert state.config[name] == another(old)
    assert f"resume: --{name} was {old}, is {another(old)}\n" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"config": {"zero_stage": 1}}, {"world": 2}])
def test_other_ranks_and_stages_ask_for_other_files(saved_run, changes):
    with pytest.raises(UserError, match="convert.py reshard .*step_000003`"):
        find_start(saved_run, **changes)
    universal = saved_run / "step_000003" / "universal"
    universal.mkdir()
    assert find_start(saved_run, **changes)[1].step == 3
    universal.rmdir()


def test_other_problems_are_refused(saved_run):
    with pytest.raises(UserError, match="another --data, which"):
        find_start(saved_run, problems_hash=7)
    with pytest.raises(UserError, match="another --template, which"):
        find_start(saved_run, problems_hash=7, config={"template": "plain"})


def test_the_number_of_steps_may_change_if_the_learning_rate_does_not_fall(group, tmp_path):
    falling = {"lr_end": 1e-7}
    for run, config in ((tmp_path / "constant", {}), (tmp_path / "falling", falling)):
        run.mkdir()
        ckpt.save(run, run_state(3, config=config), {"policy": group}, [], 0)
    assert find_start(tmp_path / "constant", total_steps=7, problems_hash=0)[1].total_steps == 7
    same = {"problems_hash": 0, "config": falling}
    assert find_start(tmp_path / "falling", **same)[1].step == 3
    with pytest.raises(UserError, match="another --max_steps, which"):
        find_start(tmp_path / "falling", total_steps=7, **same)


def test_a_run_that_was_cut_short_is_not_past_its_end(group, tmp_path):
    ckpt.save(tmp_path, run_state(3, problems_hash=1), {"policy": group}, [], 0)
    with pytest.raises(UserError, match="past the 2 steps of this run: raise --max_steps"):
        find_start(tmp_path, total_steps=2)
    (tmp_path / "result.json").write_text("{}")
    assert find_start(tmp_path, total_steps=2)[1].step == 3, "it is complete, and the loop says so"


def test_a_checkpoint_of_another_folder_takes_no_logs_along(saved_run, tmp_path):
    choice = str(saved_run / "step_000003")
    path, state = find_start(tmp_path, choice)
    assert state.step == 3
    assert state.log_sizes == {}, "these are bytes of another folder's logs"
    (tmp_path / "step_000007").mkdir()
    with pytest.raises(UserError, match="has checkpoints too; choose another --run_dir"):
        find_start(tmp_path, choice)


def test_save_load_is_exact(group, tmp_path):
    step(group)
    assert save(tmp_path, 1, group) is None
    at_save = weights(group)
    step(group)
    after = weights(group)
    path = ckpt.pick_checkpoint(tmp_path, "auto")
    assert path.name == "step_000001"
    ckpt.load(path, {"policy": group}, run_state(1))
    assert torch.equal(weights(group), at_save)
    step(group)
    assert torch.equal(weights(group), after), "Adam's moments did not come back"


def test_damage_of_what_reshard_wrote_is_found(group, tmp_path):
    save(tmp_path, 1, group)
    path = tmp_path / "step_000001"
    (path / "universal").mkdir()
    with pytest.raises(UserError, match="step_000001/universal: files are missing.*reshard again"):
        ckpt.load(path, {"policy": group}, run_state(1, world=2))


def test_rewind_leaves_neither_gap_nor_double(group, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    state = run_state(0)
    state.finish_step(tmp_path, {})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"st')
    (tmp_path / "eval.jsonl").write_text("{}\n")
    (tmp_path / "problems.jsonl").write_text("theirs")
    (tmp_path / "step_000002").mkdir()
    (tmp_path / "step_000001").mkdir()
    ckpt.rewind(tmp_path, state, is_new=False)
    assert len(dropped(tmp_path)) == 1, "it is set aside: only the user deletes a checkpoint"
    assert steps(tmp_path) == [1], "a later one would be resumed next time"
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "eval.jsonl").read_text() == ""
    assert (tmp_path / "problems.jsonl").read_text() == "theirs", "a file of the user's was emptied"


def dropped(run: Path) -> list[Path]:
    return sorted(run.glob("dropped_step_000002_*"))


def test_no_name_of_a_dropped_checkpoint_is_taken_twice(group, tmp_path):
    """Whatever the user deletes of them."""
    for count in (1, 2, 3):
        (tmp_path / "step_000002").mkdir()
        (tmp_path / "step_000002" / str(count)).write_text("")
        ckpt.rewind(tmp_path, run_state(1), is_new=False)
    assert [next(path.iterdir()).name for path in dropped(tmp_path)] == ["1", "2", "3"]
    shutil.rmtree(dropped(tmp_path)[0])
    (tmp_path / "step_000002").mkdir()
    ckpt.rewind(tmp_path, run_state(1), is_new=False)
    assert len(dropped(tmp_path)) == 3


def test_a_new_run_takes_nothing_over(group, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "step_000000").mkdir()
    ckpt.rewind(tmp_path, run_state(0), is_new=True)
    assert not ckpt.checkpoints(tmp_path), "another run's step 0 would pass for ours"
    assert (tmp_path / "metrics.jsonl").read_text() == ""


# ---- export --------------------------------------------------------------------------------------


def test_an_export_that_fails_is_the_user_s_to_mend(group, tiny, small_disk):
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    (small_disk / "ballast").write_bytes(b"x" * shutil.disk_usage(small_disk).free)
    with pytest.raises(UserError, match="policy is NOT written: .*No space left"):
        ckpt.export(small_disk / "policy", model, model.named_parameters(), demo.make_tokenizer())


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_names_a_tied_head_once(group, tmp_path, tied):
    """As `save_pretrained` of a tied model does. The sampler is given the head under its own name
    too, and that name came into the run's own export, beside `convert.py export` without it."""
    import tiny as maker

    folder = maker.make_model(tmp_path / "model", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        parameter.data += 1
    weights = dict(model.named_parameters(remove_duplicate=False))
    assert "lm_head.weight" in weights
    ckpt.export(tmp_path / "out", model, weights.items(), demo.make_tokenizer())
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == load_file(folder / "model.safetensors").keys()
    assert ("lm_head.weight" in exported) == (not tied)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, weights[name])


# ---- whole runs ----------------------------------------------------------------------------------


def refusal(flags: dict, wrapper=(), **of_rank_1) -> str:
    """What two ranks say that must both end with exit code 2; the second has another wrapper."""
    ranks = []
    with held_port() as port:
        for rank in (0, 1):
            command = [sys.executable, str(ROOT / "train.py"), *arguments(flags)]
            if rank == 1:
                command = [*wrapper, *command, *arguments(of_rank_1)]
            names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = clean_environment() | names
            ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env))
        try:
            # A hang would take as long as ranks have patience.
            said = [process.communicate(timeout=250)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert [process.returncode for process in ranks] == [2, 2], said
    lines = "".join(said).splitlines()
    (line,) = [line for line in lines if line.startswith("error:")]
    return line


def in_own_mounts(mount: str) -> list[str]:
    """A wrapper that gives a command other mounts, as a second machine would have; or skips."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no permission for a mount namespace")
    return ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]


@pytest.mark.engine
def test_folder_that_machines_do_not_share_is_refused(tiny, tmp_path):
    """Rank 1 sees another disk under the same path."""
    run = tmp_path / "run"
    run.mkdir()
    wrapper = in_own_mounts(f"mount -t tmpfs tmpfs {run}")
    line = refusal(SMALL | tiny | {"run_dir": run}, wrapper)
    assert re.search(rf"machine .*, rank \d, {run}: not shared", line)


@pytest.mark.engine
def test_ranks_with_other_flags_are_refused(tiny, tmp_path):
    """They would wait for each other."""
    line = refusal(SMALL | tiny | {"run_dir": tmp_path / "run"}, seed=7)
    assert "rank 1: --seed: 7, of rank 0: 42; give all the same" in line


@pytest.mark.engine
def test_ranks_with_other_problems_are_refused(tiny, tmp_path):
    """They would train on each other's samples behind the wrong prompts, silently."""
    here = tmp_path / "data.json"
    there = tmp_path / "there.json"
    here.write_text(Path(tiny["data"]).read_text())
    there.write_text(json.dumps(json.loads(here.read_text())[1:]))
    flags = SMALL | tiny | {"run_dir": tmp_path / "run", "data": here}
    wrapper = in_own_mounts(f"mount --bind {there} {here}")
    hashes = rf"rank 1: hash of the problems in {here}: \d+, of rank 0: \d+"
    assert re.search(hashes, refusal(flags, wrapper))
    there.write_text("[]")
    empty = rf"machine .*, rank 1: {here}: holds no problems"
    assert re.search(empty, refusal(flags, wrapper))


def wait_until(condition, process=None, seconds: float = 200):
    """Until it holds, or the process has ended, or the test has failed."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        assert process is None or process.poll() is None, "the run ended before that"
        time.sleep(0.05)


def finished_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def start(run: Path, flags: dict, *launcher) -> subprocess.Popen:
    run.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *launcher, str(ROOT / "train.py")]
    command += arguments(SMALL | flags | {"run_dir": run})
    with open(run / "out.txt", "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=clean_environment())


@pytest.mark.engine
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="term"),
        pytest.param(signal.SIGUSR1, id="usr1", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, id="int", marks=pytest.mark.slow),
    ],
)
def test_signal_saves_and_resume_is_exact(tiny, whole, tmp_path, number):
    """The run is stopped at an arbitrary moment after its second step; exit code 0, nothing is
    lost."""
    same = {"save_interval": 100, "keep_last": 0}
    run = tmp_path / "run"
    process = start(run, tiny | same | {"max_steps": 99})
    wait_until(lambda: finished_steps(run) >= 2, process)
    process.send_signal(number)
    said = run / "out.txt"
    assert process.wait(300) == 0, said.read_text()[-2000:]
    stopped = steps(run)[0]
    assert 2 <= stopped < 99
    assert f"stopped at step {stopped}; --resume auto goes on" in said.read_text()
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert len(events.Scalars("reward")) == finished_steps(run), "lost with the process"
    same["max_steps"] = max(6, stopped + 2)
    # The last of two equal flags counts.
    command = [*process.args, "--max_steps", str(same["max_steps"])]
    subprocess.run(command, check=True, capture_output=True, env=clean_environment())
    equal_runs(whole(**same), run)


def trainers(run: Path, file: str = "cmdline", words: str = "train.py") -> list[Path]:
    """Processes of a run, besides a launcher, whose /proc file holds some words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            argv = (folder / "cmdline").read_bytes()
            is_ours = str(run).encode() in argv and argv.startswith(sys.executable.encode())
            is_launcher = b"\0launch\0" in argv
            if is_ours and not is_launcher and words.encode() in (folder / file).read_bytes():
                found.append(folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("when", ["training", "importing"])
def test_trainer_does_not_outlive_its_launcher(tiny, tmp_path, monkeypatch, when):
    """SIGTERM to a one-process `accelerate launch` kills the launcher only.

    The trainer must notice, save and leave.
    """
    # Killed, it may leave a lock where DeepSpeed's op is.
    no_locks = shutil.ignore_patterns("lock")
    shutil.copytree(os.environ["TORCH_EXTENSIONS_DIR"], tmp_path / "own", ignore=no_locks)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    run = tmp_path / "run"
    process = start(run, tiny | {"max_steps": 500}, *ACCELERATE)
    if when == "training":
        wait_until(lambda: finished_steps(run) >= 2, process)
    else:
        wait_until(lambda: trainers(run, "maps", "libtorch"), process)
    assert trainers(run)
    process.terminate()
    process.wait(60)
    wait_until(lambda: not trainers(run))
    assert ckpt.checkpoints(run) or when == "importing", "it left without saving"


@pytest.mark.slow
def test_trainer_outlives_the_shell_that_started_it(tiny, tmp_path):
    """`nohup python train.py &`, and the shell leaves: the run was taken along, silently."""
    run = tmp_path / "run"
    run.mkdir()
    # The shell leaves when its input ends.
    script = f'nohup "$@" > {run}/out.txt 2>&1 < /dev/null & cat'
    trainer = [sys.executable, str(ROOT / "train.py")]
    trainer += arguments(SMALL | tiny | {"max_steps": 500, "run_dir": run})
    command = ["sh", "-c", script, "sh", *trainer]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, env=clean_environment())
    wait_until(lambda: finished_steps(run) >= 1, shell)
    (process,) = trainers(run)
    shell.stdin.close()
    assert shell.wait(60) == 0
    # A signal would be met within the step that is under way, or before the next.
    after = finished_steps(run)
    try:
        wait_until(lambda: finished_steps(run) >= after + 3 or not trainers(run))
        assert finished_steps(run) >= after + 3, (run / "out.txt").read_text()[-2000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process.name), signal.SIGTERM)
    wait_until(lambda: not trainers(run))
    assert ckpt.checkpoints(run), "it was asked to stop, and did not save"


@pytest.mark.slow
def test_a_finished_run_goes_on_only_where_more_is_asked_of_it(tiny, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole(save_interval=100, keep_last=0, max_steps=6), run)
    refused = launch(run, check=False, **tiny | {"max_steps": 7, "actor_learning_rate": 0.5})
    assert refused.returncode == 2
    assert "another --actor_learning_rate, which changes what is learnt" in refused.stderr
    assert "is complete: raise --max_steps" in launch(run, **tiny | {"max_steps": 2}).stdout
    assert finished_steps(run) == 6
    # Where a save would write there is a file. Step 8 tries again, and the last one fails again.
    obstacles = [run / f".saving_{step:06d}" for step in (7, 9)]
    for obstacle in obstacles:
        obstacle.write_text("")
    nine = tiny | {"max_steps": 9, "save_interval": 7}
    failed = launch(run, check=False, **nine)
    assert failed.returncode == 2
    assert failed.stderr.endswith("error: step 9 is NOT saved; the same command tries again\n")
    assert "WARNING: step 7 is NOT saved: NotADirectoryError" in failed.stdout
    assert steps(run) == [8, 6]
    for obstacle in obstacles:
        obstacle.unlink()
    launch(run, **nine)
    assert steps(run) == [9, 8]
    assert [line["step"] for line in jsonl(run / "metrics.jsonl")] == list(range(1, 10))
