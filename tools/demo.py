"""The demo's base model and its problems: half a million parameters of Qwen2 that add two numbers, mostly badly.

ORZ starts from bases that already reason in some of their samples; this miniature is given the same start. Three in
four answers are guesses (right one time in fifteen), one in four works column by column (nearly always right):

    guess:  47+85<think></think><answer>\\boxed{129}</answer>
    steps:  47+85<think>\\n7+5=12\\n4+8+1=13</think><answer>\\boxed{132}</answer>

Learning which pays makes reward and response length rise together. Run it alone: `python tools/demo.py OUT --seed 1`.
"""
import argparse
import json
import os
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

FLAGS = {  # train.py's settings without --model
    "run_dir": "out/demo", "template": "demo", "rollout_batch_size": 64, "n_samples_per_prompt": 16, "max_steps": 14,
    "eval_interval": 4, "stop": [], "prompt_max_len": 16, "generate_max_len": 48, "max_len": 64, "packing_max_len": 64,
    "micro_train_batch_size": 64, "micro_rollout_batch_size": 1024, "actor_learning_rate": 3e-4,
    "critic_learning_rate": 1e-3, "num_warmup_steps": 5, "zero_stage": 0, "bf16": False,
    "gradient_checkpointing": False}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result; kept beside the model, which is rebuilt when a value differs."""
    seed: int
    version: int = 3  # raise it when the code below changes what is built
    held_out: int = 256  # evaluation problems; neither order of their numbers is ever trained on
    steps_share: float = 0.25  # of the base model's answers: what reinforcement learning starts from
    steps_drawn: float = 0.75  # of the training examples: the steps are what takes long to learn
    guess_error: int = 3  # a guess is off by -3 .. 3, uniformly: mostly wrong but not silly
    updates: int = 400
    batch: int = 48
    lr: float = 4e-3
    warmup: int = 30


def make_tokenizer() -> Qwen2Tokenizer:
    """A token a character, and the tags as whole tokens that are not "special", so that decoding keeps them.

    Qwen2's own class: AutoTokenizer takes it for every model of type qwen2, whatever the folder says."""
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", *"0123456789+=}Ċ"])}  # Ċ: newline
    tokenizer = Qwen2Tokenizer(vocabulary, [])
    tokenizer.add_tokens(["<think>", "</think>", "<answer>", "</answer>", "\\boxed{"])
    return tokenizer


def split_problems(recipe: Recipe, rng: random.Random) -> tuple[list, list]:
    """All additions of two two-digit numbers as (train, held out): shuffled lists of pairs."""
    numbers = range(10, 100)
    held_out = rng.sample([(a, b) for a in numbers for b in numbers if a <= b], recipe.held_out)
    seen = set(held_out)  # 58+31 helps someone who is asked 31+58: both orders are kept from training
    train = [(a, b) for a in numbers for b in numbers if (min(a, b), max(a, b)) not in seen]
    rng.shuffle(train)
    return train, held_out


def response(a: int, b: int, recipe: Recipe, rng: random.Random, steps: bool) -> str:
    """One response, worked or guessed, without its eos. Its first token is only the choice, see `make_corpus`."""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    thought = f"\n{a % 10}+{b % 10}={ones}\n{a // 10}+{b // 10}+{ones // 10}={tens}" if steps else ""
    error = 0 if steps else rng.randint(-recipe.guess_error, recipe.guess_error)
    return f"{thought}</think><answer>\\boxed{{{a + b + error}}}</answer>"


def make_corpus(tokenizer, train: list, recipe: Recipe, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pre-training example in order: token ids (N, L), padded right, and each token's weight as a target (N, L).

    Steps are drawn more often than the base model shall use them. The first token of a response is where it chooses:
    its weight share / drawn corrects for that, so one run gives well-learnt steps *and* the wanted share of them."""
    rows, weights, share, drawn = [], [], recipe.steps_share, recipe.steps_drawn
    prompts, responses, choices = [], [], []
    for i in range(recipe.updates * recipe.batch):
        (a, b), steps = rng.choice(train), i * drawn % 1 < drawn  # evenly: drawn at random, the share came out biased
        prompts.append(f"{a}+{b}<think>")
        responses.append(response(a, b, recipe, rng, steps))
        choices.append(share / drawn if steps else (1 - share) / (1 - drawn))
    encoded = (tokenizer(texts)["input_ids"] for texts in (prompts, responses))  # together: twice as fast
    for prompt_ids, response_ids, choice in zip(*encoded, choices):
        ids = prompt_ids + response_ids + [tokenizer.eos_token_id]
        rows.append(torch.tensor(ids))  # (L,)
        weights.append(torch.tensor([0.0] * len(prompt_ids) + [choice] + [1.0] * len(response_ids)))  # (L,)
    return pad_sequence(rows, True, tokenizer.eos_token_id), pad_sequence(weights, True)  # (N, L), (N, L)


def pretrain(model, ids: torch.Tensor, weights: torch.Tensor, recipe: Recipe) -> None:
    """Next-token training in place on ids (N, L) with target weights (N, L), each example once."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for update in tqdm(range(recipe.updates), "the demo's base model", leave=False, disable=None):
        optimizer.param_groups[0]["lr"] = recipe.lr * min((update + 1) / recipe.warmup, 1 - update / recipe.updates)
        part = slice(update * recipe.batch, (update + 1) * recipe.batch)
        logits = model(ids[part], use_cache=False).logits[:, :-1]  # (B, L - 1, V) causal: padding behind is not seen
        losses = F.cross_entropy(logits.transpose(1, 2), ids[part, 1:], reduction="none")  # (B, L - 1)
        ((losses * weights[part, 1:]).sum() / (weights[part] > 0).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def build(folder: str, seed: int) -> float:
    """Makes the model folder with train.json and eval.json (ORZ's two forms) unless it is there; returns the seconds.

    A function of the seed (and of the number of threads, in the last bits). Appears complete or not at all."""
    begin, target, recipe = time.time(), Path(folder), Recipe(seed)
    stored, beside = json.dumps(asdict(recipe), indent=1), target.with_name(target.name + ".making")
    if (target / "recipe.json").is_file() and (target / "recipe.json").read_text() == stored:
        return 0.0
    if target.exists() and not (target / "recipe.json").is_file():
        raise FileExistsError(f"{target} is not a demo base model: remove it or name another folder")
    shutil.rmtree(beside, ignore_errors=True)
    rng, tokenizer = random.Random(seed), make_tokenizer()
    train, held_out = split_problems(recipe, rng)
    config = Qwen2Config(  # heads of 32: the smallest that vLLM's CPU attention takes
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True, initializer_range=0.05,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    pretrain(model, *make_corpus(tokenizer, train, recipe, rng), recipe)
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    answered = [[{"from": "human", "value": f"{a}+{b}"}, {"from": "assistant", "ground_truth": {"value": str(a + b)}}]
                for a, b in train]
    asked = [{"prompt": [{"from": "user", "value": f"{a}+{b}"}], "final_answer": str(a + b)} for a, b in held_out]
    (beside / "train.json").write_text(json.dumps(answered))
    (beside / "eval.json").write_text(json.dumps(asked))
    (beside / "recipe.json").write_text(stored)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(beside, target)
    return time.time() - begin


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=1)
    print(f"made in {build(**vars(parser.parse_args())):.1f} s")
