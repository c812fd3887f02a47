"""The sampler: vLLM inside the training process, one engine per rank, weights synced in memory.

Owns: the process group and its signals, generation, weight sync, sleep and wake. Never sees scores or losses.
Deviations from Open-Reasoner-Zero:
- no Ray, no sampler processes: the engine lives in the trainer's process and takes turns with it on the same device;
- sampled ids are what is returned and trained on (ORZ decodes and encodes again: the last action is often another one);
- each sample's randomness is a hash of (seed, step, purpose, problem, index): not of rank, order or what ran before;
- the prefix cache is reset before every call (ORZ forgets it in one mode and reuses keys of old weights).

Run it alone: `python rollout.py MODEL "a prompt"` prints four samples.
"""
import contextlib
import ctypes
import datetime
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine core in this process, not in a child
# DeepSpeed compiles an op at its first start: in this environment, not in a cache that environments rebuild in turn
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
os.environ["PATH"] = f"{sys.prefix}/bin:{os.environ.get('PATH', os.defpath)}"  # its ninja: another one compiles anew
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's thread count stands; ranks share a machine

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor


class SamplerError(ValueError):
    """vLLM cannot run as asked (memory, model); the message says which flag to change."""


@dataclass
class Sample:
    """One finished response. `response_ids` includes the stop token or the stop string's tokens."""
    prompt: int  # position in the list of prompts given to `generate`
    index: int  # which of the prompt's samples
    response_ids: list[int]
    logprobs: list[float] | None  # of the sampled ids, temperature applied
    text: str
    finish_reason: str  # "stop" (end token or stop string) or "length"


def hash64(*parts) -> int:
    """A seed in [0, 2**63) from any printable parts; the same on every machine and Python run."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def problem_order(seed: int, count: int, start: int, size: int) -> list[int]:
    """Positions start .. start + size of an endless order, each pass shuffled anew: a function of seed and position."""
    orders = {p: np.random.default_rng(hash64(seed, "order", p)).permutation(count)
              for p in range(start // count, (start + size - 1) // count + 1)}
    return [int(orders[k // count][k % count]) for k in range(start, start + size)]


def start_distributed(timeout: float = 1800) -> tuple[int, int, torch.device, dist.Store]:
    """Joins the process group that `accelerate launch` laid out, or makes one of one. Returns rank, world,
    device and the key-value store through which ranks can speak outside of collectives. Raises SamplerError.

    Comes before any engine: vLLM joins the same group and, on a CPU, keeps the number of threads it finds."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" not in os.environ:  # plain `accelerate launch train.py` sets none of these
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ |= dict(zip(names, ("0", "0", "1", "127.0.0.1", str(s.getsockname()[1]))))
    if missing := [name for name in names if name not in os.environ]:
        raise SamplerError(f"RANK is set, but {', '.join(missing)} not: use `accelerate launch`, or set all of them")
    local, gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if gpu and ranks_here > (cards := torch.cuda.device_count()):
        raise SamplerError(f"{ranks_here} ranks on a machine with {cards} GPU(s): lower --num_processes")
    if gpu:
        torch.cuda.set_device(local)
    else:  # accelerate sets one OpenMP thread, and once vLLM runs the number cannot be changed
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
        for option, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD: else glibc gives large tensors
            ctypes.CDLL(None).mallopt(option, value)  # back to the kernel, and new pages cost faults
    if ranks_here < int(os.environ["WORLD_SIZE"]):  # several machines: gloo and vLLM would ask for the host's own name,
        known = {one.address: card for card, its in psutil.net_if_addrs().items() for one in its}  # often 127.0.1.1
        for place in (os.environ["MASTER_ADDR"], "192.0.2.1"):  # which may be the first one's too: then the way out
            with socket.socket(type=socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
                s.connect((place, 9))  # sends nothing: which way would it go?
                if not (address := s.getsockname()[0]).startswith("127.") and address in known:
                    os.environ.setdefault("VLLM_HOST_IP", address)
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", known[address])
    patience = datetime.timedelta(seconds=timeout)
    store, rank, world = next(dist.rendezvous("env://", timeout=patience))
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=world, timeout=patience)
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    return rank, world, device, dist.PrefixStore("nanoorz", store)


class Stopped(Exception):
    """All ranks have agreed to save and leave."""


class Signals:
    """SIGTERM, SIGINT or SIGUSR1 on any rank stops the run on all; a second SIGINT ends this process at once.
    The news travels through a key-value store, since the other ranks may be deep in their own generation."""

    def __init__(self, store):
        self.store, self.asked, self.interrupted, self.next_look = store, False, False, 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.handle)

    def handle(self, number, frame) -> None:
        if number == signal.SIGINT and self.interrupted:
            os._exit(130)
        self.asked, self.interrupted = True, self.interrupted or number == signal.SIGINT

    def poll(self) -> bool:
        """For inner loops: has any rank been asked to stop? Looks at the store twice a second."""
        if self.asked:
            self.store.set("stop", "1")
        elif time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + 0.5
            if self.store.check(["stop"]):  # not |=, which would undo a signal that arrives during the look
                self.asked = True
        return self.asked

    def agree(self) -> None:
        """A collective: raises Stopped on every rank if any was asked."""
        votes = [None] * dist.get_world_size()
        dist.all_gather_object(votes, self.poll())
        if any(votes):
            raise Stopped


class LengthBudget:
    """--adaptive_len: a prompt's cap follows what its finished responses needed, so that a few endless ones do not hold
    up a batch. Its state is `caps`, a JSON of problem -> tokens; every rank computes the same from the same samples."""
    MARGIN, TARGET = 1.5, 0.1  # room over the longest finished response; the share truncated above which a cap grows

    def __init__(self, longest: int, caps: dict[str, int] | None = None):
        """longest: no cap is above it. caps: a former state; "" holds the cap of problems not seen yet."""
        self.longest, self.caps = longest, dict(caps or {"": longest})

    def cap(self, problem: int) -> int:
        """Response tokens allowed to a problem: its own cap, else that of the last batch."""
        return self.caps.get(str(problem), self.caps[""])

    def update(self, problems: list[int], records: list[dict]) -> None:
        """Learns from a batch of responses (fields of Sample) and the problem that each answers."""
        groups = {}
        for problem, record in zip(problems, records):
            for key in (str(problem), ""):
                groups.setdefault(key, []).append((len(record["response_ids"]), record["finish_reason"] == "stop"))
        self.caps |= {key: self.needed(self.caps.get(key, self.caps[""]), seen) for key, seen in groups.items()}

    def needed(self, cap: int, seen: list[tuple[int, bool]]) -> int:
        if sum(not ended for _, ended in seen) > self.TARGET * len(seen):
            return min(self.longest, 2 * cap)
        return min(self.longest, int(self.MARGIN * max(length for length, ended in seen if ended)))


class Sampler:
    """A vLLM engine on this rank, or shared by `tensor_parallel` consecutive ranks, which then make the same calls. On
    a GPU it sleeps (weights and KV cache freed) while the trainer works."""

    def __init__(self, model: str, *, bf16: bool = True, max_len: int = 8192, max_num_seqs: int = 256, seed: int = 0,
                 kv_cache_gb: float | None = None, gpu_memory_utilization: float = 0.5, eager: bool = False,
                 quantization: str | None = None, tensor_parallel: int = 1):
        """Raises SamplerError where the KV cache cannot hold one sequence of `max_len` or vLLM refuses the model."""
        from vllm import LLM  # 6-15 s: not paid by those who only want `Sample` or `hash64`

        self.gpu = torch.cuda.is_available()
        if not self.gpu:  # two helper functions of the log-prob path are compiled: 18 s on a CPU for nothing
            torch.compiler.set_stance("force_eager")
        try:
            first = dist.get_rank() - (place := dist.get_rank() % tensor_parallel)  # on a CPU vLLM's shared memory has
            for left in Path("/dev/shm").glob(f"-tp:*[[]{first}-*{first + tensor_parallel - 1}]-cpushm_{place}"):
                left.unlink()  # one name for all runs; what an ended one left is refused, a living one needs it no more
            self.llm = LLM(
                model=model, dtype="bfloat16" if bf16 else "float32", seed=seed % 2**32, max_model_len=max_len,
                max_num_seqs=max_num_seqs, enforce_eager=eager or not self.gpu, enable_sleep_mode=self.gpu,
                # a prompt in pieces would rewind its seeded generator, which CPU generators cannot do
                enable_chunked_prefill=self.gpu, max_num_batched_tokens=None if self.gpu else max(8192, max_len),
                gpu_memory_utilization=gpu_memory_utilization, logprobs_mode="processed_logprobs",
                quantization=quantization, tensor_parallel_size=tensor_parallel,
                # a cache sized from whatever memory is free changes the schedule, and with it the bits, between runs
                kv_cache_memory_bytes=int(kv_cache_gb * 2**30) if kv_cache_gb else None if self.gpu else 2**30,
                distributed_executor_backend="external_launcher", use_tqdm_on_load=False)
        except (ValueError, MemoryError, RuntimeError, OSError) as error:  # what vLLM raises is not one class
            reason = " ".join(str(error).split())
            hint = "; raise --kv_cache_gb or lower --max_len" if "cache" in reason else ""
            raise SamplerError(f"vLLM cannot start with --model {model}, --kv_cache_gb {kv_cache_gb}, --max_len "
                               f"{max_len}, --rollout_quantization {quantization}: {reason[:400]}{hint}") from error
        self.tokenizer = self.llm.get_tokenizer()

    def generate(self, prompts: list[list[int]], n: int, seeds: list[int], *, max_new_tokens: list[int], max_len: int,
                 temperature: float = 1.0, top_p: float = 1.0, stop: Sequence[str] = (), logprobs: bool = False,
                 first: int = 0, stopped: Callable[[], bool] = lambda: False) -> Iterator[Sample]:
        """Yields each of the n samples per prompt as it ends; `stopped` or closing the generator aborts the rest.

        Prompt i gets at most max_new_tokens[i], and prompt and response together max_len.
        Sample k of prompt i is drawn with the seed hash64(seeds[i], k), k from `first` on: a second call can go on
        where a first one ended. Without stop strings vLLM need not detokenize: faster on small models."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        # keys of old weights; and samples must not depend on what ran before, by warm blocks as little as by seeds
        assert self.llm.reset_prefix_cache(), "requests are still running: their blocks would be reused"
        stop = [text for text in stop if text]
        engine, waiting = self.llm.llm_engine, {}
        try:
            for i, prompt in enumerate(prompts):
                for k in range(first, first + n):
                    params = SamplingParams(
                        temperature=temperature, top_p=top_p, seed=hash64(seeds[i], k), stop=stop,
                        detokenize=bool(stop), include_stop_str_in_output=bool(stop), logprobs=0 if logprobs else None,
                        max_tokens=min(max_new_tokens[i], max_len - len(prompt)),
                        output_kind=RequestOutputKind.FINAL_ONLY)
                    waiting[f"{i}:{k}"] = i, k
                    engine.add_request(f"{i}:{k}", tokens_input(prompt), params)
            while engine.has_unfinished_requests() and not stopped():
                for output in engine.step():
                    if output.finished:
                        yield self.sample(*waiting.pop(output.request_id), output.outputs[0], bool(stop), logprobs)
        finally:
            engine.abort_request(list(waiting))

    def sample(self, prompt: int, index: int, completion, detokenized: bool, logprobs: bool) -> Sample:
        ids = list(completion.token_ids)
        text = completion.text if detokenized else self.tokenizer.decode(ids, skip_special_tokens=True)
        chosen = [step[token].logprob for step, token in zip(completion.logprobs, ids)] if logprobs else None
        return Sample(prompt, index, ids, chosen, text, completion.finish_reason)

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the engine's weights by (Hugging Face name, tensor) pairs; all ranks call it. Wakes the engine.

        On a GPU the order bounds the peak: weights awake, sync, and only then the KV cache."""
        if self.gpu:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.gpu:
            self.llm.wake_up(tags=["kv_cache"])

    def sleep(self) -> None:
        """Frees weights and KV cache on a GPU (level 2: the next sync brings the weights); nothing on a CPU."""
        if self.gpu:
            self.llm.sleep(level=2)


if __name__ == "__main__":
    start_distributed()
    sampler = Sampler(sys.argv[1], bf16=False, max_len=256)
    prompt = sampler.tokenizer.encode(sys.argv[2])
    for sample in sampler.generate([prompt], 4, [0], max_new_tokens=[128], max_len=256):
        print(f"[{sample.index}, {sample.finish_reason}] {sample.text}", flush=True)
