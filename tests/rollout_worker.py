"""The real sampler in a process of its own, for test_rollout.py: `rollout_worker.py OUT FLAGS`.

It writes what it found to the JSON file OUT: how the sampler behaves, and what train.check_sampler
says of right and of wrong weights.
"""

import contextlib
import dataclasses
import functools
import json
import os
import sys
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from tiny import EOS, char_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

import ppo
import reward
import train
from nanoorz import families, models
from nanoorz.environment import Signals
from nanoorz.log import Clock
from nanoorz.ranks import Stopped, UserError, start_distributed
from rollout import Rollout, make_requests, problem_seeds

# The kinds of requests that a batch has.
KINDS = [{}, {}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.5}]
DIGITS = list("0123456789")
TAG_IDS = char_tokenizer().convert_tokens_to_ids(["<answer>", "</answer>"])


def make_problems(tokenizer, count: int = 8) -> list[reward.Problem]:
    problems = []
    for k in range(count):
        prompt = f"{10 + k}+{20 + k}<think>"
        ids = tokenizer.encode(prompt)
        problems.append(reward.Problem(k, prompt, str(30 + 2 * k), prompt, ids))
    return problems


def generated(sampler, requests, found=None, **options) -> dict:
    """{position: what is known of the sample}, which are put into `found` as they end."""
    found = {} if found is None else found
    for position, sample in sampler.generate(requests, **options):
        found[position] = as_dict(sampler, sample)
    return found


def as_dict(sampler, sample) -> dict:
    decoded = sampler.tokenizer.decode(sample.response_ids)
    known = {"request": None, "text": sample.text, "decoded": decoded}
    return dataclasses.asdict(sample) | known


def cached_tokens(sampler) -> list[list[int]]:
    """Of each of two calls, the second after one that is closed early: how many tokens of each of
    two equal prompts were cached."""
    long = SimpleNamespace(prompt_ids=list(range(1, 51)) * 8)
    requests = make_requests([long], [0], 2, 4, 1.0, 1.0)
    engine = sampler.llm.llm_engine
    step = engine.step
    calls = []

    def recorded():
        outputs = step()
        calls[-1].extend(output.num_cached_tokens for output in outputs)
        return outputs

    engine.step = recorded
    for take in (2, 1, 2):
        calls.append([])
        stream = sampler.generate(requests)
        for _ in range(take):
            next(stream)
        stream.close()
    engine.step = step
    return [sorted(calls[0]), sorted(calls[2])]


def mixed_requests(problems, longest: int) -> list:
    """For each problem a request of each kind."""
    seeds = problem_seeds(1, 2, "train", len(problems))
    requests = make_requests(problems, seeds, len(KINDS), longest, 1.0, 1.0)
    return [dataclasses.replace(request, **KINDS[request.sample_number]) for request in requests]


def requests_of_turns(problems) -> list:
    return [dataclasses.replace(x, top_p=1.0) for x in mixed_requests(problems[:4], longest=40)]


@torch.no_grad()
def mass_above(model, prompt: list[int], ids: list[int]) -> float:
    """How much probability the tokens above a sampled token have at most, at temperature 1."""
    probs = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].softmax(-1)
    sampled = probs.gather(1, torch.tensor(ids)[:, None])
    return (probs * (probs > sampled)).sum(1).max().item()


def of_sampler(one, policy, requests, problems) -> dict:
    """How the sampler of a Rollout behaves with these mixed requests, and in a check with these
    problems."""
    sampler = one.sampler
    cfg = one.cfg
    found = {"cached": cached_tokens(sampler), "mass above": []}
    found["together"] = generated(sampler, requests, with_logprobs=True)
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    for position, request in enumerate(requests):
        ids = found["together"][position]["response_ids"]
        found["mass above"].append(mass_above(model, request.problem.prompt_ids, ids))
    # Each request twice: with 3 tokens and with all that fit.
    limited = []
    for request in requests[::4]:
        limited += [dataclasses.replace(request, max_tokens=most) for most in (3, 9999)]
    cfg.max_len = 20
    found["limits"] = generated(sampler, limited)
    ended = {}
    generated(sampler, limited, ended, must_stop=lambda: len(ended) > 0)
    found["stopped"] = ended
    cfg.max_len = 512
    # The requests of `together` in another order, and fewer of them, after a call that was stopped.
    found["apart"] = generated(sampler, requests[::-3])
    found["positions"] = list(range(len(requests)))[::-3]

    found["digits"] = sampler.tokenizer.convert_tokens_to_ids(DIGITS)
    cfg.stop = DIGITS
    found["stop strings"] = generated(sampler, requests[::2])
    cfg.stop = []
    # The digits are several eos tokens of the model, and no special tokens.
    cfg.sampling_params = functools.partial(with_stop_ids, ids=found["digits"])
    eos_ids = sampler.eos_ids
    found["known eos ids"] = sorted(eos_ids)
    sampler.eos_ids = eos_ids | set(found["digits"])
    found["eos ids"] = generated(sampler, requests[::2])
    sampler.eos_ids = eos_ids
    del cfg.sampling_params

    for name, weights in (("right", models.named_weights), ("one step behind", one_step_behind)):
        sampler.sync(weights(policy))
        found[name] = said(train.check_sampler, one, policy, problems)
    cfg.sampling_params = hotter
    found["hotter"] = said(generated, sampler, requests)
    # In some tokenizers tags are special tokens.
    tokenizer = sampler.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    cfg.sampling_params = only_tags
    found["tags"] = {}
    for stops in ([], ["</answer>"]):
        cfg.stop = stops
        found["tags"][str(len(stops))] = generated(sampler, requests[::5])
    cfg.stop = []
    del cfg.sampling_params
    return found


# Turns end with one of these digits. A reply begins with the digit 1, which a tokenizer may join to
# the digit before.
ENDS = "1234"
MERGES = [("1", "1"), ("2", "1"), ("3", "1"), ("4", "1")]


def merging_tokenizer() -> Qwen2Tokenizer:
    """The tokens of tiny.py's characters, and a token for each pair of MERGES."""
    vocabulary = char_tokenizer().get_vocab()
    # The tags of tiny.py come behind the characters. <think> is the first one.
    characters = {x: k for x, k in vocabulary.items() if k < vocabulary["<think>"]}
    pairs = {a + b: len(characters) + k for k, (a, b) in enumerate(MERGES)}
    return Qwen2Tokenizer(characters | pairs, MERGES, unk_token=EOS, eos_token=EOS, pad_token=EOS)


def echo(text, finish_reason, label):
    """Replies twice to a turn that ends with one of ENDS. Only one rank of a sampler may ask."""
    assert dist.get_rank() == 0
    assert finish_reason == "stop" and label.isdigit()
    if text[-1:] in ENDS and text.count("1+") < 2:
        return "1+"


@contextlib.contextmanager
def merging(sampler):
    """Inside, the sampler has the tokenizer that merges, and turns end with ENDS."""
    tokenizer = sampler.tokenizer
    sampler.tokenizer = merging_tokenizer()
    sampler.cfg.stop = list(ENDS)
    try:
        yield
    finally:
        sampler.tokenizer = tokenizer
        sampler.cfg.stop = []


def draw_turns(sampler, requests) -> dict:
    """{position: what is known of a sample with replies}, with the prompts of its turns."""
    add_request = sampler.llm.llm_engine.add_request
    prompts = {}

    def recorded(name, prompt, params):
        prompts.setdefault(int(name), []).append(prompt["prompt_token_ids"])
        return add_request(name, prompt, params)

    with merging(sampler), mock.patch.object(sampler.llm.llm_engine, "add_request", recorded):
        samples = generated(sampler, requests, with_logprobs=True, reply=echo)
        for position, sample in samples.items():
            sample["prompts"] = prompts[position]
            sample["prompt_ids"] = requests[position].problem.prompt_ids
            sample["encoded"] = sampler.tokenizer.encode(sample["decoded"])
    return samples


def of_turns(sampler, requests) -> dict:
    """How a sampler draws samples with replies."""
    with merging(sampler):
        return find_turns(sampler, requests)


def find_turns(sampler, requests) -> dict:
    cfg = sampler.cfg
    found = {}
    found["apart"] = generated(sampler, requests[::-3], reply=echo)
    found["plain"] = generated(sampler, requests, with_logprobs=True)
    found["never"] = generated(sampler, requests, with_logprobs=True, reply=lambda *_: None)
    cfg.max_turns = 2
    found["two turns"] = generated(sampler, requests, reply=echo)
    cfg.max_turns = 16
    found["no room"] = generated(sampler, requests, reply=lambda *_: "1+" * 20)
    # The first reply that is a text comes when all other samples have ended.
    slow = futures.Future()
    held = []
    order = []

    def first_is_slow(*response):
        text = echo(*response)
        if text is None or held:
            return text
        held.append(text)
        return slow

    slow_samples = {}
    for position, sample in sampler.generate(requests, reply=first_is_slow):
        slow_samples[position] = as_dict(sampler, sample)
        order.append(position)
        if len(order) == len(requests) - 1:
            slow.set_result(held[0])
    found["slow"] = {"samples": slow_samples, "order": order}
    # A caller that stops while tools work.
    never = []

    def hang(*response):
        never.append(futures.Future())
        return never[-1]

    ended = generated(sampler, requests, must_stop=lambda: len(never) > 1, reply=hang)
    found["ended"] = len(ended)
    found["after"] = generated(sampler, requests, reply=echo)
    for reply in (raises, future_raises):
        draw = functools.partial(generated, reply=reply)
        found[reply.__name__] = said(draw, sampler, requests)["refused"]
    return found


def raises(*response):
    return 1 / 0


def future_raises(*response):
    future = futures.Future()
    future.set_exception(ZeroDivisionError("in another process"))
    return future


def with_stop_ids(params, request, ids):
    params.stop_token_ids = ids
    return params


def only_tags(params, request):
    params.allowed_token_ids = TAG_IDS
    return params


def hotter(params, request):
    params.temperature += 0.5
    return params


def stop(rollout, requests, reason) -> dict:
    """What a rollout that must stop leaves: is it after an error, and which phases were begun?

    reason: when a signal comes, or the method of the grader that fails.
    """
    signals = rollout.signals
    grader = rollout.grader
    submit = grader.submit
    results = grader.results

    def submit_and_stop(*sample):
        answer = submit(*sample)
        signals.asked = reason == "amid"
        return 1 / 0 if reason == "submit" else answer

    def results_or_error():
        rewards = results()
        return 1 / 0 if reason == "results" else rewards

    signals.asked = reason == "before"
    clock = Clock()
    try:
        with (
            mock.patch.object(grader, "submit", submit_and_stop),
            mock.patch.object(grader, "results", results_or_error),
        ):
            rollout.draw(requests, clock)
    except Stopped as stopped:
        return {"after an error": stopped.after_error, "phases": list(clock.seconds)}
    finally:
        signals.asked = signals.failed = False
        signals.store.delete_key("stop")
        results()


def said(action, *arguments) -> dict:
    """{"found": what it returned} or {"refused": text}."""
    try:
        return {"found": action(*arguments)}
    except (UserError, AssertionError, ZeroDivisionError) as error:
        return {"refused": str(error)}


def one_step_behind(policy):
    """The policy's weights, each as far off as a step of Adam moves it."""
    for name, tensor in models.named_weights(policy):
        yield name, tensor + 1e-3


def without_positions(micro) -> dict:
    """The samples of a row see each other, as in a model with recurrent layers."""
    return {"input_ids": micro.input_ids, "use_cache": False}


def find_all(rollout, policy, problems) -> dict:
    sampler = rollout.sampler
    cfg = rollout.cfg
    if cfg.tensor_parallel > 1:
        return {"turns": draw_turns(sampler, requests_of_turns(problems))}
    found = {"form": rollout.grader.find_answer.__name__}
    requests = mixed_requests(problems[:4], longest=16)
    clock = Clock()
    samples = rollout.draw(requests, clock)
    found["in order"] = [sample.request for sample in samples] == requests
    found["sampled"] = [sample.response_ids for sample in samples]
    found["text metrics"] = list(samples[0].text_metrics)
    found["phases"] = list(clock.seconds)
    found["numbers"] = clock.numbers
    reasons = ("before", "amid", "submit", "results")
    found["stops"] = {reason: stop(rollout, requests, reason) for reason in reasons}

    found |= of_sampler(rollout, policy, requests, problems)
    sampler.sync(models.named_weights(policy))
    requests = requests_of_turns(problems)
    found["turns"] = draw_turns(sampler, requests)
    found["of turns"] = of_turns(sampler, requests)
    with mock.patch.object(ppo.MicroBatch, "model_inputs", without_positions):
        found["a leak"] = said(train.check_sampler, rollout, policy, problems)
    return found


def main(out: str, *argv: str) -> None:
    cfg = train.parse_flags(list(argv))
    families.replace_auto(cfg)
    rank, _, _, store = start_distributed()
    rollout = Rollout(reward, Signals(store), cfg)
    policy = models.make_policy(cfg)
    found = find_all(rollout, policy, make_problems(rollout.sampler.tokenizer))
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
