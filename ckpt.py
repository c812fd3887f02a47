"""The run folder on disk: preflight, atomic save, verified resume, prune, export. Never sees the batch.

Owns RUN/step_NNNNNN/: policy/ and critic/ (DeepSpeed's own files), hf/ (config and tokenizer), state.json (the loop's
state) and manifest.json (size and SHA-256 of every file, written last). Deviations from Open-Reasoner-Zero:
- everything comes back: weights, fp32 masters, Adam moments, step; data order and random numbers are functions of it;
- a checkpoint appears by one rename, after all ranks' files are flushed: a kill at any instant leaves the one before;
- the folder is absolute, shared and large enough, or the run ends before a model is read (ORZ's issue 22).
"""
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from safetensors.torch import save_file

LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl", "eval_samples.jsonl")  # ours to cut back; nobody else's files


class CheckpointError(RuntimeError):
    """The run folder cannot be used, or a checkpoint cannot be loaded: the same on every rank, one line to act on."""


def everywhere(value) -> list:
    """`value` of every rank, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def attempt(action: Callable) -> str | None:
    """Runs a disk action; returns the error's text instead of raising, so that all ranks stay in step and can agree."""
    try:
        action()
    except Exception as error:  # a full disk is RuntimeError to torch.save, a bare Exception to tokenizers
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def fsync(path: Path) -> None:
    """Flushes a file or a folder: a rename or a new name is on disk only after its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def preflight(run_dir: Path, need_bytes: int) -> object:
    """Every rank writes a token, reads its neighbour's, measures free space; rank 0 locks the folder for this run.

    Raises CheckpointError on all ranks, naming machine, rank, path and bytes. The lock lasts as long as the result."""
    rank, world = dist.get_rank(), dist.get_world_size()
    nonce = everywhere(os.urandom(8).hex())[0]
    tokens, lock, problem = run_dir / ".preflight", None, None
    try:
        tokens.mkdir(parents=True, exist_ok=True)
        (tokens / f"{nonce}.{rank}").write_text(f"{nonce} {rank}")
        free = shutil.disk_usage(run_dir).free
        if free < need_bytes:
            problem = f"too small for a checkpoint: needed {need_bytes / 2**30:.2f} GiB, free {free / 2**30:.2f} GiB"
        if rank == 0:
            lock = open(run_dir / ".lock", "w")  # noqa: SIM115  held for the life of the run
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        problem = "another run is using this folder; wait for it or choose another --run_dir"
    except OSError as error:
        problem = f"not writable, or not lockable ({error.strerror})"
    dist.barrier()
    neighbour = (rank + 1) % world
    try:
        assert (tokens / f"{nonce}.{neighbour}").read_text() == f"{nonce} {neighbour}"
    except (OSError, AssertionError):
        problem = problem or f"not shared: rank {neighbour}'s file is not there; use a folder that all machines mount"
    problems = everywhere(problem and f"machine {socket.gethostname()}, rank {rank}, {run_dir}: {problem}")
    attempt(lambda: (tokens / f"{nonce}.{rank}").unlink())
    if any(problems):
        raise CheckpointError("--run_dir: " + next(p for p in problems if p))
    if rank == 0:
        for leftover in [*run_dir.glob(".saving_*"), tokens]:  # of a run that was killed while it saved
            shutil.rmtree(leftover, ignore_errors=True)
    return lock


def describe(path: Path) -> dict:
    """Size and SHA-256 of a file, read back at 1-2 GB/s. No error, but {}, where it cannot be read: a sick disk on one
    rank must not leave the others waiting."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    return {}


class DurableWriter(CheckpointEngine):
    """DeepSpeed reads and writes through this: flushed, hashed, and silent on an error until the ranks compare notes.
    An exception inside DeepSpeed's save would leave its barriers and hang the other ranks.
    Threads flush and hash a file while the next one is written."""

    def __init__(self):
        self.error, self.jobs, self.threads = None, {}, ThreadPoolExecutor(2)
        torch.serialization.set_crc32_options(False)  # SHA-256 says it all; a third of the time of torch.save

    def create(self, info) -> None:
        pass

    def commit(self, info) -> bool:
        return True

    def makedirs(self, path, exist_ok=False) -> None:
        self.error = self.error or attempt(lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict, path: str) -> None:
        self.error = self.error or attempt(lambda: self.write(state_dict, path))

    def write(self, state_dict, path: str) -> None:
        with open(path, "wb") as file:
            torch.save(state_dict, file)
        self.jobs[path] = [self.threads.submit(job, path) for job in (fsync, describe)]

    def finish(self) -> dict[str, dict]:
        """Waits until this rank's files are on disk; their sizes and hashes by path. Sets `error`, as all here."""
        self.error = self.error or attempt(lambda: [job.result() for job, _ in self.jobs.values()])
        return {path: entry.result() for path, (_, entry) in self.jobs.items()}

    def load(self, path: str, map_location=None):
        """No arbitrary pickles: tensors, plain containers and the three DeepSpeed classes that its files hold."""
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)


def save(run_dir: Path, step: int, engines: Iterable, state: dict, hf: list, keep_last=0, keep_every=0) -> str | None:
    """Publishes RUN/step_NNNNNN, or returns why it could not, on every rank; the previous ones stay whole either way.

    engines: (name, DeepSpeed engine). state: the loop's JSON. hf: objects with `save_pretrained`."""
    final, temporary = run_dir / f"step_{step:06d}", run_dir / f".saving_{step:06d}"
    writer, rank = DurableWriter(), dist.get_rank()
    if everywhere(rank == 0 and manifest(final))[0]:
        return None
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)  # incomplete: damaged after it was published
        writer.error = attempt(lambda: (temporary / "hf").mkdir(parents=True))
    if not any(everywhere(writer.error)):
        for name, engine in engines:
            own, engine.checkpoint_engine = engine.checkpoint_engine, writer
            engine._copy_recovery_script = lambda folder: None  # a copy past the writer: on a full disk it would raise
            engine.save_checkpoint(str(temporary / name), tag="state", save_latest=False)
            engine.checkpoint_engine = own
    files, where = writer.finish(), f"machine {socket.gethostname()}, rank {rank}"
    reports = everywhere((files, writer.error and f"{where}: {writer.error}"))
    error = next((e for _, e in reports if e), None)
    if rank == 0 and not error:
        files = {os.path.relpath(path, temporary): entry for part, _ in reports for path, entry in part.items()}
        error = attempt(lambda: publish(temporary, final, files, state, hf))
    error = everywhere(error)[0]
    if rank == 0 and error:
        shutil.rmtree(temporary, ignore_errors=True)
    elif rank == 0:
        attempt(lambda: prune(run_dir, keep_last, keep_every))
    return error


def publish(temporary: Path, final: Path, files: dict, state: dict, hf: Iterable) -> None:
    """Rank 0, after all ranks have written: the small files, the manifest, and one rename."""
    for item in hf:
        item.save_pretrained(temporary / "hf")
    (temporary / "state.json").write_text(json.dumps(state, indent=1))
    files |= {str(path.relative_to(temporary)): describe(path)
              for path in (temporary / "state.json", *(temporary / "hf").iterdir())}
    (temporary / "manifest.json").write_text(json.dumps(files, indent=1))
    if not manifest(temporary):
        raise OSError("a file is not the size that its rank wrote")
    for path in [temporary, *temporary.rglob("*"), *map(final.parent.joinpath, mark(final.parent))]:
        fsync(path)  # names are on disk only when their folder is; the logs must reach the state's marks
    os.rename(temporary, final)
    fsync(final.parent)


def prune(run_dir: Path, keep_last: int, keep_every: int) -> None:
    """Keeps the newest `keep_last` complete ones and every step divisible by `keep_every`; 0 keeps all."""
    for path in list(filter(manifest, checkpoints(run_dir)))[keep_last:] if keep_last else ():
        if not (keep_every and step_of(path) % keep_every == 0):
            doomed = path.rename(path.with_name(f".saving_{path.name}"))  # no half-deleted one under a real name
            shutil.rmtree(doomed, ignore_errors=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def checkpoints(run_dir: Path) -> list[Path]:
    """All published checkpoints, newest first."""
    return sorted(Path(run_dir).glob("step_" + "[0-9]" * 6), reverse=True)


def manifest(path: Path) -> dict[str, dict]:
    """Size and hash of every file, {} unless all are there with their sizes; contents are verified when loading."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        entries = json.loads((path / "manifest.json").read_text())
        return entries if all((path / name).stat().st_size == x["size"] for name, x in entries.items()) else {}
    return {}


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None; the hashing is dealt over the ranks."""
    entries = sorted(everywhere(manifest(path))[0].items())  # rank 0's: all must come to the same end
    if not entries:
        return "files are missing or cut short"
    mine = entries[dist.get_rank()::dist.get_world_size()]
    wrong = sum(everywhere([name for name, entry in mine if describe(path / name) != entry]), [])
    return f"{wrong[0]} does not match its hash" if wrong else None


def newest(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to start from: `auto` the newest undamaged one, `none` none, else that path. All ranks agree."""
    known = {"auto": checkpoints(run_dir), "none": []}
    candidates = everywhere(known.get(resume, [Path(resume).absolute()]))[0]
    for path in candidates:
        if not (problem := damage(path)):
            return path
        if path == candidates[-1]:  # never start over by itself: a disk may be sick for a minute only
            raise CheckpointError(f"--resume {resume}: {path}: {problem}; repair it, choose another of "
                                  "`tools/convert.py list RUN`, or start over with --resume none")
        if dist.get_rank() == 0:
            print(f"warning: {path} is damaged ({problem}); going back to the one before", file=sys.stderr, flush=True)
    return None


def load(path: Path, engines: Iterable) -> None:
    """Restores (name, engine) pairs from a verified checkpoint of the same ZeRO stage and number of ranks."""
    for name, engine in engines:
        own, engine.checkpoint_engine = engine.checkpoint_engine, DurableWriter()
        engine.load_checkpoint(str(path / name), tag="state")
        engine.checkpoint_engine = own


def mark(run_dir: Path) -> dict[str, int]:
    """Bytes of each log: what belongs to the state of this instant."""
    return {path.name: path.stat().st_size for path in map(run_dir.joinpath, LOGS) if path.exists()}


def rewind(run_dir: Path, step: int, marks: dict[str, int] | None) -> None:
    """Cuts the logs back to a mark and sets aside checkpoints after `step`, damaged or of a future that will not be.
    Without marks (--resume none) nothing of what is there belongs to the run."""
    for path in map(run_dir.joinpath, mark(run_dir)):
        os.truncate(path, min((marks or {}).get(path.name, 0), path.stat().st_size))
    for path in checkpoints(run_dir):
        if marks is None or step_of(path) > step:
            names = (path.with_name("dropped_" + f"{n}_" * (n > 0) + path.name) for n in range(1000))
            aside = path.rename(next(name for name in names if not name.exists()))
            print(f"{path} is now {aside.name}: the run goes on from step {step}", file=sys.stderr, flush=True)


def export(out: Path, model, weights: Iterable[tuple[str, torch.Tensor]], tokenizer) -> None:
    """Writes a Hugging Face folder that transformers and vLLM load. All ranks call it; rank 0 writes.

    weights: (name, full tensor) one at a time. A critic's head goes to `value_head.safetensors` beside the body."""
    kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights if dist.get_rank() == 0}

    def write() -> None:
        head = {name: kept.pop(name) for name in list(kept) if name.startswith("value_head.")}
        model.save_pretrained(out, state_dict=kept)
        tokenizer.save_pretrained(out)
        if head:
            save_file(head, out / "value_head.safetensors")

    if error := everywhere(dist.get_rank() == 0 and attempt(write))[0]:
        raise CheckpointError(f"{out} is NOT written: {error}")
