"""--log_with tensorboard or wandb: curves elsewhere. Only a run with it loads this file."""

import contextlib
import sys

from torch.utils.tensorboard import SummaryWriter


class Tracker:
    """Writes points into RUN/tensorboard. With --log_with wandb, wandb copies them."""

    def __init__(self, cfg, run_dir, step):
        """step: a resumed run goes on from it, so later points are dropped."""
        self.wandb = None
        if cfg.log_with == "wandb":
            import wandb

            self.wandb = wandb
            options = {"config": vars(cfg), "sync_tensorboard": True}
            wandb.init(project="nanoorz", name=run_dir.name, dir=run_dir, **options)
        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)

    def add(self, line, step, prefix=""):
        """Adds the numbers of a line.

        TensorBoard does not work again after a full disk. So the first error ends the tracking.
        metrics.jsonl has all numbers.
        """
        try:
            for key, value in line.items():
                if self.writer and isinstance(value, (int, float)):
                    self.writer.add_scalar(prefix + key, value, step)
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
