"""How fast, against what: `python tools/bench.py [part ...]`. Ratios of A and B measured in turn, in one run.

    reward     checks/s on a GSM8K-like mix; are verdicts the same with 1 and with 16 workers?
    rollout    Sampler.generate against bare LLM.generate; weight sync against a plain copy
    update     policy and critic update against a bare transformers forward and backward over the same tokens; the
               full ORZ pipeline against the lean one
    growth     how the time of a policy update grows with the tokens
    ranks      two ranks of one thread against one rank of one thread
    memory     the chunked head against full logits, vocabulary 151,936
    step       whole steps of train.py: the share that is neither generation, forward, backward nor optimizer
    trl        whole GRPO steps of TRL against ours (needs TRL: `make bench` installs it into .venv/trl)

Prints a table with medians, spreads and targets, and one JSON line at the end. Models are random: `tiny` is the demo's
shape, `small` 30 M parameters with a vocabulary of 32,768 and 16 to 512 tokens a sample.
"""
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

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in train.py
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import ppo
import reward
import rollout
import train
from tools import bench_trl, demo

ROOT = Path(__file__).parent.parent
FORMS = (  # what only sympy can tell, as MATH's labels have it: label, a right and a wrong form of it
    (r"\frac{{{a}}}{{{b}}}x", r"\frac{{{a}x}}{{{b}}}", r"\frac{{{b}x}}{{{a}}}"),
    (r"{a}\sqrt{{{b}}}", r"\sqrt{{{b}}}\cdot {a}", r"{b}\sqrt{{{a}}}"))
TARGETS = {"checks_per_s": ">= 2000", "verdicts_differ": "== 0", "rollout_vs_vllm": ">= 0.95", "sync_vs_copy": "<= 3",
           "policy_vs_bare": ">= 0.9", "critic_vs_bare": ">= 0.9", "full_vs_lean": ">= 1.25", "ranks_2_vs_1": ">= 1.8",
           "memory_vs_full_logits": "<= 0.15", "scaling_exponent": "0.9 to 1.1", "overhead_share": "<= 0.03",
           "trl_vs_ours_small": ">= 1.5", "trl_vs_ours_tiny": ">= 1", "phases_share": ">= 0.98"}


def seconds_of(function) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def compare(a, b, rounds: int = 5) -> tuple[float, str]:
    """Median of time(b) / time(a) over interleaved rounds after one unmeasured each, and the spread."""
    a(), b()
    ratios = []
    for _ in range(rounds):
        ours, theirs = seconds_of(a), seconds_of(b)
        ratios.append(theirs / ours)
    return statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"


def make_model(folder: str, size: str) -> str:
    """A random Qwen2 with the demo's tokenizer: `small`, 30 M parameters, or `tiny`, the demo's half a million."""
    vocab, hidden, wide, layers, heads = {"small": (32768, 512, 1408, 4, 8), "tiny": (20, 128, 512, 2, 4)}[size]
    config = Qwen2Config(vocab_size=vocab, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=2048,
                         tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    Qwen2ForCausalLM(config).save_pretrained(f"{folder}/{size}")
    demo.make_tokenizer().save_pretrained(f"{folder}/{size}")
    return f"{folder}/{size}"


def config(model: str, **changes) -> train.Config:
    """train.py's settings for one CPU, fp32; rows of 512 tokens, two in a micro-batch."""
    settings = {"model": model, "data": ["-"], "bf16": False, "zero_stage": 0, "gradient_checkpointing": False,
                "attention": "sdpa", "max_len": 512, "packing_max_len": 512, "micro_train_batch_size": 2,
                "prompt_max_len": 64, "max_norm": 0.0, "critic_update_steps": 1}
    return train.Config(**settings | changes)


def make_batch(samples: int, longest: int, vocab: int) -> ppo.Batch:
    """Random tokens, responses spread evenly from 16 to `longest`, with advantages, values and returns."""
    rng = random.Random(0)
    lengths = np.linspace(16, longest - 8, samples).astype(int).tolist()
    rng.shuffle(lengths)
    tokens = [[rng.randrange(1, vocab) for _ in range(n + 8)] for n in lengths]
    batch = ppo.Batch([t[:8] for t in tokens], [t[8:] for t in tokens], torch.arange(samples),
                      torch.ones(samples, dtype=torch.float64), {})
    generator = torch.Generator().manual_seed(0)
    for key in ("advantages", "values", "returns"):
        batch.tokens[key] = torch.randn(int(batch.length.sum()), generator=generator)  # (T,)
    return batch


def bare_pass(model, head, batch: ppo.Batch, rows: list[list[int]]) -> None:
    """Forward and backward by transformers alone: right-padded groups of samples of about one length, full logits."""
    for row in rows:
        ids = [torch.tensor(batch.prompt_ids[i] + batch.response_ids[i]) for i in row]
        padded = torch.nn.utils.rnn.pad_sequence(ids, True)  # (R, L); causal: what is behind is not seen
        hidden = model(padded, use_cache=False).last_hidden_state  # (R, L, H)
        keep = torch.stack([torch.arange(padded.shape[1] - 1) < batch.size[i] - 1 for i in row])  # (R, L - 1)
        out = F.linear(hidden[:, :-1][keep], head)  # (T, V) or (T, 1)
        loss = F.cross_entropy(out, padded[:, 1:][keep]) if len(head) > 1 else out.square().mean()
        loss.backward()


def bench_update(folder: str) -> dict:
    """Whole updates of `small`, optimizer included, against bare passes without one; full against lean."""
    model, found = make_model(folder, "small"), {}
    cfg, device, batch = config(model), torch.device("cpu"), make_batch(8, 512, 32768)
    everyone = list(range(8))
    policy, critic = ppo.make_policy(cfg), ppo.make_critic(cfg)
    update = {"policy": functools.partial(ppo.update, policy, ppo.policy_loss, batch, everyone, cfg, 0.0, device),
              "critic": functools.partial(ppo.update, critic, ppo.critic_loss, batch, everyone, cfg, 0.0, device)}
    by_length = sorted(everyone, key=batch.size.__getitem__)
    groupings = [[by_length[k:k + many] for k in range(0, 8, many)] for many in (1, 2, 4)]
    for kind, auto_class in (("policy", AutoModelForCausalLM), ("critic", AutoModel)):
        bare = auto_class.from_pretrained(model)
        head = bare.get_output_embeddings().weight if kind == "policy" else torch.nn.Parameter(torch.randn(1, 512))
        passes = [functools.partial(bare_pass, bare.base_model, head, batch, rows) for rows in groupings]
        best = min(passes, key=lambda one: one() or seconds_of(one))  # the first is not measured
        found[f"{kind}_vs_bare"] = compare(update[kind], best)

    def values() -> None:
        ppo.token_pass(batch, cfg, device, critic)

    def logprobs() -> None:
        ppo.token_pass(batch, cfg, device, lambda rows: policy(rows, 1.0)[0])

    lean = (values, update["critic"], update["policy"])
    found["full_vs_lean"] = compare(lambda: [part() for part in lean],
                                    lambda: [part() for part in (*lean, logprobs, logprobs)])
    return found


def bench_growth(folder: str) -> dict:
    """The exponent of time against tokens, `tiny`: five rounds of three sizes in turn after one unmeasured."""
    many, cfg = (128, 512, 2048), config(make_model(folder, "tiny"), packing_max_len=128, micro_train_batch_size=16)
    policy, batches, slopes = ppo.make_policy(cfg), [make_batch(samples, 128, 20) for samples in many], []
    for _ in range(6):
        times = [seconds_of(functools.partial(ppo.update, policy, ppo.policy_loss, batch, list(range(len(batch.size))),
                                              cfg, 0.0, torch.device("cpu"))) for batch in batches]
        slopes.append(np.polyfit(np.log(many), np.log(times), 1)[0])
    note = f"{min(slopes[1:]):.2f} to {max(slopes[1:]):.2f}; {many[0]} to {many[-1]} samples, at last {times[-1]:.1f} s"
    return {"scaling_exponent": (float(statistics.median(slopes[1:])), note)}


def bench_rollout(folder: str) -> dict:
    """1,024 sequences of the demo's shape; the engine that `Sampler` holds, with and without our loop around it."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    sampler = rollout.Sampler(make_model(folder, "tiny"), bf16=False, max_len=64, max_num_seqs=1024)
    prompts = [[1 + k % 9, 11, 1 + k // 9 % 9, 15] for k in range(64)]

    def ours() -> None:
        list(sampler.generate(prompts, 16, list(range(64)), max_new_tokens=[48] * 64, max_len=64))

    def bare() -> None:
        params = [SamplingParams(seed=rollout.hash64(i, k), max_tokens=48, detokenize=False,
                                 output_kind=RequestOutputKind.FINAL_ONLY) for i in range(64) for k in range(16)]
        sampler.llm.generate([tokens_input(prompts[i]) for i in range(64) for _ in range(16)], params, use_tqdm=False)

    policy = ppo.make_policy(config(make_model(folder, "small")))
    copied = rollout.Sampler(f"{folder}/small", bf16=False, max_len=512, max_num_seqs=8, kv_cache_gb=0.5)
    sync = compare(lambda: [w.clone() for _, w in ppo.named_weights(policy)],
                   lambda: copied.sync(ppo.named_weights(policy)))
    return {"rollout_vs_vllm": compare(ours, bare), "sync_vs_copy": sync}


def reward_pairs(count: int) -> list[tuple[str, str]]:
    """A GSM8K-like mix: 97 % numbers (integers, decimals, money, thousands), 3 % expressions; half of them right."""
    rng, pairs = random.Random(0), []
    for k in range(count):
        a, b, right = rng.randint(1, 9999), rng.randint(2, 99), rng.random() < 0.5
        if k % 33 == 0:
            label, same, other = rng.choice(FORMS)
            pairs.append(((same if right else other).format(a=a, b=b), label.format(a=a, b=b)))
        else:
            shown = rng.choice((f"{a}", f"{a:,}", f"\\${a}", f"{a}.00", f"{a} dollars"))
            pairs.append((shown if right else str(a + b), str(a)))
    return pairs


def bench_reward(folder: str) -> dict:
    """Checks a second through `Grader`, extraction included, and how many verdicts change with 16 workers."""
    pairs, verdicts, seconds, timeouts = reward_pairs(8192), [], [], 0
    for workers in (1, 2, 16):
        with reward.Grader(workers=workers) as grader:
            for k in range(workers):  # starts the processes, as the first step of a run does
                grader.compare(k, f"x+y+{k}", f"y+{k}+x")
            grader.results()
            begin = time.perf_counter()
            for k, (predicted, label) in enumerate(pairs):
                grader.submit(k, f"<answer>\\boxed{{{predicted}}}</answer>", "stop", label)
            verdicts.append(grader.results())
            seconds.append(time.perf_counter() - begin)
            timeouts += grader.counts["cpu_timeouts"] + grader.counts["wall_timeouts"]
    differ = sum(verdicts[0][k] != verdicts[2][k] for k in range(len(pairs)))
    return {"checks_per_s": (round(len(pairs) / seconds[1]), "2 workers"), "pairs": (len(pairs), ""),
            "verdicts_differ": (differ, "1 against 16 workers"), "timeouts": (timeouts, "")}


def rank_worker(model: str) -> None:
    """Under torchrun: tokens/s of a policy and a critic update of 64 samples, one thread a rank. With fewer, what does
    not shrink with a rank's tokens (gradients and parameters moved, the optimizer) takes over: docs/LOG.md."""
    rank, _, device, _ = rollout.start_distributed()
    torch.set_num_threads(1)
    cfg = config(model)
    engines = ppo.make_policy(cfg), ppo.make_critic(cfg)
    for batch in make_batch(8, 512, 32768), make_batch(64, 512, 32768):  # the first is not measured
        begin = time.perf_counter()
        for engine, loss_fn in zip(engines, (ppo.policy_loss, ppo.critic_loss)):
            ppo.update(engine, loss_fn, batch, list(range(len(batch.size))), cfg, 0.0, device)
    if rank == 0:
        print(json.dumps(sum(batch.size) / (time.perf_counter() - begin)))


def bench_ranks(folder: str) -> dict:
    """One rank, two ranks, and the ceiling that two runs of one rank at once set, in turn, three times."""
    model, ratios, ceilings = make_model(folder, "small"), [], []

    def start(ranks: int) -> subprocess.Popen:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        return subprocess.Popen([*launcher, __file__, "--ranks", model], stdout=subprocess.PIPE, text=True,
                                stderr=subprocess.DEVNULL, env=bench_trl.alone() | {"OMP_NUM_THREADS": "1"})

    def speed(*runs: subprocess.Popen) -> float:
        return sum(json.loads(run.communicate()[0].splitlines()[-1]) for run in runs)

    for _ in range(3):
        one, two, apart = speed(start(1)), speed(start(2)), speed(start(1), start(1))
        ratios.append(two / one)
        ceilings.append(apart / one)
    note = f"{min(ratios):.2f} to {max(ratios):.2f}; two runs that share nothing: {statistics.median(ceilings):.2f}"
    return {"ranks_2_vs_1": (statistics.median(ratios), note)}


def head_worker(chunked: bool, tokens: int = 8192, hidden: int = 896, vocab: int = 151936) -> None:
    """Prints the bytes that log-probs of `tokens` tokens add to this process's peak, forward and backward."""
    h, w = torch.randn(tokens, hidden, requires_grad=True), torch.randn(vocab, hidden, requires_grad=True)
    ids, start = torch.randint(vocab, (tokens,)), peak()
    if chunked:
        logprobs = ppo.ChunkedLogprob.apply(h, w, ids, 1.0, 2**23 // vocab)[0]  # (T,)
    else:
        logprobs = F.linear(h, w).log_softmax(-1).gather(1, ids[:, None])[:, 0]  # (T,)
    logprobs.sum().backward()
    print(json.dumps(peak() - start))


def peak() -> int:  # in KiB; getrusage would give the parent's, if that is larger
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def bench_memory(folder: str) -> dict:
    """8,192 tokens at Qwen2.5-0.5B's head, each way in a process of its own."""
    peaks = [json.loads(subprocess.run([sys.executable, __file__, "--head", way], capture_output=True, text=True,
                                       check=True).stdout.splitlines()[-1]) for way in ("chunked", "full")]
    return {"memory_vs_full_logits": (peaks[0] / peaks[1], f"{peaks[0] / 2**20:.2f} of {peaks[1] / 2**20:.2f} GiB")}


def bench_step(folder: str) -> dict:
    """Three steps of train.py on `small`; the last one's share outside of rollout, values, critic and policy."""
    model = make_model(folder, "small")
    problems = [{"question": f"{a}+{b}", "answer": f"#### {a + b}"} for a in range(10, 18) for b in range(10, 18)]
    Path(f"{folder}/data.jsonl").write_text("\n".join(map(json.dumps, problems)))
    flags = {
        "model": model, "data": f"{folder}/data.jsonl", "template": "demo", "run_dir": f"{folder}/run", "stop": "",
        "rollout_batch_size": 4, "n_samples_per_prompt": 8, "max_steps": 3, "generate_max_len": 256, "max_len": 512,
        "packing_max_len": 512, "micro_train_batch_size": 2, "prompt_max_len": 64, "zero_stage": 0, "bf16": "false",
        "gradient_checkpointing": "false", "critic_update_steps": 2, "save_interval": 0}
    argv = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    subprocess.run([sys.executable, str(ROOT / "train.py"), *argv], check=True, capture_output=True,
                   env=bench_trl.alone())
    line = json.loads(Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()[-1])
    whole, phases = line["seconds"] + line["seconds_report"], {k[8:]: line[k] for k in line if k[:8] == "seconds_"}
    share = 1 - sum(phases[name] for name in ("rollout", "values", "critic", "policy")) / whole
    phases = sum(x for name, x in phases.items() if name not in ("waited", "report"))
    return {"overhead_share": (share, f"of a step of {whole:.1f} s, reports and TensorBoard included"),
            "phases_share": (phases / line["seconds"], "seconds of all phases / of the step")}


def bench_trl_steps(folder: str) -> dict:
    """64 x 16 samples of the demo's base model; 4 x 8 samples of 96 tokens of `small`."""
    demo.build(f"{folder}/base", 1)
    return bench_trl.compare(folder, "tiny", f"{folder}/base", 64, 16, 48, 64) | bench_trl.compare(
        folder, "small", make_model(folder, "small"), 4, 8, 96, 16)


def main(parts: list[str]) -> None:
    known = {"reward": bench_reward, "update": bench_update, "growth": bench_growth, "rollout": bench_rollout,
             "ranks": bench_ranks, "memory": bench_memory, "step": bench_step, "trl": bench_trl_steps}
    if unknown := set(parts) - set(known):
        sys.exit(f"error: no such part: {' '.join(unknown)}; choose from {', '.join(known)}")
    rollout.start_distributed()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts or known:
            found |= (rows := known[part](folder))
            for name, (value, note) in rows.items():
                print(f"{name:24} {value:10.3f}  target {TARGETS.get(name, '-'):12} {note}", flush=True)
    print(json.dumps({name: round(value, 4) for name, (value, _) in found.items()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks"]:
        rank_worker(sys.argv[2])
    elif sys.argv[1:2] == ["--head"]:
        head_worker(sys.argv[2] == "chunked")
    else:
        main(sys.argv[1:])
