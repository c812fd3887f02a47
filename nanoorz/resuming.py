"""What only a resumed run needs: does the checkpoint fit, what is set aside, and how is it read?"""

import datetime

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from lib.common import print0
from lib.variant_files import OLD_RUN, has_functions, kept_files


def find_misfit(path, run_dir, saved, new, fixed, needs_reshard):
    """What to do before this run can go on from the checkpoint `path`, or None.

    saved, new: the RunState of the checkpoint, and of this run. fixed: see find_changes.
    """
    if has_functions(path.parent, saved.variants):
        return OLD_RUN
    changed = find_changes(saved, new, fixed)
    if not path.parent.samefile(run_dir):
        return f"is not in {run_dir}; copy the folder of that run"
    if saved.step > new.total_steps:
        return f"is past the {new.total_steps} steps of this run; raise --max_steps"
    if changed:
        names = ", --".join(changed)
        return (
            f"was made with another --{names}, which changes what is learnt; use the old value, or "
            f"begin another --run_dir: run `python tools/convert.py export {path} NEW`, and give "
            "--model NEW/policy (and --critic NEW/critic, with a critic)"
        )
    if saved.variants != new.variants:
        texts = kept_files(path.parent, saved.variants)
        return (
            "was made with other variants, in another order, or with another text in one; use "
            f"--variant {' '.join(texts) or 'none'}"
        )
    if needs_reshard:
        return (
            f"was made with (ranks, --zero_stage) = {saved.layout}, and this run has {new.layout}; "
            f"run `python tools/convert.py reshard {path}`"
        )


def find_changes(saved, new, fixed):
    """Prints every changed flag. Returns the names of those that must not change.

    fixed: {name: default} of the flags that decide what is learnt.
    """
    # A checkpoint that is older than a flag was made with that flag's default.
    old = fixed | saved.config
    changed = []
    for name, value in new.config.items():
        if name in old and old[name] != value:
            print0(f"resume: --{name} was {old[name]}, is {value}")
            if name in fixed:
                changed.append(name)
    # Another --template changes the hash of the problems too, and is named already.
    if saved.problems_hash != new.problems_hash and not changed:
        changed.append("data")
    return changed


def set_aside(run_dir, step, dropped, log_sizes):
    """Moves files and folders of `run_dir`, and the rest of each log, into a new folder.

    step: the run starts there. dropped: the paths. log_sizes: {name of a log: bytes that the run
    keeps}.
    """
    # The time makes the new name unique.
    folder = run_dir / f"dropped_{datetime.datetime.now():%Y-%m-%d_%H-%M-%S_%f}"
    folder.mkdir()
    names = ", ".join(path.name for path in dropped)
    print0(f"the run starts at step {step}, so these are moved to {folder}: {names}")
    for path in dropped:
        path.rename(folder / path.name)
    for name, size in log_sizes.items():
        if (run_dir / name).exists():
            with open(run_dir / name, "rb") as log:
                log.seek(size)
                (folder / name).write_bytes(log.read())


def load(path, map_location):
    """Reads tensors, plain containers and four classes of DeepSpeed; no arbitrary pickles."""
    classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with torch.serialization.safe_globals(classes):
        return torch.load(path, map_location=map_location, weights_only=True)
