"""nanoORZ: reinforcement learning of reasoning on a base model (Open-Reasoner-Zero): `accelerate launch train.py`.

Owns `Config`, the wiring, the loop and evaluation; never sees LaTeX or packing. A process per GPU (rank) holds a shard
of policy and critic (DeepSpeed) and a sampler (vLLM), in turn. Without --model: demo.py's tiny base, made on the spot.
"""
import contextlib
import ctypes
import difflib
import importlib.util
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # first of all: its imports take 8 s
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a trainer does not outlive its launcher
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning CPU threads get 5 times slower beside other work

import numpy as np
import torch
import torch.distributed as dist
from transformers import HfArgumentParser

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # else DeepSpeed asks aloud

import ckpt
import ppo
from rollout import LengthBudget, Sampler, Signals, Stopped, hash64, problem_order, start_distributed
from tools import check, demo, metrics, plan, reshard
from tools.check import ConfigError
from tools.report import Clock, RunLog, elapsed, progress, quiet


@dataclass
class Config:
    """Every setting; ORZ's value is the default. A flag has its field's name: `--actor_learning_rate 2e-6`."""
    model: str | None = None  # Hugging Face causal LM, folder or name; absent: the demo's tiny model and sizes
    data: list[str] = field(default_factory=list)  # training problems: JSON, JSONL (ORZ or GSM8K form), dataset names
    template: str = "orz"  # orz, demo, plain, or a text with {question}
    seed: int = 42  # all randomness is a hash of this and of what it is for
    num_episodes: int = 20  # passes over the problems
    rollout_batch_size: int = 128  # prompts a step; a multiple of the ranks
    n_samples_per_prompt: int = 64  # responses to each; 2 or more for grpo and rloo
    temperature: float = 1.0  # log-probs and losses are taken at this temperature too
    top_p: float = 1.0
    stop: list[str] = field(default_factory=lambda: ["User:", "Human:", "Assistant:", "</answer>"])  # stay in the text
    prompt_max_len: int = 2048  # tokens; longer prompts are left out, and counted aloud
    generate_max_len: int = 8000  # tokens; a response gets min(this, max_len - prompt)
    max_len: int = 8192  # tokens of prompt and response
    reward: str = "math"  # math (reward.py) or code (tools/sandbox.py)
    partial_reward: bool = False  # of a program: the share of the tests that it passes, not 1 for all and else 0
    first_stage: int = 0  # two-stage sampling: samples before a prompt is judged worth the others; 0: off
    adaptive_len: bool = False  # a prompt's response budget follows what its finished responses needed
    overlong: str = "zero"  # truncated responses: zero (reward 0, trained on) or drop (left out of the loss)
    rollout_quantization: str | None = None  # of the sampler's weights alone: fp8
    tis_cap: float | None = None  # weight a token's loss by its trainer/sampler ratio, truncated here (2.0)
    estimator: str = "gae"  # gae (PPO with critic), grpo, rloo, reinforce
    gamma: float = 1.0  # with lambd 1 the advantage is R - V: unbiased; less favours short answers
    lambd: float = 1.0
    advantage_normalization: bool = True  # whitening over all tokens; gae and reinforce only
    policy_update_steps: int = 1  # more would need the ratio that this code leaves out
    critic_update_steps: int = 12  # optimizer steps over one shuffled pass of the samples
    actor_learning_rate: float = 1e-6
    critic_learning_rate: float = 5e-6
    num_warmup_steps: int = 50  # optimizer steps, from lr/n up
    lr_end: float | None = None  # policy: linear decay to this value at the last step; absent: constant
    fuse_values: bool = False  # values from the critic's training passes: one pass less; gamma = lambda = 1 only
    value_clip: float = 0.2  # around the value before the update
    max_norm: float = 1.0  # gradient clip
    bf16: bool = True  # with fp32 masters and fp32 gradient sums; needs ZeRO 2 or 3
    zero_stage: int = 3  # what DeepSpeed shards: 1 optimizer, 2 gradients, 3 parameters
    debug: bool = False  # ORZ's debug sizes: 16 prompts x 2 samples, 1 critic step
    # from here on, a resumed run may change them: they move when and where things happen, not what is learnt
    run_dir: str = "out/run"  # everything the run writes; on several machines a shared folder
    max_steps: int | None = None  # stop earlier than num_episodes say
    eval_data: list[str] = field(default_factory=list)  # evaluation problems, any number of files
    eval_interval: int = 10  # steps between evaluations; 0: only before and after
    eval_n: int = 1  # responses per evaluation problem; ORZ's paper averages 16
    save_interval: int = 50  # steps between checkpoints; one more at the end and on a signal
    keep_last: int = 2  # newest checkpoints kept; 0: all
    keep_every: int = 0  # and every step divisible by this
    resume: str = "auto"  # auto: newest complete checkpoint of run_dir; none: start over; or a checkpoint's path
    eval_only: bool = False  # evaluate --model on --eval_data, print a table, and leave
    resume_force: bool = False  # go on although a flag that changes the mathematics has changed
    offload: str = "none"  # idle: a model's fp32 states wait in CPU memory while the other works; costs traffic
    dist_timeout: int = 1800  # s before a rank gives up on one that does not answer: over the longest difference
    log_kl: bool = False  # KL to the base model: costs a third model and a forward pass
    log_ratio: bool = False  # trainer against sampler, token by token: costs the sampler's log-probs
    log_comms: bool = False  # seconds and bytes of rank 0's collectives: costs a wait for each of them
    log_with: str = "tensorboard"  # besides metrics.jsonl: tensorboard, wandb (installed and logged in), none
    log_tokens: int = 16  # samples of a step written token by token, with values and advantages
    packing_max_len: int = 16384  # tokens a packed row, at least max_len; without FlashAttention short rows are faster
    micro_train_batch_size: int = 1  # rows a forward pass
    micro_rollout_batch_size: int = 256  # sequences in flight per engine: speed against KV cache
    tensor_parallel: int = 1  # ranks that share a sampler engine, for models too large for one GPU
    gpu_memory_utilization: float = 0.5  # vLLM's share of a GPU while it is awake
    kv_cache_gb: float | None = None  # fixed KV cache size; absent: the rest of vLLM's share, or 1 on a CPU
    enforce_eager: bool = False  # vLLM without CUDA graphs: slower, less memory
    zero3_persistence_threshold: int = 100_000  # parameters smaller than this stay whole under ZeRO-3
    gradient_checkpointing: bool = True  # recompute activations: a third more compute, far less memory
    attention: str = "auto"  # auto: flash_attention_2 where installed, else sdpa


def parse_flags(argv: list[str]) -> Config:
    """Defaults, then the overlays of an absent --model and of --debug, then the flags. Raises ConfigError."""
    def error(message: str):
        raise ConfigError(f"{message}; the fields of Config in train.py are the flags")

    parser, names = HfArgumentParser(Config, allow_abbrev=False), list(vars(Config()))
    parser.error = error
    cfg, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    debug = {"rollout_batch_size": 16, "n_samples_per_prompt": 2, "critic_update_steps": 1} if cfg.debug else {}
    parser.set_defaults(**(demo.FLAGS if cfg.model is None else {}) | debug)
    cfg, _ = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)  # the flags win over both
    if cfg.attention == "auto":
        flash = cfg.bf16 and torch.cuda.is_available() and importlib.util.find_spec("flash_attn")
        cfg.attention = "flash_attention_2" if flash else "sdpa"
    if unknown:
        near = difflib.get_close_matches(unknown[0].lstrip("-"), names, 1, 0)[0]
        raise ConfigError(f"unknown flag {unknown[0]}: did you mean --{near}?")
    return cfg


@dataclass
class Rollout:
    """Sampler and grader together: problems in, scored responses out, the same list on every rank."""
    sampler: Sampler
    task: object  # a module like reward.py
    grader: object
    signals: Signals
    cfg: Config
    group: object  # the ranks of this rank's engine, where there are several
    looks: int = 0

    @classmethod
    def start(cls, task, signals: Signals, cfg: Config):
        """A vLLM engine, and grading processes on this rank's share of the cores. Raises SamplerError."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))  # before vLLM, which sets it to 1
        sampler = Sampler(cfg.model, bf16=cfg.bf16, max_len=cfg.max_len, max_num_seqs=cfg.micro_rollout_batch_size,
                          seed=cfg.seed, kv_cache_gb=cfg.kv_cache_gb, eager=cfg.enforce_eager,
                          gpu_memory_utilization=cfg.gpu_memory_utilization, quantization=cfg.rollout_quantization,
                          tensor_parallel=cfg.tensor_parallel)
        cores, share = len(os.sched_getaffinity(0)), {"partial": True} if cfg.partial_reward else {}
        grader = task.Grader(max(1, cores // here), **share)
        group = dist.new_subgroups(cfg.tensor_parallel)[0] if cfg.tensor_parallel > 1 else None
        return cls(sampler, task, grader, signals, cfg, group)

    def stopped(self) -> bool:
        """For the sampler's loop. The ranks of one engine must leave it at the same step: they vote, now and then."""
        self.looks += 1
        if self.group is None or self.looks % 16:
            return self.group is None and self.signals.poll()
        votes = [None] * self.cfg.tensor_parallel
        dist.all_gather_object(votes, self.signals.poll(), self.group)
        return any(votes)

    def __call__(self, problems, prompts, n: int, purpose: str, step: int, clock, first=0, only=None, caps=None):
        """Responses first .. n to each problem, or to those at the positions `only`, of at most caps[i] tokens: a list
        of dicts in the order of problem and index. Problems are dealt to engines in turn. Raises Stopped."""
        cfg, rank, records, before = self.cfg, dist.get_rank(), [], clock.seconds.get("rollout", 0.0)
        shared, chosen = cfg.tensor_parallel, list(range(len(problems)) if only is None else only)
        mine = chosen[rank // shared::dist.get_world_size() // shared]
        speaks = rank % shared == 0  # the ranks of one engine all hold its samples: they are dealt once
        with clock("rollout"):
            stream = self.sampler.generate(
                [prompts[i] for i in mine], n - first, [hash64(cfg.seed, step, purpose, i) for i in mine], first=first,
                max_new_tokens=[caps[i] if caps else cfg.generate_max_len for i in mine], max_len=cfg.max_len,
                temperature=cfg.temperature, top_p=cfg.top_p, stop=cfg.stop, stopped=self.stopped,
                logprobs=cfg.log_ratio or cfg.tis_cap is not None)
            with contextlib.closing(stream):
                for sample in progress(stream, purpose, total=len(mine) * (n - first), unit="sample"):
                    i, numbers = mine[sample.prompt], self.task.text_metrics(sample.text)
                    if speaks:
                        self.grader.submit(len(records), sample.text, sample.finish_reason, problems[i].label)
                        records.append(vars(sample) | {"problem": i, "text_metrics": numbers})
        with clock("reward"), progress(None, "scoring", total=len(records)) as bar:
            while (pending := self.grader.pending(0.5)) and not self.signals.poll():
                bar.update(len(records) - pending - bar.n)
        with clock("gather"):
            self.signals.agree()  # the first collective since sampling began: here the ranks wait for each other
            for key, reward in self.grader.results().items():
                records[key]["reward"] = reward
            lost = sum(many for event, many in self.grader.counts.items() if event.endswith(("timeouts", "crashes")))
            seconds, parts, losses = zip(*ckpt.everywhere((clock.seconds["rollout"] - before, records, lost)))
            clock.wait, clock.lost = clock.wait + max(seconds) - np.mean(seconds), sum(losses)
            return sorted(sum(parts, []), key=lambda r: (r["problem"], r["index"]))

    def two_stage(self, problems, prompts, step: int, clock, caps, history: dict[str, bool]) -> list[dict]:
        """--first_stage: k samples to each prompt; the other n - k only where they can teach something: not where all
        k are right, nor where all are wrong and the problem's last visit saw no right one either (code: in any case).
        The estimator takes the samples there are. history: problem -> any right, last time; saved with the run."""
        k, n = self.cfg.first_stage, self.cfg.n_samples_per_prompt
        records = self(problems, prompts, k or n, "train", step, clock, caps=caps)
        if k:
            right = np.zeros(len(problems))
            np.add.at(right, [r["problem"] for r in records], [r["reward"] for r in records])  # k: all fully right
            hopeless = [self.cfg.reward == "code" or not history.get(str(p.index), True) for p in problems]
            only = [i for i in range(len(problems)) if 0 < right[i] < k or right[i] == 0 and not hopeless[i]]
            records += self(problems, prompts, n, "train", step, clock, first=k, only=only, caps=caps)
            records.sort(key=lambda r: (r["problem"], r["index"]))
            history |= dict.fromkeys((str(p.index) for p in problems), False)
            history |= {str(problems[r["problem"]].index): True for r in records if r["reward"] > 0}
        return records


def make_batch(records: list[dict], prompts: list[list[int]], device) -> ppo.Batch:
    """Responses to the same problem form a group; the sampled ids are taken as they are."""
    logprobs = [x for r in records for x in r["logprobs"] or ()]
    tokens = {"logprobs": torch.tensor(logprobs, device=device)} if logprobs else {}  # (T,)
    rewards = torch.tensor([r["reward"] for r in records], dtype=torch.float64)  # (N,)
    return ppo.Batch([prompts[r["problem"]] for r in records], [r["response_ids"] for r in records],
                     torch.tensor([r["problem"] for r in records]), rewards, tokens)


def evaluate(rollout: Rollout, sets: dict[str, tuple], step: int, log: RunLog) -> None:
    """eval_n samples of every problem of every set, reported by rank 0."""
    for name, (problems, prompts) in sets.items():
        records = rollout(problems, prompts, rollout.cfg.eval_n, f"eval {name}", step, Clock())
        if dist.get_rank() == 0:
            log.evaluation(name, records, problems, rollout.cfg.eval_n, step)


def evaluate_only(cfg: Config, sets: dict[str, tuple], task, signals: Signals, run_dir: Path) -> None:
    """--eval_only: the same evaluation on the sampler alone; a table, and everything about it in result.json."""
    if ckpt.checkpoints(run_dir) or (run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"--run_dir {run_dir} holds a training run; choose another one for --eval_only")
    first, log = dist.get_rank() == 0, RunLog(run_dir, None)
    if first:
        log.start(0, {}, cfg, dist.get_world_size())
    with (rollout := Rollout.start(task, signals, cfg)).grader:
        evaluate(rollout, sets, 0, log)
    if first:
        log.table(cfg)


def learn(kind: str, engine, batch: ppo.Batch, kept: list[int], step: int, total: int, cfg: Config, device) -> dict:
    """The policy's one optimizer step over the kept samples, or the critic's several, each over its share of one global
    shuffle; under a bar with ORZ's fields. Returns the mean of their statistics."""
    if kind == "critic":
        order, many = np.random.default_rng(hash64(cfg.seed, step, "critic")).permutation(kept), cfg.critic_update_steps
        loss_fn, names, parts = ppo.critic_loss, {"cri": "critic_loss", "vals": "values"}, np.array_split(order, many)
        lrs = [learning_rate(cfg.critic_learning_rate, None, cfg.num_warmup_steps, 0, step * many + k)
               for k in range(many)]
    else:
        loss_fn, names, parts = ppo.policy_loss, {"pg": "policy_loss", "ent": "entropy", "kl": "kl"}, [kept]
        lrs = [learning_rate(cfg.actor_learning_rate, cfg.lr_end, cfg.num_warmup_steps, total, step)]
    per_part = batch.length.sum().item() / len(parts) / dist.get_world_size()  # tokens of this rank
    means = {"ret": batch.rewards.mean(), "glen": batch.length.double().mean(), "tlen": np.mean(batch.size)}
    with progress(None, kind, unit="micro") as bar:
        def report(totals: dict, share: float) -> None:
            bar.update()
            if not bar.disable:
                means.update({k: totals[key] / per_part / share for k, key in names.items() if key in totals})
                means["cri_lr" if kind == "critic" else "act_lr"] = engine.optimizer.param_groups[0]["lr"]
                bar.set_postfix({key: float(value) for key, value in means.items()})
        stats = [ppo.update(engine, loss_fn, batch, list(p), cfg, lr, device, report) for p, lr in zip(parts, lrs)]
    shared = ("grad_norm", "lr", "micro_batches", "tokens", "values")  # names that both models have
    return {f"{kind}_imbalance": max(metrics.imbalance(batch.size, part) for part in parts)} | {
        f"{kind}_{key}" if key in shared else key: float(np.mean([s[key] for s in stats if key in s]))
        for key in max(stats, key=len)}


def focus(engines: dict, at_work: set[str], cfg: Config) -> None:
    """--offload idle: masters and moments of idle engines wait in CPU memory; DeepSpeed's way takes its Adam only."""
    for name, engine in engines.items() if cfg.offload == "idle" else ():
        for master, state in engine.optimizer.optimizer.state.items():
            for tensor in (master, *filter(torch.is_tensor, state.values())):
                before, tensor.data = tensor.data_ptr(), tensor.data.to(engine.device if name in at_work else "cpu")
                Clock.moved += tensor.nbytes * (tensor.data_ptr() != before)


def learning_rate(peak: float, end: float | None, warmup: int, total: int, step: int) -> float:
    """Closed form of the step, from 0: linear from peak/warmup, then constant, or linear to `end` at `total`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak if end is None else peak + (end - peak) * min(1.0, (step + 1 - warmup) / max(1, total - warmup))


def load_task(cfg: Config, run_dir: Path, rank: int, world: int, device, say):
    """The demo's base model where there is no other, the task's module, the tokenizer, the evaluation sets."""
    quiet(run_dir / "run.log")
    check.compile_op()
    seconds = ckpt.everywhere(rank == 0 and cfg.model is None and demo.build(str(run_dir / "base"), cfg.seed))[0] or 0.0
    if cfg.model is None:
        cfg.model = base = str(run_dir / "base")
        cfg.data, cfg.eval_data = cfg.data or [f"{base}/train.json"], cfg.eval_data or [f"{base}/eval.json"]
    task = importlib.import_module({"math": "reward", "code": "tools.sandbox"}[cfg.reward])
    tokenizer = check.read_tokenizer(cfg)
    if device.type == "cuda" and not cfg.eval_only:
        say(plan.check_memory(cfg, world, torch.cuda.mem_get_info(device)[1]))
    return seconds, task, tokenizer, {name: check.read_problems(task, [path], cfg, tokenizer, say, "test")[:2]
                                      for name, path in check.eval_names(cfg).items()}


def main(cfg: Config, rank: int, world: int, device, store) -> None:
    say = print if rank == 0 else lambda *_, **__: None
    check.check_config(cfg, world)
    flags, run_dir = vars(cfg).copy(), Path(cfg.run_dir).absolute()
    lock = ckpt.preflight(run_dir, check.checkpoint_bytes(cfg))  # noqa: F841  held until the process ends
    base_seconds, task, tokenizer, eval_sets = load_task(cfg, run_dir, rank, world, device, say)
    if cfg.eval_only:
        return evaluate_only(cfg, eval_sets, task, Signals(store), run_dir)
    problems, prompts, data = check.read_problems(task, cfg.data, cfg, tokenizer, say)
    all_steps = max(1, cfg.num_episodes * len(problems) // cfg.rollout_batch_size)
    total_steps = all_steps if cfg.max_steps is None else min(all_steps, cfg.max_steps)
    path = ckpt.newest(run_dir, cfg.resume)
    saved = json.loads((path / "state.json").read_text()) if path else {"step": 0}
    start, moved = saved["step"], path and check.check_resume(path, saved, flags, world, data, total_steps, say)
    if start >= total_steps and (run_dir / "result.json").exists():
        return say(f"{run_dir} is complete at step {start}: raise --max_steps, or --resume none to start over")

    signals, log = Signals(store), RunLog(run_dir, tokenizer)
    with progress(None, "loading", total=2) as bar, contextlib.redirect_stdout(sys.__stdout__):  # that is run.log now
        rollout = Rollout.start(task, signals, cfg)
        rollout.sampler.sleep()
        bar.update()
        policy = ppo.make_policy(cfg)
        critic = ppo.make_critic(cfg) if cfg.estimator == "gae" else None
        reference = ppo.make_policy(cfg, trained=False) if cfg.log_kl else None
    engines = {"policy": policy} | ({"critic": critic} if critic else {})
    if path:
        (reshard.load if moved else ckpt.load)(path, progress(engines.items(), f"loading {path.name}"))
    history, budget, due = saved.get("history", {}), LengthBudget(cfg.generate_max_len, saved.get("caps")), False
    if rank == 0:
        log.start(start, saved.get("marks"), cfg, world, device, check.matrices(policy.module.model.config))
    focus(engines, set(), cfg)
    rollout.sampler.sync(ppo.named_weights(policy))
    off = check.check_sampler(rollout.sampler, policy, prompts, cfg, device)
    say(f"{'the demo: ' * (flags['model'] is None)}{cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} "
        f"samples a step, {world} rank(s) of {torch.get_num_threads()} thread(s), ZeRO {cfg.zero_stage}; steps {start} "
        f"to {total_steps}; sampler agrees with trainer to {off:.0e}; ready after {elapsed():.0f} s", flush=True)

    def save(step: int, marks: dict) -> bool:
        state = {"step": step, "episode": step * cfg.rollout_batch_size // len(problems), "config": flags,
                 "world": world, "marks": marks, "versions": check.versions(), "history": history,
                 "caps": budget.caps, "problems": data}
        hf, bar = (tokenizer, policy.module.model.config), progress(engines.items(), f"saving step {step}")
        error = ckpt.save(run_dir, step, bar, state, hf, cfg.keep_last, cfg.keep_every)
        say(f"WARNING: step {step} is NOT saved; next try at the next step: {error}" if error else f"saved step {step}")
        return error is None

    try:
        for step in range(start, total_steps + 1):
            log.flush()
            marks = ckpt.mark(run_dir)
            due = due or step > start and (step == total_steps or cfg.save_interval and step % cfg.save_interval == 0)
            due = due and not save(step, marks)  # and still due where that failed
            signals.agree()
            if step in (0, total_steps) or cfg.eval_interval and step % cfg.eval_interval == 0:
                evaluate(rollout, eval_sets, step, log)
            if step == total_steps:
                break
            clock = Clock()
            # 1 prompts: a pure function of seed and step
            order = problem_order(cfg.seed, len(problems), step * cfg.rollout_batch_size, cfg.rollout_batch_size)
            picked, picked_prompts = [problems[i] for i in order], [prompts[i] for i in order]
            # 2 rollout, 3 reward: a sample is scored as soon as it ends
            caps = [budget.cap(p.index) for p in picked] if cfg.adaptive_len else None
            records = rollout.two_stage(picked, picked_prompts, step, clock, caps, history)
            if cfg.adaptive_len:
                budget.update([picked[r["problem"]].index for r in records], records)
            # 4 pack: one flat batch, the same on every rank
            with clock("pack"):
                rollout.sampler.sleep()
                focus(engines, {"critic"}, cfg)
                batch = make_batch(records, picked_prompts, device)
            kept = [i for i, r in enumerate(records) if cfg.overlong == "zero" or r["finish_reason"] == "stop"]
            # 5 values, of the critic before its update; fused: of the forward passes of that update, before each step
            learned, task_args = {}, (batch, kept, step, total_steps, cfg, device)
            if cfg.fuse_values:  # with gamma = lambda = 1 a token's return is its sample's reward
                with clock("critic"):
                    returns = batch.rewards.float().repeat_interleave(batch.length).to(device)  # (T,)
                    batch.tokens |= {"values": torch.zeros_like(returns), "returns": returns}
                    learned = learn("critic", critic, *task_args)
                    dist.all_reduce(batch.tokens["values"])
            with clock("values"):
                if critic and not cfg.fuse_values:
                    batch.tokens["values"] = ppo.token_pass(batch, cfg, device, critic)
                if reference:
                    batch.tokens["ref_logprobs"] = ppo.token_pass(
                        batch, cfg, device, lambda rows: reference(rows, cfg.temperature)[0])
            # 6 advantage: HACK HERE, in ppo.py
            with clock("advantage"):
                learned |= ppo.compute_advantages(batch, cfg, device, kept)
            # 7 learn: the critic in several steps over one shuffle of the samples, then the policy in one
            if critic and not cfg.fuse_values:
                with clock("critic"):
                    learned |= learn("critic", critic, *task_args)
            with clock("policy"):
                focus(engines, {"policy"}, cfg)
                learned |= learn("policy", policy, *task_args)
            # 8 sync
            with clock("sync"):
                focus(engines, set(), cfg)
                rollout.sampler.sync(ppo.named_weights(policy))
            # 9 report
            if rank == 0:
                log.step(records, picked, batch, learned, step + 1, total_steps, clock, cfg)
    except Stopped:
        if not save(step, marks):
            raise ckpt.CheckpointError(f"stopped at step {step}, which is NOT saved") from None
        return say(f"stopped at step {step}; to go on: {check.resume_command()}")
    except FloatingPointError as error:
        raise FloatingPointError(f"step {step + 1}, {error}; the newest checkpoint is from before it") from error
    finally:
        rollout.grader.close()
        log.close()

    for name, engine in progress(engines.items(), "exporting"):
        ckpt.export(run_dir / name, engine.module.model, ppo.named_weights(engine), tokenizer)
    if due:
        raise ckpt.CheckpointError(f"step {total_steps} is NOT saved, see above; the same command tries again")
    if rank == 0:
        log.result(base_seconds, cfg, total_steps, flags["model"] is None)


if __name__ == "__main__":
    rank, world, store, code = 0, 1, None, 0
    try:
        cfg = parse_flags(sys.argv[1:])
        rank, world, device, store = start_distributed(cfg.dist_timeout)
        main(cfg, rank, world, device, store)
    except Exception as error:
        line, code = check.explain(error, Clock.phase)  # raises what is a bug
        # an error that all ranks share is told by the first of them, with exit code 2; the others are each rank's own
        if code == 1 or check.is_first(store):
            print(f"error: {line}" + f" (rank {rank})" * (world > 1), file=sys.stderr, flush=True)
    os._exit(code)  # not sys.exit: gloo's threads can abort a finalising interpreter, and vLLM's takes 2.6 s
