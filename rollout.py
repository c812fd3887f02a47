"""The sampler: vLLM inside the training process, one per `tensor_parallel` ranks, synced in memory.

Owns requests and samples, generation, weight sync, sleep and wake. Never sees a loss.

Deviations from Open-Reasoner-Zero (ORZ):
- There is no Ray and there are no sampler processes. The sampler lives in the trainer's process and
  takes turns with the trainer on the same device.
- The sampled ids are what is returned and trained on. ORZ decodes and encodes again, and the last
  action is often another one then.
- A sample's randomness is a hash of the seed, the step, the purpose, the problem's place in the
  step, and the sample's index. It does not depend on the rank that draws it, on the order, or on
  what ran before.
- The prefix cache is reset before every call. ORZ forgets that in one mode and reuses the keys of
  old weights.

Run it alone: `python rollout.py MODEL "a prompt"` prints four samples.
"""

import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

# vLLM runs in this process, uses the trainer's threads, and logs errors only.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# vLLM sends no usage statistics. Triton's products of fp32 are exact (no TF32), also on a GPU.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
# With a seed for each sample vLLM never uses flashinfer's sampler, but would import it.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from lib.common import UserError, agree, gather, hash64, one_line, start_distributed


@dataclass(frozen=True)
class Request:
    """One sample to draw."""

    # Its prompt_ids are what is sampled from, its label is for the grader.
    problem: object
    group: int  # position of the problem in its step
    index: int  # which of the problem's samples
    seed: int
    max_tokens: int  # of the response
    temperature: float
    top_p: float


@dataclass
class Sample:
    """A finished response. Its ids include the stop token or the tokens of the stop string."""

    request: Request
    response_ids: list[int]
    logprobs: list[float] | None  # of these ids, temperature applied
    text: str
    finish_reason: str  # "stop" or "length"
    reward: float = 0.0
    answer: str | None = None  # what the grader took for its answer, if it has one
    text_metrics: dict[str, float] = field(default_factory=dict)


def requests_of_step(problems, cfg, step) -> list[Request]:
    """Asks for n samples of each problem whose turn it is. It is a function of seed and step."""
    chosen = problem_order(problems, cfg, step)
    seeds = problem_seeds(cfg.seed, step, "train", len(chosen))
    return make_requests(
        chosen, seeds, cfg.n_samples_per_prompt, cfg.generate_max_len, cfg.temperature, cfg.top_p
    )


def problem_seeds(seed, step, purpose, count) -> list[int]:
    """A seed for each of `count` problems. Two purposes in one step share no randomness."""
    return [hash64(seed, step, purpose, group) for group in range(count)]


def make_requests(problems, seeds, count, max_tokens, temperature, top_p) -> list[Request]:
    """Asks for `count` samples of every problem. The randomness depends on `seeds` alone."""
    requests = []
    for group, problem in enumerate(problems):
        for index in range(count):
            seed = hash64(seeds[group], index)
            requests.append(Request(problem, group, index, seed, max_tokens, temperature, top_p))
    return requests


def problem_order(problems, cfg, step) -> list:
    """Returns the problems of a step: the next ones of an endless order of all problems."""
    passes = {}
    chosen = []
    start = step * cfg.rollout_batch_size
    for position in range(start, start + cfg.rollout_batch_size):
        number, offset = divmod(position, len(problems))
        if number not in passes:
            passes[number] = pass_order(problems, cfg, number)
        chosen.append(problems[passes[number][offset]])
    return chosen


def pass_order(problems, cfg, number) -> list[int]:
    """Returns the indices of the problems in a pass over them: each pass is shuffled anew."""
    rng = np.random.default_rng(hash64(cfg.seed, "order", number))
    return rng.permutation(len(problems)).tolist()


class Sampler:
    """vLLM on this rank. With `tensor_parallel` above 1, so many consecutive ranks share a sampler.

    Ranks that share a sampler must make the same calls. On a GPU the sampler sleeps, without
    weights and KV cache, while the trainer works. The last lines of this file list the fields of
    cfg that the sampler reads.
    """

    def __init__(self, cfg):
        """Raises UserError where vLLM refuses the model, or the cache cannot hold one sequence."""
        # vLLM takes 6 to 15 s to import, which whoever only needs a Request should not pay.
        from vllm import LLM

        self.cfg = cfg
        self.gpu = torch.cuda.is_available()
        if not self.gpu:
            # vLLM compiles two helpers of its log-prob path: 18 s on a CPU for nothing.
            torch.compiler.set_stance("force_eager")
        threads = torch.get_num_threads()
        try:
            self.llm = LLM(**sampler_settings(cfg, self.gpu))
        # What vLLM raises is not one class.
        except (ValueError, MemoryError, RuntimeError, OSError) as error:
            raise UserError(
                f"vLLM cannot start with --model {cfg.model}, --max_len {cfg.max_len}, "
                f"--kv_cache_gb {cfg.kv_cache_gb}: {one_line(error)}"
            ) from error
        # On a GPU it leaves one thread, and the trainer still works on the CPU.
        torch.set_num_threads(threads)
        self.tokenizer = self.llm.get_tokenizer()
        self.stop_ids = special_ids(self.tokenizer, cfg.stop)

    def generate(self, requests: list[Request], stopped=None, with_logprobs=False):
        """Yields (position in `requests`, sample) as samples end, in any order.

        `stopped()` is asked before each decode. If it says yes, or the generator is closed, the
        samples that have not ended are dropped. A response is cut where prompt and response
        together fill max_len.
        """
        from vllm.inputs import tokens_input

        # A block that is still warm has keys of old weights, or would change the schedule.
        is_cold = self.llm.reset_prefix_cache()
        assert is_cold, "requests are still running: blocks would be reused"
        llm_engine = self.llm.llm_engine
        waiting = {str(position) for position in range(len(requests))}
        try:
            for position, request in enumerate(requests):
                prompt = tokens_input(request.problem.prompt_ids)
                params = sampling_params(request, self.cfg, self.stop_ids, with_logprobs)
                llm_engine.add_request(str(position), prompt, params)
            for output in finished_outputs(llm_engine, stopped):
                waiting.remove(output.request_id)
                position = int(output.request_id)
                yield position, self.make_sample(requests[position], output.outputs[0])
        finally:
            llm_engine.abort_request(list(waiting))

    def make_sample(self, request, completion) -> Sample:
        ids = list(completion.token_ids)
        text = completion.text
        if not self.cfg.stop:
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
        logprobs = None
        if completion.logprobs:
            logprobs = [found[token].logprob for found, token in zip(completion.logprobs, ids)]
        return Sample(request, ids, logprobs, text, completion.finish_reason)

    def sync(self, weights: Iterable[tuple[str, Tensor]]):
        """Replaces the weights by (Hugging Face name, tensor) pairs, and wakes the sampler.

        All ranks call it. On a GPU the order bounds the peak: the weights wake up, are replaced,
        and only then the KV cache wakes up.
        """
        if self.gpu:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.gpu:
            self.llm.wake_up(tags=["kv_cache"])

    def sleep(self):
        """Frees weights and KV cache on a GPU; the next sync brings the weights (level 2)."""
        if self.gpu:
            self.llm.sleep(level=2)


def sampling_params(request, cfg, stop_ids, with_logprobs):
    """vLLM's form of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    room = cfg.max_len - len(request.problem.prompt_ids)
    most = min(request.max_tokens, room)
    params = SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        max_tokens=most,
        stop=cfg.stop,
        stop_token_ids=stop_ids,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    # Without stop strings vLLM need not detokenize, which is faster on small models.
    params.detokenize = bool(params.stop)
    if with_logprobs:
        params.logprobs = 0
    return params


def sampler_settings(cfg, is_gpu) -> dict:
    """The arguments of vLLM."""
    settings = {
        "model": cfg.model,
        "dtype": "bfloat16" if cfg.bf16 else "float32",
        "max_model_len": cfg.max_len,
        "max_num_seqs": cfg.micro_rollout_batch_size,
        "gpu_memory_utilization": cfg.gpu_memory_utilization,
        "tensor_parallel_size": cfg.tensor_parallel,
        "enforce_eager": cfg.enforce_eager,
        "enable_sleep_mode": is_gpu,
        "logprobs_mode": "processed_logprobs",
        "distributed_executor_backend": "external_launcher",
        "use_tqdm_on_load": False,
    }
    if cfg.kv_cache_gb:
        settings["kv_cache_memory_bytes"] = int(cfg.kv_cache_gb * 2**30)
    if not is_gpu:
        settings["enforce_eager"] = True
        # A prompt in pieces rewinds its seeded generator, which CPU generators cannot do.
        settings["enable_chunked_prefill"] = False
        settings["max_num_batched_tokens"] = max(8192, cfg.max_len)
        # A cache sized from the memory that is free changes the schedule between runs, and
        # with it the last bits.
        settings.setdefault("kv_cache_memory_bytes", 2**30)
    return settings


def finished_outputs(llm_engine, stopped):
    """Decodes until nothing is left to do or `stopped` says so."""
    while llm_engine.has_unfinished_requests() and not (stopped and stopped()):
        for output in llm_engine.step():
            if output.finished:
                yield output


def special_ids(tokenizer, texts):
    """The ids of those texts that are special tokens, such as the end of a chat's turn.

    vLLM strips them before it looks for stop strings, and so needs their ids.
    """
    ids = []
    for id, token in tokenizer.added_tokens_decoder.items():
        if token.special and token.content in texts:
            ids.append(id)
    return ids


class Rollout:
    """The sampler and the grader together: requests in, scored samples out, alike on all ranks."""

    def __init__(self, task, signals, cfg):
        """task: a module like reward.py. signals: of lib/signals.py. Raises UserError."""
        # vLLM sets LOCAL_WORLD_SIZE to 1, so the ranks that share the cores are counted first.
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self.sampler = Sampler(cfg)
        workers = max(1, len(os.sched_getaffinity(0)) // ranks_here)
        self.grader = task.Grader(workers, cfg.answer_form)
        self.task = task
        self.signals = signals
        self.cfg = cfg

    def stopped(self):
        """Asked before each decode. Ranks that share a sampler must leave it at the same decode, so
        they finish their rollout before they stop."""
        if self.cfg.tensor_parallel > 1:
            return False
        return self.signals.poll()


def draw_step(rollout, requests, problems, cfg, step, clock) -> list[Sample]:
    """Draws the samples that a step learns from. A variant may draw fewer, more or others."""
    return draw(rollout, requests, clock)


def draw(rollout, requests: list[Request], clock) -> list[Sample]:
    """Draws and scores every request; the samples have the requests' order. Raises Stopped.

    All ranks call it together, in evaluations too.

    A sample is handed to the grader as soon as it ends, while the others are still sampled.
    """
    signals = rollout.signals
    grader = rollout.grader
    agree(signals.poll())
    lost_before = grader.lost
    with clock("rollout"):
        mine = draw_my_share(rollout, requests)
    with clock("reward"):
        while grader.pending(0.5) and not signals.poll():
            pass
    with clock("gather"):
        # The first collective since sampling began: here the ranks wait for each other.
        agree(signals.poll(), grader.broken)
        for position, reward in grader.results().items():
            mine[position].reward = reward
        # Of this step: the checks of all ranks that ended without a verdict.
        lost = sum(gather(grader.lost - lost_before))
        clock.numbers["reward_lost"] = clock.numbers.get("reward_lost", 0) + lost
        seconds = gather(clock.seconds["rollout"])
        clock.numbers["seconds_waited"] = max(seconds) - float(np.mean(seconds))
        return exchange(requests, mine)


def draw_my_share(rollout, requests: list[Request]) -> dict[int, Sample]:
    """Returns {position: sample} of this rank's sampler.

    Single samples are dealt to the samplers in turn, so that no sampler is left with all the long
    samples of one hard problem.
    """
    cfg = rollout.cfg
    sampler, rank_in_sampler = divmod(dist.get_rank(), cfg.tensor_parallel)
    samplers = dist.get_world_size() // cfg.tensor_parallel
    positions = range(sampler, len(requests), samplers)
    share = [requests[position] for position in positions]
    mine = {}
    broken = None
    with contextlib.closing(
        rollout.sampler.generate(share, rollout.stopped, cfg.log_ratio)
    ) as stream:
        # Rank 0 shows a bar, if it has a terminal: that is what None asks tqdm to find out.
        hidden = dist.get_rank() > 0 or None
        for k, sample in tqdm(stream, "sampling", len(share), leave=False, disable=hidden):
            # All ranks of a sampler get its samples; only its first rank hands them on.
            if rank_in_sampler == 0:
                mine[positions[k]] = sample
                try:
                    grade(rollout, positions[k], sample)
                except Exception as error:
                    # The ranks that share a sampler must leave it together.
                    broken = error
    if broken:
        raise broken
    return mine


def grade(rollout, position, sample):
    """Hands a sample to the grader. Raises UserError where the task does not return its answer."""
    sample.text_metrics = rollout.task.text_metrics(sample.text)
    label = sample.request.problem.label
    sample.answer = rollout.grader.submit(position, sample.text, sample.finish_reason, label)
    if isinstance(sample.answer, bool):
        raise UserError(
            f"--task {rollout.cfg.task}: Grader.submit returned {sample.answer}; its last line "
            "must be `return answer`: the answer's text, or None where a response has none"
        )


def exchange(requests: list[Request], mine: dict[int, Sample]) -> list[Sample]:
    """Gives every rank the samples of all ranks. The problems are not sent: each rank has them."""
    for sample in mine.values():
        sample.request = None
    samples = {}
    for share in gather(mine):
        samples |= share
    for position, sample in samples.items():
        sample.request = requests[position]
    return [samples[position] for position in range(len(requests))]


if __name__ == "__main__":
    start_distributed()
    cfg = SimpleNamespace(
        model=sys.argv[1],
        bf16=False,
        max_len=256,  # tokens
        stop=[],
        micro_rollout_batch_size=4,
        gpu_memory_utilization=0.5,
        kv_cache_gb=None,
        tensor_parallel=1,
        enforce_eager=True,
    )
    sampler = Sampler(cfg)
    problem = SimpleNamespace(prompt_ids=sampler.tokenizer.encode(sys.argv[2]))
    four = make_requests([problem], seeds=[0], count=4, max_tokens=128, temperature=1.0, top_p=1.0)
    for _, sample in sampler.generate(four):
        print(f"[{sample.request.index}, {sample.finish_reason}] {sample.text}", flush=True)
