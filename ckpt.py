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

In this file an engine is a DeepSpeed engine. `engines` is {name: engine}, of policy and critic. To
use this file elsewhere, copy ranks.py, reshard.py, variants.py and flags.py of nanoorz/, too.
"""

import contextlib
import copyreg
import dataclasses
import datetime
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
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import save_file

from nanoorz import reshard
from nanoorz.ranks import UserError, gather, here, one_line, print0
from nanoorz.variants import kept_files

# Python 3.11.0 to 3.11.3 would pickle an enum by `getattr`, which torch.load refuses.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))

# The logs of a run. A resume cuts them to the size that they had at the checkpoint.
LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl", "eval_samples.jsonl")
# What a run writes besides its logs and its checkpoints.
OTHER_OUTPUT = ("config.json", "task.py", "variants", "result.json")
OTHER_OUTPUT += ("policy", "critic", "tensorboard", "wandb")


@dataclass
class RunState:
    """What state.json holds: all that a run resumes from, except the engines' tensors."""

    step: int = 0  # finished steps
    total_steps: int = 0
    world: int = 1  # number of ranks
    config: dict = field(default_factory=dict)  # every flag
    problems_hash: int = 0  # of all prompts and labels
    log_sizes: dict[str, int] = field(default_factory=dict)  # bytes of each log after this step
    variants: list = field(default_factory=list)  # [name, hash of its text] of each, in order
    memory: dict = field(default_factory=dict)  # cfg.memory (ppo.Recipe)

    def finish_step(self, run_dir, memory):
        """Counts a step. Call it when the lines of that step are in the logs.

        memory: cfg.memory. Raises UserError if it holds anything but dicts, or if JSON does not
        give it back as it is.
        """
        self.step += 1
        self.log_sizes = measure_logs(run_dir)
        # The state needs a copy, because an interrupted step may change `memory`. JSON makes the
        # copy, because a resumed run reads its memory from JSON, too.
        try:
            self.memory = json.loads(json.dumps(memory))
        except (TypeError, ValueError) as error:
            raise UserError(f"self.memory cannot be saved as JSON: {one_line(error)}") from error
        are_dicts = all(isinstance(part, dict) for part in memory.values())
        if self.memory != memory or not are_dicts:
            told = "give each class a dict with text keys, of lists, texts and finite numbers"
            raise UserError(f"self.memory changes when it is saved as JSON; {told}")

    def check_types(self):
        """Raises TypeError if a value has another type than this version writes."""
        for name, default in vars(RunState()).items():
            if type(getattr(self, name)) is not type(default):
                raise TypeError(f"{name} is {getattr(self, name)!r:.99}")
        numbers = [*self.log_sizes.values(), self.config.get("zero_stage")]
        are_numbers = all(isinstance(number, int) for number in numbers)
        are_pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in self.variants)
        are_dicts = all(isinstance(part, dict) for part in self.memory.values())
        if not (are_numbers and are_pairs and are_dicts):
            raise TypeError("a part of log_sizes, config, variants or memory is wrong")

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
        # torch.save raises its RuntimeError while it handles an OSError. The OSError says why.
        while isinstance(error.__context__, OSError):
            error = error.__context__
        return f"{here()}: {type(error).__name__}: {one_line(error)}"


def on_rank0(action, *arguments):
    """Calls `try_disk` on rank 0. All ranks return what rank 0 got. A collective."""
    error = None
    if dist.get_rank() == 0:
        error = try_disk(action, *arguments)
    return gather(error)[0]


def flush(path):
    """Waits until a file is on the disk. Of a folder these are the names of its files."""
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
    machines, or in use by another run. To find out if the folder is shared, every rank writes a
    file and looks for the file of rank 0. Rank 0 has the lock, and the others get None.
    """
    rank = dist.get_rank()
    claims = run_dir / ".claim"
    # An earlier run may have been killed in this function, and its files are still there. So the
    # files of this run have a random name.
    name = gather(os.urandom(8).hex())[0]
    lock = None
    fault = None
    try:
        claims.mkdir(parents=True, exist_ok=True)
        (claims / f"{name}.{rank}").touch()
        free = shutil.disk_usage(run_dir).free
        if free < needed_bytes:
            fault = f"too small: needed {needed_bytes:,} bytes, free {free:,}; delete other files"
        if rank == 0:
            lock = open(run_dir / ".lock", "w")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A forked child, such as a tool's, may outlive this process. It must not keep the lock.
            os.register_at_fork(after_in_child=lock.close)
    except BlockingIOError:
        fault = "another run is using this folder; wait for that run, or choose another --run_dir"
    except OSError as error:
        fault = f"not writable, or not lockable ({error.strerror}); choose another --run_dir"
    # After this barrier the file of rank 0 exists.
    dist.barrier()
    if not fault and not (claims / f"{name}.0").exists():
        fault = "not shared: the file of rank 0 is absent; mount one folder on all machines"
    # After this `gather` each rank has looked for the file of rank 0, so it may be deleted.
    for place, text in gather((here(), fault)):
        if text:
            raise UserError(f"--run_dir: {place}, {run_dir}: {text}")
    if rank == 0:
        # `.saving_` and `.deleting_` were left by a run that was killed.
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


def read_manifest(path):
    """{file: {"size", "sha256"}} of a checkpoint, or {} if the checkpoint is not complete.

    It is complete if each file has the size that the manifest says. find_damage compares hashes.
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
        # torch.save would compute a CRC, which takes a third of its time. manifest.json has the
        # SHA-256 instead. This setting holds for the whole process.
        torch.serialization.set_crc32_options(False)

    def save(self, state_dict, path):
        # After the first error no more files are written.
        if self.error is None:
            self.error = try_disk(self.write, state_dict, path)

    def write(self, state_dict, path):
        with open(path, "wb") as file:
            torch.save(state_dict, file)
        flush(path)
        self.entries[path] = size_and_hash(path)

    def load(self, path, map_location=None):
        """Reads tensors, plain containers and four classes of DeepSpeed; no arbitrary pickles."""
        classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location=map_location, weights_only=True)


def save(run_dir, state: RunState, engines, hf, keep_last):
    """Writes the checkpoint RUN/step_NNNNNN. All ranks return None, or the text of an error.

    hf: objects with `save_pretrained`. keep_last: see prune. If a save fails, the older checkpoints
    stay complete. A collective.
    """
    final = run_dir / f"step_{state.step:06d}"
    temporary = run_dir / f".saving_{state.step:06d}"
    # A run that is stopped during a step saves the step before, which may be saved already.
    if gather(read_manifest(final))[0]:
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
        fault = on_rank0(prune, run_dir, keep_last)
        print0(f"saved step {state.step}")
        if fault:
            print0(f"WARNING: older checkpoints are not removed: {fault}")
    return error


def make_folders(temporary, final, engines):
    """Makes the temporary folders. Deletes the final folder, which is damaged if it exists.

    DeepSpeed would make the folders by itself, and an error would then be raised on rank 0 alone.
    """
    for folder in (temporary, final):
        remove(folder)
    for name in ["hf", *engines]:
        os.makedirs(temporary / name)


def write_engines(folder, engines):
    """Each rank writes its files. Returns {relative path: size and hash} of all, and an error."""
    writer = DurableWriter()
    for name, engine in engines.items():
        # DeepSpeed would copy a script into the folder, and an error of the disk would be raised.
        engine._copy_recovery_script = do_nothing
        engine.checkpoint_engine = writer
        engine.save_checkpoint(str(folder / name), tag="state", save_latest=False)
    mine = {os.path.relpath(path, folder): entry for path, entry in writer.entries.items()}
    files = {}
    error = None
    for entries, rank_error in gather((mine, writer.error)):
        files |= entries
        error = error or rank_error
    return files, error


def do_nothing(folder):
    pass


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
    if not read_manifest(temporary):
        raise OSError("a file does not have the size that its rank wrote")
    run_dir = final.parent
    # A resume also needs the first bytes of each log, as many as state.log_sizes says.
    logs = [run_dir / name for name in state.log_sizes]
    for path in [temporary, *temporary.rglob("*"), *logs]:
        flush(path)
    os.rename(temporary, final)
    try:
        flush(run_dir)
    except OSError as error:
        print(f"WARNING: {final} is saved, but a loss of power could lose it: {error}", flush=True)


def prune(run_dir, keep_last):
    """Deletes all complete checkpoints except the newest `keep_last`. 0 keeps all."""
    if keep_last == 0:
        return
    complete = [path for path in checkpoints(run_dir) if read_manifest(path)]
    for path in complete[keep_last:]:
        # If the run is killed during the deletion, the rest must not have the name of a checkpoint.
        renamed = path.rename(path.with_name(f".deleting_{path.name}"))
        remove(renamed)


# ---- resume: which checkpoint, and does it fit? ----------------------------------------------


def find_start(run_dir, choice, new_state: RunState, may_change):
    """Returns the checkpoint to resume from, or None, and the state that the run begins with.

    choice: --resume. new_state: the state of a new run with the flags of this run. may_change: the
    names of the flags that do not decide what is learnt. Raises UserError if the checkpoint does
    not fit this run. A collective.
    """
    path = pick_checkpoint(run_dir, choice)
    if path is None:
        return None, new_state
    saved = load_state(path)
    misfit = find_misfit(path, run_dir, saved, new_state, may_change)
    if misfit:
        raise UserError(f"{path} {misfit}, or use --resume none")
    # The other fields of the state, such as the flags, are those of this run.
    values = {"step": saved.step, "memory": saved.memory, "log_sizes": saved.log_sizes}
    return path, dataclasses.replace(new_state, **values)


def pick_checkpoint(run_dir, choice):
    """Returns the checkpoint to resume from, or None for a new run. A collective.

    choice: a path; `none`; or `auto`, the newest undamaged checkpoint of the folder. Raises
    UserError if all candidates are damaged.
    """
    # All ranks must take the same checkpoint, so rank 0 looks for them. The folder may have another
    # path on another machine, so the ranks use the names alone.
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
    # All checkpoints are damaged. The run does not start over by itself, because that would set the
    # checkpoints aside, and perhaps the disk fails for a minute only.
    raise UserError(
        f"--resume {choice}: {path}: {damage}; repair this checkpoint, choose another one of "
        "`tools/convert.py list RUN`, or start over with --resume none"
    )


def find_damage(path):
    """What is wrong with the files of a checkpoint, or None. A collective."""
    # All ranks use the manifest that rank 0 has read, so that all ranks return the same.
    entries = sorted(gather(read_manifest(path))[0].items())
    if not entries:
        return "files are missing or cut short"
    # The hash of a file takes time, so each rank computes those of its part of the files.
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


def find_misfit(path, run_dir, saved: RunState, new_state: RunState, may_change):
    """Why this run cannot go on from a checkpoint, and what to do, or None. A collective.

    The text goes on after the path of the checkpoint. saved: the state of the checkpoint.
    new_state, may_change: see find_start.
    """
    # `tools/convert.py reshard` writes the folder universal/, for any layout. find_damage is a
    # collective, so all ranks call it here, before one of them could return.
    needs_reshard = False
    if saved.layout != new_state.layout:
        needs_reshard = find_damage(path / "universal") is not None
    # The user should see all changed flags, whatever else is wrong.
    changed = find_changes(saved, new_state, may_change)
    if not path.parent.samefile(run_dir):
        return f"is not in {run_dir}; copy the folder of that run"
    if saved.step > new_state.total_steps:
        steps = f"is past the {new_state.total_steps} steps of this run"
        return f"{steps}; raise --max_steps or --num_episodes"
    if changed:
        names = ", --".join(changed)
        return (
            f"was made with another --{names}, which changes what is learnt; use the old value, or "
            f"begin another --run_dir: run `python tools/convert.py export {path} NEW`, and give "
            "--model NEW/policy (and --critic NEW/critic, with a critic)"
        )
    if saved.variants != new_state.variants:
        files = kept_files(path.parent, saved.variants)
        return (
            "was made with other variants, in another order, or with another text in one; use "
            f"{' '.join(['--variant', *files])}, or begin another --run_dir with its model: "
            f"run `python tools/convert.py export {path} NEW`"
        )
    if needs_reshard:
        return (
            f"was made with (ranks, --zero_stage) = {saved.layout}, and this run has "
            f"{new_state.layout}; run `python tools/convert.py reshard {path}`"
        )


def find_changes(saved: RunState, new_state: RunState, may_change):
    """Prints every changed flag. Returns the names of those that must not change."""
    changed = []
    for name, value in new_state.config.items():
        # The flags of another variant are absent. The texts of the variants are compared, too.
        old = saved.config.get(name, value)
        if old != value:
            print0(f"resume: --{name} was {old}, is {value}")
            if name not in may_change:
                changed.append(name)
    # Another --template also changes the prompts. Then `changed` has it already.
    if saved.problems_hash != new_state.problems_hash and not changed:
        changed.append("data")
    return changed


# ---- resume: fill the engines, and bring the folder to the checkpoint ------------------------


def resume(run_dir, source, engines, state: RunState):
    """Brings the engines and the run folder to `state`. All ranks call it.

    source: the checkpoint that find_start has chosen. A new run has None, and its engines stay as
    they are.
    """
    if source and load_state(source).layout == state.layout:
        for name, engine in engines.items():
            engine.checkpoint_engine = DurableWriter()
            engine.load_checkpoint(str(source / name), tag="state")
    elif source:
        # `tools/convert.py reshard` has made this folder, and find_start has checked it.
        reshard.load(source / "universal", engines)
    if dist.get_rank() == 0:
        rewind_folder(run_dir, source, state)


def rewind_folder(run_dir, source, state: RunState):
    """Cuts the logs to the sizes that they had at state.step, and sets other files aside.

    The run makes the steps after state.step again. There are three cases:
    - A new run: all that an earlier run has left goes into a new folder RUN/dropped_TIME.
    - A resume from an older checkpoint: the later checkpoints and the ends of the logs go there.
    - A resume from the newest checkpoint: only the ends of the logs are cut off. They belong to
      steps that were never saved.
    The user may delete RUN/dropped_TIME.
    """
    dropped = [path for path in checkpoints(run_dir) if not source or step_of(path) > state.step]
    if not source:
        found = [name for name in (*LOGS, *OTHER_OUTPUT) if (run_dir / name).exists()]
        # A run that was stopped before its first evaluation leaves only these, which the new run
        # writes again.
        if set(found) - {"config.json", "task.py", "variants"}:
            dropped += [run_dir / name for name in found]
    kept_sizes = {}  # {name of a log: bytes that the run keeps}
    for name, size in measure_logs(run_dir).items():
        # A user may have shortened a log by hand.
        kept_sizes[name] = min(size, state.log_sizes.get(name, 0))
    # First copy the ends of the logs, then cut them. set_aside may also have moved whole logs.
    if dropped:
        set_aside(run_dir, state.step, dropped, kept_sizes)
    for name in measure_logs(run_dir):
        os.truncate(run_dir / name, kept_sizes[name])


def set_aside(run_dir, step, dropped, kept_sizes):
    """Moves the paths `dropped` and the ends of the logs into a new folder.

    step: the run starts there. kept_sizes: {name of a log: bytes at its start that stay}.
    """
    # The time makes the name of the folder unique.
    folder = run_dir / f"dropped_{datetime.datetime.now():%Y-%m-%d_%H-%M-%S_%f}"
    folder.mkdir()
    names = ", ".join(path.name for path in dropped)
    print0(f"the run starts at step {step}, so these are moved to {folder}: {names}")
    for path in dropped:
        path.rename(folder / path.name)
    for name, size in kept_sizes.items():
        if (run_dir / name).exists():
            with open(run_dir / name, "rb") as log:
                log.seek(size)
                (folder / name).write_bytes(log.read())


# ---- export ----------------------------------------------------------------------------------


def export(out, save_model, weights, files):
    """Writes a folder that transformers and vLLM load. All ranks call it. Raises UserError.

    save_model(folder, weights): writes the model. weights: an iterator of (name, full tensor). The
    critic's value head goes to the file value_head.safetensors of the folder. files: writes the
    other files by its method save_pretrained.
    """
    # All ranks must take all tensors, because ZeRO 3 gathers each tensor from all ranks.
    kept = {}
    for name, tensor in weights:
        if dist.get_rank() == 0:
            kept[name] = tensor.detach().to("cpu", copy=True)
    error = on_rank0(write_export, out, save_model, kept, files)
    if error:
        raise UserError(f"{out} is NOT written: {error}")


def write_export(out, save_model, weights, files):
    """Writes the folder. weights: {name: tensor}. After a kill `out` is old, new or absent, and
    never half written."""
    unfinished = out.with_name(f".{out.name}")
    remove(unfinished)
    head = {}
    for name in list(weights):
        if name.startswith("value_head."):
            head[name] = weights.pop(name)
    save_model(unfinished, weights)
    files.save_pretrained(unfinished)
    if head:
        save_file(head, unfinished / "value_head.safetensors")
    # safetensors makes files that their owner alone may read.
    for path in unfinished.glob("*.safetensors"):
        shutil.copymode(unfinished / "config.json", path)
    # Of a link only the link goes, and not the folder behind it.
    if out.is_symlink():
        out.unlink()
    remove(out)
    unfinished.rename(out)
