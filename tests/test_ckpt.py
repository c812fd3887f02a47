"""Checkpoints: atomic, verified, resumed to the bit; every way to break one that a disk or a user can think of."""
import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ACCELERATE, ROOT, SMALL, clean_environment, equal_runs, held_port, jsonl, launch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ckpt
import rollout
import train
from tools import check, demo


@pytest.fixture(scope="session")
def group():
    """A process group of one, and a DeepSpeed engine (ZeRO 1) that is cheap to step."""
    import deepspeed

    if not dist.is_initialized():
        rollout.start_distributed()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}})[0]


def step(engine):
    engine.backward(engine(torch.ones(1, 64)).square().mean())
    engine.step()


def save(run, number, engine, **kwargs):
    return ckpt.save(run, number, [("policy", engine)], {"step": number}, [demo.make_tokenizer()], **kwargs)


def weights(engine):
    return engine.module.weight.detach().clone()


def test_save_load_is_exact(group, tmp_path):
    step(group)
    assert save(tmp_path, 1, group) is None
    at_save = weights(group)
    step(group)
    after = weights(group)
    path = ckpt.newest(tmp_path, "auto")
    assert path.name == "step_000001"
    ckpt.load(path, [("policy", group)])
    assert torch.equal(weights(group), at_save)
    step(group)
    assert torch.equal(weights(group), after), "Adam's moments did not come back"


def test_checkpoint_files_need_no_arbitrary_pickle(group, tmp_path):
    save(tmp_path, 1, group)
    evil = tmp_path / "evil.pt"

    class Evil:
        def __reduce__(self):
            return (os.system, ("touch " + str(tmp_path / "owned"),))

    torch.save(Evil(), evil)
    with pytest.raises(Exception, match="[Ww]eights"):
        ckpt.DurableWriter().load(str(evil))
    assert not (tmp_path / "owned").exists()


def test_flipped_byte_goes_back_to_the_one_before(group, tmp_path, capsys):
    save(tmp_path, 1, group)
    save(tmp_path, 2, group)
    victim = max((tmp_path / "step_000002").rglob("*.pt"), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert ckpt.manifest(tmp_path / "step_000002"), "the size is unchanged: only the hash can tell"
    assert ckpt.newest(tmp_path, "auto").name == "step_000001"
    assert "does not match its hash" in capsys.readouterr().err
    with pytest.raises(ckpt.CheckpointError, match="hash"):
        ckpt.newest(tmp_path, str(tmp_path / "step_000002"))


@pytest.mark.parametrize("how", ["missing", "cut", "no manifest", "torn manifest"])
def test_damaged_checkpoint_is_passed_over(group, tmp_path, how):
    save(tmp_path, 1, group)
    save(tmp_path, 2, group)
    newest = tmp_path / "step_000002"
    victim = next(newest.rglob("*.pt")) if how in ("missing", "cut") else newest / "manifest.json"
    if how in ("missing", "no manifest"):
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size // 2)
    assert ckpt.newest(tmp_path, "auto").name == "step_000001"
    assert save(tmp_path, 2, group) is None, "a damaged one is replaced"
    assert ckpt.newest(tmp_path, "auto").name == "step_000002"


def test_never_starts_over_by_itself(group, tmp_path):
    """A disk that cannot be read for a minute must not cost a run: with nothing left to go back to, it ends."""
    assert ckpt.newest(tmp_path, "auto") is None, "nothing there: a new run"
    for number in (1, 2):
        save(tmp_path, number, group)
        os.truncate(tmp_path / f"step_{number:06d}" / "state.json", 1)
    with pytest.raises(ckpt.CheckpointError, match="step_000001: files are missing.*--resume none"):
        ckpt.newest(tmp_path, "auto")
    assert len(ckpt.checkpoints(tmp_path)) == 2
    assert ckpt.newest(tmp_path, "none") is None


def test_prune_keeps_last_and_every(group, tmp_path):
    for number in range(1, 7):
        save(tmp_path, number, group, keep_last=2, keep_every=3)
    assert [ckpt.step_of(p) for p in ckpt.checkpoints(tmp_path)] == [6, 5, 3]


def test_prune_counts_only_complete_ones(group, tmp_path):
    for number in (1, 2):
        save(tmp_path, number, group)
    (tmp_path / "step_000002" / "manifest.json").unlink()
    save(tmp_path, 3, group, keep_last=2)
    assert [ckpt.step_of(p) for p in ckpt.checkpoints(tmp_path)] == [3, 2, 1], "1 is the second that can be loaded"


def test_rewind_leaves_neither_gap_nor_double(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    marks = ckpt.mark(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"st')
    (tmp_path / "eval.jsonl").write_text("{}\n")
    (tmp_path / "problems.jsonl").write_text("theirs")
    (tmp_path / "step_000002").mkdir()
    (tmp_path / "step_000001").mkdir()
    ckpt.rewind(tmp_path, 1, marks)
    assert (tmp_path / "dropped_step_000002").is_dir(), "set aside: only the user deletes a checkpoint"
    assert [ckpt.step_of(p) for p in ckpt.checkpoints(tmp_path)] == [1], "a later one would be resumed next time"
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "eval.jsonl").read_text() == ""
    assert (tmp_path / "problems.jsonl").read_text() == "theirs", "a file of the user's was emptied"
    (tmp_path / "dropped_step_000002" / "first").write_text("")
    (tmp_path / "step_000002").mkdir()
    ckpt.rewind(tmp_path, 1, marks)
    assert (tmp_path / "dropped_step_000002" / "first").exists(), "dropped twice, and the first one was deleted"
    shutil.rmtree(tmp_path / "dropped_step_000002")
    for _ in range(2):
        (tmp_path / "step_000002").mkdir()
        ckpt.rewind(tmp_path, 1, marks)
    assert len([*tmp_path.glob("dropped_*step_000002")]) == 3, "no name is taken twice, whatever the user deleted"
    (tmp_path / "step_000000").mkdir()
    ckpt.rewind(tmp_path, 0, None)
    assert not ckpt.checkpoints(tmp_path), "--resume none: another run's step 0 would pass for ours"


def test_leftovers_are_cleaned_and_second_run_refused(group, tmp_path):
    (tmp_path / ".saving_000003").mkdir()
    lock = ckpt.preflight(tmp_path, 0)
    assert not (tmp_path / ".saving_000003").exists()
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); import ckpt, rollout, pathlib; "
            f"rollout.start_distributed(); ckpt.preflight(pathlib.Path({str(tmp_path)!r}), 0)")
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100,
                            env=clean_environment())
    assert "another run is using this folder" in second.stderr
    lock.close()


def test_too_small_and_unwritable_name_the_numbers(group, tmp_path):
    with pytest.raises(ckpt.CheckpointError, match=r"machine .*, rank 0, .*needed \d+\.\d+ GiB, free"):
        ckpt.preflight(tmp_path, 1 << 60)
    (tmp_path / "file").write_text("")
    with pytest.raises(ckpt.CheckpointError, match="not writable"):
        ckpt.preflight(tmp_path / "file" / "run", 0)


def test_room_for_all_checkpoints_to_come(group, tiny, tmp_path):
    cfg = train.Config(model=str(tiny["model"]), run_dir=str(tmp_path), keep_last=1)
    one = check.checkpoint_bytes(dataclasses.replace(cfg, keep_last=0))
    assert check.checkpoint_bytes(cfg) == 2 * one, "the one that is kept and the one that is written"
    save(tmp_path, 1, group)
    assert check.checkpoint_bytes(cfg) == one, "the first of them is there"
    assert check.checkpoint_bytes(dataclasses.replace(cfg, keep_last=2)) == 2 * one
    assert check.checkpoint_bytes(dataclasses.replace(cfg, resume="none")) == 2 * one, "it is set aside, and stays"


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 1 MB, where the machine lets us mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no permission to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_full_disk_keeps_the_old_one(group, small_disk):
    assert save(small_disk, 1, group) is None
    ballast = small_disk / "ballast"
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(b"x" * (free - 20_000))
    error = save(small_disk, 2, group)
    assert error, "a full disk must be reported, not published"
    assert "rank 0" in error
    assert [p.name for p in ckpt.checkpoints(small_disk)] == ["step_000001"]
    assert not list(small_disk.glob(".saving*")), "the torn one must not eat the space"
    assert ckpt.newest(small_disk, "auto").name == "step_000001"
    ballast.unlink()
    assert save(small_disk, 2, group) is None, "the next try works"


@pytest.mark.parametrize("room", [0, 3000])
def test_disk_that_fills_up_at_the_end_of_a_save(group, small_disk, room):
    """After all ranks' files, while rank 0 writes the small ones: tokenizers raises a bare Exception then."""
    class Last:
        def save_pretrained(self, folder):
            free = shutil.disk_usage(small_disk).free
            (small_disk / "ballast").write_bytes(b"x" * max(0, free - room))
            demo.make_tokenizer().save_pretrained(folder)

    error = ckpt.save(small_disk, 1, [("policy", group)], {"step": 1}, [Last()])
    assert error
    assert re.search("space|os error 28", error, re.IGNORECASE)
    assert not ckpt.checkpoints(small_disk)
    (small_disk / "more").write_bytes(b"x" * shutil.disk_usage(small_disk).free)
    with pytest.raises(ckpt.CheckpointError, match="is NOT written"):
        ckpt.export(small_disk / "policy", demo.make_tokenizer(), iter(()), demo.make_tokenizer())


def test_read_only_folder_is_refused(group, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ckpt.CheckpointError, match="not writable.*Read-only"):
        ckpt.preflight(small_disk / "run", 0)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


# ---- whole runs ----

def refusal(flags: dict, launcher=(), **of_rank_1) -> str:
    """What two ranks say that must both end with exit code 2; the second is started in another way."""
    ranks = []
    with held_port() as port:
        for rank in (0, 1):
            argv = [str(x) for k, v in (flags | (of_rank_1 if rank else {})).items() for x in (f"--{k}", v)]
            ranks.append(subprocess.Popen(
                [*(launcher if rank else ()), sys.executable, str(ROOT / "train.py"), *argv], stderr=subprocess.PIPE,
                text=True, env=clean_environment() | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                                                      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}))
        try:
            said = [process.communicate(timeout=250)[1] for process in ranks]  # a hang would take --dist_timeout
        finally:
            for process in ranks:
                process.kill()
    assert [process.returncode for process in ranks] == [2, 2], said
    line, = (line for text in said for line in text.splitlines() if line.startswith("error:"))
    return line


def test_folder_that_machines_do_not_share_is_refused(tiny, tmp_path):
    """Rank 1 sees another disk under the same path, as a second machine would."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no permission for a mount namespace")
    (run := tmp_path / "run").mkdir()
    elsewhere = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {run} && exec "$@"', "sh"]
    assert re.search(rf"machine .*, rank \d, {run}: not shared", refusal(SMALL | tiny | {"run_dir": run}, elsewhere))


def test_ranks_with_other_flags_or_problems_are_refused(tiny, tmp_path):
    """They would train on each other's samples behind the wrong prompts, silently, or wait for each other."""
    flags, here = SMALL | tiny | {"run_dir": tmp_path / "run"}, tmp_path / "data.json"
    assert "rank 1: --seed: 7, of rank 0: 42; give all the same" in refusal(flags, seed=7)
    here.write_text(Path(tiny["data"]).read_text())
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "data.json").write_text(json.dumps(json.loads(here.read_text())[1:]))
    over = ["unshare", "--mount", "sh", "-c", f'mount --bind {tmp_path}/there/data.json {here} && exec "$@"', "sh"]
    if subprocess.run([*over, "true"], capture_output=True).returncode:
        pytest.skip("no permission for a mount namespace")
    line = refusal(flags | {"data": here}, over)
    assert re.search(rf"rank 1: hash of the problems in {here}: \d+, of rank 0: \d+", line)
    (tmp_path / "there" / "data.json").write_text("[]")
    assert re.search(rf"machine .*, rank 1: {here}: holds no problems", refusal(flags | {"data": here}, over))


def test_a_launcher_s_command_that_is_gone_costs_no_line(monkeypatch):
    monkeypatch.setattr(check.os, "getppid", lambda: 2**30)
    monkeypatch.setattr(check.sys, "argv", ["train.py", "--seed", "3"])
    assert check.resume_command() == f"{sys.executable} train.py --seed 3 --resume auto"


def wait_for(path: Path, text: str, process, seconds: float = 200) -> None:
    end = time.time() + seconds
    while time.time() < end and not (path.exists() and text in path.read_text()):
        assert process.poll() is None, "the run ended before it could be stopped"
        time.sleep(0.05)


def start(run: Path, flags: dict, *launcher):
    argv = [str(x) for name, value in (SMALL | flags | {"run_dir": run}).items() for x in (f"--{name}", value)]
    run.mkdir(parents=True, exist_ok=True)
    out = open(run / "out.txt", "w")  # noqa: SIM115
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *argv]
    return subprocess.Popen(command, stdout=out, stderr=out, env=clean_environment())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_during_a_look_at_the_store_is_not_lost(number):
    class Store(dist.HashStore):
        def check(self, keys):
            os.kill(os.getpid(), number)
            return super().check(keys)

    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        store = Store()
        assert rollout.Signals(store).poll()
        other = rollout.Signals(store)
        assert not dist.HashStore.check(store, ["stop"])
        assert other.poll() and other.poll(), "the second look tells the other ranks"
        assert dist.HashStore.check(store, ["stop"])
    finally:
        for n, handler in kept.items():
            signal.signal(n, handler)


def test_only_a_second_interrupt_ends_a_rank_at_once(monkeypatch):
    """The first one may come after another signal, or after another rank's: it must not cut off the save."""
    exits = []
    monkeypatch.setattr(rollout.os, "_exit", exits.append)
    monkeypatch.setattr(rollout.signal, "signal", lambda *_: None)
    signals = rollout.Signals(dist.HashStore())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signals.handle(number, None)
    assert signals.poll()
    assert exits == []
    signals.handle(signal.SIGINT, None)
    assert exits == [130]


@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["term", "usr1", "int"])
def test_signal_saves_and_resume_is_exact(tiny, whole, tmp_path, number):
    """The run is stopped at an arbitrary moment after its second step; exit code 0, nothing is lost."""
    same = {"save_interval": 100, "keep_last": 0}
    process = start(tmp_path / "run", tiny | same | {"max_steps": 99})
    wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 2', process)
    process.send_signal(number)
    assert process.wait(300) == 0, (tmp_path / "run" / "out.txt").read_text()[-2000:]
    command = re.search("to go on: (.*)", (tmp_path / "run" / "out.txt").read_text())[1]
    stopped = ckpt.step_of(ckpt.checkpoints(tmp_path / "run")[0])
    assert 2 <= stopped < 99
    same["max_steps"] = max(6, stopped + 2)
    assert (tmp_path / "run" / "curves.png").exists()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert len(events.Scalars("reward")) == len(jsonl(tmp_path / "run" / "metrics.jsonl")), "lost with the process"
    command = [*shlex.split(command), "--max_steps", str(same["max_steps"])]  # the last one counts
    subprocess.run(command, check=True, capture_output=True, env=clean_environment())
    equal_runs(whole(**same), tmp_path / "run")


def trainers(run: Path, file: str = "cmdline", words: str = "train.py") -> list[Path]:
    """Processes of a run, besides a launcher, whose /proc file holds some words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            argv = (folder / "cmdline").read_bytes()
            if str(run).encode() in argv and b"launch" not in argv and words.encode() in (folder / file).read_bytes():
                found.append(folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("when", ["training", "importing"])
def test_trainer_does_not_outlive_its_launcher(tiny, tmp_path, monkeypatch, when):
    """SIGTERM to a one-process `accelerate launch` kills the launcher only: the trainer must notice, save and leave."""
    shutil.copytree(os.environ["TORCH_EXTENSIONS_DIR"], tmp_path / "own", ignore=shutil.ignore_patterns("lock"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))  # killed, it may leave a lock there
    process, end = start(tmp_path / "run", dict(tiny, max_steps=500), *ACCELERATE), time.time() + 100
    if when == "training":
        wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 2', process)
    while when == "importing" and not trainers(tmp_path / "run", "maps", "libtorch") and time.time() < end:
        time.sleep(0.01)
    assert trainers(tmp_path / "run")
    process.terminate()
    process.wait(60)
    end = time.time() + 60
    while trainers(tmp_path / "run") and time.time() < end:
        time.sleep(0.2)
    assert not trainers(tmp_path / "run"), "an orphan trainer is still running"
    assert ckpt.checkpoints(tmp_path / "run") or when == "importing", "it left without saving"


def test_changed_mathematics_is_refused_with_names(tiny, whole, tmp_path):
    shutil.copytree(whole(save_interval=100, keep_last=0, max_steps=6), tmp_path / "run")
    path, said = tmp_path / "run" / "step_000006", []
    saved = json.loads((path / "state.json").read_text())
    saved["config"]["run_dir"] = str(tmp_path / "run")
    flags = saved["config"]

    def resume(ranks=1, problems=saved["problems"], steps=99, **changed) -> bool:
        return check.check_resume(path, saved, flags | changed, ranks, problems, steps, said.append)

    assert resume(max_steps=7) is False
    said.clear()
    with pytest.raises(check.ConfigError, match="another --actor_learning_rate, which changes the mathematics"):
        resume(actor_learning_rate=0.5)
    assert said == ["resume: --actor_learning_rate was 0.001, is 0.5"]
    with pytest.raises(check.ConfigError, match="another --data, which"):
        resume(problems=7)
    assert resume(problems=7, resume_force=True) is False
    with pytest.raises(check.ConfigError, match="another --template, which"):
        resume(problems=7, template="plain")
    del saved["problems"]
    assert resume(problems=7) is False, "a checkpoint of before they were written down"
    assert resume(steps=5) is False, "it ended at step 6: what follows says so"
    (tmp_path / "run" / "result.json").rename(tmp_path / "result.json")
    with pytest.raises(check.ConfigError, match="past the 5 steps of this run"):
        resume(steps=5)
    (tmp_path / "result.json").rename(tmp_path / "run" / "result.json")
    with pytest.raises(check.ConfigError, match="--lr_end, --max_steps, which"):
        resume(max_steps=7, lr_end=0.1)
    elsewhere = {"run_dir": str(tmp_path / "other")}
    assert resume(**elsewhere) is False
    assert saved.pop("marks") == {}, "bytes of another folder's logs"
    (tmp_path / "other" / "step_000007").mkdir(parents=True)
    with pytest.raises(check.ConfigError, match="other has checkpoints of its own"):
        resume(**elsewhere)
    for ranks, change in ((2, {}), (1, {"zero_stage": 1})):
        with pytest.raises(check.ConfigError, match="convert.py reshard .*step_000006"):
            resume(ranks, **change)
    launch(tmp_path / "run", **tiny | {"max_steps": 7, "actor_learning_rate": 0.5, "resume_force": "true"})
    assert [line["policy_lr"] for line in jsonl(tmp_path / "run" / "metrics.jsonl")][-2:] == [1e-3, 0.5]
    done = launch(tmp_path / "run", **tiny | {"max_steps": 2, "actor_learning_rate": 0.5})
    assert "is complete" in done.stdout
