"""Whole runs of the real train.py on the real engines, and what it says to bad input."""
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest
import tiny as maker
import torch
import torch.distributed as dist
from conftest import ROOT, SMALL, clean_environment, jsonl, launch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import reward
import rollout
import train
from rollout import Stopped
from tools import check, code_data, metrics

DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def one_rank(tiny, tmp_path_factory):
    run = tmp_path_factory.mktemp("one_rank")
    done = launch(run, **tiny, eval_interval=2, eval_n=2, log_ratio="true", log_kl="true", critic_update_steps=1)
    return run, done.stdout


def test_run_writes_everything(one_rank, tiny):
    run, out = one_rank
    metrics = jsonl(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    names = """reward pass_at_n truncated response_length total_length repetition reflection advantage advantage_abs
        return critic_loss critic_values critic_grad_norm critic_lr policy_loss entropy policy_grad_norm policy_lr kl
        ratio clipfrac approx_kl seconds_rollout seconds_policy tokens_per_second mfu memory_rollout memory_policy"""
    for name in names.split():
        assert all(name in m for m in metrics), name
    assert abs(metrics[0]["ratio"] - 1) < 1e-4, "sampler and trainer disagree about their own tokens"
    assert abs(metrics[0]["kl"]) < 1e-6, "the first step's policy is the reference"
    assert metrics[0]["policy_lr"] == pytest.approx(SMALL["actor_learning_rate"] / 2), "warm-up from 0 wastes a step"
    assert len(jsonl(run / "samples.jsonl")) == 3 * 16
    assert [line["step"] for line in jsonl(run / "eval.jsonl")] == [0, 2, 3]
    assert len(jsonl(run / "eval_samples.jsonl")) == 3 * 8 * 2
    result = json.loads((run / "result.json").read_text())
    assert {"accuracy_before", "accuracy_after", "length_before", "length_after", "steps", "wall_seconds",
            "base_model_seconds", "seed", "versions"} <= set(result)
    assert result["steps"] == 3
    config = json.loads((run / "config.json").read_text())
    assert set(config) >= {f.name for f in dataclasses.fields(train.Config)}
    assert "sampler agrees with trainer" in out
    assert out.splitlines()[0].startswith("4 prompts x 4 samples"), "no word of a library on the screen"
    assert (run / "run.log").stat().st_size > 0, "their words are here"
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events*"))


def test_mfu_counts_what_was_passed():
    """All tokens once counted as trained on, also those of flat groups, and the critic's with the policy's head."""
    cfg = train.Config(estimator="gae", critic_update_steps=4, log_kl=True)
    got = metrics.mfu(100, {"policy_tokens": 30, "critic_tokens": 20}, {"policy": 7, "critic": 5},
                      {"values": 1.0, "critic": 2.0, "policy": 3.0, "rollout": 99.0}, cfg, 10.0)
    assert got == pytest.approx((6 * 30 * 7 + 6 * 20 * 4 * 5 + 2 * 100 * (5 + 7)) / 6 / 10)
    grpo = train.Config(estimator="grpo")
    assert metrics.mfu(100, {"policy_tokens": 0}, {"policy": 7, "critic": 5}, {"policy": 1e-3}, grpo, 10.0) == 0


def test_data_set_with_split_and_columns(tiny, tmp_path):
    rows = datasets.Dataset.from_list([{"problem": "1+1", "solution": "2"}, {"problem": "2+2", "solution": "4"}])
    datasets.DatasetDict({"train": rows, "dev": rows.select([1])}).save_to_disk(str(tmp_path / "saved"))
    cfg = train.Config(model=tiny["model"], template="plain", eval_data=[f"{tmp_path}/saved?split=dev"])
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    path = f"{tmp_path}/saved?split=dev&columns=problem,solution"
    problems, _, _ = check.read_problems(reward, [path], cfg, tokenizer, print)
    assert [(p.question, p.label) for p in problems] == [("2+2", "4")]
    assert list(check.eval_names(cfg)) == ["saved-dev"]
    parts = train.Config(eval_data=["a/math500.json", "MATH?split=test&columns=problem,answer", "MATH?split=dev"])
    assert list(check.eval_names(parts)) == ["math500", "MATH-test", "MATH-dev"]
    with pytest.raises(check.ConfigError, match="same name"):
        check.eval_names(train.Config(eval_data=["a/math.json", "b/math.json"]))
    with pytest.raises(check.ConfigError, match="splits is neither split nor columns"):
        check.read_problems(reward, [f"{tmp_path}/saved?splits=dev"], cfg, tokenizer, print)


def test_matrices_of_a_model(tiny):
    """Tied: the table is the head. Counted by hand from the layers of the real model."""
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    layers = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name)
    head = model.get_output_embeddings().weight.numel()
    assert check.matrices(model.config) == {"policy": layers + head, "critic": layers}


def test_every_number_is_explained(one_rank):
    """docs/metrics.md has a row for each name in metrics.jsonl and eval.jsonl."""
    run, _ = one_rank
    table = set(re.findall(r"`([\w@]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    written = {key for name in ("metrics", "eval") for line in jsonl(run / f"{name}.jsonl") for key in line}
    assert not written - table
    assert len(written) > 40


def test_some_samples_are_written_token_by_token(one_rank):
    run, _ = one_rank
    for sample in jsonl(run / "samples.jsonl"):
        tokens = sample["tokens"]
        assert len(tokens) == sample["length"]
        assert "".join(tokens).startswith(sample["response"][:1])
        for name in ("values", "advantages", "logprobs"):
            assert len(sample[name]) == len(tokens), name


def test_exports_load_in_transformers_and_vllm(one_rank, tiny):
    run, _ = one_rank
    policy = AutoModelForCausalLM.from_pretrained(run / "policy")
    base = AutoModelForCausalLM.from_pretrained(tiny["model"])
    assert any((a != b).any() for a, b in zip(policy.parameters(), base.parameters())), "training changed nothing"
    critic = AutoModel.from_pretrained(run / "critic")
    head = load_file(run / "critic" / "value_head.safetensors")["value_head.weight"]
    assert head.shape == (1, critic.config.hidden_size)
    assert AutoTokenizer.from_pretrained(run / "policy").eos_token_id == 0
    done = subprocess.run([sys.executable, str(ROOT / "rollout.py"), str(run / "policy"), "12+34<think>"],
                          capture_output=True, text=True, timeout=200, env=clean_environment())
    assert done.stdout.count("[") >= 4, done.stderr[-2000:]


def test_every_call_of_the_sampler_starts_cold(tmp_path):
    """A resumed run checks its sampler first, and an evaluation comes before some steps: blocks that were left warm by
    them would change the schedule of what follows, so the bits could depend on what ran before. And of two ranks each
    grades on half of the cores, although vLLM says LOCAL_WORLD_SIZE=1 afterwards: all of them, once."""
    model = maker.make_model(tmp_path / "model", max_position_embeddings=512)
    flags = SMALL | {"model": str(model), "data": "-", "max_len": 512, "packing_max_len": 512}
    code = f"""import json, reward, rollout, train
store = rollout.start_distributed()[3]
cfg = train.parse_flags({[str(x) for name, value in flags.items() for x in (f"--{name}", value)]})
both = train.Rollout.start(reward, None, cfg)
sampler = both.sampler
step, cached = sampler.llm.llm_engine.step, [[], []]
def recorded():
    outputs = step()
    cached[call].extend(output.num_cached_tokens for output in outputs)
    return outputs
sampler.llm.llm_engine.step = recorded
for call in (0, 1):
    stream = sampler.generate([list(range(1, 51)) * 8], 2, [0], max_new_tokens=[4, 4], max_len=512)
    next(stream)
    stream.close()
sampler.llm.llm_engine.step, both.signals = step, rollout.Signals(store)
problems = [reward.Problem(i, "", "", "") for i in (0, 1)]
records = both(problems, [[5, 6], [7, 8, 9]], 8, "train", 0, train.Clock(), caps=[3, 5])
longest = [max(len(r["response_ids"]) for r in records if r["problem"] == i) for i in (0, 1)]
print(json.dumps([both.grader.threads._max_workers, *cached, longest]), flush=True)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, cwd=ROOT,
                          env=clean_environment() | {"LOCAL_WORLD_SIZE": "2"})
    assert done.stdout, done.stderr[-2000:]
    workers, first, second, longest = json.loads(done.stdout.splitlines()[-1])
    assert workers == max(1, len(os.sched_getaffinity(0)) // 2)
    assert first == second, done.stderr[-2000:]
    assert first[0] == 0
    assert longest == [3, 5], "each prompt's own cap"


def test_two_ranks_zero3_untied(tiny, tmp_path):
    """Two ranks, everything sharded: the start-up check compares every rank's sampler with the gathered policy. With
    --offload idle, whose states have nowhere else to go on a CPU, and --log_comms."""
    model = maker.make_model(tmp_path / "untied", tied=False)
    launch(tmp_path / "run", ranks=2, **tiny | {"model": str(model)}, zero_stage=3, max_steps=2, log_ratio="true",
           offload="idle", log_comms="true")
    metrics = jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 2
    assert all(m[f"communication_seconds_{k}"] > 0 for m in metrics for k in ("critic", "policy"))
    assert all(m["communication_gb"] > 0 and m["offload_gb"] == 0 for m in metrics)
    assert all(abs(m["ratio"] - 1) < 1e-4 for m in metrics), "after a sync the sampler must hold the trainer's weights"
    assert len(jsonl(tmp_path / "run" / "samples.jsonl")) == 32, "every rank's samples, once"
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")


@pytest.mark.slow
def test_tensor_parallel_sampler(tiny, whole, tmp_path):
    """Two ranks share an engine: the samples of two engines, each dealt to the trainer once; synced under ZeRO 3."""
    run, same = tmp_path / "run", {"zero_stage": 3, "max_steps": 2, "log_ratio": "true"}
    for rank in (0, 1):  # as every run leaves it that has shared an engine
        Path(f"/dev/shm/-tp:0-[0-1]-cpushm_{rank}").touch()
    launch(run, ranks=2, **tiny | same | {"tensor_parallel": 2})
    ours, theirs = (jsonl(folder / "samples.jsonl") for folder in (run, whole(ranks=2, **same)))
    one, two = ([(s["problem"], s["index"], s["response"]) for s in samples[:16]] for samples in (ours, theirs))
    assert one == two
    assert len(ours) == 32, "not twice"
    assert all(abs(m["ratio"] - 1) < 1e-4 for m in jsonl(run / "metrics.jsonl"))


def test_fused_values(one_rank, tiny, tmp_path):
    """--fuse_values: from before the step that learns from the same samples; with one step, the separate values."""
    launch(tmp_path / "run", **tiny | {"fuse_values": "true", "critic_update_steps": 1, "max_steps": 1})
    fused, plain = (jsonl(run / "metrics.jsonl")[0] for run in (tmp_path / "run", one_rank[0]))
    assert fused["critic_values"] == pytest.approx(plain["critic_values"], rel=1e-4)
    assert fused["policy_grad_norm"] == pytest.approx(plain["policy_grad_norm"], rel=1e-4)
    refused = {"fuse_values": "true", "lambd": 0.95}
    argv = [str(x) for name, value in (SMALL | tiny | refused).items() for x in (f"--{name}", value)]
    with pytest.raises(check.ConfigError, match="--fuse_values"):
        check.check_config(train.parse_flags(argv), world=1)


def test_eval_only(one_rank, tiny, tmp_path):
    """The same code path as training's: the numbers of a training run at step 0. No training run is touched, also not
    one that was killed before its first checkpoint."""
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(check.ConfigError, match="holds a training run"):
        train.evaluate_only(None, {}, None, None, tmp_path / "killed")
    assert (tmp_path / "killed" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "eval.jsonl").write_text('{"step": 0, "set": "of an evaluation before"}\n')
    two = [tiny["eval_data"], tiny["data"]]
    done = launch(tmp_path / "eval", **tiny | {"eval_only": "true", "eval_n": 2, "eval_data": two})
    assert "pass@2" in done.stdout
    result = json.loads((tmp_path / "eval" / "result.json").read_text())
    assert [line["set"] for line in result["sets"]] == ["eval", "train"], "a second evaluation replaces the first"
    assert {"accuracy", "stderr", "pass@1", "pass@2", "length", "truncated"} <= set(result["sets"][0])
    assert result["config"]["temperature"] == 1.0
    assert "torch" in result["versions"]
    assert len(jsonl(tmp_path / "eval" / "eval_samples.jsonl")) == (8 + 40) * 2
    assert jsonl(one_rank[0] / "eval.jsonl")[0] == result["sets"][0]


@pytest.mark.skipif(not DATA.exists(), reason="real problems are not here")
@pytest.mark.parametrize("estimator", ["gae", pytest.param("grpo", marks=pytest.mark.slow)])
def test_real_problems_orz_template(tmp_path, estimator):
    model = maker.make_model(tmp_path / "model", text_tokenizer=True, max_position_embeddings=4096)
    launch(tmp_path / "run", model=model, data=DATA / "gsm8k_train.jsonl", eval_data=DATA / "aime2024.json",
           template="orz", stop=["User:", "Human:", "Assistant:", "</answer>"], max_steps=2, estimator=estimator,
           prompt_max_len=1024, generate_max_len=64, max_len=2048, packing_max_len=2048, micro_train_batch_size=1,
           kv_cache_gb=0.5, log_ratio="true", actor_learning_rate=1e-2, num_warmup_steps=1)
    off = [abs(m.get("ratio", 1.0) - 1) for m in jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert max(off) < 1e-3, "the template is a prefix of every prompt: keys of the old weights were used again"
    samples = jsonl(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 32
    assert all(s["length"] <= 64 for s in samples)
    assert len(jsonl(tmp_path / "run" / "eval_samples.jsonl")) == 2 * 30


# Bad input: one line that says what, where and what to do; exit code 2.

def test_models_that_cannot_be_used_are_refused(tmp_path):
    """Each before a weight is read: no causal LM, a head with a bias, a window over the keys."""
    from transformers import GPT2Config, MistralConfig, PhiConfig, T5Config

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    for config, words in ((T5Config(), "T5Config"), (PhiConfig(**sizes), "head has a bias"),
                          (MistralConfig(**sizes, sliding_window=8), "sliding_window=8")):
        config.save_pretrained(tmp_path)
        with pytest.raises(check.ConfigError, match=words):
            check.read_config(train.Config(model=str(tmp_path)))
    GPT2Config(n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    assert check.read_config(train.Config(model=str(tmp_path))).model_type == "gpt2"


def test_stale_lock_of_a_killed_compilation_is_taken_away(tmp_path):
    """torch waits on it for ever, and silently."""
    shutil.copytree(os.environ["TORCH_EXTENSIONS_DIR"], tmp_path / "own",  # other tests start runs meanwhile
                    ignore=shutil.ignore_patterns("lock"))
    lock = tmp_path / "own" / "deepspeed_shm_comm" / "lock"
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); import rollout; rollout.start_distributed(); "
            "from tools import check; check.compile_op(); import os; os._exit(0)")
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    os.utime(lock, (1, 1))  # not of a compilation that is under way: that one must be left alone
    subprocess.run([sys.executable, "-c", code], timeout=250, check=True, capture_output=True,
                   env=clean_environment() | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "own")})
    assert not lock.exists()


def test_half_of_a_launcher_s_variables_is_one_line(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here"})
    with pytest.raises(rollout.SamplerError, match="LOCAL_RANK, MASTER_PORT"):
        rollout.start_distributed()
    assert check.is_first(None), "else it would be said by nobody"
    os.environ["LOCAL_RANK"] = "1"
    assert not check.is_first(None)


def run_directly(**flags):
    argv = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    command = [sys.executable, str(ROOT / "train.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=200)


@pytest.mark.parametrize("flags, words", [
    ({"estimator": "grpo", "n_samples_per_prompt": 1}, ["--n_samples_per_prompt", "at least 2"]),
    ({"estimator": "rloo", "n_samples_per_prompt": 1}, ["--n_samples_per_prompt", "at least 2"]),
    ({"estimator": "ppo"}, ["--estimator", "gae"]),
    ({"policy_update_steps": 2}, ["--policy_update_steps", "ratio"]),
    ({"bf16": "true", "zero_stage": 1}, ["--bf16", "stage 2"]),
    ({"prompt_max_len": 64}, ["--prompt_max_len", "--max_len"]),
    ({"packing_max_len": 32}, ["--packing_max_len", "--max_len"]),
    ({"zero_stage": 4}, ["--zero_stage"]),
    ({"temperature": 0}, ["--temperature"]),
    ({"temperature": 2.5}, ["--temperature", "2"]),
    ({"critic_update_steps": 99}, ["--critic_update_steps", "16"]),
    ({"rollout_batch_size": 3}, ["--rollout_batch_size", "multiple of 2"]),
    ({"tensor_parallel": 3}, ["--tensor_parallel 3", "2 ranks"]),
    ({"first_stage": 4}, ["--first_stage 4", "--n_samples_per_prompt 4"]),
    ({"first_stage": 1, "estimator": "grpo"}, ["--first_stage 1", "not 1 with grpo"]),
    ({"tis_cap": 0.5}, ["--tis_cap 0.5", "at least 1"]),
    ({"tis_cap": 2.0, "top_p": 0.9}, ["--top_p 0.9", "--tis_cap", "choose 1"]),
    ({"log_ratio": "true", "top_p": 0.9}, ["--top_p 0.9", "--log_ratio", "choose 1"]),
    ({"overlong": "keep"}, ["--overlong keep", "zero or drop"]),
    ({"log_with": "paper"}, ["--log_with paper", "wandb"]),
    ({"offload": "all"}, ["--offload all", "idle"]),
    ({"offload": "idle", "zero_stage": 2}, ["--offload idle", "--zero_stage 3"]),
    ({"tensor_parallel": 0}, ["--tensor_parallel 0", "at least 1"]),
    ({"keep_last": -1}, ["--keep_last -1", "at least 0"]),
    ({"max_steps": -1}, ["--max_steps -1", "at least 0"]),
    ({"gamma": "nan"}, ["--gamma nan", "a number"]),
    ({"kv_cache_gb": "inf"}, ["--kv_cache_gb inf", "a number"]),
    ({"seed": 10**20}, ["--seed", "a number"]),
    ({"top_p": 0}, ["--top_p 0", "above 0"]),
    ({"gpu_memory_utilization": 1.5}, ["--gpu_memory_utilization 1.5", "up to 1"]),
    ({"attention": "magic"}, ["--attention magic", "sdpa"]),
    pytest.param({"log_with": "wandb"}, ["--log_with wandb", "pip install"],
                 marks=pytest.mark.skipif(find_spec("wandb") is not None, reason="here it is installed")),
    ({"reward": "essay"}, ["--reward essay", "math or code"]),
    ({"partial_reward": "true"}, ["--partial_reward", "--reward code"]),
    ({"data": None}, ["--data", "at least one file"]),
    ({"eval_only": "true", "eval_data": None}, ["--eval_only", "--eval_data"]),
    pytest.param({"rollout_quantization": "fp8"}, ["--rollout_quantization fp8", "GPU"],
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="here it may work")),
], ids=lambda v: " ".join(map(str, v)) if isinstance(v, dict) else "")
def test_bad_settings_are_refused(tiny, flags, words):
    given = {name: value for name, value in (SMALL | tiny | flags).items() if value is not None}
    argv = [str(x) for name, value in given.items() for x in (f"--{name}", value)]
    with pytest.raises(check.ConfigError) as error:
        check.check_config(train.parse_flags(argv), world=2)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_a_folder_with_the_demo_of_another_seed_is_refused(tmp_path):
    """Before its base model is made again: what is trained in the folder would stand beside another run's base."""
    cfg = train.parse_flags(["--run_dir", str(tmp_path), "--seed", "1"])
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "recipe.json").write_text('{"seed": 42}')
    check.check_config(cfg, 1)
    (tmp_path / "step_000005").mkdir()
    with pytest.raises(check.ConfigError, match="demo of --seed 42, not 1; choose another folder"):
        check.check_config(cfg, 1)
    check.check_config(dataclasses.replace(cfg, seed=42), 1)
    check.check_config(dataclasses.replace(cfg, resume="none"), 1)


def test_a_changed_file_shows_in_what_made_the_run(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # of a hook that runs the tests
        monkeypatch.delenv(name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-C", str(tmp_path)]
    (tmp_path / "check.py").write_text("")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(check, "__file__", str(tmp_path / "check.py"))
    assert re.fullmatch("[0-9a-f]{40}", check.versions()["git_commit"])
    (tmp_path / "check.py").write_bytes(b"\xe4")
    assert re.fullmatch("[0-9a-f]{40}, changed", check.versions()["git_commit"])


def test_unknown_flag_names_the_nearest():
    with pytest.raises(check.ConfigError, match="did you mean --actor_learning_rate"):
        train.parse_flags(["--actor_learningrate", "1"])


def test_malformed_value_is_one_line():
    with pytest.raises(check.ConfigError, match="seed"):
        train.parse_flags(["--seed", "many"])


def test_flags_win_over_demo_and_debug():
    cfg = train.parse_flags(["--debug", "--n_samples_per_prompt", "5"])
    assert (cfg.n_samples_per_prompt, cfg.rollout_batch_size, cfg.critic_update_steps, cfg.max_len) == (5, 16, 1, 64)
    cfg = train.parse_flags(["--model", "x", "--data", "y"])
    assert (cfg.rollout_batch_size, cfg.n_samples_per_prompt, cfg.critic_update_steps) == (128, 64, 12)


def broken_model(tmp_path, tiny, **changes) -> Path:
    folder = maker.make_model(tmp_path / "broken")
    for name, edit in changes.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    return folder


def test_bad_models_are_refused_before_weights(tiny, tmp_path):
    argv = [str(x) for name, value in (SMALL | tiny).items() for x in (f"--{name}", value)]
    cfg = train.parse_flags(argv)
    with pytest.raises(check.ConfigError, match="--model .*nowhere"):
        check.read_tokenizer(dataclasses.replace(cfg, model=str(tmp_path / "nowhere")))
    with pytest.raises(check.ConfigError, match="--max_len 5000.*256"):
        check.read_tokenizer(dataclasses.replace(cfg, max_len=5000))
    no_eos = broken_model(tmp_path, tiny, tokenizer_config=lambda c: {**c, "eos_token": None})
    with pytest.raises(check.ConfigError, match="eos"):
        check.read_tokenizer(dataclasses.replace(cfg, model=str(no_eos)))
    window = broken_model(tmp_path, tiny, config=lambda c: {**c, "layer_types": ["sliding_attention"] * 2})
    with pytest.raises(check.ConfigError, match="sliding"):
        check.read_tokenizer(dataclasses.replace(cfg, model=str(window)))


def test_exit_code_2_and_one_line(tiny, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n{"question": "no answer"}\n')
    done = run_directly(**SMALL | tiny | {"data": tmp_path / "bad.jsonl", "run_dir": tmp_path / "run"})
    assert done.returncode == 2
    line = [x for x in done.stderr.splitlines() if x.startswith("error:")]
    assert len(line) == 1
    assert "bad.jsonl" in line[0]
    assert "2" in line[0]


@pytest.mark.parametrize("error, words, code", [
    (check.ConfigError("--x: no"), "--x: no", 2),
    (PermissionError(13, "Permission denied", "/here"), "/here", 2),
    (RuntimeError("[gloo] Connection\nclosed by peer [10.0.0.2]:99"), "lost contact with another rank", 1),
    (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), "lost contact", 1),
    (RuntimeError("Watchdog caught collective operation timeout: ALLREDUCE timed out"), "lost contact", 1),
    (dist.DistNetworkError("The server socket has failed to bind: EADDRINUSE"), "MASTER_PORT", 2),
    (RuntimeError("Error building extension 'deepspeed_shm_comm': ninja: interrupted"), "make install", 2),
    (FloatingPointError("step 3, Policy: loss or gradient not finite"), "step 3, Policy", 1),
    (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "phase sync: out of GPU memory", 2),
    (RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:1"), "lower --gpu_memory_utilization", 2),
])
def test_errors_are_one_line_with_an_exit_code(error, words, code):
    line, got = check.explain(error, "sync")
    assert got == code
    assert words in line
    assert "\n" not in line


def test_one_line_for_a_stopped_evaluation_and_for_graders_that_cannot_start():
    assert check.explain(Stopped(), "rollout") == ("stopped; an evaluation has nothing to save", 1)
    for error in (reward.RewardError("no worker"), code_data.RewardError("no sandbox")):
        assert check.explain(error, "loading") == (str(error), 2)


def test_bugs_are_not_explained_away():
    with pytest.raises(KeyError):
        check.explain(KeyError("a bug"), "sync")


def test_too_small_kv_cache_is_exit_code_2(tiny, tmp_path):
    done = run_directly(**SMALL | tiny | {"kv_cache_gb": 0.00001, "run_dir": tmp_path / "run"})
    assert done.returncode == 2, done.stderr[-3000:]
    assert "--kv_cache_gb" in done.stderr
