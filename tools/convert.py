"""Checkpoints without a GPU and without a process group.

    python tools/convert.py list RUN
    python tools/convert.py export RUN/step_000050 OUT     OUT/policy and OUT/critic
    python tools/convert.py reshard RUN                    the newest one, or RUN/step_000050

`export` writes folders for transformers and vLLM, as a run does at its end. The critic's folder has
a body for AutoModel and value_head.safetensors, the weight of a linear layer from H to 1.

`reshard` merges the files of all ranks, so that a run can be resumed with any number of ranks and
any ZeRO stage. It adds universal/ to the checkpoint, in the format of lib/reshard.py. This takes 12
bytes a parameter on the disk, and as much memory.
"""

import argparse
import collections
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import ckpt
from lib.common import UserError
from lib.reshard import MOMENTS, write

AUTO_CLASSES = {"policy": AutoModelForCausalLM, "critic": AutoModel}


def list_checkpoints(run: Path):
    """Prints a line for each checkpoint, newest first. Raises UserError if there is none."""
    paths = ckpt.checkpoints(run)
    if not paths:
        raise UserError(f"{run}: no step_NNNNNN there; give a run folder")
    for path in paths:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        verdict = "complete" if ckpt.manifest(path) else "TORN"
        if ckpt.manifest(path / "universal"):
            verdict += ", any number of ranks"
        print(f"{ckpt.step_of(path):8d}  {when}  {size / 2**20:10.1f} MiB  {verdict}")


def verified_state(path: Path) -> ckpt.RunState:
    """Returns the state of a checkpoint. Raises UserError if a file does not match its hash."""
    entries = ckpt.manifest(path)
    if not entries:
        command = f"python tools/convert.py list {path.parent}"
        raise UserError(f"{path} is not a complete checkpoint; see `{command}`")
    for name, entry in entries.items():
        if ckpt.size_and_hash(path / name) != entry:
            raise UserError(f"{path}: {name} does not match its hash; take an older checkpoint")
    state = ckpt.load_state(path)
    if "lora_rank" in state.config:
        raise UserError(f"{path} has adapters: keep ranks and --zero_stage; RUN/policy is merged")
    return state


# ---- the files of all ranks as whole tensors -----------------------------------------------------


def merge(folder: Path, zero_stage: int) -> tuple[dict[str, dict], float]:
    """Returns whole fp32 tensors {kind: {parameter: tensor}}, and the number of Adam's updates.

    The kinds are fp32 and, after Adam's first update, the two moments.
    """
    if zero_stage == 0:
        return merge_replicas(folder / "state")
    return merge_shards(folder / "state", zero_stage)


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
    """ZeRO 1 to 3: every rank holds a piece of each parameter, and the pieces are in rank order."""
    groups = read(next(folder.glob("*mp_rank_00_model_states.pt")))["param_shapes"]
    pieces = collections.defaultdict(list)
    for file in sorted(folder.glob("*_optim_states.pt"), key=rank_of):
        shard = read(file)["optimizer_state_dict"]
        if zero_stage == 3:
            masters = shard["fp32_flat_groups"]
            states = shard["optimizer_state_dict"]["state"]
        else:
            masters = shard["single_partition_of_fp32_groups"]
            states = shard["base_optimizer_state"]["state"]
        for group, shapes in enumerate(groups):
            state = states.get(group, {})
            step = float(state.get("step", 0))
            # In each flat tensor the pieces of all parameters lie end to end.
            flats = {kind: state[kind] for kind in MOMENTS if kind in state}
            flats["fp32"] = masters[group]
            cuts = find_cuts(shard, group, shapes, zero_stage)
            for kind, name in itertools.product(flats, shapes):
                pieces[kind, name].append(flats[kind][cuts[name]])
    whole = collections.defaultdict(dict)
    for (kind, name), parts in pieces.items():
        (shape,) = [shapes[name] for shapes in groups if name in shapes]
        # ZeRO 3 pads the last piece.
        whole[kind][name] = torch.cat(parts)[: shape.numel()].view(shape)
    return whole, step


def rank_of(file: Path) -> int:
    """Returns 12 for a name like zero_pp_rank_12_mp_rank_00_optim_states.pt."""
    return int(file.name.split("rank_")[1].split("_")[0])


def find_cuts(shard: dict, group: int, shapes: dict, zero_stage: int) -> dict[str, slice]:
    """Returns the place of each parameter's piece in a rank's flat tensors."""
    cuts = {}
    start = 0
    for name, shape in shapes.items():
        if zero_stage == 3:
            # A rank holds an equal share of each parameter.
            share = -(-shape.numel() // shard["partition_count"])
            cuts[name] = slice(start, start + share)
            start += share
            continue
        # A rank holds one range of all parameters. The range may miss a parameter.
        address = shard["param_slice_mappings"][group].get(name)
        cuts[name] = slice(0)
        if address:
            cuts[name] = slice(address.start, address.start + address.numel)
    return cuts


# ---- what is written -----------------------------------------------------------------------------


def export(path: Path, out: Path):
    """Writes the policy, and the critic if there is one, in the dtype of training."""
    state = verified_state(path)
    flags = state.config
    dtype = torch.float32
    if flags["bf16"]:
        is_fp16 = "fp16" in [name for name, _ in state.variants]
        dtype = torch.float16 if is_fp16 else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(path / "hf")
    for name in engine_names(path):
        whole, _ = merge(path / name, flags["zero_stage"])
        weights = {}
        head = {}
        for parameter, tensor in whole["fp32"].items():
            place = head if parameter.startswith("value_head.") else weights
            place[parameter.removeprefix("model.")] = tensor.to(dtype)
        # The critic may be another model than the policy.
        is_other = name == "critic" and flags["critic"]
        config = AutoConfig.from_pretrained(flags["critic"] if is_other else path / "hf")
        make_model(path, name, config, weights, dtype).save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
        if head:
            save_file(head, out / name / "value_head.safetensors")
        print(f"wrote {out / name}")


def engine_names(path: Path) -> list[str]:
    return [name for name in AUTO_CLASSES if (path / name).is_dir()]


def make_model(path: Path, name: str, config, weights: dict, dtype: torch.dtype):
    """Raises UserError if a parameter would keep its random weights, or has no place."""
    model = AUTO_CLASSES[name].from_config(config, dtype=dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    wrong = {*missing, *unexpected}
    if config.tie_word_embeddings:
        wrong -= set(model._tied_weights_keys or ())
    if wrong:
        names = ", ".join(sorted(wrong)[:3])
        raise UserError(f"{path}: {name} does not fit its config in {names}")
    return model


def reshard(path: Path):
    """Adds universal/ to a checkpoint, or to the newest complete checkpoint of a run."""
    if not (path / "manifest.json").exists():
        path = next(filter(ckpt.manifest, ckpt.checkpoints(path)), path)
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
        ckpt.fsync(place)
    # A kill before the last rename leaves the checkpoint as it was, or without universal/.
    shutil.rmtree(path / "universal", ignore_errors=True)
    os.rename(temporary, path / "universal")
    ckpt.fsync(path)
    print(f"{path} can now be resumed on any number of ranks and with any --zero_stage")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list").add_argument("path", metavar="RUN", type=Path)
    exporting = commands.add_parser("export")
    exporting.add_argument("path", metavar="CHECKPOINT", type=Path)
    exporting.add_argument("out", metavar="OUT", type=Path)
    commands.add_parser("reshard").add_argument("path", metavar="RUN", type=Path)
    args = parser.parse_args()
    try:
        if args.command == "list":
            list_checkpoints(args.path)
        elif args.command == "export":
            export(args.path, args.out)
        else:
            reshard(args.path)
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
