"""A file is copied into an empty folder, with at most lib/common.py, and works there.

Each test uses its copy in a process of its own, in that folder and without a PYTHONPATH. train.py
is not copied alone: it is what puts the stages together.
"""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment

# An engine is any object with these few things, and a policy any torch module: this one predicts a
# token from the one before it.
USE_PPO = """
import torch
from types import SimpleNamespace

import ppo
from lib.common import start_distributed


class Bigrams(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Embedding(11, 11)

    def forward(self, micro, temperature):
        log_p = (self.scores(micro.input_ids[micro.predict]) / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(1, micro.token_ids[:, None])[:, 0], entropy


class PlainLearner:
    name = "policy"
    device = torch.device("cpu")

    def __init__(self, module):
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

    def __call__(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss, is_last):
        loss.backward()

    def apply_update(self, lr):
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return self.module.scores.weight.grad.norm().item()


start_distributed()
torch.manual_seed(0)
prompts = [[1, 2], [3], [4, 5, 6], [7]]
responses = [[8, 9, 10], [2], [1, 1], [5, 4, 3, 2]]
rewards = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
groups = torch.tensor([0, 0, 1, 1])
batch = ppo.Batch(prompts, responses, groups, rewards, torch.device("cpu"), {}, [])
cfg = SimpleNamespace(
    estimator="grpo",
    advantage_normalization=True,
    critic_lambd=None,
    loss_mean="token",
    temperature=0.7,
    attention="sdpa",
    packing_max_len=8,
    micro_train_batch_size=1,
    actor_learning_rate=0.5,
    warmup_updates=1,
    critic_only_steps=0,
    lr_end=None,
)
ppo.compute_advantages(batch, cfg)

model = Bigrams()
before = model.scores.weight.detach().clone().requires_grad_()
loss = 0
for prompt, response, advantage in zip(prompts, responses, (1.0, -1.0, 0.0, 0.0)):
    previous = prompt[-1]
    for token in response:
        loss = loss - advantage * (before[previous] / 0.7).log_softmax(-1)[token] / 10
        previous = token
loss.backward()

stats = ppo.train_policy(PlainLearner(model), batch, cfg, step=0, total_steps=1)
moved = (before - model.scores.weight) / 0.5
assert torch.allclose(moved, before.grad, rtol=0, atol=1e-6)
assert abs(stats["policy_loss"] - loss.item()) < 1e-6
print("the naive gradient")
"""

USE_HEAD = """
import torch
from lib.head import ChunkedHead

torch.manual_seed(0)
head = ChunkedHead(8, 50, bias=False)
hidden = torch.randn(20, 8, requires_grad=True)
ids = torch.randint(50, (20,))
logprobs, entropy = head(hidden, ids, 0.7)
(got,) = torch.autograd.grad(logprobs.sum(), hidden)
log_p = (hidden @ head.weight.T / 0.7).log_softmax(-1)
(full,) = torch.autograd.grad(log_p[range(20), ids].sum(), hidden)
assert torch.allclose(got, full, atol=1e-5)
assert torch.allclose(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-5)
print("full logits agree")
"""

USE_CKPT = """
import deepspeed
import torch
from pathlib import Path
from lib.common import start_distributed

import ckpt

start_distributed()
run_dir = Path("run").absolute()
lock = ckpt.claim(run_dir, needed_bytes=1000)


def make_engine():
    module = torch.nn.Linear(4, 4)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    settings |= {"zero_allow_untested_optimizer": True}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    return engine


def learn(engine):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()


def weights(engine):
    return [p.detach().clone() for p in engine.module.parameters()]


engine = make_engine()
learn(engine)
state = ckpt.RunState(step=1, total_steps=2, config={"zero_stage": 1})
assert ckpt.save(run_dir, state, {"policy": engine}, hf=[], keep_last=1) is None
saved = weights(engine)
learn(engine)

path = ckpt.pick_checkpoint(run_dir, "auto")
assert path.name == "step_000001"
assert ckpt.load_state(path) == state
other = make_engine()
ckpt.load(path, {"policy": other}, state)
assert all(map(torch.equal, weights(other), saved))
# Adam's moments came back, too.
learn(other)
assert all(map(torch.equal, weights(other), weights(engine)))
print("the same step again")
"""


@pytest.fixture
def use(tmp_path):
    """use(files, *command): what the command prints in a folder that holds only these files."""

    def run(files: list[str], *command: str) -> str:
        for name in files:
            copy = tmp_path / name
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, copy)
        env = clean_environment()
        env.pop("PYTHONPATH", None)
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run


@pytest.mark.engine
def test_rollout_alone_prints_four_samples(use, tiny):
    files = ["rollout.py", "lib/common.py"]
    printed = use(files, "rollout.py", tiny["model"], "12+34")
    lines = [line for line in printed.splitlines() if line.startswith("[")]
    assert len(lines) == 4, printed
    assert {line[:3] for line in lines} == {"[0,", "[1,", "[2,", "[3,"}


def test_reward_alone_compares_answers(use):
    files = ["reward.py", "lib/common.py", "lib/equal.py"]
    code = "import reward; print(reward.is_equiv('1/2', '0.5'), reward.is_equiv('2x', 'x+x'))"
    assert use(files, "-c", code).split() == ["True", "True"]


def test_ppo_alone_updates_a_torch_module(use):
    """With a plain engine of ten lines its gradient is the naive one."""
    assert "the naive gradient" in use(["ppo.py", "lib/common.py"], "-c", USE_PPO)


@pytest.mark.engine
def test_ckpt_alone_saves_and_loads_a_deepspeed_engine(use):
    assert "the same step again" in use(["ckpt.py", "lib/common.py"], "-c", USE_CKPT)


def test_the_chunked_head_alone_equals_full_logits(use):
    assert "full logits agree" in use(["lib/head.py"], "-c", USE_HEAD)
