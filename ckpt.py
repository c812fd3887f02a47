"""The run folder on disk: claim, save, resume, prune, export. Never sees the batch.

A checkpoint is a folder RUN/step_NNNNNN, where NNNNNN is the number of finished steps. It holds:
- policy/ and critic/: DeepSpeed's files of all ranks
- hf/: the policy's config and the tokenizer
- state.json: a RunState
- manifest.json: the size and the SHA-256 of every other file

Deviations from Open-Reasoner-Zero (ORZ):
- A resumed run equals a run that was never interrupted, on a CPU to the bit. A checkpoint holds
  weights, fp32 masters, Adam's moments and the step. The order of problems and all random numbers
  are functions of the seed and the step, so they need no files.
- A kill at any instant leaves the older checkpoints complete. A save writes to a temporary folder.
  When the files of all ranks are on disk, rank 0 gives that folder its final name.
- A run checks its folder before it loads a model. The folder must be shared by all machines,
  writable and large enough (ORZ's issue 22).

In this file an engine is a DeepSpeed engine. `engines` is a dict of engines by name.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from safetensors.torch import save_file

from lib.common import UserError, gather, here, one_line, print0

# A resume shortens these files and no other files of the run folder.
LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl", "eval_samples.jsonl")
# What else a run writes, besides its checkpoints. A new run sets all of it aside.
OTHERS = ("config.json", "result.json", "variants", "policy", "critic", "tensorboard")


@dataclass
class RunState:
    """What state.json holds: all that a run resumes from, except the engines' tensors."""

    step: int = 0  # finished steps
    total_steps: int = 0
    world: int = 1  # number of ranks
    config: dict = field(default_factory=dict)  # every flag
    problems_hash: int = 0
    log_sizes: dict[str, int] = field(default_factory=dict)  # bytes of each log after this step
    variants: list = field(default_factory=list)  # [name, hash of its text] of each, in order
    memory: dict = field(default_factory=dict)  # cfg.memory (ppo.Recipe)

    def finish_step(self, run_dir, memory):
        """Counts a step. Call it when the lines of that step are in the logs.

        memory: cfg.memory. Raises UserError if it holds another thing than dicts, or if JSON does
        not give it back as it is.
        """
        self.step += 1
        self.log_sizes = measure_logs(run_dir)
        # The state needs a copy, because an interrupted step may change `memory`. JSON makes the
        # copy, because a resumed run reads its memory from JSON too.
        try:
            self.memory = json.loads(json.dumps(memory))
        except (TypeError, ValueError) as error:
            raise UserError(f"self.memory cannot be saved as JSON: {one_line(error)}") from error
        are_dicts = all(isinstance(part, dict) for part in memory.values())
        if self.memory != memory or not are_dicts:
            told = "give each class a dict with text keys, of lists, texts and finite numbers"
            raise UserError(f"self.memory changes when it is saved as JSON; {told}")

    def check_types(self):
        """Raises TypeError or ValueError if the file had another type somewhere."""
        for name, default in vars(RunState()).items():
            if type(getattr(self, name)) is not type(default):
                raise TypeError(f"{name} is {getattr(self, name)!r:.99}")
        # Another type inside of these raises a TypeError or ValueError too.
        sum([*self.log_sizes.values(), self.config.get("zero_stage")])
        for part in (self.variants, *self.memory.values()):
            dict(part)

    @property
    def layout(self):
        """(number of ranks, ZeRO stage): the engines' files depend on both."""
        return self.world, self.config["zero_stage"]


# ---- disk ------------------------------------------------------------------------------------


def try_disk(action, *arguments):
    """Calls action(*arguments). Returns None, or the text of the error that the action raised.

    If one rank alone raised an error, the other ranks would wait for that rank. So a rank keeps
    the text, until all ranks gather their texts.
    """
    try:
        action(*arguments)
    # On a full disk torch.save raises a RuntimeError, and tokenizers raises a bare Exception.
    except Exception as error:
        # torch.save raises its RuntimeError while it handles the OSError, which names the cause.
        while isinstance(error.__context__, OSError):
            error = error.__context__
        return f"{here()}: {type(error).__name__}: {one_line(error)}"


def on_rank0(action, *arguments):
    """Calls `try_disk` on rank 0. All ranks return what rank 0 got. A collective."""
    error = None
    if dist.get_rank() == 0:
        error = try_disk(action, *arguments)
    return gather(error)[0]


def fsync(path):
    """Flushes a file or a folder to the disk. The folder keeps the names of its files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder):
    """Deletes a folder. Ignores errors."""
    shutil.rmtree(folder, ignore_errors=True)


def size_and_hash(path):
    """The entry of a file in manifest.json, or {} if the file cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"size": file.tell(), "sha256": digest.hexdigest()}
    return {}


# ---- the folder ------------------------------------------------------------------------------


def claim(run_dir, needed_bytes):
    """Makes and locks the folder. The lock lasts as long as the returned object. A collective.

    Raises UserError on all ranks if the folder is not writable, too small, not shared by all
    machines, or in use by another run. Every rank writes a file, and must find the file of rank 0.
    """
    rank = dist.get_rank()
    claims = run_dir / ".claim"
    # A run that was killed here may have left files. The new files have a new random name.
    name = gather(os.urandom(8).hex())[0]
    lock = fault = None
    try:
        claims.mkdir(parents=True, exist_ok=True)
        (claims / f"{name}.{rank}").touch()
        free = shutil.disk_usage(run_dir).free
        if free < needed_bytes:
            fault = f"too small: needed {needed_bytes:,} bytes, free {free:,}; delete other files"
        if rank == 0:
            lock = open(run_dir / ".lock", "w")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fault = "another run is using this folder; wait for that run, or choose another --run_dir"
    except OSError as error:
        fault = f"not writable, or not lockable ({error.strerror}); choose another --run_dir"
    dist.barrier()
    if not fault and not (claims / f"{name}.0").exists():
        fault = "not shared: the file of rank 0 is absent; mount one folder on all machines"
    for place, text in gather((here(), fault)):
        if text:
            raise UserError(f"--run_dir: {place}, {run_dir}: {text}")
    if rank == 0:
        # All ranks have found the claims. The other folders were left by a run that was killed.
        for leftover in [claims, *run_dir.glob(".saving_*"), *run_dir.glob(".deleting_*")]:
            remove(leftover)
    return lock


def step_of(path):
    return int(path.name.removeprefix("step_"))


def checkpoints(run_dir):
    """The folders RUN/step_NNNNNN, newest first. Some may be damaged."""
    return sorted(run_dir.glob("step_" + "[0-9]" * 6), reverse=True)


def measure_logs(run_dir):
    """{name: bytes} of the logs that exist."""
    return {name: (run_dir / name).stat().st_size for name in LOGS if (run_dir / name).exists()}


def manifest(path):
    """{file: {"size", "sha256"}} of a checkpoint, or {} if a file is missing or has another size.

    It does not compare hashes.
    """
    # A damaged manifest can hold JSON of any shape, so the lines below can raise any error.
    with contextlib.suppress(Exception):
        entries = json.loads((path / "manifest.json").read_text())
        for name, entry in entries.items():
            if (path / name).stat().st_size != entry["size"]:
                return {}
        return entries
    return {}


# ---- save ------------------------------------------------------------------------------------


class DurableWriter(TorchCheckpointEngine):
    """DeepSpeed calls `save` and `load` of this object to write and to read files.

    error: the text of the first error, or None. `save` raises no errors, because the other ranks
    would wait at the barriers in DeepSpeed's code. entries: {path: size and hash} of all files.
    """

    def __init__(self):
        self.error = None
        self.entries = {}
        # A third of torch.save's time is a CRC. manifest.json has the SHA-256 instead.
        torch.serialization.set_crc32_options(False)

    def save(self, state_dict, path):
        # After the first error this writes no more files.
        self.error = self.error or try_disk(self.write, state_dict, path)

    def write(self, state_dict, path):
        with open(path, "wb") as file:
            torch.save(state_dict, file)
        fsync(path)
        self.entries[path] = size_and_hash(path)

    def load(self, path, map_location=None):
        from lib.resuming import load

        return load(path, map_location)


def save(run_dir, state: RunState, engines, hf, keep_last):
    """Writes the checkpoint RUN/step_NNNNNN. All ranks return None, or the text of an error.

    hf: objects with `save_pretrained`. keep_last: see prune. A save that fails leaves the older
    checkpoints complete.
    """
    final = run_dir / f"step_{state.step:06d}"
    temporary = run_dir / f".saving_{state.step:06d}"
    # A run that is stopped between two steps may have saved this step already.
    if gather(manifest(final))[0]:
        return None
    error = on_rank0(make_folders, temporary, final, engines)
    if not error:
        files, error = write_engines(temporary, engines)
    if not error:
        error = on_rank0(publish, temporary, final, files, state, hf)
    if error:
        on_rank0(remove, temporary)
        print0(f"WARNING: step {state.step} is NOT saved: {error}")
    else:
        on_rank0(prune, run_dir, keep_last)
        print0(f"saved step {state.step}")
    return error


def make_folders(temporary, final, engines):
    """Makes the temporary folders. Deletes the final folder, which is damaged if it exists.

    DeepSpeed would make its own folders on rank 0, and raise an error there alone.
    """
    for folder in (temporary, final):
        remove(folder)
    for name in ["hf", *engines]:
        os.makedirs(temporary / name)


def write_engines(folder, engines):
    """Each rank writes its files. Returns {relative path: size and hash} of all, and an error."""
    writer = DurableWriter()
    for name, engine in engines.items():
        # DeepSpeed would copy a script into the folder without using the writer.
        engine._copy_recovery_script = lambda folder: None
        engine.checkpoint_engine = writer
        engine.save_checkpoint(str(folder / name), tag="state", save_latest=False)
    mine = {os.path.relpath(path, folder): entry for path, entry in writer.entries.items()}
    files = {}
    error = None
    for entries, rank_error in gather((mine, writer.error)):
        files |= entries
        error = error or rank_error
    return files, error


def publish(temporary, final, files, state, hf):
    """Writes the small files and the manifest, flushes everything, and renames the folder.

    files: the entries of the engines' files. All ranks have written those files before.
    """
    for item in hf:
        item.save_pretrained(temporary / "hf")
    (temporary / "state.json").write_text(json.dumps(dataclasses.asdict(state), indent=1))
    for path in [temporary / "state.json", *(temporary / "hf").iterdir()]:
        files[str(path.relative_to(temporary))] = size_and_hash(path)
    (temporary / "manifest.json").write_text(json.dumps(files, indent=1))
    if not manifest(temporary):
        raise OSError("a file does not have the size that its rank wrote")
    run_dir = final.parent
    # A resume also needs the first bytes of each log, as many as state.log_sizes says.
    logs = [run_dir / name for name in state.log_sizes]
    for path in [temporary, *temporary.rglob("*"), *logs]:
        fsync(path)
    os.rename(temporary, final)
    try:
        fsync(run_dir)
    except OSError as error:
        print(f"WARNING: {final} is saved, but a loss of power could lose it: {error}", flush=True)


def prune(run_dir, keep_last):
    """Deletes all complete checkpoints except the newest `keep_last`. 0 keeps all."""
    if keep_last == 0:
        return
    complete = [path for path in checkpoints(run_dir) if manifest(path)]
    for path in complete[keep_last:]:
        # A kill during rmtree must not leave a part of a checkpoint under the name step_NNNNNN.
        remove(path.rename(path.with_name(f".deleting_{path.name}")))


# ---- resume ----------------------------------------------------------------------------------


def pick_checkpoint(run_dir, choice):
    """Returns the checkpoint to resume from, or None for a new run. A collective.

    choice: a path; `none`; or `auto`, the newest undamaged checkpoint of the folder. Raises
    UserError if all candidates are damaged.
    """
    # Machines may mount the folder under different paths, so rank 0 decides about the names only.
    candidates = [run_dir / path.name for path in gather(checkpoints(run_dir))[0]]
    if choice == "none" or (choice == "auto" and not candidates):
        return None
    if choice != "auto":
        candidates = [Path(choice).absolute()]
        if not gather(os.path.isdir(choice))[0]:
            raise UserError(
                f"--resume {choice}: no such folder; give auto, none or RUN/step_NNNNNN"
            )
    for path in candidates:
        damage = find_damage(path)
        if not damage:
            return path
        print0(f"WARNING: {path} is damaged ({damage}) and is not used")
    # The run does not start over without being told to. Perhaps the disk fails for a minute only.
    raise UserError(
        f"--resume {choice}: {path}: {damage}; repair this checkpoint, choose another one of "
        "`tools/convert.py list RUN`, or start over with --resume none"
    )


def find_damage(path):
    """What is wrong with the files of a checkpoint, or None. A collective."""
    # All ranks use the manifest that rank 0 has read, so that all ranks return the same.
    entries = sorted(gather(manifest(path))[0].items())
    if not entries:
        return "files are missing or cut short"
    mine = entries[dist.get_rank() :: dist.get_world_size()]
    wrong = [name for name, entry in mine if size_and_hash(path / name) != entry]
    wrong = sum(gather(wrong), [])
    if wrong:
        return f"{wrong[0]} does not match its hash"


def load_state(path):
    """The state of a checkpoint. Raises UserError if another version of the code has written it."""
    try:
        state = RunState(**json.loads((path / "state.json").read_text()))
        state.check_types()
        return state
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}/state.json is not of this version ({one_line(error)}); resume it with the "
            f"commit that {path.parent}/config.json names, or use --resume none"
        ) from error


def find_start(run_dir, choice, new: RunState, fixed):
    """Returns the checkpoint to resume from, or None, and the state that the run begins with.

    new: the state of a new run. fixed: {name: default} of the flags that decide what is learnt.
    Raises UserError if the checkpoint does not fit this run.
    """
    path = pick_checkpoint(run_dir, choice)
    if path is None:
        return None, new
    from lib.resuming import find_misfit

    saved = load_state(path)
    # `tools/convert.py reshard` writes files for any layout into the folder universal/.
    needs_reshard = saved.layout != new.layout and find_damage(path / "universal")
    why = find_misfit(path, run_dir, saved, new, fixed, needs_reshard)
    if why:
        raise UserError(f"{path} {why}, or use --resume none")
    values = {"step": saved.step, "memory": saved.memory, "log_sizes": saved.log_sizes}
    return path, dataclasses.replace(new, **values)


def resume(run_dir, source, engines, state: RunState):
    """Brings the engines and the run folder to `state`. All ranks call it.

    source: the checkpoint that find_start has chosen. A new run has None.
    1. Fills the engines from the checkpoint. In a new run the engines stay as they are.
    2. Shortens the logs to their sizes in `state`.
    3. Sets the checkpoints of later steps aside, because the run makes these steps again. A new
       run sets aside everything that another run has left. The user may delete the new folder.
    """
    if source and load_state(source).layout == state.layout:
        for name, engine in engines.items():
            engine.checkpoint_engine = DurableWriter()
            engine.load_checkpoint(str(source / name), tag="state")
    elif source:
        # find_start has checked the files that `tools/convert.py reshard` has written there.
        from lib import reshard

        reshard.load(source / "universal", engines)
    if dist.get_rank() > 0:
        return
    dropped = [path for path in checkpoints(run_dir) if not source or step_of(path) > state.step]
    if not source:
        found = [name for name in (*LOGS, *OTHERS) if (run_dir / name).exists()]
        # A run that was stopped before its first evaluation leaves only these two.
        if set(found) - {"config.json", "variants"}:
            dropped += [run_dir / name for name in found]
    kept = {name: min(x, state.log_sizes.get(name, 0)) for name, x in measure_logs(run_dir).items()}
    if dropped:
        from lib.resuming import set_aside

        set_aside(run_dir, state.step, dropped, kept)
    for name in measure_logs(run_dir):
        os.truncate(run_dir / name, kept[name])


# ---- export ----------------------------------------------------------------------------------


def export(out, model, weights, tokenizer):
    """Writes a folder that transformers and vLLM load. All ranks call it. Raises UserError.

    weights: an iterator of (name, full tensor). The critic's value head goes to the file
    value_head.safetensors of that folder.
    """
    # All ranks must take all tensors, because ZeRO 3 gathers each tensor from all ranks.
    kept = {}
    for name, tensor in weights:
        if dist.get_rank() == 0:
            kept[name] = tensor.detach().to("cpu", copy=True)
    error = on_rank0(write_export, out, model, kept, tokenizer)
    if error:
        raise UserError(f"{out} is NOT written: {error}")


def write_export(out, model, weights, tokenizer):
    head = {}
    for name in list(weights):
        if name.startswith("value_head."):
            head[name] = weights.pop(name)
    # transformers stores a tied output head once, under the name of the embedding.
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model.save_pretrained(out, state_dict=weights)
    tokenizer.save_pretrained(out)
    if head:
        save_file(head, out / "value_head.safetensors")
