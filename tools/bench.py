"""Measures speed and memory: `python tools/bench.py [PART ...]`. Without a PART it runs all parts.

    reward    checks per second, of two grading processes
    update    an update by the length of its rows, and with each kind of attention; on a GPU also
              with compiled layers, on a CPU also against bare transformers
    sync      a sync of the sampler
    sync_large  the same for a larger model
    sync_lora   the same for the larger model with --variant lora, which needs peft
    rollout   tokens per second of the sampler, and of vLLM without our code
    step      steps of train.py, beside the plan of tools/plan.py
    zero2     steps of PPO with a critic at ZeRO 2
    zero3     steps of PPO with a critic at ZeRO 3
    lab       the laboratory: its base model is made, and then trained for 40 steps of PPO

Each part prints a table and then a line of JSON: {part: {figure: value}}. A ratio is the median of
rounds that measure both sides in turn. Except for `lab` all models are random. The random models
have the shape of Qwen2.5-0.5B on a GPU, and are small or tiny on a CPU.
"""

import functools
import gc
import itertools
import json
import os
import shlex
import signal
import statistics
import string
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    # Ctrl-C ends this process in one line, also while the imports below take seconds.
    signal.signal(signal.SIGINT, lambda *_: sys.exit("stopped"))
sys.path.insert(0, str(Path(__file__).parent.parent))

# The import of environment.py sets variables that torch reads.
from nanoorz import environment  # noqa: F401  # isort: skip
import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch.autograd import DeviceType
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import ppo
import reward
import rollout
import train
from nanoorz import families, models
from nanoorz.ranks import start_distributed
from tools import base_model, plan
from tools.runs import read_lines
from tools.shapes import FIELDS, SHAPES, model_config

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = torch.cuda.is_available()
# tiny: the demo's shape. small: 30 million parameters.
MODELS = {
    "tiny": {"vocab_size": 512},
    "small": dict(zip(FIELDS, (512, 4, 8, 8, 1408, 32768, True))),
    "0.5B": dict(zip(FIELDS, SHAPES["Qwen/Qwen2.5-0.5B"])),
    "1.5B": dict(zip(FIELDS, SHAPES["Qwen/Qwen2.5-1.5B"])),
}
FP32 = "--bf16 false --zero_stage 0 --gradient_checkpointing false"
# A coin is the reward, because random models are never right and nothing is learnt from a group of
# equal rewards. The responses are graded all the same.
RUN = "--variant random_reward --template plain --stop '' --eval_interval 0 --save_interval 0"
# One step of verl 0.8.0 with vLLM 0.12 takes 6.39 s on one H100, with 16 x 16 samples of at most
# 512 tokens (github.com/chrisjmccormick/stacks, stacks/qwen-gsm8k). Its responses may end earlier.
# The responses of a random model do not end.
STEP = f"""{RUN} --estimator grpo --zero_stage 2 --rollout_batch_size 16 --n_samples_per_prompt 16
    --prompt_max_len 256 --generate_max_len 512 --max_len 1024 --gradient_checkpointing false
    --kv_cache_gb 4 --max_steps 4 --keep_last 0"""
# These sizes fit on a GPU of 24 GB. With rows of 4,096 tokens a step took 25 s on an H200, because
# the GPU waited for the CPU.
CRITIC = f"""{STEP} --estimator gae --n_samples_per_prompt 8 --critic_updates 4
    --generate_max_len 1024 --max_len 2048 --packing_max_len 8192 --gradient_checkpointing true
    --enforce_eager true --max_steps 2"""
# These sizes replace the others on a CPU.
ON_CPU = """ --rollout_batch_size 4 --n_samples_per_prompt 8 --prompt_max_len 64 --max_len 256
    --generate_max_len 64 --packing_max_len 256 --micro_train_batch_size 2 --critic_updates 2
    --kv_cache_gb 0.5"""


def byte_tokenizer(size: int):
    """Makes a token for each byte, and words of four letters. So every token has a text."""
    words = map("".join, itertools.product(string.ascii_lowercase, repeat=4))
    tokens = itertools.chain(sorted(ByteLevel.alphabet()), words)
    return base_model.make_tokenizer(itertools.islice(tokens, size - 1), [])


def random_model(folder: str, shape: str, **changes) -> str:
    """Writes a random Qwen2 in bf16 with a tokenizer. Returns the folder."""
    fields = {"max_position_embeddings": 32768, "initializer_range": 0.02} | MODELS[shape]
    tokenizer = byte_tokenizer(fields["vocab_size"])
    tokenizer.save_pretrained(folder)
    model = base_model.make_model(tokenizer, 0, **fields | changes)
    model.bfloat16().save_pretrained(folder)
    return folder


def write_problems(path: Path) -> None:
    problems = [{"question": f"{k}+{k}", "answer": f"#### {2 * k}"} for k in range(256)]
    path.write_text("\n".join(map(json.dumps, problems)))


def make_config(model: str, flags: str) -> train.Config:
    own = "--zero_stage 2" if ON_GPU else FP32
    words = shlex.split(f"--model {model} --data - --stop '' --max_norm 0 {own} {flags}")
    cfg = train.parse_flags(words)
    families.replace_auto(cfg)
    return cfg


def make_batch(shortest: int, longest: int, device, count: int = 8) -> ppo.Batch:
    """Makes samples of random tokens. Lengths rise evenly. A prompt has eight tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(shortest, longest, count).int().tolist()
    ids = [torch.randint(1, 512, (n,), generator=generator).tolist() for n in lengths]
    prompts, responses = [sample[:8] for sample in ids], [sample[8:] for sample in ids]
    groups, rewards = torch.arange(count), torch.ones(count).double()
    batch = ppo.Batch(prompts, responses, groups, rewards, device, {}, [])
    for name in ("advantages", "values", "returns"):
        numbers = torch.randn(sum(map(len, responses)), generator=generator)  # (T,)
        batch.per_token[name] = numbers.to(device)
    return batch


def seconds_of(function) -> float:
    # The clock waits for the work that was started on the GPU.
    settle = torch.cuda.synchronize if ON_GPU else lambda: None
    settle()
    begin = time.perf_counter()
    function()
    settle()
    return time.perf_counter() - begin


def median_seconds(function, rounds: int = 3) -> float:
    """Returns the median time of the calls. One call before them does not count."""
    function()
    return statistics.median(seconds_of(function) for _ in range(rounds))


def compare(ours, theirs) -> list[float]:
    """Returns time(theirs) / time(ours) of three rounds. One round before them does not count."""
    rounds = [seconds_of(theirs) / seconds_of(ours) for _ in range(4)]
    return rounds[1:]


def held_gib() -> float:
    """Returns the GiB that all processes hold on the GPU. Returns 0 without a GPU."""
    if not ON_GPU:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / plan.GIB


def gpu_seconds(function) -> float:
    """Returns the sum of the times of all kernels on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds_of(function)
    events = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    # The time of an annotation is that of its kernels.
    kernels = [event for event in events if not event.is_user_annotation]
    return sum(kernel.self_device_time_total for kernel in kernels) / 1e6


def bench_update(folder: str, shape: str, shortest: int, longest: int, rows: list[int]) -> dict:
    """Times updates of samples of `shortest` to `longest` tokens, for each length of the rows, on a
    GPU with compiled layers, too.

    The comparisons use the last length.
    """
    start_distributed()
    cfg = make_config(random_model(folder, shape), f"--max_len {longest}")

    def update() -> None:
        # The learning rate is 0.
        ppo.update(policy, ppo.policy_losses, batch, batch.all_indices(), 0.0, cfg)

    figures = {}
    for cfg.compile_layers in (True, False) if ON_GPU else (False,):
        policy = None
        # An engine has references to itself.
        gc.collect()
        policy = models.make_policy(cfg)
        batch = make_batch(shortest, longest, policy.device)
        if cfg.compile_layers:
            figures["seconds of the first compiled update"] = seconds_of(update)
        for cfg.packing_max_len in rows:
            case = f"rows of {cfg.packing_max_len}{', compiled' * cfg.compile_layers}"
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            seconds = median_seconds(update)
            figures[f"{case}: seconds of an update"] = seconds
            figures[f"{case}: tokens/s of an update"] = sum(batch.sample_lengths) / seconds
            if ON_GPU:
                peak = torch.cuda.max_memory_allocated()
                figures[f"{case}: busy share of the GPU"] = gpu_seconds(update) / seconds
                figures[f"{case}: GiB at the peak"] = peak / plan.GIB
    best, *others = attentions()
    for name in others:
        policy.module.model.set_attn_implementation(name)
        ratio = median_seconds(update) / seconds
        figures[f"seconds of an update with {name} / with {best}"] = ratio
    if not ON_GPU:
        bare = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
        passes = [functools.partial(bare_pass, bare, batch, count) for count in (1, 2, 4)]
        fastest = min(passes, key=functools.partial(median_seconds, rounds=1))
        ratio = compare(update, fastest)
        figures["seconds of bare transformers / of our update (>= 0.9)"] = ratio
    return figures


def attentions() -> list[str]:
    """Returns the kinds of attention of this machine in bf16. train.py uses the first kind."""
    return ["varlen", "sdpa"] if ON_GPU else ["sdpa"]


def bare_pass(model, batch: ppo.Batch, count: int) -> None:
    """Computes gradients without our code. `count` samples of about one length share a pass."""
    ids = [torch.tensor(p + r) for p, r in zip(batch.prompt_ids, batch.response_ids)]
    ids.sort(key=len)
    for start in range(0, len(ids), count):
        group = ids[start : start + count]
        labels = pad_sequence(group, batch_first=True, padding_value=-100)  # (R, L)
        # Causal attention does not see the padding, which stands on the right.
        model(input_ids=labels.clamp(min=0), labels=labels).loss.backward()


def bench_sync(folder: str, shape: str, variant: str = "") -> dict:
    if variant == "lora" and not find_spec("peft"):
        print("sync_lora needs `pip install --no-deps -r requirements-extras.txt`", file=sys.stderr)
        return {}
    start_distributed()
    flags = f"--kv_cache_gb 1 --enforce_eager true --variant {variant}"
    cfg = make_config(random_model(folder, shape), flags)
    sampler = rollout.Sampler(cfg)
    sampler.sleep()
    policy = models.make_policy(cfg)

    def sync() -> None:
        sampler.sync(models.named_weights(policy))

    rounds = []
    for _ in range(6):
        # A sync wakes the sampler.
        rounds.append(seconds_of(sync))
        sampler.sleep()
    sizes = [weight.nbytes for _, weight in models.named_weights(policy)]
    milliseconds = 1000 * statistics.median(rounds[1:])
    trained = sum(p.nbytes for p in models.trainable(policy.module))
    figures = {"milliseconds of a sync": milliseconds, "MB that are sent": sum(sizes) / 1e6}
    return figures | {"MB of the weights that are trained": trained / 1e6}


def bench_rollout(folder: str, shape: str, tokens: int) -> dict:
    """Draws 512 responses at once, each of about `tokens` tokens. For more, vLLM has no graph."""
    from vllm import SamplingParams

    start_distributed()
    flags = f"--max_len {2 * tokens} --micro_rollout_batch_size 512"
    sampler = rollout.Sampler(make_config(random_model(folder, shape), flags))
    problems = [SimpleNamespace(prompt_ids=list(range(k + 1, k + 17))) for k in range(32)]
    seeds = rollout.problem_seeds(0, 0, "bench", len(problems))
    requests = rollout.make_requests(problems, seeds, 16, tokens, 1.0, 1.0)

    def ours() -> int:
        return sum(len(sample.response_ids) for _, sample in sampler.generate(requests))

    def bare() -> None:
        prompts = [{"prompt_token_ids": request.problem.prompt_ids} for request in requests]
        settings = {"max_tokens": tokens, "detokenize": False}
        params = [SamplingParams(seed=request.seed, **settings) for request in requests]
        sampler.llm.generate(prompts, params, use_tqdm=False)

    speed = ours() / median_seconds(ours, rounds=1)
    ratio = compare(ours, bare)
    return {"tokens/s": speed, "seconds of bare LLM.generate / of ours (>= 0.95)": ratio}


def bench_reward(folder: str) -> dict:
    """97 % of the labels are numbers as in GSM8K. Only sympy can judge the other 3 %."""
    answers = []
    for k in range(8192):
        # Every second answer is wrong.
        a, label = 1000 + k + k % 2, f"{1000 + k}"
        answer = f"{a:,}"
        if k % 33 == 0:
            answer, label = rf"\frac{{{a}x}}{{7}}", rf"\frac{{{label}}}{{7}}x"
        answers.append((answer, label))
    with reward.Grader(workers=2) as grader:
        # The processes start before the clock does.
        for k in range(2):
            grader.submit(k, f"<answer>\\boxed{{x+y+{k}}}</answer>", "stop", f"y+{k}+x")
        grader.results()
        begin = time.perf_counter()
        for k, (answer, label) in enumerate(answers):
            grader.submit(k, f"<answer>\\boxed{{{answer}}}</answer>", "stop", label)
        grader.results()
        speed = len(answers) / (time.perf_counter() - begin)
    return {"checks per second, 2 processes (>= 2000)": speed}


def train_steps(run_dir: str, flags: str) -> list[dict]:
    """Runs train.py. Returns the lines of metrics.jsonl."""
    words = [str(ROOT / "train.py"), *shlex.split(flags), "--run_dir", run_dir]
    subprocess.run([sys.executable, *words], stdout=sys.stderr, check=True)
    return list(read_lines(Path(run_dir, "metrics.jsonl")))


def median_of(lines: list[dict], name: str) -> float:
    """Returns the median over all steps but the first."""
    for line in lines:
        assert line["policy_tokens"] > 0, f"a step without a policy update: {line}"
    return statistics.median(line[name] for line in lines[1:])


def bench_step(folder: str, flags: str) -> dict:
    model = random_model(f"{folder}/model", "0.5B" if ON_GPU else "tiny")
    write_problems(Path(folder, "problems.jsonl"))
    flags += f" --model {model} --data {folder}/problems.jsonl {'' if ON_GPU else ON_CPU}"
    # The run reads the memory of the whole GPU. This process has a CUDA context there.
    held = held_gib()
    lines = train_steps(f"{folder}/run", flags)
    figures = {"seconds of a step": median_of(lines, "seconds")}
    figures["tokens/s of a step"] = median_of(lines, "tokens_per_second")
    for phase, found in phases(lines, held, planned(shlex.split(flags))).items():
        figures |= {f"{phase}: {name}": value for name, value in found.items()}
    return figures


def phases(lines: list[dict], held: float, peaks: dict[str, float]) -> dict[str, dict]:
    """{phase: {seconds, gib, planned_gib}}, without step 1. held: GiB on the GPU before the run."""
    found = {}
    for phase, planned_gib in peaks.items():
        # The plan's critic computes the values too.
        names = ["values", "critic"] if phase == "critic" else [phase]
        seconds = sum(median_of(lines, f"seconds_{name}") for name in names)
        gib = max(line[f"memory_{phase}"] for line in lines[1:]) - held
        found[phase] = {"seconds": seconds, "gib": gib, "planned_gib": planned_gib}
    return found


def planned(words: list[str]) -> dict[str, float]:
    """Returns {phase: planned GiB} for this GPU. Without a GPU: for a card of 80 GB."""
    cfg = train.parse_flags(words)
    card = 80 * plan.VISIBLE
    if ON_GPU:
        card = torch.cuda.mem_get_info()[1] / plan.GIB
    estimate = plan.estimate(cfg, model_config(cfg.model), 1, card)
    return {phase: estimate.peak(phase) for phase in estimate.phases}


def bench_lab(folder: str) -> dict:
    """Runs what `make lab` runs, without the picture."""
    command = [sys.executable, f"{ROOT}/tools/base_model.py", "countdown", f"{folder}/base"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    flags = Path(folder, "base/flags.txt").read_text()
    lines = train_steps(f"{folder}/run", f"{flags} --seed 1")
    before, *_, after = [line["accuracy"] for line in read_lines(Path(folder, "run/eval.jsonl"))]
    figures = {"held-out accuracy before": before, "held-out accuracy after 40 steps": after}
    return {"seconds of a step": median_of(lines, "seconds")} | figures


UPDATE = ("0.5B", 4096, 4096, [4096, 16384]) if ON_GPU else ("small", 24, 512, [2048, 512])
# {part: its function, and what the function is given beside a folder}
PARTS = {
    "reward": (bench_reward,),
    "update": (bench_update, *UPDATE),
    "sync": (bench_sync, "0.5B" if ON_GPU else "tiny"),
    "sync_large": (bench_sync, "1.5B" if ON_GPU else "small"),
    "sync_lora": (bench_sync, "1.5B" if ON_GPU else "small", "lora"),
    "rollout": (bench_rollout, *(("0.5B", 256) if ON_GPU else ("tiny", 48))),
    "step": (bench_step, STEP),
    "zero2": (bench_step, CRITIC),
    "zero3": (bench_step, f"{CRITIC} --zero_stage 3"),
    "lab": (bench_lab,),
}


def run_part(name: str) -> None:
    function, *arguments = PARTS[name]
    with tempfile.TemporaryDirectory() as folder:
        figures = function(folder, *arguments)
    for figure, value in figures.items():
        rounds = ""
        if isinstance(value, list):
            rounds = f"{min(value):.2f} to {max(value):.2f}"
            figures[figure] = value = statistics.median(value)
        print(f"{name:9} {figure:60} {value:10.4g}  {rounds}")
    print(json.dumps({name: figures}), flush=True)


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    names = parser.parse_args().parts
    for name in set(names) - set(PARTS):
        parser.exit(2, f"error: no such part: {name}; choose from {', '.join(PARTS)}\n")
    if len(names) == 1:
        run_part(names[0])
        return 0
    # Each part has its own process, because an engine keeps its memory until its process ends.
    # Ctrl-C reaches the part too, and the part says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return max([subprocess.call([sys.executable, __file__, name]) for name in names or PARTS])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # gloo's threads can abort an interpreter that ends in the normal way.
    os._exit(code)
