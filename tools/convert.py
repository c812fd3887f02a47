"""Checkpoints without a GPU and without a process group.

    python tools/convert.py list RUN
    python tools/convert.py export RUN/step_000050 OUT     OUT/policy and OUT/critic
    python tools/convert.py reshard RUN                    the newest one, or RUN/step_000050

`export` writes folders for transformers and vLLM, the same as a run's own at its end. The critic's
is a body for AutoModel and `value_head.safetensors`, the weight of a linear layer from H to 1.

`reshard` merges the files of all ranks, so that a run can go on with any number of ranks and any
ZeRO stage. It adds universal/ to the checkpoint: every parameter whole with its two Adam moments,
12 bytes a parameter, and it needs as much memory. lib/reshard.py reads this folder, and says how it
differs from DeepSpeed's universal checkpoints.

Files are read without arbitrary pickles.
"""

import argparse
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
from lib.reshard import MOMENTS, WHOLE

AUTO_CLASSES = {"policy": AutoModelForCausalLM, "critic": AutoModel}


def list_checkpoints(run: Path):
    """Prints a line for each checkpoint, newest first. Raises UserError where there is none."""
    paths = ckpt.checkpoints(run)
    if not paths:
        raise UserError(f"{run}: no step_NNNNNN there; give a run folder")
    for path in paths:
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        seconds = time.localtime(path.stat().st_mtime)
        when = time.strftime("%Y-%m-%d %H:%M:%S", seconds)
        verdict = "TORN"
        if ckpt.manifest(path):
            verdict = "complete"
        if ckpt.manifest(path / "universal"):
            verdict += ", any number of ranks"
        print(f"{ckpt.step_of(path):8d}  {when}  {sum(sizes) / 2**20:10.1f} MiB  {verdict}")


def verified_state(path: Path) -> ckpt.RunState:
    """The state of a checkpoint whose files all match their hashes. Raises UserError."""
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


def engine_names(path: Path) -> list[str]:
    return [name for name in AUTO_CLASSES if (path / name).is_dir()]


# ---- the files of all ranks as whole tensors -----------------------------------------------------


def merge(folder: Path, zero_stage: int) -> tuple[dict[str, torch.Tensor], float]:
    """The whole fp32 tensors of an engine, and the number of Adam's steps.

    Their names are fp32/PARAMETER, exp_avg/PARAMETER and exp_avg_sq/PARAMETER. The moments are
    absent before Adam's first step.
    """
    if zero_stage == 0:
        return merge_replicas(folder / "state")
    return merge_shards(folder / "state", zero_stage)


def read(file: Path) -> dict:
    return ckpt.DurableWriter().load(str(file), "cpu")


def merge_replicas(folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    """ZeRO 0: every rank holds everything, and the first one has written it."""
    saved = read(folder / "mp_rank_00_model_states.pt")
    weights = {}
    addresses = set()
    for name, weight in saved["module"].items():
        # A tied parameter has two names, and is one to the optimizer.
        is_second_name = weight.data_ptr() in addresses
        addresses.add(weight.data_ptr())
        if not is_second_name and name not in saved["buffer_names"]:
            weights[name] = weight
    whole = {}
    step = 0.0
    for index, (name, weight) in enumerate(weights.items()):
        whole[f"fp32/{name}"] = weight
        state = saved["optimizer"]["state"].get(index)
        if state:
            step = float(state["step"])
            for kind in MOMENTS:
                whole[f"{kind}/{name}"] = state[kind]
    return whole, step


def merge_shards(folder: Path, zero_stage: int) -> tuple[dict[str, torch.Tensor], float]:
    """ZeRO 1 to 3: every rank holds a piece of each parameter, and the pieces are in rank order."""
    model_file = next(folder.glob("*mp_rank_00_model_states.pt"))
    shapes_of_groups = read(model_file)["param_shapes"]
    pieces = {}
    for file in sorted(folder.glob("*_optim_states.pt"), key=rank_of):
        shard = read(file)["optimizer_state_dict"]
        for group, shapes in enumerate(shapes_of_groups):
            flats, step = flat_tensors(shard, group, zero_stage)
            cuts = find_cuts(shard, group, shapes, zero_stage)
            for kind, name in itertools.product(flats, cuts):
                piece = flats[kind][cuts[name]]
                pieces.setdefault(f"{kind}/{name}", []).append(piece)
    shape_of = {}
    for shapes in shapes_of_groups:
        shape_of |= shapes
    whole = {}
    for key, parts in pieces.items():
        shape = shape_of[key.partition("/")[2]]
        # ZeRO 3 pads the last piece.
        whole[key] = torch.cat(parts)[: shape.numel()].view(shape)
    return whole, step


def rank_of(file: Path) -> int:
    """From a name like zero_pp_rank_12_mp_rank_00_optim_states.pt."""
    return int(file.name.split("rank_")[1].split("_")[0])


def flat_tensors(shard: dict, group: int, zero_stage: int) -> tuple[dict, float]:
    """A rank's master weights and moments of a group, each laid end to end; and Adam's step."""
    if zero_stage == 3:
        masters = shard["fp32_flat_groups"]
        states = shard["optimizer_state_dict"]["state"]
    else:
        masters = shard["single_partition_of_fp32_groups"]
        states = shard["base_optimizer_state"]["state"]
    state = states.get(group, {})
    flats = {"fp32": masters[group], **state}
    step = float(state.get("step", 0))
    return {kind: flats[kind] for kind in WHOLE if kind in flats}, step


def find_cuts(shard: dict, group: int, shapes: dict, zero_stage: int) -> dict[str, slice]:
    """Where each parameter's piece lies in a rank's flat tensors."""
    cuts = {}
    if zero_stage == 3:
        # A rank holds an equal share of each parameter.
        start = 0
        for name, shape in shapes.items():
            share = -(-shape.numel() // shard["partition_count"])
            cuts[name] = slice(start, start + share)
            start += share
        return cuts
    # A rank holds what lies between two cuts through all parameters, which may be nothing of one.
    addresses = shard["param_slice_mappings"][group]
    for name in shapes:
        cuts[name] = slice(0)
        if name in addresses:
            start = addresses[name].start
            cuts[name] = slice(start, start + addresses[name].numel)
    return cuts


# ---- what is written -----------------------------------------------------------------------------


def export(path: Path, out: Path):
    """Writes policy and, where there is one, critic in the dtype of training. Raises UserError."""
    state = verified_state(path)
    flags = state.config
    dtype = torch.float32
    if flags["bf16"]:
        is_fp16 = "fp16" in [name for name, _ in state.variants]
        dtype = torch.float16 if is_fp16 else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(path / "hf")
    for name in engine_names(path):
        weights = {}
        head = {}
        for key, tensor in merge(path / name, flags["zero_stage"])[0].items():
            kind, _, parameter = key.partition("/")
            if kind == "fp32" and parameter.startswith("value_head."):
                head[parameter] = tensor.to(dtype)
            elif kind == "fp32":
                weights[parameter.removeprefix("model.")] = tensor.to(dtype)
        config = AutoConfig.from_pretrained(path / "hf")
        if name == "critic" and flags["critic"]:
            # It may be another model than the policy.
            config = AutoConfig.from_pretrained(flags["critic"])
        make_model(path, name, config, weights, dtype).save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
        if head:
            save_file(head, out / name / "value_head.safetensors")
        print(f"wrote {out / name}")


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
    """Adds universal/ to a checkpoint, or to the newest complete one of a run. Raises UserError."""
    if not (path / "manifest.json").exists():
        complete = filter(ckpt.manifest, ckpt.checkpoints(path))
        path = next(complete, path)
    zero_stage = verified_state(path).config["zero_stage"]
    temporary = path / ".universal"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    files = {}
    for name in engine_names(path):
        tensors, step = merge(path / name, zero_stage)
        file = temporary / f"{name}.safetensors"
        save_file(tensors, file, {"step": str(step)})
        files[file.name] = ckpt.size_and_hash(file)
    (temporary / "manifest.json").write_text(json.dumps(files))
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
    commands.add_parser("list").add_argument("run", type=Path)
    exporting = commands.add_parser("export")
    exporting.add_argument("checkpoint", type=Path)
    exporting.add_argument("out", type=Path)
    commands.add_parser("reshard").add_argument("run", type=Path)
    args = parser.parse_args()
    try:
        if args.command == "list":
            list_checkpoints(args.run)
        elif args.command == "export":
            export(args.checkpoint, args.out)
        else:
            reshard(args.run)
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
