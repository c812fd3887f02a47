"""The demo: what train.py does without --model. Only then does train.py load this file."""

import shlex
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from lib.common import UserError, gather, print0

TOOL = Path(__file__).parent.parent / "tools" / "base_model.py"


def demo_flags(cfg) -> list[str]:
    """Makes the demo's base model in run_dir, prints the demo's flags, and returns the flags."""
    folder = (Path(cfg.run_dir) / "base").resolve()
    command = [sys.executable, str(TOOL), "addition", str(folder), "--seed", str(cfg.seed)]
    command.append("--end_with_parent")
    code = subprocess.call(command) if dist.get_rank() == 0 else 0
    if gather(code)[0] != 0:
        raise UserError("the demo's base model was not made, see above")
    flags = (folder / "flags.txt").read_text()
    print0("the demo is train.py", *flags.splitlines())
    return shlex.split(flags)
