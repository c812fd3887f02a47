"""Flags, set-up and loop of train.py, and whole runs of it on the real engines."""

import dataclasses
import functools
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import conftest
import psutil
import pytest
import tiny as maker
from conftest import (
    DATA,
    ROOT,
    SHARD_EVERYTHING,
    SMALL,
    arguments,
    config,
    equal_runs,
    jsonl,
    launch,
    run_python,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

import reward
import train
from nanoorz.ranks import UserError
from rollout import requests_of_step
from tools.base_model import write_flags

LAUNCHER = [*conftest.ACCELERATE, "--num_machines", 1, "--num_processes", 1, ROOT / "train.py"]
SLOW = pytest.mark.slow

# ---- flags ---------------------------------------------------------------------------------------

# Of its repository and paper, in our names.
ORZ = {"rollout_batch_size": 128, "n_samples_per_prompt": 64, "num_episodes": 20}
ORZ |= {"template": "orz"}
ORZ |= {"temperature": 1, "top_p": 1, "eval_temperature": 1, "eval_top_p": 1}
ORZ |= {"prompt_max_len": 2048, "generate_max_len": 8000, "max_len": 8192}
ORZ |= {"estimator": "gae", "gamma": 1, "lambd": 1}
ORZ |= {"critic_updates": 12, "warmup_updates": 50}
ORZ |= {"actor_learning_rate": 1e-6, "critic_learning_rate": 5e-6}
ORZ |= {"value_clip": 0.2, "max_norm": 1, "bf16": True, "gradient_checkpointing": True}
ORZ |= {"packing_max_len": 16384, "micro_train_batch_size": 1, "zero_stage": 3}
ORZ |= {"eval_interval": 10, "save_interval": 50}


def test_the_defaults_are_orz_s():
    cfg = train.parse_flags([])
    assert {name: getattr(cfg, name) for name in ORZ} == ORZ
    assert train.ORZ_STOP == ["User:", "Human:", "Assistant:", "</answer>"]
    assert not cfg.enforce_eager, "it costs time"


@pytest.mark.parametrize(
    "line, values",
    [
        # The defaults of evaluations are the settings of training.
        ("--temperature 0.5 --top_p 0.9", {"eval_temperature": 0.5, "eval_top_p": 0.9}),
        ("--eval_temperature 0 --eval_top_p 0.7", {"eval_temperature": 0, "eval_top_p": 0.7}),
        # An empty text is no stop string.
        ("--stop ''", {"stop": []}),
        ("--stop=", {"stop": []}),
        ("--stop a b --seed 7", {"stop": ["a", "b"], "seed": 7}),
        ("--seed 1 --seed 2", {"seed": 2}),
        ("--bf16 false --eval_only", {"bf16": False, "eval_only": True}),
        ("--zero_stage 2 --max_steps 3", {"zero_stage": 2, "max_steps": 3}),
        ("--actor_learning_rate 1e-3", {"actor_learning_rate": 1e-3}),
    ],
)
def test_a_command_line_is_read(line, values):
    cfg = train.parse_flags(shlex.split(line))
    assert {name: getattr(cfg, name) for name in values} == values


def test_help_has_the_default_and_the_advice_of_each_flag():
    """Also of a variant's flags. Nothing that takes seconds is imported before the flags are read:
    neither transformers nor DeepSpeed."""
    told = run_python(ROOT / "train.py", "--variant", "lr_end", "--help").stdout
    for field in dataclasses.fields(train.Config):
        assert f"--{field.name} " in told and field.metadata["help"] in told
    assert "--template orz\n      orz, demo, " in told and "--lr_end 0.0\n" in told
    check = "import sys, train; print({'transformers', 'deepspeed', 'vllm'} & sys.modules.keys())"
    assert run_python("-c", check).stdout == "set()\n"


def test_the_demo_s_base_model_is_made_once(process_group, monkeypatch, tmp_path, capsys):
    """It is beside the run's folder, and the next run uses it again. Only write_flags of
    tools/base_model.py runs here."""
    made = []

    def make_base(words):
        assert words[1:3] == [ROOT / "tools" / "base_model.py", "addition"]
        words[3].mkdir()
        write_flags(words[3], words[2], int(words[5]))
        made.append(words[3])
        return 0

    monkeypatch.setattr(train.subprocess, "call", make_base)
    for name in ("one", "two"):
        cfg = train.parse_flags(["--run_dir", str(tmp_path / name), "--seed", "3"])
        cfg = train.parse_flags(train.demo_flags(cfg))
        assert (cfg.model, cfg.seed, cfg.stop) == (str(tmp_path / "demo_base_3"), 3, [])
        assert f"the demo is train.py --model {tmp_path}/demo_base_3 " in capsys.readouterr().out
    assert made == [tmp_path / "demo_base_3"]
    monkeypatch.setattr(train.subprocess, "call", lambda words: 2)
    with pytest.raises(UserError, match="base model was not made; its error stands above"):
        train.demo_flags(train.Config(run_dir=str(tmp_path / "other" / "run")))


# ---- models --------------------------------------------------------------------------------------


def test_models_that_cannot_be_used_are_refused(tiny, other_critic, tmp_path, process_group):
    """A critic of other tokens would value another text."""
    no_eos = maker.make_model(tmp_path / "no_eos")
    edited = json.loads((no_eos / "tokenizer_config.json").read_text()) | {"eos_token": None}
    (no_eos / "tokenizer_config.json").write_text(json.dumps(edited))
    short = maker.make_model(tmp_path / "short", max_position_embeddings=32)
    other = maker.make_model(tmp_path / "other", text_tokenizer=True)
    a_critic = maker.make_model(tmp_path / "a_critic")
    (a_critic / "value_head.safetensors").touch()
    no_tokenizer = maker.make_model(tmp_path / "no_tokenizer")
    for file in no_tokenizer.glob("*token*"):
        file.unlink()
    nowhere = tmp_path / "nowhere"
    for changes, told in [
        ({"model": nowhere}, "--model .*nowhere: there is no such folder, and"),
        ({"model": no_tokenizer}, f"--model {no_tokenizer} has no tokenizer; put its tokenizer"),
        ({"model": no_eos}, "--model .*: its tokenizer has no eos token"),
        ({"model": a_critic}, "--model .* is a critic; name the folder policy/ beside it"),
        ({"max_len": 257}, "--max_len 257: --model .* has 256 positions; lower --max_len"),
        ({"critic": short}, f"--max_len 64: --critic {short} has 32 positions"),
        ({"critic": other}, f"--critic {other}: its tokenizer is not that of"),
        ({"critic": nowhere}, "--critic .*nowhere: there is no such folder, and"),
    ]:
        with pytest.raises(UserError, match=f"^{told}"):
            train.load_tokenizer(config(**tiny | changes))
    # A critic of another size is fine.
    tokenizer = train.load_tokenizer(config(**tiny, max_len=256, critic=other_critic))
    assert len(tokenizer) == 56
    for teacher, told in [
        (other, ": its tokenizer is not that of"),
        (nowhere, ": there is no such folder"),
        (a_critic, " is a critic; name the policy/"),
        (short, " has 32 positions, less than"),
    ]:
        cfg = config(**tiny, variant="distill", teacher=teacher, teacher_weight=0.5)
        with pytest.raises(UserError, match=f"^--teacher {teacher}{told}"):
            cfg.policy_model(None)


# ---- problems ------------------------------------------------------------------------------------


def load(texts, cfg, tokenizer, paths=("mine",)):
    """load_problems of a task with these questions."""
    problems = [reward.Problem(9, text, "", text) for text in texts]
    task = SimpleNamespace(load_problems=lambda *_, **__: problems)
    return train.load_problems(task, paths, cfg, tokenizer)


def test_prompts_that_are_empty_or_too_long_are_left_out_and_counted(process_group, tiny, capsys):
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    # As Gemma 3's, this tokenizer has a token that the embedding has no row for.
    tokenizer.add_tokens([*map("<{}>".format, range(8)), "<image>"])
    cfg = config(model=tiny["model"], prompt_max_len=5)
    problems = load(["1", "", "1+1+1+", "1+1+1", "<image>"], cfg, tokenizer)
    # The index is the place in the files.
    assert [(p.index, p.prompt) for p in problems] == [(0, "1"), (3, "1+1+1")]
    assert problems[1].prompt_ids == tokenizer.encode("1+1+1")
    reasons = "1 empty, 1 longer than --prompt_max_len 5, 1 with a token beyond the model's 64"
    assert capsys.readouterr().out == f"mine: 3 of 5 prompts are left out: {reasons}\n"
    assert len(load(["1+1"], cfg, tokenizer)) == 1
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="^mine: no problem is left$"):
        load([""], cfg, tokenizer)
    assert capsys.readouterr().out == "mine: 1 of 1 prompts are left out: 1 empty\n"
    with pytest.raises(UserError, match="^mine: no problem is left$"):
        load([], cfg, tokenizer)


def test_a_prompt_with_a_character_that_the_tokenizer_lacks_is_told(
    process_group, tiny, text_model, capsys
):
    """The model would read another question. Spaces and the case of letters do not count."""
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    cfg = config(model=tiny["model"], prompt_max_len=60)
    texts = ["1 + 1", "anna hat 10 \u00e4pfel", "10 \u20ac"]
    assert len(load(texts, cfg, tokenizer)) == 3
    told = capsys.readouterr().out
    assert told.startswith("WARNING: mine: in 2 prompts the tokenizer loses a character, or does ")
    assert "; it reads 'anna hat 10 \u00e4pfel' as 'anna hat 10 " in told
    # A tokenizer of bytes loses nothing.
    cfg = config(model=text_model, prompt_max_len=60)
    load(texts, cfg, AutoTokenizer.from_pretrained(text_model))
    assert capsys.readouterr().out == ""


CHAT = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content | trim }}<end>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
<think>
{% endif %}"""


THINKING = """{% for message in messages %}{{ message.content }}{% endfor %}
{%- if not enable_thinking | default(true) %}<think></think>{% endif %}"""

# Llama 3's and SmolLM3's templates have today's date, by this function.
DATED = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return str(maker.make_model(tmp_path_factory.mktemp("text"), text_tokenizer=True, vocab=600))


def chat_tokenizer(template):
    tokenizer = maker.make_text_tokenizer(512)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("system", [None, "Give the answer behind ####."])
def test_a_chat_is_what_its_template_makes_of_it(process_group, system, text_model, tmp_path):
    """The template is the tokenizer's. The model's turn has begun: with a thinking tag, if the
    template ends with one. The ids are those that transformers itself would feed a model."""
    tokenizer = chat_tokenizer(CHAT)
    rows = [{"question": text, "answer": "#### 2"} for text in (" 1+1?\n", "{question}<end>")]
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    rows.append({"messages": own, "ground_truth": "4"})
    (tmp_path / "odd.jsonl").write_text("\n".join(map(json.dumps, rows)))
    paths = [str(DATA / "gsm8k.jsonl"), str(tmp_path / "odd.jsonl")]
    cfg = train.Config(model=text_model, template="chat", system=system)
    problems = train.load_problems(reward, paths, cfg, tokenizer)
    assert [problem.index for problem in problems] == list(range(103)), "over both files"
    for problem in problems:
        # --system replaces the record's own system turn.
        text = system or problem.system
        turns = [{"role": "system", "content": text}] if text else []
        chat = [*turns, {"role": "user", "content": problem.question}]
        options = {"add_generation_prompt": True, "return_dict": False}
        assert problem.prompt_ids == tokenizer.apply_chat_template(chat, **options)
    prompt = tokenizer.decode(problems[0].prompt_ids)
    assert prompt.startswith("<|system|>\nGive" if system else "<|user|>\nJanet")
    assert prompt.endswith("?<end>\n<|assistant|>\n<think>\n")
    assert problems[0].label == "18" and problems[-1].system == "Be brief."


@pytest.mark.parametrize(
    "template, kwargs, prompt",
    [
        (THINKING, "{}", "1+1?"),
        (THINKING, '{"enable_thinking": true}', "1+1?"),
        (THINKING, '{"enable_thinking": false}', "1+1?<think></think>"),
        # A resume on another day has the same prompts.
        (DATED, "{}", "01 Jan 2025 1+1?"),
    ],
)
def test_a_switch_of_a_chat_template_is_set(process_group, template, kwargs, prompt):
    """Qwen3's and SmolLM3's templates have enable_thinking."""
    cfg = train.Config(template="chat", chat_template_kwargs=kwargs)
    problem = SimpleNamespace(prompt="1+1?")
    assert train.render_chats([problem], cfg, chat_tokenizer(template)) == [prompt]


@pytest.mark.parametrize(
    "template, flags, told",
    [
        (None, {}, "chat_template is not set"),
        ("{{ raise_exception('no system') }}", {}, "no system"),
        ("Hello!", {}, "it leaves out the user's turn: '1.1.'"),
        ("{{ messages[-1].content }}", {"system": "Be brief."}, "leaves out the system's turn: 'B"),
        (THINKING, {"chat_template_kwargs": '{"thinking": false}'}, "it does not read thinking$"),
        (THINKING, {"chat_template_kwargs": "thinking"}, "Expecting value"),
        (THINKING, {"chat_template_kwargs": "[1]"}, "."),
    ],
)
def test_a_chat_that_cannot_be_made_is_refused_in_one_line(template, flags, told):
    cfg = train.Config(model="base", template="chat", **flags)
    with pytest.raises(UserError, match=f"^--template chat, .* the template of base: .*{told}"):
        train.render_chats([SimpleNamespace(prompt="1+1?")], cfg, chat_tokenizer(template))


def test_a_chat_template_without_a_generation_prompt_is_told(text_model, capsys, process_group):
    """The model would go on with the user's turn, unless the template is right so, as Mistral's."""
    cfg = train.Config(model=text_model, template="chat")
    load(["1+1?"], cfg, chat_tokenizer(CHAT))
    assert capsys.readouterr().out == ""
    load(["1+1?"], cfg, chat_tokenizer("[INST]{{ messages[0].content }}[/INST]"))
    told = "the chat template ignores add_generation_prompt; the first prompt ends with"
    assert capsys.readouterr().out == f"{told} '[INST]1+1?[/INST]'\n"


def test_a_tokenizer_that_adds_a_bos_adds_none_to_a_template(process_group, tiny, text_model):
    """Llama's and Gemma's tokenizers add one. The template decides."""
    tokenizer = chat_tokenizer("<s>" + CHAT)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_bos_token = True
    bos = tokenizer.bos_token_id
    assert tokenizer("1+1")["input_ids"][0] == bos
    for template, count in [("orz", 1), ("{bos}{question}", 1), ("chat", 1), ("plain", 0)]:
        cfg = train.Config(model=text_model, template=template)
        ids = train.load_problems(reward, [tiny["data"]], cfg, tokenizer)[0].prompt_ids
        assert ids.count(bos) == ids[:1].count(bos) == count


def test_eval_sets_are_called_like_their_files(monkeypatch):
    """A name is given once, and `train` is what training's own samples are called."""
    monkeypatch.setattr(train, "load_problems", lambda *arguments: None)
    paths = ["a/math500.json", "MATH?split=test&columns=problem,answer", "MATH?split=dev"]
    cfg = train.Config(eval_data=paths)
    sets = train.load_eval_sets(reward, cfg, None)
    assert list(sets) == ["math500", "MATH-test", "MATH-dev"]
    for wrong in (["a/math.json", "b/math.json"], ["x/train.json"]):
        with pytest.raises(UserError, match="the name (math|train) is taken; rename"):
            train.load_eval_sets(reward, train.Config(eval_data=wrong), None)


# ---- task, evaluation ----------------------------------------------------------------------------

WHOLE_TASK = "from __future__ import annotations\nfrom reward import Grader, load_problems\n"
WHOLE_TASK += "import dataclasses\n\n@dataclasses.dataclass\nclass Problem:\n    question: str\n"


def test_a_task_may_be_a_file_anywhere(tmp_path):
    """Also one with the name of another module, and with dataclasses whose annotations are text."""
    for name in ("my_task", "reward", "json"):
        path = tmp_path / f"{name}.py"
        path.write_text(WHOLE_TASK + f"def text_metrics(text):\n    return {{{name!r}: 1.0}}\n")
        task = train.load_task(train.Config(task=str(path)))
        assert task.text_metrics("") == {name: 1.0}
        assert task.Problem("1+1").question == "1+1"
    assert "Problem" in dir(reward) and json.dumps({}) == "{}"


def test_flags_that_a_task_does_not_know_are_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("REWARDS = ('right', 'short')\n")
    replies = tmp_path / "replies.py"
    replies.write_text("def reply(text, finish_reason, label): ...\n")
    assert train.load_task(train.Config(answer_form="hashes")).__file__ == reward.__file__
    for flags, told in [
        ({"task": "essay"}, "--task essay: there is no file .*tasks/essay.py; choose math, "),
        ({"task": "absent.py"}, "--task absent.py: there is no file absent.py; choose math, "),
        (
            {"answer_form": "boxes"},
            "--answer_form boxes: .*reward.py has orz or boxed_anywhere or ",
        ),
        ({"task": "code", "answer_form": "hashes"}, "--answer_form hashes: .*code.py has orz$"),
        ({"task": path, "reward_weights": "fast=1"}, ".*fast=1: .*; the task names right, short"),
        ({"task": path, "reward_weights": "short"}, "--reward_weights short: write NAME=WEIGHT"),
        ({"task": replies}, "--task .*: .*replies.py has `reply` and no STOP"),
    ]:
        with pytest.raises(UserError, match=f"^{told}"):
            train.load_task(config(**flags))


def test_no_randomness_is_used_twice(monkeypatch, process_group, capsys):
    """Steps, evaluations, their sets and the check at the start have seeds of their own, although
    all of them draw the same samples of the same problems here."""
    cfg = config(eval_n=4, eval_temperature=0.5, eval_top_p=0.5, rollout_batch_size=8)
    problems = [reward.Problem(k, "", "", "", [1]) for k in range(8)]
    drawn = []

    def draw(rollout, requests, clock):
        drawn.append(requests)
        assert [(r.group, r.sample_number) for r in requests[3:5]] == [(0, 3), (1, 0)]
        assert {(r.temperature, r.top_p, r.max_tokens) for r in requests} == {(0.5, 0.5, 32)}
        clock.numbers["reward_lost"] = int(len(drawn) > 5)
        return len(drawn)

    log = mock.Mock(**{"has_evaluation.return_value": False})
    sampler = mock.Mock(**{"generate.side_effect": StopIteration})
    with pytest.raises(StopIteration):
        train.check_sampler(mock.Mock(sampler=sampler, cfg=cfg), None, problems)
    drawn.append(sampler.generate.call_args.args[0])
    for step in range(2):
        drawn.append(requests_of_step(problems, cfg, step))
        # Only its `draw` is called.
        rollout = SimpleNamespace(cfg=cfg, draw=functools.partial(draw, None))
        train.evaluate(rollout, {"aime": problems, "math": problems}, step, log)
    seeds = [{request.seed for request in requests} for requests in drawn]
    assert list(map(len, seeds)) == [8 * 4] * 7
    assert len(set.union(*seeds)) == 7 * 8 * 4
    told = [call.args for call in log.evaluation.call_args_list]
    assert told == [("aime", 3, 0), ("math", 4, 0), ("aime", 6, 1), ("math", 7, 1)]
    log.has_evaluation.return_value = True
    train.evaluate(rollout, {"aime": problems}, 1, log)
    assert len(drawn) == 7, "an evaluation that is there is not repeated"
    lost = "without a verdict, and counted as wrong: 1 comparisons"
    assert capsys.readouterr().out == f"WARNING: aime: {lost}\nWARNING: math: {lost}\n"


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untied(tiny, tmp_path_factory):
    """A model with a head of its own, and the problems of `tiny`."""
    folder = tmp_path_factory.mktemp("untied")
    return tiny | {"model": str(maker.make_model(folder / "model", tied=False))}


# All that can be measured is.
MEASURED = {"max_steps": 4, "eval_interval": 2, "eval_n": 2, "critic_updates": 1, "keep_last": 0}
MEASURED |= {"log_samples": 0, "variant": ["log_ratio", "log_kl"]}


@pytest.fixture(scope="module")
def one_rank(untied, tmp_path_factory):
    """A run of one rank. What it said is in its screen.txt."""
    run = tmp_path_factory.mktemp("one_rank")
    done = launch(run, **untied | MEASURED, save_interval=3)
    (run / "screen.txt").write_text(done.stdout)
    return run


def test_a_run_writes_everything(one_rank):
    lines = jsonl(one_rank / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for name in ("paid", "clipfrac", "seconds_policy", "tokens_per_second", "memory_rollout"):
        assert all(name in line for line in lines), name
    assert [line["step"] for line in jsonl(one_rank / "eval.jsonl")] == [0, 2, 4]
    result = json.loads((one_rank / "result.json").read_text())
    assert result["steps"] == 4
    written = json.loads((one_rank / "config.json").read_text())
    assert set(written) >= {field.name for field in dataclasses.fields(train.Config)}
    said = (one_rank / "screen.txt").read_text()
    assert "sampler and trainer differ by" in said
    ranks, known, start, *_ = said.splitlines()
    assert ranks == "1 rank(s) on cpu", "no word of a library"
    assert known == "WARNING: 8 of 8 problems of eval are also in --data"
    assert start.startswith("40 problems, 4 steps; "), "no word of a library"


def test_the_page_explains_each_number(one_rank):
    """Those of a variant are in its docstring."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    named = set(re.findall(r"[`\"]([\w@]+)[`\"]", page))
    of_variants = {"kl", "ratio", "ratio_far", "clipfrac", "approx_kl"}
    found = set().union(*jsonl(one_rank / "metrics.jsonl"), *jsonl(one_rank / "eval.jsonl"))
    found = {re.sub("^(seconds|memory)_.*", r"\1_PHASE", name) for name in found - of_variants}
    assert {re.sub(r"pass@\d+", "pass@n", name) for name in found} <= named


def test_every_step_is_on_policy_and_has_its_warm_up_rate(one_rank):
    lines = jsonl(one_rank / "metrics.jsonl")
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in lines), "the sampler's weights are old"
    assert abs(lines[0]["kl"]) < 1e-6, "the first step's policy is the reference"
    for name in ("policy_lr", "critic_lr"):
        # The loop counts steps from 0: a rate one step late is wrong during the warm-up alone.
        assert [line[name] for line in lines] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])


# A variant that sends a SIGTERM to the last rank, at the place that STOP_AT names.
STOP = """
import os, signal
import ppo


class Stop(ppo.Recipe):
    def _stop(self, place):
        is_last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if os.environ.get("STOP_AT") == place and is_last_rank:
            os.kill(os.getpid(), signal.SIGTERM)

    def draw_step(self, rollout, requests, problems, step, clock):
        if step == 1:
            self._stop("rollout of step 2")
        return super().draw_step(rollout, requests, problems, step, clock)

    def named_weights(self, learner, named):
        self._stop("first sync")
        return super().named_weights(learner, named)
"""


@pytest.fixture
def stop(tmp_path):
    (tmp_path / "stop.py").write_text(STOP)
    return tmp_path / "stop.py"


def test_a_resume_is_exact_and_a_failed_save_does_not_end_a_run(one_rank, untied, stop, tmp_path):
    """SIGTERM comes as step 2 is sampled. Nothing is lost, the exit code is 0, and the same command
    goes on from step 1. Then files lie where two saves would write, at an interval and at the end.
    The run goes on and exports. The exit code and a line tell of step 4, and the same command makes
    the missing steps again."""
    run = tmp_path / "run"
    flags = untied | MEASURED | {"log_with": "tensorboard", "save_interval": 2}
    flags["variant"] = [*MEASURED["variant"], stop]
    stopped = launch(run, env={"STOP_AT": "rollout of step 2"}, **flags)
    assert stopped.stdout.endswith("stopped; --resume auto goes on from step 1\n")
    assert [path.name for path in run.glob("step_*")] == ["step_000001"]
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert len(events.Scalars("train/reward")) == 1, "lost with the process"
    for step in (2, 4):
        (run / f".saving_{step:06d}").write_text("")
    resumed = launch(run, code=1, **flags)
    assert "from step 1," in resumed.stdout
    assert re.search("WARNING: step 2 is NOT saved: .*FileExistsError", resumed.stdout)
    assert resumed.stdout.splitlines()[-1].startswith("step 4 is NOT saved; ")
    assert [path.name for path in run.glob("step_*")] == ["step_000001"]
    assert not (run / "result.json").exists()
    assert (run / "policy" / "model.safetensors").exists()
    for step in (2, 4):
        (run / f".saving_{step:06d}").unlink()
    assert "from step 1," in launch(run, **flags).stdout
    equal_runs(one_rank, run)


def test_an_evaluation_alone_needs_no_data_and_trains_nothing(one_rank, untied, tmp_path):
    """It gives the numbers of step 0. A folder with results is not written to again."""
    flags = untied | MEASURED | {"data": None, "eval_only": True}
    run = tmp_path / "run"
    launch(run, **flags)
    files = {path.name for path in run.iterdir()} - {".lock"}
    assert files == {"config.json", "code", "variants", "eval.jsonl", "eval_samples.jsonl"}
    assert jsonl(run / "eval.jsonl") == jsonl(one_rank / "eval.jsonl")[:1]
    samples = jsonl(run / "eval_samples.jsonl")
    assert samples == jsonl(one_rank / "eval_samples.jsonl")[: len(samples)]
    for folder in (run, one_rank):
        said = launch(folder, code=2, **flags).stderr
        assert said == f"error: --run_dir {folder} has results; choose another --run_dir\n"


@SLOW
def test_a_complete_run_is_not_started_again(one_rank, untied):
    said = launch(one_rank, **untied | MEASURED, save_interval=3).stdout
    assert "one_rank0 is complete; raise --max_steps or --num_episodes, or start over" in said
    assert [line["step"] for line in jsonl(one_rank / "metrics.jsonl")] == [1, 2, 3, 4]


def first_samples(run: Path) -> list[list]:
    """What the first step has drawn. It must not depend on the ranks."""
    names = ("problem", "index", "response", "reward")
    return [[sample[name] for name in names] for sample in jsonl(run / "samples.jsonl")[:16]]


def test_two_ranks_that_shard_everything_draw_what_one_rank_draws(one_rank, untied, tmp_path):
    """Every sample is logged once, and an evaluation at temperature 0 is greedy."""
    run = tmp_path / "run"
    # The sets have different seeds.
    again = shutil.copy(untied["eval_data"], tmp_path / "again.json")
    flags = {"zero_stage": 3, "max_steps": 2, "variant": ["log_ratio", SHARD_EVERYTHING]}
    flags |= {"eval_temperature": 0, "log_samples": 0, "eval_data": [untied["eval_data"], again]}
    launch(run, ranks=2, **untied | flags)
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in jsonl(run / "metrics.jsonl"))
    assert len(jsonl(run / "samples.jsonl")) == 32, "every rank's samples, once"
    assert first_samples(run) == first_samples(one_rank)
    AutoModelForCausalLM.from_pretrained(run / "policy")
    answers = {"eval": [], "again": []}
    for line in jsonl(run / "eval_samples.jsonl"):
        answers[line["set"]].append(line["response"])
    assert answers["eval"] == answers["again"] and len(answers["eval"]) == 2 * 8, "greedy"


WITHOUT_HEAD = """
import ppo


class WithoutHead(ppo.Recipe):
    def named_weights(self, learner, named):
        return ((name, weight) for name, weight in named if name != "lm_head.weight")
"""


def test_a_sync_that_leaves_out_the_head_ends_the_run_after_the_first_update(tiny, tmp_path):
    """The check at the start cannot see it, because the sampler has the base model's weights. The
    model is tied: vLLM on a CPU keeps the old head."""
    path = tmp_path / "without_head.py"
    path.write_text(WITHOUT_HEAD)
    flags = tiny | {"warmup_updates": 1, "actor_learning_rate": 1e-2, "variant": path}
    said = launch(tmp_path / "run", code=2, **flags).stderr
    assert re.search("after step 1 sampler and trainer differ by .*; try --packing alone", said)


# An error of rank 1 in the second step, at the place that FAIL_AT names.
FAIL = """
import os, pathlib
import ppo, reward
from reward import *
from nanoorz.ranks import dist


def fail(place):
    is_second = pathlib.Path(os.environ["RUN"], "metrics.jsonl").exists()
    if os.environ["FAIL_AT"] == place and is_second and dist.get_rank() == 1:
        raise ValueError(f"in the {place}")


class Fail(ppo.Recipe):
    def raw_advantages(self, *arguments):
        fail("estimator")
        return super().raw_advantages(*arguments)


class Grader(reward.Grader):
    def submit(self, *arguments):
        fail("reward")
        return super().submit(*arguments)
"""


@SLOW
@pytest.mark.parametrize("place, saved", [("reward", ["step_000001"]), ("estimator", [])])
def test_an_error_on_one_rank_ends_all_ranks(tiny, tmp_path, place, saved):
    """Only an error of the task is followed by a save. No rank waits for ever, and nothing is half
    written."""
    path = tmp_path / "fail.py"
    path.write_text(FAIL)
    run = tmp_path / "run"
    env = {"FAIL_AT": place, "RUN": str(run)}
    flags = tiny | {"task": path, "variant": path, "save_interval": 2}
    done = launch(run, ranks=2, code=1, env=env, **flags)
    assert f"ValueError: in the {place}" in done.stderr
    assert [path.name for path in run.glob("*step_*")] == saved
    assert ("stopped; --resume auto goes on from step 1" in done.stdout) == bool(saved)
    assert not list(run.glob(".saving*")) and not (run / "result.json").exists()


@SLOW
def test_two_ranks_sharing_a_sampler_draw_what_one_rank_draws(tiny, shared_memory, tmp_path):
    """The samples of one rank, dealt to the trainer once; synced under ZeRO 3."""
    run = tmp_path / "run"
    launch(run, ranks=2, **tiny, zero_stage=3, max_steps=2, variant="log_ratio", tensor_parallel=2)
    launch(tmp_path / "one_rank", **tiny, max_steps=1)
    assert first_samples(run) == first_samples(tmp_path / "one_rank")
    assert len(jsonl(run / "samples.jsonl")) == 32, "not twice"
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in jsonl(run / "metrics.jsonl"))


@pytest.mark.engine
def test_real_problems_train_with_the_orz_template(tmp_path):
    """The model is tied: vLLM on a CPU would keep the old head silently if it were not named."""
    model = maker.make_model(tmp_path / "model", text_tokenizer=True, max_position_embeddings=4096)
    lines = (DATA / "math.jsonl").read_text().splitlines()
    (tmp_path / "math.jsonl").write_text("\n".join(lines[:8]))
    flags = {"model": model, "data": DATA / "gsm8k.jsonl", "eval_data": tmp_path / "math.jsonl"}
    flags |= {"template": "orz", "stop": train.ORZ_STOP, "prompt_max_len": 1024, "max_len": 2048}
    flags |= {"packing_max_len": 2048, "micro_train_batch_size": 1, "kv_cache_gb": 0.5}
    flags |= {"actor_learning_rate": 1e-2, "warmup_updates": 1, "max_steps": 2}
    run = tmp_path / "run"
    launch(run, **flags, variant="log_ratio")
    # The template is a prefix of every prompt: keys of the old weights would be used again.
    assert all(abs(line["ratio"] - 1) < 1e-3 for line in jsonl(run / "metrics.jsonl"))


MINE = "import ppo\n\n\nclass Mine(ppo.Recipe):\n    pass\n"


@pytest.mark.engine
@pytest.mark.parametrize(
    "changes, of_rank_1, told",
    [
        ({}, {"seed": 7}, "rank 1: --seed is 7, but on rank 0 it is 42; give all ranks the same"),
        ({"data": "other.json"}, {}, r"rank 1: hash of the problems in other.json is \d+, but on"),
        ({"data": "empty.json"}, {}, "error: empty.json holds no problems"),
        ({"run_dir": "run"}, {}, r"machine .*, rank \d, .*/run: not shared: the file of rank"),
    ],
)
def test_ranks_that_differ_end(tiny, tmp_path, changes, of_rank_1, told):
    """They would wait for each other, or train on samples behind each other's prompts. Each rank
    works in a folder of its own, as on another machine."""
    problems = json.loads(Path(tiny["data"]).read_text())
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "other.json").write_text(json.dumps(problems[rank:]))
        (folder / "empty.json").write_text(json.dumps(problems if rank == 0 else []))
    flags = SMALL | tiny | {"run_dir": tmp_path / "run"} | changes
    words = [[ROOT / "train.py", *arguments(flags | own)] for own in ({}, of_rank_1)]
    with conftest.started_ranks(words, folders=[tmp_path / "0", tmp_path / "1"]) as ranks:
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert {rank.returncode for rank in ranks} in ({2}, {1, 2})
    assert re.search(told, "".join(said)), said


@pytest.mark.engine
def test_the_end_of_its_launcher_ends_a_trainer_that_starts(tiny, tmp_path):
    """A SIGTERM reaches only the launcher of one process. The trainer must end too."""
    said = tmp_path / "said.txt"
    words = [*LAUNCHER, *arguments(SMALL | tiny | {"run_dir": tmp_path / "run"})]
    launcher = conftest.start_python(*words, output=said)
    conftest.wait_until(lambda: "rank(s) on cpu" in said.read_text(), launcher)
    [trainer] = psutil.Process(launcher.pid).children()
    launcher.terminate()
    launcher.wait(60)
    trainer.wait(60)


@SLOW
def test_a_signal_to_one_rank_of_two_while_the_engines_start_leaves_no_checkpoint(
    tiny, stop, tmp_path
):
    """With a checkpoint of step 0, a user who restarts with another flag would be refused."""
    run = tmp_path / "run"
    said = launch(run, ranks=2, env={"STOP_AT": "first sync"}, variant=stop, **tiny).stdout
    assert said.count("stopped; no step is saved") == 1
    assert not list(run.glob("step_*")) and not (run / "metrics.jsonl").exists()
