"""This file locks the run folder, and saves, resumes and exports a run. It never sees the batch.

`python ckpt.py RUN/step_NNNNNN OUT` exports a checkpoint as OUT/policy and, if it has a critic,
OUT/critic.

A checkpoint is a folder RUN/step_NNNNNN, where NNNNNN is the number of finished steps. It holds:
- policy/ and critic/: files with whole fp32 tensors: fp32/PARAMETER (the master weights) and,
  after Adam's first update, the moments exp_avg/PARAMETER and exp_avg_sq/PARAMETER. Each rank
  writes a part of the tensors. Parameters that are not trained are absent.
- state.json: a RunState

Deviations from Open-Reasoner-Zero (ORZ):
- A resumed run equals a run that was never interrupted, on a CPU to the bit. The order of problems
  and all random numbers are functions of the seed and the step, so they need no files.
- The tensors are whole. So a run goes on with any number of ranks and any ZeRO stage.
- A kill at any instant leaves the older checkpoints complete. A save writes to a temporary folder.
  When the files of all ranks are on disk, rank 0 gives that folder its final name.
- A run checks its folder before it loads a model. The folder must be shared by all machines,
  writable and large enough (ORZ's issue 22).

In this file an engine is a DeepSpeed engine. `engines` is {name: engine}, of policy and critic. To
use this file elsewhere, copy ranks.py, variants.py and flags.py of nanoorz/, too.
"""

if __name__ == "__main__":
    # The import of environment.py sets variables that the libraries below read.
    from nanoorz import environment  # noqa: F401

import dataclasses
import datetime
import fcntl
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nanoorz.flags import require
from nanoorz.ranks import WITHOUT_LAUNCHER, UserError, gather, here, one_line, print0
from nanoorz.variants import extend, kept_files

# The logs of a run. Each line has `step`.
LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl", "eval_samples.jsonl")
# What a run writes at its end.
RESULTS = ("result.json", "policy", "critic")
# All that a run writes, except its checkpoints.
OUTPUT = (*LOGS, *RESULTS, "config.json", "code", "variants", "tensorboard", "wandb")
# The master weight of a parameter, and Adam's two moments.
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
# The most bytes of a file. A larger tensor has a file of its own.
FILE_BYTES = 5 * 10**8
# What DeepSpeed's loss scaler remembers, for --variant fp16.
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass
class RunState:
    """What state.json holds: all that a run resumes from, except the tensors."""

    step: int = 0  # finished steps
    config: dict = field(default_factory=dict)  # every flag
    variants: list = field(default_factory=list)  # [name, hash of its text] of each, in order
    problems_hash: int = 0  # of all prompts and labels
    first_prompt: str = ""  # for the README.md of an export
    memory: dict = field(default_factory=dict)  # cfg.memory (ppo.Recipe)
    engines: dict = field(default_factory=dict)  # {name: scalars_of(engine)}

    def finish_step(self, memory):
        """Counts a step. memory: cfg.memory. The state has a copy, because an interrupted step may
        change it."""
        self.step += 1
        self.memory = json.loads(json.dumps(memory))
        assert self.memory == memory, f"self.memory changes when it is saved as JSON: {memory}"


# ---- disk ------------------------------------------------------------------------------------


def try_disk(action, *arguments):
    """Calls action(*arguments). Returns None, or the text of an error of the disk.

    If one rank alone raised an error, the other ranks would wait for that rank. So a rank keeps
    the text, until all ranks gather their texts.
    """
    try:
        action(*arguments)
    except (OSError, SafetensorError) as error:
        return f"{here()}: {type(error).__name__}: {one_line(error)}"


def on_rank0(action, *arguments):
    """Calls `try_disk` on rank 0. All ranks return what rank 0 got. A collective."""
    error = None
    if dist.get_rank() == 0:
        error = try_disk(action, *arguments)
    return gather(error)[0]


def flush(path):
    """Waits until the bytes of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder):
    """Deletes a folder. Ignores errors."""
    shutil.rmtree(folder, ignore_errors=True)


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
            # A child, such as a tool's process, does not inherit a lock of this kind.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        require(not text, f"--run_dir: {place}, {run_dir}: {text}")
    if rank == 0:
        # `.saving_` and `.deleting_` were left by a run that was killed.
        for leftover in [claims, *run_dir.glob(".saving_*"), *run_dir.glob(".deleting_*")]:
            remove(leftover)
    return lock


def step_of(path):
    return int(path.name.removeprefix("step_"))


def checkpoints(run_dir):
    """The folders RUN/step_NNNNNN, newest first."""
    return sorted(run_dir.glob("step_" + "[0-9]" * 6), reverse=True)


# ---- save ------------------------------------------------------------------------------------


def save(run_dir, state: RunState, engines, keep_last):
    """Writes the checkpoint RUN/step_NNNNNN. All ranks return None, or the text of an error.

    keep_last: see prune. If a save fails, the older checkpoints stay complete. A collective.
    """
    final = run_dir / f"step_{state.step:06d}"
    temporary = run_dir / f".saving_{state.step:06d}"
    # A run that is stopped during a step saves the step before, which may be saved already.
    if gather(dist.get_rank() == 0 and final.exists())[0]:
        return None
    state.engines = {name: scalars_of(engine) for name, engine in engines.items()}
    error = on_rank0(write_state, temporary, state)
    for name, engine in engines.items():
        error = error or write_engine(temporary / name, engine)
    error = error or on_rank0(publish, temporary, final)
    if error:
        on_rank0(remove, temporary)
        print0(f"WARNING: step {state.step} is NOT saved: {error}")
        return error
    print0(f"saved step {state.step}")
    fault = on_rank0(prune, run_dir, keep_last)
    if fault:
        print0(f"WARNING: older checkpoints are not removed: {fault}")
    return None


def write_state(temporary, state):
    """Makes the folders of a checkpoint, and writes state.json."""
    remove(temporary)
    temporary.mkdir()
    for name in state.engines:
        (temporary / name).mkdir()
    (temporary / "state.json").write_text(json.dumps(dataclasses.asdict(state), indent=1))


def write_engine(folder, engine):
    """Writes the tensors. All ranks return None, or the first error of a rank. A collective."""
    part = {}  # {KIND/PARAMETER: tensor} of the next file
    size = 0  # bytes of `part`
    files = []  # futures with the result of try_disk
    # A thread writes, because the other ranks wait for the pieces of this rank. For the same reason
    # this rank goes on after an error.
    with ThreadPoolExecutor(max_workers=1) as pool:
        for key, tensor in whole_tensors(engine):
            if part and size + tensor.nbytes > FILE_BYTES:
                # The memory never holds more than two files.
                wait(files)
                files.append(pool.submit(try_disk, write_file, folder, len(files), part))
                part = {}
                size = 0
            part[key] = tensor
            size += tensor.nbytes
        files.append(pool.submit(try_disk, write_file, folder, len(files), part))
    errors = sum(gather([file.result() for file in files]), [])
    return next(filter(None, errors), None)


def write_file(folder, count, tensors):
    path = folder / f"{dist.get_rank():05d}_{count:05d}.safetensors"
    save_file(tensors, path)
    flush(path)


def publish(temporary, final):
    """Flushes state.json, the logs and the folders, and renames the folder."""
    run_dir = final.parent
    # A resume also needs the lines of the logs.
    logs = existing(run_dir, LOGS)
    folders = [path for path in temporary.iterdir() if path.is_dir()]
    for path in [temporary / "state.json", *folders, temporary, *logs]:
        flush(path)
    os.rename(temporary, final)
    flush(run_dir)


def prune(run_dir, keep_last):
    """Deletes all checkpoints except the newest `keep_last`. 0 keeps all."""
    if keep_last == 0:
        return
    for path in checkpoints(run_dir)[keep_last:]:
        # If the run is killed during the deletion, the rest must not have the name of a checkpoint.
        renamed = path.rename(path.with_name(f".deleting_{path.name}"))
        remove(renamed)


# ---- the tensors of an engine ----------------------------------------------------------------


def trained_parameters(module) -> dict:
    """{name: parameter}. The other parameters are those of the base model."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def optimizer_tensors(engine) -> tuple[list, dict]:
    """Returns the fp32 tensors that this rank's optimizer updates, and its states.

    At stage 0 the tensors are the parameters. At the other stages DeepSpeed lays this rank's pieces
    of all parameters end to end into a few long tensors, the flats. The states are {tensor: dict}.
    """
    # ZeRO's optimizer holds the real optimizer.
    states = getattr(engine.optimizer, "optimizer", engine.optimizer).state
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return list(trained_parameters(engine.module).values()), states
    if stage == 3:
        return engine.optimizer.fp32_partitioned_groups_flat, states
    return engine.optimizer.single_partition_of_fp32_groups, states


def scalars_of(engine) -> dict:
    """The number of Adam's updates, and in fp16 the state of the loss scaler."""
    _, states = optimizer_tensors(engine)
    # All tensors have had the same updates.
    updates = [float(state["step"]) for state in states.values()]
    scalars = {"updates": max(updates, default=0.0)}
    if engine.fp16_enabled():
        scalars |= {name: getattr(engine.optimizer.loss_scaler, name) for name in LOSS_SCALE}
    return scalars


def keys_of(engine, updates) -> dict:
    """{KIND/PARAMETER: (kind, parameter)}. Before its first update Adam has no moments."""
    kinds = KINDS if updates > 0 else KINDS[:1]
    keys = {}
    for name, parameter in trained_parameters(engine.module).items():
        for kind in kinds:
            keys[f"{kind}/{name}"] = kind, parameter
    return keys


def find_piece(engine, kind, parameter) -> tuple[torch.Tensor, int]:
    """Returns this rank's piece of a tensor, as a flat view into the optimizer's tensor, and the
    index of the first element of the piece in the whole tensor.

    DeepSpeed's safe_get_full_optimizer_state knows the moments only after an update, and not after
    a load.
    """
    flats, states = optimizer_tensors(engine)
    stage = engine.zero_optimization_stage()
    if stage == 0:
        flat, offset = parameter, 0
        start, length = 0, parameter.numel()
    elif stage == 3:
        # Every rank holds an equal piece of every parameter. The last pieces are padded.
        optimizer = engine.optimizer
        index, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
        flat = flats[index]
        start = dist.get_rank() * padded
        length = max(0, min(padded, parameter.ds_numel - start))
    elif parameter._hp_mapping:
        # All parameters lie end to end, and every rank holds one range of them, which may begin or
        # end inside of a parameter. The mapping says where the piece lies in the flat (hp, high
        # precision) and in the parameter (lp).
        mapping = parameter._hp_mapping
        flat = flats[mapping.param_group_index]
        offset = mapping.hp_fragment_address.start
        start, length = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
    else:
        # The range of this rank has nothing of this parameter.
        return torch.empty(0), 0
    tensor = flat.data if kind == "fp32" else states[flat][kind]
    return tensor.view(-1)[offset : offset + length], start


def whole_tensors(engine):
    """Yields (KIND/PARAMETER, whole tensor on the CPU) of the tensors that this rank writes.

    The rank with the longest piece writes. If pieces are equally long, the ranks take turns.
    A collective.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    keys = keys_of(engine, scalars_of(engine)["updates"])
    pieces = [find_piece(engine, *key)[0] for key in keys.values()]
    table = gather([len(piece) for piece in pieces])  # table[r][k]: of rank r's piece of tensor k
    for k, (key, (_, parameter)) in enumerate(keys.items()):
        lengths = [row[k] for row in table]
        turns = [(k + r) % world for r in range(world)]
        writer = max(turns, key=lengths.__getitem__)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        parts = [pieces[k]]
        if lengths[writer] < shape.numel():
            parts = collect_pieces(pieces[k], lengths, writer, engine.device)
        if rank == writer:
            yield key, torch.cat([part.cpu() for part in parts]).view(shape)


def collect_pieces(mine, lengths, writer, device) -> list:
    """The pieces of all ranks, in their order, on the rank `writer`. A collective."""
    rank = dist.get_rank()
    parts = []
    for source, length in enumerate(lengths):
        piece = torch.empty(length, device=device)
        if source == rank:
            piece.copy_(mine)
        if source != writer and length > 0:
            dist.broadcast(piece, src=source)
        if rank == writer:
            # Here and not later, so that the GPU holds one piece at a time.
            parts.append(piece.cpu())
    return parts


def load(folder, engine, scalars):
    """Fills an engine of any ZeRO stage on any number of ranks. scalars: those of the saved engine.

    Raises UserError if a file is cut or missing. A collective.
    """
    flats, states = optimizer_tensors(engine)
    if scalars["updates"] > 0:
        for flat in flats:
            states[flat] = {kind: torch.zeros_like(flat) for kind in KINDS[1:]}
            states[flat]["step"] = torch.tensor(scalars["updates"], device=flat.device)
    if engine.fp16_enabled():
        for name in LOSS_SCALE:
            setattr(engine.optimizer.loss_scaler, name, scalars[name])
    missing = keys_of(engine, scalars["updates"])
    for key, whole in read(folder, KINDS):
        fill(engine, *missing.pop(key), whole)
    require(not missing, f"{folder} is damaged: it lacks {list(missing)[:1]}")


def read(folder, kinds):
    """Yields (KIND/PARAMETER, tensor) of some kinds. Raises UserError if a file is cut."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = safe_open(path, "pt")
        except SafetensorError as error:
            told = "delete this checkpoint, and a resume takes an older one"
            raise UserError(f"{path} is damaged: {one_line(error)}; {told}") from error
        with file:
            for key in file.keys():  # noqa: SIM118
                if key.partition("/")[0] in kinds:
                    yield key, file.get_tensor(key)


def fill(engine, kind, parameter, whole):
    """Copies a whole tensor into this rank's piece, and the master weight into the weight, too."""
    if kind == "fp32":
        # At stage 3 rank 0 writes the whole weight, and DeepSpeed shards it again. At the other
        # stages each rank has the whole weight.
        is_sharded = engine.zero_optimization_stage() == 3
        with GatheredParameters([parameter], modifier_rank=0, enabled=is_sharded):
            if not is_sharded or dist.get_rank() == 0:
                parameter.data.copy_(whole)
    piece, start = find_piece(engine, kind, parameter)
    piece.copy_(whole.flatten()[start : start + len(piece)])


# ---- resume ----------------------------------------------------------------------------------


def find_start(run_dir, choice, new_state: RunState, may_change):
    """Returns the checkpoint to resume from, or None, and the state that the run begins with.

    choice: --resume. new_state: the state of a new run with the flags of this run. may_change: the
    names of the flags that do not decide what is learnt. Raises UserError if the checkpoint does
    not fit this run. A collective.
    """
    # All ranks must take the same checkpoint, so rank 0 chooses. The folder may have another path
    # on another machine, so the ranks use its name alone.
    name, fault = gather(pick_checkpoint(run_dir, choice))[0]
    require(not fault, fault)
    if name is None:
        return None, new_state
    path = run_dir / name
    saved = load_state(path)
    reasons = find_misfits(run_dir, saved, new_state, may_change)
    advice = f"undo this, or export its models for a new run: python ckpt.py {path} NEW"
    require(not reasons, f"{path} cannot go on: {'; '.join(reasons)}; {advice}")
    return path, dataclasses.replace(new_state, step=saved.step, memory=saved.memory)


def pick_checkpoint(run_dir, choice):
    """Returns the name of the checkpoint to resume from, and what is wrong with `choice`.

    choice: `none`; `auto`, the newest checkpoint; or a path. Without a checkpoint the name is None.
    """
    if choice == "none":
        return None, ""
    found = checkpoints(run_dir)
    if choice == "auto":
        return (found[0].name if found else None), ""
    for path in found:
        if path.resolve() == Path(choice).resolve():
            return path.name, ""
    return None, f"--resume {choice}: give auto, none or a checkpoint; {steps_in(run_dir)}"


def steps_in(run_dir) -> str:
    names = ", ".join(path.name for path in checkpoints(run_dir))
    return f"{run_dir} has {names or 'no checkpoint'}"


def load_state(path) -> RunState:
    return RunState(**json.loads((path / "state.json").read_text()))


def find_misfits(run_dir, saved: RunState, new_state: RunState, may_change) -> list[str]:
    """Why this run cannot go on from a checkpoint. Prints the changes of flags that may change."""
    reasons = []
    for name, value in new_state.config.items():
        # The saved run may lack a flag of a new variant.
        old = saved.config.get(name, value)
        if old != value:
            change = f"--{name} was {old}, is {value}"
            if name in may_change:
                print0(f"resume: {change}")
            else:
                reasons.append(change)
    # Another --template also changes the prompts.
    if saved.problems_hash != new_state.problems_hash and not reasons:
        reasons.append("--data has other prompts or labels")
    if saved.variants != new_state.variants:
        words = " ".join(kept_files(run_dir, saved.variants))
        reasons.append(f"the variants or their texts differ from --variant {words}")
    return reasons


def resume(run_dir, source, engines):
    """Brings the engines and the run folder to a checkpoint. A collective.

    source: the checkpoint that find_start has chosen. A new run has None, and its engines stay as
    they are.
    """
    if source:
        scalars = load_state(source).engines
        for name, engine in engines.items():
            load(source / name, engine, scalars[name])
    if dist.get_rank() == 0:
        rewind_folder(run_dir, step_of(source) if source else None)


def rewind_folder(run_dir, step):
    """Removes what is later than `step`, because the run makes these steps again. None: a new run.

    If there are later checkpoints or, for a new run, files of an earlier run, all goes into a new
    folder RUN/dropped_TIME. The user may delete it.
    """
    later = [path for path in checkpoints(run_dir) if step is None or step_of(path) > step]
    if step is None:
        later += existing(run_dir, OUTPUT)
    elif later:
        # The exported models are those of a later step.
        later += existing(run_dir, RESULTS)
    # For a new run the logs are in `later`.
    logs = existing(run_dir, LOGS) if step is not None else []
    sizes = {log: kept_size(log, step) for log in logs}
    if later:
        # The time makes the name of the folder unique.
        dropped = run_dir / f"dropped_{datetime.datetime.now():%Y-%m-%d_%H-%M-%S_%f}"
        names = ", ".join(path.name for path in later)
        print0(f"the run starts at step {step or 0}, so these are moved to {dropped}: {names}")
        dropped.mkdir()
        # A kill may come at any instant, so the ends of the logs are copied first and cut last.
        for log, size in sizes.items():
            with open(log, "rb") as source, open(dropped / log.name, "wb") as target:
                source.seek(size)
                shutil.copyfileobj(source, target)
        for path in later:
            path.rename(dropped / path.name)
    for log, size in sizes.items():
        os.truncate(log, size)


def existing(run_dir, names) -> list:
    return [run_dir / name for name in names if (run_dir / name).exists()]


def kept_size(log, step) -> int:
    """The bytes of a log up to its last line of `step`."""
    size = 0
    with open(log, "rb") as file:
        for line in file:
            # A kill may have cut the last line.
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
            size += len(line)
    return size


# ---- export ----------------------------------------------------------------------------------


def export(out, save_model, weights, about):
    """Writes a folder that transformers and vLLM load. A collective. Raises UserError.

    save_model(folder, weights): writes a model with these weights and its tokenizer. weights: an
    iterator of (name, full tensor). The critic's value head goes to the file
    value_head.safetensors of the folder. about: the text of README.md.
    """
    # All ranks must take all tensors, because ZeRO 3 gathers each tensor from all ranks.
    kept = {}
    for name, tensor in weights:
        if dist.get_rank() == 0:
            kept[name] = tensor.detach().to("cpu", copy=True)
    error = on_rank0(write_export, out, save_model, kept, about)
    require(not error, f"{out} is NOT written: {error}")


def write_export(out, save_model, weights, about):
    """Writes the folder. weights: {name: tensor}. After a kill `out` is old, new or absent, and
    never half written."""
    unfinished = out.with_name(f".{out.name}")
    remove(unfinished)
    head = {}
    for name in list(weights):
        if name.startswith("value_head."):
            head[name] = weights.pop(name)
    save_model(unfinished, weights)
    (unfinished / "README.md").write_text(about)
    if head:
        save_file(head, unfinished / "value_head.safetensors")
    # safetensors makes files that their owner alone may read.
    for path in unfinished.glob("*.safetensors"):
        shutil.copymode(unfinished / "config.json", path)
    remove(out)
    unfinished.rename(out)


# The flags that tell how to ask the model, and where its answer is.
TOLD = ("model", "task", "template", "system", "chat_template_kwargs", "answer_form", "stop")


def describe(state: RunState) -> str:
    """The README.md of an export."""
    told = {name: state.config[name] for name in TOLD}
    told |= {"steps": state.step, "first_prompt": state.first_prompt}
    text = "nanoORZ has trained this model. `first_prompt` has all special tokens of the prompt."
    return f"{text}\n\n```json\n{json.dumps(told, indent=1)}\n```\n"


def export_step(path: Path, out: Path):
    """Writes the models of a checkpoint to OUT/policy and OUT/critic. Raises UserError."""
    # Only this function needs other parts of a run.
    import ppo
    from nanoorz import families, models

    is_checkpoint = (path / "state.json").exists()
    run_dir = path if checkpoints(path) else path.parent
    require(is_checkpoint, f"{path} is no checkpoint; {steps_in(run_dir)}")
    state = load_state(path)
    cfg = extend(ppo.Recipe, kept_files(run_dir, state.variants))()
    # A model without an engine is whole, and stays on the CPU.
    vars(cfg).update(state.config, zero_stage=0, compile_layers=False)
    cfg.memory.update(state.memory)
    # This needs no GPU, and takes no port.
    os.environ |= WITHOUT_LAUNCHER
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    makers = {"policy": models.policy_module, "critic": models.critic_module}
    sources = {"policy": cfg.model, "critic": cfg.critic or cfg.model}
    taken = [name for name in state.engines if (out / name).exists()]
    require(not taken, f"{out} has {' and '.join(taken)} already; choose another OUT")
    for name in state.engines:
        # This refuses a folder that has moved.
        families.load_config(sources[name])
        module = makers[name](cfg)
        missing = trained_parameters(module)
        for key, tensor in read(path / name, ["fp32"]):
            missing.pop(key.removeprefix("fp32/")).data.copy_(tensor)
        require(not missing, f"{path} is damaged: it lacks {list(missing)[:1]}")
        learner = SimpleNamespace(name=name, cfg=cfg, module=module, stage=0)
        export(out / name, module.save, models.named_weights(learner), describe(state))
        print(f"wrote {out / name}")


def main(words) -> int:
    """Runs the command line. Returns the exit code."""
    try:
        require(len(words) == 2, "give a checkpoint and a new folder: RUN/step_NNNNNN OUT")
        export_step(*map(Path, words))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
