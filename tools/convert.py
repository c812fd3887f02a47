"""Checkpoints without a GPU and without a process group: what is there, Hugging Face folders, other numbers of ranks.

    python tools/convert.py list RUN
    python tools/convert.py export RUN/step_000050 OUT     writes OUT/policy and OUT/critic for transformers and vLLM
    python tools/convert.py reshard RUN                    then go on with any number of ranks and any ZeRO stage

The critic's folder is a body for AutoModel plus `value_head.safetensors` (weight of H -> 1). `reshard` adds universal/
to the newest checkpoint (or the one named): every parameter whole, with its Adam moments, 12 bytes a parameter; it
needs as much memory. Files are read without arbitrary pickles (torch.load with weights_only).
"""
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import ckpt
from tools.reshard import checked, merged, reshard


def list_checkpoints(run: Path) -> None:
    """A line per checkpoint, newest first: step, time, size, complete or not. CheckpointError where there is none."""
    if not ckpt.checkpoints(run):
        raise ckpt.CheckpointError(f"{run}: no step_NNNNNN there; give a run folder")
    for path in ckpt.checkpoints(run):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        verdict = "complete" if ckpt.manifest(path) else "TORN"
        verdict += ", any number of ranks" if ckpt.manifest(path / "universal") else ""
        print(f"{ckpt.step_of(path):8d}  {when}  {size / 2**20:10.1f} MiB  {verdict}")


def export(path: Path, out: Path) -> None:
    """Policy and, where there is one, critic as Hugging Face folders, in the dtype of training; CheckpointError."""
    state = checked(path)["config"]
    config, tokenizer = AutoConfig.from_pretrained(path / "hf"), AutoTokenizer.from_pretrained(path / "hf")
    dtype = torch.bfloat16 if state["bf16"] else torch.float32
    for name, auto_class in (("policy", AutoModelForCausalLM), ("critic", AutoModel)):
        if (path / name).is_dir():
            masters = merged(path / name, state["zero_stage"])[0]
            weights = {key.removeprefix("fp32/").removeprefix("model."): x.to(dtype) for key, x in masters.items()
                       if key.startswith("fp32/")}
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
    tools, paths = {"list": (list_checkpoints, 1), "reshard": (reshard, 1), "export": (export, 2)}, sys.argv[2:]
    try:
        tool, many = tools.get("".join(sys.argv[1:2]), (None, 0))
        if tool is None or len(paths) != many:
            raise ckpt.CheckpointError("usage: convert.py list RUN | reshard RUN | export RUN/step_NNNNNN OUT")
        tool(*map(Path, paths))
    except (ckpt.CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
