"""The demo: what train.py does without --model."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from nanoorz.ranks import UserError, gather, print0
from nanoorz.variants import kept_files

TOOL = Path(__file__).parent.parent / "tools" / "base_model.py"


def demo_flags(cfg) -> list[str]:
    """Makes the demo's base model in run_dir, and prints and returns the demo's flags.

    tools/base_model.py makes the model, the problems, and a file of flags. Raises UserError.
    """
    folder = (Path(cfg.run_dir) / "base").resolve()
    refuse_other_run(cfg, folder)
    command = [sys.executable, str(TOOL), "addition", str(folder), "--seed", str(cfg.seed)]
    # If this run is killed, the tool ends, too.
    command.append("--end_with_parent")
    code = subprocess.call(command) if dist.get_rank() == 0 else 0
    if gather(code)[0] != 0:
        raise UserError("the demo's base model was not made, see above")
    flags = (folder / "flags.txt").read_text()
    print0("the demo is train.py", *flags.splitlines())
    return shlex.split(flags)


def refuse_other_run(cfg, folder):
    """Raises UserError, with the flags to give, if run_dir has a run of another model."""
    path = Path(cfg.run_dir) / "config.json"
    try:
        old = json.loads(path.read_text())
        is_other = Path(old["model"]) != folder
    except (OSError, ValueError, KeyError, TypeError):
        return
    if is_other:
        command = shlex.join(["python", "train.py", *command_words(old, cfg)])
        raise UserError(f"{cfg.run_dir} has a run; to resume it, add your flags to: {command}")


def command_words(old: dict, cfg) -> list[str]:
    """The words of the command line that goes on with a run. old: its config.json."""
    defaults = {}
    for field in dataclasses.fields(cfg):
        has_value = field.default is not dataclasses.MISSING
        defaults[field.name] = field.default if has_value else field.default_factory()
    files = kept_files(cfg.run_dir, old.get("variants", []))
    # With --resume none the run would not go on, but start over.
    left_out = ("world", "variants", "versions", "resume")
    flags = {name: old[name] for name in old if name not in left_out}
    words = []
    for name, value in (flags | {"run_dir": cfg.run_dir, "variant": files}).items():
        if value != defaults.get(name):
            # An empty list is the text "" on the command line.
            values = (value or [""]) if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    return words
