"""Requests and samples; the sampler, which is vLLM inside the training process; the rollout.

A request asks for one sample: one response to a problem. The sampler draws the sample, and the
grader of the task scores it. The sampler also gets new weights here, and sleeps while the trainer
works. This file never sees a loss.

A response may have several turns. A turn is what the policy draws until it stops. Then a reply may
come: text that the policy does not draw, such as the result of a tool. The policy goes on behind
the reply with its next turn (docs/change.md).

Deviations from Open-Reasoner-Zero (ORZ):
- There is no Ray, and the sampler has no process of its own. Sampler and trainer use the same GPU,
  one after the other.
- The policy is trained on the sampled token ids. ORZ decodes the ids to a text and encodes the text
  again, which often changes the last token.
- The randomness of a sample is a hash of the seed, the step, the purpose, the problem's place in
  the step, and the number of the sample. The rank, the order and earlier samples do not change it.
- vLLM's prefix cache is emptied before every call, because it was computed with old weights. ORZ
  has a mode that does not empty it.

To use this file elsewhere, copy nanoorz/ranks.py and nanoorz/environment.py, too. Such a copy works
for models that read text alone, and no images. Call `start_distributed` of ranks.py first. A
Sampler reads these fields of cfg: model, bf16, max_len, max_turns, stop, packing, kv_cache_gb,
micro_rollout_batch_size, gpu_memory_utilization, tensor_parallel and enforce_eager. It calls
sampler_settings and sampling_params of ppo.Recipe. A problem needs the field prompt_ids.
"""

import contextlib
import functools
import time
from collections.abc import Iterable
from concurrent import futures
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

# The import of environment.py sets variables that vLLM reads.
from nanoorz import environment  # noqa: F401
from nanoorz.ranks import Stopped, UserError, gather, hash64, one_line

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
    response_ids: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)  # of each of response_ids: by the policy?
    # log p of each drawn token, at the sampling temperature. Without with_logprobs it is empty.
    logprobs: list[float] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)  # of the text: a turn, a reply, a turn, ...
    finish_reason: str = ""  # "stop", or "length": the response is truncated
    reward: float = 0.0  # of several rewards the first one
    rewards: dict[str, float] = field(default_factory=dict)  # of a task that names its rewards
    answer: str | None = None  # the answer that the grader found in the text
    text_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.parts)

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
            orders[episode] = cfg.episode_order(problems, episode)
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
            # Here and not at the top, because a copy of this file may not have these files.
            from nanoorz import families, text_part

            config = families.read_config(cfg.model)
            settings |= text_part.sampler_settings(config)
        try:
            self.llm = LLM(**settings)
        # vLLM has no error class of its own.
        except (ValueError, MemoryError, RuntimeError, OSError) as error:
            raise UserError(
                f"vLLM cannot start with --model {cfg.model}, --max_len {cfg.max_len}, "
                f"--kv_cache_gb {cfg.kv_cache_gb}: {one_line(error)}"
            ) from error
        # On a GPU vLLM sets one thread. The trainer needs more for its work on the CPU.
        torch.set_num_threads(threads)
        if has_other_parts:
            # With these settings vLLM has read no weights.
            text_part.fill_sampler(self.llm, config, families.folder_of(cfg.model))
        self.tokenizer = self.llm.get_tokenizer()
        # With True no text of a reply becomes a special token.
        self.plain_replies = False
        # vLLM ends a turn at any of these tokens. A model may have several.
        eos_ids = self.llm.model_config.try_get_generation_config().get("eos_token_id", [])
        eos_ids = [eos_ids] if isinstance(eos_ids, int) else eos_ids
        self.eos_ids = {self.tokenizer.eos_token_id, *eos_ids}

    def generate(self, requests: list[Request], must_stop=None, with_logprobs=False, reply=None):
        """Yields (position in `requests`, sample) as soon as a sample ends.

        `must_stop()` is called before each decode. If it returns True, or if the caller closes the
        generator, the samples that have not ended are dropped. A response also ends when prompt
        and response together have max_len tokens. reply: the function of ppo.Recipe.reply_function.
        Its exceptions come out here.
        """
        # The prefix cache was computed with old weights. A prefix in it would also change vLLM's
        # schedule, and the schedule changes the last bits of log-probs.
        is_empty = self.llm.reset_prefix_cache()
        assert is_empty, "an earlier call of generate has requests left"
        llm_engine = self.llm.llm_engine
        samples = [Sample(request) for request in requests]
        drawing = set()  # the positions of the samples that vLLM draws now
        waiting = {}  # {position: the Future of its reply}
        try:
            for position, sample in enumerate(samples):
                self.begin_turn(position, sample, with_logprobs)
                drawing.add(position)
            while (drawing or waiting) and not (must_stop and must_stop()):
                outputs = llm_engine.step() if drawing else []
                # Of each turn vLLM returns one output, when the turn has ended.
                for output in outputs:
                    position = int(output.request_id)
                    drawing.remove(position)
                    sample = samples[position]
                    self.end_turn(sample, output.outputs[0])
                    # A response at its limit cannot go on. Below the limit a turn may end by length
                    # if a variant lowers max_tokens.
                    can_go_on = sample.finish_reason == "stop" or self.room(sample) > 0
                    if reply and can_go_on:
                        waiting[position] = self.ask(reply, sample)
                    else:
                        yield position, sample
                for position, text in self.take_replies(waiting, may_wait=not drawing).items():
                    if self.add_reply(samples[position], text):
                        self.begin_turn(position, samples[position], with_logprobs)
                        drawing.add(position)
                    else:
                        yield position, samples[position]
        finally:
            llm_engine.abort_request([str(position) for position in drawing])

    # ---- turns

    def room(self, sample: Sample) -> int:
        """How many more tokens the response may have."""
        request = sample.request
        limit = min(request.max_tokens, self.cfg.max_len - len(request.problem.prompt_ids))
        return limit - len(sample.response_ids)

    def begin_turn(self, position, sample: Sample, with_logprobs):
        """Gives vLLM the ids of the prompt and of the response so far."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        request = sample.request
        # Each turn has a seed of its own.
        turn = len(sample.turns)
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=hash64(request.seed, turn) if turn > 0 else request.seed,
            max_tokens=self.room(sample),
            stop=self.cfg.stop,
            include_stop_str_in_output=True,
            # In some tokenizers </answer> is a special token. Stop strings and graders look for it.
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # vLLM's deep copy of these params is slow, and no other request uses them.
            skip_clone=True,
        )
        params = self.cfg.sampling_params(params, request)
        # vLLM needs the text only to find stop strings. Without the text small models are faster.
        params.detokenize = bool(params.stop)
        # The losses use the temperature of the request.
        assert params.temperature == request.temperature, "sampling_params changed the temperature"
        if with_logprobs:
            # 0 means the log-prob of the sampled token, and of no other token.
            params.logprobs = 0
        prompt = tokens_input(request.problem.prompt_ids + sample.response_ids)
        self.llm.llm_engine.add_request(str(position), prompt, params)

    def end_turn(self, sample: Sample, completion):
        """Adds a turn to a sample. completion: vLLM's."""
        ids = list(completion.token_ids)
        text = completion.text
        # An eos token is no text. Without stop strings vLLM makes no text.
        if ids[-1] in self.eos_ids:
            text = self.decode(ids[:-1])
        elif not text:
            text = self.decode(ids)
        sample.response_ids += ids
        sample.drawn += [True] * len(ids)
        sample.parts.append(text)
        sample.finish_reason = completion.finish_reason
        if completion.logprobs:
            sample.logprobs += [x[token].logprob for x, token in zip(completion.logprobs, ids)]

    def decode(self, ids) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    # ---- replies

    def is_first(self) -> bool:
        """Is this rank the first of those that share a sampler? The first rank asks for the replies
        and sends them to the others, because all of them must make the same decodes."""
        return dist.get_rank() % self.cfg.tensor_parallel == 0

    def ask(self, reply, sample: Sample) -> futures.Future | None:
        """The Future of the reply to the last turn. `reply` returns a Future, or the reply itself.
        On the other ranks of a sampler there is none."""
        if not self.is_first():
            return None
        future = futures.Future()
        try:
            result = reply(sample.text, sample.finish_reason, sample.request.problem.label)
        # The error waits in the Future until take_replies raises it. A tool may call sys.exit.
        except BaseException as error:
            future.set_exception(error)
            return future
        if isinstance(result, futures.Future):
            return result
        future.set_result(result)
        return future

    def take_replies(self, waiting, may_wait) -> dict[int, str | None]:
        """Removes the replies that are there from `waiting`: {position: text or None}.

        may_wait: wait a moment for one. Raises the exception of a reply.
        """
        if not waiting:
            return {}
        replies, error = {}, None
        if self.is_first():
            if may_wait:
                # The caller looks for signals between two waits.
                futures.wait(waiting.values(), 0.1, futures.FIRST_COMPLETED)
            try:
                replies = {k: future.result() for k, future in waiting.items() if future.done()}
            except BaseException as raised:
                error = raised
        if self.cfg.tensor_parallel > 1:
            from vllm.distributed import get_tp_group

            # If the first rank alone raised its error, the others would wait in the next decode.
            replies, has_failed = get_tp_group().broadcast_object((replies, bool(error)), src=0)
            if has_failed and not error:
                error = RuntimeError("a reply failed on the first rank of this sampler")
        if error:
            raise error
        for position in replies:
            del waiting[position]
        return replies

    def add_reply(self, sample: Sample, text) -> bool:
        """Adds a reply to a sample. Returns whether another turn follows.

        text: None if the response is finished. If there is no room for the reply and another token,
        or if the sample has max_turns turns, the reply is dropped, and the response is truncated.
        """
        if text is None:
            return False
        ids = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=self.plain_replies
        )
        ids = ids["input_ids"]
        has_turns = len(sample.turns) < self.cfg.max_turns
        if len(ids) >= self.room(sample) or not has_turns:
            sample.finish_reason = "length"
            return False
        sample.response_ids += ids
        sample.drawn += [False] * len(ids)
        sample.parts.append(text)
        return True

    # ---- weights

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
    has_mla = any("MLA" in type(x).__name__ for x in model.modules())
    return methods <= plain and not changes and not has_mla


def load_all(model, weights):
    """Loads all weights of vLLM's model. vLLM alone would only warn of a weight without a value."""
    loaded = model.load_weights(weights)
    lacking = sorted({name for name, _ in model.named_parameters()} - loaded)
    assert not lacking, f"{len(lacking)} weights of the sampler got no value, such as {lacking[0]}"


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
        # expandable segments (environment.py) cannot be shared. NCCL's all-reduce shares none.
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
    return cfg.sampler_settings(settings)


# ---- the rollout ---------------------------------------------------------------------------------


class Rollout:
    """Draws graded samples, with the sampler, the grader and the signals of this rank."""

    def __init__(self, task, signals, cfg):
        """task: a module like reward.py. signals: a Signals of environment.py. Raises UserError."""
        # One of the cores of this rank is for this process, which runs the sampler.
        workers = max(1, torch.get_num_threads() - 1)
        # Before the sampler, which starts slowly: a grader may need what this machine lacks.
        self.grader = task.Grader(workers, cfg.answer_form)
        self.sampler = Sampler(cfg)
        self.sampler.plain_replies = getattr(task, "PLAIN_REPLIES", False)
        self.task = task
        self.reply = cfg.reply_function(task)
        self.signals = signals
        self.cfg = cfg

    def draw(self, requests: list[Request], clock) -> list[Sample]:
        """Returns a graded sample for each request, in the order of the requests.

        A collective: all ranks call it with the same requests, and get the same samples. If a rank
        gets a signal, or an exception is raised there, all ranks raise Stopped.
        """
        signals = self.signals
        grader = self.grader
        # A signal may have come since the last rollout.
        self.agree()
        lost_before = grader.lost
        mine = {}
        # An exception ends this block, and then `agree` raises Stopped.
        with signals.stop_after_error():
            with clock("rollout"):
                mine = self.draw_my_share(requests, clock)
            with clock("reward"):
                # Wait for the grader, and look for a signal every 0.5 s.
                while not signals.poll() and grader.pending(0.5):
                    pass
            with clock("results"):
                if not signals.asked:
                    self.take_rewards(mine)
        with clock("gather"):
            # This is the first collective of all ranks after sampling. Here they wait for the
            # slowest.
            self.agree()
            # `lost` counts comparisons without a verdict since the start. The log has those of
            # this call, of all ranks.
            clock.numbers["reward_lost"] += sum(gather(grader.lost - lost_before))
            samples = exchange(requests, mine)
        clock.numbers["drawn_tokens"] += sum(sum(sample.drawn) for sample in samples)
        return samples

    def agree(self):
        """Raises Stopped on all ranks if one of them must stop. A collective."""
        reports = gather((self.signals.poll(), self.signals.failed))
        if any(must_stop for must_stop, _ in reports):
            raise Stopped(after_error=any(failed for _, failed in reports))

    def draw_my_share(self, requests: list[Request], clock) -> dict[int, Sample]:
        """Draws this rank's part of the requests. Returns {position: sample}.

        Of K samplers the first one gets the requests 0, K, 2K and so on. A hard problem has long
        samples, so the samples of one problem go to all samplers.
        """
        tensor_parallel = self.cfg.tensor_parallel
        sampler_number, rank_in_sampler = divmod(dist.get_rank(), tensor_parallel)
        sampler_count = dist.get_world_size() // tensor_parallel
        positions = range(sampler_number, len(requests), sampler_count)
        share = [requests[position] for position in positions]
        # Ranks that share a sampler must make the same decodes, and they see a signal at different
        # times. So they draw all their samples first.
        must_stop = self.signals.poll if tensor_parallel == 1 else None
        mine = {}
        stream = self.sampler.generate(share, must_stop, reply=self.reply)
        with contextlib.closing(stream):
            # Rank 0 shows a progress bar. None tells tqdm to hide the bar if there is no terminal.
            hidden = True if dist.get_rank() > 0 else None
            for k, sample in tqdm(stream, "sampling", len(share), leave=False, disable=hidden):
                # All ranks of a sampler get the same samples. Its first rank keeps them. After an
                # error it goes on drawing, because the other ranks do.
                if rank_in_sampler > 0 or self.signals.failed:
                    continue
                mine[positions[k]] = sample
                begin = time.perf_counter()
                with self.signals.stop_after_error():
                    self.submit(positions[k], sample)
                clock.seconds["submit"] += time.perf_counter() - begin
        return mine

    def submit(self, position, sample: Sample):
        """Gives a sample to the grader, which grades it while the sampler goes on."""
        sample.text_metrics = self.task.text_metrics(sample.text)
        # An answer that a reply has printed is not the policy's, unless the task says that it is.
        grades_replies = getattr(self.task, "GRADES_REPLIES", False)
        text = sample.text if grades_replies else sample.drawn_text
        label = sample.request.problem.label
        sample.answer = self.grader.submit(position, text, sample.finish_reason, label)

    def take_rewards(self, mine: dict[int, Sample]):
        """Writes the grader's rewards into the samples."""
        names = getattr(self.task, "REWARDS", ())
        rewards = self.grader.results()
        for position, sample in mine.items():
            reward = rewards[position]
            if names:
                sample.rewards = {name: float(reward[name]) for name in names}
                reward = reward[names[0]]
            sample.reward = float(reward)


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
