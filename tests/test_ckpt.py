"""Checkpoints are atomic, verified and resumed to the bit, whatever a disk or a user breaks."""

import dataclasses
import errno
import functools
import json
import os
import re
from pathlib import Path

import pytest
import tiny as maker
import torch
from conftest import fill
from deepspeed.runtime.zero.config import ZeroStageEnum
from transformers import AutoModel, AutoModelForCausalLM

import ckpt
import train
from ckpt import RunState, find_changes
from nanoorz import families, models
from nanoorz.families import Plain
from nanoorz.flags import flags_of
from nanoorz.ranks import Stopped, UserError
from tools import convert

MAY_CHANGE = train.Config.__annotations__


@pytest.fixture(scope="session")
def group(process_group):
    """A process group of one, and a DeepSpeed engine (ZeRO 1) that is cheap to step."""
    import deepspeed

    # DeepSpeed itself would compile without the lock that other tests wait for.
    models.compile_ops()
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
    """Of a run of 6 steps with ZeRO 1."""
    config = flags_of(train.Config()) | {"zero_stage": 1} | changes.pop("config", {})
    return RunState(number, **{"total_steps": 6, "config": config} | changes)


def save(run, number, engine, keep_last=0, hf=None, **changes):
    hf = hf or [maker.char_tokenizer()]
    return ckpt.save(run, run_state(number, **changes), {"policy": engine}, hf, keep_last)


def steps(run: Path) -> list[int]:
    return [ckpt.step_of(path) for path in ckpt.checkpoints(run)]


SAVED = {"problems_hash": 1, "variants": [["mine", "hash of its text"]]}


def find_start(run: Path, choice="auto", **changes):
    return ckpt.find_start(run, choice, run_state(0, **SAVED | changes), MAY_CHANGE)


# ---- the folder, save, export --------------------------------------------------------------------


def test_claim_refuses_a_folder_that_is_used_full_or_not_writable(group, tmp_path):
    """A claimed folder is also cleaned of what an unfinished save left there."""
    (tmp_path / ".saving_000003").mkdir()
    lock = ckpt.claim(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with pytest.raises(UserError, match="another run is using this folder"):
        ckpt.claim(tmp_path, 0)
    lock.close()
    ckpt.claim(tmp_path, 0).close()
    numbers = r"machine .*, rank 0, .*needed 1,1\d\d(,\d{3}){5} bytes, free"
    with pytest.raises(UserError, match=numbers):
        ckpt.claim(tmp_path, 1 << 60)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not writable"):
        ckpt.claim(tmp_path / "file" / "run", 0)


def test_a_full_disk_keeps_the_checkpoint_before(group, small_disk, capsys):
    """The warning has the kernel's words."""
    assert save(small_disk, 1, group) is None
    fill(small_disk, room=20_000)
    capsys.readouterr()
    error = save(small_disk, 2, group)
    assert re.match("machine .*, rank 0: .*No space left on device", error)
    assert capsys.readouterr().out == f"WARNING: step 2 is NOT saved: {error}\n"
    assert steps(small_disk) == [1]
    assert not list(small_disk.glob(".saving*")), "the torn one must not eat the space"
    assert ckpt.pick_checkpoint(small_disk, "auto").name == "step_000001"
    (small_disk / "ballast").unlink()
    assert save(small_disk, 2, group) is None, "the next try works"
    assert capsys.readouterr().out == "saved step 2\n"


@pytest.mark.parametrize("room", [0, 3000])
def test_a_disk_full_at_the_end_of_a_save_leaves_no_checkpoint(group, small_disk, room):
    """The disk is full when rank 0 writes the tokenizer, after all ranks have written their files.
    The library tokenizers raises a bare Exception then."""

    class Last:
        def save_pretrained(self, folder):
            fill(small_disk, room)
            maker.char_tokenizer().save_pretrained(folder)

    error = save(small_disk, 1, group, hf=[Last()])
    assert re.search("space|os error 28", error, re.IGNORECASE)
    assert not ckpt.checkpoints(small_disk)


def test_an_error_while_a_stop_is_handled_is_reported_as_itself(process_group):
    """A run that is stopped saves while it handles Stopped, which every error refers to then."""
    try:
        raise Stopped
    except Stopped:
        error = ckpt.try_disk(os.mkdir, "/nonexistent/folder")
    assert "rank 0: FileNotFoundError: [Errno 2] No such file" in error


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
        assert ckpt.read_manifest(Path(source)), "what gets its name must be complete"
        rename(source, target)
        note("rename", Path(target))

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    return done


def test_all_files_are_flushed_before_a_checkpoint_gets_its_name(group, tmp_path, calls):
    """A power cut keeps what was flushed. Every rank flushes its own files before rank 0 begins to
    publish; all files, folders and logs come before the rename, and the run folder after it."""

    class First:
        def save_pretrained(self, folder):
            calls.append(("publish", folder, 0))
            maker.char_tokenizer().save_pretrained(folder)

    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert save(tmp_path, 1, group, hf=[First()], log_sizes={"metrics.jsonl": 12}) is None
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
    files = {str(path.relative_to(final)) for path in final.rglob("*") if path.is_file()}
    names_there = {"manifest.json", *ckpt.read_manifest(final)}
    assert files == names_there, "all but itself has its hash there"

    calls.clear()
    convert.reshard(tmp_path)
    names = [(name, path.name) for name, path, _ in calls]
    assert names[-2:] == [("rename", "universal"), ("fsync", final.name)]
    flushed = {".universal", "policy.safetensors", "manifest.json"}
    assert {name for _, name in names[:-2]} == flushed


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


@pytest.mark.parametrize("sick", ["_optim_states.pt", "manifest.json", "/.saving_000002"])
def test_a_flush_that_fails_makes_the_save_fail(group, tmp_path, break_flush, sick):
    assert save(tmp_path, 1, group) is None
    break_flush(sick)
    assert "Input/output error" in save(tmp_path, 2, group)
    assert steps(tmp_path) == [1]
    assert save(tmp_path, 2, group) is None


def test_a_failed_flush_of_the_run_folder_is_told_of_a_step_that_is_saved(
    group, tmp_path, break_flush, capsys
):
    break_flush(tmp_path.name)
    assert save(tmp_path, 1, group) is None
    said = capsys.readouterr().out
    assert "step_000001 is saved, but a loss of power could lose it: [Errno 5] Input/output" in said
    assert "NOT" not in said and "saved step 1" in said


def test_an_old_checkpoint_that_cannot_be_removed_is_told(group, tmp_path, capsys, monkeypatch):
    """The new checkpoint is complete. Without the line the disk would fill without a word."""

    def fail(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(ckpt, "prune", fail)
    assert save(tmp_path, 1, group) is None
    told = capsys.readouterr().out
    assert "saved step 1" in told and "WARNING: older checkpoints are not removed: machine" in told


def test_a_checkpoint_of_an_old_python_can_be_read(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle an enum by getattr, which is refused when a run resumes."""

    def reduce_by_getattr(stage, _):
        return getattr, (type(stage), stage.name)

    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", reduce_by_getattr)
    writer = ckpt.DurableWriter()
    writer.save({"zero_stage": ZeroStageEnum.weights}, tmp_path / "state.pt")
    assert writer.load(tmp_path / "state.pt") == {"zero_stage": ZeroStageEnum.weights}


def test_prune_keeps_the_last_complete_ones_or_all(group, tmp_path):
    for number in range(1, 4):
        save(tmp_path, number, group, keep_last=2)
    assert steps(tmp_path) == [3, 2]
    (tmp_path / "step_000003" / "manifest.json").unlink()
    save(tmp_path, 4, group, keep_last=2)
    assert steps(tmp_path) == [4, 3, 2], "2 is the second that can be loaded"
    save(tmp_path, 5, group, keep_last=0)
    assert steps(tmp_path) == [5, 4, 3, 2]
    assert not list(tmp_path.glob(".saving*")), "the deleted ones must not eat the space"


def test_an_export_to_a_full_disk_is_a_user_error(group, tiny, small_disk):
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    fill(small_disk, room=0)
    with pytest.raises(UserError, match="policy is NOT written: .*No space left"):
        save_model = functools.partial(Plain(None).save, model)
        weights = model.named_parameters()
        ckpt.export(small_disk / "policy", save_model, weights, maker.char_tokenizer())


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
    (base / "train.json").write_text("no file of a model")
    files = families.BaseFiles(str(base))
    for auto_class, architecture in (
        (AutoModelForCausalLM, "Qwen2ForCausalLM"),
        (AutoModel, "Qwen2Model"),
    ):
        model = auto_class.from_pretrained(base, dtype=torch.float32)
        out = tmp_path / architecture
        save_model = functools.partial(Plain(None).save, model)
        ckpt.export(out, save_model, model.state_dict().items(), files)
        for name in ("generation_config.json", "tokenizer_config.json", "merges.txt"):
            assert (out / name).read_bytes() == (base / name).read_bytes()
        assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        assert not (out / "train.json").exists()
        # Who may read the config may read the weights.
        assert len({path.stat().st_mode for path in out.iterdir()}) == 1
        expected = config | {"torch_dtype": "float32", "architectures": [architecture]}
        assert json.loads((out / "config.json").read_text()) == expected
        again = auto_class.from_pretrained(out, dtype="auto")
        assert again.dtype == torch.float32 and again.config.rope_parameters["rope_theta"] == 1e6
    # A variant may train another model. Then the config is that of this model.
    model.config.rope_parameters["rope_theta"] = 5.0
    ckpt.export(tmp_path / "other", save_model, model.state_dict().items(), files)
    assert AutoModel.from_pretrained(tmp_path / "other").config.rope_parameters["rope_theta"] == 5.0


# ---- resume --------------------------------------------------------------------------------------


@pytest.fixture
def run(group, tmp_path):
    """A run folder with checkpoints of steps 1 and 2."""
    for number in (1, 2):
        assert save(tmp_path / "run", number, group) is None
    return tmp_path / "run"


@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
def test_a_damaged_checkpoint_is_passed_over_and_replaced(group, run, how, capsys):
    """Only the hash shows one flipped bit, because the size stays the same."""
    newest = run / "step_000002"
    victim = max(newest.rglob("*.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.unlink()
    if how != "missing":
        victim.write_bytes(content[: len(content) // 2] if how == "cut" else content)
    assert bool(ckpt.read_manifest(newest)) == (how == "flipped")
    assert ckpt.pick_checkpoint(run, "auto").name == "step_000001"
    told = "does not match its hash" if how == "flipped" else "files are missing or cut short"
    assert told in capsys.readouterr().out
    with pytest.raises(UserError, match=told):
        ckpt.pick_checkpoint(run, str(newest))
    if how == "flipped":
        # A save would find it complete. The run that resumes from step 1 renames it.
        ckpt.resume(run, run / "step_000001", {}, run_state(1))
    (run / ".saving_000002" / "hf").mkdir(parents=True)
    assert save(run, 2, group) is None
    assert ckpt.pick_checkpoint(run, "auto").name == "step_000002"
    for name in ("latest", f"{run}/step_000003"):
        with pytest.raises(UserError, match=f"^--resume {name}: no such folder; give auto"):
            ckpt.pick_checkpoint(run, name)


ODD = ["", "[]", "null", "3", '"x"', "[" * 100_000, "\udcff", "{}"]
ODD += ['{"state.json": null}', '{"state.json": 3}', '{"state.json": {"size": null}}']
ODD += ['{"state.json": {"size": NaN}}', '{"absent": {"size": 1}}', '{"a\\u0000b": {"size": 1}}']
ODD += ['{"\\ud800": {"size": 1}}', '{"%s": {"size": 1}}' % ("x" * 5000)]


def test_a_manifest_of_any_shape_is_damage(run, capsys):
    """The run goes back one step. Where the manifest of a resharded checkpoint is damaged, the line
    asks for a new reshard."""
    newest = run / "step_000002"
    universal = run / "step_000001" / "universal"
    universal.mkdir()
    for text in ODD:
        (newest / "manifest.json").write_text(text, errors="surrogateescape")
        assert ckpt.pick_checkpoint(run, "auto").name == "step_000001"
        line = "step_000002 is damaged (files are missing or cut short) and is not used"
        assert line in capsys.readouterr().out
        with pytest.raises(UserError, match="step_000002 is not a complete checkpoint"):
            convert.verified_state(newest)
        convert.list_checkpoints(run)
        _, two, one = capsys.readouterr().out.splitlines()
        assert two.endswith("TORN") and one.endswith("complete")
        (universal / "manifest.json").write_text(text, errors="surrogateescape")
        with pytest.raises(UserError, match="convert.py reshard .*step_000001`"):
            find_start(run, str(universal.parent), problems_hash=0, variants=[], world=2)
        capsys.readouterr()


# Values of a wrong type, by the name of a field.
OF_WRONG_TYPE = [("step", "1"), ("config", []), ("config", {}), ("log_sizes", {"eval.jsonl": "9"})]
OF_WRONG_TYPE += [("variants", {}), ("variants", [5]), ("memory", {"mine": 5})]
OF_WRONG_TYPE += [("problems_hash", None)]


def test_a_state_of_any_shape_is_damage_or_of_another_version(run):
    """A state file that the manifest contradicts is damage. Else it is another version's: somebody
    may have edited both files."""
    newest = run / "step_000002"
    good = dataclasses.asdict(run_state(2))
    wrong = [json.dumps(good | {name: value}) for name, value in OF_WRONG_TYPE]
    for text in [*ODD[:5], "{}}", '{"of_another_version": 1}', *wrong]:
        (newest / "state.json").write_text(text)
        assert ckpt.pick_checkpoint(run, "auto").name == "step_000001"
        entries = json.loads((newest / "manifest.json").read_text())
        entries["state.json"] = ckpt.size_and_hash(newest / "state.json")
        (newest / "manifest.json").write_text(json.dumps(entries))
        told = rf"^.*2/state.json is not of this version \(.* that {run}/config.json names.*$"
        with pytest.raises(UserError, match=told):
            find_start(run)
        with pytest.raises(UserError, match=told):
            convert.verified_state(newest)


def test_a_run_never_starts_over_unasked(run, tmp_path):
    """Where no checkpoint can be read the run ends. A disk that cannot be read for a minute must
    not cost the run."""
    for path in ckpt.checkpoints(run):
        os.truncate(path / "state.json", 1)
    with pytest.raises(UserError, match="step_000001: files are missing.*--resume none"):
        ckpt.pick_checkpoint(run, "auto")
    assert ckpt.pick_checkpoint(run, "none") is None
    assert ckpt.pick_checkpoint(tmp_path / "nothing", "auto") is None, "a new run"


@pytest.fixture
def saved_run(group, tmp_path):
    """A run folder with a checkpoint of step 3 of 6."""
    folder = tmp_path / "saved_run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("12345")
    changes = {"log_sizes": {"metrics.jsonl": 5}, "memory": {"mine": {"1": 2}}}
    assert save(folder, 3, group, **SAVED | changes) is None
    return folder


def test_the_same_run_goes_on_where_it_was(saved_run, capsys):
    path, state = find_start(saved_run, total_steps=9, config={"save_interval": 7})
    assert "resume: --save_interval was 50, is 7\n" in capsys.readouterr().out
    assert path == saved_run / "step_000003"
    assert (state.step, state.total_steps, state.config["save_interval"]) == (3, 9, 7)
    assert state.log_sizes == {"metrics.jsonl": 5}
    assert state.memory == {"mine": {"1": 2}}
    assert find_start(saved_run, "none") == (None, run_state(0, **SAVED))


def test_flags_that_decide_what_is_learnt_must_stay_and_the_others_may_change(saved_run, capsys):
    for name, old in run_state(3).config.items():
        # Of the same kind, as far as that is known.
        new = 1 if old is None else old + (["more"] if isinstance(old, list) else old or 1)
        if isinstance(old, bool):
            new = not old
        changed = find_changes(run_state(3), run_state(0, config={name: new}), MAY_CHANGE)
        assert changed == ([] if name in MAY_CHANGE else [name])
        assert capsys.readouterr().out == f"resume: --{name} was {old}, is {new}\n"


def test_other_problems_are_refused():
    for changes, told in [
        ({}, []),
        ({"total_steps": 7}, []),
        ({"problems_hash": 7}, ["data"]),
        ({"problems_hash": 7, "config": {"template": "plain"}}, ["template"]),
        ({"config": {"answer_form": "hashes"}}, ["answer_form"]),
    ]:
        assert find_changes(run_state(3), run_state(0, **changes), MAY_CHANGE) == told


@pytest.mark.parametrize("changes", [{"config": {"zero_stage": 2}}, {"world": 2}])
def test_other_ranks_and_stages_ask_for_other_files(saved_run, changes):
    with pytest.raises(UserError, match="convert.py reshard .*step_000003`"):
        find_start(saved_run, **changes)
    universal = saved_run / "step_000003" / "universal"
    universal.mkdir()
    with pytest.raises(UserError, match="convert.py reshard .*step_000003`"):
        find_start(saved_run, **changes)
    (universal / "policy.safetensors").write_text("tensors")
    entry = ckpt.size_and_hash(universal / "policy.safetensors")
    (universal / "manifest.json").write_text(json.dumps({"policy.safetensors": entry}))
    assert find_start(saved_run, **changes)[1].step == 3


def test_what_cannot_go_on_is_refused_in_one_line(saved_run, tmp_path):
    """Of another folder the logs would be missing here."""
    assert find_start(saved_run, total_steps=3)[1].step == 3, "not past its end"
    for run, changes, told in [
        (saved_run, {"total_steps": 2}, "is past the 2 steps of this run; raise --max_steps"),
        (
            saved_run,
            {"config": {"seed": 7, "top_p": 0.5}},
            ".*another --seed, --top_p, which .*export ",
        ),
        (tmp_path, {}, f"is not in {tmp_path}; copy the folder of that run"),
    ]:
        with pytest.raises(UserError, match=f"^{saved_run}/step_000003 {told}"):
            find_start(run, f"{saved_run}/step_000003", **changes)


def test_save_load_is_exact(group, tmp_path):
    step(group)
    assert save(tmp_path, 1, group) is None
    at_save = group.module.weight.detach().clone()
    step(group)
    after = group.module.weight.detach().clone()
    ckpt.resume(tmp_path, tmp_path / "step_000001", {"policy": group}, run_state(1))
    assert torch.equal(group.module.weight, at_save)
    step(group)
    assert torch.equal(group.module.weight, after), "Adam's moments did not come back"


def test_checkpoint_files_need_no_arbitrary_pickle(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, ("touch " + str(tmp_path / "owned"),))

    torch.save(Evil(), tmp_path / "evil.pt")
    with pytest.raises(Exception, match="[Ww]eights"):
        ckpt.DurableWriter().load(str(tmp_path / "evil.pt"))
    assert not (tmp_path / "owned").exists()


def test_a_resume_shortens_the_logs_and_renames_later_checkpoints(group, tmp_path):
    """A later checkpoint would be resumed, so it is renamed. Only the user deletes it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    memory = {"mine": {}}
    state = run_state(0)
    state.finish_step(tmp_path, memory)
    memory["mine"]["1"] = 2
    assert (state.step, state.memory) == (1, {"mine": {}}), "memory of a step that never ended"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"st')
    (tmp_path / "eval.jsonl").write_text("{}\n")
    (tmp_path / "problems.jsonl").write_text("theirs")
    assert save(tmp_path, 1, group) is None
    for count in (1, 2, 3):
        (tmp_path / "step_000002").mkdir()
        (tmp_path / "step_000002" / str(count)).write_text("")
        ckpt.resume(tmp_path, tmp_path / "step_000001", {}, state)
        assert steps(tmp_path) == [1]
    dropped = sorted(tmp_path.glob("dropped_*"))
    names = [next((path / "step_000002").iterdir()).name for path in dropped]
    assert names == ["1", "2", "3"], "no name twice"
    assert '{"step": 2}' in (dropped[0] / "metrics.jsonl").read_text()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "eval.jsonl").read_text() == ""
    assert (tmp_path / "problems.jsonl").read_text() == "theirs", "a file of the user's was emptied"


def test_a_new_run_sets_all_of_an_earlier_run_aside_together_and_says_so(tmp_path, capsys):
    ckpt.resume(tmp_path, None, {}, run_state(0))
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out
    logs = [*ckpt.LOGS, "config.json", "result.json"]
    folders = ["variants", "policy", "critic", "tensorboard", "wandb", "step_000000", "step_000002"]
    for name in folders:
        (tmp_path / name).mkdir()
    for name in [*logs, "mine.txt"]:
        (tmp_path / name).write_text(name)
    (tmp_path / "base").mkdir()
    ckpt.resume(tmp_path, None, {}, run_state(0))
    [aside] = tmp_path.glob("dropped_*")
    assert {path.name for path in aside.iterdir()} == {*logs, *folders}
    assert {path.name for path in tmp_path.iterdir()} == {"base", "mine.txt", aside.name}
    said = capsys.readouterr().out
    assert said.startswith(f"the run starts at step 0, so these are moved to {aside}: ")
    assert said.count("\n") == 1
    assert all(name in said for name in [*logs, *folders])


def test_a_forked_child_does_not_keep_the_lock_of_a_folder(process_group, tmp_path):
    """A tool's process may outlive a run that is killed."""
    lock = ckpt.claim(tmp_path, needed_bytes=0)
    ready, tell_ready = os.pipe()
    wait, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(tell_ready, b"1")
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    lock.close()
    ckpt.claim(tmp_path, needed_bytes=0).close()
    os.close(end)
    os.waitpid(child, 0)
