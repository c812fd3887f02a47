"""Prints three ratios on a CPU: `python studies/ratios.py`

lean    The time of PPO's passes as ORZ makes them, divided by the time of our passes: an update of
        the policy with and without two passes that have no gradient, those of the old policy and
        of a reference model. Values and updates of the critic are the same in both.
head    The memory of log-probs and their gradients, by full logits and by the chunked head: 4,096
        tokens at the head of Qwen2.5-0.5B. Each side has a process of its own.
ranks   The speed of an update of the policy with two ranks of one thread each, divided by that
        with one rank and one thread. Beside it stands the speed of two such runs at once.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

import ppo
from nanoorz import models
from nanoorz.head import ChunkedHead
from nanoorz.ranks import start_distributed
from tools import bench


def make_update(folder: str, samples: int):
    """The policy, a batch of samples of 24 to 512 tokens, and an update with the rate 0."""
    cfg = bench.make_config(folder, "--max_len 512 --packing_max_len 512")
    policy = models.make_policy(cfg)
    batch = bench.make_batch(24, 512, policy.device, samples)

    def update():
        ppo.update(policy, cfg.policy_loss, batch, batch.all_indices(), 0.0, cfg)

    return cfg, policy, batch, update


def lean(folder: str):
    start_distributed()
    cfg, policy, batch, update = make_update(folder, 16)

    def orz():
        ppo.compute_logprobs(policy, batch, cfg)
        ppo.compute_logprobs(policy, batch, cfg)  # the reference model has the same size
        update()

    print("lean: seconds of ORZ's passes of the policy / of ours:", bench.compare(update, orz))


def head(is_chunked: str):
    """Prints the GiB that the log-probs add to the peak of the process."""
    hidden = torch.randn(4096, 896, requires_grad=True)  # (M, H)
    weight = torch.nn.Parameter(torch.randn(151936, 896))  # (V, H)
    token_ids = torch.randint(151936, (4096,))  # (M,)
    before = peak()
    if is_chunked == "True":
        logprobs, _ = ChunkedHead(weight)(hidden, token_ids)  # (M,)
    else:
        log_p = torch.nn.functional.linear(hidden, weight).log_softmax(-1)  # (M, V)
        logprobs = log_p.gather(1, token_ids[:, None])[:, 0]  # (M,)
    logprobs.sum().backward()
    print(peak() - before)


def peak() -> float:
    """The most GiB that this process has held."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20


def rank(folder: str):
    start_distributed()
    torch.set_num_threads(1)
    *_, batch, update = make_update(folder, 24)
    print(sum(batch.sample_lengths) / bench.median_seconds(update, 1))


def start(*words, world=0) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    command = [sys.executable, *(launcher if world else []), __file__, *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} if words[0] == "rank" else None
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def number_of(process: subprocess.Popen) -> float:
    return json.loads(process.communicate()[0].splitlines()[-1])


def main():
    with tempfile.TemporaryDirectory() as folder:
        bench.random_model(folder, "small")
        subprocess.run([sys.executable, __file__, "lean", folder], check=True)
        chunked, full = (number_of(start("head", is_chunked)) for is_chunked in (True, False))
        print(f"head: {chunked:.2f} GiB chunked, {full:.2f} GiB with full logits")
        for _ in range(3):
            one, two = (number_of(start("rank", folder, world=world)) for world in (1, 2))
            apart = sum(map(number_of, [start("rank", folder) for _ in range(2)]))
            print(f"ranks: two / one {two / one:.2f}, two runs apart / one {apart / one:.2f}")


if __name__ == "__main__":
    part = {"lean": lean, "head": head, "rank": rank}
    part[sys.argv[1]](sys.argv[2]) if sys.argv[1:] else main()
