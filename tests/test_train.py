"""Flags, set-up and loop of train.py, and whole runs of it on the real engines."""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import conftest
import datasets
import families
import pytest
import tiny as maker
import torch
import torch.distributed as dist
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
)
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

import reward
import train
from nanoorz import chat, demo
from nanoorz.flags import flags_of
from nanoorz.hashes import hash_inputs, hash_problems
from nanoorz.ranks import UserError
from rollout import Sample, requests_of_step
from tools.base_model import write_flags

LAUNCHER = [*conftest.ACCELERATE, "--num_machines", 1, "--num_processes", 1, ROOT / "train.py"]
SLOW = pytest.mark.slow

# ---- parse_flags ---------------------------------------------------------------------------------

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


def test_flags_are_read_and_a_file_of_flags_beside_the_script_is_not(monkeypatch, tmp_path):
    """transformers would read train.args. The defaults of evaluations are training's settings; an
    empty text is no stop string; other spellings are taken."""
    (tmp_path / "train.args").write_text("--seed 7\n")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    cfg = train.parse_flags(["--temperature", "0.5", "--top_p", "0.9", "--stop", ""])
    assert (cfg.eval_temperature, cfg.eval_top_p, cfg.stop, cfg.seed) == (0.5, 0.9, [], 42)
    cfg = train.parse_flags(["--eval_temperature", "0", "--eval_top_p", "0.7", "--stop", "a", "b"])
    assert (cfg.eval_temperature, cfg.eval_top_p, cfg.stop) == (0, 0.7, ["a", "b"])
    cfg = train.parse_flags(["--max-len", "9", "--no_bf16"])
    assert (cfg.max_len, cfg.bf16) == (9, False)


def test_wrong_flags_are_refused_in_one_line():
    """The line for an unknown flag names the nearest one."""
    wrong = {
        ("--actor_learning", "1"): ".*did you mean --actor_learning_rate",
        ("--dry_run",): ".*give the same flags to tools/plan.py",
        ("--wet_walk",): "unknown flag --wet_walk; `python train.py --help` has all flags$",
        ("--run_dir", ""): "--run_dir: name a folder$",
        ("--seed", "many"): ".*seed.*--help` explains each flag",
    }
    for words, told in wrong.items():
        with pytest.raises(UserError, match=f"^{told}") as error:
            train.parse_flags(list(words))
        assert "\n" not in str(error.value)


def test_help_has_the_advice_the_choices_and_the_default_of_each_flag(capsys):
    with pytest.raises(SystemExit):
        train.parse_flags(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(train.Config):
        assert f"--{field.name} " in text and field.metadata["help"] % () in text
    assert "Choose none, optimizer. (default: none)" in text
    assert all(name in text for name in train.ppo.ESTIMATORS) and "(default: gae)" in text
    assert "--no_" not in text and "--max-len" not in text


# ---- run, demo_flags, main -----------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch, process_group):
    """run() finds the process group of one rank. Returns what main() gets beside the flags."""
    place = [1, torch.device("cpu"), dist.HashStore()]
    monkeypatch.setattr(train, "start_distributed", lambda: (0, *place))
    return place


def test_without_a_model_a_run_is_the_demo(alone, monkeypatch, tmp_path, capsys):
    """The user's flags override the demo's. Of tools/base_model.py only write_flags runs here."""
    base = str(tmp_path / "base")
    # One rank alone makes the base.
    tool = str(ROOT / "tools" / "base_model.py")
    command = [sys.executable, tool, "addition", base, "--seed", "3", "--end_with_parent"]

    def make_base(words):
        assert words == command
        Path(base).mkdir()
        write_flags(Path(base), "addition", 3)
        return 0

    main = mock.Mock(return_value=0)
    monkeypatch.setattr(demo.subprocess, "call", make_base)
    monkeypatch.setattr(train, "main", main)
    argv = ["--run_dir", str(tmp_path), "--seed", "3", "--max_steps", "5", "--eval_data", "mine"]
    assert train.run(argv) == 0
    cfg, *place = main.call_args.args
    assert (cfg.model, cfg.seed, cfg.max_steps, cfg.eval_data) == (base, 3, 5, ["mine"])
    assert (cfg.rollout_batch_size, cfg.stop, cfg.template) == (64, [], "demo")
    assert place == alone
    said = capsys.readouterr().out
    assert said.startswith("the demo is train.py --model ") and "--rollout_batch_size 64" in said
    monkeypatch.setattr(demo.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(demo.subprocess, "call", None)
    assert demo.demo_flags(cfg)[:2] == ["--model", base]
    assert train.run(["--model", "mine", "--data", "mine"]) == 0
    assert main.call_args.args[0].model == "mine"
    monkeypatch.setattr(demo, "gather", lambda _: [1, 0])
    assert train.run([]) == 2
    assert capsys.readouterr().err == "error: the demo's base model was not made, see above\n"


def test_without_a_model_another_run_is_not_touched_and_its_flags_are_printed(
    alone, monkeypatch, tmp_path
):
    monkeypatch.setattr(demo.subprocess, "call", None)
    old = {"model": "/m", "stop": [], "bf16": False, "bonus": 2.0, "max_steps": 4, "seed": 42}
    # The folder was moved since, and its run began with --resume none.
    old |= {"run_dir": "elsewhere", "resume": "none", "world": 1, "versions": {}}
    old["variants"] = [["mine", "hash"]]
    (tmp_path / "config.json").write_text(json.dumps(old))
    cfg = train.parse_flags(["--run_dir", str(tmp_path), "--max_steps", "6"])
    with pytest.raises(UserError) as error:
        demo.demo_flags(cfg)
    words = f"--model /m --stop '' --bf16 False --bonus 2.0 --max_steps 4 --run_dir {tmp_path} "
    words += f"--variant {tmp_path}/variants/mine.py"
    assert str(error.value).endswith(f"add your flags to: python train.py {words}")


@pytest.mark.parametrize("flag, name", [("model", ""), ("model", "policy"), ("critic", "critic")])
def test_a_run_does_not_write_over_its_own_model(flag, name, tmp_path):
    """The config.json of a model that was also the run folder was lost once."""
    cfg = config(**{flag: str(tmp_path / name), "run_dir": str(tmp_path)})
    with pytest.raises(UserError, match=f"^--{flag} .* is in --run_dir; choose another --run_dir$"):
        train.open_run_dir(cfg)


def test_a_complete_run_starts_no_sampler(tiny, alone, monkeypatch, tmp_path, capsys):
    """A run without its result.json, or before its last step, is not complete."""
    cfg = config(**tiny, max_steps=3)
    step = 3

    def find_start(run_dir, resume, new, fixed):
        assert fixed.keys() == flags_of(train.Learning()).keys() - {"variant"}
        assert (run_dir, resume, new.step, new.total_steps) == (tmp_path, "auto", 0, 3)
        assert new.config == flags_of(cfg) and new.world == 1 and new.problems_hash > 0
        assert new.variants == [], "as state.json has it"
        return None, dataclasses.replace(new, step=step)

    monkeypatch.setattr(train, "open_run_dir", lambda cfg: (tmp_path, None))
    monkeypatch.setattr(train.ckpt, "find_start", find_start)
    monkeypatch.setattr(train.environment, "Signals", lambda store: None)
    monkeypatch.setattr(train, "Rollout", mock.Mock(side_effect=StopIteration))
    with pytest.raises(StopIteration):
        train.main(cfg, *alone)
    (tmp_path / "result.json").write_text("{}")
    train.main(cfg, *alone)
    assert "is complete; raise --max_steps" in capsys.readouterr().out
    step = 2
    with pytest.raises(StopIteration):
        train.main(cfg, *alone)


def test_models_that_cannot_be_used_are_refused(tiny, other_critic, tmp_path, process_group):
    """A critic of other tokens would value another text."""
    no_eos = maker.make_model(tmp_path / "no_eos")
    edited = json.loads((no_eos / "tokenizer_config.json").read_text()) | {"eos_token": None}
    (no_eos / "tokenizer_config.json").write_text(json.dumps(edited))
    short = maker.make_model(tmp_path / "short", max_position_embeddings=32)
    other = maker.make_model(tmp_path / "other", text_tokenizer=True)
    other_id = maker.make_model(tmp_path / "other_id")
    tokenizer = AutoTokenizer.from_pretrained(other_id)
    tokenizer.add_tokens("<new>")
    tokenizer.save_pretrained(other_id)
    a_critic = maker.make_model(tmp_path / "a_critic")
    (a_critic / "value_head.safetensors").touch()
    no_tokenizer = maker.make_model(tmp_path / "no_tokenizer")
    for file in no_tokenizer.glob("*token*"):
        file.unlink()
    cut_short = maker.make_model(tmp_path / "cut_short")
    os.truncate(cut_short / "model.safetensors", 5000)
    wrong = [
        (
            {"model": tmp_path / "nowhere"},
            "--model, --critic, --teacher: there is no folder .*nowhere$",
        ),
        ({"model": no_tokenizer}, f"^{no_tokenizer} has no tokenizer; put its tokenizer"),
        ({"model": cut_short}, "model.safetensors is damaged .*; copy the file again"),
        ({"model": no_eos}, "its tokenizer has no eos token"),
        ({"max_len": 257}, "--max_len 257.* exceed the 256 positions"),
        ({"critic": short}, f"--max_len 64.* exceed the 32 positions of {short}"),
        ({"critic": other}, f"^--critic {other}: its tokenizer .*: its token 1 is '!' in place of"),
        ({"critic": other_id}, "its token 56 is '<new>' in place of None$"),
        ({"critic": no_tokenizer}, f"^{no_tokenizer} has no tokenizer"),
        (
            {"critic": tmp_path / "nowhere"},
            "--model, --critic, --teacher: there is no folder .*nowhere$",
        ),
        ({"critic": cut_short}, "model.safetensors is damaged .*; copy the file again"),
    ]
    for changes, words in wrong:
        with pytest.raises(UserError, match=words):
            train.find_inputs(config(**tiny | changes))
    # A critic of another size is fine.
    _, tokenizer = train.find_inputs(config(**tiny, max_len=256, critic=other_critic))
    assert len(tokenizer) == 56
    wrong = [(other, "its tokenizer is not that of"), ("nowhere", "is no folder")]
    wrong += [(a_critic, "is a critic; name the policy/"), (short, "has 32 positions, less than")]
    for teacher, words in wrong:
        cfg = config(**tiny, variant="distill", teacher=teacher, teacher_weight=0.5)
        with pytest.raises(UserError, match=f"--teacher:? {teacher}:? {words}"):
            cfg.policy_model(None)
    # A teacher of another family may need rows of one sample.
    recurrent = families.make_model("Qwen3.5", tmp_path / "recurrent")
    cfg = config(**tiny, variant="distill", teacher=recurrent, teacher_weight=0.5, packing="packed")
    with pytest.raises(UserError, match="^--teacher .* needs --packing alone"):
        cfg.policy_model(None)


def test_a_model_and_a_task_have_hashes_of_what_they_are(tmp_path, process_group, tiny):
    """A copy in another folder and in several files is the same model. Base and instruct models of
    a family differ in their weights alone."""
    model = maker.make_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    names = sorted(weights)

    def hashes(model, **flags):
        cfg = config(**tiny | {"model": model, **flags})
        task, tokenizer = train.find_inputs(cfg)
        problems = [SimpleNamespace(prompt_ids=prompt)]
        return hash_inputs(cfg, Path(task.__file__).read_bytes(), tokenizer, problems)

    def other(name="", **changes):
        folder = tmp_path / "other"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model, folder)
        if name:
            text = json.loads((folder / name).read_text()) | changes
            (folder / name).write_text(json.dumps(text))
        return folder

    def changed(folder):
        parts = hashes(folder)["model"]
        return [part for part in parts if parts[part] != first["model"][part]]

    prompt = [1, 2]
    first = hashes(model)
    prompt.append(3)
    assert hashes(model)["data"] != first["data"], "prompts that the model sees"
    prompt.pop()
    moved = other("config.json", _name_or_path="/elsewhere", transformers_version="4.0")
    (moved / "model.safetensors").unlink()
    index = {}
    for number, part in enumerate((names[:3], names[3:])):
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
        save_file({name: weights[name] for name in part}, moved / f"model-{number}.safetensors")
    (moved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert hashes(moved) == first
    assert changed(other("config.json", rope_theta=5.0)) == ["config"]
    assert changed(other("tokenizer_config.json", chat_template="{{ messages }}")) == ["tokenizer"]
    for name in names:
        edited = {key: tensor.clone() for key, tensor in weights.items()}
        edited[name].view(-1)[0] += 1
        folder = other()
        save_file(edited, folder / "model.safetensors", metadata={"format": "pt"})
        assert changed(folder) == ["weights"], name

    critic = other()
    heads = []
    for number in (1.0, 2.0):
        save_file(
            {"value_head.weight": torch.tensor([[number]])}, critic / "value_head.safetensors"
        )
        heads.append(hashes(model, critic=critic)["critic"]["weights"])
    assert heads[0] != heads[1]
    task = tmp_path / "mine.py"
    shutil.copy(ROOT / "reward.py", task)
    assert hashes(model, task=task)["task"] == first["task"]
    task.write_text(task.read_text() + "# edited\n")
    assert hashes(model, task=task)["task"] != first["task"]


# ---- problems, tasks, steps, evaluate, check_sampler ---------------------------------------------


def test_prompts_that_are_empty_or_too_long_are_left_out_and_counted(process_group, tiny, capsys):
    texts = ["1", "", "1+1+1+", "1+1+1", "<image>"]
    task = SimpleNamespace()
    task.load_problems = lambda *_, **__: [reward.Problem(9, text, "", text) for text in texts]
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    # As Gemma 3's, this tokenizer has a token that the embedding has no row for.
    tokenizer.add_tokens([*map("<{}>".format, range(8)), "<image>"])
    cfg = config(model=tiny["model"], prompt_max_len=5)
    problems = train.prepare_problems(task, ["mine"], cfg, tokenizer)
    assert [(p.index, p.prompt) for p in problems] == [(0, "1"), (3, "1+1+1")]
    assert problems[1].prompt_ids == tokenizer.encode("1+1+1")
    told = capsys.readouterr().out
    assert told.startswith("mine: 3 of 5 prompts are left out: they are empty, exceed --prompt")
    assert told.endswith("or have a token beyond the model's 64\n")
    texts = ["1+1"]
    assert len(train.prepare_problems(task, ["mine"], cfg, tokenizer)) == 1
    assert capsys.readouterr().out == ""
    train.prepare_problems(task, ["mine", "mine"], cfg, tokenizer)
    assert capsys.readouterr().out == "WARNING: mine mine: 2 problems have 1 different questions\n"
    texts = [""]
    with pytest.raises(UserError, match="mine: no prompt of 0 to .* is left; raise --prompt_max"):
        train.prepare_problems(task, ["mine"], cfg, tokenizer)
    texts = []
    with pytest.raises(UserError, match="^mine: load_problems of --task math has returned no pro"):
        train.prepare_problems(task, ["mine"], cfg, tokenizer)


CHAT = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content | trim }}<end>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
<think>
{% endif %}"""


THINKING = """{% for message in messages %}{{ message.content }}{% endfor %}
{%- if not enable_thinking | default(true) %}<think></think>{% endif %}"""


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
    problems = train.prepare_problems(reward, paths, cfg, tokenizer)
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
    edited = [*problems[:-1], dataclasses.replace(problems[-1], system="Be long.")]
    assert hash_problems(edited) != hash_problems(problems)


def first_problem(tiny, template, model, tokenizer, system=None):
    cfg = train.Config(model=model, template=template, system=system)
    return train.prepare_problems(reward, [tiny["data"]], cfg, tokenizer)[0]


def test_a_switch_of_a_chat_template_is_set(process_group, tiny, text_model):
    """Qwen3's and SmolLM3's templates have enable_thinking."""
    tokenizer = chat_tokenizer(THINKING)
    ends = {"chat": "", "chat?enable_thinking=true": ""}
    ends["chat?enable_thinking=false"] = "<think></think>"
    for template, end in ends.items():
        problem = first_problem(tiny, template, text_model, tokenizer)
        assert tokenizer.decode(problem.prompt_ids) == problem.question + end


# Llama 3's and SmolLM3's templates have today's date, by this function.
DATED = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"


def test_a_resume_on_another_day_has_the_date_of_the_first_day(
    process_group, tiny, text_model, tmp_path
):
    tokenizer = chat_tokenizer(DATED)
    cfg = train.Config(model=text_model, template="chat", run_dir=str(tmp_path))
    today = f"chat?strftime_now={datetime.date.today()}"
    assert chat.fix_date(cfg, tokenizer) == today
    first_day = "chat?strftime_now=2024-02-29"
    cases = [("auto", first_day, first_day), ("none", first_day, today), ("auto", "orz", today)]
    for resume, known, expected in cases:
        (tmp_path / "config.json").write_text(json.dumps({"template": known}))
        found = chat.fix_date(dataclasses.replace(cfg, resume=resume), tokenizer)
        assert found == expected, (resume, known)
    problem = first_problem(tiny, first_day, text_model, tokenizer)
    assert tokenizer.decode(problem.prompt_ids) == f"29 Feb 2024 {problem.question}"
    # A template without a date, and one that cannot be read.
    for template in (CHAT, "{% if %}"):
        assert chat.fix_date(cfg, chat_tokenizer(template)) == "chat"
    given = dataclasses.replace(cfg, template=first_day)
    assert chat.fix_date(given, tokenizer) == first_day


# (the tokenizer's template, --template, what the line says)
REFUSED_CHATS = [
    (None, "chat", "chat_template is not set"),
    ("{% if %}", "chat", "Expected an expression"),
    ("Hello!", "chat", "its chat template leaves the question out"),
    ("{{ raise_exception('no system') }}", "chat", "no system"),
    (THINKING, "chat?thinking=1", "no switch thinking; it reads"),
    (THINKING, "chat?x", "bad query field"),
    (THINKING, "chat?enable_thinking=False", "False is no value; write true, false"),
    (THINKING, "chat?enable_thinking=false,x=1", "is no value; write true, false"),
    (THINKING, "chat?enable_thinking=true&enable_thinking=false", "is set twice"),
    (THINKING, "chat?messages=1", "no switch messages; it reads"),
    (DATED, "chat?strftime_now=today", "Invalid isoformat string: 'today'"),
]


def test_a_chat_that_cannot_be_made_is_refused_in_one_line(process_group, tiny):
    for template, flag, words in REFUSED_CHATS:
        told = f"^--template {re.escape(flag)}: base: .*{words}.*; give another --template$"
        with pytest.raises(UserError, match=told):
            first_problem(tiny, flag, "base", chat_tokenizer(template), system="Be brief.")


def test_a_tokenizer_that_adds_a_bos_adds_none_to_a_template(process_group, tiny, text_model):
    """Llama's and Gemma's tokenizers add one. The template decides."""
    tokenizer = chat_tokenizer("<s>" + CHAT)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_bos_token = True
    bos = tokenizer.bos_token_id
    assert tokenizer("1+1")["input_ids"][0] == bos
    for template, count in [("orz", 1), ("{bos}{question}", 1), ("chat", 1), ("plain", 0)]:
        ids = first_problem(tiny, template, text_model, tokenizer).prompt_ids
        assert ids.count(bos) == ids[:1].count(bos) == count


def test_a_data_set_has_a_split_and_columns(process_group, tiny, tmp_path):
    rows = [{"problem": "1+1", "solution": "2"}, {"problem": "2+2", "solution": "4"}]
    whole = datasets.Dataset.from_list(rows)
    saved = f"{tmp_path}/saved"
    datasets.DatasetDict({"train": whole, "dev": whole.select([1])}).save_to_disk(saved)
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    cfg = config(model=tiny["model"])
    for query, questions in [("", ["1+1", "2+2"]), ("&split=dev", ["2+2"])]:
        path = f"{saved}?columns=problem,solution{query}"
        problems = train.prepare_problems(reward, [path], cfg, tokenizer)
        assert [problem.question for problem in problems] == questions
    assert problems[0].label == "4"
    for path, told in [
        (f"{tiny['data']}?split=nope", "it has no split; choose columns$"),
        (f"{tiny['data']}?columns=problem", "name two columns, as in FILE.columns="),
        (f"{saved}?splits=dev", "it has no splits; choose columns or split$"),
    ]:
        with pytest.raises(UserError, match=f"^{re.escape(path)}: {told}"):
            train.prepare_problems(reward, [path], cfg, tokenizer)


def test_eval_sets_are_called_like_their_files(monkeypatch):
    """A name is given once, and `train` is what training's own samples are called."""
    read = []
    monkeypatch.setattr(train, "prepare_problems", lambda *arguments: read.append(arguments[1:]))
    paths = ["a/math500.json", "MATH?split=test&columns=problem,answer", "MATH?split=dev"]
    cfg = train.Config(eval_data=paths)
    sets = train.prepare_eval_sets(reward, cfg, None)
    assert list(sets) == ["math500", "MATH-test", "MATH-dev"]
    assert read == [([path], cfg, None, "test") for path in paths]
    for wrong in (["a/math.json", "b/math.json"], ["x/train.json"]):
        with pytest.raises(UserError, match="the name (math|train) is taken; rename"):
            train.prepare_eval_sets(reward, train.Config(eval_data=wrong), None)


WHOLE_TASK = "from __future__ import annotations\nfrom reward import Grader, load_problems\n"
WHOLE_TASK += "import dataclasses\n\n@dataclasses.dataclass\nclass Problem:\n    question: str\n"


def test_a_task_may_be_a_file_anywhere(tmp_path):
    """Also one with the name of another module, and with dataclasses whose annotations are text."""
    for name in ("my_task", "reward", "json"):
        path = tmp_path / f"{name}.py"
        path.write_text(WHOLE_TASK + f"def text_metrics(text):\n    return {{{name!r}: 1.0}}\n")
        task = train.find_task(train.Config(task=str(path)))
        assert task.text_metrics("") == {name: 1.0}
        assert task.Problem("1+1").question == "1+1"
    assert "Problem" in dir(reward) and json.dumps({}) == "{}"


BAD_TASKS = {
    "from reward import Grader, text_metrics": "has no load_problems",
    "from reward import load_problems, text_metrics": "has no Grader",
    "from reward import load_problems, Grader": "has no text_metrics",
}


def test_what_is_no_task_is_refused_in_one_line(monkeypatch, tmp_path):
    """A name with a dot is refused too."""
    wrong = [(str(tmp_path / "absent.py"), "no file /")]
    for number, (text, words) in enumerate(BAD_TASKS.items()):
        (tmp_path / f"{number}.py").write_text(text)
        wrong.append((str(tmp_path / f"{number}.py"), words))
    for name in ("essay", "a.b", "code.py", ".", "", "code/x", "a\0b"):
        wrong.append(
            (name, "choose math, code, python_tool, countdown, countdown_short, calculator, chain,")
        )
    monkeypatch.chdir(tmp_path)
    for name, words in wrong:
        with pytest.raises(UserError) as error:
            train.find_task(train.Config(task=name))
        assert str(error.value).startswith(f"--task {name}: ")
        assert words in str(error.value) and "\n" not in str(error.value)


REWARDED = "from reward import Grader, load_problems, text_metrics\nREWARDS = {}\n"


@pytest.mark.parametrize(
    "names, weights, told",
    [
        (
            "('right', 'short')",
            ["fast=1"],
            "fast=1: write NAME=WEIGHT; the task names right, short",
        ),
        ("('right', 'short')", ["short"], "--reward_weights short: write NAME=WEIGHT"),
        ("()", ["right=1"], "right=1: write NAME=WEIGHT; the task names no rewards"),
        ("('right')", [], "REWARDS is 'right'; give a tuple of words, each once, as in"),
        ("('right', 'right')", [], "REWARDS is .*; give a tuple of words, each once"),
        ("('right', 'lost')", [], "REWARDS is .*; give a tuple of words, .*not lost or drawn"),
    ],
)
def test_rewards_have_names_and_weights_or_are_refused_in_one_line(names, weights, told, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(REWARDED.format(names))
    with pytest.raises(UserError, match=told) as error:
        train.find_task(config(task=path, reward_weights=weights or None))
    assert "\n" not in str(error.value)


def test_an_answer_form_is_one_of_the_task_s():
    assert train.find_task(train.Config(answer_form="hashes")).__file__ == reward.__file__
    forms = "orz or boxed_anywhere or last_number or hashes"
    with pytest.raises(UserError, match=f"^--answer_form boxes: .*reward.py has {forms}; "):
        train.find_task(train.Config(answer_form="boxes"))
    code = ROOT / "tasks" / "code.py"
    assert train.find_task(train.Config(task="code")).__file__ == str(code)
    with pytest.raises(UserError, match="code.py has orz; if its Grader is a subclass"):
        train.find_task(train.Config(task="code", answer_form="hashes"))


def test_steps_are_counted_from_the_passes_and_an_interval_of_0_is_never():
    def count(problems, **changes):
        cfg = config(num_episodes=3, rollout_batch_size=8, **{"max_steps": None} | changes)
        return train.count_steps(cfg, problems)

    assert [count(20), count(1)] == [7, 1]
    assert [count(20, max_steps=5), count(20, max_steps=0)] == [5, 0]
    for interval, steps in [(3, [0, 3, 6]), (0, [])]:
        assert [step for step in range(7) if train.is_due(step, interval)] == steps


def test_no_randomness_is_used_twice(monkeypatch, process_group, capsys):
    """Steps, evaluations, their sets and the check at the start have seeds of their own, although
    all of them draw the same samples of the same problems here."""
    cfg = config(eval_n=4, eval_temperature=0, eval_top_p=0.5, rollout_batch_size=8)
    problems = [reward.Problem(k, "", "", "", [1]) for k in range(8)]
    drawn = []

    def draw(rollout, requests, clock):
        drawn.append(requests)
        assert [(r.group, r.sample_number) for r in requests[3:5]] == [(0, 3), (1, 0)]
        assert {(r.temperature, r.top_p, r.max_tokens) for r in requests} == {(0, 0.5, 32)}
        clock.numbers["reward_lost"] = clock.step
        return clock.step

    log = mock.Mock()
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
    assert told == [("aime", 0, 0), ("math", 0, 0), ("aime", 1, 1), ("math", 1, 1)]
    lost = "without a verdict, and counted as wrong: 1 comparisons"
    assert capsys.readouterr().out == f"WARNING: aime: {lost}\nWARNING: math: {lost}\n"


TOO_FAR = "allowed are 0.0001 and 0.001; try --packing alone"
# The gaps of seven responses and of one, and what the refusal says.
GAPS = [(5e-5, 5e-5, ""), (5e-4, 5e-4, TOO_FAR), (0.0, 2e-3, TOO_FAR), (0.0, math.nan, TOO_FAR)]


@pytest.mark.parametrize("gap, of_one, told", GAPS)
def test_the_mean_and_the_worst_gap_are_judged_apart(monkeypatch, process_group, gap, of_one, told):
    """Of a sampler in fp32 on a CPU."""
    problems = [reward.Problem(k, "", "", "", [1]) for k in range(9)]

    def generate(requests, with_logprobs, reply):
        for k, request in enumerate(requests):
            far = of_one if k == 5 else gap
            yield k, Sample(request, [2, 3], [True] * 2, [-1 - far] * 2)

    monkeypatch.setattr(train.ppo, "compute_logprobs", lambda *_: -torch.ones(8 * 4 * 2))
    sampler = mock.Mock(generate=generate, gpu=False)
    one = mock.Mock(sampler=sampler, cfg=config())
    policy = SimpleNamespace(device=torch.device("cpu"), module=None)
    monkeypatch.setattr(train.models, "named_weights", lambda _: [])
    if told:
        with pytest.raises(UserError, match=told):
            train.check_sampler(one, policy, problems)
    else:
        assert "5e-05 a token" in train.check_sampler(one, policy, problems)
        # The policy computed while the sampler slept.
        assert [name for name, *_ in sampler.method_calls] == ["sleep", "sync"]


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
    assert (result["steps"], result["seed"]) == (4, 42)
    written = json.loads((one_rank / "config.json").read_text())
    assert set(written) >= {field.name for field in dataclasses.fields(train.Config)}
    said = (one_rank / "screen.txt").read_text()
    assert "sampler and trainer differ by" in said
    ours = ("variants: ", "WARNING: 8 of 8 problems of eval are also in --data")
    start, first, *_ = [line for line in said.splitlines() if not line.startswith(ours)]
    assert start.startswith("40 problems, 4 steps; "), "no word of a library"
    assert first.startswith("4 prompts x 4 samples"), "no word of a library"
    assert (one_rank / "run.log").stat().st_size > 0, "their words are here"


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


def test_a_resume_is_exact_and_a_failed_save_is_tried_again(one_rank, untied, stop, tmp_path):
    """SIGTERM comes as step 2 is sampled. Nothing is lost, the exit code is 0, and the same command
    goes on from step 1. Then files lie where two saves would write, at an interval and at the end.
    Step 3 is saved in place of step 2. The exit code and a line tell of step 4."""
    run = tmp_path / "run"
    flags = untied | MEASURED | {"log_with": "tensorboard", "save_interval": 2}
    flags["variant"] = [*MEASURED["variant"], stop]
    stopped = launch(run, env={"STOP_AT": "rollout of step 2"}, **flags)
    assert stopped.stdout.endswith("stopped; --resume auto goes on from step 1\n")
    assert [path.name for path in run.glob("step_*")] == ["step_000001"]
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert len(events.Scalars("reward/reward")) == 1, "lost with the process"
    for step in (2, 4):
        (run / f".saving_{step:06d}").write_text("")
    resumed = launch(run, code=2, **flags)
    assert "from step 1," in resumed.stdout
    assert re.search("WARNING: step 2 is NOT saved: .*NotADirectoryError", resumed.stdout)
    assert resumed.stderr.startswith("error: step 4 is NOT saved; ")
    assert {path.name for path in run.glob("step_*")} == {"step_000001", "step_000003"}
    assert not (run / "result.json").exists()
    assert (run / "policy" / "model.safetensors").exists()
    equal_runs(one_rank, run)


def first_samples(run: Path) -> list[list]:
    """What the first step has drawn. It must not depend on the ranks."""
    names = ("problem", "index", "response", "reward")
    return [[sample[name] for name in names] for sample in jsonl(run / "samples.jsonl")[:16]]


def test_two_ranks_that_shard_everything_draw_what_one_rank_draws(one_rank, untied, tmp_path):
    """Every sample is logged once, and an evaluation at temperature 0 is greedy."""
    run = tmp_path / "run"
    flags = {"zero_stage": 3, "max_steps": 2, "variant": ["log_ratio", SHARD_EVERYTHING]}
    flags |= {"eval_n": 2, "eval_temperature": 0, "log_samples": 0}
    launch(run, ranks=2, **untied | flags)
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in jsonl(run / "metrics.jsonl"))
    assert len(jsonl(run / "samples.jsonl")) == 32, "every rank's samples, once"
    assert first_samples(run) == first_samples(one_rank)
    AutoModelForCausalLM.from_pretrained(run / "policy")
    answers = [line["response"] for line in jsonl(run / "eval_samples.jsonl")]
    assert len(answers) == 2 * 8 * 2
    assert answers[::2] == answers[1::2], "evaluated greedily"


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


# An error of rank 1 in the step that FAIL_AT names a place of. At "log" rank 0 has a full disk.
FAIL = """
import os, pathlib
import ppo, reward
from reward import *
from nanoorz.ranks import dist


def fail(place, run_dir):
    is_second = pathlib.Path(run_dir, "metrics.jsonl").exists()
    if os.environ["FAIL_AT"] == place and is_second:
        if place == "log":
            log = pathlib.Path(run_dir, "metrics.jsonl")
            log.rename(log.with_suffix(".old"))
            log.symlink_to("/dev/full")
        elif dist.get_rank() == 1:
            raise ValueError(f"in the {place}")


class Fail(ppo.Recipe):
    def raw_advantages(self, *arguments):
        fail("estimator", self.run_dir)
        fail("log", self.run_dir)
        return super().raw_advantages(*arguments)


class Grader(reward.Grader):
    def submit(self, *arguments):
        fail("reward", os.environ["RUN"])
        return super().submit(*arguments)
"""


@SLOW
@pytest.mark.parametrize("place", ["reward", "estimator", "log"])
def test_an_error_on_one_rank_ends_all_ranks(tiny, tmp_path, place):
    """Only an error of the task is followed by a save. No rank waits for ever, and nothing is half
    written."""
    path = tmp_path / "fail.py"
    path.write_text(FAIL)
    run = tmp_path / "run"
    env = {"FAIL_AT": place, "RUN": str(run)}
    flags = tiny | {"task": path, "variant": path, "save_interval": 2}
    done = launch(run, ranks=2, code=1, env=env, **flags)
    error = "No space left on device" if place == "log" else f"ValueError: in the {place}"
    assert error in done.stderr
    saved = [path.name for path in run.glob("*step_*")]
    assert saved == (["step_000001"] if place == "reward" else [])
    assert ("stopped; --resume auto goes on from step 1" in done.stdout) == (place == "reward")
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
        ({"data": "empty.json"}, {}, "error: empty.json: holds no problems"),
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


def processes(run, script=None) -> list[Path]:
    """The folders in /proc of a run's processes, or of those of one script that have torch."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_ours = any(word.startswith(bytes(run)) for word in words)
            if is_ours and script:
                has_torch = "libtorch" in (folder / "maps").read_text()
                is_ours = words[1].decode() == script and has_torch
            if is_ours:
                found.append(folder)
    return found


@pytest.mark.engine
@pytest.mark.parametrize("script", ["train.py", pytest.param("tools/base_model.py", marks=SLOW)])
def test_the_end_of_its_launcher_ends_a_trainer_that_starts(tmp_path, script):
    """A SIGTERM reaches only the launcher of one process. All that it started must end too."""
    run = tmp_path / "run"
    launcher = conftest.start_python(*LAUNCHER, "--run_dir", run, output=tmp_path / "out.txt")
    try:
        conftest.wait_until(lambda: processes(run, str(ROOT / script)), launcher)
        launcher.terminate()
        launcher.wait(60)
        conftest.wait_until(lambda: not processes(run), seconds=60)
    finally:
        for process in processes(run):
            os.kill(int(process.name), signal.SIGKILL)
    assert not (run / "base").exists()


@SLOW
def test_a_signal_to_one_rank_of_two_while_the_engines_start_leaves_no_checkpoint(
    tiny, stop, tmp_path
):
    """With a checkpoint of step 0, a user who restarts with another flag would be refused."""
    run = tmp_path / "run"
    said = launch(run, ranks=2, env={"STOP_AT": "first sync"}, variant=stop, **tiny).stdout
    assert said.count("stopped; no step is saved") == 1
    assert not list(run.glob("step_*")) and not (run / "metrics.jsonl").exists()
