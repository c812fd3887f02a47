"""The run folder on disk: claim, save, resume, prune, export. Never sees the batch.

Owns RUN/step_NNNNNN/: policy/ and critic/ (DeepSpeed's own files), hf/ (config and tokenizer),
state.json (the loop's state) and manifest.json (size and SHA-256 of every file, written last).

Deviations from Open-Reasoner-Zero (ORZ):
- Everything comes back: weights, fp32 masters, Adam's moments, the step. The order of the
  problems and all random numbers are functions of the step.
- A checkpoint appears by one rename, after the files of all ranks are on disk. A kill at any
  instant leaves the one before.
- The folder is absolute, shared and large enough, or the run ends before a model is read (ORZ's
  issue 22).

An engine is a DeepSpeed engine; `engines` is a dict of them by name.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from safetensors.torch import save_file

from lib.common import UserError, gather, here, one_line, print0

# Only these are cut back on resume. They are nobody else's files.
LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl", "eval_samples.jsonl")


@dataclass
class RunState:
    """What a run goes on from, beside the engines' files: state.json."""

    step: int = 0
    total_steps: int = 0
    world: int = 1
    config: dict = field(default_factory=dict)  # every flag
    problems_hash: int = 0
    log_sizes: dict[str, int] = field(default_factory=dict)  # bytes
    variants: list = field(default_factory=list)  # [name, hash of its text], in order
    memory: dict = field(default_factory=dict)  # name of a variant: its MEMORY

    def finish_step(self, run_dir, memory):
        """Counts a step whose lines are in the logs. memory: of the variants."""
        self.step += 1
        self.log_sizes = log_sizes(run_dir)
        # A step that is never finished may change it. So it is a copy, in the form in which a
        # resumed run reads it.
        self.memory = json.loads(json.dumps(memory))

    @property
    def layout(self):
        """What the engines' files depend on: ranks and ZeRO stage."""
        return self.world, self.config["zero_stage"]


# ---- disk ------------------------------------------------------------------------------------


def try_disk(action, *arguments):
    """Calls a disk action; returns the error's text instead of raising it.

    So all ranks stay in step and can agree on what to do.
    """
    try:
        action(*arguments)
    # A full disk is a RuntimeError to torch.save and a bare Exception to tokenizers.
    except Exception as error:
        # torch stumbles over what the kernel said first.
        while isinstance(error.__context__, OSError):
            error = error.__context__
        return f"{type(error).__name__}: {one_line(error)}"
    return None


def on_rank0(action, *arguments):
    """Rank 0 does a disk action; all ranks learn the error's text. A collective."""
    error = None
    if dist.get_rank() == 0:
        error = try_disk(action, *arguments)
    return gather(error)[0]


def fsync(path):
    """Flushes a file or a folder: a new name is on disk only after its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size_and_hash(path):
    """Reads a file back. Returns {} where it cannot be read.

    A sick disk on one rank must not leave the others waiting.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"size": file.tell(), "sha256": digest.hexdigest()}
    return {}


# ---- the folder ------------------------------------------------------------------------------


def claim(run_dir, needed_bytes):
    """Locks the folder for this run; returns the lock, which lasts as long as that object.

    Raises UserError on all ranks if the folder is not shared by all machines, not writable, too
    small, or used by another run; it names machine, rank, path and bytes.
    """
    rank = dist.get_rank()
    claims = run_dir / ".claim"
    nonce = gather(os.urandom(8).hex())[0]
    mine = claims / f"{nonce}.{rank}"
    lock = None
    complaint = None
    try:
        claims.mkdir(parents=True, exist_ok=True)
        mine.touch()
        free = shutil.disk_usage(run_dir).free
        if free < needed_bytes:
            complaint = f"too small for checkpoints: needed {needed_bytes:,} bytes, free {free:,}"
        if rank == 0:
            lock = open(run_dir / ".lock", "w")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        complaint = "another run is using this folder; wait for it or choose another --run_dir"
    except OSError as error:
        complaint = f"not writable, or not lockable ({error.strerror})"
    dist.barrier()
    neighbour = (rank + 1) % dist.get_world_size()
    if not complaint and not (claims / f"{nonce}.{neighbour}").exists():
        complaint = (
            f"not shared: the file of rank {neighbour} is absent; all machines must mount it"
        )
    for place, text in gather((here(), complaint)):
        if text:
            raise UserError(f"--run_dir: {place}, {run_dir}: {text}")
    if rank == 0:
        # What is left of a run that was killed while it saved.
        for leftover in [*run_dir.glob(".saving_*"), claims]:
            shutil.rmtree(leftover, ignore_errors=True)
    return lock


def step_of(path):
    return int(path.name.removeprefix("step_"))


def checkpoints(run_dir):
    """All published checkpoints, newest first."""
    return sorted(Path(run_dir).glob("step_" + "[0-9]" * 6), reverse=True)


def manifest(path):
    """Size and hash of every file, or {} if one is absent or cut short."""
    # A sick disk may hand out JSON of any shape.
    with contextlib.suppress(Exception):
        entries = json.loads((path / "manifest.json").read_text())
        for name, entry in entries.items():
            if (path / name).stat().st_size != entry["size"]:
                return {}
        return entries
    return {}


def log_sizes(run_dir):
    """Bytes of each log: what belongs to the state of this instant."""
    present = [run_dir / name for name in LOGS if (run_dir / name).exists()]
    return {path.name: path.stat().st_size for path in present}


# ---- save ------------------------------------------------------------------------------------


class DurableWriter(CheckpointEngine):
    """DeepSpeed reads and writes through this: flushed, hashed, and silent on an error.

    An exception inside DeepSpeed's save would leave its barriers and hang the other ranks. Threads
    flush and hash a file while the next one is written.
    """

    def __init__(self):
        self.error = None
        self.flushes = []
        self.entries = {}
        self.threads = ThreadPoolExecutor(2)
        # We hash the file anyway, and the CRC takes a third of torch.save's time.
        torch.serialization.set_crc32_options(False)

    def create(self, info):
        pass

    def commit(self, info):
        return True

    def makedirs(self, path, exist_ok=False):
        self.attempt(os.makedirs, path, 0o777, exist_ok)

    def save(self, state_dict, path):
        self.attempt(self.write, state_dict, path)

    def attempt(self, action, *arguments):
        """After an error nothing more is done."""
        if self.error is None:
            self.error = try_disk(action, *arguments)

    def write(self, state_dict, path):
        with open(path, "wb") as file:
            torch.save(state_dict, file)
        self.flushes.append(self.threads.submit(fsync, path))
        self.entries[path] = self.threads.submit(size_and_hash, path)

    def finish(self):
        """Waits until this rank's files are on disk; their sizes and hashes by path."""
        for flush in self.flushes:
            self.attempt(flush.result)
        return {path: entry.result() for path, entry in self.entries.items()}

    def load(self, path, map_location=None):
        """Reads tensors, plain containers and DeepSpeed's four classes; no arbitrary pickles."""
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location=map_location, weights_only=True)


def save(run_dir, state: RunState, engines, hf, keep_last):
    """Publishes RUN/step_NNNNNN, or returns on every rank why it could not.

    hf: objects with `save_pretrained`. The checkpoints before stay whole either way.
    """
    final = run_dir / f"step_{state.step:06d}"
    temporary = run_dir / f".saving_{state.step:06d}"
    if gather(manifest(final))[0]:
        return None
    error = on_rank0(make_room, temporary, final)
    files = {}
    if not error:
        files, error = write_engines(temporary, engines)
    if not error:
        error = on_rank0(publish, temporary, final, files, state, hf)
    if error:
        on_rank0(shutil.rmtree, temporary, True)
        error = f"{error}; {describe_room(run_dir, engines)}"
        print0(f"WARNING: step {state.step} is NOT saved: {error}")
    else:
        on_rank0(prune, run_dir, keep_last)
        print0(f"saved step {state.step}")
    return error


def make_room(temporary, final):
    """Takes away what a killed save left, or what was damaged after it was published."""
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(final, ignore_errors=True)
    os.makedirs(temporary / "hf")


def describe_room(folder, engines):
    """What is free on the folder's disk, and what a checkpoint takes at most."""
    parameters = [p for engine in engines.values() for p in engine.module.parameters()]
    # Under ZeRO 3 a rank's own tensor is empty.
    count = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    free = "unknown"
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(folder).free:,}"
    return f"{folder}: needed {16 * count:,} bytes, free {free}"


def write_engines(folder, engines):
    """Writes every rank's files. Returns their sizes and hashes by relative path, and an error."""
    writer = DurableWriter()
    for name, engine in engines.items():
        # It would copy a script past the writer, and raise on a full disk.
        engine._copy_recovery_script = skip
        engine.checkpoint_engine = writer
        engine.save_checkpoint(str(folder / name), tag="state", save_latest=False)
    written = writer.finish()
    files = {}
    error = None
    for place, entries, rank_error in gather((here(), written, writer.error)):
        if rank_error:
            error = f"{place}: {rank_error}"
        for path, entry in entries.items():
            files[os.path.relpath(path, folder)] = entry
    return files, error


def skip(folder):
    pass


def publish(temporary, final, files, state: RunState, hf):
    """Writes the small files and the manifest, and renames. All ranks have written by now."""
    for item in hf:
        item.save_pretrained(temporary / "hf")
    (temporary / "state.json").write_text(json.dumps(dataclasses.asdict(state), indent=1))
    for path in [temporary / "state.json", *(temporary / "hf").iterdir()]:
        files[str(path.relative_to(temporary))] = size_and_hash(path)
    (temporary / "manifest.json").write_text(json.dumps(files, indent=1))
    if not manifest(temporary):
        raise OSError("a file is not the size that its rank wrote")
    run_dir = final.parent
    # The logs must be on disk as far as the state's log_sizes reach.
    logs = [run_dir / name for name in log_sizes(run_dir)]
    for path in [temporary, *temporary.rglob("*"), *logs]:
        fsync(path)
    os.rename(temporary, final)
    fsync(run_dir)


def prune(run_dir, keep_last):
    """Deletes all complete checkpoints but the newest `keep_last`; 0 keeps all."""
    if keep_last == 0:
        return
    complete = [path for path in checkpoints(run_dir) if manifest(path)]
    for path in complete[keep_last:]:
        # A kill in between must not leave half a checkpoint under a real name.
        doomed = path.rename(path.with_name(f".saving_{path.name}"))
        shutil.rmtree(doomed, ignore_errors=True)


# ---- resume ----------------------------------------------------------------------------------


def pick_checkpoint(run_dir, resume):
    """The checkpoint to start from. All ranks agree. Raises UserError.

    resume: `auto` is the newest undamaged one of the folder, `none` is none, else it is a path.
    """
    if resume == "none":
        return None
    candidates = checkpoints(run_dir)
    if resume != "auto":
        candidates = [Path(resume).absolute()]
    candidates = gather(candidates)[0]
    if not candidates:
        return None
    damaged = {}
    for path in candidates:
        damage = find_damage(path)
        if not damage:
            for newer, why in damaged.items():
                print0(f"WARNING: {newer} is damaged ({why}); going back to the one before")
            return path
        damaged[path] = damage
    # A run never starts over by itself: a disk may be sick for a minute only.
    raise UserError(
        f"--resume {resume}: {path}: {damage}; repair it, choose another of "
        "`tools/convert.py list RUN`, or start over with --resume none"
    )


def find_damage(path):
    """What is wrong with a checkpoint, or None. The ranks share the hashing. A collective."""
    # Rank 0's manifest, since all ranks must come to the same end.
    entries = sorted(gather(manifest(path))[0].items())
    if not entries:
        return "files are missing or cut short"
    wrong = []
    for name, entry in entries[dist.get_rank() :: dist.get_world_size()]:
        if size_and_hash(path / name) != entry:
            wrong.append(name)
    for names in gather(wrong):
        if names:
            return f"{names[0]} does not match its hash"
    return None


def load_state(path) -> RunState:
    """Raises UserError where the fields are not those of this version."""
    try:
        return RunState(**json.loads((path / "state.json").read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}/state.json is not of this version ({one_line(error)}); resume it with the "
            f"commit that {path.parent}/config.json names, or use --resume none"
        ) from error


def find_start(run_dir, resume, new: RunState, fixed):
    """Returns the checkpoint to start from, or None, and the state to go on from.

    new: this run at its step 0. fixed: {name: default} of the flags that decide what is learnt.
    Raises UserError where another run would come of it.
    """
    path = pick_checkpoint(run_dir, resume)
    if path is None:
        return None, new
    saved = load_state(path)
    sizes = saved.log_sizes
    if path.parent.resolve() != run_dir.resolve():
        # They are of the other folder's logs.
        sizes = {}
        if checkpoints(run_dir):
            raise UserError(
                f"--resume {path}: {run_dir} has checkpoints too; choose another --run_dir"
            )
    if saved.step > new.total_steps and not (run_dir / "result.json").exists():
        raise UserError(
            f"{path} is past the {new.total_steps} steps of this run: raise --max_steps, or use "
            "--resume none"
        )
    changed = find_changes(saved, new, fixed)
    if changed:
        raise UserError(
            f"{path} was made with another --{', --'.join(changed)}, which changes what is learnt; "
            "use the old value, or --resume none"
        )
    if saved.variants != new.variants:
        kept = [f"{path.parent}/variants/{name}.py" for name, _ in saved.variants]
        raise UserError(
            f"{path} was made with other variants, in another order, or with another text in one; "
            f"use --variant {' '.join(kept) or 'none'}, or --resume none"
        )
    if saved.layout != new.layout and not (path / "universal").is_dir():
        raise UserError(
            f"{path} is of {saved.world} ranks with ZeRO {saved.layout[1]}, this run of "
            f"{new.world} with {new.layout[1]}; run `python tools/convert.py reshard {path}` first"
        )
    return path, dataclasses.replace(new, step=saved.step, memory=saved.memory, log_sizes=sizes)


def find_changes(saved: RunState, new: RunState, fixed):
    """Shows every changed flag; returns the names of those in `fixed`, {name: default}."""
    changed = []
    for name, value in new.config.items():
        # A checkpoint from before the flag was made by what is its default now.
        old = saved.config.get(name, fixed.get(name, value))
        if old != value:
            print0(f"resume: --{name} was {old}, is {value}")
        if old != value and name in fixed:
            changed.append(name)
    if saved.problems_hash != new.problems_hash and not changed:
        changed.append("data")
    return changed


def restore(run_dir, source, engines, state: RunState):
    """Fills the engines from a verified checkpoint, if there is one, and cuts the logs back."""
    if source:
        load(source, engines, state)
    if dist.get_rank() == 0:
        rewind(run_dir, state, is_new=source is None)


def load(path, engines, new: RunState):
    if load_state(path).layout != new.layout:
        from lib import reshard

        damage = find_damage(path / "universal")
        if damage:
            raise UserError(f"{path}/universal: {damage}; run tools/convert.py reshard again")
        return reshard.load(path / "universal", engines)
    for name, engine in engines.items():
        engine.checkpoint_engine = DurableWriter()
        engine.load_checkpoint(str(path / name), tag="state")


def rewind(run_dir, state: RunState, is_new):
    """Rank 0 cuts the logs back to where they were, and sets later checkpoints aside.

    Those are damaged, or of a future that will not be. In a new run nothing that is there belongs
    to it.
    """
    for name, size in log_sizes(run_dir).items():
        size_then = state.log_sizes.get(name, 0)
        os.truncate(run_dir / name, min(size_then, size))
    for path in checkpoints(run_dir):
        if is_new or step_of(path) > state.step:
            # Nothing that was dropped is ever deleted, so each has a name of its own.
            aside = path.rename(path.with_name(f"dropped_{path.name}_{time.time_ns()}"))
            print0(f"{path} is now {aside.name}: the run goes on from step {state.step}")


# ---- export ----------------------------------------------------------------------------------


def export(out, model, weights, tokenizer):
    """Writes a Hugging Face folder that transformers and vLLM load. All ranks call it.

    weights: (name, full tensor) one at a time. A critic's head goes to `value_head.safetensors`
    beside its body. Raises UserError.
    """
    kept = {}
    for name, tensor in weights:
        if dist.get_rank() == 0:
            kept[name] = tensor.detach().to("cpu", copy=True)
    error = on_rank0(write_export, out, model, kept, tokenizer)
    if error:
        raise UserError(f"{out} is NOT written: {error}")


def write_export(out, model, weights, tokenizer):
    names = list(weights)
    head = {name: weights.pop(name) for name in names if name.startswith("value_head.")}
    # The usual form names a tied head once, as the embedding.
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model.save_pretrained(out, state_dict=weights)
    tokenizer.save_pretrained(out)
    if head:
        save_file(head, out / "value_head.safetensors")
