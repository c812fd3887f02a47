"""Measures speed and memory: `python tools/bench.py [PART ...]`. Without a PART it runs all parts.

    reward    checks per second; the verdicts of 2 and of 16 grading processes
    update    an update with each kind of attention; on a CPU also against bare transformers
    update7b  the same with four layers of Qwen2.5-7B
    rollout   the sampler's tokens per second, and vLLM without our code
    memory    the chunked head against full logits, with a vocabulary of 151,936
    step      steps of train.py, beside the plan of tools/plan.py
    zero2     steps of PPO with a critic at ZeRO 2
    zero3     the same at ZeRO 3
    lab       the laboratory: a base model, and 40 steps of PPO
    trl       GRPO steps of TRL against ours, on a CPU (`make bench` installs TRL)

Each part prints a table and then a line of JSON: {part: {figure: value}}. A ratio is the median of
rounds that measure both sides in turn. Except for `lab` and `trl` all models are random. They have
the shape of Qwen2.5-0.5B on a GPU, and are small or tiny on a CPU.
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
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

# train.py sets this variable too. It must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.nn.functional as F
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import is_flash_attn_2_available

import ppo
import reward
import rollout
import train
from lib import models
from lib.attention import has_varlen
from lib.common import start_distributed
from lib.head import ChunkedLogprob
from tools import cost, memory

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
FIELDS += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
# tiny: the demo's shape. small: 30 million parameters.
SHAPES = {
    "tiny": (128, 512, 2, 4, 4, 512, True),
    "small": (512, 1408, 4, 8, 8, 32768, True),
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "7B-layers": (3584, 18944, 4, 28, 4, 152064, False),
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
    --max_steps 4 --keep_last 0"""
# These sizes fit on a GPU of 24 GB.
CRITIC = f"""{STEP} --estimator gae --n_samples_per_prompt 8 --critic_updates 4
    --generate_max_len 1024 --max_len 2048 --packing_max_len 4096 --gradient_checkpointing true
    --gpu_memory_utilization 0.3 --max_steps 3"""
# The sizes on a CPU.
ON_CPU = """--rollout_batch_size 4 --n_samples_per_prompt 8 --prompt_max_len 64 --max_len 256
    --generate_max_len 64 --packing_max_len 256 --micro_train_batch_size 2 --critic_updates 2
    --kv_cache_gb 0.5"""


# ---- models, batches, clocks -----------------------------------------------------------------


def byte_tokenizer(size: int) -> Qwen2Tokenizer:
    """It has a token for each byte, and words of four letters up to the size.

    Every token has a text, so the sampler looks for stop strings in what a random model draws.
    """
    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    words = map("".join, itertools.product(string.ascii_lowercase, repeat=4))
    tokens += itertools.islice(words, size - len(tokens))
    return Qwen2Tokenizer({token: number for number, token in enumerate(tokens)}, [])


def random_model(folder: str, shape: str, **changes) -> str:
    """Writes a random Qwen2 in bf16 with a tokenizer. Returns the folder."""
    ends = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    config = Qwen2Config(**dict(zip(FIELDS, SHAPES[shape])) | ends | changes)
    torch.manual_seed(0)
    with DEVICE:
        model = Qwen2ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    # The model must leave the GPU, because the memory of the whole GPU is compared with the plan.
    del model
    gc.collect()
    torch.cuda.empty_cache()
    byte_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


def base_model(kind: str, folder: str) -> str:
    """Writes the base model of a toy task, with its problems and flags.txt. Returns the folder."""
    command = [sys.executable, f"{ROOT}/tools/base_model.py", kind, folder]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def make_config(model: str, flags: str) -> train.Config:
    own = "--zero_stage 2" if ON_GPU else FP32
    words = shlex.split(f"--model {model} --data - --stop '' --max_norm 0 {own} {flags}")
    return train.parse_flags(words)


def make_batch(vocab: int, shortest: int, longest: int) -> ppo.Batch:
    """Eight samples of random tokens, whose lengths lie evenly between the two. Prompts have 8."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(shortest, longest, 8).int().tolist()
    ids = [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in lengths]
    prompts = [sample[:8] for sample in ids]
    responses = [sample[8:] for sample in ids]
    groups = torch.arange(8)  # (N,)
    batch = ppo.Batch(prompts, responses, groups, torch.ones(8).double(), DEVICE, {}, [])
    tokens = sum(lengths) - 8 * 8
    for name in ("advantages", "values", "returns"):
        batch.per_token[name] = torch.randn(tokens, generator=generator).to(DEVICE)  # (T,)
    return batch


def settle() -> None:
    """Waits for the work that was started on the GPU."""
    if ON_GPU:
        torch.cuda.synchronize()


def seconds_of(function) -> float:
    settle()
    begin = time.perf_counter()
    function()
    settle()
    return time.perf_counter() - begin


def median_seconds(function, rounds: int = 3) -> float:
    """The median of some calls, after one call that does not count."""
    function()
    return statistics.median(seconds_of(function) for _ in range(rounds))


def compare(ours, theirs) -> list[float]:
    """time(theirs) / time(ours) of three rounds, after one round that does not count."""
    rounds = [seconds_of(theirs) / seconds_of(ours) for _ in range(4)]
    return rounds[1:]


def held_gib() -> float:
    """The GiB that all processes hold on the GPU; 0 on a CPU."""
    if not ON_GPU:
        return 0.0
    settle()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / memory.GIB


# ---- update and memory -----------------------------------------------------------------------


def bench_update(folder: str, shape: str, shortest: int, longest: int, row: int) -> dict:
    """Updates of samples of `shortest` to `longest` tokens, in rows of `row` tokens."""
    start_distributed()
    flags = f"--max_len {longest} --packing_max_len {row}"
    cfg = make_config(random_model(folder, shape), flags)
    policy = models.make_policy(cfg)
    batch = make_batch(SHAPES[shape][5], shortest, longest)
    update = make_update(policy, ppo.policy_loss, batch, cfg)
    seconds = {}
    best, *others = attentions()
    for name in (*others, best):
        policy.module.model.set_attn_implementation(name)
        seconds[name] = median_seconds(update)
    figures = {"tokens/s of an update": sum(batch.sample_lengths) / seconds[best]}
    for name in others:
        figures[f"seconds of an update with {name} / with {best}"] = seconds[name] / seconds[best]
    if not ON_GPU:
        figures |= compare_updates(policy, update, batch, cfg)
    return figures


def make_update(learner, loss_fn, batch: ppo.Batch, cfg):
    """An update of all samples, as a function without arguments. Its learning rate is 0."""
    return functools.partial(ppo.update, learner, loss_fn, batch, batch.all_indices(), 0.0, cfg)


def attentions() -> list[str]:
    """The kinds of attention of this machine in bf16. train.py uses the first one."""
    names = ["sdpa"]
    if ON_GPU and has_varlen():
        names.insert(0, "varlen")
    if ON_GPU and is_flash_attn_2_available():
        names.append("flash_attention_2")
    return names


def compare_updates(policy, update_policy, batch: ppo.Batch, cfg) -> dict:
    critic = models.make_critic(cfg)
    update_critic = make_update(critic, ppo.critic_loss, batch, cfg)
    bare = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    passes = [functools.partial(bare_pass, bare, batch, count) for count in (1, 2, 4)]
    fastest = min(passes, key=lambda one: median_seconds(one, rounds=1))

    def lean() -> None:
        ppo.compute_values(critic, batch, cfg)
        update_critic()
        update_policy()

    def full() -> None:
        """ORZ also passes the batch through the old policy and the reference."""
        lean()
        ppo.compute_logprobs(policy, batch, cfg)
        ppo.compute_logprobs(policy, batch, cfg)

    return {
        "seconds of bare transformers / of our update (>= 0.9)": compare(update_policy, fastest),
        "seconds of ORZ's pipeline / of ours (>= 1.25)": compare(lean, full),
    }


def bare_pass(model, batch: ppo.Batch, count: int) -> None:
    """Forward and backward, without an update. `count` samples of about one length share a pass."""
    ids = [torch.tensor(p + r) for p, r in zip(batch.prompt_ids, batch.response_ids)]
    ids.sort(key=len)
    for start in range(0, len(ids), count):
        group = ids[start : start + count]
        labels = pad_sequence(group, batch_first=True, padding_value=-100)  # (R, L)
        # Causal attention does not see the padding, which stands on the right.
        model(input_ids=labels.clamp(min=0), labels=labels).loss.backward()


def bench_memory(folder: str) -> dict:
    """Log-probs of 8,192 tokens: how much they add to the peak memory of this process."""
    vocab = 151936
    hidden = torch.randn(8192, 896, requires_grad=True)  # (T, H)
    weight = torch.randn(vocab, 896, requires_grad=True)  # (V, H)
    token_ids = torch.randint(vocab, (8192,))  # (T,)
    before = peak_kib()
    logprobs, _ = ChunkedLogprob.apply(hidden, weight, token_ids, 1.0, 2**23 // vocab)  # (T,)
    logprobs.sum().backward()
    chunked = peak_kib() - before
    hidden.grad = weight.grad = None
    F.cross_entropy(F.linear(hidden, weight), token_ids).backward()
    full = peak_kib() - before
    return {"memory of log-probs / with full logits (<= 0.15)": chunked / full}


def peak_kib() -> int:
    """The most memory that this process has held. getrusage may return the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


# ---- rollout and reward ----------------------------------------------------------------------


def bench_rollout(folder: str, shape: str, tokens: int) -> dict:
    """Draws 1,024 responses at once, each of about `tokens` tokens."""
    start_distributed()
    flags = f"--max_len {2 * tokens} --micro_rollout_batch_size 1024"
    sampler = rollout.Sampler(make_config(random_model(folder, shape), flags))
    problems = [SimpleNamespace(prompt_ids=list(range(k + 1, k + 17))) for k in range(64)]
    seeds = rollout.problem_seeds(0, 0, "bench", len(problems))
    requests = rollout.make_requests(problems, seeds, 16, tokens, 1.0, 1.0)

    def ours() -> int:
        return sum(len(sample.response_ids) for _, sample in sampler.generate(requests))

    speed = ours() / median_seconds(ours)
    bare = functools.partial(bare_generate, sampler.llm, requests)
    ratio = compare(ours, bare)
    return {"tokens/s": speed, "seconds of bare LLM.generate / of ours (>= 0.95)": ratio}


def bare_generate(llm, requests: list) -> None:
    from vllm import SamplingParams

    prompts = []
    params = []
    for request in requests:
        prompts.append({"prompt_token_ids": request.problem.prompt_ids})
        settings = {"seed": request.seed, "max_tokens": request.max_tokens}
        params.append(SamplingParams(**settings, detokenize=False))
    llm.generate(prompts, params, use_tqdm=False)


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
    verdicts, seconds = grade(answers, 2)
    others, _ = grade(answers, 16)
    differ = sum(verdicts[k] != others[k] for k in verdicts)
    return {
        "checks per second, 2 processes (>= 2000)": len(answers) / seconds,
        "verdicts that differ with 16 processes (0)": differ,
    }


def grade(answers: list[tuple[str, str]], workers: int) -> tuple[dict, float]:
    """The verdicts and the seconds of a grader with that many processes."""
    with reward.Grader(workers=workers) as grader:
        # The processes start before the clock does.
        for k in range(workers):
            grader.submit(k, f"<answer>\\boxed{{x+y+{k}}}</answer>", "stop", f"y+{k}+x")
        grader.results()
        begin = time.perf_counter()
        for k, (answer, label) in enumerate(answers):
            grader.submit(k, f"<answer>\\boxed{{{answer}}}</answer>", "stop", label)
        return grader.results(), time.perf_counter() - begin


# ---- whole steps -----------------------------------------------------------------------------


def train_steps(run_dir: str, flags: str) -> list[dict]:
    """Runs train.py. Returns the lines of metrics.jsonl."""
    words = [str(ROOT / "train.py"), *shlex.split(flags), "--run_dir", run_dir]
    subprocess.run([sys.executable, *words], stdout=sys.stderr, check=True)
    return read_lines(f"{run_dir}/metrics.jsonl")


def read_lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_problems(path: str) -> str:
    problems = [{"question": f"{k}+{k}", "answer": f"#### {2 * k}"} for k in range(256)]
    Path(path).write_text("\n".join(map(json.dumps, problems)))
    return path


def median_of(lines: list[dict], name: str) -> float:
    """The median over all steps but the first."""
    for line in lines:
        assert line["policy_tokens"] > 0, f"a step without a policy update: {line}"
    return statistics.median(line[name] for line in lines[1:])


def bench_step(folder: str, shape: str, flags: str) -> dict:
    model = random_model(f"{folder}/model", shape)
    flags += f" --model {model} --data {write_problems(f'{folder}/problems.jsonl')}"
    # The run reads the memory of the whole GPU. This process has a CUDA context there.
    held = held_gib()
    lines = train_steps(f"{folder}/run", flags)
    work = [f"seconds_{name}" for name in ("rollout", "values", "critic", "policy")]
    rest = [1 - sum(line[name] for name in work) / line["seconds"] for line in lines[1:]]
    figures = {
        "seconds of a step": median_of(lines, "seconds"),
        "tokens/s of a step": median_of(lines, "tokens_per_second"),
        "share of neither rollout nor learning": statistics.median(rest),
    }
    for phase, found in phases(lines, held, planned(shlex.split(flags))).items():
        figures |= {f"{phase}: {name}": value for name, value in found.items()}
    return figures


def phases(lines: list[dict], held: float, plan: dict[str, dict]) -> dict[str, dict]:
    """Returns {phase: seconds, gib, planned_seconds, planned_gib}, without the first step.

    held: GiB on the GPU before the run. The plan's critic computes the values too.
    """
    found = {}
    for phase in plan:
        names = ["values", "critic"] if phase == "critic" else [phase]
        seconds = sum(median_of(lines, f"seconds_{name}") for name in names)
        gib = max(line[f"memory_{phase}"] for line in lines[1:]) - held
        found[phase] = {"seconds": seconds, "gib": gib} | plan[phase]
    return found


def planned(words: list[str]) -> dict[str, dict]:
    """Returns {phase: planned_gib, planned_seconds} for this GPU, or for an H100 on a CPU."""
    cfg = train.parse_flags(words)
    config = memory.model_config(cfg.model)
    name, card_gb = "H100", 80.0
    if ON_GPU:
        name = torch.cuda.get_device_name()
        card_gb = torch.cuda.mem_get_info()[1] / memory.GIB / memory.VISIBLE
    plan = memory.estimate(cfg, config, 1, card_gb)
    found = {phase: {"planned_gib": plan.peak(phase)} for phase in plan.phases}
    for word in set(name.upper().split()) & set(cost.CARDS):
        times = cost.Times(cfg, config, 1, cost.find_card(word), length_share=1.0)
        for phase, seconds in times.of_step(plan.kv_tokens).items():
            found[phase]["planned_seconds"] = seconds
    return found


def bench_lab(folder: str) -> dict:
    """What `make lab` does, without its picture."""
    flags = Path(base_model("countdown", f"{folder}/base"), "flags.txt").read_text()
    lines = train_steps(f"{folder}/run", f"{flags} --seed 1")
    before, *_, after = [line["accuracy"] for line in read_lines(f"{folder}/run/eval.jsonl")]
    return {
        "seconds of a step": median_of(lines, "seconds"),
        "held-out accuracy before": before,
        "held-out accuracy after 40 steps": after,
    }


def bench_trl(folder: str) -> dict:
    """The demo's base model with 64 x 16 samples; 30 million parameters with 4 x 8 samples."""
    tiny = compare_steps(base_model("addition", f"{folder}/base"), 64, 16, 48, 64)
    small = compare_steps(random_model(f"{folder}/small", "small"), 4, 8, 96, 16)
    return {"TRL / ours, tiny (>= 1)": tiny, "TRL / ours, small (>= 1.5)": small}


def compare_steps(model: str, prompts: int, samples: int, limit: int, rows: int) -> list[float]:
    """Seconds of a GRPO step of TRL / of ours, in three rounds. rows: of our micro-batch."""
    data = write_problems(f"{model}/problems.jsonl")
    flags = f"""{RUN} {FP32} --model {model} --data {data} --template demo --estimator grpo
        --rollout_batch_size {prompts} --n_samples_per_prompt {samples} --prompt_max_len 16
        --generate_max_len {limit} --max_len {limit + 16} --packing_max_len {limit + 16}
        --micro_train_batch_size {rows} --micro_rollout_batch_size {prompts * samples}
        --max_steps 4 --actor_learning_rate 1e-9 --log_with none"""
    ratios = []
    # The first round finds the number of micro-batches that suits TRL best.
    candidates = [1, 4]
    for number in range(3):
        ours = median_of(train_steps(f"{model}/run{number}", flags), "seconds")
        theirs = {}
        for parts in candidates:
            words = map(str, (model, data, prompts, samples, limit, parts))
            command = [f"{sys.prefix}/trl/bin/python", f"{ROOT}/tools/bench_trl.py", *words]
            said = subprocess.check_output(command, text=True).splitlines()
            theirs[parts] = statistics.median(json.loads(said[-1])[1:])
        candidates = [min(theirs, key=theirs.get)]
        ratios.append(min(theirs.values()) / ours)
    return ratios


# ---- the table -------------------------------------------------------------------------------

# {part: its function, and what the function is given beside a folder}
PARTS = {"reward": (bench_reward,), "memory": (bench_memory,)}
if ON_GPU:
    PARTS |= {
        "update": (bench_update, "0.5B", 4096, 4096, 16384),
        "update7b": (bench_update, "7B-layers", 4096, 4096, 16384),
        "rollout": (bench_rollout, "0.5B", 256),
        "step": (bench_step, "0.5B", STEP),
        "zero2": (bench_step, "0.5B", CRITIC),
        "zero3": (bench_step, "0.5B", f"{CRITIC} --zero_stage 3"),
    }
else:
    PARTS |= {
        "update": (bench_update, "small", 24, 512, 512),
        "update7b": (bench_update, "tiny", 24, 512, 512),
        "rollout": (bench_rollout, "tiny", 48),
        "step": (bench_step, "small", f"{STEP} {ON_CPU}"),
        "zero2": (bench_step, "tiny", f"{CRITIC} {ON_CPU}"),
        "zero3": (bench_step, "tiny", f"{CRITIC} {ON_CPU} --zero_stage 3"),
    }
PARTS |= {"lab": (bench_lab,), "trl": (bench_trl,)}


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


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        print(f"error: no such part: {' '.join(unknown)}; choose from {', '.join(PARTS)}")
        return 2
    if len(names) == 1:
        run_part(names[0])
        return 0
    # Each part has its own process, because an engine keeps its memory until its process ends.
    return max([subprocess.call([sys.executable, __file__, name]) for name in names or PARTS])


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    # gloo's threads can abort an interpreter that ends in the normal way.
    os._exit(code)
