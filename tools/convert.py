"""Checkpoints without a GPU and without a process group.

    python tools/convert.py list RUN
    python tools/convert.py export RUN OUT     OUT/policy and OUT/critic
    python tools/convert.py reshard RUN

`export` and `reshard` take the newest complete checkpoint of RUN, or the one that you name:
RUN/step_000050.

`export` writes folders for transformers and vLLM, as a run does at its end. The critic's folder has
a body for AutoModel and value_head.safetensors, the weight of a linear layer from H to 1.

`reshard` merges the files of all ranks, so that a run can be resumed with any number of ranks and
any ZeRO stage. It adds universal/ to the checkpoint, in the format of nanoorz/reshard.py. This
takes 12 bytes a parameter on the disk, and as much memory.
"""

import collections
import functools
import json
import os
import shutil
import signal
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

if __name__ == "__main__":
    # Without this DeepSpeed looks for a GPU, and logs a warning.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Ctrl-C ends this process in one line, also while the imports below take seconds.
    signal.signal(signal.SIGINT, lambda *_: sys.exit("stopped"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import logging

import ckpt
from nanoorz import families
from nanoorz.ranks import UserError
from nanoorz.reshard import MOMENTS, write

AUTO_CLASSES = {"policy": AutoModelForCausalLM, "critic": AutoModel}


def list_checkpoints(run: Path):
    """Prints a line for each checkpoint, newest first. Raises UserError if there is none."""
    paths = ckpt.checkpoints(run)
    if not paths:
        raise UserError(f"{run}: no step_NNNNNN there; give a run folder")
    print(f"{'step':>8}  {'saved at':19}  {'size':>14}  verdict")
    for path in paths:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        verdict = "complete" if ckpt.read_manifest(path) else "TORN"
        if verdict == "complete" and ckpt.read_manifest(path / "universal"):
            verdict += ", any number of ranks"
        print(f"{ckpt.step_of(path):8d}  {when}  {size / 2**20:10.1f} MiB  {verdict}")


def newest(path: Path) -> Path:
    """The newest complete checkpoint of a run. Another path stays as it is."""
    if (path / "manifest.json").exists():
        return path
    return next(filter(ckpt.read_manifest, ckpt.checkpoints(path)), path)


def verified_state(path: Path) -> ckpt.RunState:
    """Returns the state of a checkpoint. Raises UserError if a file does not match its hash."""
    entries = ckpt.read_manifest(path)
    if not entries:
        run = path if ckpt.checkpoints(path) else path.parent
        if not ckpt.checkpoints(run):
            raise UserError(f"{path}: no step_NNNNNN there; give a run folder")
        command = f"python tools/convert.py list {run}"
        raise UserError(f"{path} is not a complete checkpoint; see `{command}`")
    for name, entry in entries.items():
        if ckpt.size_and_hash(path / name) != entry:
            raise UserError(f"{path}: {name} does not match its hash; take an older checkpoint")
    state = ckpt.load_state(path)
    if "lora_rank" in state.config:
        raise UserError(f"{path} has adapters: keep ranks and --zero_stage; RUN/policy is merged")
    return state


def merge(folder: Path, zero_stage: int) -> tuple[dict[str, dict], float]:
    """Returns whole fp32 tensors {kind: {parameter: tensor}}, and the number of Adam's updates.

    The kinds are fp32 and, after Adam's first update, the two moments.
    """
    folder = folder / "state"
    return merge_shards(folder, zero_stage) if zero_stage > 0 else merge_replicas(folder)


def read(file: Path) -> dict:
    """Loads a file without arbitrary pickles."""
    return ckpt.DurableWriter().load(str(file), "cpu")


def merge_replicas(folder: Path) -> tuple[dict[str, dict], float]:
    """ZeRO 0: every rank holds everything, and rank 0 has written the file."""
    saved = read(folder / "mp_rank_00_model_states.pt")
    named = {}
    for name, weight in saved["module"].items():
        if name not in saved["buffer_names"]:
            # A tied parameter has two names. The optimizer knows it as one parameter.
            named.setdefault(weight.data_ptr(), (name, weight))
    whole = collections.defaultdict(dict)
    step = 0.0
    for index, (name, weight) in enumerate(named.values()):
        whole["fp32"][name] = weight
        state = saved["optimizer"]["state"].get(index)
        if state:
            step = float(state["step"])
            for kind in MOMENTS:
                whole[kind][name] = state[kind]
    return whole, step


def merge_shards(folder: Path, zero_stage: int) -> tuple[dict[str, dict], float]:
    """ZeRO 1 to 3: every rank holds a flat tensor of each kind for each group of parameters."""
    groups = read(next(folder.glob("*mp_rank_00_model_states.pt")))["param_shapes"]
    flats = collections.defaultdict(list)
    # Shorter names come first, because rank 9 comes before rank 10.
    files = sorted(folder.glob("*_optim_states.pt"), key=lambda file: (len(file.name), file.name))
    for file in files:
        shard = read(file)["optimizer_state_dict"]
        if zero_stage == 3:
            masters = shard["fp32_flat_groups"]
            states = shard["optimizer_state_dict"]["state"]
        else:
            masters = shard["single_partition_of_fp32_groups"]
            states = shard["base_optimizer_state"]["state"]
        for group, master in enumerate(masters):
            flat_of = {**states.get(group, {}), "fp32": master}
            step = float(flat_of.get("step", 0))
            for kind in flat_of.keys() & {"fp32", *MOMENTS}:
                flats[kind, group].append(flat_of[kind])
    whole = collections.defaultdict(dict)
    for kind, group in flats:
        parts = flats[kind, group]
        # In ZeRO 3 every rank has an equal share of each parameter, and the last share is padded.
        # In ZeRO 1 and 2 all parameters lie end to end, and every rank has one range of them.
        rows = torch.stack(parts) if zero_stage == 3 else torch.cat(parts)[None]  # (rows, elements)
        start = 0
        for name, shape in groups[group].items():
            share = -(-shape.numel() // len(rows))
            elements = rows[:, start : start + share].flatten()
            whole[kind][name] = elements[: shape.numel()].view(shape)
            start += share
    return whole, step


def export(path: Path, out: Path):
    """Writes the policy, and the critic if there is one, in the dtype of training."""
    path = newest(path)
    state = verified_state(path)
    flags = state.config
    names = engine_names(path)
    if taken := [out / name for name in names if (out / name).exists()]:
        raise UserError(f"{taken[0]} is there already; choose another OUT")
    half = torch.float16 if "fp16" in dict(state.variants) else torch.bfloat16
    dtype = half if flags["bf16"] else torch.float32
    for name in names:
        whole, _ = merge(path / name, flags["zero_stage"])
        weights = {key.removeprefix("model."): x.to(dtype) for key, x in whole["fp32"].items()}
        # The critic may be another model than the policy.
        is_other = name == "critic" and flags["critic"]
        source = flags["critic"] if is_other else path / "hf"
        config = AutoConfig.from_pretrained(source)
        model = AUTO_CLASSES[name].from_config(config, dtype=dtype)
        # Parameters that one of the two lacks, or that have two shapes.
        tensors = model.state_dict()
        buffers = [key for key, _ in model.named_buffers() if key in tensors]
        family = family_of(flags["model"]) if name == "policy" else families.Plain(None)
        # An export with other parts has the buffers of the base model.
        if buffers and not family.has_other_parts:
            lacking = f"a checkpoint lacks {buffers[0]} and other buffers"
            raise UserError(f"{path}: {lacking}; end the run, and use {path.parent / name}")
        expected = {(key, x.shape) for key, x in tensors.items() if key not in buffers}
        found = {(key, tensor.shape) for key, tensor in weights.items()}
        wrong = {key for key, _ in expected ^ found if not key.startswith("value_head.")}
        if model.config.tie_word_embeddings:
            wrong -= set(model._tied_weights_keys or ())
        if wrong:
            raise UserError(f"{path}: {name} does not fit its config in {sorted(wrong)[:3]}")
        save_model = functools.partial(family.save, model)
        ckpt.write_export(out / name, save_model, weights, families.BaseFiles(source))
        print(f"wrote {out / name}")


def family_of(source):
    """The Plain or Special of a base model. If the model is not here, Plain."""
    try:
        return families.find_family(source)
    except OSError:
        print(f"{source} is not here, so the export has the text part alone")
        return families.Plain(source)


def engine_names(path: Path) -> list[str]:
    return [name for name in AUTO_CLASSES if (path / name).is_dir()]


def reshard(path: Path):
    """Adds universal/ to a checkpoint, or to the newest complete checkpoint of a run."""
    path = newest(path)
    zero_stage = verified_state(path).config["zero_stage"]
    temporary = path / ".universal"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    entries = {}
    for name in engine_names(path):
        file = write(temporary, name, *merge(path / name, zero_stage))
        entries[file.name] = ckpt.size_and_hash(file)
    (temporary / "manifest.json").write_text(json.dumps(entries))
    for place in [*temporary.iterdir(), temporary]:
        ckpt.flush(place)
    # A kill before the last rename leaves the checkpoint as it was, or without universal/.
    shutil.rmtree(path / "universal", ignore_errors=True)
    os.rename(temporary, path / "universal")
    ckpt.flush(path)
    print(f"{path} can now be resumed on any number of ranks and with any --zero_stage")


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list").add_argument("run", metavar="RUN", type=Path)
    exporting = commands.add_parser("export")
    exporting.add_argument("path", metavar="RUN", type=Path)
    exporting.add_argument("out", metavar="OUT", type=Path)
    commands.add_parser("reshard").add_argument("path", metavar="RUN", type=Path)
    args = vars(parser.parse_args())
    logging.disable_progress_bar()
    command = {"list": list_checkpoints, "export": export, "reshard": reshard}[args.pop("command")]
    try:
        command(**args)
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
