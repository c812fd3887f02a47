"""Requests and samples; the sampler, which is vLLM inside the training process; the rollout.

A request asks for one sample: one response to a problem. The sampler draws the sample, and the
grader of the task scores it. The sampler also gets new weights here, and sleeps while the trainer
works. This file never sees a loss.

A response may have several turns. A turn is what the policy draws until it stops. Then a reply may
come: text that the policy does not draw, such as the result of a tool. The policy goes on behind
the reply with its next turn (docs/turns.md).

Deviations from Open-Reasoner-Zero (ORZ):
- There is no Ray, and the sampler has no process of its own. Sampler and trainer use the same GPU,
  one after the other.
- The policy is trained on the sampled token ids. ORZ decodes the ids to a text and encodes the text
  again, which often changes the last token.
- The randomness of a sample is a hash of the seed, the step, the purpose, the problem's place in
  the step, and the number of the sample. The rank, the order and earlier samples do not change it.
- A response may have replies in it. ORZ's responses have one turn.
- vLLM's prefix cache is emptied before every call, because it was computed with old weights. ORZ
  has a mode that does not empty it.

To use this file elsewhere, copy nanoorz/ranks.py and nanoorz/process.py, too. Such a copy works for
models that read text alone, and no images. Call `start_distributed` of ranks.py first. A Sampler
reads these fields of cfg: model, bf16, max_len, stop, packing, micro_rollout_batch_size,
gpu_memory_utilization, kv_cache_gb, tensor_parallel and enforce_eager, and for replies max_turns
and reply_seconds. It calls sampler_settings and sampling_params of ppo.Recipe. A problem needs the
field prompt_ids.
"""

import contextlib
import functools
import inspect
import os
import re
import signal
import threading
import time
from collections.abc import Iterable
from concurrent import futures
from dataclasses import dataclass, field
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

# The import of process.py sets environment variables of vLLM.
from nanoorz import process  # noqa: F401
from nanoorz.ranks import (
    UserError,
    agree,
    check_result,
    describe_error,
    gather,
    hash64,
    one_line,
    stop_together,
)

# ---- requests and samples ------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Asks for one sample of a problem. All samples of one problem in a step are a group."""

    problem: object  # has prompt_ids for the sampler and a label for the grader
    group: int  # its number: the place of the problem among the problems of the step
    sample_number: int  # the place of the sample among the samples of its group
    seed: int  # of this sample alone
    max_tokens: int  # the limit of the response
    temperature: float
    top_p: float


@dataclass
class Sample:
    """A response. response_ids include the stop token or stop string that ended a turn."""

    request: Request
    response_ids: list[int]
    logprobs: list[float] | None  # log p of each drawn token, at the sampling temperature
    text: str
    finish_reason: str  # "stop", or "length": the response is truncated
    reward: float = 0.0  # of several rewards the first one
    answer: str | None = None  # the answer that the grader found in the text
    text_metrics: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)  # of a task that names its rewards
    # Without the next two fields the response has one turn and no reply.
    drawn: list[bool] | None = None  # of each of response_ids: has the policy drawn it?
    parts: list[str] | None = None  # of the text: a turn, a reply, a turn, and so on

    def __post_init__(self):
        if self.drawn is None:
            self.drawn = [True] * len(self.response_ids)
        if self.parts is None:
            self.parts = [self.text]

    @property
    def turns(self) -> list[str]:
        """The text of each turn."""
        return self.parts[::2]

    @property
    def drawn_text(self) -> str:
        """The text with a newline in place of each reply."""
        return "\n".join(self.turns)


def requests_of_step(problems, cfg, step) -> list[Request]:
    """The requests of a training step. Their randomness depends on the seed and the step alone."""
    chosen = problems_of_step(problems, cfg, step)
    seeds = problem_seeds(cfg.seed, step, "train", len(chosen))
    return make_requests(
        chosen, seeds, cfg.n_samples_per_prompt, cfg.generate_max_len, cfg.temperature, cfg.top_p
    )


def problems_of_step(problems, cfg, step) -> list:
    """The problems of a step. An episode is one pass over all problems."""
    orders = {}  # {number of an episode: its order}
    chosen = []
    start = step * cfg.rollout_batch_size
    # Position 0 is the first problem of the first episode. The episodes follow each other.
    for position in range(start, start + cfg.rollout_batch_size):
        episode, place = divmod(position, len(problems))
        if episode not in orders:
            order = cfg.episode_order(problems, episode)
            is_right = isinstance(order, list) and sorted(order) == list(range(len(problems)))
            wanted = f"a list of the indices of all {len(problems)} problems"
            check_result(cfg, "episode_order", is_right, wanted, order)
            orders[episode] = order
        chosen.append(problems[orders[episode][place]])
    return chosen


def problem_seeds(seed, step, purpose, problem_count) -> list[int]:
    """A seed for each problem. purpose: any text. Another purpose gives other seeds."""
    return [hash64(seed, step, purpose, group) for group in range(problem_count)]


def make_requests(problems, seeds, samples_each, max_tokens, temperature, top_p) -> list[Request]:
    """Asks for `samples_each` samples of each problem. seeds: one for each problem."""
    requests = []
    for group, problem in enumerate(problems):
        for number in range(samples_each):
            seed = hash64(seeds[group], number)
            requests.append(Request(problem, group, number, seed, max_tokens, temperature, top_p))
    return requests


# ---- the sampler ---------------------------------------------------------------------------------


class Sampler:
    """vLLM on this rank. `tensor_parallel` consecutive ranks share one sampler.

    Ranks that share a sampler must make the same calls. On a GPU the sampler sleeps while the
    trainer works: then it has neither weights nor KV cache. `sync` wakes it and gives it weights.
    """

    def __init__(self, cfg):
        """Raises UserError if vLLM cannot start with this model and these limits."""
        # The import of vLLM takes 6 to 15 s. Code that needs only a Request does not wait for it.
        from transformers import AutoConfig
        from vllm import LLM

        self.cfg = cfg
        self.gpu = torch.cuda.is_available()
        if not self.gpu:
            # Without this vLLM compiles two small functions, which takes 18 s on a CPU. This holds
            # for the whole process, so --compile_layers is refused on a CPU.
            torch.compiler.set_stance("force_eager")
        threads = torch.get_num_threads()
        settings = make_settings(cfg, self.gpu)
        config = AutoConfig.from_pretrained(cfg.model)
        # A model that reads images, too, has a config of its text part.
        has_other_parts = config.get_text_config() is not config
        if has_other_parts:
            # Here and not at the top, because a copy of this file may not have families.py.
            from nanoorz import families

            settings |= families.text_part_settings(cfg.model)
        try:
            self.llm = LLM(**settings)
        # vLLM has no error class of its own.
        except (ValueError, MemoryError, RuntimeError, OSError) as error:
            why = one_line(error)
            is_small = "No available memory for the cache" in why or "at least one request" in why
            if "kv_cache_memory_bytes" in settings and is_small:
                # vLLM would advise to change a flag that has no effect here.
                gb = f"{settings['kv_cache_memory_bytes'] / 2**30:.3g}"
                told = f"has no room for a sample of --max_len {cfg.max_len} tokens; raise it"
                raise UserError(f"--kv_cache_gb {gb}: {told}, or lower --max_len") from error
            raise UserError(
                f"vLLM cannot start with --model {cfg.model}, --max_len {cfg.max_len}, "
                f"--kv_cache_gb {cfg.kv_cache_gb}: {why}"
            ) from error
        # On a GPU vLLM sets one thread. The trainer needs more for its work on the CPU.
        torch.set_num_threads(threads)
        if has_other_parts:
            # With these settings vLLM has read no weights.
            families.fill_sampler(self.llm, cfg.model)
        self.tokenizer = self.llm.get_tokenizer()
        self.stop_ids = special_ids(self.tokenizer, cfg.stop)
        self.tags = special_tags(self.tokenizer)
        self.hidden = special_tokens(self.tokenizer).keys() - self.tags
        # A tokenizer may know more tokens than the embedding of the model.
        self.vocabulary = config.get_text_config().vocab_size

    def generate(self, requests: list[Request], must_stop=None, with_logprobs=False, reply=None):
        """Yields (position in `requests`, sample) as soon as a sample ends.

        `must_stop()` is called before each decode. If it returns True, or if the caller closes the
        generator, the samples that have not ended are dropped. A response also ends when prompt
        and response together have max_len tokens. reply: the function of ppo.Recipe.reply_function.
        Raises UserError if a reply cannot be used.
        """
        # The prefix cache was computed with old weights. A prefix in it would also change vLLM's
        # schedule, and the schedule changes the last bits of log-probs.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache is not empty: an earlier call has requests left")
        llm_engine = self.llm.llm_engine
        samples = [Sample(request, [], None, "", "", parts=[]) for request in requests]
        drawing = set()  # the positions of the samples that vLLM draws now
        replies = Replies(reply, self.cfg, must_stop)
        try:
            for position, sample in enumerate(samples):
                self.begin_turn(position, sample, with_logprobs)
                drawing.add(position)
            while (drawing or replies.waiting) and not (must_stop and must_stop()):
                for output in llm_engine.step() if drawing else []:
                    if not output.finished:
                        continue
                    position = int(output.request_id)
                    drawing.remove(position)
                    sample = samples[position]
                    self.end_turn(sample, output.outputs[0])
                    # A full response that was cut cannot go on. If it has stopped, it may be
                    # finished, and the reply decides whether it is.
                    is_full = room_for_tokens(sample, self.cfg) == 0
                    if reply and not (is_full and sample.finish_reason == "length"):
                        replies.ask(position, sample)
                    else:
                        yield position, sample
                # A signal to this process may also have ended a tool, and that is no error.
                if replies.waiting and must_stop and must_stop():
                    return
                for position, text in replies.take(may_wait=not drawing).items():
                    if self.add_reply(samples[position], text):
                        self.begin_turn(position, samples[position], with_logprobs)
                        drawing.add(position)
                    else:
                        yield position, samples[position]
        finally:
            replies.close()
            llm_engine.abort_request([str(position) for position in drawing])

    def begin_turn(self, position, sample: Sample, with_logprobs):
        """Gives vLLM the ids of the prompt and of the response so far."""
        from vllm.inputs import tokens_input

        prompt = tokens_input(sample.request.problem.prompt_ids + sample.response_ids)
        params = make_params(sample, self.cfg, self.stop_ids, with_logprobs)
        self.llm.llm_engine.add_request(str(position), prompt, params)

    def end_turn(self, sample: Sample, completion):
        """Adds a turn to a sample. completion: vLLM's."""
        ids = list(completion.token_ids)
        text = completion.text
        # Without stop strings vLLM makes no text (make_params). vLLM's text lacks special tokens.
        if not self.cfg.stop or self.tags.intersection(ids):
            kept = [id for id in ids if id not in self.hidden]
            text = self.tokenizer.decode(kept, skip_special_tokens=False)
            # vLLM's text ends with the stop string. The last token may hold more.
            end = completion.stop_reason
            if isinstance(end, str) and end in text:
                text = text[: text.rindex(end) + len(end)]
        sample.response_ids += ids
        sample.drawn += [True] * len(ids)
        sample.parts.append(text)
        sample.text += text
        sample.finish_reason = completion.finish_reason
        if completion.logprobs:
            found = [entry[token].logprob for entry, token in zip(completion.logprobs, ids)]
            sample.logprobs = (sample.logprobs or []) + found

    def add_reply(self, sample: Sample, text) -> bool:
        """Adds a reply to a sample. Returns whether another turn follows.

        text: None if there is no reply. The response is truncated, and the reply is dropped, if
        there is no room for the reply and another token, if the sample has max_turns turns, if the
        model lacks a token of the reply, or if the tokenizer has no token for its text.
        """
        if text is None:
            return False
        # A token has fewer than 100 characters. To read a very long text takes minutes.
        begin = text[: 100 * self.cfg.max_len]
        ids = self.tokenizer(begin, add_special_tokens=False)["input_ids"]
        has_room = len(ids) < room_for_tokens(sample, self.cfg)
        has_turns = len(sample.turns) < self.cfg.max_turns
        is_known = max(ids, default=0) < self.vocabulary and bool(ids or not text)
        if not (has_room and has_turns and is_known):
            sample.finish_reason = "length"
            return False
        sample.response_ids += ids
        sample.drawn += [False] * len(ids)
        sample.parts.append(text)
        sample.text += text
        return True

    def sync(self, weights: Iterable[tuple[str, Tensor]]):
        """Wakes the sampler and replaces its weights. weights: (Hugging Face name, tensor) pairs.

        A collective: under ZeRO-3 the iterator gathers each weight from all ranks. That needs
        memory, so the KV cache wakes up afterwards.
        """
        if self.gpu:
            self.llm.wake_up(tags=["weights"])
        if self.gpu and all(self.llm.apply_model(keeps_weights_as_loaded)):
            self.llm.apply_model(functools.partial(load_all, weights=weights))
        else:
            # This repeats what vLLM does with weights after it has loaded them. It takes three
            # times as long.
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.gpu:
            self.llm.wake_up(tags=["kv_cache"])

    def sleep(self):
        """On a GPU, frees weights and KV cache. `sync` gives the sampler new weights."""
        # At level 1 vLLM would keep a copy of the weights in the memory of the CPU.
        if self.gpu:
            self.llm.sleep(level=2)


def keeps_weights_as_loaded(model) -> bool:
    """Does vLLM on a GPU use each weight in the form in which it is loaded?

    vLLM changes quantized weights, weights of experts, and weights of latent attention (MLA).
    Layers of a class that is not named here count as changed.
    """
    plain = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
    methods = {type(x.quant_method).__name__ for x in model.modules() if hasattr(x, "quant_method")}
    changes = hasattr(model, "process_weights_after_loading")
    changes = changes or any("MLA" in type(x).__name__ for x in model.modules())
    return methods <= plain and not changes


def load_all(model, weights):
    """Loads all weights of vLLM's model. Raises UserError if one of them got no value."""
    loaded = model.load_weights(weights)
    lacking = sorted({name for name, _ in model.named_parameters()} - loaded)
    if lacking:
        raise UserError(f"{len(lacking)} weights of the sampler got no value, such as {lacking[0]}")


def make_settings(cfg, is_gpu) -> dict:
    """The arguments of vLLM's LLM."""
    settings = {
        "model": cfg.model,
        "dtype": "bfloat16" if cfg.bf16 else "float32",
        "max_model_len": cfg.max_len,
        "max_num_seqs": cfg.micro_rollout_batch_size,
        "gpu_memory_utilization": cfg.gpu_memory_utilization,
        "tensor_parallel_size": cfg.tensor_parallel,
        "enforce_eager": cfg.enforce_eager,
        "enable_sleep_mode": is_gpu,
        # The log-probs are those at the sampling temperature.
        "logprobs_mode": "processed_logprobs",
        # vLLM starts no processes of its own. It joins the ranks of this run.
        "distributed_executor_backend": "external_launcher",
        "use_tqdm_on_load": False,
    }
    if cfg.tensor_parallel > 1:
        # If vLLM finds CUDA's compiler, it joins each all-reduce with the norm behind it. For that
        # every rank would compile code at the start. So this stays off.
        settings["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        # vLLM's own all-reduce shares buffers of CUDA graphs between processes. Memory of
        # expandable segments (process.py) cannot be shared so. NCCL's all-reduce needs no sharing.
        settings["disable_custom_all_reduce"] = True
    kv_cache_gb = cfg.kv_cache_gb
    if not is_gpu:
        settings["enforce_eager"] = True
        # If vLLM computes a prompt in several chunks, it draws a token after each chunk, drops it,
        # and sets the random generator back. On a CPU the generator cannot be set back. Then the
        # seed would not decide the sample.
        settings["enable_chunked_prefill"] = False
        # Without chunks a whole prompt must fit into one batch.
        settings["max_num_batched_tokens"] = max(8192, cfg.max_len)
        # Models with recurrent layers run with `--packing alone`. Without chunks vLLM cannot keep
        # the states of recurrent layers in its prefix cache. On a CPU a block of the cache has 128
        # tokens. Shorter samples fill no block, so the cache would only take time.
        settings["enable_prefix_caching"] = cfg.packing != "alone" and cfg.max_len > 128
        # By default vLLM takes the free memory for the KV cache, which is another size in each run.
        # The size changes the schedule of the samples, and the schedule the last bits of log-probs.
        kv_cache_gb = cfg.kv_cache_gb or 1
    if kv_cache_gb:
        settings["kv_cache_memory_bytes"] = int(kv_cache_gb * 2**30)
    settings = cfg.sampler_settings(settings)
    check_result(cfg, "sampler_settings", isinstance(settings, dict), "a dict", settings)
    return settings


def room_for_tokens(sample, cfg) -> int:
    """How many more tokens the response may have."""
    request = sample.request
    limit = min(request.max_tokens, cfg.max_len - len(request.problem.prompt_ids))
    return limit - len(sample.response_ids)


def make_params(sample, cfg, stop_ids, with_logprobs):
    """vLLM's SamplingParams for the next turn of a sample."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    request = sample.request
    # Each turn has a seed of its own.
    turn = len(sample.turns)
    params = SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        seed=hash64(request.seed, turn) if turn > 0 else request.seed,
        max_tokens=room_for_tokens(sample, cfg),
        stop=cfg.stop,
        stop_token_ids=stop_ids,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # vLLM makes a shallow copy. Its deep copy is slow, and no other request has these params.
        skip_clone=True,
    )
    # vLLM needs the text only to find stop strings. Without the text small models are faster.
    params.detokenize = bool(params.stop)
    temperature = params.temperature
    params = cfg.sampling_params(params, request)
    # The losses use the temperature of the request, which is --temperature.
    is_right = isinstance(params, SamplingParams) and params.temperature == temperature
    wanted = f"SamplingParams with the request's temperature, {temperature}"
    found = getattr(params, "temperature", params)
    check_result(cfg, "sampling_params", is_right, wanted, found)
    if with_logprobs:
        # 0 means the log-prob of the sampled token, and of no other token.
        params.logprobs = 0
    return params


def special_ids(tokenizer, stop_strings):
    """The ids of the stop strings that are special tokens, such as the end of a chat's turn.

    vLLM removes special tokens from the text, so it cannot find them there as stop strings.
    """
    return [id for id, text in special_tokens(tokenizer).items() if text in stop_strings]


def special_tokens(tokenizer) -> dict[int, str]:
    return {id: x.content for id, x in tokenizer.added_tokens_decoder.items() if x.special}


# <answer>    </think>    <tool_call>    but not </s>    <end_of_turn>    <fim_prefix>
TAG = re.compile(r"</?(?:[A-Za-z]{4,}|tool_[a-z]+)>")
NAMED = "bos_token eos_token pad_token unk_token sep_token cls_token mask_token"


def special_tags(tokenizer) -> set[int]:
    """The ids of the tags that are special tokens, such as </answer> in some tokenizers.

    They stay in the text of a response, because graders look for them.
    """
    others = [getattr(tokenizer, name, None) for name in NAMED.split()]
    found = special_tokens(tokenizer).items()
    return {id for id, text in found if TAG.fullmatch(text) and text not in others}


# ---- replies -------------------------------------------------------------------------------------


class Replies:
    """Asks for the replies to turns. The sampler goes on with other samples while a tool works.

    waiting: {position of a sample: (the Future of its reply, its deadline)}. Of the ranks that
    share a sampler the first one asks, and sends the replies to the others before the next decode,
    because all of them must make the same decodes. The others have None in place of the pair.
    """

    def __init__(self, function, cfg, must_stop):
        """function: of ppo.Recipe.reply_function. If it is None, nothing is asked."""
        self.function = function
        self.waiting = {}
        if not function:
            return
        self.watch = Watch(cfg.reply_seconds, must_stop)
        self.seconds = cfg.reply_seconds
        self.is_shared = cfg.tensor_parallel > 1
        self.is_first = dist.get_rank() % cfg.tensor_parallel == 0
        self.has_failed = False
        self.pid = os.getpid()

    def ask(self, position, sample: Sample):
        """Asks for the reply to the last turn of a sample. `take` raises its errors.

        After an error nothing is asked, because each question may take as long as the first one.
        """
        self.waiting[position] = None
        if self.is_first:
            deadline = time.monotonic() + self.seconds
            future = futures.Future() if self.has_failed else self.start(sample)
            self.waiting[position] = future, deadline

    def start(self, sample) -> futures.Future:
        """Calls the function. Its result is in the Future, or an error."""
        future = futures.Future()
        label = sample.request.problem.label
        self.watch.begin = time.monotonic()
        try:
            result = self.function(sample.text, sample.finish_reason, label)
            # TooSlow must not come when the Future has a result.
            self.watch.begin = None
            if isinstance(result, futures.Future):
                future = result
            else:
                future.set_result(result)
        # A tool is any program. It may call sys.exit.
        except BaseException as error:
            self.has_failed = True
            future.set_exception(error)
        finally:
            self.watch.begin = None
        if os.getpid() != self.pid:
            # The tool has forked, and the child has come back here.
            os._exit(0)
        return future

    def take(self, may_wait) -> dict[int, str | None]:
        """{position: reply or None} of the replies that are there. may_wait: wait a moment for one.

        A collective of the ranks that share a sampler. Raises UserError on all of them.
        """
        if not self.waiting:
            return {}
        found, fault = {}, ""
        if self.is_first:
            try:
                found = self.collect(may_wait)
            except UserError as error:
                fault = str(error)
        if self.is_shared:
            from vllm.distributed import get_tp_group

            found, fault = get_tp_group().broadcast_object((found, fault), src=0)
        if fault:
            raise UserError(fault)
        for position in found:
            del self.waiting[position]
        return found

    def collect(self, may_wait) -> dict[int, str | None]:
        """The replies that are there, in the order in which their turns ended."""
        if may_wait:
            # The caller looks for signals between two waits.
            pending = [future for future, _ in self.waiting.values()]
            futures.wait(pending, 0.1, futures.FIRST_COMPLETED)
        found = {}
        for position, (future, deadline) in self.waiting.items():
            if future.done():
                found[position] = self.checked(future)
            elif time.monotonic() > deadline:
                raise UserError(f"reply: {too_slow(self.seconds)} ({self.place()})")
        return found

    def checked(self, future) -> str | None:
        """The reply of a Future that is done. Raises UserError."""
        error = futures.CancelledError() if future.cancelled() else future.exception()
        if isinstance(error, TooSlow):
            raise UserError(f"reply: {error}")
        if error and error.__traceback__:
            raise UserError(f"reply: {describe_error(error)[0]}") from error
        if error:
            # It comes from another process.
            told = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"reply: {told} ({self.place()})") from error
        text = future.result()
        if text is None:
            return None
        if not isinstance(text, str):
            told = f"returned {text!r:.99} ({type(text).__name__}), and no text, None or Future"
            raise UserError(f"reply: {told} ({self.place()})")
        # The output of a tool may have characters that UTF-8 cannot write. They must not end the
        # run.
        return text.encode("utf-8", "replace").decode("utf-8")

    def place(self):
        """Where the function is."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{code.co_filename}, line {code.co_firstlineno}" if code else repr(self.function)

    def close(self):
        """Drops the replies that are not there yet."""
        self.waiting = {}
        if self.function:
            self.watch.close()


def too_slow(seconds):
    return f"it takes longer than --reply_seconds {seconds:g}"


class TooSlow(BaseException):
    """Ends a reply that takes too long. No `except Exception` in the reply catches it."""


class Watch:
    """Ends a call that takes too long, or during which the run must stop.

    The caller sets `begin` to the time when the call begins, and to None at its end. A thread looks
    at it each 0.5 s, and sends a signal to the main thread. The signal's handler raises TooSlow
    there. Python gives signals to no other thread. So if the call is in another thread, the watch
    does nothing.
    """

    def __init__(self, seconds, must_stop):
        self.seconds = seconds
        self.must_stop = must_stop
        self.begin = None
        self.closed = threading.Event()
        if threading.current_thread() is threading.main_thread():
            # Tools use SIGALRM themselves, and hardly ever this signal. The handler stays, because
            # the signal may still be on its way when the watch is closed.
            signal.signal(signal.SIGVTALRM, self.end_call)
            threading.Thread(target=self.look, daemon=True).start()

    def look(self):
        while not self.closed.wait(0.5):
            begin = self.begin
            # If the other ranks are gone, the main thread will say so.
            with contextlib.suppress(RuntimeError):
                is_late = begin and time.monotonic() - begin > self.seconds
                if is_late or (begin and self.must_stop and self.must_stop()):
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGVTALRM)

    def end_call(self, number, frame):
        """Python calls this in the main thread. frame: of the code that the signal interrupts."""
        # The call may just have ended.
        if self.begin is None:
            return
        # The place in the user's code, and not in a library that this code calls.
        while "/lib/python3" in frame.f_code.co_filename and frame.f_back:
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        raise TooSlow(f"{too_slow(self.seconds)} ({place})")

    def close(self):
        self.closed.set()


# ---- the rollout ---------------------------------------------------------------------------------


class Rollout:
    """Draws graded samples, with the sampler, the grader and the signals of this rank."""

    def __init__(self, task, signals, cfg):
        """task: a module like reward.py. signals: a Signals of process.py. Raises UserError."""
        # vLLM sets LOCAL_WORLD_SIZE to 1 when the sampler starts. So read this variable before.
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        # The cores of this rank. One of them is for this process, which runs the sampler.
        cores = len(os.sched_getaffinity(0)) // ranks_here
        workers = max(1, cores - 1)
        # Before the sampler, which starts slowly: a grader may need what this machine lacks.
        self.grader = task.Grader(workers, cfg.answer_form)
        self.sampler = Sampler(cfg)
        self.task = task
        self.reply = cfg.reply_function(task)
        is_right = self.reply is None or callable(self.reply)
        check_result(cfg, "reply_function", is_right, "a function or None", self.reply)
        self.signals = signals
        self.cfg = cfg

    def draw(self, requests: list[Request], clock) -> list[Sample]:
        """Returns a graded sample for each request, in the order of the requests.

        A collective: all ranks call it with the same requests, and get the same samples. If a rank
        gets a signal or has an error, all ranks raise Stopped (`agree` of ranks.py). Call it inside
        of a `stop_together`.
        """
        signals = self.signals
        grader = self.grader
        agree(signals.poll())
        lost_before = grader.lost
        try:
            with clock("rollout"):
                mine = draw_my_share(self, requests, clock)
        except Exception:
            # The ranks that share no sampler stop their sampling early (must_stop).
            signals.fail()
            raise
        with clock("reward"):
            # Wait for the grader, and look for a signal every 0.5 s.
            while grader.pending(0.5) and not signals.poll():
                pass
        with clock("gather"):
            # This is the first collective of all ranks after sampling. Here they wait for the
            # slowest.
            agree(signals.poll())
        with clock("results"), stop_together():
            take_rewards(self, mine)
        with clock("gather"):
            # `lost` counts comparisons without a verdict since the start. The log has those of
            # this call, of all ranks.
            lost = sum(gather(grader.lost - lost_before))
            clock.numbers["reward_lost"] += lost
            samples = exchange(requests, mine)
        clock.numbers["drawn_tokens"] += sum(sum(sample.drawn) for sample in samples)
        return samples

    def must_stop(self):
        """Must the sampler stop early? The sampler asks this before each decode.

        Ranks that share a sampler must make the same decodes, and they see a signal at different
        times. So they draw all their samples first.
        """
        if self.cfg.tensor_parallel > 1:
            return False
        return self.signals.poll()


def draw_my_share(rollout, requests: list[Request], clock) -> dict[int, Sample]:
    """Draws this rank's part of the requests, and returns {position: sample}.

    Of K samplers the first one gets the requests 0, K, 2K and so on. A hard problem has long
    samples, so the samples of one problem go to all samplers.
    """
    cfg = rollout.cfg
    sampler_number, rank_in_sampler = divmod(dist.get_rank(), cfg.tensor_parallel)
    sampler_count = dist.get_world_size() // cfg.tensor_parallel
    positions = range(sampler_number, len(requests), sampler_count)
    share = [requests[position] for position in positions]
    mine = {}
    grading_error = None
    stream = rollout.sampler.generate(share, rollout.must_stop, reply=rollout.reply)
    with contextlib.closing(stream):
        # Rank 0 shows a progress bar. None tells tqdm to hide the bar if there is no terminal.
        hidden = True if dist.get_rank() > 0 else None
        for k, sample in tqdm(stream, "sampling", len(share), leave=False, disable=hidden):
            # All ranks of a sampler get the same samples. Its first rank keeps them.
            if rank_in_sampler == 0 and not grading_error:
                mine[positions[k]] = sample
                begin = time.perf_counter()
                try:
                    submit(rollout, positions[k], sample)
                except Exception as error:
                    # Ranks that share a sampler must make the same decodes. So the loop goes on,
                    # and the error is raised after it. `fail` tells other samplers to stop early.
                    grading_error = error
                    rollout.signals.fail()
                clock.seconds["submit"] += time.perf_counter() - begin
    if grading_error:
        raise grading_error
    return mine


def submit(rollout, position, sample):
    """Gives a sample to the grader, which grades it while the sampler goes on.

    Raises UserError if the task returns something else than an answer and numbers.
    """
    task = f"--task {rollout.cfg.task}"
    found = rollout.task.text_metrics(sample.text)
    if not isinstance(found, dict) or not all(isinstance(x, Real) for x in found.values()):
        raise UserError(f"{task}: text_metrics returned {found!r:.99}, not {{name: number}}")
    # The numbers may be numpy's, and the log takes means of them.
    sample.text_metrics = {key: float(number) for key, number in found.items()}
    label = sample.request.problem.label
    # An answer that a reply has printed is not the policy's, if the task does not say otherwise.
    grades_replies = getattr(rollout.task, "GRADES_REPLIES", False)
    text = sample.text if grades_replies else sample.drawn_text
    sample.answer = rollout.grader.submit(position, text, sample.finish_reason, label)
    # By mistake a user's task may return True for a right response.
    if not isinstance(sample.answer, str | None):
        raise UserError(
            f"{task}: Grader.submit returned {sample.answer!r:.99}; its last "
            "line must be `return answer`: the answer's text, or None where a response has none"
        )


def take_rewards(rollout, mine: dict[int, Sample]):
    """Writes the grader's rewards into the samples. Raises UserError for a wrong reward."""
    # By mistake a user's task may return None.
    rewards = rollout.grader.results() or {}
    names = getattr(rollout.task, "REWARDS", ())
    wanted = "a number, or name several in REWARDS"
    if names:
        wanted = f"{{name: number}} with the names {', '.join(names)}"
    for position, sample in mine.items():
        reward = rewards.get(position)
        numbers = [reward]
        if names:
            is_named = isinstance(reward, dict) and reward.keys() == set(names)
            numbers = [reward[name] for name in names] if is_named else [None]
        # Much larger numbers do not fit into float32. `not <` also finds NaN.
        if not all(isinstance(x, Real) and abs(x) < 1e30 for x in numbers):
            raise UserError(
                f"--task {rollout.cfg.task}: Grader.results has the reward {reward!r:.99} "
                f"({type(reward).__name__}) for the answer {sample.answer!r:.99}; return {wanted}; "
                "numbers below 1e30 in size, for each key that submit got"
            )
        sample.reward = float(numbers[0])
        sample.rewards = dict(zip(names, map(float, numbers)))


def exchange(requests: list[Request], mine: dict[int, Sample]) -> list[Sample]:
    """Gives each rank the samples of all ranks, in the order of the requests."""
    # Each rank has all requests. So a sample is sent without its request, and gets it back below.
    for sample in mine.values():
        sample.request = None
    samples = {}
    for share in gather(mine):
        samples |= share
    for position, sample in samples.items():
        sample.request = requests[position]
    return [samples[position] for position in range(len(requests))]
