"""Checkpoints for any number of ranks and any ZeRO stage: merges DeepSpeed's shards, fills engines from the whole.

`convert.py reshard` adds universal/ to a checkpoint: each engine's parameters and Adam moments as full fp32 tensors, 12
bytes a parameter; it needs as much memory. DeepSpeed's own universal checkpoints know ZeRO 1-2 and 3, each for itself;
this knows 0 too and crosses all lines, exactly: the numbers are moved, never computed with.
"""
import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state
from safetensors import safe_open
from safetensors.torch import save_file

import ckpt

MOMENTS = ("exp_avg", "exp_avg_sq")


def checked(path: Path) -> dict:
    """The state of a checkpoint whose every file matches its hash, or CheckpointError."""
    if not ckpt.manifest(path):
        raise ckpt.CheckpointError(f"{path} is not a complete checkpoint; see `convert.py list {path.parent}`")
    for name, entry in json.loads((path / "manifest.json").read_text()).items():
        if ckpt.describe(path / name) != entry:
            raise ckpt.CheckpointError(f"{path}: {name} does not match its hash; take an older checkpoint")
    return json.loads((path / "state.json").read_text())


def pieces(folder: Path, rank_file: Path, zero_stage: int):
    """Yields (name, shape, {"fp32" or moment: this rank's flat piece}, Adam's step) of one rank's optimizer file."""
    read = ckpt.DurableWriter().load
    shard = read(str(rank_file), "cpu")["optimizer_state_dict"]
    shapes = read(str(next(folder.glob("*mp_rank_00_model_states.pt"))), "cpu")["param_shapes"]
    flats = shard["fp32_flat_groups" if zero_stage == 3 else "single_partition_of_fp32_groups"]
    states = shard["optimizer_state_dict" if zero_stage == 3 else "base_optimizer_state"]["state"]
    for group, named in enumerate(shapes):
        state, begin = states.get(group, {}), 0
        for name, shape in named.items():
            if zero_stage == 3:  # an equal share of every parameter, the last one padded
                share = slice(begin, begin := begin - (-shape.numel() // shard["partition_count"]))
            else:  # a cut through all parameters laid end to end
                address = shard["param_slice_mappings"][group].get(name)
                share = slice(address.start, address.start + address.numel) if address else slice(0)
            tensors = {"fp32": flats[group]} | {key: state[key] for key in MOMENTS if key in state}
            yield name, shape, {key: flat[share] for key, flat in tensors.items()}, float(state.get("step", 0))


def merged(part: Path, zero_stage: int) -> tuple[dict[str, torch.Tensor], float]:
    """{"fp32/name", "exp_avg/name", "exp_avg_sq/name": full fp32 tensors} of an engine, and Adam's step (0: no moments
    yet), from the files of all its ranks."""
    folder, whole, step = part / "state", {}, 0.0
    if zero_stage == 0:
        saved = ckpt.DurableWriter().load(str(folder / "mp_rank_00_model_states.pt"), "cpu")
        weights = list(saved["module"].items())  # a tied parameter has two names, and is one to the optimizer
        first = {x.data_ptr(): name for name, x in reversed(weights)}
        names = [name for name, x in weights if first[x.data_ptr()] == name and name not in saved["buffer_names"]]
        for k, name in enumerate(names):
            state = saved["optimizer"]["state"].get(k, {})
            whole |= {f"fp32/{name}": saved["module"][name]} | {f"{key}/{name}": state[key] for key in MOMENTS if state}
            step = float(state.get("step", 0))
        return whole, step
    found, shapes = {}, {}
    for file in sorted(folder.glob("*_optim_states.pt"), key=lambda f: int(f.name.split("rank_")[1].split("_")[0])):
        for name, shape, tensors, step in pieces(folder, file, zero_stage):  # noqa: B007  the same everywhere
            for key, piece in tensors.items():
                found.setdefault(f"{key}/{name}", []).append(piece)
                shapes[f"{key}/{name}"] = shape
    return {key: torch.cat(parts)[:shapes[key].numel()].view(shapes[key]) for key, parts in found.items()}, step


def reshard(path: Path) -> None:
    """Adds universal/ to a checkpoint: each engine's full tensors in one safetensors file, flushed and renamed last."""
    path = path if (path / "manifest.json").exists() else next(filter(ckpt.manifest, ckpt.checkpoints(path)), path)
    stage, beside, files = checked(path)["config"]["zero_stage"], path / ".universal", {}
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for name in (name for name in ("policy", "critic") if (path / name).is_dir()):
        tensors, step = merged(path / name, stage)
        save_file(tensors, file := beside / f"{name}.safetensors", {"step": str(step)})
        ckpt.fsync(file)
        files[file.name] = ckpt.describe(file)
    (beside / "manifest.json").write_text(json.dumps(files))
    ckpt.fsync(beside / "manifest.json")
    ckpt.fsync(beside)
    shutil.rmtree(path / "universal", ignore_errors=True)
    os.rename(beside, path / "universal")
    ckpt.fsync(path)
    print(f"{path} can now be resumed on any number of ranks and with any --zero_stage")


def load(path: Path, engines) -> None:
    """Fills (name, engine) pairs of any ZeRO stage and number of ranks from `reshard`'s files; all ranks call it."""
    if problem := ckpt.damage(path / "universal"):
        raise ckpt.CheckpointError(f"{path}/universal: {problem}; run `python tools/convert.py reshard {path}` again")
    for engine_name, engine in engines:
        with safe_open(path / "universal" / f"{engine_name}.safetensors", "pt") as file:
            stage, step, keys = engine.zero_optimization_stage(), float(file.metadata()["step"]), set(file.keys())
            attribute = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
            flats = getattr(engine.optimizer, attribute) if stage else list(engine.module.parameters())
            states = getattr(engine.optimizer, "optimizer", engine.optimizer).state  # of the optimizer inside ZeRO's
            for flat in flats if step else ():
                states[flat] = {"step": torch.tensor(step, device=flat.device)} | {
                    key: torch.zeros_like(flat) for key in MOMENTS}
            for name, param in engine.module.named_parameters():
                full = {key: file.get_tensor(f"{key}/{name}") for key in ("fp32", *MOMENTS) if f"{key}/{name}" in keys}
                fill(param, full, stage, flats, states)


def fill(param, full: dict[str, torch.Tensor], stage: int, flats: list, states: dict) -> None:
    """Puts full tensors where this stage keeps them: the weight, and this rank's part of its master and moments."""
    with GatheredParameters([param], modifier_rank=0, enabled=stage == 3):
        if stage < 3 or dist.get_rank() == 0:
            param.data.copy_(full["fp32"])
    if stage == 3:
        world = dist.get_world_size()
        share = -(-param.ds_numel // world)
        for key, tensor in full.items():
            padded = torch.nn.functional.pad(tensor.flatten(), (0, share * world - param.ds_numel))  # (share * world,)
            piece = padded[dist.get_rank() * share:][:share]  # (share,)
            if key == "fp32":
                safe_set_local_fp32_param(param, piece)
            else:
                safe_set_local_optimizer_state(param, piece, key)
    elif stage == 0:
        for key in set(full) - {"fp32"}:
            states[param][key].copy_(full[key])
    elif (cut := param._hp_mapping) is not None:  # None: this rank holds none of it
        ours, theirs = cut.hp_fragment_address, cut.lp_fragment_address  # in this rank's flat tensors; in the parameter
        flat = flats[cut.param_group_index]
        for key, tensor in full.items():
            target = flat.data if key == "fp32" else states[flat][key]
            target[ours.start:ours.start + ours.numel] = tensor.flatten()[theirs.start:theirs.start + theirs.numel]
