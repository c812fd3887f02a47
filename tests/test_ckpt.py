"""Checkpoints: atomic, verified, resumed to the bit; every way to break one that a disk or a user can think of."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ACCELERATE, ROOT, SMALL, clean_environment, jsonl, launch, same_metrics

import ckpt
import rollout
from tools import check, reshard


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


class Hf:
    """Stands for a tokenizer: something that writes itself into a folder."""

    def save_pretrained(self, folder):
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "config.json").write_text("{}")


def step(engine):
    engine.backward(engine(torch.ones(1, 64)).square().mean())
    engine.step()


def save(run, number, engine, **kwargs):
    return ckpt.save(run, number, {"policy": engine}, {"step": number}, [Hf()], **kwargs)


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
    ckpt.load(path, {"policy": group})
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
        ckpt.DurableWriter(tmp_path).load(str(evil))
    assert not (tmp_path / "owned").exists()


def test_flipped_byte_goes_back_to_the_one_before(group, tmp_path, capsys):
    save(tmp_path, 1, group)
    save(tmp_path, 2, group)
    victim = max((tmp_path / "step_000002").rglob("*.pt"), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert ckpt.is_complete(tmp_path / "step_000002"), "the size is unchanged: only the hash can tell"
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
    assert [ckpt.step_of(p) for p in ckpt.checkpoints(tmp_path)] == [1], "a later one would be resumed next time"
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "eval.jsonl").read_text() == ""
    assert (tmp_path / "problems.jsonl").read_text() == "theirs", "a file of the user's was emptied"


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


# ---- whole runs ----

CELLS = [("gae", 0, 1), ("grpo", 1, 2), ("grpo", 2, 1), ("gae", 3, 2)]  # each stage; both estimators with 1 and 2 ranks
WIDE = [(e, z, w) for e in ("gae", "grpo") for z in range(4) for w in (1, 2) if (e, z, w) not in CELLS]


def equal_runs(a: Path, b: Path) -> None:
    assert (a / "samples.jsonl").read_text() == (b / "samples.jsonl").read_text()
    assert (a / "eval.jsonl").read_text() == (b / "eval.jsonl").read_text()
    assert list(map(same_metrics, jsonl(a / "metrics.jsonl"))) == list(map(same_metrics, jsonl(b / "metrics.jsonl")))
    steps = {p.name for p in ckpt.checkpoints(a)} & {p.name for p in ckpt.checkpoints(b)}
    last = max(steps)
    for file in sorted((a / last).rglob("*.pt")):  # weights, masters, moments of every rank
        one, two = (torch.load(r / last / file.relative_to(a / last), weights_only=False) for r in (a, b))
        compare(one, two, file.name)


def compare(one, two, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two), where
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            compare(one[key], two[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for k, (x, y) in enumerate(zip(one, two)):
            compare(x, y, f"{where}/{k}")


@pytest.fixture(scope="session")
def whole(tiny, tmp_path_factory):
    """The folder of an undisturbed run with these flags, made once."""
    runs = {}

    def run(ranks=1, **flags) -> Path:
        key = json.dumps([ranks, flags], sort_keys=True)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("whole")
            launch(runs[key], ranks=ranks, **tiny | flags)
        return runs[key]
    return run


def resume_cell(tiny, tmp_path, estimator, zero, ranks, interrupt):
    same = dict(tiny, estimator=estimator, zero_stage=zero, save_interval=1, keep_last=0, eval_interval=2)
    launch(tmp_path / "whole", ranks=ranks, **same)
    launch(tmp_path / "parts", ranks=ranks, **same | {"max_steps": interrupt})
    launch(tmp_path / "parts", ranks=ranks, **same)
    lines = jsonl(tmp_path / "parts" / "eval.jsonl")
    kept = [line for line in lines if line["step"] != interrupt or interrupt % 2 == 0]  # a shorter run's end
    (tmp_path / "parts" / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    equal_runs(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("estimator, zero, ranks", CELLS)
def test_resume_is_exact(tiny, tmp_path, estimator, zero, ranks):
    resume_cell(tiny, tmp_path, estimator, zero, ranks, interrupt=2)


@pytest.mark.long
@pytest.mark.parametrize("estimator, zero, ranks", WIDE)
def test_resume_is_exact_everywhere(tiny, tmp_path, estimator, zero, ranks):
    resume_cell(tiny, tmp_path, estimator, zero, ranks, interrupt=1)


@pytest.mark.parametrize("zero, ranks", [(0, 1), (3, 2)])
def test_export_from_checkpoint_equals_the_run_s_own(tiny, tmp_path, zero, ranks):
    """`convert.py export` needs neither GPU nor process group and gives the very weights of the final export."""
    from safetensors.torch import load_file

    launch(tmp_path / "run", ranks=ranks, **tiny | {"zero_stage": zero, "max_steps": 1})
    tool = [sys.executable, str(ROOT / "tools" / "convert.py")]
    listed = subprocess.run([*tool, "list", tmp_path / "run"], capture_output=True, text=True, check=True)
    assert "complete" in listed.stdout
    source = tmp_path / "run" / "step_000001"
    subprocess.run([*tool, "export", source, tmp_path / "out"], check=True, capture_output=True)
    for file in ("policy/model.safetensors", "critic/model.safetensors", "critic/value_head.safetensors"):
        ours, theirs = load_file(tmp_path / "out" / file), load_file(tmp_path / "run" / file)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file
        assert len(ours) >= len(theirs) - 1
    torn = subprocess.run([*tool, "export", tmp_path / "run", tmp_path / "no"], capture_output=True, text=True)
    assert torn.returncode == 2
    assert "not a complete checkpoint" in torn.stderr


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=["term", "usr1", "int"])
def test_signal_saves_and_resume_is_exact(tiny, whole, tmp_path, number):
    """The run is stopped at an arbitrary moment of its second or third step; exit code 0, nothing is lost."""
    same = {"max_steps": 6, "save_interval": 100, "keep_last": 0}
    process = start(tmp_path / "run", tiny | same)
    wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 2', process)
    begin = time.time()
    process.send_signal(number)
    assert process.wait(60) == 0, (tmp_path / "run" / "out.txt").read_text()[-2000:]
    assert time.time() - begin < 20
    assert "to go on: accelerate launch" in (tmp_path / "run" / "out.txt").read_text()
    assert 2 <= ckpt.step_of(ckpt.checkpoints(tmp_path / "run")[0]) < 6
    launch(tmp_path / "run", **tiny | same)
    equal_runs(whole(**same), tmp_path / "run")


def test_trainer_does_not_outlive_its_launcher(tiny, tmp_path):
    """SIGTERM to a one-process `accelerate launch` kills the launcher only: the trainer must notice, save and leave."""
    process = start(tmp_path / "run", dict(tiny, max_steps=500), *ACCELERATE)
    wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 2', process)
    process.terminate()
    process.wait(60)
    end = time.time() + 30
    mine = f"--run_dir\0{tmp_path / 'run'}".encode()
    alive = lambda: [p for p in Path("/proc").glob("[0-9]*/cmdline") if mine in p.read_bytes()]  # noqa: E731
    while time.time() < end and alive():
        time.sleep(0.2)
    assert not alive(), "an orphan trainer is still running"
    assert ckpt.checkpoints(tmp_path / "run"), "it left without saving"


def test_changed_mathematics_is_refused_with_names(tiny, tmp_path):
    launch(tmp_path / "run", **tiny | {"max_steps": 1})
    path, said = tmp_path / "run" / "step_000001", []
    saved = json.loads((path / "state.json").read_text())
    flags, say = saved["config"], lambda line: said.append(line)  # noqa: E731
    assert check.check_resume(path, saved, flags | {"max_steps": 2, "run_dir": "elsewhere"}, 1, say) is False
    said.clear()
    with pytest.raises(check.ConfigError, match="another --actor_learning_rate, which changes the mathematics"):
        check.check_resume(path, saved, flags | {"actor_learning_rate": 0.5}, 1, say)
    assert said == ["resume: --actor_learning_rate was 0.001, is 0.5"]
    for ranks, change in ((2, {}), (1, {"zero_stage": 1})):
        with pytest.raises(check.ConfigError, match="convert.py reshard .*step_000001"):
            check.check_resume(path, saved, flags | change, ranks, say)
    launch(tmp_path / "run", **tiny | {"max_steps": 2, "actor_learning_rate": 0.5, "resume_force": "true"})
    assert len(jsonl(tmp_path / "run" / "metrics.jsonl")) == 2
    done = launch(tmp_path / "run", **tiny | {"max_steps": 2, "actor_learning_rate": 0.5})
    assert "is complete" in done.stdout


# ---- other numbers of ranks, other ZeRO stages ----

def torchrun(ranks: int, *args) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", "0",
               str(ROOT / "tests" / "reshard_worker.py"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 4)])
def test_reshard_is_exact(tmp_path, before, after):
    """Parameters and moments of every (stage, ranks) arrive in every other one, to the bit. 33 hidden units and tied
    embeddings: nothing divides evenly, and one parameter has two names."""
    import tiny as maker

    model = maker.make_model(tmp_path / "model", vocab=67)
    torchrun(before, model, tmp_path / "saved")
    for run in sorted((tmp_path / "saved").iterdir()):
        reshard.reshard(run)
    torchrun(after, model, tmp_path / "loaded", tmp_path / "saved")
    crossings = sorted((tmp_path / "loaded").iterdir())
    assert len(crossings) == 8
    for crossing in crossings:
        first, last = crossing.name.split("to")
        one, step = reshard.merged(tmp_path / "saved" / first / "step_000003" / "policy", int(first))
        two, other_step = reshard.merged(crossing / "step_000003" / "policy", int(last))
        assert step == other_step == 3
        assert one.keys() == two.keys()
        assert len(one) % 3 == 0
        assert all(torch.equal(one[key], two[key]) for key in one), crossing.name
        assert all(one[key].any() for key in one), "moments of zero prove nothing"


def test_run_goes_on_with_other_ranks(tiny, tmp_path):
    """2 ranks with ZeRO 3, then 1 with ZeRO 0, then 2 with ZeRO 1: refused without reshard, and the curve goes on."""
    same = dict(tiny, save_interval=1, keep_last=0, log_ratio="true")
    run = tmp_path / "run"
    launch(run, ranks=2, **same | {"zero_stage": 3, "max_steps": 1})
    refused = launch(run, check=False, **same | {"zero_stage": 0, "max_steps": 2})
    assert "2 ranks with ZeRO 3, this run of 1 with 0" in refused.stderr
    for ranks, stage, steps in ((1, 0, 2), (2, 1, 3)):
        subprocess.run([sys.executable, str(ROOT / "tools" / "convert.py"), "reshard", run], check=True)
        launch(run, ranks=ranks, **same | {"zero_stage": stage, "max_steps": steps})
    metrics = jsonl(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert all(abs(m["ratio"] - 1) < 1e-4 for m in metrics)
    launch(tmp_path / "whole", **same)
    for one, two in zip(metrics, jsonl(tmp_path / "whole" / "metrics.jsonl")):
        assert one["policy_grad_norm"] == pytest.approx(two["policy_grad_norm"], rel=0.02), "the curve has a kink"
