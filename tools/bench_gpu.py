"""What bench.py's part `gpu` starts, on a machine with an NVIDIA GPU: `python tools/bench.py gpu`.

Models have the shapes of Qwen2.5 and random weights, which are made on the spot: 0.5B whole, and
four layers of 7B with its embedding and head. Each part is a process of its own, so that the card
is empty before it, and what fails does not take the others with it:

    attention   updates of 0.5B, rows of 16,384 tokens in samples of 4,096: varlen, sdpa, and
                FlashAttention 2 where it is installed; model flops against a large product
    attention7b the same with four layers of 7B
    advantages  GAE of 8,192 samples of up to 8,000 tokens, on the GPU and on the CPU
    sampling    0.5B in vLLM: tokens/s, the seconds of sleep, wake and sync
    step        GRPO steps of 16 x 16 samples of 512 tokens of 0.5B by train.py; memory / plan

It prints a table, a row for docs/scaling.md, and one JSON line at the end. It ends with exit code 2
where torch finds no GPU.
"""

import contextlib
import functools
import gc
import itertools
import json
import os
import signal
import statistics
import string
import subprocess
import sys
import tempfile
import time
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
from lib import memory, models
from lib.common import start_distributed
from lib.head import ChunkedHead

ROOT = Path(__file__).parent.parent
SMALL = "Qwen/Qwen2.5-0.5B"
LARGE = "Qwen/Qwen2.5-7B"
STOPS = ["User:", "Human:", "Assistant:", "</answer>"]
# One round of verl 0.8.0 with vLLM 0.12 on one H100, of 16 x 16 samples of at most 512 tokens, has
# 6.39 s (github.com/chrisjmccormick/stacks, stacks/qwen-gsm8k). Its responses may end earlier, and
# ours never do.
VERL_SECONDS = 6.39
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
    "log_with": "none",
}
TARGETS = {"varlen_vs_sdpa": ">= 3", "varlen_vs_sdpa_7b": ">= 1", "mfu_7b": ">= 0.35"}
TARGETS |= {"advantages_s": "<= 1", "sync_s": "<= 3", "step_vs_verl": "<= 1"}
TARGETS |= dict.fromkeys(("memory_vs_plan_rollout", "memory_vs_plan_policy"), "0.9 to 1.1")
SHARES = ("mfu", "mfu_7b", "head_share", "head_share_7b", "stops_256", "stops_1024")
# The columns of the table in docs/scaling.md, and the figures in each.
COLUMNS = {
    "card, driver, torch": ("card", "driver", "torch"),
    "varlen / sdpa: 0.5B, 7B": ("varlen_vs_sdpa", "varlen_vs_sdpa_7b"),
    "MFU: 0.5B, 7B": ("mfu", "mfu_7b"),
    "head's share: 0.5B, 7B": ("head_share", "head_share_7b"),
    "advantages, s": ("advantages_s",),
    "tokens/s: 256, 1,024 in flight": ("tokens_per_s_256", "tokens_per_s_1024"),
    "with / without stop strings": ("stops_256", "stops_1024"),
    "sleep, wake, sync, s": ("sleep_s", "wake_s", "sync_s"),
    "memory / plan: rollout, policy": ("memory_vs_plan_rollout", "memory_vs_plan_policy"),
    "GRPO step, s": ("step_s",),
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
    """Random bf16 weights in a shape of lib/memory.py, changed in some fields of its config."""
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
    batch = ppo.Batch(prompts, responses, groups, rewards, device, {})
    batch.tokens["advantages"] = torch.ones(case.responses, device=device)  # (T,)
    return batch


def attentions() -> list[str]:
    """What this machine can attend with in bf16."""
    names = ["sdpa"]
    if torch.cuda.is_available():
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
        ppo.update, policy, ppo.policy_loss, batch, batch.everyone(), 0.0, cfg
    )
    seconds = {}
    for name in attentions():
        body.set_attn_implementation(name)
        seconds[name] = median_seconds(update)
    best = attentions()[0]
    body.set_attn_implementation(best)
    body.gradient_checkpointing_disable()
    kept = median_seconds(update)
    tokens = case.rows * case.row
    work = model_flops(body.config, case)
    figures = {
        "varlen_vs_sdpa": seconds["sdpa"] / seconds[best],
        "mfu": work / seconds[best] / peak_flops(device),
        "head_share": head_seconds(body, case.responses, device) / seconds[best],
        "without_checkpointing": seconds[best] / kept,
        "train_tokens_per_s": tokens / seconds[best],
    }
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
        batch = ppo.Batch([[1]] * samples, responses, groups, rewards, place, {})
        batch.tokens["values"] = torch.zeros(sum(lengths), device=place)  # (T,)
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


def bench_sampling(folder: str, device: torch.device, case: Sampling) -> dict:
    """Tokens/s with a full batch; a model of random weights hardly ever ends a response."""
    model = make_model(f"{folder}/sampled", SMALL, **case.changes)
    most = max(case.in_flight)
    cfg = make_config(model, max_len=1024, micro_rollout_batch_size=most)
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
    requests = rollout.make_requests([problem], count, (0, "bench"), (tokens, 1.0, 1.0))
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
    sleep = settled_seconds(sampler.sleep)
    sync = settled_seconds(functools.partial(sampler.sync, models.named_weights(policy)))
    sampler.llm.wake_up = wake_up
    return {"sleep_s": sleep, "wake_s": sum(waking), "sync_s": sync}


# ---- whole steps -----------------------------------------------------------------------------


def bench_step(folder: str, device: torch.device, flags: dict, **changes) -> dict:
    """Steps of a run of train.py, and what they held against the plan."""
    model = make_model(f"{folder}/trained", SMALL, **changes)
    data = Path(folder, "data.jsonl")
    problems = [{"question": f"{k} + {k} = ?", "answer": f"#### {2 * k}"} for k in range(256)]
    data.write_text("\n".join(map(json.dumps, problems)))
    task = ROOT / "tools" / "bench_task.py"
    words = [str(ROOT / "train.py"), "--model", model, "--data", str(data), "--reward", str(task)]
    words += ["--run_dir", f"{folder}/run"]
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    # The run reads what is held on the whole card. What others hold, this process with its CUDA
    # context among them, is not the run's.
    held = held_gib()
    subprocess.run([sys.executable, *words], check=True, stdout=sys.stderr)
    lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    figures = step_figures([json.loads(line) for line in lines], held)
    return figures | against_plan(train.parse_flags(words[1:]), figures)


def step_figures(steps: list[dict], held: float) -> dict:
    """Medians and peaks of all steps but the first, from the lines of metrics.jsonl.

    held: GiB on the card before the run.
    """
    for step in steps:
        assert step["policy_tokens"] > 0, f"a step without a policy update: {step}"
    counted = steps[1:]
    seconds = statistics.median(step["seconds"] for step in counted)
    figures = {"step_s": seconds, "step_vs_verl": seconds / VERL_SECONDS}
    for phase in ("rollout", "policy", "sync"):
        of_phase = [step[f"seconds_{phase}"] for step in counted]
        figures[f"seconds_{phase}"] = statistics.median(of_phase)
        peak = max(step[f"memory_{phase}"] for step in counted)
        figures[f"memory_{phase}_gib"] = peak - held
    return figures


def against_plan(cfg, figures: dict) -> dict:
    """What a phase held at its end over what is planned for it."""
    card_gb = 80.0
    if torch.cuda.is_available():
        card_gb = torch.cuda.mem_get_info()[1] / memory.GIB / memory.VISIBLE
    plan = memory.estimate(cfg, memory.model_config(cfg.model), 1, card_gb)
    ratios = {}
    for phase in ("rollout", "policy"):
        ratios[f"memory_vs_plan_{phase}"] = figures[f"memory_{phase}_gib"] / plan.peak(phase)
    return ratios


# ---- the table -------------------------------------------------------------------------------

PARTS = {
    "attention": functools.partial(bench_attention, case=Learning(SMALL, "")),
    "attention7b": functools.partial(
        bench_attention, case=Learning(LARGE, "_7b", {"num_hidden_layers": 4})
    ),
    "advantages": bench_advantages,
    "sampling": functools.partial(bench_sampling, case=Sampling()),
    "step": functools.partial(bench_step, flags=STEP_FLAGS),
}


# Seconds. Together they are the five minutes that the bench may take. No card has tried them yet.
LIMITS = {"attention": 50, "attention7b": 45, "advantages": 35, "sampling": 80, "step": 90}


def run_part(name: str, folder: str, seconds: float) -> dict:
    """The figures that a process of its own prints, or why there are none."""
    try:
        return figures_of([sys.executable, __file__, name, folder], seconds)
    except subprocess.TimeoutExpired as error:
        return {f"failed_{name}": f"it took more than {error.timeout:.0f} s"}
    except ValueError as error:
        return {f"failed_{name}": str(error)}


def figures_of(command: list[str], seconds: float) -> dict:
    """The JSON object on the last line that a process prints; all that it started ends with it.

    Raises TimeoutExpired, or ValueError with the last line of what went wrong.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        finally:
            # A train.py that it started would go on, and hold the card that the next part measures.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        lines = errors.strip().splitlines() or ["no word"]
        raise ValueError(lines[-1])
    return json.loads(output.splitlines()[-1])


def machine() -> dict:
    driver = subprocess.check_output(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True
    )
    name = torch.cuda.get_device_name()
    return {"card": name, "driver": driver.splitlines()[0], "torch": torch.__version__}


def row(figures: dict) -> str:
    """A row of the table in docs/scaling.md."""
    cells = []
    for names in COLUMNS.values():
        cells.append(", ".join(shown(figures.get(name, "failed")) for name in names))
    return f"| {' | '.join(cells)} |"


def shown(figure) -> str:
    """Three digits, and all of a large number."""
    if isinstance(figure, str):
        return figure
    if abs(figure) >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.3g}"


def main() -> None:
    if not torch.cuda.is_available():
        print("error: torch finds no GPU, and this bench needs one", file=sys.stderr)
        sys.exit(2)
    begin = time.perf_counter()
    about = machine()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        deadline = begin
        for part in PARTS:
            # What a part leaves of its time the next one may use.
            deadline += LIMITS[part]
            found = run_part(part, folder, deadline - time.perf_counter())
            for name, value in found.items():
                print(f"{name:28} {shown(value):>12}  target {TARGETS.get(name, '-')}", flush=True)
            figures |= found
    figures["bench_s"] = time.perf_counter() - begin
    # Ratios come first: they mean something on another card too.
    ratios = {name: figures[name] for name in figures if "_vs_" in name or name in SHARES}
    line = ratios | figures | about
    print(row(line))
    print(json.dumps(line))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        part, place = sys.argv[1:]
        print(json.dumps(PARTS[part](place, start_distributed()[2])), flush=True)
        # gloo's threads can abort a finalising interpreter.
        os._exit(0)
    main()
