"""How fast, and against what: `python tools/bench.py [part ...]`.

Each figure is a ratio of A and B, which are measured in turn in one run. The parts:

    reward     checks a second on a GSM8K-like mix; are verdicts the same with 1 and 16 workers?
    rollout    Sampler.generate against bare LLM.generate; weight sync against a plain copy
    update     policy and critic update against a bare transformers forward and backward over the
               same tokens; the full ORZ pipeline against the lean one
    growth     how the time of a policy update grows with the tokens
    ranks      two ranks of one thread against one rank of one thread
    memory     the chunked head against full logits, with a vocabulary of 151,936
    step       whole steps of train.py: the share that is neither generation nor learning
    trl        whole GRPO steps of TRL against ours (`make bench` installs TRL into .venv/trl)

`make card` measures a machine with an NVIDIA GPU instead (tools/card.py).

It prints a table with medians, spreads and targets, and one JSON line at the end. Models are
random. `tiny` has the demo's shape. `small` has 30 M parameters and a vocabulary of 32,768, and
its samples have 16 to 512 tokens.
"""

import dataclasses
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

# As in train.py, before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import ppo
import reward
import rollout
import train
from lib import models
from lib.common import ALONE, start_distributed
from lib.head import ChunkedLogprob

ROOT = Path(__file__).parent.parent
TRL_PYTHON = Path(sys.prefix) / "trl" / "bin" / "python"
# Vocabulary, hidden size, intermediate size, layers, heads.
SIZES = {"small": (32768, 512, 1408, 4, 8), "tiny": (20, 128, 512, 2, 4)}
# What only sympy can tell, as MATH's labels have it: a label, a right and a wrong form of it.
FORMS = (
    (r"\frac{{{a}}}{{{b}}}x", r"\frac{{{a}x}}{{{b}}}", r"\frac{{{b}x}}{{{a}}}"),
    (r"{a}\sqrt{{{b}}}", r"\sqrt{{{b}}}\cdot {a}", r"{b}\sqrt{{{a}}}"),
)
# Of all runs of train.py here.
RUN_FLAGS = {
    "template": "demo",
    "stop": "",
    "zero_stage": 0,
    "bf16": "false",
    "gradient_checkpointing": "false",
    "save_interval": 0,
}
STEP_FLAGS = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 8,
    "max_steps": 3,
    "prompt_max_len": 64,
    "generate_max_len": 256,
    "max_len": 512,
    "packing_max_len": 512,
    "micro_train_batch_size": 2,
    "critic_updates": 2,
}
TARGETS = {
    "checks_per_s": ">= 2000",
    "verdicts_differ": "== 0",
    "rollout_vs_vllm": ">= 0.95",
    "sync_vs_copy": "<= 3",
    "policy_vs_bare": ">= 0.9",
    "critic_vs_bare": ">= 0.9",
    "full_vs_lean": ">= 1.25",
    "ranks_2_vs_1": ">= 1.8",
    "memory_vs_full_logits": "<= 0.15",
    "scaling_exponent": "0.9 to 1.1",
    "overhead_share": "<= 0.03",
    "trl_vs_ours_small": ">= 1.5",
    "trl_vs_ours_tiny": ">= 1",
    "phases_share": ">= 0.98",
}


# ---- tools -----------------------------------------------------------------------------------


def seconds_of(function) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def warm_seconds_of(function) -> float:
    """Seconds of a second call."""
    function()
    return seconds_of(function)


def spread(numbers: list[float]) -> str:
    return f"{min(numbers):.2f} to {max(numbers):.2f}"


def compare(ours, theirs, rounds: int = 5) -> tuple[float, str]:
    """Median and spread of time(theirs) / time(ours) in turn, after one unmeasured round."""
    ours()
    theirs()
    ratios = []
    for _ in range(rounds):
        our_seconds = seconds_of(ours)
        ratios.append(seconds_of(theirs) / our_seconds)
    return statistics.median(ratios), spread(ratios)


def outer_environment() -> dict[str, str]:
    """The environment for a process that is not of this one's process group."""
    left_out = {*ALONE, "LOCAL_WORLD_SIZE"}
    return {key: value for key, value in os.environ.items() if key not in left_out}


def start_process(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def last_line(command: list[str]) -> object:
    """The JSON value on the last line that a process prints."""
    environment = outer_environment()
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def demo_base(folder: str) -> str:
    """The demo's base model, made once. All models here have its tokenizer."""
    base = f"{folder}/base"
    if not Path(base).exists():
        command = [sys.executable, str(ROOT / "tools" / "demo.py"), base, "--seed", "1"]
        subprocess.run(command, check=True, capture_output=True, env=outer_environment())
    return base


def make_model(folder: str, size: str) -> str:
    """A random Qwen2: `small`, 30 M parameters, or `tiny`, the demo's half a million."""
    vocab, hidden, intermediate, layers, heads = SIZES[size]
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    path = f"{folder}/{size}"
    Qwen2ForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(demo_base(folder)).save_pretrained(path)
    return path


def make_config(model: str, **changes) -> train.Config:
    """train.py's settings for one CPU in fp32, with rows of 512 tokens, two in a micro-batch."""
    settings = {
        "model": model,
        "data": ["-"],
        "stop": [],
        "bf16": False,
        "zero_stage": 0,
        "gradient_checkpointing": False,
        "attention": "sdpa",
        "max_len": 512,
        "packing_max_len": 512,
        "micro_train_batch_size": 2,
        "prompt_max_len": 64,
        "max_norm": 0.0,
        "critic_updates": 1,
    }
    return train.Config(**settings | changes)


def make_batch(samples: int, longest: int, vocab: int) -> ppo.Batch:
    """Random tokens with advantages, values and returns.

    A prompt has 8 tokens, and responses are spread evenly from 16 tokens to `longest` - 8.
    """
    rng = random.Random(0)
    lengths = np.linspace(16, longest - 8, samples).astype(int).tolist()
    rng.shuffle(lengths)
    prompts = []
    responses = []
    for length in lengths:
        tokens = [rng.randrange(1, vocab) for _ in range(length + 8)]
        prompts.append(tokens[:8])
        responses.append(tokens[8:])
    groups = torch.arange(samples)  # (N,)
    rewards = torch.ones(samples, dtype=torch.float64)  # (N,)
    batch = ppo.Batch(prompts, responses, groups, rewards, torch.device("cpu"), {}, [])
    generator = torch.Generator().manual_seed(0)
    for key in ("advantages", "values", "returns"):
        batch.per_token[key] = torch.randn(sum(lengths), generator=generator)  # (T,)
    return batch


# ---- learning --------------------------------------------------------------------------------


def make_update(engine, loss_fn, batch: ppo.Batch, cfg):
    """An update of all samples without arguments. Its learning rate is 0."""
    return functools.partial(ppo.update, engine, loss_fn, batch, batch.all_indices(), 0.0, cfg)


def bare_pass(model, head, batch: ppo.Batch, groups: list[list[int]]) -> None:
    """Forward and backward by transformers alone, with right-padded groups and full logits.

    Causal attention does not see the padding, which is behind.
    """
    for group in groups:
        ids = [torch.tensor(batch.prompt_ids[i] + batch.response_ids[i]) for i in group]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # (R, L)
        hidden = model(padded, use_cache=False).last_hidden_state  # (R, L, H)
        last = torch.tensor([batch.sample_lengths[i] - 1 for i in group])  # (R,)
        keep = torch.arange(padded.shape[1] - 1) < last[:, None]  # (R, L - 1)
        output = F.linear(hidden[:, :-1][keep], head)  # (T, V) or (T, 1)
        if len(head) > 1:
            loss = F.cross_entropy(output, padded[:, 1:][keep])
        else:
            loss = output.square().mean()
        loss.backward()


def best_bare_pass(model, head, batch: ppo.Batch):
    """The fastest bare pass of three, over groups of 1, 2 and 4 samples of about one length."""
    by_length = sorted(batch.all_indices(), key=batch.sample_lengths.__getitem__)
    passes = []
    for count in (1, 2, 4):
        starts = range(0, len(by_length), count)
        groups = [by_length[start : start + count] for start in starts]
        passes.append(functools.partial(bare_pass, model.base_model, head, batch, groups))
    return min(passes, key=warm_seconds_of)


def bench_update(folder: str) -> dict:
    """Whole updates of `small`, optimizer included, against bare passes without one."""
    model = make_model(folder, "small")
    cfg = make_config(model)
    batch = make_batch(8, 512, 32768)
    policy = models.make_policy(cfg)
    critic = models.make_critic(cfg)
    update_policy = make_update(policy, ppo.policy_loss, batch, cfg)
    update_critic = make_update(critic, ppo.critic_loss, batch, cfg)

    bare_policy = AutoModelForCausalLM.from_pretrained(model)
    head = bare_policy.get_output_embeddings().weight  # (V, H)
    policy_pass = best_bare_pass(bare_policy, head, batch)
    bare_critic = AutoModel.from_pretrained(model)
    value_head = torch.nn.Parameter(torch.randn(1, 512))  # (1, H)
    critic_pass = best_bare_pass(bare_critic, value_head, batch)

    def lean() -> None:
        ppo.compute_values(critic, batch, cfg)
        update_critic()
        update_policy()

    def full() -> None:
        """ORZ passes the old policy and the reference too."""
        lean()
        ppo.compute_logprobs(policy, batch, cfg)
        ppo.compute_logprobs(policy, batch, cfg)

    return {
        "policy_vs_bare": compare(update_policy, policy_pass),
        "critic_vs_bare": compare(update_critic, critic_pass),
        "full_vs_lean": compare(lean, full),
    }


def bench_growth(folder: str) -> dict:
    """The exponent of time against tokens, `tiny`: five rounds of three sizes in turn."""
    model = make_model(folder, "tiny")
    cfg = make_config(model, packing_max_len=128, micro_train_batch_size=16)
    policy = models.make_policy(cfg)
    counts = (128, 512, 2048)
    updates = []
    for count in counts:
        batch = make_batch(count, 128, 20)
        updates.append(make_update(policy, ppo.policy_loss, batch, cfg))
    slopes = []
    for _ in range(6):
        times = [seconds_of(update) for update in updates]
        slope, _ = np.polyfit(np.log(counts), np.log(times), 1)
        slopes.append(slope)
    # The first round is not counted.
    slopes = slopes[1:]
    note = f"{spread(slopes)}; {counts[0]} to {counts[-1]} samples, at last {times[-1]:.1f} s"
    return {"scaling_exponent": (float(statistics.median(slopes)), note)}


def rank_worker(model: str) -> None:
    """Under torchrun: prints the tokens/s of a policy and a critic update of 64 samples.

    Each rank has one thread. With fewer samples, what does not shrink with a rank's tokens
    (gradients and parameters that are moved, the optimizer) takes over: docs/LOG.md.
    """
    rank, *_ = start_distributed()
    torch.set_num_threads(1)
    cfg = make_config(model)
    policy = models.make_policy(cfg)
    critic = models.make_critic(cfg)
    # The first batch is not measured.
    for samples in (8, 64):
        batch = make_batch(samples, 512, 32768)
        seconds = seconds_of(make_update(policy, ppo.policy_loss, batch, cfg))
        seconds += seconds_of(make_update(critic, ppo.critic_loss, batch, cfg))
    if rank == 0:
        print(json.dumps(sum(batch.sample_lengths) / seconds))


def start_ranks(ranks: int, model: str) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc_per_node", str(ranks)]
    environment = outer_environment() | {"OMP_NUM_THREADS": "1"}
    return start_process([*launcher, __file__, "--ranks", model], environment)


def read_speed(process: subprocess.Popen) -> float:
    output, _ = process.communicate()
    return json.loads(output.splitlines()[-1])


def bench_ranks(folder: str) -> dict:
    """One rank, two ranks, and two runs of one rank at once as the ceiling, thrice in turn."""
    model = make_model(folder, "small")
    ratios = []
    ceilings = []
    for _ in range(3):
        one = read_speed(start_ranks(1, model))
        two = read_speed(start_ranks(2, model))
        ratios.append(two / one)
        apart = [start_ranks(1, model), start_ranks(1, model)]
        ceilings.append(sum(map(read_speed, apart)) / one)
    ceiling = statistics.median(ceilings)
    note = f"{spread(ratios)}; two runs that share nothing: {ceiling:.2f}"
    return {"ranks_2_vs_1": (statistics.median(ratios), note)}


def head_worker(way: str) -> None:
    """Prints the KiB that log-probs of 8,192 tokens add to the peak, forward and backward."""
    vocab = 151936
    hidden = torch.randn(8192, 896, requires_grad=True)  # (T, H)
    weight = torch.randn(vocab, 896, requires_grad=True)  # (V, H)
    token_ids = torch.randint(vocab, (8192,))  # (T,)
    before = peak()
    if way == "chunked":
        chunk = 2**23 // vocab
        logprobs, _ = ChunkedLogprob.apply(hidden, weight, token_ids, 1.0, chunk)  # (T,)
    else:
        scores = F.linear(hidden, weight).log_softmax(-1)  # (T, V)
        logprobs = scores.gather(1, token_ids[:, None])[:, 0]  # (T,)
    logprobs.sum().backward()
    print(json.dumps(peak() - before))


def peak() -> int:
    """The most memory this process has held, in KiB. getrusage may give the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def bench_memory(folder: str) -> dict:
    """8,192 tokens at Qwen2.5-0.5B's head, each way in a process of its own."""
    chunked = last_line([sys.executable, __file__, "--head", "chunked"])
    full = last_line([sys.executable, __file__, "--head", "full"])
    note = f"{chunked / 2**20:.2f} of {full / 2**20:.2f} GiB"
    return {"memory_vs_full_logits": (chunked / full, note)}


# ---- sampling and grading --------------------------------------------------------------------


def bench_rollout(folder: str) -> dict:
    """1,024 sequences of the demo's shape: our engine with and without our loop around it."""
    tiny = make_model(folder, "tiny")
    sampler = rollout.Sampler(make_config(tiny, max_len=64, micro_rollout_batch_size=1024))
    problems = []
    for k in range(64):
        prompt_ids = [1 + k % 9, 11, 1 + k // 9 % 9, 15]
        problems.append(SimpleNamespace(prompt_ids=prompt_ids))
    requests = rollout.make_requests(
        problems, rollout.problem_seeds(0, 0, "bench", len(problems)), 16, 48, 1.0, 1.0
    )

    def ours() -> None:
        list(sampler.generate(requests))

    bare = functools.partial(bare_generate, sampler.llm, requests)
    generation = compare(ours, bare)

    small = make_model(folder, "small")
    cfg = make_config(small, micro_rollout_batch_size=8, kv_cache_gb=0.5)
    policy = models.make_policy(cfg)
    synced = rollout.Sampler(cfg)

    def copy() -> None:
        for _, weight in models.named_weights(policy):
            weight.clone()

    def sync() -> None:
        synced.sync(models.named_weights(policy))

    return {"rollout_vs_vllm": generation, "sync_vs_copy": compare(copy, sync)}


def bare_generate(llm, requests: list) -> None:
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    prompts = []
    params = []
    for request in requests:
        prompts.append(tokens_input(request.problem.prompt_ids))
        settings = {"seed": request.seed, "max_tokens": request.max_tokens, "detokenize": False}
        params.append(SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY))
    llm.generate(prompts, params, use_tqdm=False)


def reward_pairs(count: int) -> list[tuple[str, str]]:
    """(predicted, label), half of them equal: 97 % numbers as in GSM8K, 3 % expressions."""
    rng = random.Random(0)
    pairs = []
    for k in range(count):
        a = rng.randint(1, 9999)
        b = rng.randint(2, 99)
        is_right = rng.random() < 0.5
        if k % 33 == 0:
            label, right, wrong = (form.format(a=a, b=b) for form in rng.choice(FORMS))
        else:
            label = str(a)
            right = rng.choice((f"{a}", f"{a:,}", f"\\${a}", f"{a}.00", f"{a} dollars"))
            wrong = str(a + b)
        pairs.append((right if is_right else wrong, label))
    return pairs


def grade(pairs: list[tuple[str, str]], workers: int) -> tuple[dict, float, int]:
    """Verdicts, seconds and time-outs of a grader with that many workers."""
    with reward.Grader(workers=workers) as grader:
        # This starts the processes, as the first step of a run does.
        for k in range(workers):
            grader.compare(k, f"x+y+{k}", f"y+{k}+x")
        grader.results()
        begin = time.perf_counter()
        for k, (predicted, label) in enumerate(pairs):
            grader.submit(k, f"<answer>\\boxed{{{predicted}}}</answer>", "stop", label)
        verdicts = grader.results()
        seconds = time.perf_counter() - begin
        counts = grader.counts
        return verdicts, seconds, counts["cpu_timeouts"] + counts["wall_timeouts"]


def bench_reward(folder: str) -> dict:
    """Checks a second with 2 workers, extraction included; do verdicts depend on workers?"""
    pairs = reward_pairs(8192)
    of_one, _, timeouts_1 = grade(pairs, 1)
    _, seconds, timeouts_2 = grade(pairs, 2)
    of_16, _, timeouts_16 = grade(pairs, 16)
    differ = sum(of_one[k] != of_16[k] for k in range(len(pairs)))
    timeouts = timeouts_1 + timeouts_2 + timeouts_16
    return {
        "checks_per_s": (round(len(pairs) / seconds), "2 workers"),
        "pairs": (len(pairs), ""),
        "verdicts_differ": (differ, "1 against 16 workers"),
        "timeouts": (timeouts, ""),
    }


# ---- whole steps -----------------------------------------------------------------------------


def write_problems(path: str, numbers: range) -> None:
    """All sums of two of the numbers, in GSM8K's form."""
    lines = []
    for a in numbers:
        for b in numbers:
            lines.append(json.dumps({"question": f"{a}+{b}", "answer": f"#### {a + b}"}))
    Path(path).write_text("\n".join(lines))


def train_steps(run_dir: str, flags: dict) -> tuple[list[dict], list[float]]:
    """The lines of metrics.jsonl of a run of train.py, and the times at which it reported them.

    Every second response counts as right there.
    """
    command = [sys.executable, str(ROOT / "train.py"), "--run_dir", run_dir]
    command += ["--task", str(ROOT / "tools" / "bench_task.py")]
    for name, value in (RUN_FLAGS | flags).items():
        command += [f"--{name}", str(value)]
    process = start_process(command, outer_environment())
    times = []
    for line in process.stdout:
        if line.startswith("step "):
            times.append(time.perf_counter())
    if process.wait() != 0:
        sys.exit(f"error: {command} failed with exit code {process.returncode}")
    lines = []
    for line in Path(f"{run_dir}/metrics.jsonl").read_text().splitlines():
        lines.append(json.loads(line))
        assert lines[-1]["policy_tokens"] > 0, f"a step without a policy update: {line}"
    return lines, times


def bench_step(folder: str) -> dict:
    """Three steps of train.py on `small`; of the last one what is not rollout or learning."""
    data = f"{folder}/data.jsonl"
    write_problems(data, range(10, 18))
    flags = STEP_FLAGS | {"model": make_model(folder, "small"), "data": data}
    lines, times = train_steps(f"{folder}/run", flags)
    line = lines[-1]
    whole = times[-1] - times[-2]
    work = sum(line[f"seconds_{phase}"] for phase in ("rollout", "values", "critic", "policy"))
    # Ranks wait within a phase.
    phases = {key for key in line if key.startswith("seconds_")} - {"seconds_waited"}
    in_phases = sum(line[key] for key in phases)
    note = f"of a step of {whole:.1f} s, reports and TensorBoard included"
    return {
        "overhead_share": (1 - work / whole, note),
        "phases_share": (in_phases / line["seconds"], "seconds of all phases / of the step"),
    }


@dataclasses.dataclass
class TrlCase:
    """The sizes of a step that TRL and train.py both make."""

    name: str
    model: str
    prompts: int
    samples: int  # of each prompt
    longest: int  # tokens of a response
    rows: int  # of our micro-batch


def bench_trl(folder: str) -> dict:
    """64 x 16 samples of the demo's base model; 4 x 8 samples of 96 tokens of `small`."""
    tiny = TrlCase("tiny", demo_base(folder), 64, 16, 48, 64)
    small = TrlCase("small", make_model(folder, "small"), 4, 8, 96, 16)
    return compare_with_trl(folder, tiny) | compare_with_trl(folder, small)


def compare_with_trl(folder: str, case: TrlCase) -> dict:
    """Three rounds of each in turn, each the median of steps 2 to 4."""
    data = f"{folder}/trl.jsonl"
    write_problems(data, range(10, 26))
    # TRL's best number of micro-batches is found in the first round.
    candidates = [1, 4]
    ratios = []
    for number in range(3):
        lines = our_steps(case, data, f"{folder}/{case.name}{number}")
        ours = statistics.median(line["seconds"] for line in lines[1:])
        theirs = {parts: trl_seconds(case, data, parts) for parts in candidates}
        best = min(theirs, key=theirs.get)
        candidates = [best]
        ratios.append(theirs[best] / ours)
    length = statistics.mean(line["response_length"] for line in lines)
    size = f"{case.prompts} x {case.samples} x {length:.0f} tokens"
    note = f"{spread(ratios)}; {ours:.1f} s a step of {size}"
    return {f"trl_vs_ours_{case.name}": (statistics.median(ratios), note)}


def our_steps(case: TrlCase, data: str, run_dir: str) -> list[dict]:
    """Lines of metrics.jsonl of four GRPO steps."""
    flags = {
        "model": case.model,
        "data": data,
        "estimator": "grpo",
        "rollout_batch_size": case.prompts,
        "n_samples_per_prompt": case.samples,
        "max_steps": 4,
        "prompt_max_len": 16,
        "generate_max_len": case.longest,
        "max_len": case.longest + 16,
        "packing_max_len": case.longest + 16,
        "micro_train_batch_size": case.rows,
        "micro_rollout_batch_size": case.prompts * case.samples,
        "actor_learning_rate": 1e-9,
        "log_with": "none",
        "eval_interval": 0,
    }
    lines, _ = train_steps(run_dir, flags)
    return lines


def trl_seconds(case: TrlCase, data: str, parts: int) -> float:
    """Of a step of TRL, whose samples go through the model in `parts` micro-batches."""
    script = str(ROOT / "tools" / "bench_trl.py")
    sizes = map(str, (case.prompts, case.samples, case.longest, parts))
    steps = last_line([str(TRL_PYTHON), script, case.model, data, *sizes])
    return statistics.median(steps[1:])


# ---- the table -------------------------------------------------------------------------------

PARTS = {
    "reward": bench_reward,
    "update": bench_update,
    "growth": bench_growth,
    "rollout": bench_rollout,
    "ranks": bench_ranks,
    "memory": bench_memory,
    "step": bench_step,
    "trl": bench_trl,
}


def main(parts: list[str]) -> None:
    unknown = set(parts) - set(PARTS)
    if unknown:
        names = " ".join(sorted(unknown))
        sys.exit(f"error: no such part: {names}; choose from {', '.join(PARTS)}")
    start_distributed()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts or PARTS:
            for name, (value, note) in PARTS[part](folder).items():
                target = TARGETS.get(name, "-")
                print(f"{name:24} {value:10.3f}  target {target:12} {note}", flush=True)
                figures[name] = round(value, 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks"]:
        rank_worker(sys.argv[2])
    elif sys.argv[1:2] == ["--head"]:
        head_worker(sys.argv[2])
    else:
        main(sys.argv[1:])
