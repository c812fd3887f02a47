"""--log_with tensorboard or wandb: curves elsewhere. Only a run with it loads this file."""

import contextlib
import sys

from torch.utils.tensorboard import SummaryWriter

from lib.flags import flags_of

# The first word of a number's name decides its group: seconds_critic belongs to time.
GROUPS = {
    "reward": "reward paid pass answered return advantage",
    "length": "length response total truncated",
    "policy": "policy entropy kl ratio clipfrac clipped approx",
    "critic": "critic explained",
    "time": "seconds tokens",
    "memory": "memory",
}
GROUP_OF = {word: group for group, words in GROUPS.items() for word in words.split()}


def tag_of(name, prefix):
    """The tag GROUP/NAME. Numbers of tasks and of unknown variants belong to the group other.

    prefix: the evaluation set with a slash, or nothing.
    """
    group = GROUP_OF.get(name.partition("_")[0], "other")
    return f"eval {prefix}{name}" if prefix else f"{group}/{name}"


class Tracker:
    """Writes points into RUN/tensorboard. With --log_with wandb, wandb copies them."""

    def __init__(self, cfg, run_dir, step):
        """step: a resumed run goes on from it, so later points are dropped."""
        self.wandb = None
        if cfg.log_with == "wandb":
            import wandb

            self.wandb = wandb
            options = {"config": flags_of(cfg), "sync_tensorboard": True}
            wandb.init(project="nanoorz", name=run_dir.name, dir=run_dir, **options)
        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)

    def add(self, line, step, prefix=""):
        """Adds the numbers of a line.

        TensorBoard does not work again after a full disk. So the first error ends the tracking.
        metrics.jsonl has all numbers.
        """
        try:
            for key, value in line.items():
                # The step is the x axis.
                if self.writer and key != "step" and isinstance(value, (int, float)):
                    self.writer.add_scalar(tag_of(key, prefix), value, step)
        except OSError as error:
            self.writer = None
            text = f"WARNING: the tracker has failed and gets no more numbers: {error}"
            print(text, file=sys.stderr)

    def close(self):
        """Flushes the points. The end of train.py would not do that."""
        with contextlib.suppress(OSError):
            if self.writer:
                self.writer.close()
        if self.wandb:
            self.wandb.finish()
