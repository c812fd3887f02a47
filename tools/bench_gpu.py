"""The measuring parts of `make card`, each a process: `python tools/bench_gpu.py PART FOLDER`.

Models have the shapes of Qwen2.5 and random weights, which are made on the spot: 0.5B whole, and
four layers of 7B with its embedding and head. On a machine without a GPU all sizes are tiny.

    attention   updates of 0.5B, rows of 16,384 tokens in samples of 4,096: varlen, sdpa, and
                FlashAttention 2 where it is installed; model flops against a large product
    attention7b the same with four layers of 7B
    advantages  GAE of 8,192 samples of up to 8,000 tokens, on the GPU and on the CPU
    sampling    0.5B in vLLM: tokens/s, the seconds of sleep, wake and sync
    step        GRPO steps of 16 x 16 samples of 512 tokens of 0.5B by train.py
    zero2       steps of PPO with a critic, 16 x 8 samples of 1,024 tokens of 0.5B, at ZeRO 2
    zero3       the same at ZeRO 3
    lab         the laboratory: a base model, 40 steps of PPO, accuracy before and after

A part writes its figures to FOLDER/figures.json.
"""

import functools
import gc
import itertools
import json
import os
import shlex
import statistics
import string
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

# As in train.py, before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import is_flash_attn_2_available

import ppo
import rollout
import train
from lib import models
from lib.attention import has_varlen
from lib.common import start_distributed
from lib.head import ChunkedHead
from tools import cost, memory

ROOT = Path(__file__).parent.parent
SMALL = "Qwen/Qwen2.5-0.5B"
LARGE = "Qwen/Qwen2.5-7B"
STOPS = ["User:", "Human:", "Assistant:", "</answer>"]
# The sizes of `step`. One round of verl 0.8.0 with vLLM 0.12 on one H100 takes 6.39 s, of 16 x 16
# samples of at most 512 tokens (github.com/chrisjmccormick/stacks, stacks/qwen-gsm8k). Responses
# may end earlier there, and never do here.
STEP_FLAGS = {
    "estimator": "grpo",
    "template": "plain",
    "stop": "",
    "zero_stage": 2,
    "rollout_batch_size": 16,
    "n_samples_per_prompt": 16,
    "prompt_max_len": 256,
    "generate_max_len": 512,
    "max_len": 1024,
    "packing_max_len": 16384,
    "gradient_checkpointing": "false",
    "max_steps": 4,
    "eval_interval": 0,
    "save_interval": 0,
    "keep_last": 0,
    "log_with": "none",
}
# PPO with a critic, for cards from 24 GB on.
CRITIC_FLAGS = STEP_FLAGS | {
    "estimator": "gae",
    "n_samples_per_prompt": 8,
    "critic_updates": 4,
    "generate_max_len": 1024,
    "max_len": 2048,
    "packing_max_len": 4096,
    "gradient_checkpointing": "true",
    "gpu_memory_utilization": 0.3,
    "log_ratio": "true",
    "max_steps": 3,
}
# The sizes on a machine without a GPU. They show that the parts work, and nothing else.
TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": 512,
}
TINY_FLAGS = {
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "prompt_max_len": 64,
    "generate_max_len": 16,
    "max_len": 128,
    "packing_max_len": 128,
    "kv_cache_gb": 0.25,
    "micro_rollout_batch_size": 8,
}


# ---- models ----------------------------------------------------------------------------------


def make_tokenizer(size: int) -> Qwen2Tokenizer:
    """A token for each byte, so that any text goes in, and words of four letters up to that size.

    Whatever a random model samples has a text then, in which stop strings are looked for.
    """
    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    words = map("".join, itertools.product(string.ascii_lowercase, repeat=4))
    tokens += itertools.islice(words, size - len(tokens))
    return Qwen2Tokenizer({token: number for number, token in enumerate(tokens)}, [])


def make_model(folder: str, shape: str, **changes) -> str:
    """Random bf16 weights in a shape of tools/memory.py, changed in some fields of its config."""
    ends = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    config = memory.model_config(shape, **ends | changes)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(default)
    model.save_pretrained(folder)
    # Nothing stays on the card, whose whole memory is compared with the plan: neither the model
    # nor what the allocator keeps of it.
    del model
    gc.collect()
    torch.cuda.empty_cache()
    make_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


def held_gib() -> float:
    """What is held on the card, by whomever; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / memory.GIB


def make_config(model: str, **changes) -> train.Config:
    cfg = train.parse_flags(["--model", model, "--data", "-"])
    settings = {"zero_stage": 2, "stop": [], "bf16": True, "max_norm": 0.0}
    for name, value in (settings | changes).items():
        setattr(cfg, name, value)
    return cfg


def settled_seconds(function) -> float:
    """Seconds of a call, with all that it started on the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def median_seconds(function, rounds: int = 3) -> float:
    """The median of some calls, after one that does not count."""
    function()
    return statistics.median(settled_seconds(function) for _ in range(rounds))


# ---- learning --------------------------------------------------------------------------------


@dataclass
class Learning:
    """The sizes of a policy update."""

    shape: str
    suffix: str  # of the figures' names
    changes: dict = field(default_factory=dict)
    row: int = 16384  # tokens
    sample: int = 4096  # tokens
    prompt: int = 128  # of these
    rows: int = 2

    def __post_init__(self):
        self.samples = self.rows * self.row // self.sample
        self.responses = self.samples * (self.sample - self.prompt)  # tokens


def make_batch(case: Learning, vocab: int, device: torch.device) -> ppo.Batch:
    """Equal samples of random tokens, and advantages of 1."""
    ids = torch.randint(1, vocab, (case.samples, case.sample)).tolist()
    groups = torch.arange(case.samples)  # (N,)
    rewards = torch.ones(case.samples, dtype=torch.float64)  # (N,)
    prompts = [sample[: case.prompt] for sample in ids]
    responses = [sample[case.prompt :] for sample in ids]
    batch = ppo.Batch(prompts, responses, groups, rewards, device, {}, [])
    batch.per_token["advantages"] = torch.ones(case.responses, device=device)  # (T,)
    return batch


def attentions() -> list[str]:
    """What this machine can attend with in bf16."""
    names = ["sdpa"]
    if torch.cuda.is_available() and has_varlen():
        names.insert(0, "varlen")
    if torch.cuda.is_available() and is_flash_attn_2_available():
        names.append("flash_attention_2")
    return names


def bench_attention(folder: str, device: torch.device, case: Learning) -> dict:
    """Seconds of an update with each attention, and what they are made of."""
    model = make_model(f"{folder}/{case.suffix or 'small'}", case.shape, **case.changes)
    cfg = make_config(model, packing_max_len=case.row, max_len=case.sample)
    policy = models.make_policy(cfg)
    body = policy.module.model
    batch = make_batch(case, body.config.vocab_size, device)
    update = functools.partial(
        ppo.update, policy, ppo.policy_loss, batch, batch.all_indices(), 0.0, cfg
    )
    seconds = {}
    for name in attentions():
        body.set_attn_implementation(name)
        seconds[name] = median_seconds(update)
    best = attentions()[0]
    body.set_attn_implementation(best)
    tokens = case.rows * case.row
    work = model_flops(body.config, case)
    figures = {
        "mfu": work / seconds[best] / peak_flops(device),
        "head_share": head_seconds(body, case.responses, device) / seconds[best],
        "train_tokens_per_s": tokens / seconds[best],
    }
    if best != "sdpa":
        figures[f"{best}_vs_sdpa"] = seconds["sdpa"] / seconds[best]
    figures |= {f"seconds_{name}": value for name, value in seconds.items()}
    return {f"{name}{case.suffix}": value for name, value in figures.items()}


def model_flops(config, case: Learning) -> float:
    """Of forward and backward, without what checkpointing computes again."""
    sizes = memory.Sizes(config)
    tokens = case.samples * case.sample
    products = 6 * tokens * (sizes.policy - sizes.embeddings)
    head = 6 * case.responses * sizes.embedding
    # A token attends to half of its sample on average.
    attention = 3 * 4 * tokens * case.sample / 2 * sizes.hidden * sizes.layers
    return products + head + attention


def peak_flops(device: torch.device) -> float:
    """Of a large product in bf16, when the clocks have risen."""
    size = 8192 if device.type == "cuda" else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)  # (size, size)

    def multiply() -> None:
        for _ in range(10):
            torch.mm(a, a)

    return 10 * 2 * size**3 / median_seconds(multiply)


def head_seconds(body, tokens: int, device: torch.device) -> float:
    """Of the head's forward and backward on so many response tokens."""
    head = body.get_output_embeddings()
    assert isinstance(head, ChunkedHead)
    weight = head.weight.detach().clone().requires_grad_()  # (V, H)
    alone = ChunkedHead(*reversed(weight.shape), bias=False, device="meta")
    alone.weight = torch.nn.Parameter(weight)
    hidden = torch.randn(tokens, weight.shape[1], device=device, dtype=weight.dtype)  # (T, H)
    hidden.requires_grad_()
    ids = torch.randint(weight.shape[0], (tokens,), device=device)  # (T,)

    def learn() -> None:
        alone(hidden, ids, 1.0)[0].sum().backward()

    return median_seconds(learn)


def bench_advantages(
    folder: str, device: torch.device, samples: int = 8192, longest: int = 8000
) -> dict:
    """Whole calls on a batch whose responses have 1 to `longest` tokens."""
    cfg = make_config(SMALL, estimator="gae")
    lengths = torch.linspace(1, longest, samples).int().tolist()
    groups = torch.arange(samples) // 64  # (N,)
    rewards = (torch.arange(samples) % 2).double()  # (N,)
    seconds = {}
    for place in (device, torch.device("cpu")):
        # A range has a length and holds no numbers.
        responses = [range(length) for length in lengths]
        batch = ppo.Batch([[1]] * samples, responses, groups, rewards, place, {}, [])
        batch.per_token["values"] = torch.zeros(sum(lengths), device=place)  # (T,)
        compute = functools.partial(ppo.compute_advantages, batch, cfg)
        seconds[place.type] = median_seconds(compute, rounds=1)
    ratio = seconds["cpu"] / seconds[device.type]
    return {"advantages_s": seconds[device.type], "advantages_cpu_vs_gpu": ratio}


# ---- sampling --------------------------------------------------------------------------------


@dataclass
class Sampling:
    """The sizes of a rollout."""

    changes: dict = field(default_factory=dict)
    in_flight: tuple[int, ...] = (256, 1024)
    tokens: int = 256  # of each response
    cache: float | None = None  # GiB; absent: what vLLM's share leaves


def bench_sampling(folder: str, device: torch.device, case: Sampling) -> dict:
    """Tokens/s with a full batch; a model of random weights hardly ever ends a response."""
    model = make_model(f"{folder}/sampled", SMALL, **case.changes)
    most = max(case.in_flight)
    cfg = make_config(model, max_len=1024, micro_rollout_batch_size=most, kv_cache_gb=case.cache)
    begin = time.perf_counter()
    sampler = rollout.Sampler(cfg)
    figures = {"sampler_start_s": time.perf_counter() - begin}
    for count in case.in_flight:
        plain = sampled_per_second(sampler, count, case.tokens)
        sampler.cfg.stop = STOPS
        stopped = sampled_per_second(sampler, count, case.tokens)
        sampler.cfg.stop = []
        figures[f"tokens_per_s_{count}"] = plain
        figures[f"stops_{count}"] = stopped / plain
    policy = models.make_policy(cfg)
    rounds = [sleep_and_sync(sampler, policy) for _ in range(4)]
    # The first round makes what the others find.
    for name in rounds[0]:
        figures[name] = statistics.median(one[name] for one in rounds[1:])
    return figures


def sampled_per_second(sampler: rollout.Sampler, count: int, tokens: int) -> float:
    problem = SimpleNamespace(prompt_ids=list(range(1, 101)))
    requests = rollout.make_requests(
        [problem], rollout.problem_seeds(0, 0, "bench", 1), count, tokens, 1.0, 1.0
    )
    made = []

    def sample() -> None:
        made[:] = [len(sample.response_ids) for _, sample in sampler.generate(requests)]

    seconds = median_seconds(sample, rounds=2)
    return sum(made) / seconds


def sleep_and_sync(sampler: rollout.Sampler, policy) -> dict:
    """Seconds to sleep, of a whole sync, and of its waking up."""
    waking = []
    wake_up = sampler.llm.wake_up

    def timed(**options) -> None:
        waking.append(settled_seconds(functools.partial(wake_up, **options)))

    sampler.llm.wake_up = timed
    awake = held_gib()
    sleep = settled_seconds(sampler.sleep)
    freed = awake - held_gib()
    sync = settled_seconds(functools.partial(sampler.sync, models.named_weights(policy)))
    sampler.llm.wake_up = wake_up
    return {"sleep_s": sleep, "freed_gib": freed, "wake_s": sum(waking), "sync_s": sync}


# ---- whole steps -----------------------------------------------------------------------------


def bench_step(folder: str, device: torch.device, flags: dict, **changes) -> dict:
    """Steps of a run of train.py: the seconds and the memory of each phase beside the plan."""
    model = make_model(f"{folder}/trained", SMALL, **changes)
    data = Path(folder, "data.jsonl")
    problems = [{"question": f"{k} + {k} = ?", "answer": f"#### {2 * k}"} for k in range(256)]
    data.write_text("\n".join(map(json.dumps, problems)))
    task = ROOT / "tools" / "bench_task.py"
    words = ["--model", model, "--data", str(data), "--task", str(task)]
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    # The run reads what is held on the whole card. What others hold, this process with its CUDA
    # context among them, is not the run's.
    held = held_gib()
    steps = train_steps(words, f"{folder}/run")
    return step_figures(steps) | {"phases": phases(steps, held, planned(words))}


def train_steps(words: list[str], run_dir: str) -> list[dict]:
    """The lines of metrics.jsonl of a run of train.py with these flags."""
    command = [sys.executable, str(ROOT / "train.py"), *words, "--run_dir", run_dir]
    subprocess.run(command, check=True)
    return read_lines(Path(run_dir, "metrics.jsonl"))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def step_figures(steps: list[dict]) -> dict:
    """Medians of all steps but the first, and how far the sampler is from the trainer."""
    for step in steps:
        assert step["policy_tokens"] > 0, f"a step without a policy update: {step}"
    counted = steps[1:]
    figures = {"step_s": statistics.median(step["seconds"] for step in counted)}
    figures["tokens_per_s"] = statistics.median(step["tokens_per_second"] for step in counted)
    for name, expected in (("ratio", 1), ("approx_kl", 0)):
        if name in steps[0]:
            far = max(abs(step[name] - expected) for step in steps)
            figures[f"{name}_off_by"] = far
    return figures


def phases(steps: list[dict], held: float, plan: dict[str, dict]) -> dict[str, dict]:
    """{phase: its median seconds and its peak in GiB in all steps but the first, and the plan's}.

    held: GiB on the card before the run. The critic's seconds are those of its values too.
    """
    found = {}
    for phase in plan:
        seconds = [step[f"seconds_{phase}"] for step in steps[1:]]
        if phase == "critic":
            seconds = [x + step["seconds_values"] for x, step in zip(seconds, steps[1:])]
        peak = max(step[f"memory_{phase}"] for step in steps[1:])
        found[phase] = {"seconds": statistics.median(seconds), "gib": peak - held} | plan[phase]
    return found


def planned(words: list[str]) -> dict[str, dict]:
    """{phase: planned_gib, planned_seconds} of a run with these flags on this card.

    The plan of a machine without a GPU is an H100's.
    """
    cfg = train.parse_flags(words)
    config = memory.model_config(cfg.model)
    name = "H100"
    card_gb = 80.0
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        card_gb = torch.cuda.mem_get_info()[1] / memory.GIB / memory.VISIBLE
    plan = memory.estimate(cfg, config, 1, card_gb)
    found = {phase: {"planned_gib": plan.peak(phase)} for phase in plan.phases}
    card = data_sheet(name, card_gb)
    if card:
        times = cost.Times(cfg, config, 1, card, length_share=1.0)
        for phase, seconds in times.of_step(plan.kv_tokens).items():
            found[phase]["planned_seconds"] = seconds
    return found


def data_sheet(name: str, card_gb: float) -> cost.Card | None:
    """The card of tools/cost.py whose name is a word of this name, or None: of several the nearest
    in memory."""
    words = name.upper().replace("-", " ").split()
    known = [key for key in cost.CARDS if set(key.split("-")[:1]) <= set(words)]

    def distance(key: str) -> tuple:
        return ("PCIE" in words) != ("PCIE" in key), abs(cost.CARDS[key][0] - card_gb)

    if not known:
        return None
    return cost.find_card(min(known, key=distance))


# ---- the laboratory --------------------------------------------------------------------------


def bench_lab(folder: str, device: torch.device) -> dict:
    """Held-out accuracy before and after the laboratory's run of PPO, as `make lab` makes it."""
    begin = time.perf_counter()
    tool = str(ROOT / "tools" / "countdown.py")
    subprocess.run([sys.executable, tool, f"{folder}/base"], check=True)
    words = shlex.split(Path(folder, "base", "flags.txt").read_text())
    steps = train_steps([*words, "--seed", "1"], f"{folder}/run")
    accuracies = [line["accuracy"] for line in read_lines(Path(folder, "run", "eval.jsonl"))]
    return {
        "lab_s": time.perf_counter() - begin,
        "lab_step_s": statistics.median(step["seconds"] for step in steps),
        "accuracy_before": accuracies[0],
        "accuracy_after": accuracies[-1],
    }


# ---- the table -------------------------------------------------------------------------------


PPO_FLAGS = CRITIC_FLAGS | TINY_FLAGS
FOUR_LAYERS = Learning(LARGE, "_7b", {"num_hidden_layers": 4})
TINY_LEARNING = functools.partial(Learning, changes=TINY, row=64, sample=32, prompt=8)

# A part is a function of a folder and a device.
PARTS_ON_GPU = {
    "attention": functools.partial(bench_attention, case=Learning(SMALL, "")),
    "attention7b": functools.partial(bench_attention, case=FOUR_LAYERS),
    "advantages": bench_advantages,
    "sampling": functools.partial(bench_sampling, case=Sampling()),
    "step": functools.partial(bench_step, flags=STEP_FLAGS),
    "zero2": functools.partial(bench_step, flags=CRITIC_FLAGS | {"zero_stage": 2}),
    "zero3": functools.partial(bench_step, flags=CRITIC_FLAGS | {"zero_stage": 3}),
    "lab": bench_lab,
}
# The laboratory is made for a CPU, and has its own sizes here too.
PARTS_ON_CPU = {
    "attention": functools.partial(bench_attention, case=TINY_LEARNING(SMALL, "")),
    "attention7b": functools.partial(bench_attention, case=TINY_LEARNING(LARGE, "_7b")),
    "advantages": functools.partial(bench_advantages, samples=64, longest=50),
    "sampling": functools.partial(bench_sampling, case=Sampling(TINY, (4, 8), 16, 0.25)),
    "step": functools.partial(bench_step, flags=STEP_FLAGS | TINY_FLAGS, **TINY),
    "zero2": functools.partial(bench_step, flags=PPO_FLAGS | {"zero_stage": 2}, **TINY),
    "zero3": functools.partial(bench_step, flags=PPO_FLAGS | {"zero_stage": 3}, **TINY),
    "lab": bench_lab,
}


def main(part: str, folder: str) -> None:
    device = start_distributed()[2]
    parts = PARTS_ON_CPU
    if device.type == "cuda":
        parts = PARTS_ON_GPU
    figures = parts[part](folder, device)
    Path(folder, "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    code = 0
    try:
        main(*sys.argv[1:])
    # What failed has said why. Its last line is shown for the part.
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    # gloo's threads can abort a finalising interpreter.
    os._exit(code)
