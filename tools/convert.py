"""Checkpoints without a GPU and without a process group: what is there, and Hugging Face folders from any of them.

    python tools/convert.py list RUN
    python tools/convert.py export RUN/step_000050 OUT     writes OUT/policy and OUT/critic for transformers and vLLM

The critic's folder is a body for AutoModel plus `value_head.safetensors` (weight of H -> 1). Files of the project's own
runs are read with weights_only where DeepSpeed lets us: its merging of ZeRO 1-3 shards unpickles, so export only what
you trust.
"""
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import ckpt


def list_checkpoints(run: Path) -> None:
    """A line per checkpoint, newest first: step, time, size, complete or not."""
    for path in ckpt.checkpoints(run):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        verdict = "complete" if ckpt.is_complete(path) else "TORN"
        print(f"{ckpt.step_of(path):8d}  {when}  {size / 2**20:10.1f} MiB  {verdict}")


def full_weights(part: Path, zero_stage: int) -> dict[str, torch.Tensor]:
    """Name -> full fp32 tensor of one engine, without the wrapper's prefix; reads every rank's shards."""
    if zero_stage:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(part), tag="state")
    else:
        weights = ckpt.DurableWriter(part).load(str(part / "state" / "mp_rank_00_model_states.pt"), "cpu")["module"]
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def export(path: Path, out: Path) -> None:
    """Policy and, where there is one, critic as Hugging Face folders, in the dtype of training; CheckpointError."""
    if not ckpt.is_complete(path):
        raise ckpt.CheckpointError(f"{path} is not a complete checkpoint; see `convert.py list {path.parent}`")
    state = json.loads((path / "state.json").read_text())["config"]
    config, tokenizer = AutoConfig.from_pretrained(path / "hf"), AutoTokenizer.from_pretrained(path / "hf")
    dtype = torch.bfloat16 if state["bf16"] else torch.float32
    for name, auto_class in (("policy", AutoModelForCausalLM), ("critic", AutoModel)):
        if (path / name).is_dir():
            weights = {key: tensor.to(dtype) for key, tensor in full_weights(path / name, state["zero_stage"]).items()}
            head = {key: weights.pop(key) for key in list(weights) if key.startswith("value_head.")}
            model = auto_class.from_config(config, dtype=dtype)
            missing, unexpected = model.load_state_dict(weights, strict=False)
            tied = (model._tied_weights_keys or ()) if config.tie_word_embeddings else ()
            if wrong := {*missing, *unexpected} - set(tied):  # must not become random weights
                raise ckpt.CheckpointError(f"{path}: {name} does not fit its config in {sorted(wrong)[:3]}")
            model.save_pretrained(out / name)
            tokenizer.save_pretrained(out / name)
            if head:
                save_file(head, out / name / "value_head.safetensors")
            print(f"wrote {out / name}")


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["list"] and len(sys.argv) == 3:
            list_checkpoints(Path(sys.argv[2]))
        elif sys.argv[1:2] == ["export"] and len(sys.argv) == 4:
            export(Path(sys.argv[2]), Path(sys.argv[3]))
        else:
            raise ckpt.CheckpointError("usage: convert.py list RUN | convert.py export RUN/step_NNNNNN OUT")
    except ckpt.CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
