"""The folder universal/ of a checkpoint: its format, how it is written, and how it is loaded.

A checkpoint with this folder can be resumed with any number of ranks and any ZeRO stage.
`tools/convert.py reshard` makes the folder. For each engine of DeepSpeed it has a file
NAME.safetensors with whole fp32 tensors: fp32/PARAMETER and, after Adam's first update, the moments
exp_avg/PARAMETER and exp_avg_sq/PARAMETER. The metadata of the file have `step`, the number of
Adam's updates. Numbers are copied and never computed, so a resume is exact.

DeepSpeed has universal checkpoints of its own. They do not know stage 0, and a run of stage 1 or 2
cannot go on with stage 3.
"""

import math

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state
from safetensors import safe_open
from safetensors.torch import save_file

MOMENTS = ("exp_avg", "exp_avg_sq")


def write(folder, engine_name: str, whole: dict[str, dict], step: float):
    """Writes the file of one engine and returns its path. whole: {kind: {parameter: tensor}}."""
    tensors = {}
    for kind, parameters in whole.items():
        tensors |= {f"{kind}/{name}": tensor for name, tensor in parameters.items()}
    file = folder / f"{engine_name}.safetensors"
    save_file(tensors, file, {"step": str(step)})
    return file


def load(folder, engines: dict):
    """Fills DeepSpeed engines of any ZeRO stage and number of ranks. All ranks call it."""
    for engine_name, engine in engines.items():
        flats, states = optimizer_tensors(engine)
        stage = engine.zero_optimization_stage()
        with safe_open(folder / f"{engine_name}.safetensors", "pt") as file:
            step = float(file.metadata()["step"])
            kinds = ("fp32", *MOMENTS) if step > 0 else ("fp32",)
            # Before its first update Adam has no moments.
            if step > 0:
                make_moments(flats, states, step)
            for name, parameter in engine.module.named_parameters():
                full = {kind: file.get_tensor(f"{kind}/{name}") for kind in kinds}
                fill(parameter, full, stage, flats, states)


def optimizer_tensors(engine) -> tuple[list, dict]:
    """Returns the tensors that this rank's optimizer updates, and its states, {tensor: state}.

    At stage 0 these are the parameters. At the other stages DeepSpeed lays this rank's share of all
    parameters end to end into a few long fp32 tensors, the flats.
    """
    # ZeRO's optimizer holds the real optimizer.
    states = getattr(engine.optimizer, "optimizer", engine.optimizer).state
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return list(engine.module.parameters()), states
    if stage == 3:
        return engine.optimizer.fp32_partitioned_groups_flat, states
    return engine.optimizer.single_partition_of_fp32_groups, states


def make_moments(flats, states, step):
    """Makes moments of 0, which `fill` then overwrites. step: the number of Adam's updates."""
    for flat in flats:
        states[flat] = {"step": torch.tensor(step, device=flat.device)}
        for kind in MOMENTS:
            states[flat][kind] = torch.zeros_like(flat)


def fill(parameter, full, stage, flats, states):
    """Copies full tensors into the weight and into this rank's part of master and moments.

    full: {kind: tensor}. A kind is fp32 or a moment.
    """
    # At stage 3 rank 0 writes the whole weight, and DeepSpeed shards it again. At the other stages
    # each rank has the whole weight.
    with GatheredParameters([parameter], modifier_rank=0, enabled=stage == 3):
        if stage < 3 or dist.get_rank() == 0:
            parameter.data.copy_(full["fp32"])
    if stage == 3:
        fill_share(parameter, full)
    elif stage == 0:
        for kind in set(full) - {"fp32"}:
            states[parameter][kind].copy_(full[kind])
    # _hp_mapping says where this rank's part of the parameter is. None: the rank has no part.
    elif parameter._hp_mapping is not None:
        fill_range(parameter._hp_mapping, full, flats, states)


def fill_share(parameter, full):
    """ZeRO 3: every rank holds an equal share of every parameter. The last share is padded."""
    world = dist.get_world_size()
    share = math.ceil(parameter.ds_numel / world)
    padding = share * world - parameter.ds_numel
    start = dist.get_rank() * share
    for kind, tensor in full.items():
        padded = torch.nn.functional.pad(tensor.flatten(), (0, padding))  # (share * world,)
        piece = padded[start : start + share]  # (share,)
        if kind == "fp32":
            safe_set_local_fp32_param(parameter, piece)
        else:
            safe_set_local_optimizer_state(parameter, piece, kind)


def fill_range(mapping, full, flats, states):
    """ZeRO 1 and 2: all parameters lie end to end, and every rank holds one range of them.

    The range may begin or end inside of a parameter. hp (high precision) is the fp32 master, and lp
    (low precision) the weight in the training dtype.
    """
    in_flat = mapping.hp_fragment_address  # start and length of the piece, in the flat
    in_parameter = mapping.lp_fragment_address  # the same, in the parameter
    flat = flats[mapping.param_group_index]
    for kind, tensor in full.items():
        target = flat.data if kind == "fp32" else states[flat][kind]
        piece = tensor.flatten()[in_parameter.start : in_parameter.start + in_parameter.numel]
        target[in_flat.start : in_flat.start + in_flat.numel] = piece
