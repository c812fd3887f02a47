"""Flags, set-up and loop of train.py, and whole runs of it on the real engines."""

import ast
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tokenize
from pathlib import Path
from types import SimpleNamespace

import datasets
import kernels
import pytest
import tiny as maker
import torch
from conftest import ACCELERATE, ROOT, SMALL, arguments, clean_environment, jsonl, launch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import reward
import train
from lib import advice
from lib import demo as lib_demo
from lib.common import UserError
from rollout import Sample, requests_of_step
from tools import demo

DATA = ROOT.parent / "shared" / "data"
TRACED = ROOT / "tests" / "traced_train.py"


# ---- parse_flags ---------------------------------------------------------------------------------


def test_the_defaults_are_orz_s():
    cfg = train.parse_flags([])
    assert (cfg.rollout_batch_size, cfg.n_samples_per_prompt, cfg.critic_updates) == (
        128,
        64,
        12,
    )
    assert (cfg.actor_learning_rate, cfg.critic_learning_rate) == (1e-6, 5e-6)
    assert cfg.stop == ["User:", "Human:", "Assistant:", "</answer>"]
    assert cfg.attention != "auto", "what is logged is what is used"


def test_attention_is_pytorch_s_own_in_bf16_on_a_gpu(monkeypatch):
    """sdpa pays for a whole mask there. Its kernel knows neither fp32 nor a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train.parse_flags([]).attention == "sdpa"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert train.parse_flags([]).attention == "varlen"
    assert train.parse_flags(["--bf16", "false"]).attention == "sdpa"
    assert train.parse_flags(["--attention", "sdpa"]).attention == "sdpa"


@pytest.mark.parametrize(
    "version, expected", [("2.9", "sdpa"), ("2.10", "sdpa"), ("2.11", "varlen")]
)
def test_attention_is_sdpa_where_pytorch_s_own_takes_too_little(version, expected, monkeypatch):
    kernels.use_varlen(monkeypatch, version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert train.parse_flags([]).attention == expected


def test_an_empty_stop_is_no_stop_string():
    assert train.parse_flags(["--stop", ""]).stop == []
    assert train.parse_flags(["--stop", "a", "b"]).stop == ["a", "b"]


def test_evaluation_samples_like_training_unless_it_is_told():
    cfg = train.parse_flags(["--temperature", "0.5", "--top_p", "0.9"])
    assert (cfg.eval_temperature, cfg.eval_top_p) == (0.5, 0.9)
    cfg = train.parse_flags(["--eval_temperature", "0", "--eval_top_p", "0.7"])
    assert (cfg.eval_temperature, cfg.eval_top_p) == (0, 0.7)
    assert (cfg.temperature, cfg.top_p) == (1, 1)


def test_an_unknown_flag_names_the_nearest():
    with pytest.raises(UserError, match="did you mean --actor_learning_rate"):
        train.parse_flags(["--actor_learningrate", "1"])


@pytest.mark.parametrize("old", advice.RENAMED)
@pytest.mark.parametrize("words", [["{}", "1"], ["{}=1"]])
def test_an_old_flag_is_refused_with_its_new_name(old, words):
    with pytest.raises(UserError, match=f"^--{old} is called --{advice.RENAMED[old]} now$"):
        train.parse_flags([word.format(f"--{old}") for word in words])


def test_help_has_the_advice_the_choices_and_the_default_of_each_flag(capsys):
    """It had bare names."""
    with pytest.raises(SystemExit):
        train.parse_flags(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, comment in advice.advice(train.Config).items():
        assert f"--{name} " in text and " ".join(comment.split()) in text
    assert "Choose token, sequence, constant. (default: token)" in text
    assert all(name in text for name in train.ppo.ESTIMATORS) and "(default: gae)" in text
    assert "--no_" not in text and "--max-len" not in text


def test_other_spellings_of_a_flag_are_taken():
    assert train.parse_flags(["--max-len", "9"]).max_len == 9
    assert train.parse_flags(["--no_bf16"]).bf16 is False


def test_a_file_of_flags_beside_the_script_is_not_read(monkeypatch, tmp_path):
    """transformers reads train.args beside train.py, silently."""
    (tmp_path / "train.args").write_text("--seed 7\n")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert train.parse_flags([]).seed == 42


def test_a_malformed_value_is_one_line():
    with pytest.raises(UserError, match="seed") as error:
        train.parse_flags(["--seed", "many"])
    assert "\n" not in str(error.value)


# ---- demo_flags ----------------------------------------------------------------------------------


@pytest.fixture
def demo_tool(monkeypatch, process_group):
    """Stands for tools/demo.py and writes its flags alone. A list of the commands it was given."""
    commands = []

    def call(command):
        commands.append(command)
        folder = train.Path(command[2])
        folder.mkdir(parents=True, exist_ok=True)
        demo.write_flags(folder, int(command[4]))
        return 0

    monkeypatch.setattr(lib_demo.subprocess, "call", call)
    return commands


def test_flags_of_the_user_win_over_the_demo_s(demo_tool, tmp_path, capsys):
    argv = ["--run_dir", str(tmp_path), "--seed", "3", "--max_steps", "5", "--eval_data", "mine"]
    cfg = train.parse_flags([*lib_demo.demo_flags(train.parse_flags(argv)), *argv])
    tool = str(ROOT / "tools" / "demo.py")
    words = [str(tmp_path / "base"), "--seed", "3", "--end_with_parent"]
    assert demo_tool == [[sys.executable, tool, *words]]
    assert cfg.model == str(tmp_path / "base")
    assert (cfg.seed, cfg.max_steps, cfg.eval_data) == (3, 5, ["mine"])
    assert (cfg.rollout_batch_size, cfg.stop, cfg.template) == (64, [], "demo")
    said = capsys.readouterr().out
    assert said.startswith("the demo is train.py --model ")
    assert "--rollout_batch_size 64" in said


def test_only_rank_0_makes_the_demo_s_base(demo_tool, tmp_path, monkeypatch):
    argv = ["--run_dir", str(tmp_path)]
    lib_demo.demo_flags(train.parse_flags(argv))
    monkeypatch.setattr(train.ckpt.dist, "get_rank", lambda: 1)
    lib_demo.demo_flags(train.parse_flags(argv))
    assert len(demo_tool) == 1


def test_a_demo_that_is_not_made_is_one_line(process_group, monkeypatch, tmp_path):
    monkeypatch.setattr(train.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="^the demo's base model was not made, see above$"):
        lib_demo.demo_flags(train.parse_flags(["--run_dir", str(tmp_path)]))


# ---- find_inputs, load_tokenizer -----------------------------------------------------------------


def test_bad_models_are_refused_before_their_weights(tiny, tmp_path, process_group):
    cfg = train.parse_flags(arguments(SMALL | tiny))
    with pytest.raises(UserError, match="--model, --critic: .*nowhere cannot be used"):
        train.find_inputs(dataclasses.replace(cfg, model=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="--max_len 5000.*256"):
        train.find_inputs(dataclasses.replace(cfg, max_len=5000))
    folder = maker.make_model(tmp_path / "no_eos")
    edited = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(edited | {"eos_token": None}))
    with pytest.raises(UserError, match="eos"):
        train.find_inputs(dataclasses.replace(cfg, model=str(folder)))


def test_a_critic_of_other_tokens_is_one_line(tiny, other_critic, tmp_path, process_group):
    """Its values would be those of another text. A critic of another size is fine."""
    cfg = train.parse_flags(arguments(SMALL | tiny))
    _, tokenizer = train.find_inputs(dataclasses.replace(cfg, critic=other_critic))
    assert len(tokenizer) == len(train.find_inputs(cfg)[1])
    other = str(maker.make_model(tmp_path / "other", text_tokenizer=True))
    with pytest.raises(UserError, match=f"^--critic {other}: its tokenizer is not that of"):
        train.find_inputs(dataclasses.replace(cfg, critic=other))
    with pytest.raises(UserError, match="--critic: .*nowhere"):
        train.find_inputs(dataclasses.replace(cfg, critic=str(tmp_path / "nowhere")))
    short = str(maker.make_model(tmp_path / "short", max_position_embeddings=32))
    with pytest.raises(UserError, match="--max_len 64.* exceed the critic's 32"):
        train.find_inputs(dataclasses.replace(cfg, critic=short))
    for file in Path(other).glob("*token*"):
        file.unlink()
    with pytest.raises(UserError, match=f"^--critic {other}: its tokenizer is not that of"):
        train.find_inputs(dataclasses.replace(cfg, critic=other))


# ---- prepare_problems, parse_path, prepare_eval_sets ---------------------------------------------


def test_too_long_prompts_are_left_out_aloud(process_group, tiny, tmp_path, capsys):
    lines = []
    for question in ("1+1", "1+1+1+1+1+1+1+1", "2+2"):
        lines.append(json.dumps({"question": question, "answer": "#### 2"}))
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    cfg = train.Config(template="demo", prompt_max_len=10)
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    problems = train.prepare_problems(reward, [str(path)], cfg, tokenizer)
    assert [(p.index, p.question) for p in problems] == [(0, "1+1"), (2, "2+2")]
    assert problems[0].prompt_ids == tokenizer.encode("1+1<think>")
    assert "1 of 3 prompts are empty or exceed" in capsys.readouterr().out
    fitting = dataclasses.replace(cfg, prompt_max_len=4)
    assert len(train.prepare_problems(reward, [str(path)], fitting, tokenizer)) == 2, "4 tokens fit"
    with pytest.raises(UserError, match="no prompt is left; raise --prompt_max_len"):
        train.prepare_problems(reward, [str(path)], train.Config(prompt_max_len=1), tokenizer)


CHAT = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content | trim }}<end>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
<think>
{% endif %}"""


def chat_tokenizer(template=CHAT):
    tokenizer = maker.make_text_tokenizer(512)
    tokenizer.chat_template = template
    return tokenizer


NEEDS_DATA = pytest.mark.skipif(not DATA.exists(), reason="real problems are not here")


@pytest.mark.parametrize("system", [None, "Give the answer behind ####."])
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=NEEDS_DATA)])
def test_a_chat_is_what_the_tokenizer_s_own_template_makes_of_it(
    process_group, system, real, tmp_path
):
    """The question is a user's turn, and the model's turn has begun: with a thinking tag, if the
    template ends with one. The ids are those that transformers itself would feed a model."""
    tokenizer = chat_tokenizer()
    cfg = train.Config(template="chat", system=system)
    path = DATA / "gsm8k_test200.jsonl"
    if not real:
        path = tmp_path / "two.jsonl"
        rows = [{"question": text, "answer": "#### 2"} for text in (" 1+1?\n", "{question}<end>")]
        path.write_text("\n".join(map(json.dumps, rows)))
    problems = train.prepare_problems(reward, [str(path)], cfg, tokenizer)
    assert len(problems) == (200 if real else 2)
    turns = [{"role": "system", "content": system}] if system else []
    for problem in problems:
        chat = [*turns, {"role": "user", "content": problem.question}]
        options = {"add_generation_prompt": True, "return_dict": False}
        assert problem.prompt_ids == tokenizer.apply_chat_template(chat, **options)
    prompt = tokenizer.decode(problems[0].prompt_ids)
    assert prompt.startswith("<|system|>\nGive" if system else "<|user|>\n")
    assert prompt.endswith("?<end>\n<|assistant|>\n<think>\n")
    assert problems[0].label == ("18" if real else "2")


@pytest.mark.parametrize(
    "template, words",
    [
        pytest.param(None, "chat_template is not set", id="none"),
        pytest.param("{{ raise_exception('no system, please') }}", "no system", id="raises"),
        pytest.param("{% if %}", "Expected an expression", id="broken"),
    ],
)
def test_a_chat_that_cannot_be_made_is_one_line(process_group, tiny, template, words):
    """A base model's tokenizer has no template, and some templates take no system text."""
    cfg = train.Config(model="base", template="chat", system="Be brief.")
    with pytest.raises(UserError, match=f"--template chat: base: .*{words}") as error:
        train.prepare_problems(reward, [tiny["data"]], cfg, chat_tokenizer(template))
    assert str(error.value).endswith("; give another --template")
    assert "\n" not in str(error.value)


def test_a_problem_s_index_is_its_own_over_several_files(process_group, tiny):
    """It is the key under which a variant remembers a problem."""
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    paths = [tiny["data"], tiny["eval_data"]]
    problems = train.prepare_problems(reward, paths, train.Config(template="demo"), tokenizer)
    assert [problem.index for problem in problems] == list(range(48))


def test_a_data_set_with_split_and_columns(process_group, tiny, tmp_path):
    rows = [{"problem": "1+1", "solution": "2"}, {"problem": "2+2", "solution": "4"}]
    whole = datasets.Dataset.from_list(rows)
    saved = f"{tmp_path}/saved"
    datasets.DatasetDict({"train": whole, "dev": whole.select([1])}).save_to_disk(saved)
    cfg = train.Config(template="plain")
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    path = f"{saved}?split=dev&columns=problem,solution"
    problems = train.prepare_problems(reward, [path], cfg, tokenizer)
    assert [(p.question, p.label) for p in problems] == [("2+2", "4")]
    with pytest.raises(UserError, match="splits is neither split nor columns"):
        train.prepare_problems(reward, [f"{saved}?splits=dev"], cfg, tokenizer)


def test_eval_sets_are_called_like_their_files(monkeypatch):
    read = []

    def prepare_problems(task, paths, cfg, tokenizer, split):
        read.append((*paths, split))
        return []

    monkeypatch.setattr(train, "prepare_problems", prepare_problems)
    paths = ["a/math500.json", "MATH?split=test&columns=problem,answer", "MATH?split=dev"]
    sets = train.prepare_eval_sets(reward, train.Config(eval_data=paths), None)
    assert list(sets) == ["math500", "MATH-test", "MATH-dev"]
    assert read == [(path, "test") for path in paths]


@pytest.mark.parametrize("paths", [["a/math.json", "b/math.json"], ["x/train.json"]])
def test_two_sets_of_one_name_are_refused(monkeypatch, paths):
    """`train` is what training's own samples are called."""
    monkeypatch.setattr(train, "prepare_problems", lambda *_: [])
    with pytest.raises(UserError, match="the name (math|train) is taken; rename"):
        train.prepare_eval_sets(reward, train.Config(eval_data=paths), None)


# ---- find_task, count_steps, is_due --------------------------------------------------------------


def test_a_task_is_reward_py_or_a_file_in_tasks():
    assert train.find_task(train.Config()).__file__ == reward.__file__
    task = train.find_task(train.Config(task="code"))
    assert task.__file__ == str(ROOT / "tasks" / "code.py")
    for name in ("load_problems", "text_metrics", "Grader"):
        assert hasattr(task, name)


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


BAD_TASKS = [
    (None, "FileNotFoundError"),
    ("x = (", "SyntaxError"),
    ("import reward\nreward.nothing", "AttributeError"),
    ("import nowhere_to_be_found", "ModuleNotFoundError"),
    ("raise ValueError('two\\nlines')", "ValueError: two lines"),
    ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ("from reward import Grader, text_metrics", "has no load_problems"),
    ("from reward import load_problems, text_metrics", "has no Grader"),
    ("from reward import load_problems, Grader", "has no text_metrics"),
]


@pytest.mark.parametrize("text, words", BAD_TASKS)
def test_a_file_that_is_no_task_is_one_line(tmp_path, text, words):
    path = tmp_path / "my_task.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as error:
        train.find_task(train.Config(task=str(path)))
    assert str(error.value).startswith(f"--task {path}: {path} ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["essay", "a.b", "code.py", ".", "", "code/x", "a\0b"])
def test_a_name_that_is_no_task_is_one_line(name, monkeypatch, tmp_path):
    """A dot in it was a traceback."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="give math, the name of a file in tasks/ or a file of"):
        train.find_task(train.Config(task=name))


def test_an_answer_form_is_one_of_the_task_s():
    for form in ("orz", "boxed_anywhere", "last_number", "hashes"):
        train.find_task(train.Config(answer_form=form))
    forms = "orz or boxed_anywhere or last_number or hashes"
    with pytest.raises(UserError, match=f"^--answer_form boxes: choose {forms}$"):
        train.find_task(train.Config(answer_form="boxes"))
    for task in ("code", "countdown"):
        train.find_task(train.Config(task=task))
        with pytest.raises(UserError, match="^--answer_form hashes: choose orz$"):
            train.find_task(train.Config(task=task, answer_form="hashes"))


def test_steps_are_counted_from_the_passes():
    cfg = train.Config(num_episodes=3, rollout_batch_size=8)
    assert train.count_steps(cfg, 20) == 7
    assert train.count_steps(cfg, 1) == 1, "at least one"
    alone = dataclasses.replace(cfg, critic_only_steps=6)
    assert train.count_steps(alone, 20) == 7
    with pytest.raises(UserError, match="^--critic_only_steps 6: .* in none of 1 steps$"):
        train.count_steps(alone, 1)
    assert train.count_steps(dataclasses.replace(cfg, max_steps=5), 20) == 5
    assert train.count_steps(dataclasses.replace(cfg, max_steps=0), 20) == 0


def test_an_interval_of_0_is_never():
    assert [step for step in range(7) if train.is_due(step, 3)] == [0, 3, 6]
    assert not any(train.is_due(step, 0) for step in range(7))


# ---- evaluate (check_sampler is in test_rollout.py) ----------------------------------------------


def test_evaluation_has_its_own_distribution_and_its_own_randomness(monkeypatch, process_group):
    cfg = train.Config(eval_n=2, temperature=1.0, eval_temperature=0.0, eval_top_p=0.5)
    problems = [reward.Problem(k, "", "", "", [1]) for k in range(3)]
    asked = []
    log = SimpleNamespace(evaluation=lambda name, samples, step: None)
    monkeypatch.setattr(
        train.rollout_stage, "draw", lambda rollout, requests, clock: asked.append(requests)
    )
    rollout = SimpleNamespace(cfg=cfg)
    for step in (0, 4):
        train.evaluate(rollout, {"aime": problems, "math": problems}, step, log)
    for requests in asked:
        assert [(r.group, r.index) for r in requests] == [(g, k) for g in range(3) for k in (0, 1)]
        assert {(r.temperature, r.top_p, r.max_tokens) for r in requests} == {(0, 0.5, 8000)}
    seeds = [request.seed for requests in asked for request in requests]
    assert len(set(seeds)) == 2 * 2 * 6, "of both sets and both steps"


def test_no_randomness_is_used_twice(monkeypatch, process_group):
    """Not by two steps, nor by training, an evaluation before the same step and the check at the
    start, although all of them draw the same samples of the same problems here."""
    cfg = train.Config(rollout_batch_size=8, n_samples_per_prompt=4, eval_n=4)
    problems = [reward.Problem(k, "", "", "", [1]) for k in range(8)]
    seeds = []

    def sample(requests, *_, **__):
        seeds.append({request.seed for request in requests})
        raise StopIteration

    def draw(rollout, requests, clock):
        seeds.append({request.seed for request in requests})

    monkeypatch.setattr(train.rollout_stage, "draw", draw)
    log = SimpleNamespace(evaluation=lambda name, samples, step: None)
    with pytest.raises(StopIteration):
        train.check_sampler(SimpleNamespace(generate=sample), None, problems, cfg)
    for step in range(3):
        seeds.append({request.seed for request in requests_of_step(problems, cfg, step)})
        train.evaluate(SimpleNamespace(cfg=cfg), {"aime": problems}, step, log)
    assert list(map(len, seeds)) == [8 * 4] * 7
    assert len(set.union(*seeds)) == 7 * 8 * 4


@pytest.mark.parametrize(
    "gap, of_one, refused",
    [
        pytest.param(5e-5, 5e-5, False, id="rounding"),
        pytest.param(5e-4, 5e-4, True, id="a little everywhere"),
        pytest.param(0.0, 2e-3, True, id="one response alone"),
        pytest.param(0.0, float("nan"), True, id="one response is NaN"),
    ],
)
def test_the_mean_and_the_worst_response_are_judged_apart(
    monkeypatch, process_group, gap, of_one, refused
):
    """Of a sampler in fp32 on a CPU, where 1e-4 and 1e-3 are allowed."""
    cfg = train.Config(bf16=False)
    problems = [reward.Problem(k, "", "", "", [1]) for k in range(8)]

    def generate(requests, with_logprobs):
        for k, request in enumerate(requests):
            far = of_one if k == 5 else gap
            yield k, Sample(request, [2, 3], [-1 - far] * 2, "", "stop")

    monkeypatch.setattr(train.ppo, "compute_logprobs", lambda *_: -torch.ones(8 * 4 * 2))
    sampler = SimpleNamespace(generate=generate, gpu=False)
    policy = SimpleNamespace(device=torch.device("cpu"))
    if refused:
        with pytest.raises(UserError, match="allowed are 0.0001 and 0.001"):
            train.check_sampler(sampler, policy, problems, cfg)
    else:
        assert "5e-05 a token" in train.check_sampler(sampler, policy, problems, cfg)


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untied(tiny, tmp_path_factory):
    """A model with a head of its own, and the problems of `tiny`."""
    folder = tmp_path_factory.mktemp("untied")
    return tiny | {"model": str(maker.make_model(folder / "model", tied=False))}


@pytest.fixture(scope="module")
def one_rank(untied, tmp_path_factory):
    """(folder, screen) of a run of one rank that measures all that can be measured."""
    run = tmp_path_factory.mktemp("one_rank")
    flags = {"eval_interval": 2, "eval_n": 2, "critic_updates": 1, "log_samples": 0}
    flags |= {"script": TRACED, "log_ratio": "true", "log_kl": "true"}
    done = launch(run, **untied | flags)
    return run, done.stdout


NAMES = """reward paid pass_at_n truncated response_length total_length repetition reflection
    advantage advantage_abs return critic_loss critic_values critic_grad_norm critic_lr policy_loss
    entropy policy_grad_norm policy_lr kl ratio clipfrac approx_kl seconds_rollout seconds_policy
    tokens_per_second memory_rollout memory_policy reward_lost seconds_waited answered"""


def test_a_run_writes_everything(one_rank):
    run, out = one_rank
    lines = jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for name in NAMES.split():
        assert all(name in line for line in lines), name
    assert len(jsonl(run / "samples.jsonl")) == 3 * 16
    assert [line["step"] for line in jsonl(run / "eval.jsonl")] == [0, 2, 3]
    assert len(jsonl(run / "eval_samples.jsonl")) == 3 * 8 * 2
    result = json.loads((run / "result.json").read_text())
    assert (result["steps"], result["seed"]) == (3, 42)
    assert result["wall_seconds"] > 0
    config = json.loads((run / "config.json").read_text())
    assert set(config) >= {field.name for field in dataclasses.fields(train.Config)}
    assert "torch" in config["versions"]
    assert "sampler and trainer differ by" in out
    assert out.splitlines()[0].startswith("4 prompts x 4 samples"), "no word of a library"
    assert (run / "run.log").stat().st_size > 0, "their words are here"
    assert list((run / "tensorboard").glob("events*"))


def step_calls(step: int) -> list:
    """What the loop calls in a step, counted from 0, of a run of 3 that measures everything."""
    known = ["logprobs", "ref_logprobs", "values"]
    return [
        ["generate", 4 * 4],
        ["sleep", None],
        ["compute_values", "critic"],
        ["compute_logprobs", "reference"],
        ["compute_advantages", known],
        ["train_critic", step],
        ["train_policy", [step, 3]],
        ["sync", None],
        ["step", step + 1],
        ["finish_step", step],
    ]


def evaluation_calls(step: int) -> list:
    return [["generate", 8 * 2], ["evaluation", ["eval", step]]]


LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENCODING, tokenize.ENDMARKER}


def count_tokens(path: Path) -> int:
    """Without comments, docstrings and layout."""
    docstrings = set()  # lines
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    return sum(x.type not in LAYOUT and x.start[0] not in docstrings for x in tokens)


def test_a_run_loads_at_most_22_500_tokens(one_rank):
    """Of this repository's modules, however they are found: a task is loaded by its path."""
    run, _ = one_rank
    files = {Path(file) for file in json.loads((run / "modules.json").read_text())}
    ours = {file for file in files if file.parent in (ROOT, ROOT / "lib", ROOT / "tasks")}
    assert {ROOT / "train.py", ROOT / "reward.py", ROOT / "lib" / "equal.py"} <= ours
    counts = {file.name: count_tokens(file) for file in ours}
    assert sum(counts.values()) <= 22_500, counts


def test_the_order_of_the_loop(one_rank):
    """The values are the critic's before it learns, the advantages are known before any model
    learns, the sampler has the new weights before they are evaluated, and a checkpoint knows the
    step whose lines are in the logs."""
    calls = json.loads((one_rank[0] / "calls.json").read_text())
    for call in calls:
        if call[0] == "generate":
            call[1] = len(call[1])
    start = [["sleep", None], ["restore", 0], ["sync", None]]
    start += [["generate", 8 * 4], ["compute_logprobs", "policy"]]
    steps = evaluation_calls(0) + step_calls(0) + step_calls(1)
    steps += evaluation_calls(2) + step_calls(2) + [["save", 3]] + evaluation_calls(3)
    end = [["export", "policy"], ["export", "critic"], ["result", 3]]
    assert calls == start + steps + end


def test_each_sample_of_a_run_has_a_seed_of_its_own(one_rank):
    """Also where an evaluation, or a problem's next pass, asks for the same again."""
    calls = json.loads((one_rank[0] / "calls.json").read_text())
    requests = [request for name, what in calls if name == "generate" for request in what]
    seeds = {seed for _, seed, *_ in requests}
    assert len(seeds) == len(requests) == 32 + 3 * 16 + 3 * 16


def test_steps_go_through_the_problems_without_overlap(one_rank):
    lines = jsonl(one_rank[0] / "samples.jsonl")
    of_step = {step: {x["problem"] for x in lines if x["step"] == step} for step in (1, 2, 3)}
    assert [len(problems) for problems in of_step.values()] == [4, 4, 4]
    assert len(set.union(*of_step.values())) == 12


def test_rates_rise_from_the_first_step_on(one_rank):
    """The loop counts steps from 0: a rate one step late is wrong during the warm-up alone."""
    lines = jsonl(one_rank[0] / "metrics.jsonl")
    for name in ("policy_lr", "critic_lr"):
        assert [line[name] for line in lines] == pytest.approx([5e-4, 1e-3, 1e-3])


def test_the_first_step_is_on_policy(one_rank):
    run, _ = one_rank
    first = jsonl(run / "metrics.jsonl")[0]
    assert abs(first["ratio"] - 1) < 1e-4, "sampler and trainer disagree about their own tokens"
    assert abs(first["kl"]) < 1e-6, "the first step's policy is the reference"
    half = SMALL["actor_learning_rate"] / 2
    assert first["policy_lr"] == pytest.approx(half), "warm-up from 0 wastes a step"


def test_a_sync_brings_the_new_weights(one_rank):
    for line in jsonl(one_rank[0] / "metrics.jsonl"):
        assert abs(line["ratio"] - 1) < 1e-4


def test_some_samples_are_written_token_by_token(one_rank):
    run, _ = one_rank
    for sample in jsonl(run / "samples.jsonl"):
        tokens = sample["tokens"]
        assert len(tokens) == sample["length"]
        assert "".join(tokens).startswith(sample["response"][:1])
        for name in ("values", "advantages", "logprobs"):
            assert len(sample[name]) == len(tokens), name


def test_evaluation_draws_anew_at_the_training_s_temperature(one_rank):
    run, _ = one_rank
    config = json.loads((run / "config.json").read_text())
    assert config["eval_temperature"] == config["temperature"] == 1
    answers = [line["response"] for line in jsonl(run / "eval_samples.jsonl")]
    pairs = list(zip(answers[::2], answers[1::2]))
    assert sum(one != two for one, two in pairs) > len(pairs) / 2


def test_exports_load_in_transformers_and_vllm(one_rank, untied):
    run, _ = one_rank
    policy = AutoModelForCausalLM.from_pretrained(run / "policy")
    base = AutoModelForCausalLM.from_pretrained(untied["model"])
    pairs = zip(policy.parameters(), base.parameters())
    assert any((ours != theirs).any() for ours, theirs in pairs), "training changed nothing"
    critic = AutoModel.from_pretrained(run / "critic")
    head = load_file(run / "critic" / "value_head.safetensors")["value_head.weight"]
    assert head.shape == (1, critic.config.hidden_size)
    assert AutoTokenizer.from_pretrained(run / "policy").eos_token_id == 0
    command = [sys.executable, str(ROOT / "rollout.py"), str(run / "policy"), "12+34<think>"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=clean_environment()
    )
    assert done.stdout.count("[") >= 4, done.stderr[-2000:]


@pytest.fixture(scope="module")
def two_ranks(untied, tmp_path_factory):
    """A run of two ranks with every parameter sharded, evaluated greedily."""
    run = tmp_path_factory.mktemp("two_ranks")
    flags = {"zero_stage": 3, "max_steps": 2, "log_ratio": "true"}
    flags |= {"eval_n": 2, "eval_temperature": 0, "log_samples": 0}
    launch(run, ranks=2, script=ROOT / "tests" / "sharded_train.py", **untied | flags)
    return run


def test_two_ranks_with_everything_sharded(two_ranks):
    """The check at the start compares every rank's sampler with the gathered policy."""
    lines = jsonl(two_ranks / "metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert abs(line["ratio"] - 1) < 1e-4, "a sampler must hold the trainer's weights"
    assert len(jsonl(two_ranks / "samples.jsonl")) == 32, "every rank's samples, once"
    AutoModelForCausalLM.from_pretrained(two_ranks / "policy")


def test_a_greedy_evaluation_gives_the_same_answer_twice(two_ranks):
    answers = [line["response"] for line in jsonl(two_ranks / "eval_samples.jsonl")]
    assert len(answers) == 2 * 8 * 2
    assert answers[::2] == answers[1::2]
    samples = [line["response"] for line in jsonl(two_ranks / "samples.jsonl")]
    assert len(set(samples)) > len(samples) / 2, "training samples go on at their temperature"


def test_the_samples_do_not_depend_on_how_they_are_dealt(one_rank, two_ranks):
    """The same step on one rank and on two, whatever each of them sampled before it."""
    shares = []
    for run in (one_rank[0], two_ranks):
        share = []
        for line in jsonl(run / "samples.jsonl")[:16]:
            share.append([line[name] for name in ("problem", "index", "response", "reward")])
        shares.append(share)
    assert shares[0] == shares[1]


@pytest.mark.slow
def test_a_sampler_that_two_ranks_share(tiny, whole, shared_memory, tmp_path):
    """The samples of two samplers, each dealt to the trainer once; synced under ZeRO 3."""
    run = tmp_path / "run"
    flags = {"zero_stage": 3, "max_steps": 2, "log_ratio": "true"}
    launch(run, ranks=2, **tiny | flags, tensor_parallel=2)
    firsts = []
    for folder in (run, whole(ranks=2, **flags)):
        lines = jsonl(folder / "samples.jsonl")
        assert len(lines) == 32, "not twice"
        firsts.append([(line["problem"], line["index"], line["response"]) for line in lines[:16]])
    assert firsts[0] == firsts[1]
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in jsonl(run / "metrics.jsonl"))


@pytest.mark.engine
@pytest.mark.skipif(not DATA.exists(), reason="real problems are not here")
@pytest.mark.parametrize("estimator", ["gae", pytest.param("grpo", marks=pytest.mark.slow)])
def test_real_problems_with_the_orz_template(tmp_path, estimator):
    """The model is tied: vLLM on a CPU would keep the old head silently if it were not named."""
    model = maker.make_model(tmp_path / "model", text_tokenizer=True, max_position_embeddings=4096)
    run = tmp_path / "run"
    flags = {"model": model, "estimator": estimator, "template": "orz", "max_steps": 2}
    flags |= {"data": DATA / "gsm8k_train.jsonl", "eval_data": DATA / "aime2024.json"}
    flags |= {"stop": train.ORZ_STOP, "prompt_max_len": 1024, "generate_max_len": 64}
    flags |= {"max_len": 2048, "packing_max_len": 2048, "micro_train_batch_size": 1}
    flags |= {"kv_cache_gb": 0.5, "actor_learning_rate": 1e-2, "warmup_updates": 1}
    launch(run, **flags, log_ratio="true")
    for line in jsonl(run / "metrics.jsonl"):
        # The template is a prefix of every prompt: keys of the old weights would be used again.
        # A random model never answers right, and where grpo has no signal there is no ratio.
        assert abs(line.get("ratio", 1.0) - 1) < 1e-3
    samples = jsonl(run / "samples.jsonl")
    assert len(samples) == 32
    assert all(sample["length"] <= 64 for sample in samples)
    assert len(jsonl(run / "eval_samples.jsonl")) == 2 * 30


@pytest.mark.slow
def test_code_in_a_whole_run(tiny, tmp_path):
    """--task code: the same loop, graded in the sandbox."""
    item = {"text": "add", "test_list": ["assert f(1, 2) == 3"]}
    lines = [json.dumps(item), json.dumps(item | {"text": "sum"})]
    (tmp_path / "code.jsonl").write_text("\n".join(lines))
    flags = tiny | {"data": tmp_path / "code.jsonl", "eval_data": tmp_path / "code.jsonl"}
    flags |= {"task": "code", "template": "plain", "rollout_batch_size": 2, "max_steps": 1}
    flags |= {"prompt_max_len": 120, "max_len": 200, "packing_max_len": 256}
    launch(tmp_path / "run", **flags)
    assert [s["reward"] for s in jsonl(tmp_path / "run" / "samples.jsonl")] == [0.0] * 8
    (line,) = jsonl(tmp_path / "run" / "metrics.jsonl")
    assert line["reward_lost"] == 0, "0 by verdict, not by accident"


@pytest.mark.slow
def test_the_demo(tmp_path):
    """It says its flags and trains. Another seed in its folder is refused, and changes nothing."""
    command = [sys.executable, str(ROOT / "train.py"), "--run_dir", str(tmp_path / "run")]
    command += ["--max_steps", "1", "--eval_n", "2"]
    said = {}
    for seed in ("1", "2"):
        said[seed] = subprocess.run(
            [*command, "--seed", seed],
            capture_output=True,
            text=True,
            timeout=300,
            env=clean_environment(),
        )
        base = (tmp_path / "run" / "base" / "flags.txt").read_text()
        assert "--seed 1\n" in base
    assert said["1"].returncode == 0, said["1"].stderr[-3000:]
    assert "the demo is train.py --model " in said["1"].stdout
    assert "--rollout_batch_size 64" in said["1"].stdout
    assert "64 prompts x 16 samples a step" in said["1"].stdout
    assert "pass@2" in said["1"].stdout, "flags of the user win"
    assert len(jsonl(tmp_path / "run" / "metrics.jsonl")) == 1
    assert 0.1 < jsonl(tmp_path / "run" / "eval.jsonl")[0]["accuracy"] < 0.5
    assert said["2"].returncode == 2
    assert "holds the demo of --seed 1, not 2" in said["2"].stderr
    assert "Traceback" not in said["2"].stderr


# ---- run: exit codes -----------------------------------------------------------------------------


@pytest.mark.engine
def test_bad_input_is_exit_code_2_and_one_line(tiny, tmp_path):
    lines = ['{"question": "1+1", "answer": "#### 2"}', '{"question": "no answer"}']
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    done = launch(tmp_path / "run", check=False, **tiny | {"data": tmp_path / "bad.jsonl"})
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "bad.jsonl: line 2" in line
    assert "Traceback" not in done.stderr


def test_a_bug_is_a_traceback(monkeypatch):
    def broken(argv):
        raise KeyError("a bug")

    monkeypatch.setattr(train, "parse_flags", broken)
    with pytest.raises(KeyError):
        train.run([])


# ---- signals during start-up, and a grader that breaks -------------------------------------------

TWO_RANKS = [*ACCELERATE, "--use_deepspeed", "--num_machines", "1", "--num_processes", "2"]
TWO_RANKS += ["--main_process_port", "0"]
LEFT = "stopped during start-up: nothing is lost"


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose processes end with the test."""
    folder = tmp_path / "run"
    yield folder
    left = [(tmp_path / "launcher.pid").read_text()]
    left += [process.name for process in processes(folder)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def start(run, *launcher, script=ROOT / "train.py", **flags) -> subprocess.Popen:
    """What it says goes to out.txt beside the run's folder."""
    command = [sys.executable, *launcher, str(script), *arguments(flags | {"run_dir": run})]
    with open(run.parent / "out.txt", "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=clean_environment())
    (run.parent / "launcher.pid").write_text(str(process.pid))
    return process


def processes(run, script="train.py", rank=None) -> list[Path]:
    """The folders in /proc of a run's processes, without a launcher; or of one rank."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_ours = any(word.startswith(bytes(run)) for word in words)
            is_script = any(word.endswith(f"/{script}".encode()) for word in words[:3])
            is_rank = rank is None or f"RANK={rank}".encode() in (
                folder / "environ"
            ).read_bytes().split(b"\0")
            if is_ours and is_script and is_rank:
                found.append(folder)
    return found


def holds(folder, mask, number=signal.SIGTERM) -> bool:
    """Is the signal in that mask of the process's main thread? SigBlk: blocked. SigCgt: handled."""
    status = (folder / "status").read_text()
    return bool(int(re.search(rf"{mask}:\s*(\w+)", status)[1], 16) >> (number - 1) & 1)


def wait_until(condition, process, seconds=200):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        assert process.poll() is None, "the run ended before that"
        time.sleep(0.05)


def said(run) -> str:
    return (run.parent / "out.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_imports_is_one_line_and_exit_code_0(run, number):
    """SIGTERM killed it silently, and SIGINT was a traceback."""
    process = start(run)
    wait_until(lambda: holds(Path(f"/proc/{process.pid}"), "SigBlk"), process)
    process.send_signal(number)
    assert process.wait(60) == 0
    assert said(run) == f"{LEFT}\n"
    assert not run.exists()


def making_the_demo(run) -> list[Path]:
    """The process that makes the demo's base model, once its own slow imports are under way."""
    return [p for p in processes(run, "demo.py") if "libtorch" in (p / "maps").read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_demo_s_base_is_made_ends_that_process_too(run, number):
    """It would go on for a minute."""
    process = start(run)
    wait_until(lambda: making_the_demo(run), process)
    process.send_signal(number)
    assert process.wait(60) == 0
    assert said(run) == f"{LEFT}\n"
    wait_until_gone(run)
    assert not (run / "base").exists()


def wait_until_gone(run):
    end = time.monotonic() + 60
    while processes(run) + processes(run, "demo.py"):
        assert time.monotonic() < end, "a process outlives the run"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["importing", "waiting for the demo"])
def test_a_signal_to_one_rank_of_two_during_start_up_ends_both(run, when):
    """The first rank waits for the second then, in a function of C's and for up to 30 minutes."""
    process = start(run, *TWO_RANKS)
    if when == "importing":
        wait_until(lambda: [p for p in processes(run, rank=1) if holds(p, "SigBlk")], process)
    else:
        wait_until(lambda: making_the_demo(run), process)
    (rank,) = processes(run, rank=1)
    os.kill(int(rank.name), signal.SIGTERM)
    assert process.wait(100) == 1
    assert said(run).count(LEFT) == 1
    wait_until_gone(run)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TWO_RANKS], ids=["one rank", "one rank of two"])
def test_a_signal_while_the_engines_start_stops_without_a_checkpoint(tiny, run, launcher):
    """There was one of step 0, of the size of any other, which refused whoever had stopped the run
    to mend a flag."""
    process = start(run, *launcher, **SMALL | tiny | {"max_steps": 500})
    rank = 1 if launcher else None
    wait_until(lambda: [p for p in processes(run, rank=rank) if holds(p, "SigCgt")], process)
    (signalled,) = processes(run, rank=rank)
    os.kill(int(signalled.name), signal.SIGTERM)
    assert process.wait(200) == 0, said(run)[-3000:]
    assert said(run).count("stopped at step 0; --resume auto goes on from there") == 1
    assert "Traceback" not in said(run)
    assert not list(run.glob("step_*")) and not (run / "metrics.jsonl").exists()


ALGEBRA = """
import reward
from reward import load_problems, text_metrics

class Grader(reward.Grader):
    def submit(self, key, text, finish_reason, label):
        self.compare(key, f"x+{key}", f"{key}+x")
"""


@pytest.mark.slow
def test_a_grading_process_that_cannot_start_again_ends_the_run_saved(tiny, run):
    """On one rank of two. Its error ended that rank alone, unsaved, and left the other waiting."""
    copy = run.parent / "copy"
    copy.mkdir()
    for name in ("train.py", "rollout.py", "reward.py", "ppo.py", "ckpt.py"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "lib", copy / "lib")
    (copy / "tasks").mkdir()
    (copy / "tasks" / "algebra.py").write_text(ALGEBRA)
    flags = SMALL | tiny | {"task": "algebra", "max_steps": 500}
    process = start(run, *TWO_RANKS, script=copy / "train.py", **flags)
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)
    (copy / "lib" / "equal.py").unlink()
    (rank,) = processes(run, rank=1)
    for worker in children(rank):
        os.kill(int(worker), signal.SIGKILL)
    assert process.wait(200) == 1, "the launcher's, of two ranks that end with 2"
    done = len(jsonl(metrics))
    (line,) = [line for line in said(run).splitlines() if line.startswith("error:")]
    assert line.startswith("error: no grading process can be started: ")
    assert line.endswith(f"; --resume auto goes on from step {done}")
    assert said(run).count("exitcode  : 2 ") == 2
    assert (run / f"step_{done:06d}" / "manifest.json").exists()
    wait_until_gone(run)


def children(folder) -> list[str]:
    """Of all threads of a process, since a thread starts a grading process."""
    found = []
    for task in (folder / "task").iterdir():
        found += (task / "children").read_text().split()
    return found
