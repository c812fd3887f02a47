"""Measures speed and memory: `python tools/bench.py [PART ...] [--page]`. All parts are:

    update   an update of the policy by the length of its rows; on a GPU also with compiled layers,
             on a CPU also against bare transformers
    sync     a sync of the sampler
    rollout  tokens per second of the sampler, also against bare vLLM
    step     four GRPO steps of train.py, with the GiB of each phase beside the plan's GiB
    critic   the same for two steps of PPO with a critic at ZeRO 3

The models are random. On a GPU they have the shape of Qwen2.5-0.5B, and on a CPU they are small.
--page also writes the page docs/cards/NAME.md, where NAME is the GPU's name. Without a GPU it
writes out/cpu.md.
"""

import functools
import gc
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

# The import of environment.py sets variables that torch reads.
from nanoorz import environment  # isort: skip
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

import ppo
import rollout
import train
from nanoorz import families, models
from nanoorz.log import versions
from nanoorz.ranks import start_distributed
from tools import base_model, plan
from tools.runs import read_lines

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = torch.cuda.is_available()
FP32 = "--bf16 false --zero_stage 0 --gradient_checkpointing false"
# A coin is the reward, because random models are never right and nothing is learnt from a group of
# equal rewards. The responses are graded all the same. One step of verl 0.8.0 with vLLM 0.12 takes
# 6.39 s on one H100, with 16 x 16 samples of at most 512 tokens (github.com/chrisjmccormick/stacks,
# stacks/qwen-gsm8k). Its responses may end earlier. The responses of a random model do not end.
STEP = """--variant random_reward --template plain --stop '' --eval_interval 0 --save_interval 0
    --estimator grpo --zero_stage 2 --rollout_batch_size 16 --n_samples_per_prompt 16
    --prompt_max_len 256 --generate_max_len 512 --max_len 1024 --gradient_checkpointing false
    --kv_cache_gb 4 --max_steps 4 --keep_last 0"""
# These sizes fit on a GPU of 24 GB. With rows of 4,096 tokens a step took 25 s on an H200, because
# the GPU waited for the CPU.
CRITIC = f"""{STEP} --estimator gae --zero_stage 3 --n_samples_per_prompt 8 --critic_updates 4
    --generate_max_len 1024 --max_len 2048 --packing_max_len 8192 --gradient_checkpointing true
    --enforce_eager true --max_steps 2"""
# These sizes replace the others on a CPU.
ON_CPU = """ --rollout_batch_size 4 --n_samples_per_prompt 8 --prompt_max_len 64 --max_len 256
    --generate_max_len 64 --packing_max_len 256 --micro_train_batch_size 2 --critic_updates 2
    --kv_cache_gb 0.5"""


def random_model(folder: str, **changes) -> str:
    """Writes a random Qwen2 of 0.5B, on a CPU a tiny one, and its tokenizer. Returns the folder."""
    fields = {"vocab_size": 512}
    if ON_GPU:
        fields = dict(zip(plan.FIELDS, plan.SHAPES["Qwen/Qwen2.5-0.5B"]))
    fields |= {"max_position_embeddings": 32768, "initializer_range": 0.02} | changes
    # Every token has a text: first the end of a text, then each byte, then words.
    tokens = sorted(ByteLevel.alphabet())
    tokens += [f"w{number}" for number in range(len(tokens) + 1, fields["vocab_size"])]
    tokenizer = base_model.make_tokenizer(tokens, [])
    tokenizer.save_pretrained(folder)
    base_model.make_model(tokenizer, 0, **fields).bfloat16().save_pretrained(folder)
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


def seconds_of(function) -> float:
    # The clock waits for the work that was started on the GPU.
    if ON_GPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def median_seconds(*functions) -> list[float]:
    """Returns the median time of each function. Three rounds call all functions in turn, after one
    round that does not count."""
    rounds = [list(map(seconds_of, functions)) for _ in range(4)]
    return [statistics.median(times) for times in zip(*rounds[1:])]


def make_update(model: str, batch: ppo.Batch, flags: str):
    """Returns a function that updates a new policy with a learning rate of 0."""
    cfg = make_config(model, flags)
    arguments = (models.make_policy(cfg), ppo.policy_losses, batch, batch.all_indices(), 0.0, cfg)
    return functools.partial(ppo.update, *arguments)


def bench_update(folder: str) -> dict[str, float]:
    """Updates with 8 samples of random tokens. On a CPU the lengths of the samples differ."""
    device = start_distributed()[2]
    shape, lengths, rows = {}, [4096] * 8, [4096, 16384]
    if not ON_GPU:
        # The model has 30 million parameters.
        shape = dict(zip(plan.FIELDS, (512, 4, 8, 8, 1408, 32768, True)))
        lengths, rows = torch.linspace(24, 512, 8).int().tolist(), [2048, 512]
    model = random_model(folder, **shape)
    ids = [torch.randint(1, 512, (n,)) for n in lengths]
    prompts = [sample[:8].tolist() for sample in ids]
    responses = [sample[8:].tolist() for sample in ids]
    batch = ppo.Batch(prompts, responses, torch.arange(8), torch.ones(8).double(), device, {}, [])
    batch.per_token["advantages"] = torch.randn(sum(lengths) - 64, device=device)  # (T,)
    settings = [f"--packing_max_len {row_len}" for row_len in rows]
    if ON_GPU:
        settings += [f"{flags} --compile_layers true" for flags in settings]
    figures = {}
    for flags in settings:
        # An engine has references to itself, so without this the last engine would stay.
        update = None
        gc.collect()
        update = make_update(model, batch, f"--max_len {max(lengths)} {flags}")
        [seconds] = median_seconds(update)
        figures[f"tokens/s, {flags}"] = sum(lengths) / seconds
    if ON_GPU:
        return figures
    bare = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def bare_update() -> None:
        # Passes with two samples and padding were no faster.
        for sample in ids:
            bare(input_ids=sample[None], labels=sample[None]).loss.backward()

    ours, theirs = median_seconds(update, bare_update)
    return figures | {"seconds of bare transformers / of our update (>= 0.9)": theirs / ours}


def bench_sync(folder: str) -> dict[str, float]:
    start_distributed()
    cfg = make_config(random_model(folder), "--kv_cache_gb 1 --enforce_eager true")
    sampler = rollout.Sampler(cfg)
    policy = models.make_policy(cfg)
    rounds = []
    for _ in range(4):
        # A sync wakes the sampler.
        sampler.sleep()
        rounds.append(seconds_of(lambda: sampler.sync(models.named_weights(policy))))
    return {"milliseconds of a sync": 1000 * statistics.median(rounds[1:])}


def bench_rollout(folder: str) -> dict[str, float]:
    """Draws 512 responses at once. For more, vLLM has no graph."""
    from vllm import SamplingParams

    start_distributed()
    tokens = 256 if ON_GPU else 48
    flags = f"--max_len {2 * tokens} --micro_rollout_batch_size 512"
    sampler = rollout.Sampler(make_config(random_model(folder), flags))
    problems = [SimpleNamespace(prompt_ids=list(range(k + 1, k + 17))) for k in range(32)]
    requests = rollout.make_requests(problems, range(32), 16, tokens, 1.0, 1.0)

    def draw() -> int:
        return sum(len(sample.response_ids) for _, sample in sampler.generate(requests))

    def bare() -> None:
        prompts = [{"prompt_token_ids": request.problem.prompt_ids} for request in requests]
        settings = {"max_tokens": tokens, "detokenize": False}
        params = [SamplingParams(seed=request.seed, **settings) for request in requests]
        sampler.llm.generate(prompts, params, use_tqdm=False)

    ours, theirs = median_seconds(draw, bare)
    ratio = {"seconds of bare LLM.generate / of ours (>= 0.95)": theirs / ours}
    return {"tokens/s": draw() / ours} | ratio


def bench_run(folder: str, flags: str) -> dict[str, float]:
    """Runs train.py, and leaves out step 1."""
    write_problems(Path(folder, "problems.jsonl"))
    model = random_model(f"{folder}/model")
    flags += f" --model {model} --data {folder}/problems.jsonl {'' if ON_GPU else ON_CPU}"
    # The run reads the memory of the whole GPU. This process has a CUDA context there.
    held = held_gib() if ON_GPU else 0.0
    words = [*shlex.split(flags), "--run_dir", f"{folder}/run"]
    subprocess.run([sys.executable, f"{ROOT}/train.py", *words], stdout=sys.stderr, check=True)
    _, *lines = read_lines(Path(folder, "run", "metrics.jsonl"))
    figures = {"seconds of a step": statistics.median(line["seconds"] for line in lines)}
    for phase, planned_gib in planned(words).items():
        figures[f"{phase}: seconds"] = statistics.median(line[f"seconds_{phase}"] for line in lines)
        figures[f"{phase}: GiB"] = max(line[f"memory_{phase}"] for line in lines) - held
        figures[f"{phase}: planned GiB"] = planned_gib
    return figures


def held_gib() -> float:
    """Returns the GiB that all processes hold on the GPU."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / plan.GIB


def planned(words: list[str]) -> dict[str, float]:
    """Returns {phase: planned GiB} for this GPU. Without a GPU: for a card of 80 GB."""
    cfg = train.parse_flags(words)
    card = 80 * plan.VISIBLE * plan.GIB
    if ON_GPU:
        card = torch.cuda.mem_get_info()[1]
    return plan.Plan(cfg, plan.model_config(cfg.model), 1, card).peaks()


PARTS = {
    "update": bench_update,
    "sync": bench_sync,
    "rollout": bench_rollout,
    "step": functools.partial(bench_run, flags=STEP),
    "critic": functools.partial(bench_run, flags=CRITIC),
}


def measure(name: str) -> None:
    """Prints a line of a Markdown table for each figure of a part."""
    with tempfile.TemporaryDirectory() as folder:
        figures = PARTS[name](folder)
    for figure, value in figures.items():
        print(f"| {name:7} | {figure:58} | {value:10,.4g} |")


def write_page(rows: list[str]) -> Path:
    folder = ROOT / "out"
    name = "CPU"
    about = versions() | {"date": time.strftime("%F")}
    if ON_GPU:
        folder = ROOT / "docs" / "cards"
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        query += ["-i", os.environ.get("CUDA_VISIBLE_DEVICES") or "0"]
        lines = subprocess.check_output(query, text=True).splitlines()
        name, about["driver"] = lines[0].split(", ")
    words = ", ".join(f"{key} {value}" for key, value in about.items())
    text = f"# {name}\n\n`make card` has written this page. {words}.\n\n"
    text += "| part | figure | value |\n| --- | --- | --- |\n"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name.lower().replace(' ', '-')}.md"
    path.write_text(text + "\n".join(rows) + "\n")
    return path


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--page", action="store_true", help="write a page of all figures, too")
    args = parser.parse_args()
    for name in args.parts:
        if name not in PARTS:
            parser.error(f"no such part: {name}; choose from {', '.join(PARTS)}")
    if len(args.parts) == 1 and not args.page:
        measure(args.parts[0])
        return 0
    code = 0
    rows = []
    for name in args.parts or PARTS:
        # Each part has its own process, because an engine keeps its memory until its process ends.
        command = [sys.executable, __file__, name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("| ")]
        if done.returncode:
            code = 1
            found = [f"| {name} | failed | |"]
        print("\n".join(found), flush=True)
        rows += found
    if args.page:
        print(f"the page is {write_page(rows)}")
    return code


if __name__ == "__main__":
    # Here vLLM would fail in Python's clean-up.
    environment.end(main())
